"""The chain of tiers in a running vLLM: memory in front of files and a bucket.

Proves: a working set larger than memory is answered from memory or files, as the metrics say, and after a restart from
files alone, with the same tokens and logprobs. Chunks from a farther tier are promoted. Each tier works without the
rest. Chunks that wait to be written at a shutdown are there afterwards.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from examples.demo.model import TINY_HYBRID
from tests.s3.servers import RcloneServer
from tests.vllm.damage import ENGINE_OPTIONS, FULL_TOKENS, PROMPT_CHUNKS, Reference, chunk_prompts, hits, until
from tests.vllm.harness import (
    CHUNK_TOKENS,
    TINY,
    Answer,
    Engine,
    ModelShape,
    Workshop,
    assert_same,
    chain_config,
    slab_tier,
    tree_tier,
)

PROMPTS = chunk_prompts(6, seed=801)
ALL_TOKENS = len(PROMPTS) * FULL_TOKENS
SOURCES = "vllm:prompt_tokens_cached_by_source"
CHUNKS = "vllm:nixl_offload_chunks"
SMALL = {"kind": "memory", "capacity": "8MiB", "lazy": False}
"""Room for 7 chunks of TINY; ``PROMPTS`` have 24."""
LARGE = {"kind": "memory", "capacity": "64MiB", "lazy": False}


def sources(engine: Engine) -> dict[str, float]:
    """Prompt tokens so far by where their KV came from."""
    return engine.labelled(SOURCES, "source")


def from_where(engine: Engine, asked: list[list[int]], **options: Any) -> tuple[list[Answer], dict[str, float]]:
    """Ask with an empty GPU cache; return the answers, and the tokens by source that this took."""
    assert engine.reset_prefix_cache()
    before = sources(engine)
    answers = engine.generate(asked, **options)
    after = sources(engine)
    assert engine.settle()
    return answers, {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}


def stored(engine: Engine, asked: list[list[int]]) -> list[Answer]:
    """Ask one by one, so that each prompt is written through before memory must make room for the next."""
    answers: list[Answer] = []
    for prompt in asked:
        answers += engine.generate([prompt])
        assert engine.settle()
    return answers


def arrived(engine: Engine) -> dict[str, float]:
    """Return how many chunks have reached each tier, by a move or a store: a full memory is passed over."""
    ways = [engine.labelled(CHUNKS, "tier", operation=way, outcome="ok") for way in ("store", "write_through")]
    return {tier: sum(way.get(tier, 0) for way in ways) for tier in ways[0] | ways[1]}


Start = Callable[..., Engine]


@pytest.fixture
def start(workshop: Workshop, server: RcloneServer) -> Start:
    """Starts engines on tiers."""

    def started(*tiers: dict[str, Any], shape: ModelShape = TINY, **fields: Any) -> Engine:
        config = chain_config(*tiers, **fields)
        return workshop.start_engine(shape, config, environment=server.environment, **ENGINE_OPTIONS)

    return started


@pytest.mark.parametrize("shape", [TINY, TINY_HYBRID], ids=["one-group", "two-groups"])
def test_a_working_set_larger_than_memory(shape: ModelShape, workshop: Workshop, start: Start) -> None:
    """Memory and files serve all prompts between them; after a restart files do, and memory fills again."""
    right = Reference(workshop.start_engine(shape, **ENGINE_OPTIONS)).answers(PROMPTS)
    slab = slab_tier(workshop.scratch / f"chain-{shape.sliding_window}")
    with start(SMALL, slab, shape=shape) as engine:
        assert_same(stored(engine, PROMPTS), right)
        kept = arrived(engine)
        # The last first: a least-recently-used cache that is too small for a cycle never hits.
        answers, came = from_where(engine, PROMPTS[::-1])
        assert_same(answers, right[::-1])
        assert set(came) == {"host", "disk"}, "both tiers served"
        assert sum(came.values()) == ALL_TOKENS
        if shape.sliding_window is None:
            assert kept["slab"] == len(PROMPTS) * PROMPT_CHUNKS, "every chunk was written through, once"
        # What was asked for last is in memory now, from wherever it came.
        answers, came = from_where(engine, PROMPTS[:1])
        assert_same(answers, right[:1])
        assert came == {"host": FULL_TOKENS}
        engine.stop()
    with start(SMALL, slab, shape=shape) as engine:
        answers, came = from_where(engine, PROMPTS)
        assert_same(answers, right)
        assert came["disk"] >= ALL_TOKENS // 2, "memory has what was fetched before a request had blocks"
        assert sum(came.values()) == ALL_TOKENS
        assert engine.stored_bytes() == 0
        answers, came = from_where(engine, PROMPTS[-1:])
        assert_same(answers, right[-1:])
        assert came == {"host": FULL_TOKENS}, "it was promoted"
        engine.stop()


def test_written_through_at_shutdown(reference: Reference, workshop: Workshop, start: Start) -> None:
    """An engine that is stopped at once, without another step, completes its moves to files."""
    asked, slab = chunk_prompts(1, seed=802), slab_tier(workshop.scratch / "drained")
    with start(LARGE, slab) as engine:
        reference.check(engine, asked)
        engine.stop()
    with start(LARGE, slab) as engine:
        found = hits(reference.check(engine, asked))
        assert found >= FULL_TOKENS - 2 * CHUNK_TOKENS, "the last step's store may not have begun"
        engine.stop()


def test_three_tiers(reference: Reference, workshop: Workshop, server: RcloneServer, start: Start) -> None:
    """A chunk goes to memory, and from there to files and to the bucket; each of the three alone serves it."""
    asked, slab, bucket = chunk_prompts(2, seed=805), slab_tier(workshop.scratch / "three"), server.tier("three")
    right = reference.answers(asked)
    with start(SMALL, slab, bucket) as engine:
        assert_same(stored(engine, asked), right)
        answers, came = from_where(engine, asked)
        assert_same(answers, right)
        assert set(came) <= {"host", "disk"}, "the nearest that has it"
        kept = arrived(engine)
        assert (kept["slab"], kept["s3"]) == (2 * PROMPT_CHUNKS, 2 * PROMPT_CHUNKS)
        engine.stop()
    for tiers, source in (
        ([SMALL, slab], "disk"),
        ([SMALL, bucket], "external_unspecified"),
        ([bucket], "external_unspecified"),
    ):
        with start(*tiers) as engine:
            answers, came = from_where(engine, asked)
            assert_same(answers, right)
            assert came == {source: 2 * FULL_TOKENS}
            engine.stop()


def test_a_slab_in_front_of_a_shared_directory(reference: Reference, workshop: Workshop, start: Start) -> None:
    """A slab's chunks go on to the shared directory, which serves a server that has lost its slab."""
    asked, drive, shared = chunk_prompts(2, seed=806), workshop.scratch / "drive", workshop.scratch / "shared"
    stored = len(asked) * PROMPT_CHUNKS
    with start(slab_tier(drive), tree_tier(shared)) as engine:
        reference.check(engine, asked)
        until(lambda: engine.settle() and arrived(engine).get("shared_dir") == stored, "all is written through")
        assert hits(reference.check(engine, asked)) == 2 * FULL_TOKENS
        engine.stop()
    shutil.rmtree(drive)
    with start(slab_tier(drive), tree_tier(shared)) as engine:
        answers, came = from_where(engine, asked)
        assert_same(answers, reference.answers(asked))
        assert came == {"disk": 2 * FULL_TOKENS}, "of this machine, here"
        engine.stop()
