"""Proves over a running vLLM that ours works beside another connector, in any order: inside vLLM's ``MultiConnector``.

The other is vLLM's ``ExampleConnector``: it loads within the step, verifies nothing, and whether it finds a prompt is
decided by the files that a test leaves it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.harness import TAIL_TOKENS, Answer, Engine, Workshop, close, file_tier, prompts

[PROMPT, OTHER_PROMPT] = prompts(2, seed=93)
ONE_STEP = {"max_num_batched_tokens": 2048}
"""``ExampleConnector`` stores what a prompt's first step has computed, so prompts are not computed in parts. A loaded
prompt then ends with another step than a computed one, and answers are compared by ``close``.
"""
CHUNKS_TOKENS = len(PROMPT) - TAIL_TOKENS
ORDERS = {"ours-first": [0, 1], "ours-last": [1, 0]}


@pytest.fixture(scope="module")
def right(workshop: Workshop) -> list[Answer]:
    """What a vLLM without connectors answers."""
    with workshop.start_engine(**ONE_STEP) as engine:
        return engine.generate([PROMPT, OTHER_PROMPT])


def beside_example(ours: Path, example: Path, order: list[int], *, module: str | None = None) -> dict[str, Any]:
    """Return the transfer config of ours and ``ExampleConnector``, or its heir in ``module``."""
    example.mkdir(exist_ok=True)
    children: list[dict[str, Any]] = [
        {
            "kv_connector": "NixlOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"config": file_tier(ours)},
        },
        {
            "kv_connector": "ExampleConnector" if module is None else "FailingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(example)},
            **({"kv_connector_module_path": module} if module is not None else {}),
        },
    ]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [children[at] for at in order]},
    }


@pytest.fixture(params=ORDERS.values(), ids=ORDERS.keys())
def order(request: pytest.FixtureRequest) -> list[int]:
    """Positions of ours and of the other."""
    chosen: list[int] = request.param
    return chosen


@pytest.fixture
def engine(workshop: Workshop, order: list[int], right: list[Answer], tmp_path: Path) -> Iterator[Engine]:
    """An engine with both, which has served ``PROMPT``."""
    config = beside_example(tmp_path / "ours", tmp_path / "example", order)
    with workshop.start_engine(kv_transfer_config=config, **ONE_STEP) as started:
        [first] = started.generate([PROMPT])
        assert first.cached_tokens == 0
        assert close(first, right[0])
        assert started.settle()
        yield started


def test_both_store_and_each_serves(
    engine: Engine, order: list[int], right: list[Answer], workshop: Workshop, tmp_path: Path
) -> None:
    """What was asked once is in both. The first in the list serves it; without its files the second does. After a stop
    an engine with ours alone serves it, too.
    """
    assert engine.stored_bytes() > 0
    assert any((tmp_path / "example").iterdir())
    loads_before = engine.metrics().get("vllm:kv_offload_load_bytes", 0)
    assert engine.reset_prefix_cache()
    engine.worker("clear_kv")
    [served] = engine.generate([PROMPT])
    assert served.external_hit_tokens >= CHUNKS_TOKENS
    assert close(served, right[0])
    is_ours = order[0] == 0
    assert (engine.metrics().get("vllm:kv_offload_load_bytes", 0) > loads_before) is is_ours

    shutil.rmtree(tmp_path / "example")
    (tmp_path / "example").mkdir()
    assert engine.reset_prefix_cache()
    engine.worker("clear_kv")
    [served] = engine.generate([PROMPT])
    assert served.external_hit_tokens == CHUNKS_TOKENS
    assert served.loaded_bytes > 0
    assert close(served, right[0])

    engine.stop()
    # vLLM turns that off beside a connector that does not know several KV cache groups, and it is part of the identity.
    groups = {"disable_hybrid_kv_cache_manager": True}
    with workshop.start_engine(connector=file_tier(tmp_path / "ours"), **groups, **ONE_STEP) as alone:
        [served] = alone.generate([PROMPT])
        assert served.external_hit_tokens == CHUNKS_TOKENS
        assert close(served, right[0])


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_what_another_connector_failed_to_load_is_not_stored(
    policy: str, workshop: Workshop, right: list[Answer], tmp_path: Path
) -> None:
    """The other loads damaged blocks within a step and says so at its end. With ``recompute`` vLLM computes them, with
    ``fail`` it fails the request; ours stores neither those blocks nor what was computed from them.
    """
    longer = PROMPT + OTHER_PROMPT[:500]
    config = beside_example(tmp_path / "ours", tmp_path / "example", [1, 0], module="tests.vllm.failing_connector")
    config["kv_load_failure_policy"] = policy
    with workshop.start_engine(kv_transfer_config=config, **ONE_STEP) as engine:
        engine.generate([PROMPT])
        assert engine.settle()
        assert engine.reset_prefix_cache(connector=True)  # ours forgets; the files of the other are still there
        engine.worker("clear_kv")
        [answer] = engine.generate([PROMPT])
        assert answer.finish_reason == ("error" if policy == "fail" else "length")
        if policy == "recompute":
            assert close(answer, right[0])
        warns = "MultiConnector has kv_load_failure_policy fail" in engine.log.read_text(errors="replace")
        assert warns == (policy == "fail")
        assert engine.settle()

        shutil.rmtree(tmp_path / "example")
        (tmp_path / "example").mkdir()
        assert engine.reset_prefix_cache()
        engine.worker("clear_kv")
        [answer, _] = engine.generate([PROMPT, longer])
        assert close(answer, right[0])
        assert engine.settle()
        assert engine.reset_prefix_cache()
        engine.worker("clear_kv")
        shutil.rmtree(tmp_path / "example")
        (tmp_path / "example").mkdir()
        [answer] = engine.generate([PROMPT])
        assert answer.loaded_bytes > 0
        assert close(answer, right[0])


def test_an_abort_before_the_recomputation_leaves_nothing_behind(
    workshop: Workshop, right: list[Answer], tmp_path: Path
) -> None:
    """The other's load has failed, and its client goes away: what the blocks hold is no hit for the next request, in
    vLLM's cache or in ours.
    """
    example = tmp_path / "example"
    config = beside_example(tmp_path / "ours", example, [1, 0], module="tests.vllm.failing_connector")

    def forget() -> None:
        shutil.rmtree(example)
        example.mkdir()

    with workshop.start_engine(kv_transfer_config=config, **ONE_STEP) as engine:
        engine.generate([PROMPT])
        assert engine.settle()
        assert engine.reset_prefix_cache(connector=True)
        engine.worker("clear_kv")
        engine.abandon([PROMPT], steps=1)
        forget()
        [answer] = engine.generate([PROMPT])
        assert close(answer, right[0])
        assert engine.settle()
        assert engine.reset_prefix_cache()
        engine.worker("clear_kv")
        forget()
        [answer] = engine.generate([PROMPT])
        assert answer.loaded_bytes > 0
        assert close(answer, right[0])
