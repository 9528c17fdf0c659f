"""The requests to the server: sessions of turns, made from a seed. The same spec gives the same tokens everywhere.

Threading: pure functions and frozen values.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.serving.model import VOCABULARY

Tokens = tuple[int, ...]


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
    """Whether a prompt has the earlier turns between ``prefix`` and its ``new``."""
    is_prefix_known: bool = False
    """Whether an earlier session of the workload has the same prefix."""

    def prompt(self, turn: int, answers: Sequence[Sequence[int]]) -> list[int]:
        """Return the prompt of a turn. ``answers``: of the turns before it."""
        tokens = list(self.prefix)
        if self.keeps_history:
            for earlier, answer in zip(self.turns[:turn], answers, strict=True):
                tokens += (*earlier.new, *answer)
        return tokens + list(self.turns[turn].new)

    def repeated_tokens(self, turn: int) -> int:
        """Return how many tokens of a turn's prompt an unlimited cache holds: the most that can hit."""
        if turn == 0:
            return len(self.prefix) if self.is_prefix_known else 0
        history = self.turns[:turn] if self.keeps_history else ()
        return len(self.prefix) + sum(len(earlier.new) + earlier.answer_tokens for earlier in history)


@dataclass(frozen=True)
class Spec:
    """A workload's numbers; the function in ``KINDS`` says what they mean."""

    kind: str = "sessions"
    sessions: int = 6
    turns: int = 3
    tokens: int = 1000
    answer_tokens: int = 100
    seed: int = 0


def text(source: random.Random, tokens: int) -> Tokens:
    """Return random tokens, without the sleeping model's answer token and the end token."""
    return tuple(source.choices(range(2, VOCABULARY), k=tokens))


def sessions(spec: Spec, source: random.Random) -> list[Session]:
    """Conversations: each turn adds ``tokens`` to the history, and gets an answer of ``answer_tokens``."""
    return [
        Session((), tuple(Turn(text(source, spec.tokens), spec.answer_tokens) for _ in range(spec.turns)))
        for _ in range(spec.sessions)
    ]


def documents(spec: Spec, source: random.Random) -> list[Session]:
    """``sessions`` documents of ``turns`` × ``tokens``, each with ``turns`` questions of 50 tokens."""
    return [
        Session(
            text(source, spec.tokens * spec.turns),
            tuple(Turn(text(source, 50), spec.answer_tokens) for _ in range(spec.turns)),
            keeps_history=False,
        )
        for _ in range(spec.sessions)
    ]


def system(spec: Spec, source: random.Random) -> list[Session]:
    """Single requests: ``turns`` for each of ``sessions`` system prompts of ``tokens``; each adds a tenth of that."""
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
    "system": system,
    "cold": cold,
}


def make(spec: Spec) -> list[Session]:
    """Return the workload of a spec."""
    return KINDS[spec.kind](spec, random.Random(f"{spec.kind} {spec.seed}"))


def unique_tokens(workload: Sequence[Session]) -> int:
    """Return the working set: how many tokens have distinct KV, answers included."""
    prefixes = {session.prefix for session in workload}
    turns = [turn for session in workload for turn in session.turns]
    return sum(map(len, prefixes)) + sum(len(turn.new) + turn.answer_tokens for turn in turns)


def longest_tokens(workload: Sequence[Session]) -> int:
    """Return the length of the longest prompt and its answer, in tokens."""
    return max(
        len(session.prefix)
        + sum(len(turn.new) + turn.answer_tokens for turn in session.turns[0 if session.keeps_history else -1 :])
        for session in workload
    )
