"""Every mover passes the shipped suite, bare and within ``LimitedMover``; GDS and GDS_MT over an emulated cuFile."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nixl_offload.errors import MoverUnavailableError
from nixl_offload.movers.base import MemoryKind, Mover
from nixl_offload.movers.copy import CopyMover
from nixl_offload.movers.limits import LimitedMover
from nixl_offload.movers.nixl import NixlMover
from nixl_offload.movers.nixl_plugins import PLUGINS
from nixl_offload.movers.select import probe_round_trip
from nixl_offload.testing.mover_suite import HugeExtentSuite, MoverSuite

HERE = Path(__file__).parent


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


class TestCopyLimited(MoverSuite):
    """The reference within limits that it does not have."""

    def make_mover(self) -> Mover:
        return LimitedMover(CopyMover())


class TestPosixAio(MoverSuite):
    """NIXL POSIX with libaio."""

    def make_mover(self) -> Mover:
        return posix("posix_aio")


class TestPosixAioLimited(MoverSuite):
    """The same, of any size."""

    def make_mover(self) -> Mover:
        return LimitedMover(posix("posix_aio"))


class TestPosixUring(MoverSuite):
    """NIXL POSIX with io_uring."""

    def make_mover(self) -> Mover:
        return posix("posix_uring")


class TestPosixUringLimited(MoverSuite):
    """The same, of any size."""

    def make_mover(self) -> Mover:
        return LimitedMover(posix("posix_uring"))


class TestHuge(HugeExtentSuite):
    """More than 2 GiB through a mover that takes less at once."""

    def make_mover(self) -> Mover:
        return LimitedMover(posix("posix_uring"))


@pytest.mark.parametrize("cases", ["TestThreaded", "TestBatch"])
def test_gds_over_the_emulation(cases: str, cufile_emulation: Path, tmp_path: Path) -> None:
    """The real GDS plugins pass the suite and survive injected faults, in a child whose loader finds our cuFile."""
    environment = dict(os.environ)
    paths = [str(cufile_emulation), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
    environment["CUFILE_EMULATION_CONTROL"] = str(cufile_emulation / "control")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'child'}"]
    child = subprocess.run(
        [*command, str(HERE / "emulation" / "gds_cases.py"), "-k", cases],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]
    assert "passed" in child.stdout
