"""Proves over a running vLLM that ours works beside another connector, in any order: inside vLLM's ``MultiConnector``.

The other is vLLM's ``ExampleConnector``: it loads within the step, verifies nothing, and whether it finds a prompt is
decided by the files that a test leaves it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from examples.demo.engine import transfer_config
from tests.vllm.damage import Reference
from tests.vllm.harness import TAIL_TOKENS, Answer, Engine, Workshop, ask_anew, close, file_tier, prompts, several

[PROMPT, OTHER_PROMPT] = prompts(2, seed=93)
ONE_STEP = {"max_num_batched_tokens": 2048}
"""``ExampleConnector`` stores what a prompt's first step has computed, so prompts are not computed in parts. A loaded
prompt then ends with another step than a computed one, and answers are compared by ``close``.
"""
CHUNKS_TOKENS = len(PROMPT) - TAIL_TOKENS


@pytest.fixture(scope="module")
def right(reference: Reference) -> list[Answer]:
    """The answers of a vLLM without connectors."""
    return reference.answers([PROMPT, OTHER_PROMPT])


def beside_example(
    ours: Path, example: Path, order: list[int], *, module: str | None = None, policy: str = "recompute"
) -> dict[str, Any]:
    """Return the transfer config of ours and ``ExampleConnector``, or its heir in ``module``."""
    example.mkdir(exist_ok=True)
    storage = {"shared_storage_path": str(example)}
    other: dict[str, Any] = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": storage}
    if module is not None:
        other |= {"kv_connector": "FailingConnector", "kv_connector_module_path": module}
    children = [transfer_config(file_tier(ours)), other]
    return several(*(children[at] for at in order), policy=policy)


def ask_ours(engine: Engine, example: Path) -> Answer:
    """Ask for ``PROMPT`` without what vLLM remembers, and without the other's files."""
    assert engine.settle()
    shutil.rmtree(example)
    example.mkdir()
    [answer] = ask_anew(engine, [PROMPT])
    return answer


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["ours-first", "ours-last"])
def test_both_store_and_each_serves(workshop: Workshop, order: list[int], right: list[Answer], tmp_path: Path) -> None:
    """Both store a prompt. The first in the list serves it; without the first one's files the second does. A new engine
    with ours alone serves it, too.
    """
    example = tmp_path / "example"
    config = beside_example(tmp_path / "ours", example, order)
    with workshop.start_engine(kv_transfer_config=config, **ONE_STEP) as engine:
        [first] = engine.generate([PROMPT])
        assert first.cached_tokens == 0
        assert close(first, right[0])
        assert engine.settle()
        assert engine.stored_bytes() > 0
        assert any(example.iterdir())
        [served] = ask_anew(engine, [PROMPT])
        assert served.external_hit_tokens >= CHUNKS_TOKENS
        assert close(served, right[0])
        assert (served.loaded_bytes > 0) is (order[0] == 0)
        served = ask_ours(engine, example)
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


@pytest.mark.parametrize("then", ["recompute", "fail", "abort"])
def test_what_another_connector_failed_to_load_is_not_stored(
    then: str, workshop: Workshop, right: list[Answer], tmp_path: Path
) -> None:
    """The other connector loads damaged blocks within a step and reports them after it. With ``recompute`` vLLM
    computes them, unless the client has gone; with ``fail`` the request fails. We store neither those blocks nor KV
    computed from them, and vLLM's own cache does not keep them either.
    """
    longer, example = PROMPT + OTHER_PROMPT[:500], tmp_path / "example"
    policy, module = "fail" if then == "fail" else "recompute", "tests.vllm.failing_connector"
    config = beside_example(tmp_path / "ours", example, [1, 0], module=module, policy=policy)
    with workshop.start_engine(kv_transfer_config=config, **ONE_STEP) as engine:
        engine.generate([PROMPT])
        assert engine.settle()
        assert engine.reset_prefix_cache(connector=True)  # ours forgets; the files of the other are still there
        engine.worker("clear_kv")
        if then == "abort":
            engine.abandon([PROMPT], steps=2)  # with async scheduling the second step has the outcome of the first
            shutil.rmtree(example)
            example.mkdir()
            [answer] = engine.generate([PROMPT])
        else:
            [answer] = engine.generate([PROMPT])
            assert answer.finish_reason == ("error" if then == "fail" else "length")
            if then == "recompute":
                assert close(answer, right[0])
            warns = "MultiConnector has kv_load_failure_policy fail" in engine.log.read_text(errors="replace")
            assert warns == (then == "fail")
            answer = ask_ours(engine, example)
            engine.generate([longer])
        assert close(answer, right[0])
        answer = ask_ours(engine, example)
        assert answer.loaded_bytes > 0
        assert close(answer, right[0])
