"""How a mover of files is chosen, what it does with a descriptor and with cut memory, and what scripted faults do."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nixl_offload.errors import MoverError, MoverUnavailableError
from nixl_offload.movers.base import (
    MemoryKind,
    MemoryRegion,
    Mover,
    Op,
    TransferState,
)
from nixl_offload.movers.copy import CopyMover
from nixl_offload.movers.nixl import _split_at
from nixl_offload.movers.select import SCRATCH_BYTES, candidates, open_mover
from tests.contract.suites.faulty_mover import Fault, FaultKind, FaultyMover
from tests.contract.suites.mover_suite import KIB, MIB, Rig, extents

PENDING, DONE, FAILED = TransferState.PENDING, TransferState.DONE, TransferState.FAILED


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[tuple[Rig, FaultyMover]]:
    """A rig on a FaultyMover with an empty script, and that."""
    mover = FaultyMover(CopyMover())
    rig = Rig(mover, tmp_path / "data", MemoryKind.DRAM, MIB, direct_io=True)
    yield rig, mover
    rig.close()


WHERE = extents(np.arange(4) * 64 * KIB, 64 * KIB)


def test_fault_counts(faulty: tuple[Rig, FaultyMover]) -> None:
    """Faults are counted per direction where one is given; ``every`` goes on from there."""
    rig, mover = faulty
    mover.script = [Fault(1, FaultKind.FAIL, Op.WRITE), Fault(2, FaultKind.REFUSE, Op.READ, every=True)]
    states = [rig.move(op, WHERE, WHERE).state for op in (Op.WRITE, Op.READ, Op.WRITE, Op.READ, Op.WRITE)]
    assert states == [DONE, DONE, FAILED, DONE, DONE]
    for _ in range(2):
        with pytest.raises(MoverError):
            rig.submit(Op.READ, WHERE, WHERE)
    assert mover.submitted == [Op.WRITE, Op.READ, Op.WRITE, Op.READ, Op.WRITE, Op.READ, Op.READ]


@pytest.mark.parametrize("kind", [FaultKind.SHORT, FaultKind.FAIL])
def test_fault_short(faulty: tuple[Rig, FaultyMover], kind: FaultKind) -> None:
    """Only the first bytes arrive, on the grid of O_DIRECT; SHORT says DONE all the same."""
    rig, mover = faulty
    mover.script = [Fault(0, kind, amount=70 * KIB + 17)]
    before = rig.memory.copy()
    transfer = rig.move(Op.READ, WHERE, WHERE)
    assert transfer.state is (DONE if kind is FaultKind.SHORT else FAILED)
    assert transfer.bytes_total == 256 * KIB
    assert np.array_equal(rig.memory[: 68 * KIB], rig.stored[: 68 * KIB])
    assert np.array_equal(rig.memory[68 * KIB :], before[68 * KIB :])


def test_fault_late(faulty: tuple[Rig, FaultyMover]) -> None:
    """PENDING for exactly so many polls after the bytes are there."""
    rig, mover = faulty
    mover.script = [Fault(0, FaultKind.LATE, amount=5)]
    transfer = rig.submit(Op.READ, WHERE, WHERE)
    while not np.array_equal(rig.memory[: 256 * KIB], rig.stored[: 256 * KIB]):
        pass
    states = list(itertools.takewhile(lambda state: state is PENDING, iter(lambda: mover.poll(transfer), None)))
    assert len(states) >= 5
    assert transfer.state is DONE


@pytest.mark.parametrize("op", list(Op))
def test_fault_corrupt(faulty: tuple[Rig, FaultyMover], op: Op) -> None:
    """One byte differs where the bytes arrive, and only there."""
    rig, mover = faulty
    mover.script = [Fault(0, FaultKind.CORRUPT, amount=64 * KIB + 3)]
    sent = (rig.stored if op is Op.READ else rig.memory)[: 256 * KIB].copy()
    assert rig.move(op, WHERE, WHERE).state is DONE
    arrived = (rig.memory if op is Op.READ else rig.raw_read())[: 256 * KIB]
    assert np.flatnonzero(arrived != sent).tolist() == [64 * KIB + 3]


def test_fault_stuck(faulty: tuple[Rig, FaultyMover]) -> None:
    """PENDING until released; closing makes the others FAILED without having touched anything."""
    rig, mover = faulty
    mover.script = [Fault(0, FaultKind.STUCK)]
    before = rig.memory.copy()
    transfer = rig.submit(Op.READ, WHERE, WHERE)
    assert {mover.poll(transfer) for _ in range(100)} == {PENDING}
    assert np.array_equal(rig.memory, before)
    mover.release()
    assert rig.wait(transfer).state is DONE
    assert np.array_equal(rig.memory[: 256 * KIB], rig.stored[: 256 * KIB])


def test_closing_fails_the_stuck(tmp_path: Path) -> None:
    """Closing ends what nobody released."""
    mover = FaultyMover(CopyMover(), [Fault(0, FaultKind.STUCK)])
    rig = Rig(mover, tmp_path / "data", MemoryKind.DRAM, MIB, direct_io=True)
    transfer = rig.submit(Op.READ, WHERE, WHERE)
    rig.close()
    assert mover.poll(transfer) is FAILED


def test_candidates() -> None:
    """Best first; what was asked for and nothing else."""
    assert candidates("auto", MemoryKind.DRAM) == ["posix_uring", "posix_aio", "copy"]
    assert candidates("auto", MemoryKind.VRAM) == ["gds_mt", "kvikio", "posix_uring", "posix_aio", "copy"]
    assert candidates("kvikio", MemoryKind.VRAM) == ["kvikio"]
    assert candidates("posix", MemoryKind.VRAM) == ["posix_uring", "posix_aio"]


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
