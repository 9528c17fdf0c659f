"""Proves, over a vLLM with tensor parallelism 2, that a chunk is there only when both ranks have it.

One rank's storage is taken away under the running engine: chunks that it cannot store are dropped on both ranks,
requests are answered as before, nothing dies, and storing resumes once the rank can store again. Then one rank's bytes
are damaged: its failure alone makes both ranks recompute.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.families.trial import SIMULATED_NODES, TWO_RANKS
from tests.prove.happenings import DAMAGES
from tests.vllm.damage import hits, loads_refused, until
from tests.vllm.harness import MAX_BATCHED_TOKENS, Answer, Engine, Workshop, assert_same, prompts
from tests.vllm.media import Medium, slab

PROMPTS = prompts(2, steps=2, seed=71)
LATER = prompts(2, steps=2, seed=72)
FULL_TOKENS = 2 * MAX_BATCHED_TOKENS


@pytest.fixture(scope="module")
def medium(workshop: Workshop) -> Medium:
    return slab(workshop.scratch / "kv-ranks")


def _start(workshop: Workshop, medium: Medium, *, forked: bool = True) -> Engine:
    """Two ranks, each a process with a slab of its own."""
    return workshop.start_engine(connector=medium.config(), forked=forked, environment=SIMULATED_NODES, **TWO_RANKS)


@pytest.fixture(scope="module")
def engine(workshop: Workshop, medium: Medium) -> Iterator[Engine]:
    """The engine of all tests but the last, which ends it."""
    with _start(workshop, medium) as started:
        yield started


@pytest.fixture(scope="module")
def right(engine: Engine) -> list[Answer]:
    """Answers computed from nothing; afterwards ``PROMPTS`` are stored on both ranks."""
    answers = engine.generate(PROMPTS)
    assert engine.settle()
    return answers


def _ask_anew(engine: Engine, asked: list[list[int]], right: list[Answer]) -> int:
    """Ask without what vLLM remembers; return how many tokens of each prompt were found."""
    assert engine.reset_prefix_cache()
    answers = engine.generate(asked)
    assert_same(answers, right)
    assert engine.settle()
    return hits(answers) // len(asked)


def _until_stored(engine: Engine, asked: list[list[int]], right: list[Answer]) -> None:
    """Ask until every full chunk is loaded: a busy machine may shed a store. Each answer is right."""
    until(lambda: _ask_anew(engine, asked, right) == FULL_TOKENS, "all is stored anew", engine)


def test_both_ranks_store_and_load(engine: Engine, medium: Medium, right: list[Answer]) -> None:
    """Each rank has a slab with bytes of its own, and every full chunk is loaded on both."""
    slabs = [path.read_bytes() for path in medium.namespace().glob("*.slab")]
    assert len(slabs) == 2
    assert slabs[0] != slabs[1]
    assert _ask_anew(engine, PROMPTS, right) == FULL_TOKENS


def test_a_store_that_fails_on_one_rank(engine: Engine, medium: Medium, right: list[Answer]) -> None:
    """While rank 1 cannot store, new chunks are not found on any rank; afterwards they are stored again."""
    slab_of_1 = medium.namespace() / "rank-00001.slab"
    aside = slab_of_1.with_name("aside")
    slab_of_1.rename(aside)
    slab_of_1.mkdir()
    time.sleep(1.1)  # a rank looks at a slab that works once a second
    first = engine.generate(LATER)
    assert engine.settle()
    assert _ask_anew(engine, LATER, first) == 0, "rank 0 has stored them, rank 1 has not: nobody may load them"
    slab_of_1.rmdir()
    aside.rename(slab_of_1)
    _until_stored(engine, LATER, first)


def test_a_load_that_fails_on_one_rank(engine: Engine, medium: Medium, right: list[Answer]) -> None:
    """Damage on rank 0 alone: both ranks recompute, the answer is the same, and the chunk is stored again."""
    for shard in medium.stored(rank=0):
        DAMAGES["flipped"](shard, shard, 0.5)
    refused = loads_refused(engine)
    _ask_anew(engine, PROMPTS, right)
    assert loads_refused(engine) > refused
    _until_stored(engine, PROMPTS, right)


def test_another_server_finds_what_the_first_has_stored(
    workshop: Workshop, engine: Engine, medium: Medium, right: list[Answer]
) -> None:
    """Ranks of both servers report equal geometries, so both servers have one namespace."""
    engine.stop()
    with _start(workshop, medium, forked=False) as second:  # as for a user: each process imports for itself
        assert _ask_anew(second, PROMPTS, right) == FULL_TOKENS
    assert medium.namespace().is_dir()
