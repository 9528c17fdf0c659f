"""The requests to the server: sessions of turns, made from a seed. The same spec gives the same tokens everywhere.

Threading: pure functions and frozen values.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.serving.model import VOCABULARY

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Turn:
    """One request: what is new in its prompt, how long the answer is, and how long the user thinks before it."""

    new: Tokens
    answer_tokens: int
    think_s: float


@dataclass(frozen=True)
class Session:
    """Turns that follow each other. A prompt is the document and the new tokens; without a document, the history and
    the new tokens.
    """

    document: Tokens
    turns: tuple[Turn, ...]

    def prompt(self, turn: int, answers: Sequence[Sequence[int]]) -> list[int]:
        """Return the prompt of a turn. ``answers``: of the turns before it."""
        tokens = list(self.document)
        if not self.document:
            for earlier, answer in zip(self.turns[:turn], answers, strict=True):
                tokens += (*earlier.new, *answer)
        return tokens + list(self.turns[turn].new)

    def repeated_tokens(self, turn: int) -> int:
        """Return how many tokens of a turn's prompt an earlier turn has had, its answer included."""
        if self.document:
            return len(self.document) if turn else 0
        return sum(len(earlier.new) + earlier.answer_tokens for earlier in self.turns[:turn])


@dataclass(frozen=True)
class Spec:
    """A workload's numbers. Each session begins within ``think_s``; later turns come 0 to 2 × ``think_s`` after the
    answer before them. Answers have 0.5 to 1.5 × ``answer_tokens``.
    """

    sessions: int = 64
    turns: int = 3
    tokens: int = 1000
    """New ones of each turn."""
    document_tokens: int = 0
    """0: conversations. Otherwise each session asks about a document of its own."""
    answer_tokens: int = 24
    think_s: float = 6.0
    seed: int = 0


def text(source: random.Random, tokens: int) -> Tokens:
    """Return random tokens, without the sleeping model's answer token and the end token."""
    return tuple(source.choices(range(2, VOCABULARY), k=tokens))


def make(spec: Spec) -> list[Session]:
    """Return the workload of a spec."""
    source = random.Random(spec.seed)

    def turn(number: int) -> Turn:
        answer_tokens = round(source.uniform(0.5, 1.5) * spec.answer_tokens)
        return Turn(text(source, spec.tokens), answer_tokens, source.uniform(0, 2 if number else 1) * spec.think_s)

    return [
        Session(text(source, spec.document_tokens), tuple(map(turn, range(spec.turns)))) for _ in range(spec.sessions)
    ]


def unique_tokens(workload: Sequence[Session]) -> int:
    """Return the working set: how many tokens have distinct KV, answers included."""
    turns = [turn for session in workload for turn in session.turns]
    return sum(len(session.document) for session in workload) + sum(
        len(turn.new) + turn.answer_tokens for turn in turns
    )


def longest_tokens(workload: Sequence[Session]) -> int:
    """Return the length of the longest prompt and its answer, in tokens."""
    return max(
        session.repeated_tokens(number) + len(session.document) * (not number) + len(turn.new) + turn.answer_tokens
        for session in workload
        for number, turn in enumerate(session.turns)
    )
