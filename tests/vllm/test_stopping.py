"""What a stop costs, and what is said of it at start: a real engine that is killed, and the sentence for operators."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from nixl_offload.vllm.connector import sentence_about_stopping
from tests.vllm.harness import (
    CHUNK_TOKENS,
    Workshop,
    assert_same,
    file_tier,
    prompts,
)
from tests.vllm.manager_rig import config_of, memory_tier, slab_tier

SETTLED_S = 1.0
"""As docs/operations.md says."""
SENTENCE = "vLLM will kill this engine as soon as it is told to stop"


def test_what_was_stored_a_second_before_a_kill_is_found_again(workshop: Workshop) -> None:
    """An engine that has come to rest is killed: the next one loads every chunk. vLLM's default is warned of."""
    texts = prompts(6, steps=2, seed=131)
    tier = file_tier(workshop.scratch / "kv-stopped")
    with workshop.start_engine(connector=tier) as engine:
        right = engine.generate(texts)
        assert engine.settle()
        time.sleep(SETTLED_S)
        os.killpg(engine.pid, signal.SIGKILL)
        assert SENTENCE in engine.log.read_text()
    with workshop.start_engine(connector=tier, shutdown_timeout=10) as engine:
        answers = engine.generate(texts)
        assert SENTENCE not in engine.log.read_text()
    assert_same(answers, right)
    whole = len(texts[0]) // CHUNK_TOKENS * CHUNK_TOKENS
    assert [answer.external_hit_tokens for answer in answers] == [whole] * len(texts)


@pytest.mark.parametrize(
    ("shutdown_timeout", "said"),
    [(0, "as soon as it is told to stop"), (3, "3 s after it is told to stop"), (4, None)],
)
def test_the_sentence_names_what_to_set(tmp_path: Path, shutdown_timeout: int, said: str | None) -> None:
    """Where a tier outlives the engine and vLLM waits no longer than ``drain_timeout``; never for memory alone."""
    vllm_config: Any = SimpleNamespace(shutdown_timeout=shutdown_timeout)
    assert sentence_about_stopping(vllm_config, config_of(memory_tier())) is None
    sentence = sentence_about_stopping(vllm_config, config_of(memory_tier(), slab_tier(tmp_path)))
    if said is None:
        assert sentence is None
    else:
        assert sentence is not None
        assert said in sentence
        assert "--shutdown-timeout, some seconds above drain_timeout (3s)" in sentence
