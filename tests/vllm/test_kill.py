"""Proves that what an engine stored a second before ``kill -9`` is found again, and that it says how vLLM will end it.
Kills during stores are the proof's: tests/prove/kills.py.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_offload.vllm.connector import sentence_about_stopping
from tests.vllm.damage import ENGINE_OPTIONS, FULL_TOKENS, chunk_prompts, hits
from tests.vllm.harness import Workshop, assert_same
from tests.vllm.manager_rig import config_of, memory_tier, slab_tier
from tests.vllm.media import slab

SETTLED_S = 1.0
"""As docs/operations.md says."""
SENTENCE = "vLLM will kill this engine as soon as it is told to stop"


def test_what_was_stored_a_second_before_a_kill_is_found_again(workshop: Workshop) -> None:
    """An engine that has come to rest is killed: the next one loads every chunk. vLLM's default is warned of."""
    texts = chunk_prompts(6, seed=131)
    connector = slab(workshop.scratch / "kv-stopped").config()
    with workshop.start_engine(connector=connector, **ENGINE_OPTIONS) as engine:
        right = engine.generate(texts)
        assert engine.settle()
        time.sleep(SETTLED_S)
        os.killpg(engine.pid, signal.SIGKILL)
        assert SENTENCE in engine.log.read_text()
    with workshop.start_engine(connector=connector, shutdown_timeout=10, **ENGINE_OPTIONS) as engine:
        answers = engine.generate(texts)
        assert SENTENCE not in engine.log.read_text()
    assert_same(answers, right)
    assert hits(answers) == FULL_TOKENS * len(texts)


@pytest.mark.parametrize(
    ("shutdown_timeout", "said"), [(0, "as soon as it is told to stop"), (3, "3 s after it is told to stop"), (4, None)]
)
def test_the_sentence_about_stopping_names_what_to_set(tmp_path: Path, shutdown_timeout: int, said: str | None) -> None:
    """Where a tier outlives the engine and vLLM waits no longer than ``drain_timeout``; never for memory alone."""
    vllm_config: Any = SimpleNamespace(shutdown_timeout=shutdown_timeout)
    assert sentence_about_stopping(vllm_config, config_of(memory_tier())) is None
    sentence = sentence_about_stopping(vllm_config, config_of(memory_tier(), slab_tier(tmp_path)))
    assert sentence is None if said is None else said in str(sentence)
    assert sentence is None or "--shutdown-timeout, some seconds above drain_timeout (3s)" in sentence
