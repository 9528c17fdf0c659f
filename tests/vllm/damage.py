"""Helpers for tests that damage must never show in an answer: reference answers, and what engines log.

One prefill step is one chunk here. So wherever the good prefix of a damaged prompt ends, the rest is computed in the
same steps as without a cache, and answers can be compared bit by bit.

Threading: one test at a time; ``side_by_side`` runs parts of it on threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from examples.demo.model import TINY, random_prompts
from nixl_offload.chunk.header import HEADER_BYTES
from tests.vllm.harness import CHUNK_TOKENS, TAIL_TOKENS, Answer, Engine, ModelShape, assert_same
from tests.vllm.media import LOOK_EACH_TIME_S, Medium


def token_bytes(shape: ModelShape = TINY) -> int:
    """Return the bytes of KV per token, of a model with one KV cache group."""
    return 2 * shape.layers * shape.kv_heads * shape.head_size * 4


CHUNK_BYTES: Final = CHUNK_TOKENS * token_bytes()
SHARD_BYTES: Final = HEADER_BYTES + CHUNK_BYTES
PROMPT_CHUNKS: Final = 4
FULL_TOKENS: Final = PROMPT_CHUNKS * CHUNK_TOKENS
ENGINE_OPTIONS: Final[dict[str, Any]] = {"max_num_batched_tokens": CHUNK_TOKENS}
RECOVERY_DEADLINE_S: Final = 60.0
"""Time until everything is stored and found again. A breaker pauses for 30 s at most."""

Prompt = list[int]


def chunk_prompts(count: int, *, seed: int) -> list[Prompt]:
    """Return random prompts of ``PROMPT_CHUNKS`` chunks and a short tail."""
    return random_prompts(TINY, [FULL_TOKENS + TAIL_TOKENS] * count, seed=seed)


class Reference:
    """A running vLLM without a connector; each prompt is computed once, from nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[tuple[int, ...], Answer] = {}

    def answers(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Return the right answers to the prompts."""
        for prompt in prompts:
            if tuple(prompt) not in self._known:
                assert self._engine.reset_prefix_cache()
                [self._known[tuple(prompt)]] = self._engine.generate([prompt])
        return [self._known[tuple(prompt)] for prompt in prompts]

    def check(self, engine: Engine, prompts: list[Prompt]) -> list[Answer]:
        """Let ``engine`` answer with an empty prefix cache; assert that tokens and logprobs are right."""
        assert engine.reset_prefix_cache()
        answers = engine.generate(prompts)
        assert_same(answers, self.answers(prompts))
        return answers

    def until_loaded(self, engine: Engine, prompts: list[Prompt]) -> None:
        """Ask until all is loaded. Every answer must be right."""
        until_loaded(engine, prompts, self.answers(prompts))


def loads_refused(engine: Engine) -> int:
    """How often the engine's log says that a load was refused and recomputed."""
    return engine.log.read_text(errors="replace").count("not usable")


def hits(answers: list[Answer]) -> int:
    """Prompt tokens that came from the tier."""
    return sum(answer.external_hit_tokens for answer in answers)


def said(engine: Engine) -> str:
    """Return our package's last lines in the engine's log, for messages of failed assertions."""
    lines = engine.log.read_text(errors="replace").splitlines()
    ours = ("tier", "not usable", "chunks:", "moved by", "Traceback", "Error")
    return "\n".join(["", *[line for line in lines if any(word in line for word in ours)][-25:]])


def until(
    holds: Callable[[], Any], what: str, engine: Engine | None = None, *, deadline_s: float = RECOVERY_DEADLINE_S
) -> None:
    """Call ``holds`` until it is true; fail, saying ``what`` did not happen, at the deadline."""
    deadline = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {deadline_s:.0f} s{said(engine) if engine else ''}"
        time.sleep(0.05)


def until_loaded(
    engine: Engine,
    prompts: list[Prompt],
    right: list[Answer],
    agree: Callable[[list[Answer], list[Answer]], None] = assert_same,
) -> None:
    """Ask until every full chunk comes from the tier and nothing is refused. ``agree`` compares each answer."""

    def is_loaded() -> bool:
        refused = loads_refused(engine)
        assert engine.settle()
        assert engine.reset_prefix_cache()
        answers = engine.generate(prompts)
        agree(answers, right)
        assert engine.settle()
        return hits(answers) == FULL_TOKENS * len(prompts) and loads_refused(engine) == refused

    until(is_loaded, "every full chunk is loaded", engine)


def until_stored(engine: Engine, medium: Medium, prompts: list[Prompt], shards: int) -> list[Answer]:
    """Ask until so many shards are stored: a busy machine may drop a store. Returns the first answers."""
    answers: list[list[Answer]] = []

    def are_stored() -> bool:
        assert engine.reset_prefix_cache()
        answers.append(engine.generate(prompts))
        return engine.settle() and len(medium.shards()) >= shards

    until(are_stored, f"{shards} shards are stored", engine)
    return answers[0]


def let_beliefs_lapse() -> None:
    """Wait until an engine with the ``lookup`` of ``media.LOOKING`` looks again."""
    time.sleep(LOOK_EACH_TIME_S + 0.05)


def side_by_side(*works: Callable[[], object]) -> None:
    """Run several works at once, on a thread each. When all are over, raise the first error.

    Most of their time is waiting for deadlines and pauses. Works share no engine; they may share a ``Reference`` that
    knows all answers.
    """
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()
