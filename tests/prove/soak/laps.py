"""The soak's load: laps of requests that are alike but for their salts, and what they are to be answered with.

A lap has sessions of several turns with shared system prompts, some answered twice at once (``n``), sessions of earlier
laps that come back, prompts that nobody has seen and that are given up, and a reset while requests run. Each lap has a
salt of its own: so its prompts are new to every cache, while what is right was computed once.

Threading: plain functions and records.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from examples.demo.engine import Engine

VARIANTS: Final = 3
SESSIONS: Final = 5
TURNS: Final = 3
ANSWER_TOKENS: Final = 6
SYSTEM_TOKENS: Final = 512
TURN_TOKENS: Final = (150, 350)
BACK: Final = (1, 2, 5)
"""Sessions come back so many laps later: out of the slab, the directory, the bucket."""
AT_A_TIME: Final = 4
LEAD: Final = 1e-2
"""Where a token is less ahead of the next one than this, rounding may choose another; what follows is not compared."""
CLOSE: Final = 2e-3
"""Rounding moves logprobs by 1e-5, a damaged block by 0.1 and more."""

Prompt = list[int]


@dataclass
class Session:
    """Prompts of its turns, each with the answer before it, and the answers of a vLLM without a connector."""

    prompts: list[Prompt]
    right: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Variant:
    """A lap before it has a salt."""

    sessions: list[Session]
    unseen: list[Prompt]
    seed: str
    """Of what each of its laps draws, all alike."""


def make(seed: int, vocabulary: int, reference: Engine) -> list[Variant]:
    """Draw the variants and have ``reference`` answer every turn."""
    source = random.Random(seed)

    def text(length: int) -> Prompt:
        return [source.randrange(2, vocabulary) for _ in range(length)]

    made = []
    for number in range(VARIANTS):
        systems = [text(SYSTEM_TOKENS) for _ in range(2)]
        sessions = [Session([systems[at % 2] + text(source.randint(*TURN_TOKENS))]) for at in range(SESSIONS)]
        for turn in range(TURNS):
            asked = [_request(session.prompts[turn]) for session in sessions]
            outputs = reference.call("lap", requests=asked, at_a_time=1, salt="", resets=[])["outputs"]
            for session, (told,) in zip(sessions, outputs, strict=True):
                session.right.append(told)
                session.prompts.append(session.prompts[turn] + told["tokens"] + text(source.randint(*TURN_TOKENS)))
        unseen = [text(800) for _ in range(2)]
        made.append(Variant(sessions, unseen, f"{seed} {number}"))
    return made


@dataclass
class Lap:
    """Requests of a lap, and of each what it is to be answered with; None: it is given up."""

    salt: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    right: list[dict[str, Any] | None] = field(default_factory=list)
    resets: list[int] = field(default_factory=list)

    def add(self, right: dict[str, Any] | None, prompt: Prompt, **fields: Any) -> int:
        """Take a request; return its number."""
        self.requests.append(_request(prompt, **fields))
        self.right.append(right)
        return len(self.requests) - 1

    def judge(self, outputs: list[list[dict[str, Any]]]) -> list[str]:
        """Return what is wrong, a sentence each."""
        return [
            f"lap {self.salt}, request {number}, output {at}: {why}"
            for number, (right, told) in enumerate(zip(self.right, outputs, strict=True))
            if right is not None
            for at, one in enumerate(told or [{}])
            if (why := _difference(one, right))
        ]

    @property
    def compared(self) -> int:
        """How many answers ``judge`` looks at."""
        return sum(asked["n"] for asked, right in zip(self.requests, self.right, strict=True) if right is not None)


def lap(variants: list[Variant], number: int, salts: list[str]) -> Lap:
    """Return the lap of a number. ``salts``: of the laps before it and its own, by number."""
    variant = variants[number % VARIANTS]
    source = random.Random(variant.seed)
    made = Lap(salts[number])
    last: dict[int, int] = {}
    for turn in range(TURNS):
        for at, session in enumerate(variant.sessions):
            after = {"after": last[at]} if at in last else {}
            n = 2 if source.random() < 0.2 else 1
            last[at] = made.add(session.right[turn], session.prompts[turn], n=n, **after)
        for back in islice(BACK, turn, turn + 1):
            before = number - back
            if before < 0:
                continue
            for session in variants[before % VARIANTS].sessions[:2]:
                made.add(session.right[-1], session.prompts[TURNS - 1], salt=salts[before])
            given_up = variants[before % VARIANTS].sessions[2].prompts[TURNS - 1]
            made.add(None, given_up, salt=salts[before], abort=source.randint(1, 6))
    for prompt in variant.unseen:
        made.add(None, prompt, max_tokens=64, abort=source.randint(1, 8))
    made.resets.append(source.randrange(SESSIONS, len(made.requests)))
    return made


def _request(prompt: Prompt, *, n: int = 1, max_tokens: int = ANSWER_TOKENS, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "n": n, "max_tokens": max_tokens, **fields}


def _difference(told: dict[str, Any], right: dict[str, Any]) -> str:
    if not told:
        return "no answer"
    for at, (token, logprob) in enumerate(zip(told["tokens"], told["logprobs"], strict=True)):
        if right["leads"][at] < LEAD and token != right["tokens"][at]:
            return ""
        if token != right["tokens"][at]:
            return f"token {at} is {token}, not {right['tokens'][at]}"
        if not abs(logprob - right["logprobs"][at]) <= CLOSE:  # NaN is neither
            return f"the logprob of token {at} is {logprob}, not {right['logprobs'][at]}"
    return "" if len(told["tokens"]) == len(right["tokens"]) else f"{len(told['tokens'])} tokens"
