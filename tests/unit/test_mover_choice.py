"""How a mover of files is chosen, which files and sizes every mover refuses, and that it closes movers that fail."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from nixl_offload.errors import MoverError, MoverUnavailableError
from nixl_offload.movers.base import MemoryId, MemoryKind, MemoryRegion, Op, open_file
from nixl_offload.movers.pinning import held
from nixl_offload.movers.select import SCRATCH_BYTES, open_mover
from nixl_offload.movers.threaded import CopyMover
from tests.contract.suites.faulty_mover import Fault, FaultKind, FaultyMover
from tests.contract.suites.mover_rig import HostMemory, extents


def test_choosing_tries_for_real(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Auto logs its choice at INFO. A candidate that cannot start is passed over with its reason. No file is left."""
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
    """Host memory plays the device's, so no mover accepts it: each gives its reason, and host memory is used."""
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
    lie = Fault(1, FaultKind.CORRUPT, amount=9)
    make = "nixl_offload.movers.select.make_mover"
    monkeypatch.setattr(make, lambda name, **_: FaultyMover(CopyMover(), [lie] if name != "copy" else []))
    opened = open_mover("auto", MemoryKind.DRAM, str(tmp_path))
    opened.mover.close()
    tried = [(probe.name, probe.ok) for probe in opened.report]
    assert tried == [("posix_uring", False), ("posix_aio", False), ("copy", True)]
    assert "other bytes" in opened.report[0].reason
    assert not os.listdir(tmp_path)


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    """Missing, a directory, a pipe, not writable: MoverError, nothing is created, nothing stays open."""
    os.mkfifo(tmp_path / "pipe")
    # A program that runs cannot be opened for writing by anyone, root included.
    program = tmp_path / "sleep"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.closing(CopyMover()) as mover, subprocess.Popen([str(program), "60"]) as process:
        try:
            for path in (tmp_path / "missing", tmp_path, tmp_path / "pipe", program):
                for direct_io in (True, False):
                    with pytest.raises(MoverError, match=path.name):
                        open_file(mover, str(path), 4096, direct_io=direct_io)
            assert len(os.listdir("/proc/self/fd")) == before
        finally:
            process.kill()
    assert not (tmp_path / "missing").exists()


def test_an_extent_above_the_limit_is_refused(tmp_path: Path) -> None:
    """The kernel moves no more in one read or write."""
    path, memory = tmp_path / "data", HostMemory(2 << 30)
    path.touch()
    os.truncate(path, 2 << 30)
    with contextlib.closing(CopyMover()) as mover:
        region, file = mover.register_memory(memory.region), open_file(mover, str(path), 2 << 30, direct_io=True)
        with pytest.raises(MoverError, match="in one extent"):
            mover.submit(Op.READ, region, extents([0], 2 << 30), file, extents([0], 2 << 30))


def test_what_fails_at_the_end_keeps_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither other regions nor other movers of a shared one; and ``close`` does not raise."""
    freed: list[str] = []

    def fails() -> None:
        raise MoverError("refused")

    region = MemoryRegion(0x7F00_0000_0000, 1 << 30)
    ends = [contextlib.ExitStack(), contextlib.ExitStack()]
    for end, call in zip(ends, (lambda: freed.append("the first's"), fails), strict=True):
        end.callback(call)
    first, second = (held(region, end) for end in ends)
    first.close()
    assert not freed
    with pytest.raises(MoverError, match="refused"):
        second.close()
    assert freed == ["the first's"]

    mover, given_back = CopyMover(), list[MemoryId]()
    regions = [mover.register_memory(MemoryRegion(4096 * at, 4096)) for at in (1, 2)]

    def unregister(memory: MemoryId) -> None:
        given_back.append(memory)
        raise MoverError(f"region {memory} refused")

    monkeypatch.setattr(mover, "unregister_memory", unregister)
    mover.close()
    assert given_back == regions
    assert [record.getMessage() for record in caplog.records] == [f"region {memory} refused" for memory in regions]
