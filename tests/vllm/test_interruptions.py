"""Proves that requests which end early, are preempted, or meet a reset leave nothing wrong and nothing waiting.

Aborts come at every early step, so they hit prompts that are being computed, stored or loaded; afterwards every answer
is that of an engine without a connector, and the engine comes to rest: no job, no ticket, no pin is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from tests.vllm.harness import (
    BLOCK_TOKENS,
    Answer,
    Engine,
    Workshop,
    close,
    file_tier,
    prompts,
    same,
)

PROMPTS = prompts(3, steps=2, seed=91)
OTHERS = prompts(6, steps=2, seed=92)
STEPS = (1, 2, 3, 4, 6, 9)


@pytest.fixture(scope="module")
def right(workshop: Workshop) -> list[Answer]:
    """What a vLLM without us answers."""
    with workshop.start_engine() as engine:
        return engine.generate(PROMPTS)


@pytest.fixture(scope="module")
def engine(workshop: Workshop) -> Iterator[Engine]:
    """An engine with a file tier."""
    with workshop.start_engine(connector=file_tier(workshop.scratch / "kv-interrupted")) as started:
        yield started


@pytest.mark.parametrize("steps", STEPS)
def test_aborted_while_computing_and_storing(engine: Engine, right: list[Answer], steps: int) -> None:
    """Cold prompts are given up after some steps; then they are asked for again."""
    assert engine.settle()
    assert engine.reset_prefix_cache(connector=True)
    engine.abandon(OTHERS, steps=steps)
    assert same(engine.generate(PROMPTS), right)
    assert engine.settle(), "something is still waiting"


@pytest.mark.parametrize("steps", STEPS)
def test_aborted_while_loading(engine: Engine, right: list[Answer], steps: int) -> None:
    """Stored prompts are given up while their chunks come in, and are loaded again right away."""
    engine.generate(PROMPTS)
    assert engine.settle()
    assert engine.reset_prefix_cache()
    engine.abandon(PROMPTS, steps=steps)
    assert same(engine.generate(PROMPTS), right)
    assert engine.settle(), "something is still waiting"


def test_a_reset_while_stores_are_under_way(engine: Engine, right: list[Answer]) -> None:
    """The connector forgets everything at once; what was under way is not found afterwards, and can be stored again."""
    assert engine.settle()
    assert engine.reset_prefix_cache(connector=True)
    for _ in range(3):
        engine.abandon(PROMPTS, steps=4)
        engine.reset_prefix_cache(connector=True)
        answers = engine.generate(PROMPTS)
        assert same(answers, right)
        assert [answer.external_hit_tokens for answer in answers] == [0] * len(PROMPTS)
        engine.reset_prefix_cache(connector=True)
    assert engine.settle()
    engine.generate(PROMPTS)
    assert engine.settle()
    assert engine.reset_prefix_cache()
    answers = engine.generate(PROMPTS)
    assert same(answers, right)
    assert all(answer.external_hit_tokens for answer in answers)


def test_a_running_request_that_a_reset_preempts_is_loaded_in_the_same_step(workshop: Workshop) -> None:
    """Over and over, while its chunks are being stored and when they are: the engine lives, and answers as always."""
    with workshop.start_engine() as reference:
        right = reference.generate(OTHERS, max_tokens=24, together=True)
    with workshop.start_engine(connector=file_tier(workshop.scratch / "kv-reset-running")) as engine:
        answers, resets = engine.generate_through_resets(OTHERS, max_tokens=24, every=3)
        assert resets > 3
        assert all(close(answer, other) for answer, other in zip(answers, right, strict=True))
        assert engine.metrics()["vllm:kv_offload_load_bytes"] > 0, "nothing was loaded, so nothing was shown"
        assert engine.settle(), "something is still waiting"


def test_preempted_requests(workshop: Workshop) -> None:
    """Six requests on a KV cache for three: some are preempted and come back, from files or computed anew."""
    with workshop.start_engine() as reference:
        right = reference.generate(OTHERS, max_tokens=160, together=True)
    blocks = 3 * -(-len(OTHERS[0]) // BLOCK_TOKENS) + 4  # three prompts fit, their answers do not
    with workshop.start_engine(
        connector=file_tier(workshop.scratch / "kv-preempted"), num_gpu_blocks_override=blocks, max_model_len=2048
    ) as engine:
        answers = engine.generate(OTHERS, max_tokens=160, together=True)
        assert engine.metrics().get("vllm:num_preemptions", 0) > 0, "nothing was preempted, so nothing was shown"
        assert all(close(answer, other) for answer, other in zip(answers, right, strict=True))
        assert engine.settle()
        again = engine.generate(OTHERS, max_tokens=16)
        beginnings = [dataclasses.replace(each, tokens=each.tokens[:16], logprobs=each.logprobs[:16]) for each in right]
        assert all(close(answer, other) for answer, other in zip(again, beginnings, strict=True))
