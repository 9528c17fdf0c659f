"""The wrappers around movers: what limits split and queue, what faults do, and how a mover is chosen."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_offload.errors import MoverError, MoverUnavailableError
from nixl_offload.movers.base import (
    Extents,
    FileId,
    MemoryId,
    MemoryKind,
    MemoryRegion,
    Mover,
    Op,
    Transfer,
    TransferState,
)
from nixl_offload.movers.copy import CopyMover
from nixl_offload.movers.limits import LimitedMover, split_at, split_extents
from nixl_offload.movers.select import SCRATCH_BYTES, candidates, open_mover
from tests.contract.suites.faulty_mover import Fault, FaultKind, FaultyMover
from tests.contract.suites.mover_suite import KIB, MIB, MoverSuite, Rig, extents

PENDING, DONE, FAILED = TransferState.PENDING, TransferState.DONE, TransferState.FAILED


class SmallMover(CopyMover):
    """A copy mover with small limits that it enforces, and a record of what was in flight."""

    def __init__(self, extent_bytes: int = 8 * KIB, per_transfer: int = 3, in_flight: int = 8) -> None:
        super().__init__(threads=2)
        self.limits = replace(
            self.limits,
            max_extent_bytes=extent_bytes,
            max_extents_per_transfer=per_transfer,
            max_extents_in_flight=in_flight,
        )
        self.open_ones: set[Transfer] = set()
        self.most_extents = 0
        self.sizes: dict[Transfer, int] = {}
        self.refuse_at: int | None = None
        self.refusal: Exception = MoverError("refused")

    def submit(
        self, op: Op, memory: MemoryId, memory_extents: Extents, file: FileId, file_extents: Extents
    ) -> Transfer:
        """Refuse the ``refuse_at``-th; count the others."""
        if self.refuse_at == len(self.sizes):
            raise self.refusal
        transfer = super().submit(op, memory, memory_extents, file, file_extents)
        self.open_ones.add(transfer)
        self.sizes[transfer] = len(memory_extents)
        self.most_extents = max(self.most_extents, sum(self.sizes[t] for t in self.open_ones))
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        """Count down."""
        state = super().poll(transfer)
        if state is not PENDING:
            self.open_ones.discard(transfer)
        return state


class TestSuiteWithSmallLimits(MoverSuite):
    """The whole contract, with nearly every case cut and queued. A faultless FaultyMover in between changes nothing."""

    def make_mover(self) -> Mover:
        return LimitedMover(FaultyMover(SmallMover(24 * KIB, 1000, 2500)))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[Rig, SmallMover]]:
    """A rig on a limited SmallMover, and that."""
    inner = SmallMover()
    rig = Rig(LimitedMover(inner), tmp_path / "data", MemoryKind.DRAM, MIB, direct_io=False)
    yield rig, inner
    rig.close()


@given(
    lengths=st.lists(st.integers(1, 100), max_size=20),
    limit=st.integers(1, 120),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=200, deadline=None)
def test_splitting_names_the_same_bytes(lengths: list[int], limit: int, seed: int) -> None:
    """Cut rows cover byte for byte what the rows did, in order, in pairs, none longer than the limit."""
    random = np.random.default_rng(seed)
    memory, file = (extents(random.integers(0, 1000, len(lengths)), lengths) for _ in range(2))

    def pairs(m: Extents, f: Extents) -> list[tuple[int, int]]:
        return [(a + i, b + i) for (a, n), (b, _) in zip(m.tolist(), f.tolist(), strict=True) for i in range(n)]

    cut_memory, cut_file = split_extents(memory, file, limit)
    assert pairs(cut_memory, cut_file) == pairs(memory, file)
    assert np.array_equal(cut_memory[:, 1], cut_file[:, 1])
    assert cut_memory[:, 1].max(initial=0) <= limit


def test_limits_are_kept_and_order_too(small: tuple[Rig, SmallMover]) -> None:
    """Three transfers of 24 pieces each: never more in flight than allowed, and the first submitted starts first."""
    rig, inner = small
    where = extents(np.arange(12) * 16 * KIB, 16 * KIB)
    transfers = [rig.submit(Op.READ, where + np.array([n * 192 * KIB, 0]), where) for n in range(3)]
    assert len(inner.sizes) == 2  # 3 + 3 extents; a third part would make 9
    rig.wait(transfers[2])  # the last one alone: what is queued before it must move too
    assert len(inner.sizes) == 24
    rig.wait(*transfers)
    assert [transfer.state for transfer in transfers] == [DONE] * 3
    assert inner.most_extents <= 8
    for n in range(3):
        assert np.array_equal(rig.memory[n * 192 * KIB : (n + 1) * 192 * KIB], rig.stored[: 192 * KIB])


def test_one_failed_part_fails_the_whole(tmp_path: Path) -> None:
    """The second of eight parts fails: FAILED when all that started are final; the rest never start."""
    inner = SmallMover()
    faulty = FaultyMover(inner, [Fault(1, FaultKind.FAIL, quarantine=True)])
    rig = Rig(LimitedMover(faulty), tmp_path / "data", MemoryKind.DRAM, MIB, direct_io=False)
    where = extents(np.arange(24) * 8 * KIB, 8 * KIB)
    transfer = rig.move(Op.READ, where, where)
    assert (transfer.state, transfer.quarantine) == (FAILED, True)
    assert "scripted" in (transfer.error or "")
    assert len(faulty.submitted) < 8
    assert not inner.open_ones
    with pytest.raises(MoverError, match="quarantine"):
        rig.mover.unregister_memory(rig.memory_id)
    assert rig.move(Op.READ, where, where).state is DONE
    rig.close()


def test_a_part_refused_late_is_a_failure(small: tuple[Rig, SmallMover]) -> None:
    """Once a part has started, a refusal of the next is FAILED; a refusal of the only part raises."""
    rig, inner = small
    where = extents(np.arange(6) * 8 * KIB, 8 * KIB)
    inner.refuse_at = 1
    assert rig.move(Op.READ, where, where).state is FAILED
    inner.refuse_at = len(inner.sizes)
    with pytest.raises(MoverError, match="refused"):
        rig.submit(Op.READ, where[:1], where[:1])
    inner.refuse_at = None
    assert rig.move(Op.READ, where, where).state is DONE
    rig.mover.unregister_memory(rig.memory_id)


def test_a_part_that_the_mover_chokes_on_is_a_failure_of_its_owner(small: tuple[Rig, SmallMover]) -> None:
    """A bug of the mover's, met while another transfer is polled, must not make DONE of what was never moved."""
    rig, inner = small
    where = extents(np.arange(9) * 8 * KIB, 8 * KIB)
    inner.refusal, inner.refuse_at = RuntimeError("a bug"), 3
    first, second = rig.submit(Op.READ, where, where), rig.submit(Op.READ, where[:3], where[:3])
    rig.wait(first, second)
    assert (first.state, second.state) == (DONE, FAILED)
    assert "a bug" in (second.error or "")
    assert second.quarantine, "nobody knows what was started"


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


# What limits cannot split away


class WholeMover(CopyMover):
    """A copy mover that writes as objects are written, and may not tell what came short."""

    def __init__(self, extent_bytes: int = MIB) -> None:
        super().__init__(threads=1)
        self.limits = replace(
            self.limits,
            whole_writes=True,
            tells_short_reads=False,
            max_extent_bytes=extent_bytes,
            max_extents_per_transfer=1,
        )


def test_whole_writes_stay_whole(tmp_path: Path) -> None:
    """The wrapper says what the wrapped mover said, splits reads only, and refuses a write too large for one piece."""
    mover = LimitedMover(WholeMover(64 * KIB))
    assert (mover.limits.whole_writes, mover.limits.tells_short_reads) == (True, False)
    rig = Rig(mover, tmp_path / "data", MemoryKind.DRAM, 64 * KIB, direct_io=False)
    assert rig.move(Op.WRITE, extents([0], 64 * KIB), extents([0], 64 * KIB)).state is DONE
    assert rig.move(Op.READ, extents([0, 8 * KIB], 4 * KIB), extents([8 * KIB, 0], 4 * KIB)).state is DONE
    for bad in (extents([0], 4 * KIB), extents([0, 32 * KIB], 32 * KIB)):
        with pytest.raises(MoverError, match="whole"):
            rig.submit(Op.WRITE, bad, bad)
    rig.close()
    large = Rig(LimitedMover(WholeMover(64 * KIB)), tmp_path / "large", MemoryKind.DRAM, MIB, direct_io=False)
    assert large.move(Op.READ, extents([0], MIB), extents([0], MIB)).state is DONE
    with pytest.raises(MoverError, match="at most"):
        large.submit(Op.WRITE, extents([0], MIB), extents([0], MIB))
    large.close()


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
        cut_mem, cut_fil = split_at(mem, fil, cuts)
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
    assert split_at(touching, touching, np.array([100, 150]))[0] is touching
