"""The chain of tiers in a running vLLM: memory in front of files and a bucket.

Proves: a working set larger than memory is answered from memory or files, as the metrics say, and after a restart from
files alone, with the same tokens and logprobs; what a farther tier served is kept in memory; each tier works without
the others; a request's hints are followed; what waits to be written when the engine shuts down is there afterwards.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.s3.servers import RcloneServer
from tests.vllm.damage import until
from tests.vllm.harness import (
    CHUNK_TOKENS,
    MAX_BATCHED_TOKENS,
    TINY,
    TINY_HYBRID,
    Answer,
    Engine,
    ModelShape,
    Workshop,
    assert_same,
    chain_config,
    close,
    prompts,
    tree_tier,
)

PROMPTS = prompts(6, steps=2, seed=801)
FULL_TOKENS = 2 * MAX_BATCHED_TOKENS
"""Of each prompt. Its tail is computed."""
CHUNKS = FULL_TOKENS // CHUNK_TOKENS
SOURCES = "vllm:prompt_tokens_cached_by_source"
CHUNK_METRIC = "vllm:nixl_offload_chunks"
SMALL = {"kind": "memory", "capacity": "8MiB"}
"""Room for 7 chunks of TINY; ``PROMPTS`` have 24."""


def files(path: Path, capacity: str = "256MiB") -> dict[str, Any]:
    return {"kind": "slab", "path": str(path), "capacity": capacity}


def all_loaded(answers: list[Answer], expected: list[Answer]) -> None:
    """Every full chunk came from the connector, and the answers are the same to the last bit."""
    assert [answer.external_hit_tokens for answer in answers] == [FULL_TOKENS] * len(answers)
    assert_same(answers, expected)


def sources(engine: Engine) -> dict[str, float]:
    """Prompt tokens so far by where their KV came from."""
    return engine.labelled(SOURCES, "source")


def arrived(engine: Engine) -> dict[str, float]:
    """Chunks that have reached each tier, moved or stored there: what memory has no room for goes to the next tier."""
    found: dict[str, float] = {}
    for labels, value in engine.call("labelled", name=CHUNK_METRIC)["values"]:
        if labels["operation"] in {"store", "write_through"} and labels["outcome"] == "ok":
            found[labels["tier"]] = found.get(labels["tier"], 0) + value
    return found


def from_where(engine: Engine, asked: list[list[int]]) -> tuple[list[Answer], dict[str, float]]:
    """Ask with an empty GPU cache; return the answers, and the tokens by source that this took."""
    assert engine.reset_prefix_cache()
    before = sources(engine)
    answers = engine.generate(asked)
    after = sources(engine)
    assert engine.settle()
    return answers, {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}


@pytest.fixture(scope="module", params=[TINY, TINY_HYBRID], ids=["one-group", "two-groups"])
def shape(request: pytest.FixtureRequest) -> ModelShape:
    chosen: ModelShape = request.param
    return chosen


@pytest.fixture(scope="module")
def expected(shape: ModelShape, workshop: Workshop) -> list[Answer]:
    """What a vLLM without us answers to ``PROMPTS``."""
    with workshop.start_engine(shape) as engine:
        return engine.generate(PROMPTS)


def test_a_working_set_larger_than_memory(shape: ModelShape, expected: list[Answer], workshop: Workshop) -> None:
    """Memory and files serve all prompts between them; after a restart files do, and memory fills again."""
    config = chain_config(SMALL, files(workshop.scratch / f"chain-{shape.sliding_window}"))
    with workshop.start_engine(shape, config) as engine:
        assert_same(engine.generate(PROMPTS), expected)
        assert engine.settle()
        kept = arrived(engine)
        # The last first: what goes round a least-recently-used cache that is too small is never there.
        answers, came = from_where(engine, PROMPTS[::-1])
        all_loaded(answers, expected[::-1])
        assert set(came) == {"host", "disk"}, "both tiers served"
        assert sum(came.values()) == len(PROMPTS) * FULL_TOKENS
        if shape.sliding_window is None:
            assert kept["slab"] == len(PROMPTS) * CHUNKS, "every chunk was written through, once"
        # What was asked for last is in memory now, from wherever it came.
        answers, came = from_where(engine, PROMPTS[:1])
        all_loaded(answers, expected[:1])
        assert came == {"host": FULL_TOKENS}
        engine.stop()

    with workshop.start_engine(shape, config) as engine:
        answers, came = from_where(engine, PROMPTS)
        all_loaded(answers, expected)
        assert came == {"disk": len(PROMPTS) * FULL_TOKENS}
        assert engine.stored_bytes() == 0
        answers, came = from_where(engine, PROMPTS[-1:])
        all_loaded(answers, expected[-1:])
        assert came == {"host": FULL_TOKENS}, "it was promoted"
        engine.stop()


def test_memory_alone(shape: ModelShape, expected: list[Answer], workshop: Workshop) -> None:
    """A memory tier needs no other. What fits is served; what does not is computed."""
    with workshop.start_engine(shape, chain_config({"kind": "memory", "capacity": "64MiB"})) as engine:
        assert_same(engine.generate(PROMPTS), expected)
        answers, came = from_where(engine, PROMPTS)
        all_loaded(answers, expected)
        assert set(came) == {"host"}
        together = engine.generate(PROMPTS, together=True)
        assert all(close(answer, right) for answer, right in zip(together, expected, strict=True))
        engine.stop()
    with workshop.start_engine(shape, chain_config(SMALL)) as engine:
        for _ in range(2):
            assert engine.reset_prefix_cache()
            assert_same(engine.generate(PROMPTS), expected)
            assert engine.settle()
        engine.stop()


def test_written_through_at_shutdown(workshop: Workshop) -> None:
    """An engine that is stopped at once, without a step more, has brought to files what was on its way there."""
    [asked] = prompts(1, steps=2, seed=802)
    config = chain_config({"kind": "memory", "capacity": "64MiB"}, files(workshop.scratch / "drained"))
    with workshop.start_engine(TINY, config) as engine:
        [right] = engine.generate([asked])
        engine.stop()
    with workshop.start_engine(TINY, config) as engine:
        [answer] = engine.generate([asked])
        assert answer.external_hit_tokens >= FULL_TOKENS - 2 * CHUNK_TOKENS, "the last step's store may not have begun"
        assert_same([answer], [right])
        engine.stop()


def test_hints_of_a_request(workshop: Workshop) -> None:
    """``kv_load_tiers`` says which tiers may serve a request, ``max_offload_tokens`` how much of it is stored."""
    first, second = prompts(2, steps=2, seed=803)
    config = chain_config({"kind": "memory", "capacity": "64MiB"}, files(workshop.scratch / "hints"))
    with workshop.start_engine(TINY, config) as engine:
        [right] = engine.generate([first])
        assert engine.settle()
        for wanted, source in (
            ({"medium": "CPU"}, "host"),
            ({"medium": "STORAGE"}, "disk"),
            ({"locality": "REMOTE"}, ""),
        ):
            assert engine.reset_prefix_cache()
            before = sources(engine)
            [answer] = engine.generate([first], transfer_params={"kv_load_tiers": [wanted]})
            assert answer.external_hit_tokens == (FULL_TOKENS if source else 0)
            assert not source or sources(engine)[source] - before.get(source, 0) == FULL_TOKENS
            assert_same([answer], [right])
        assert engine.reset_prefix_cache()
        engine.generate([second], transfer_params={"max_offload_tokens": 2 * CHUNK_TOKENS})
        assert engine.settle()
        assert engine.reset_prefix_cache()
        [answer] = engine.generate([second])
        assert answer.external_hit_tokens == 2 * CHUNK_TOKENS
        engine.stop()


def test_stored_when_asked_for_again(workshop: Workshop) -> None:
    """With ``store_after: 2`` a prompt that comes once leaves nothing; one that comes twice is stored."""
    once, twice = prompts(2, steps=2, seed=804)
    with workshop.start_engine(TINY, chain_config({"kind": "memory", "capacity": "64MiB"}, store_after=2)) as engine:
        engine.generate([once, twice])
        assert engine.settle()
        assert engine.stored_bytes() == 0
        assert engine.reset_prefix_cache()
        engine.generate([twice])
        assert engine.settle()
        assert engine.reset_prefix_cache()
        answers = engine.generate([once, twice])
        assert [answer.external_hit_tokens for answer in answers] == [0, FULL_TOKENS]
        engine.stop()


def test_three_tiers(workshop: Workshop, server: RcloneServer) -> None:
    """A chunk goes to memory, and from there to files and to the bucket; each of the three alone serves it."""
    asked = prompts(2, steps=2, seed=805)
    path = workshop.scratch / "three"
    bucket = server.tier("three")
    environment = server.environment
    with workshop.start_engine(TINY, chain_config(SMALL, files(path), bucket), environment=environment) as engine:
        right = engine.generate(asked)
        assert engine.settle()
        answers, came = from_where(engine, asked)
        all_loaded(answers, right)
        assert set(came) <= {"host", "disk"}, "the nearest that has it"
        kept = arrived(engine)
        assert (kept["slab"], kept["s3"]) == (2 * CHUNKS, 2 * CHUNKS)
        engine.stop()
    for tiers, source in (
        ([SMALL, files(path)], "disk"),
        ([SMALL, bucket], "external_unspecified"),
        ([bucket], "external_unspecified"),
    ):
        with workshop.start_engine(TINY, chain_config(*tiers), environment=environment) as engine:
            answers, came = from_where(engine, asked)
            all_loaded(answers, right)
            assert came == {source: 2 * FULL_TOKENS}
            engine.stop()


def test_a_slab_in_front_of_a_shared_directory(workshop: Workshop) -> None:
    """What a slab holds goes on to the shared directory, and a server that has lost its slab is served from there."""
    asked = prompts(2, steps=2, seed=803)
    drive, shared = workshop.scratch / "drive", workshop.scratch / "shared"
    config = chain_config(files(drive), tree_tier(shared))
    with workshop.start_engine(TINY, config) as engine:
        right = engine.generate(asked)
        stored = len(asked) * CHUNKS
        until(lambda: engine.settle() and arrived(engine).get("shared_dir") == stored, "all is written through")
        answers, came = from_where(engine, asked)
        all_loaded(answers, right)
        assert came == {"disk": len(asked) * FULL_TOKENS}
        engine.stop()
    shutil.rmtree(drive)
    with workshop.start_engine(TINY, config) as engine:
        answers, came = from_where(engine, asked)
        all_loaded(answers, right)
        assert came == {"disk": len(asked) * FULL_TOKENS}, "of this machine, here"
        engine.stop()
