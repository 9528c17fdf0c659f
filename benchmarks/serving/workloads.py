"""What is asked of the server: sessions of turns, made from a seed. The same spec gives the same tokens everywhere.

Threading: pure functions and frozen values.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.serving.model import VOCABULARY

Tokens = tuple[int, ...]
INPUT_PER_OUTPUT = 100
"""Of an agent, over all its requests, and ``AGENT_STEPS`` are its tool calls per task: averages of Manus (Ji, "Context
Engineering for AI Agents: Lessons from Building Manus", 2025-07-18, manus.im/blog), where tasks take about 50 calls."""
OBSERVATION_SPREAD = 1.0
"""Sigma of the log-normal lengths of what tools return. Assumed: a few are long, most are short."""


@dataclass(frozen=True)
class Turn:
    """One request: what is new in its prompt, and how long the answer is."""

    new: Tokens
    answer_tokens: int


@dataclass(frozen=True)
class Session:
    """Turns that follow each other. Each prompt begins with ``prefix``."""

    prefix: Tokens
    turns: tuple[Turn, ...]
    keeps_history: bool = True
    """Whether prompts and answers of earlier turns stand between prefix and what is new."""
    is_prefix_known: bool = False
    """Whether an earlier session of the workload has the same prefix."""

    def prompt(self, turn: int, answers: Sequence[Sequence[int]]) -> list[int]:
        """The prompt of a turn. ``answers``: of the turns before it."""
        tokens = list(self.prefix)
        if self.keeps_history:
            for earlier, answer in zip(self.turns[:turn], answers, strict=True):
                tokens += (*earlier.new, *answer)
        return tokens + list(self.turns[turn].new)

    def repeated_tokens(self, turn: int) -> int:
        """How much of a turn's prompt a cache without limits has seen: the most that it can hit."""
        if turn == 0:
            return len(self.prefix) if self.is_prefix_known else 0
        history = self.turns[:turn] if self.keeps_history else ()
        return len(self.prefix) + sum(len(earlier.new) + earlier.answer_tokens for earlier in history)


@dataclass(frozen=True)
class Spec:
    """A workload in numbers. Each kind reads of it what its own text says."""

    kind: str = "sessions"
    sessions: int = 6
    turns: int = 3
    tokens: int = 1000
    answer_tokens: int = 100
    seed: int = 0


def text(source: random.Random, tokens: int) -> Tokens:
    """Random tokens, never the ones of an answer or an end."""
    return tuple(source.choices(range(2, VOCABULARY), k=tokens))


def sessions(spec: Spec, source: random.Random) -> list[Session]:
    """Conversations: every turn adds ``tokens`` to what was said before, and is answered with ``answer_tokens``."""
    return [
        Session((), tuple(Turn(text(source, spec.tokens), spec.answer_tokens) for _ in range(spec.turns)))
        for _ in range(spec.sessions)
    ]


def documents(spec: Spec, source: random.Random) -> list[Session]:
    """``sessions`` documents of ``turns`` times ``tokens``, each asked about ``turns`` times, by 50 tokens."""
    return [
        Session(
            text(source, spec.tokens * spec.turns),
            tuple(Turn(text(source, 50), spec.answer_tokens) for _ in range(spec.turns)),
            keeps_history=False,
        )
        for _ in range(spec.sessions)
    ]


def agents(spec: Spec, source: random.Random) -> list[Session]:
    """Agents with one system prompt of ``tokens``, each of ``turns`` calls of tools. What a tool returns is log-normal
    with mean ``tokens`` / 2; an answer is as long as makes ``INPUT_PER_OUTPUT``, so ``answer_tokens`` is not read.
    """
    prefix = text(source, spec.tokens)
    made = []
    for number in range(spec.sessions):
        mean = spec.tokens / 2
        lengths = [
            max(
                8,
                min(
                    4 * spec.tokens,
                    round(mean * source.lognormvariate(-(OBSERVATION_SPREAD**2) / 2, OBSERVATION_SPREAD)),
                ),
            )
            for _ in range(spec.turns)
        ]
        answer = agent_answer_tokens(spec.tokens, lengths)
        turns = tuple(Turn(text(source, length), answer) for length in lengths)
        made.append(Session(prefix, turns, is_prefix_known=number > 0))
    return made


def agent_answer_tokens(prefix_tokens: int, new_tokens: Sequence[int]) -> int:
    """How long each answer of an agent is, so that its prompts together are ``INPUT_PER_OUTPUT`` times its answers."""
    turns = len(new_tokens)
    prompts = sum(prefix_tokens + sum(new_tokens[: turn + 1]) for turn in range(turns))
    return max(1, round(prompts / max(1.0, INPUT_PER_OUTPUT * turns - turns * (turns - 1) / 2)))


def system(spec: Spec, source: random.Random) -> list[Session]:
    """Single requests: ``turns`` for each of ``sessions`` system prompts of ``tokens``, with a tenth of their own."""
    prefixes = [text(source, spec.tokens) for _ in range(spec.sessions)]
    own = max(1, spec.tokens // 10)
    return [
        Session(prefix, (Turn(text(source, own), spec.answer_tokens),), is_prefix_known=again > 0)
        for again in range(spec.turns)
        for prefix in prefixes
    ]


def cold(spec: Spec, source: random.Random) -> list[Session]:
    """``sessions`` × ``turns`` single requests of ``tokens`` that have nothing in common: no hit, only overhead."""
    return [
        Session((), (Turn(text(source, spec.tokens), spec.answer_tokens),)) for _ in range(spec.sessions * spec.turns)
    ]


KINDS: dict[str, Callable[[Spec, random.Random], list[Session]]] = {
    "sessions": sessions,
    "documents": documents,
    "agents": agents,
    "system": system,
    "cold": cold,
}


def make(spec: Spec) -> list[Session]:
    """The workload of a spec."""
    return KINDS[spec.kind](spec, random.Random(f"{spec.kind} {spec.seed}"))


def unique_tokens(workload: Sequence[Session]) -> int:
    """Tokens whose KV there is in all, answers included: the working set."""
    total, known = 0, set()
    for session in workload:
        if session.prefix not in known:
            known.add(session.prefix)
            total += len(session.prefix)
        total += sum(len(turn.new) + turn.answer_tokens for turn in session.turns)
    return total


def longest_tokens(workload: Sequence[Session]) -> int:
    """The longest prompt with its answer."""
    longest = 0
    for session in workload:
        last = len(session.turns) - 1
        history = session.turns[:-1] if session.keeps_history else ()
        tokens = len(session.prefix) + sum(len(turn.new) + turn.answer_tokens for turn in history)
        longest = max(longest, tokens + len(session.turns[last].new) + session.turns[last].answer_tokens)
    return longest


def poisson(rate_per_s: float, count: int, seed: int) -> list[float]:
    """When sessions arrive, in seconds from the beginning: a Poisson process. ValueError: a rate of zero or less."""
    if rate_per_s <= 0:
        raise ValueError(f"sessions arrive at a rate above zero, not {rate_per_s}")
    source, now, arrivals = random.Random(f"arrivals {seed}"), 0.0, []
    for _ in range(count):
        now += source.expovariate(rate_per_s)
        arrivals.append(now)
    return arrivals
