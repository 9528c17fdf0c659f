"""Proves that ``kill -9`` during stores, six times over on one directory, never shows in an answer; nor a kill of an
engine that has come to rest.

Each engine finds what the last one left, answers as a vLLM without us does, and is killed while it stores: the kills
come at moments evenly spread over the time that the stores take, from the first byte of a new chunk in the slab, in
random order (fixed seed). The tier is so small that chunks are evicted all the time, so slots change hands around the
kills.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from nixl_offload.units import parse_size
from nixl_offload.vllm.connector import sentence_about_stopping
from tests.vllm.damage import ENGINE_OPTIONS, FULL_TOKENS, Reference, chunk_prompts, hits
from tests.vllm.harness import Engine, EngineError, Workshop, assert_same
from tests.vllm.manager_rig import config_of, memory_tier, slab_tier
from tests.vllm.media import slab

KILLS = 6
NEW_PROMPTS = 4
CAPACITY = "72MiB"
LATEST_S = 0.4
"""Latest kill after the first byte: about what the new prompts take."""
SETTLED_S = 1.0
"""As docs/operations.md says."""
SENTENCE = "vLLM will kill this engine as soon as it is told to stop"


@contextlib.contextmanager
def killing(engine: Engine, file: Path, delay_s: float) -> Iterator[None]:
    """Kill an engine so long after its slab has changed. Leaving the context ends the thread that does."""
    before, over = file.stat().st_mtime_ns, threading.Event()

    def kill() -> None:
        while file.stat().st_mtime_ns == before:
            if over.wait(0.001):
                return
        time.sleep(delay_s)
        os.killpg(engine.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_kills_during_stores(workshop: Workshop, reference: Reference) -> None:
    """After each kill: right answers for what was being stored then, and for a prompt stored long ago."""
    delays_s = [LATEST_S * number / (KILLS - 1) for number in range(KILLS)]
    random.Random(20).shuffle(delays_s)
    medium = slab(workshop.scratch / "kv", CAPACITY)
    everything = chunk_prompts(KILLS * NEW_PROMPTS, seed=201)
    [lasting] = chunk_prompts(1, seed=202)
    with workshop.start_engine(connector=medium.config(), **ENGINE_OPTIONS) as engine:
        reference.until_loaded(engine, [lasting])
        engine.stop()
    file = medium.namespace() / "rank-00000.slab"

    new: list[list[int]] = []
    survived = []
    for number, delay_s in enumerate(delays_s):
        engine = workshop.start_engine(connector=medium.config(), **ENGINE_OPTIONS)
        survived += [answer.external_hit_tokens for answer in reference.check(engine, [*new, lasting])][:-1]
        assert engine.settle()
        assert medium.real_bytes() <= parse_size(CAPACITY)
        new = everything[number * NEW_PROMPTS : (number + 1) * NEW_PROMPTS]
        reference.answers(new)
        with killing(engine, file, delay_s), pytest.raises(EngineError):
            _serve_for_ever(engine, new)
        engine.close()

    assert medium.real_bytes() <= parse_size(CAPACITY)
    assert any(survived), "no chunk outlived a kill"
    assert any(tokens < FULL_TOKENS for tokens in survived), "no kill came in time"
    with workshop.start_engine(connector=medium.config(), **ENGINE_OPTIONS) as engine:
        reference.until_loaded(engine, [*new, lasting])
        engine.stop()
    assert medium.real_bytes() <= parse_size(CAPACITY)


def _serve_for_ever(engine: Engine, asked: list[list[int]]) -> NoReturn:
    """Answer, and finish what is stored, until the engine is gone."""
    while True:
        engine.generate(asked, max_tokens=16)
        engine.settle()


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
    ("shutdown_timeout", "said"),
    [(0, "as soon as it is told to stop"), (3, "3 s after it is told to stop"), (4, None)],
)
def test_the_sentence_about_stopping_names_what_to_set(tmp_path: Path, shutdown_timeout: int, said: str | None) -> None:
    """Where a tier outlives the engine and vLLM waits no longer than ``drain_timeout``; never for memory alone."""
    vllm_config: Any = SimpleNamespace(shutdown_timeout=shutdown_timeout)
    assert sentence_about_stopping(vllm_config, config_of(memory_tier())) is None
    sentence = sentence_about_stopping(vllm_config, config_of(memory_tier(), slab_tier(tmp_path)))
    assert sentence is None if said is None else said in str(sentence)
    assert sentence is None or "--shutdown-timeout, some seconds above drain_timeout (3s)" in sentence
