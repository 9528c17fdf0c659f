"""Hints in a running vLLM: a prompt's chunks are read into memory before it comes, verified; a request is not stored.
Answers are those of a vLLM without us.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from examples.demo.model import TINY_HYBRID
from tests.prove.happenings import DAMAGES
from tests.vllm.damage import until
from tests.vllm.harness import (
    CHUNK_TOKENS,
    MAX_BATCHED_TOKENS,
    TINY,
    Answer,
    Engine,
    ModelShape,
    Workshop,
    chain_config,
    prompts,
    slab_tier,
)
from tests.vllm.media import slab
from tests.vllm.test_chain import from_where

FULL_TOKENS = 2 * MAX_BATCHED_TOKENS
CHUNKS = FULL_TOKENS // CHUNK_TOKENS
MEMORY = {"kind": "memory", "capacity": "10MiB", "lazy": False}
"""Room for 9 chunks of TINY; half of it for one prefetch."""
OTHERS = 3
"""So many prompts take all of memory."""
KEPT, DAMAGED, UNSTORED, *OTHER_PROMPTS = prompts(3 + 40, steps=2, seed=2601)


def hint(**fields: Any) -> dict[str, Any]:
    return {"nixl_offload": fields}


def carry(engine: Engine, params: Any) -> None:
    """Send hints with a request that costs next to nothing, and wait until they were carried out."""
    engine.generate([[2]], max_tokens=1, transfer_params=params)
    assert engine.settle()


def chunks(engine: Engine, operation: str) -> dict[str, float]:
    """Chunks so far by outcome."""
    return engine.labelled("vllm:nixl_offload_chunks", "outcome", operation=operation)


class Scene:
    """An engine with memory and a slab, what a vLLM without us answers, and prompts nobody has asked yet."""

    def __init__(self, shape: ModelShape, workshop: Workshop) -> None:
        with workshop.start_engine(shape) as engine:
            self.right = dict(
                zip(["kept", "damaged", "unstored"], engine.generate([KEPT, DAMAGED, UNSTORED]), strict=True)
            )
        self.has_windows = shape.sliding_window is not None
        self.slab = workshop.scratch / f"slab-{self.has_windows}"
        self.engine = workshop.start_engine(shape, chain_config(MEMORY, slab_tier(self.slab)))
        self._fresh = iter(OTHER_PROMPTS)

    def push_out(self) -> None:
        """Let other prompts have memory."""
        self.engine.generate(list(itertools.islice(self._fresh, OTHERS)), max_tokens=1)
        assert self.engine.settle()

    def ask(self, prompt: list[int]) -> tuple[Answer, dict[str, float]]:
        """Ask without what the GPU remembers; return the answer, and tokens by where they came from."""
        [answer], came = from_where(self.engine, [prompt])
        return answer, came


@pytest.fixture(scope="module", params=[TINY, TINY_HYBRID], ids=["one-group", "two-groups"])
def scene(request: pytest.FixtureRequest, workshop: Workshop) -> Iterator[Scene]:
    made = Scene(request.param, workshop)
    yield made
    made.engine.stop()


def test_a_prefetch_by_token_ids_is_served_from_memory(scene: Scene) -> None:
    engine = scene.engine
    engine.generate([KEPT])
    assert engine.settle()
    scene.push_out()
    before = chunks(engine, "prefetch").get("ok", 0)
    carry(engine, hint(prefetch=True, token_ids=[*KEPT, 7, 8, 9]))
    assert chunks(engine, "prefetch")["ok"] - before >= CHUNKS
    answer, came = scene.ask(KEPT)
    assert came == {"host": FULL_TOKENS}
    assert answer.same_as(scene.right["kept"])


def test_a_prefetch_of_what_is_damaged_brings_nothing(scene: Scene) -> None:
    """Checksums are compared when a chunk comes to memory; the request computes what is gone, and it is stored anew."""
    engine = scene.engine
    engine.generate([DAMAGED])
    assert engine.settle()
    stored = slab(scene.slab).stored
    until(lambda: len(stored()) >= CHUNKS, "all is in the index")
    scene.push_out()
    for shard in stored():
        DAMAGES["flipped"](shard, shard, 0.5)
    before = chunks(engine, "prefetch").get("corrupt", 0)
    carry(engine, hint(prefetch=True, token_ids=DAMAGED))
    assert chunks(engine, "prefetch")["corrupt"] > before
    answer, came = scene.ask(DAMAGED)
    assert came == {}
    assert answer.same_as(scene.right["damaged"])
    answer, came = scene.ask(DAMAGED)
    assert came == {"host": FULL_TOKENS}
    assert answer.same_as(scene.right["damaged"])


def test_what_is_not_to_be_stored_is_computed_again(scene: Scene) -> None:
    for hinted, then in ((hint(store=False), {}), (None, {"host": FULL_TOKENS})):
        scene.engine.generate([UNSTORED], transfer_params=hinted)
        assert scene.engine.settle()
        answer, came = scene.ask(UNSTORED)
        assert came == then
        assert answer.same_as(scene.right["unstored"])
        assert scene.engine.reset_prefix_cache(connector=not then)
