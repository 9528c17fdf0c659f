"""Proves that the demo can fail: each thing that may go wrong in a result is named in a sentence, and only then.

No engine runs here: results are made up. The real demo runs by ``make demo``.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from examples.demo.engine import Answer
from examples.demo.handover import CHUNK_TOKENS, FULL_CHUNK_TOKENS, Computed, Handover, problems
from examples.demo.report import as_json, as_table
from examples.demo.run import DemoResult

CHUNK_BYTES = 1000
PROMPT_BYTES = FULL_CHUNK_TOKENS // CHUNK_TOKENS * CHUNK_BYTES


def _answer(*, cached: int = 0, external: int = 0, loaded: int | None = None, **changed: Any) -> Answer:
    loaded_bytes = (PROMPT_BYTES if external else 0) if loaded is None else loaded
    counters: dict[str, float] = {
        "vllm:external_prefix_cache_hits": external,
        "vllm:kv_offload_load_bytes": loaded_bytes,
    }
    made = Answer((1, 2), (-0.5, -0.25), cached, ttft_s=0.1, total_s=0.2, finish_reason="length", counters=counters)
    return dataclasses.replace(made, **changed)


COLD = _answer()
CACHED = _answer(cached=FULL_CHUNK_TOKENS)
LOADED = _answer(cached=FULL_CHUNK_TOKENS, external=FULL_CHUNK_TOKENS)
FIRST = Computed(cold=[COLD, COLD], gpu_prefix_cache=[CACHED, CACHED], stored_bytes=2 * PROMPT_BYTES, settled=True)
GOOD = Handover(place="files", chunk_bytes=CHUNK_BYTES, first=FIRST, taken=[LOADED, LOADED], stored_again_bytes=0)


def _result(handover: Handover) -> DemoResult:
    return DemoResult("cpu", "0", 100_000_000, handover, directory_bytes=2 * PROMPT_BYTES)


def test_a_good_result_has_no_problems() -> None:
    """Table and JSON can be made of it, too."""
    assert problems(GOOD) == []
    assert as_table(_result(GOOD)).row_count == 3
    shown = json.loads(json.dumps(as_json(_result(GOOD))))
    assert shown["ok"] is True
    assert shown["passes"]["files"]["external_hit_tokens"] == shown["stored_tokens"] == 2 * FULL_CHUNK_TOKENS


def changed_handover(good: Handover, first: dict[str, Any], taken: list[Answer] | None, again: int) -> Handover:
    """``good`` with what differs in it."""
    return dataclasses.replace(
        good,
        first=dataclasses.replace(good.first, **first),
        taken=good.taken if taken is None else taken,
        stored_again_bytes=again,
    )


@pytest.mark.parametrize(
    ("first", "taken", "again", "sentence"),
    [
        ({"cold": [COLD, CACHED]}, None, 0, "was not cold"),
        ({"gpu_prefix_cache": [CACHED, LOADED]}, None, 0, "not served from the GPU prefix cache"),
        ({"gpu_prefix_cache": [CACHED, COLD]}, None, 0, "not served from the GPU prefix cache"),
        ({"settled": False}, None, 0, "did not come to rest"),
        ({"stored_bytes": 2 * PROMPT_BYTES - 1}, None, 0, "engine stored 27999 bytes"),
        ({"stored_bytes": 2 * PROMPT_BYTES + 1}, None, 0, "engine stored 28001 bytes"),
        ({}, [LOADED, _answer(cached=256, external=256)], 0, "256 of 3584 tokens of prompt 2 from files"),
        ({}, [LOADED, _answer(cached=FULL_CHUNK_TOKENS, external=FULL_CHUNK_TOKENS, loaded=1)], 0, "loaded 14001 of"),
        ({}, None, 5, "that were there already"),
        ({}, [dataclasses.replace(LOADED, tokens=(1, 3)), LOADED], 0, "other tokens from files"),
        ({}, [dataclasses.replace(LOADED, logprobs=(-0.5, -0.2500001)), LOADED], 0, "other logprobs from files"),
        (
            {"gpu_prefix_cache": [dataclasses.replace(CACHED, logprobs=(-0.5, -0.3)), CACHED]},
            None,
            0,
            "other logprobs from the GPU",
        ),
    ],
)
def test_each_problem_is_said_in_one_sentence(
    first: dict[str, Any], taken: list[Answer] | None, again: int, sentence: str
) -> None:
    """Exactly one sentence, the right one, and ``ok`` is false."""
    handover = changed_handover(GOOD, first, taken, again)
    [found] = problems(handover)
    assert sentence in found
    assert as_json(_result(handover))["ok"] is False
