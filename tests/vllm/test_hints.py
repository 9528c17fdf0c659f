"""Hints in a running vLLM: a prompt's chunks are read into memory before it comes, verified; retained while others come
and go; not stored; dropped. Answers are those of a vLLM without us throughout.
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
MEMORY = {"kind": "memory", "capacity": "10MiB"}
"""Room for 9 chunks of TINY; half of it for one prefetch, and for what is retained."""
OTHERS = 3
"""So many prompts take all of memory."""
KEPT, DAMAGED, DROPPED, *OTHER_PROMPTS = prompts(3 + 40, steps=2, seed=2601)


def hint(**fields: Any) -> dict[str, Any]:
    return {"nixl_offload": fields}


def carry(engine: Engine, params: Any) -> None:
    """Send hints with a request that costs next to nothing, and wait until they were carried out."""
    engine.generate([[2]], max_tokens=1, transfer_params=params)
    assert engine.settle()


def chunks(engine: Engine, operation: str) -> dict[str, float]:
    """Chunks so far by outcome."""
    return engine.labelled("vllm:nixl_offload_chunks", "outcome", operation=operation)


def retained_bytes(engine: Engine) -> float:
    """In memory; metrics are told with a step, and at most every quarter of a second."""
    engine.generate([[2]], max_tokens=1)
    return engine.labelled("vllm:nixl_offload_retained_bytes", "tier").get("memory", 0.0)


class Scene:
    """An engine with memory and a slab, what a vLLM without us answers, and prompts nobody has asked yet."""

    def __init__(self, shape: ModelShape, workshop: Workshop) -> None:
        with workshop.start_engine(shape) as engine:
            self.right = dict(
                zip(["kept", "damaged", "dropped"], engine.generate([KEPT, DAMAGED, DROPPED]), strict=True)
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


def test_what_is_retained_stays_in_memory_until_it_is_released(scene: Scene) -> None:
    """Asked for with the request itself, for all of its chunks; ended by token ids."""
    engine = scene.engine
    assert engine.reset_prefix_cache(connector=True)
    engine.generate([KEPT], transfer_params=hint(retain_s=3600))
    until(lambda: retained_bytes(engine) > 0, "the gauge says so")
    for _ in range(2):
        scene.push_out()
    answer, came = scene.ask(KEPT)
    assert came == {"host": FULL_TOKENS}
    assert answer.same_as(scene.right["kept"])
    carry(engine, hint(retain_s=0, token_ids=KEPT))
    until(lambda: retained_bytes(engine) == 0, "and that it is over")


def test_what_is_dropped_is_computed_and_what_is_kept_before_it_is_not(scene: Scene) -> None:
    engine = scene.engine
    engine.generate([DROPPED])
    assert engine.settle()
    carry(engine, hint(drop_from=2 * CHUNK_TOKENS, token_ids=DROPPED))
    assert engine.reset_prefix_cache()
    [answer] = engine.generate([DROPPED], transfer_params=hint(drop_from=0))
    # Of a window's group only what lies before the end of a prompt was stored.
    assert answer.external_hit_tokens == (0 if scene.has_windows else 2 * CHUNK_TOKENS)
    assert answer.same_as(scene.right["dropped"])
    assert engine.settle()
    assert engine.reset_prefix_cache()
    [answer] = engine.generate([DROPPED], transfer_params=hint(store=False))
    assert answer.external_hit_tokens == 0, "it was dropped when its request had ended, and not stored"
    assert engine.settle()
    answer, came = scene.ask(DROPPED)
    assert came == {}, "and not stored this time"
    assert answer.same_as(scene.right["dropped"])
    answer, came = scene.ask(DROPPED)
    assert came == {"host": FULL_TOKENS}
