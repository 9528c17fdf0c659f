"""Proves on vLLM's CUDA platform, played by host memory, with both model runners: what a streaming-input session or a
request with a sliding window has stored, across a reset of the external cache, answers later requests with the bits of
a vLLM without a cache.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.demo.model import random_prompts
from tests.vllm.harness import chain_config
from tests.vllm.played.engine import SHAPE, PlayedEngine, PlayedWorkshop

CHUNK_TOKENS = 16
WINDOW = replace(SHAPE, sliding_window=64)
TURNS = random_prompts(SHAPE, [70, 45, 90], seed=41)
LONG, *OTHERS = random_prompts(SHAPE, [330, 200, 210, 220], seed=42)
CONFIG = chain_config({"kind": "memory", "capacity": "64MiB"}, chunk_tokens=CHUNK_TOKENS)


def ask(engine: PlayedEngine, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Return the answers to prompts, one after the other."""
    answers: dict[str, Any] = {}
    for number, prompt in enumerate(prompts):
        engine.add(f"asks-{number}", prompt)
        while engine.is_busy:
            answers |= engine.step()
    return [answers[f"asks-{number}"] for number in range(len(prompts))]


def session(engine: PlayedEngine, turns: list[list[int]]) -> list[int]:
    """Have a session of these turns, with another request between two; return all of its tokens."""
    from vllm import SamplingParams

    core, processor, name = engine.engine, engine.engine.input_processor, ""
    for number, turn in enumerate([*turns, [0]]):
        request = processor.process_inputs(
            "session",
            {"prompt_token_ids": turn},
            SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True),
            supported_tasks=core.get_supported_tasks(),
            resumable=number < len(turns),
        )
        if name:
            request.request_id, request.external_req_id = name, "session"
        else:
            processor.assign_request_id(request)
            name = request.request_id
        if number == len(turns):
            tokens = list(engine.scheduler.requests[name].all_token_ids)
        core.output_processor.add_request(request, None, None, 0)
        core.engine_core.add_request(copy.deepcopy(request))  # as sent to another process
        for _ in range(16):
            core.step()
        if number < len(turns):
            engine.add(f"between-{number}", OTHERS[number])
            for _ in range(16):
                core.step()
    return tokens


def after_a_session(model: str, runner: str, config: dict[str, Any], prompts: list[list[int]]) -> list[Any]:
    """Return the tokens of a session, and the answers to prompts that begin with some of them, from the tier."""
    engine = PlayedEngine(config, model=Path(model), runner=runner, kv_cache_blocks=80, max_model_len=512)
    tokens = session(engine, TURNS)
    assert engine.settle()["idle"], "something still waits"
    assert engine.engine.reset_prefix_cache()
    answers = ask(engine, prompts or [[*tokens[:length], 5] for length in (80, 130, len(tokens) - 1)])
    engine.shutdown()
    return [tokens, answers]


def answers_to(model: str, runner: str, prompts: list[list[int]]) -> list[Any]:
    """Return the answers of a vLLM without a cache."""
    engine = PlayedEngine(None, model=Path(model), runner=runner, enable_prefix_caching=False)
    answers = ask(engine, prompts)
    engine.shutdown()
    return answers


def after_a_reset(model: str, runner: str, config: dict[str, Any], prompts: list[list[int]]) -> list[Any]:
    """Reset the external cache while a request runs whose first blocks others have by now; return later answers."""
    engine = PlayedEngine(config, model=Path(model), runner=runner, kv_cache_blocks=64, max_model_len=496)
    engine.add("long", LONG, max_tokens=120)
    for _ in range(30):
        engine.step()
    for number, other in enumerate(OTHERS):
        engine.add(f"other-{number}", other, max_tokens=1)
        for _ in range(6):
            engine.step()
    assert not engine.engine.reset_prefix_cache(reset_connector=True), "a request runs"
    while engine.is_busy:
        engine.step()
    assert engine.settle()["idle"], "something still waits"
    assert engine.engine.reset_prefix_cache()
    answers = ask(engine, prompts)
    engine.shutdown()
    return answers


def bits(answers: list[dict[str, Any]]) -> list[Any]:
    return [[answer["tokens"], answer["logprobs"]] for answer in answers]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_what_a_session_stored_is_loaded_right(played: PlayedWorkshop, runner: str) -> None:
    arguments = {"model": str(played.model()), "runner": runner}
    tokens, answers = played.call(after_a_session, config=CONFIG, prompts=[], **arguments)
    assert [answer["cached_tokens"] for answer in answers] == [
        80,
        128,
        (len(tokens) - 1) // CHUNK_TOKENS * CHUNK_TOKENS,
    ]
    prompts = [[*tokens[:length], 5] for length in (80, 130, len(tokens) - 1)]
    assert bits(answers) == bits(played.call(answers_to, prompts=prompts, **arguments))


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_after_a_reset_a_window_is_not_stored_from_blocks_of_others(played: PlayedWorkshop, runner: str) -> None:
    arguments = {
        "model": str(played.model(WINDOW)),
        "runner": runner,
        "prompts": [LONG[: length * CHUNK_TOKENS + 1] for length in range(2, 21, 2)],
    }
    answers = played.call(after_a_reset, config=CONFIG, **arguments)
    assert bits(answers) == bits(played.call(answers_to, **arguments))
