"""Proves that what is stored outlives a pause, sleep and updates of weights, and is served to its weights alone; and
that it goes where the caller asks for that. vLLM's own engine core, its ranks played.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from examples.demo.model import ModelShape, write_model
from tests.vllm.pipeline_rig import CHUNK_TOKENS, PlayedEngine, PlayedExecutor, PlayedRank, played, vllm_config_of

CHUNKS = 3
PROMPTS = [random.Random(seed).choices(range(512), k=CHUNKS * CHUNK_TOKENS + 20) for seed in range(3)]
ALL, NONE = [CHUNKS * CHUNK_TOKENS] * len(PROMPTS), [0] * len(PROMPTS)


class SleepingRank(PlayedRank):
    """A rank that sleeps as vLLM's worker does: its KV memory is somebody else's meanwhile."""

    def sleep(self) -> None:
        assert self._connector is not None
        self._connector.unregister_kv_caches()
        for cache in self._caches.values():
            cache.random_()

    def wake_up(self) -> None:
        assert self._connector is not None
        self._connector.restore_kv_caches()

    def load(self, weights: float) -> None:
        """Replace the weights in place."""
        with torch.no_grad():
            self._vllm_worker.get_model().weight.fill_(weights)  # type: ignore[operator]


class SleepingEngine(PlayedEngine):
    """An engine whose ranks sleep, and whose weights change."""

    executor_type = type("SleepingExecutor", (PlayedExecutor,), {"rank_type": SleepingRank})

    def load(self, weights: float) -> None:
        """Pause, replace the weights, and resume, as a trainer does."""
        self.core.pause_scheduler()
        for rank in self.ranks:
            rank.load(weights)  # type: ignore[attr-defined]
        self.core.resume_scheduler()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SleepingEngine]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shape = ModelShape(layers=2, hidden=64, heads=2, kv_heads=1, intermediate=64, vocab=512, max_tokens=1024)
    slab = {"kind": "slab", "path": str(tmp_path / "slab"), "capacity": "64MiB"}
    connector: dict[str, Any] = {"staging": "8MiB", "tiers": [{"kind": "memory", "capacity": "16MiB"}, slab]}
    config = vllm_config_of(write_model(tmp_path / "base", shape), ["FF"], connector)
    with played():
        made = SleepingEngine(config, ["FF"])
        yield made
        made.close()


def test_what_is_stored_outlives_sleep(engine: SleepingEngine) -> None:
    """In memory, too; and what memory has still to pass on while the engine sleeps is passed on afterwards."""
    catalog = engine.manager.catalog
    begin, catalog.begin_moves = catalog.begin_moves, lambda now_s: []
    for prompt in PROMPTS:
        engine.core.add_request(engine.request(prompt))
    while engine.core.scheduler.has_unfinished_requests() or catalog.open_tickets:
        engine.core.step_fn()
    engine.core.sleep(level=1)
    catalog.begin_moves = begin
    engine.manager.has_pending_work = lambda: True  # a step comes, as while a report is due
    for _ in range(10):
        engine.core.step_fn()
    del engine.manager.has_pending_work
    engine.core.wake_up()
    assert engine.generate(PROMPTS) == ALL
    assert engine.wrong() == []
    assert engine.moved("write_through") == engine.moved("store")


def test_what_is_stored_is_served_to_its_weights_alone(engine: SleepingEngine) -> None:
    assert engine.generate(PROMPTS) == NONE
    for weights, hits in ((2.0, NONE), (1.0, ALL), (2.0, ALL)):
        engine.load(weights)
        engine.generate(PROMPTS[:1])  # the tiers open for these weights meanwhile
        engine.reset_prefix_cache()
        assert engine.generate(PROMPTS) == hits
    assert engine.wrong() == []


def test_what_is_stored_goes_where_the_caller_asks_for_it(engine: SleepingEngine) -> None:
    """While the engine is paused, too."""
    engine.generate(PROMPTS)
    assert engine.core.reset_prefix_cache(reset_connector=True)
    assert engine.generate(PROMPTS) == NONE
    engine.core.pause_scheduler()
    assert engine.core.reset_prefix_cache(reset_connector=True)
    engine.core.resume_scheduler()
    assert engine.generate(PROMPTS) == NONE
    engine.reset_prefix_cache()
    assert engine.generate(PROMPTS) == ALL
