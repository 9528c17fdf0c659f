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
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from nixl_offload.engine import jobs
from tests.thinned import thinned
from tests.vllm.fuzz_families import FAMILIES, MEDIA, RUNNERS, Family, start_family, write_base
from tests.vllm.fuzz_rig import ON_DISK, Fuzz, FuzzedEngine, fuzzed
from tests.vllm.pipeline_rig import CHUNK_TOKENS, IMAGE_TOKENS

FULL = FAMILIES["full"]
AXES = thinned(family=FAMILIES, medium=dict(zip(MEDIA, MEDIA, strict=True)), second_runner=RUNNERS)
PROMPTS = [random.Random(seed).choices(range(500), k=6 * CHUNK_TOKENS) for seed in range(4)]

Start = Callable[..., FuzzedEngine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts engines. Asserts at the end that no request began with wrong KV, and that none was stored."""
    engines: list[FuzzedEngine] = []

    def started(family: Family, medium: str = "memory", **options: Any) -> FuzzedEngine:
        engines.append(start_family(family, medium, model, tmp_path, **options))
        return engines[-1]

    with fuzzed():
        yield started
        for engine in engines:
            engine.close()
        assert [engine.rank.wrong for engine in engines] == [[]] * len(engines)


def assert_all_loaded(engine: FuzzedEngine, prompts: list[list[int]]) -> None:
    """Ask again without what vLLM remembers: all was stored, and is loaded."""
    for at, prompt in enumerate(prompts):
        engine.reset_prefix_cache()
        engine.ask(f"again-{at}", prompt)
        engine.settle()
        assert engine.rank.began_with[f"again-{at}"] >= 4 * CHUNK_TOKENS


@pytest.mark.parametrize("medium", ["lazy", "blocks"])
def test_memory_takes_what_the_gpu_is_about_to_evict_and_gives_up_what_it_has_again(start: Start, medium: str) -> None:
    """The GPU's cache and memory have room for three prompts each. If both kept the latest, four in turn would miss."""
    engine = start(FULL, medium, blocks=38)
    stored = []
    for at, prompt in enumerate(PROMPTS * 3):
        engine.ask(f"{at}", prompt)
        engine.settle()
        stored.append(engine.rank.stored)
    assert stored[:2] == [0, 0], "the GPU still has them"
    assert [engine.rank.began_with[f"{at}"] for at in range(12)] == [0] * 4 + [len(PROMPTS[0]) - 1] * 8


def test_memory_gives_up_no_window_when_its_prefix_was_loaded(start: Start) -> None:
    """VLLM offers a window once, so it would be lost, and no hit is found without it."""
    engine = start(FAMILIES["mixed"], "lazy", blocks=30)
    for at, prompt in enumerate(PROMPTS[:2] * 4):
        engine.ask(f"{at}", [*prompt, 1])
        engine.settle()
    assert [engine.rank.began_with[f"{at}"] for at in range(8)] == [0] * 2 + [len(PROMPTS[0])] * 6


def test_prompts_that_part_within_a_chunk_leave_the_gpu_together(start: Start) -> None:
    """Their chunks share a block. vLLM's report of a store that names it twice would end the engine."""
    engine = start(FULL, "lazy", blocks=38)
    parts = [[*PROMPTS[0][: CHUNK_TOKENS * 3 // 2], *prompt[: CHUNK_TOKENS // 2]] for prompt in PROMPTS]
    for prompt in [*parts, *PROMPTS[1:], *PROMPTS[1:]]:
        engine.ask(f"{engine.rank.answers}", prompt)
        engine.settle()
    assert engine.rank.stored > len(parts)


def test_after_a_reset_of_the_external_cache_no_block_that_slid_out_of_a_window_is_stored(start: Start) -> None:
    """A request with a window is running when the external cache is reset: all its chunks are offered again."""
    engine = start(Family("SS"), blocks=40)
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


def test_the_tail_of_a_window_that_is_offered_at_a_requests_end_is_still_its_own(start: Start) -> None:
    """With large blocks of full attention, vLLM offers at the end what it left out before, and what slid out since."""
    engine = start(Family("LLWW", None), blocks=32)
    engine.rank.stores.holds = False
    request = engine.ask("long", PROMPTS[0][:140], 111)
    while request.num_tokens < 236:
        engine.step()
    for at, prompt in enumerate(PROMPTS[1:]):
        engine.ask(f"other-{at}", prompt)  # take what slid out of the window
    engine.settle()
    assert request.is_finished()
    assert engine.rank.stored > 10


def test_the_tail_of_a_window_that_is_offered_at_a_requests_end_is_read_before_its_blocks_are_reused(
    start: Start,
) -> None:
    """The next request gets them in the same step."""
    engine = start(Family("LLWW", None), blocks=16)
    request = engine.ask("long", PROMPTS[0][:140], 90)
    while not request.is_finished():
        engine.step()
    engine.ask("next", PROMPTS[1])
    engine.settle()
    assert engine.rank.stored > 10


def test_a_session_that_is_given_an_image_under_a_uuid_stores_nothing_more(start: Start) -> None:
    """VLLM does not look it up when it goes on."""
    engine = start(FULL)
    engine.rank.stores.holds = False
    prompt = PROMPTS[0][:100]
    engine.ask("session", prompt, resumable=True)
    engine.step(4)
    assert engine.rank.stored == 1
    place = PlaceholderRange(offset=0, length=IMAGE_TOKENS)
    image = MultiModalFeatureSpec(None, "image", "uuid-mine", place, mm_hash="7")
    engine.ask("session", [0] * IMAGE_TOKENS + prompt, resumable=True, mm_features=[image])
    engine.step(6)
    assert engine.rank.stored == 1
    engine.ask("session", [1])
    engine.settle()


def test_of_a_diffusion_request_that_only_reads_the_prompt_alone_is_stored(start: Start) -> None:
    """VLLM ends it without computing the KV of what it has generated."""
    engine = start(FULL)
    for name, extra in {"computes": None, "reads": {"diffusion_read_only": True}}.items():
        prompt = PROMPTS[extra is not None][:100]
        engine.ask(name, prompt, 90, extra)
        engine.settle()
    assert engine.rank.stored == 2 + 1


def test_a_session_with_an_adapter_stores_nothing_under_the_key_of_a_discarded_token(start: Start) -> None:
    """The ranks tell what they have loaded when the last token of the first turn is there, which vLLM discards."""
    engine = start(FAMILIES["adapters"])
    engine.rank.stores.holds = False
    ON_DISK["a"] = 1
    adapter = LoRARequest("a", 1, "a")
    engine.ask("session", PROMPTS[0][: CHUNK_TOKENS - 1], resumable=True, lora_request=adapter)
    engine.step(4)
    engine.ask("session", PROMPTS[1], resumable=True, lora_request=adapter)
    engine.step(6)
    assert engine.rank.stored > 1
    engine.ask("session", [1], lora_request=adapter)
    engine.settle()


def test_an_id_that_comes_again_while_the_first_of_its_name_stores_keeps_the_engine_alive(start: Start) -> None:
    engine = start(FULL)
    for prompt in PROMPTS[:3]:
        request = engine.ask("same", prompt)
        while not request.is_finished():
            engine.step()
    assert engine.rank.stores.held, "stores are out"
    engine.settle()
    assert engine.left() == []
    assert_all_loaded(engine, PROMPTS[:1])  # the others are not stored


def test_an_id_may_come_again_between_a_reset_and_the_next_step(start: Start) -> None:
    """A reset forgets requests that have ended. The next step signals their end; it must not forget the new one."""
    engine = start(FULL)
    request = engine.ask("same", PROMPTS[0])
    while not request.is_finished():
        engine.step()
    engine.core.reset_prefix_cache(reset_connector=True)
    engine.ask("same", PROMPTS[1])
    engine.settle()
    assert engine.left() == []


def test_the_external_cache_may_be_reset_twice_between_two_steps(start: Start) -> None:
    """While stores are out: vLLM's half asserts that none is to be flushed any more."""
    engine = start(FULL)
    engine.ask("first", PROMPTS[0])
    engine.step(6)
    assert engine.rank.stores.held, "stores are out"
    for _ in range(2):
        assert engine.core.reset_prefix_cache(True, True)
    engine.settle()
    assert engine.left() == []


@pytest.mark.parametrize("second_runner", RUNNERS.values(), ids=RUNNERS)
def test_stores_that_wait_read_their_blocks_before_these_are_zeroed(
    start: Start, second_runner: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small KV cache, and stores that read as late as they may. None is dropped because the machine is busy."""
    monkeypatch.setattr(jobs, "STORE_GRACE_S", 60.0)
    engine = start(FULL, second_runner=second_runner, blocks=20)
    for at, prompt in enumerate(PROMPTS):
        request = engine.ask(f"first-{at}", prompt)
        while not request.is_finished():
            engine.step()
    engine.settle()
    assert_all_loaded(engine, PROMPTS)


@pytest.mark.parametrize(("chunks", "more_tokens"), [(5, 1), (5, CHUNK_TOKENS - 1), (6, 0), (6, 1)])
def test_a_prompt_is_found_again_where_the_draft_has_a_window(
    start: Start, chunks: int, more_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but its last whole chunk: the draft's KV depends on the next token, which may be another one next time."""
    monkeypatch.setattr(jobs, "STORE_GRACE_S", 60.0)
    engine = start(FAMILIES["drafts with windows"])
    prompt = [*PROMPTS[0], 1][: chunks * CHUNK_TOKENS + more_tokens]
    engine.ask("computed", prompt)
    engine.settle()
    engine.reset_prefix_cache()
    engine.ask("loaded", prompt)
    engine.settle()
    assert engine.rank.began_with["loaded"] == (chunks - 1) * CHUNK_TOKENS


@pytest.mark.parametrize("family", ["drafts", "drafts and windows"])
def test_only_a_drafts_kv_of_a_blocks_last_token_may_be_another_continuations(start: Start, family: str) -> None:
    """It depends on the next token, which the block's hash does not cover. This is so in vLLM's own cache, too."""
    engine = start(FAMILIES[family], blocks=100)
    rank, prompt = engine.rank, PROMPTS[0]
    rank.stores.holds = False
    for name, text in {"other": [*prompt[: 5 * CHUNK_TOKENS], 7], "first": prompt, "vLLM's": prompt}.items():
        engine.ask(name, text)
        engine.settle()
    engine.reset_prefix_cache()
    engine.ask("ours", prompt)
    engine.settle()
    assert [told.split(" has ")[0] for told in rank.stale_drafts] == [
        f"request {name}: layer model.layers.2.self_attn.attn (E)" for name in ("vLLM's", "ours")
    ]
    assert all(told.endswith(f"for token {5 * CHUNK_TOKENS - 1}") for told in rank.stale_drafts)


@pytest.mark.parametrize(("prompt", "tokens"), [(PROMPTS[0], 1), (PROMPTS[2][:60], 90)], ids=["loads", "stores"])
def test_an_id_that_comes_again_while_a_token_of_the_first_is_on_its_way_is_left_alone(
    start: Start, prompt: list[int], tokens: int
) -> None:
    """VLLM takes that token for one of the second: it ends a load, or is stored with what it is not."""
    engine = start(FULL, "slab", second_runner=True)
    engine.rank.stores.holds = False
    engine.ask("stored", PROMPTS[0])
    engine.settle()
    engine.reset_prefix_cache()
    first = engine.ask("again", PROMPTS[1], 9)
    while not first.num_output_placeholders:
        engine.step()
    engine.core.abort_requests(["again"])
    second = engine.ask("again", prompt, tokens)
    engine.settle()
    assert second.is_finished()
    assert engine.left() == []


@pytest.mark.parametrize(**AXES)
def test_nothing_that_users_do_makes_a_request_begin_with_wrong_kv(
    start: Start, family: Family, medium: str, second_runner: bool
) -> None:
    """Requests, aborts, preemptions, sessions, resets, ids that come again, sleep, other weights, at random."""
    engine = start(family, medium, second_runner=second_runner)
    Fuzz(engine, 0, adapters=family.adapters).run(60)
    assert engine.left() == []
    assert engine.rank.answers >= 5
    if medium not in {"lazy", "blocks"} and not family.beside:  # which may have all, or are asked first
        assert engine.rank.moved["load"], "something was loaded"
