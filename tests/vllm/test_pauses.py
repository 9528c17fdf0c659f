"""Proves that what is stored outlives a pause, sleep and updates of weights, and is served to its weights alone; and
that it goes where the caller asks for that. vLLM's own engine core, its ranks played.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.fuzz_families import write_base
from tests.vllm.media import memory, slab
from tests.vllm.pipeline_rig import CHUNK_TOKENS, PlayedEngine, played, vllm_config_of

CHUNKS = 3
PROMPTS = [random.Random(seed).choices(range(512), k=CHUNKS * CHUNK_TOKENS + 20) for seed in range(3)]
ALL, NONE = [CHUNKS * CHUNK_TOKENS] * len(PROMPTS), [0] * len(PROMPTS)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[PlayedEngine]:
    connector = {"staging": "8MiB", "tiers": [memory("16MiB").tier, slab(tmp_path / "slab", "64MiB").tier]}
    config = vllm_config_of(write_base(tmp_path), ["FF"], connector)
    with played():
        made = PlayedEngine(config, ["FF"])
        yield made
        made.close()


def change_weights(engine: PlayedEngine, weights: int) -> None:
    """Pause, replace the weights, and resume, as a trainer does."""
    engine.core.pause_scheduler()
    for rank in engine.ranks:
        rank.change_weights(weights)
    engine.core.resume_scheduler()


def test_what_is_stored_outlives_sleep(engine: PlayedEngine) -> None:
    """In memory, too; and what memory has still to pass on while the engine sleeps is passed on afterwards."""
    catalog = engine.manager.catalog
    begin, catalog.begin_moves = catalog.begin_moves, lambda now_s: []
    for prompt in PROMPTS:
        engine.core.add_request(engine.request(prompt))
    while engine.core.scheduler.has_unfinished_requests() or catalog.open_tickets:
        engine.step()
    engine.core.sleep(level=1)
    catalog.begin_moves = begin
    engine.manager.has_pending_work = lambda: True  # a step comes, as while a report is due
    engine.step(10)
    del engine.manager.has_pending_work
    engine.core.wake_up()
    assert engine.generate(PROMPTS) == ALL
    assert engine.wrong() == []
    assert engine.moved("write_through") == engine.moved("store")


def test_what_is_stored_is_served_to_its_weights_alone(engine: PlayedEngine) -> None:
    assert engine.generate(PROMPTS) == NONE
    for weights, hits in ((1, NONE), (0, ALL), (1, ALL)):
        change_weights(engine, weights)
        engine.generate(PROMPTS[:1])  # the tiers open for these weights meanwhile
        engine.reset_prefix_cache()
        assert engine.generate(PROMPTS) == hits
    assert engine.wrong() == []


def test_what_is_stored_goes_where_the_caller_asks_for_it(engine: PlayedEngine) -> None:
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
