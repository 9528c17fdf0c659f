"""Proves over a running vLLM that a prompt served from a tier is answered exactly as without any cache.

The reference is an engine without a connector. Against it stand an engine that stores, the same engine after it forgot
its prefix cache, and engines whose requests end early, are preempted, or meet a reset. That the comparison can fail is
shown on the loaded blocks themselves: damaged, they change the answer. ``test_chain`` has restarts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from examples.demo.model import TINY_HYBRID
from tests.vllm.damage import Reference, token_bytes
from tests.vllm.harness import (
    BLOCK_TOKENS,
    MAX_BATCHED_TOKENS,
    TAIL_TOKENS,
    TINY,
    Answer,
    Engine,
    ModelShape,
    Workshop,
    ask_anew,
    assert_close,
    assert_same,
    prompts,
)
from tests.vllm.media import memory, slab

PROMPTS = prompts(4, seed=21)
FULL_TOKENS = len(PROMPTS[0]) - TAIL_TOKENS
FORK = PROMPTS[0][: 2 * MAX_BATCHED_TOKENS] + PROMPTS[1][2 * MAX_BATCHED_TOKENS :]
"""Shares its first chunks with the first prompt and goes on differently."""
MANY = prompts(12, steps=2, seed=22)
OTHERS = MANY[:6]
CASES = {
    f"{name}, {groups}": (name, shape)
    for name in ("slab", "memory")
    for groups, shape in (("one group", TINY), ("two groups", TINY_HYBRID))
}
everywhere = pytest.mark.parametrize("scene", CASES, indirect=True, scope="module")
on_a_slab = pytest.mark.parametrize("scene", list(CASES)[:2], indirect=True, scope="module")


@dataclass
class Scene:
    """A model, answers of an engine without a connector, each computed from nothing, and an engine with one."""

    shape: ModelShape
    right: dict[str, list[Answer]]
    engine: Engine

    @property
    def has_windows(self) -> bool:
        return self.shape.sliding_window is not None

    def all_loaded(self, asked: list[list[int]], right: list[Answer]) -> None:
        """Every full chunk comes from the connector, and the answers are the same to the last bit."""
        answers = ask_anew(self.engine, asked)
        assert [answer.external_hit_tokens for answer in answers] == [FULL_TOKENS] * len(answers)
        assert [answer.cached_tokens for answer in answers] == [FULL_TOKENS] * len(answers)
        assert_same(answers, right)


@pytest.fixture(scope="module")
def right_of(workshop: Workshop) -> Callable[[ModelShape], dict[str, list[Answer]]]:
    """Gives what a vLLM without us answers."""

    @functools.cache
    def answers(shape: ModelShape) -> dict[str, list[Answer]]:
        with workshop.start_engine(shape) as engine:
            reference = Reference(engine)
            asked = {"each": PROMPTS, "fork": [FORK], "many": MANY}
            right = {name: reference.answers(prompts) for name, prompts in asked.items()}
            return right | {"long": engine.generate(OTHERS, max_tokens=160, together=True)}

    return answers


@pytest.fixture(scope="module")
def scene(
    request: pytest.FixtureRequest, workshop: Workshop, right_of: Callable[[ModelShape], dict[str, list[Answer]]]
) -> Iterator[Scene]:
    name, shape = CASES[request.param]
    medium = memory() if name == "memory" else slab(workshop.scratch / f"kv-{shape.sliding_window}")
    right, engine = right_of(shape), workshop.start_engine(shape, medium.config())
    yield Scene(shape, right, engine)
    engine.stop()


@everywhere
def test_what_is_stored_is_found_and_changes_no_answer(scene: Scene) -> None:
    """Full chunks are stored once. Prompts that fork off a stored one take the common beginning; those with another
    ``cache_salt`` nothing.
    """
    engine = scene.engine
    answers = engine.generate(PROMPTS)
    assert [answer.cached_tokens for answer in answers] == [0] * len(PROMPTS)
    assert_same(answers, scene.right["each"])
    assert engine.settle()
    stored_bytes = engine.stored_bytes()
    if not scene.has_windows:
        assert stored_bytes == len(PROMPTS) * FULL_TOKENS * token_bytes()
    scene.all_loaded(PROMPTS, scene.right["each"])
    assert engine.settle()
    assert engine.stored_bytes() == stored_bytes
    assert engine.reset_prefix_cache()
    together = engine.generate(PROMPTS, together=True)  # other shapes of batches: logprobs are only close
    assert [answer.cached_tokens for answer in together] == [FULL_TOKENS] * len(PROMPTS)
    assert_close(together, scene.right["each"])
    # Of a sliding-window group vLLM stores just the last window, so there a prefix that ends earlier is a miss.
    [answer] = ask_anew(engine, [FORK])
    assert answer.external_hit_tokens == (0 if scene.has_windows else 2 * MAX_BATCHED_TOKENS)
    assert_same([answer], scene.right["fork"])
    scene.all_loaded([FORK], scene.right["fork"])
    [answer] = ask_anew(engine, [FORK], salt="another tenant's")
    assert answer.external_hit_tokens == 0
    assert_same([answer], scene.right["fork"])


@everywhere
def test_a_wrong_load_would_be_noticed(scene: Scene) -> None:
    """Damage to any of the blocks that were just loaded changes the answer; damaging them back restores it."""
    engine, right = scene.engine, scene.right["each"]
    scene.all_loaded(PROMPTS[:1], right[:1])
    loaded = engine.worker("written_blocks")[0]
    noticed = 0
    for blocks in (loaded, *([block] for block in loaded)):
        engine.worker("poison_blocks", blocks)
        [damaged] = engine.generate(PROMPTS[:1])
        assert damaged.external_hit_tokens == 0
        assert blocks != loaded or damaged.tokens != right[0].tokens
        noticed += not damaged.same_as(right[0])
        engine.worker("poison_blocks", blocks)
    assert noticed == 1 + (FULL_TOKENS + (scene.shape.sliding_window or 0)) // BLOCK_TOKENS
    assert_same(engine.generate(PROMPTS[:1]), right[:1])


@everywhere
def test_requests_that_are_aborted(scene: Scene) -> None:
    """At every early step, while they compute, store or load; then other prompts are asked, and the same again."""
    engine, asked, right = scene.engine, MANY[:3], scene.right["many"][:3]
    for steps in (1, 2, 3, 4, 6, 9):
        assert engine.settle()
        assert engine.reset_prefix_cache(connector=True)
        engine.abandon(MANY[6:], steps=steps)
        assert_same(engine.generate(asked), right)
        assert engine.settle(), "something is still waiting"
        assert engine.reset_prefix_cache()
        engine.abandon(asked, steps=steps)
        assert_same(engine.generate(asked), right)
        assert engine.settle(), "something is still waiting"


@on_a_slab
def test_a_running_request_that_a_reset_preempts_is_loaded_in_the_same_step(scene: Scene) -> None:
    """Repeatedly, while its chunks are being stored and after that. The engine lives, and its answers stay right."""
    engine = scene.engine
    loaded = engine.metrics()["vllm:kv_offload_load_bytes"]
    answers, resets = engine.generate_through_resets(OTHERS, max_tokens=24, every=3)
    assert resets > 3
    assert_close(answers, _begins(scene.right["long"], 24))
    assert engine.metrics()["vllm:kv_offload_load_bytes"] > loaded, "nothing was loaded, so nothing was shown"
    assert engine.settle(), "something is still waiting"


@on_a_slab
def test_an_engine_short_of_blocks(scene: Scene, workshop: Workshop) -> None:
    """The KV cache holds three prompts, not their answers. Twelve prompts are served three times, alone and together,
    then six with long answers.

    Blocks are reused while their stores are under way and while other requests load. Requests are preempted and
    resumed. No answer may differ.
    """
    tier = slab(workshop.scratch / f"kv-short-{scene.shape.sliding_window}").config()
    blocks = (3 * -(-len(MANY[0]) // BLOCK_TOKENS) + 4) * (2 if scene.has_windows else 1)
    right = scene.right["many"]
    with workshop.start_engine(scene.shape, tier, num_gpu_blocks_override=blocks, max_model_len=2048) as engine:
        assert_same(engine.generate(MANY), right)
        together = engine.generate(MANY, together=True)
        assert_close(together, right)
        assert engine.settle()
        again = engine.generate(MANY)
        assert_same(again, right)
        assert sum(answer.external_hit_tokens for answer in again) > 0
        long = engine.generate(OTHERS, max_tokens=160, together=True)
        assert engine.metrics()["vllm:num_preemptions"] > 0, "nothing was preempted, so nothing was shown"
        assert_close(long, scene.right["long"])
        assert engine.settle()
        again = engine.generate(OTHERS, max_tokens=16)
        assert_close(again, _begins(scene.right["long"], 16))
        engine.stop()


def _begins(answers: list[Answer], tokens: int) -> list[Answer]:
    return [dataclasses.replace(each, tokens=each.tokens[:tokens], logprobs=each.logprobs[:tokens]) for each in answers]
