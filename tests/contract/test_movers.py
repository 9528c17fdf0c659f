"""Every mover passes the suite; GDS, GDS_MT and KvikIO over emulations."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nixl_offload.errors import MoverError, MoverUnavailableError
from nixl_offload.movers.base import FileId, MemoryId, MemoryKind, Mover, Op, open_file
from nixl_offload.movers.copy import CopyMover
from nixl_offload.movers.kvikio import KvikioMover
from nixl_offload.movers.nixl import NixlMover
from nixl_offload.movers.nixl_plugins import PLUGINS
from nixl_offload.movers.paired import PairedMover
from nixl_offload.movers.select import probe_round_trip
from tests.contract.suites.mover_suite import MoverSuite
from tests.unit.kv_shapes import DeviceCopyMover

HERE = Path(__file__).parent
WHOLE = np.array([[0, 4096]], dtype=np.int64)


def posix(name: str) -> NixlMover:
    """A POSIX mover, or a skip with the kernel's reason. Only io_uring may be refused: containers do that."""
    if name == "posix_uring" and (refusal := _uring_refusal()):
        pytest.skip(f"the kernel refuses io_uring: {refusal}")
    return NixlMover(PLUGINS[name])


@functools.cache
def _uring_refusal() -> str:
    """Asked once: a page written to a busy disk may take long."""
    mover = NixlMover(PLUGINS["posix_uring"])
    try:
        probe_round_trip(mover, MemoryKind.DRAM, "/tmp")
    except MoverUnavailableError as error:
        return str(error)
    finally:
        mover.close()
    return ""


class TestCopy(MoverSuite):
    """The reference."""

    def make_mover(self) -> Mover:
        return CopyMover()


class TestPosixAio(MoverSuite):
    """NIXL POSIX with libaio."""

    def make_mover(self) -> Mover:
        return posix("posix_aio")


class TestPosixUring(MoverSuite):
    """NIXL POSIX with io_uring."""

    def make_mover(self) -> Mover:
        return posix("posix_uring")


class TestPairedByHost(MoverSuite):
    """Two movers as one: host memory goes by the second."""

    def make_mover(self) -> Mover:
        return PairedMover(DeviceCopyMover(frozenset({MemoryKind.VRAM})), posix("posix_aio"))


class TestPairedByDevice(TestPairedByHost):
    """The same: what plays device memory goes by the first."""

    memory_kind = MemoryKind.VRAM


class Refuses(DeviceCopyMover):
    """Takes no file, and does not close."""

    def adopt_file(self, fd: int, path: str, length_bytes: int, *, direct: bool) -> FileId:
        """See Mover."""
        os.close(fd)
        raise MoverError("too many open files")

    def close(self) -> None:
        """See Mover."""
        super().close()
        raise MoverError("deregister memory failed")


class Notes(CopyMover):
    """Keeps the flags of the files that it gets."""

    flags = 0

    def adopt_file(self, fd: int, path: str, length_bytes: int, *, direct: bool) -> FileId:
        self.flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        return super().adopt_file(fd, path, length_bytes, direct=direct)


def test_only_the_open_is_made_without_blocking(tmp_path: Path) -> None:
    """io_uring answers EAGAIN for files that are left so on some devices."""
    (tmp_path / "data").write_bytes(bytes(4096))
    mover = Notes()
    open_file(mover, str(tmp_path / "data"), 4096, direct_io=False)
    assert not mover.flags & os.O_NONBLOCK
    mover.close()


def test_a_pair_leaves_nothing_open_though_one_of_the_two_fails(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(4096))
    before = len(os.listdir("/proc/self/fd"))
    for pair in ((DeviceCopyMover(), Refuses()), (Refuses(), DeviceCopyMover())):
        mover = PairedMover(*pair)
        with pytest.raises(MoverError, match="too many"):
            open_file(mover, str(path), 4096, direct_io=False)
        with pytest.raises(MoverError, match="deregister"):
            mover.close()
        for each in pair:
            with pytest.raises(MoverError, match="closed"):
                each.submit(Op.READ, MemoryId(1), WHOLE, FileId(1), WHOLE)
        assert len(os.listdir("/proc/self/fd")) == before


def test_gds_over_the_emulation(cufile_emulation: Path, tmp_path: Path) -> None:
    """The real GDS_MT passes the suite and survives injected faults, in a child whose loader finds our cuFile."""
    run_cases("gds_cases.py", [], [cufile_emulation], cufile_emulation / "control", tmp_path)


def test_kvikio_over_the_emulation(cufile_emulation: Path, driver_emulation: Path, tmp_path: Path) -> None:
    """The real KvikIO passes the suite with host and device memory, by cuFile and without, and survives faults."""
    pytest.importorskip("kvikio")
    paths = [driver_emulation, cufile_emulation]
    run_cases("kvikio_cases.py", [], paths, cufile_emulation / "control", tmp_path)


def run_cases(module: str, arguments: list[str], paths: list[Path], control: Path, tmp_path: Path) -> None:
    """Run the tests of an emulation's ``module`` in a child whose loader looks into ``paths`` first."""
    environment = dict(os.environ)
    known = filter(None, [os.environ.get("LD_LIBRARY_PATH")])
    environment["LD_LIBRARY_PATH"] = os.pathsep.join([*map(str, paths), *known])
    environment["CUFILE_EMULATION_CONTROL"] = str(control)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'child'}"]
    child = subprocess.run(
        [*command, str(HERE / "emulation" / module), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]
    assert "passed" in child.stdout


def test_kvikio_says_what_it_lacks() -> None:
    """Without NVIDIA's driver: a sentence at the first use, and nothing is left behind."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        pytest.skip("this machine has a driver")
    mover = KvikioMover()
    with pytest.raises(MoverUnavailableError, match="no NVIDIA driver"):
        mover.connect()
    mover.close()
