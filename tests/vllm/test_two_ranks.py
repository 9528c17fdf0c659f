"""Proves, over a vLLM with tensor parallelism 2, that a chunk is there only when both ranks have it.

One rank's storage is taken away under the running engine: what it cannot store is dropped on both, requests are
answered as before, nothing dies, and storing resumes once the rank can store again. Then one rank's bytes are damaged:
its failure alone makes both ranks recompute.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.harness import (
    MAX_BATCHED_TOKENS,
    TAIL_TOKENS,
    Answer,
    Engine,
    Workshop,
    assert_same,
    file_tier,
    prompts,
)

PROMPTS = prompts(2, steps=2, seed=71)
LATER = prompts(2, steps=2, seed=72)
FULL_TOKENS = 2 * MAX_BATCHED_TOKENS
RESUME_DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def directory(workshop: Workshop) -> Path:
    """The tier's directory."""
    return workshop.scratch / "kv-ranks"


def _start(workshop: Workshop, directory: Path, *, forked: bool = True) -> Engine:
    """Two ranks, each a process with a slab of its own."""
    return workshop.start_engine(
        connector=file_tier(directory),
        in_process=False,
        forked=forked,
        # Two ranks on a machine with one NUMA node.
        environment={"VLLM_CPU_SIM_MULTI_NUMA": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto"},
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )


@pytest.fixture(scope="module")
def engine(workshop: Workshop, directory: Path) -> Iterator[Engine]:
    """The engine of all tests but the last, which ends it."""
    with _start(workshop, directory) as started:
        yield started


@pytest.fixture(scope="module")
def right(engine: Engine) -> list[Answer]:
    """Answers computed from nothing; afterwards ``PROMPTS`` are stored on both ranks."""
    answers = engine.generate(PROMPTS)
    assert engine.settle()
    return answers


def _slab(directory: Path, rank: int) -> Path:
    (slab,) = directory.glob(f"*/rank-{rank:05d}.slab")
    return slab


def _hits(engine: Engine, asked: list[list[int]]) -> tuple[list[Answer], list[int]]:
    assert engine.reset_prefix_cache()
    answers = engine.generate(asked)
    return answers, [answer.external_hit_tokens for answer in answers]


def _until_stored(engine: Engine, asked: list[list[int]], right: list[Answer]) -> None:
    """Ask until every full chunk is loaded: a busy machine may shed a store. Each answer is right."""
    deadline = time.monotonic() + RESUME_DEADLINE_S
    while True:
        answers, hits = _hits(engine, asked)
        assert engine.settle()
        assert_same(answers, right)
        if hits == [FULL_TOKENS] * len(asked):
            return
        assert time.monotonic() < deadline, f"not stored anew; hits {hits}"
        time.sleep(0.5)  # to ask is to compute


def test_both_ranks_store_and_load(engine: Engine, directory: Path, right: list[Answer]) -> None:
    """Each rank has a slab with bytes of its own, and every full chunk is loaded on both."""
    slabs = [_slab(directory, rank).read_bytes() for rank in (0, 1)]
    assert slabs[0] != slabs[1]
    answers, hits = _hits(engine, PROMPTS)
    assert hits == [FULL_TOKENS] * len(PROMPTS)
    assert_same(answers, right)


def test_a_store_that_fails_on_one_rank(engine: Engine, directory: Path, right: list[Answer]) -> None:
    """While rank 1 cannot store, new chunks are nowhere to be found; afterwards they are stored anew."""
    slab = _slab(directory, 1)
    aside = slab.with_name("aside")
    slab.rename(aside)
    slab.mkdir()
    time.sleep(1.1)  # a rank looks at a slab that works once a second
    first = engine.generate(LATER)
    assert engine.settle()
    answers, hits = _hits(engine, LATER)
    assert hits == [0] * len(LATER), "rank 0 has stored them, rank 1 has not: nobody may load them"
    assert_same(answers, first)

    slab.rmdir()
    aside.rename(slab)
    _until_stored(engine, LATER, first)


def test_a_load_that_fails_on_one_rank(engine: Engine, directory: Path, right: list[Answer]) -> None:
    """Damage on rank 0 alone: both ranks recompute, the answer is the same, and the chunk is stored anew."""
    slab = _slab(directory, 0)
    with slab.open("r+b") as file:
        content = bytearray(file.read())
        for offset in range(4096, len(content), 64 * 1024):
            content[offset + 100] ^= 0xFF
        file.seek(0)
        file.write(content)
    answers, _ = _hits(engine, PROMPTS)
    assert_same(answers, right)
    assert engine.settle()
    _until_stored(engine, PROMPTS, right)
    assert len(PROMPTS[0]) == FULL_TOKENS + TAIL_TOKENS


def test_another_server_finds_what_the_first_has_stored(
    workshop: Workshop, engine: Engine, directory: Path, right: list[Answer]
) -> None:
    """Each rank of the second tells the same of itself as its like in the first, so both have one namespace."""
    namespaces = sorted(path.parent for path in directory.glob("*/index.sqlite"))
    engine.stop()
    with _start(workshop, directory, forked=False) as second:  # as for a user: each process imports for itself
        answers = second.generate(PROMPTS)
        assert [answer.external_hit_tokens for answer in answers] == [FULL_TOKENS] * len(PROMPTS)
        assert_same(answers, right)
    assert sorted(path.parent for path in directory.glob("*/index.sqlite")) == namespaces
    assert len(namespaces) == 1
