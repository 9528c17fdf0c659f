"""Proves that what is stored of a request is read from its own blocks while they hold its own KV: after a reset of the
external cache, when its id comes again, and before the second model runner writes to blocks that it reuses. What
another request then loads is compared block by block with what belongs there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from examples.demo.model import ModelShape, write_model
from tests.thinned import thinned
from tests.vllm.fuzz_rig import MAX_TOKENS, Fuzz, FuzzedEngine, fuzzed
from tests.vllm.harness import tree_tier
from tests.vllm.pipeline_rig import CHUNK_TOKENS, vllm_config_of

FAMILIES: dict[str, tuple[str, int | None]] = {
    "full": ("FF", 0),
    "windows": ("SS", 0),
    "windows, all kept": ("SS", None),
    "mixed": ("FFSS", 0),
    "mixed, all kept": ("FFSS", None),
    "chunked": ("FFCC", 0),
    "large blocks, all kept": ("LLWW", None),
}
"""Layers by kind, and vLLM's ``prefix_cache_retention_interval``."""
RUNNERS = {"first runner": False, "second runner": True}
MEDIA = ("memory", "slab", "tree", "chain")
AXES = thinned(family=FAMILIES, medium=dict(zip(MEDIA, MEDIA, strict=True)), second_runner=RUNNERS)
BLOCKS = 60
PROMPTS = [random.Random(seed).choices(range(500), k=6 * CHUNK_TOKENS) for seed in range(4)]
MEMORY = {"kind": "memory", "capacity": "16MiB"}


def media(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Tiers by name."""
    slab = {"kind": "slab", "path": str(path / "slab"), "capacity": "64MiB"}
    return {
        "memory": [MEMORY],
        "slab": [slab],
        "tree": [tree_tier(path / "tree")],
        "chain": [{"kind": "memory", "capacity": "1MiB"}, slab],
    }


Start = Callable[..., FuzzedEngine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint for vLLM's configuration to name; nobody runs it."""
    shape = ModelShape(layers=4, hidden=64, heads=2, kv_heads=1, intermediate=64, vocab=512, max_tokens=2048)
    return write_model(tmp_path_factory.mktemp("model") / "base", shape)


@pytest.fixture
def start(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    engines: list[FuzzedEngine] = []

    def started(
        kinds: str,
        medium: str = "memory",
        *,
        second_runner: bool = False,
        blocks: int = BLOCKS,
        retention_tokens: int | None = 0,
    ) -> FuzzedEngine:
        connector = {
            "staging": "8MiB",
            "tiers": media(tmp_path)[medium],
            "vllm": {"offload_prompt_only": False},
        }
        config = vllm_config_of(
            model,
            (kinds,),
            connector,
            max_model_len=MAX_TOKENS,
            max_num_batched_tokens=128,
            prefix_cache_retention_interval=retention_tokens,
        )
        engines.append(FuzzedEngine(config, kinds, blocks=blocks, second_runner=second_runner))
        return engines[-1]

    with fuzzed():
        yield started
        for engine in engines:
            engine.close()


def test_after_a_reset_of_the_external_cache_no_block_that_slid_out_of_a_window_is_stored(start: Start) -> None:
    """A request runs with a window when the external cache is reset: all of its chunks are offered anew."""
    engine = start("SS", blocks=40)
    engine.rank.stores.holds = False
    engine.ask("long", PROMPTS[0], 90)
    engine.step(8)
    engine.ask("other", PROMPTS[1], 1)  # takes what slid out of the window
    engine.step(6)
    engine.core.reset_prefix_cache(reset_connector=True)
    engine.settle()
    engine.reset_prefix_cache()
    for length in range(1, 7):
        engine.ask(f"again-{length}", [*PROMPTS[0][: length * CHUNK_TOKENS], 1])
        engine.settle()
    assert engine.rank.wrong == []


def test_the_tail_of_a_window_that_is_offered_at_a_requests_end_is_still_its_own(start: Start) -> None:
    """With large blocks of full attention, vLLM offers at the end what it left out before, and what slid out since."""
    engine = start("LLWW", blocks=32, retention_tokens=None)
    engine.rank.stores.holds = False
    request = engine.ask("long", PROMPTS[0][:140], 111)
    while request.num_tokens < 236:
        engine.step()
    for at, prompt in enumerate(PROMPTS[1:]):
        engine.ask(f"other-{at}", prompt)  # take what slid out of the window
    engine.settle()
    assert request.is_finished()
    assert engine.rank.wrong == []
    assert engine.rank.stored > 10


def test_the_tail_of_a_window_that_is_offered_at_a_requests_end_is_read_before_its_blocks_are_reused(
    start: Start,
) -> None:
    """The next request gets them in the same step."""
    engine = start("LLWW", blocks=16, retention_tokens=None)
    request = engine.ask("long", PROMPTS[0][:140], 90)
    while not request.is_finished():
        engine.step()
    engine.ask("next", PROMPTS[1])
    engine.settle()
    assert engine.rank.wrong == []
    assert engine.rank.stored > 10


def test_an_id_that_comes_again_while_the_first_of_its_name_stores_keeps_the_engine_alive(start: Start) -> None:
    engine = start("FF")
    for prompt in PROMPTS[:3]:
        request = engine.ask("same", prompt)
        while not request.is_finished():
            engine.step()
    assert engine.rank.stores.held, "stores are out"
    engine.settle()
    assert engine.left() == []
    engine.reset_prefix_cache()
    for at, prompt in enumerate(PROMPTS[:3]):
        engine.ask(f"again-{at}", prompt)
        engine.settle()
        assert engine.rank.began_with[f"again-{at}"] >= 4 * CHUNK_TOKENS, "stored and loaded"
    assert engine.rank.wrong == []


def test_an_id_may_come_again_between_a_reset_and_the_next_step(start: Start) -> None:
    """A reset forgets requests that have ended; the next step tells of their end, and must not forget the new one."""
    engine = start("FF")
    request = engine.ask("same", PROMPTS[0])
    while not request.is_finished():
        engine.step()
    engine.core.reset_prefix_cache(reset_connector=True)
    engine.ask("same", PROMPTS[1])
    engine.settle()
    assert engine.left() == []


@pytest.mark.parametrize("second_runner", RUNNERS.values(), ids=RUNNERS)
def test_stores_that_wait_read_their_blocks_before_these_are_zeroed(start: Start, second_runner: bool) -> None:
    """A small KV cache, and stores that read as late as they may."""
    engine = start("FF", second_runner=second_runner, blocks=20)
    for at, prompt in enumerate(PROMPTS):
        request = engine.ask(f"first-{at}", prompt)
        while not request.is_finished():
            engine.step()
    engine.settle()
    for at, prompt in enumerate(PROMPTS):
        engine.reset_prefix_cache()
        engine.ask(f"again-{at}", prompt)
        engine.settle()
        assert engine.rank.began_with[f"again-{at}"] >= 4 * CHUNK_TOKENS, "stored and loaded"
    assert engine.rank.wrong == []


@pytest.mark.parametrize(**AXES)
def test_nothing_that_users_do_makes_a_request_begin_with_wrong_kv(
    start: Start, family: tuple[str, int | None], medium: str, second_runner: bool
) -> None:
    """Requests, aborts, preemptions, sessions, resets and ids that come again, at random."""
    kinds, retention_tokens = family
    fuzz(start(kinds, medium, second_runner=second_runner, retention_tokens=retention_tokens), range(2))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("second_runner", RUNNERS.values(), ids=RUNNERS)
@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_same_at_length(start: Start, family: tuple[str, int | None], medium: str, second_runner: bool) -> None:
    kinds, retention_tokens = family
    fuzz(start(kinds, medium, second_runner=second_runner, retention_tokens=retention_tokens), range(2, 22))


def fuzz(engine: FuzzedEngine, seeds: range) -> None:
    for seed in seeds:
        Fuzz(engine, seed).run(60)
        assert (seed, engine.rank.wrong, engine.left()) == (seed, [], [])
    assert engine.rank.answers >= 5 * len(seeds)
    assert engine.rank.moved["load"], "something was loaded"
