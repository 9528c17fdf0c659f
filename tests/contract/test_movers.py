"""Every mover of files passes the suite; GDS_MT and KvikIO over emulations."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nixl_offload.errors import MoverError, MoverUnavailableError
from nixl_offload.movers.base import FileId, MemoryKind, Mover, open_file
from nixl_offload.movers.kvikio import KvikioMover
from nixl_offload.movers.nixl import PLUGINS, NixlMover
from nixl_offload.movers.select import probe_round_trip
from nixl_offload.movers.threaded import CopyMover
from tests.contract.suites.mover_rig import HostMemory
from tests.contract.suites.mover_suite import MoverSuite
from tests.hostile import HostileFilesystem

HERE = Path(__file__).parent


@functools.cache
def uring_refusal() -> str:
    """Why the kernel refuses io_uring, as containers do. Asked once: a page written to a busy disk may take long."""
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
        return NixlMover(PLUGINS["posix_aio"])


class TestPosixUring(MoverSuite):
    """NIXL POSIX with io_uring."""

    def make_mover(self) -> Mover:
        if uring_refusal():
            pytest.skip(uring_refusal())
        return NixlMover(PLUGINS["posix_uring"])


class Notes(CopyMover):
    """Keeps the flags of the files that it gets."""

    flags = 0

    def adopt_file(self, fd: int, path: str, length_bytes: int, *, direct: bool) -> FileId:
        self.flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        return super().adopt_file(fd, path, length_bytes, direct=direct)


def test_only_the_open_is_made_without_blocking(tmp_path: Path) -> None:
    """io_uring answers EAGAIN for files that are left so on some devices."""
    (tmp_path / "data").write_bytes(bytes(4096))
    with contextlib.closing(Notes()) as mover:
        open_file(mover, str(tmp_path / "data"), 4096, direct_io=False)
        assert not mover.flags & os.O_NONBLOCK


@pytest.mark.parametrize("call", ["stat", "clear_flag"])
def test_a_file_whose_status_cannot_be_read_is_closed(tmp_path: Path, call: str) -> None:
    """NFS answers ESTALE to them where a file went away after it was opened."""
    (tmp_path / "data").write_bytes(bytes(4096))
    hostile, before = HostileFilesystem(), os.listdir("/proc/self/fd")
    hostile.refuse(errno.ESTALE, call)
    with contextlib.closing(CopyMover()) as mover, pytest.raises(MoverError, match=os.strerror(errno.ESTALE)):
        open_file(mover, str(tmp_path / "data"), 4096, direct_io=False, filesystem=hostile)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("module", ["gds_cases.py", "kvikio_cases.py"])
def test_over_the_emulation(module: str, cufile_emulation: Path, driver_emulation: Path, tmp_path: Path) -> None:
    """The real GDS_MT and KvikIO pass the suite and survive injected faults, in a child whose loader finds our cuFile
    and, for KvikIO, our driver.
    """
    paths = [cufile_emulation]
    if module == "kvikio_cases.py":
        pytest.importorskip("kvikio")
        paths.insert(0, driver_emulation)
    known = filter(None, [os.environ.get("LD_LIBRARY_PATH")])
    environment = os.environ | {
        "LD_LIBRARY_PATH": os.pathsep.join([*map(str, paths), *known]),
        "CUFILE_EMULATION_CONTROL": str(cufile_emulation / "control"),
        "OMP_NUM_THREADS": "1",  # torch's threads wait for each other where cores are few
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'child'}"]
    child = subprocess.run(
        [*command, str(HERE / "emulation" / module)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
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
        mover.register_memory(HostMemory(4096).region)
    mover.close()
