"""Proves that ``kill -9`` during stores, six times over on one directory, never shows in an answer.

Each engine finds what the last one left, answers as a vLLM without us does, and is killed while it stores: the kills
come at moments evenly spread over the time that the stores take, from the first byte of a new chunk in the slab, in
random order (fixed seed). The tier is so small that chunks are evicted all the time, so slots change hands around the
kills.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest

from nixl_offload.units import parse_size
from tests.vllm.damage import ENGINE_OPTIONS, FULL_TOKENS, Reference, TierFiles, chunk_prompts
from tests.vllm.harness import Engine, EngineError, Workshop, file_tier

KILLS = 6
NEW_PROMPTS = 4
CAPACITY = "72MiB"
LATEST_S = 0.4
"""Latest kill after the first byte: about what the new prompts take."""


class Killer:
    """Kills an engine ``delay_s`` after its slab has changed. Used as a context; leaving it ends the thread."""

    def __init__(self, engine: Engine, slab: Path, delay_s: float) -> None:
        self._engine = engine
        self._slab = slab
        self._delay_s = delay_s
        self._before = self._mark()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while self._mark() == self._before:
            if self._over.wait(0.001):
                return
        time.sleep(self._delay_s)
        os.killpg(self._engine.pid, signal.SIGKILL)

    def _mark(self) -> int:
        try:
            return self._slab.stat().st_mtime_ns
        except FileNotFoundError:
            return 0


def test_kills_during_stores(workshop: Workshop) -> None:
    """After each kill: right answers for what was being stored then, and for a prompt stored long ago."""
    reference = Reference(workshop)
    delays_s = [LATEST_S * number / (KILLS - 1) for number in range(KILLS)]
    random.Random(20).shuffle(delays_s)
    files = TierFiles(workshop.scratch / "kv")
    tier = file_tier(files.base, capacity=CAPACITY)
    everything = chunk_prompts(KILLS * NEW_PROMPTS, seed=201)
    [lasting] = chunk_prompts(1, seed=202)
    with workshop.start_engine(connector=tier, **ENGINE_OPTIONS) as engine:
        reference.check_healed(engine, [lasting])
        engine.stop()

    new: list[list[int]] = []
    survived = []
    for number, delay_s in enumerate(delays_s):
        engine = workshop.start_engine(connector=tier, **ENGINE_OPTIONS)
        survived += [answer.external_hit_tokens for answer in reference.check(engine, [*new, lasting])][:-1]
        assert engine.settle()
        assert files.real_bytes() <= parse_size(CAPACITY)
        new = everything[number * NEW_PROMPTS : (number + 1) * NEW_PROMPTS]
        reference.answers(new)
        with Killer(engine, files.slab, delay_s), pytest.raises(EngineError):
            _serve_for_ever(engine, new)
        engine.close()

    assert files.real_bytes() <= parse_size(CAPACITY)
    assert any(survived), "no chunk outlived a kill"
    assert any(tokens < FULL_TOKENS for tokens in survived), "no kill came in time"
    with workshop.start_engine(connector=tier, **ENGINE_OPTIONS) as engine:
        reference.check_healed(engine, [*new, lasting])
        engine.stop()
    assert files.real_bytes() <= parse_size(CAPACITY)


def _serve_for_ever(engine: Engine, prompts: list[list[int]]) -> NoReturn:
    """Answer, and finish what is stored, until the engine is gone."""
    while True:
        engine.generate(prompts, max_tokens=16)
        engine.settle()
