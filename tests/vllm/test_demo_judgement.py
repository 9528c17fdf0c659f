"""Proves that the demo can fail: each thing that may go wrong in a result is named in a sentence, and only then.

No engine runs here: results are made up. The real demo runs by ``make demo``.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from examples.demo.engine import Answer
from examples.demo.report import as_json, as_table
from examples.demo.run import CHUNK_TOKENS, FULL_CHUNK_TOKENS, DemoResult, problems

CHUNK_BYTES = 1000
PROMPT_BYTES = FULL_CHUNK_TOKENS // CHUNK_TOKENS * CHUNK_BYTES


def _answer(*, cached: int = 0, external: int = 0, **changed: Any) -> Answer:
    counters: dict[str, float] = {
        "vllm:external_prefix_cache_hits": external,
        "vllm:kv_offload_load_bytes": PROMPT_BYTES if external else 0,
    }
    made = Answer((1, 2), (-0.5, -0.25), cached, ttft_s=0.1, total_s=0.2, finish_reason="length", counters=counters)
    return dataclasses.replace(made, **changed)


COLD = _answer()
CACHED = _answer(cached=FULL_CHUNK_TOKENS)
LOADED = _answer(cached=FULL_CHUNK_TOKENS, external=FULL_CHUNK_TOKENS)
GOOD = DemoResult(
    device="cpu",
    vllm="0",
    parameters=100_000_000,
    chunk_bytes=CHUNK_BYTES,
    cold=[COLD, COLD],
    gpu_prefix_cache=[CACHED, CACHED],
    files=[LOADED, LOADED],
    stored_bytes=2 * PROMPT_BYTES,
    loaded_bytes=2 * PROMPT_BYTES,
    stored_in_second_engine_bytes=0,
    settled=True,
    directory_bytes=2 * PROMPT_BYTES,
)


def test_a_good_result_has_no_problems() -> None:
    """Table and JSON can be made of it, too."""
    assert problems(GOOD) == []
    assert as_table(GOOD).row_count == 3
    shown = json.loads(json.dumps(as_json(GOOD)))
    assert shown["ok"] is True
    assert shown["passes"]["files"]["external_hit_tokens"] == 2 * FULL_CHUNK_TOKENS


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"cold": [COLD, CACHED]}, "was not cold"),
        ({"gpu_prefix_cache": [CACHED, LOADED]}, "not served from the GPU prefix cache"),
        ({"gpu_prefix_cache": [CACHED, COLD]}, "not served from the GPU prefix cache"),
        ({"settled": False}, "did not come to rest"),
        ({"stored_bytes": 2 * PROMPT_BYTES - 1}, "were stored"),
        ({"files": [LOADED, _answer(cached=256, external=256)]}, "256 of 3584 tokens of prompt 2"),
        ({"loaded_bytes": 1}, "were loaded"),
        ({"stored_in_second_engine_bytes": 5}, "that were there already"),
        ({"files": [dataclasses.replace(LOADED, tokens=(1, 3)), LOADED]}, "other tokens from files"),
        ({"files": [dataclasses.replace(LOADED, logprobs=(-0.5, -0.2500001)), LOADED]}, "other logprobs from files"),
        (
            {"gpu_prefix_cache": [dataclasses.replace(CACHED, logprobs=(-0.5, -0.3)), CACHED]},
            "other logprobs from the GPU",
        ),
    ],
)
def test_each_problem_is_said_in_one_sentence(changed: dict[str, Any], sentence: str) -> None:
    """Exactly one sentence, the right one, and ``ok`` is false."""
    result = dataclasses.replace(GOOD, **changed)
    [found] = problems(result)
    assert sentence in found
    assert as_json(result)["ok"] is False
