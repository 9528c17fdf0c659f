"""Proves over a running vLLM that a full and a read-only disk cost nothing but hits: answers stay right.

One clear warning per cause, what is stored is still served, storing resumes when it can, and the capacity is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nixl_offload.units import parse_size
from tests.faults.conftest import SmallFilesystem
from tests.vllm.damage import ENGINE_OPTIONS, Prompt, Reference, TierFiles, chunk_prompts, until
from tests.vllm.harness import Engine, Workshop, file_tier

CAPACITY = "128MiB"
PROMPTS = chunk_prompts(2, seed=301)
REFUSES = "nothing is stored until this is over"

pytestmark = pytest.mark.parametrize("small_filesystem", [192 << 20], indirect=True)


class Fresh:
    """Prompts that nobody has seen, each answered rightly: every one of them makes the engine store."""

    def __init__(self, engine: Engine, reference: Reference, seed: int) -> None:
        self._engine = engine
        self._reference = reference
        self._prompts: Iterator[Prompt] = iter(chunk_prompts(120, seed=seed))

    def stored_bytes(self) -> int:
        """Serve one more; return what was stored for it."""
        before = self._engine.stored_bytes()
        self._reference.check(self._engine, [next(self._prompts)])
        assert self._engine.settle()
        return self._engine.stored_bytes() - before


def warnings(engine: Engine, words: str) -> list[str]:
    """The lines of the engine's log that warn in these words."""
    return [line for line in engine.log.read_text(errors="replace").splitlines() if words in line]


def test_a_full_disk(workshop: Workshop, reference: Reference, small_filesystem: SmallFilesystem) -> None:
    """Stores are refused with a warning, hits go on; with space again, storing goes on."""
    files = TierFiles(small_filesystem.path / "kv")
    with workshop.start_engine(connector=file_tier(files.base, capacity=CAPACITY), **ENGINE_OPTIONS) as engine:
        fresh = Fresh(engine, reference, seed=302)
        reference.check_healed(engine, PROMPTS)
        small_filesystem.fill()
        until(lambda: fresh.stored_bytes() == 0, "the disk is full")
        for _ in range(4):
            reference.check_healed(engine, PROMPTS)
            assert fresh.stored_bytes() == 0
        assert warnings(engine, f"{REFUSES} (full)")
        small_filesystem.drain()
        until(fresh.stored_bytes, "storing again")
        reference.check_healed(engine, PROMPTS)
        assert warnings(engine, "in use again")
        assert warnings(engine, REFUSES) == warnings(engine, f"{REFUSES} (full)")
        engine.stop()
    _survives_a_restart(workshop, reference, files)


def test_a_read_only_disk(workshop: Workshop, reference: Reference, small_filesystem: SmallFilesystem) -> None:
    """Under a running engine: reading goes on, storing pauses after one warning and comes back."""
    files = TierFiles(small_filesystem.path / "kv")
    with workshop.start_engine(connector=file_tier(files.base, capacity=CAPACITY), **ENGINE_OPTIONS) as engine:
        fresh = Fresh(engine, reference, seed=303)
        reference.check_healed(engine, PROMPTS)
        small_filesystem.make_read_only()
        until(lambda: fresh.stored_bytes() == 0, "nothing can be written")
        for _ in range(4):
            reference.check_healed(engine, PROMPTS)
            assert fresh.stored_bytes() == 0
        assert len(warnings(engine, REFUSES)) == 1
        small_filesystem.make_writable()
        until(fresh.stored_bytes, "storing again")
        reference.check_healed(engine, PROMPTS)
        assert len(warnings(engine, REFUSES)) == 1
        engine.stop()
    _survives_a_restart(workshop, reference, files)


def test_a_start_on_a_read_only_disk(
    workshop: Workshop, reference: Reference, small_filesystem: SmallFilesystem
) -> None:
    """The engine starts without the tier and says so once; when the disk can be written the tier joins."""
    files = TierFiles(small_filesystem.path / "kv")
    small_filesystem.make_read_only()
    with workshop.start_engine(connector=file_tier(files.base, capacity=CAPACITY), **ENGINE_OPTIONS) as engine:
        fresh = Fresh(engine, reference, seed=304)
        assert fresh.stored_bytes() == 0
        (line,) = warnings(engine, "not open (readonly)")
        assert str(files.base) in line
        small_filesystem.make_writable()
        until(fresh.stored_bytes, "the tier has joined")
        reference.check_healed(engine, PROMPTS)
        assert len(warnings(engine, "not open (")) == 1
        engine.stop()
    _survives_a_restart(workshop, reference, files)


def _survives_a_restart(workshop: Workshop, reference: Reference, files: TierFiles) -> None:
    assert files.real_bytes() <= parse_size(CAPACITY)
    with workshop.start_engine(connector=file_tier(files.base, capacity=CAPACITY), **ENGINE_OPTIONS) as engine:
        reference.check_healed(engine, PROMPTS)
        engine.stop()
    assert files.real_bytes() <= parse_size(CAPACITY)
