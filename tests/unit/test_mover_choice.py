"""How a mover of files is chosen, what it does with a descriptor and with cut memory, and what scripted faults do."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from nixl_offload.errors import MoverError, MoverUnavailableError
from nixl_offload.movers.base import (
    MemoryKind,
    MemoryRegion,
    Mover,
    TransferState,
)
from nixl_offload.movers.copy import CopyMover
from nixl_offload.movers.nixl import _split_at
from nixl_offload.movers.select import SCRATCH_BYTES, open_mover
from tests.contract.suites.faulty_mover import Fault, FaultKind, FaultyMover
from tests.contract.suites.mover_suite import KIB

PENDING, DONE, FAILED = TransferState.PENDING, TransferState.DONE, TransferState.FAILED


def test_choosing_tries_for_real(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Auto says at INFO what it took; a candidate that cannot start is passed over with its reason; no file stays."""
    with caplog.at_level("INFO", "nixl_offload"):
        opened = open_mover("auto", MemoryKind.DRAM, str(tmp_path))
    opened.mover.close()
    assert opened.report[-1].ok
    assert opened.mover.name == opened.report[-1].name
    assert opened.mover.name in caplog.text
    assert not list(tmp_path.iterdir())
    with pytest.raises(MoverUnavailableError, match=r"device|plugin does not start"):
        open_mover("gds_mt", MemoryKind.DRAM, str(tmp_path))
    with pytest.raises(MoverUnavailableError, match="scratch file"):
        open_mover("auto", MemoryKind.DRAM, str(tmp_path / "missing"))


def test_what_is_passed_over_for_device_memory_is_told_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Host memory plays the device's, so nothing here takes it: each says what it lacks, and host memory is used."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        pytest.skip("this machine has a driver")
    pages = mmap.mmap(-1, SCRATCH_BYTES)
    scratch = MemoryRegion(ctypes.addressof(ctypes.c_char.from_buffer(pages)), SCRATCH_BYTES, MemoryKind.VRAM)
    with caplog.at_level("INFO", "nixl_offload"):
        opened = open_mover("auto", MemoryKind.VRAM, str(tmp_path), scratch=scratch)
    opened.mover.close()
    assert [probe.name for probe in opened.report if not probe.ok][:2] == ["gds_mt", "kvikio"]
    assert opened.report[-1].name in ("posix_uring", "posix_aio")
    assert "no NVIDIA driver" in opened.report[1].reason
    assert "packs through host memory" in opened.report[-1].reason
    assert all(probe.reason in caplog.text for probe in opened.report)


def test_a_probe_believes_bytes_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mover that says DONE but moves other bytes is passed over."""

    def liar(name: str, **_tuning: int) -> Mover:
        return FaultyMover(CopyMover(), [Fault(1, FaultKind.CORRUPT, amount=9)] if name != "copy" else [])

    monkeypatch.setattr("nixl_offload.movers.select.make_mover", liar)
    opened = open_mover("auto", MemoryKind.DRAM, str(tmp_path))
    opened.mover.close()
    assert [(probe.name, probe.ok) for probe in opened.report] == [
        ("posix_uring", False),
        ("posix_aio", False),
        ("copy", True),
    ]
    assert "other bytes" in opened.report[0].reason
    assert not os.listdir(tmp_path)


def test_a_descriptor_that_cannot_be_looked_at_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server forgot the file, say: what a mover was given it closes, whatever it answers."""
    mover, path = CopyMover(), tmp_path / "data"
    path.write_bytes(bytes(KIB))
    fd, fstat = os.open(path, os.O_RDONLY | os.O_CLOEXEC), os.fstat

    def stale(fd: int) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "fstat", stale)
    with pytest.raises(MoverError, match=r"[Ss]tale"):
        mover.adopt_file(fd, str(path), KIB, direct=False)
    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)
    mover.close()


def test_extents_are_cut_where_registered_memory_is() -> None:
    """Against a byte-by-byte reckoning; an extent that touches a cut is left whole."""
    rng = np.random.default_rng(3)
    for _ in range(50):
        cuts = np.unique(rng.integers(1, 400, rng.integers(1, 6)))
        begins, lengths = rng.integers(0, 300, 7), rng.integers(1, 100, 7)
        mem = np.stack([begins, lengths], axis=1)
        fil = np.stack([rng.integers(0, 10_000, 7), lengths], axis=1)
        cut_mem, cut_fil = _split_at(mem, fil, cuts)
        pairs = [
            (m + n, f + n) for (m, size), (f, _) in zip(mem.tolist(), fil.tolist(), strict=True) for n in range(size)
        ]
        found = []
        for (m, size), (f, same) in zip(cut_mem.tolist(), cut_fil.tolist(), strict=True):
            assert size == same > 0
            assert not [cut for cut in cuts if m < cut < m + size]
            found += [(m + n, f + n) for n in range(size)]
        assert found == pairs
    touching = np.array([[0, 100], [100, 50]])
    assert _split_at(touching, touching, np.array([100, 150]))[0] is touching
