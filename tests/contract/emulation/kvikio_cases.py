"""The real KvikIO over an emulated driver and an emulated cuFile: the suite, and faults. Run in a child by
``test_movers.py``.

Device memory is such that only the driver's copies and cuFile can touch it. The child's loader must find the emulation,
so this module is not collected on its own: its name lacks ``test_``.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nixl_offload.errors import MoverError
from nixl_offload.movers.base import MemoryKind, MemoryRegion, Mover, Op, TransferState
from nixl_offload.movers.kvikio import KvikioMover
from tests.contract.suites.mover_rig import KIB, MIB, MoverRigs, Rig
from tests.contract.suites.mover_suite import MoverSuite

from .build import Control, Driver
from .cufile_rig import BACK, WHERE, CuFileFaults, control

__all__ = ["control"]

# First come, first served: KvikIO would load the one of NVIDIA's wheel.
_CUFILE = ctypes.CDLL("libcufile.so.0", mode=ctypes.RTLD_GLOBAL)
BOUNCE_BYTES = 256 * KIB
"""Small, so that most transfers are of several tasks."""


class DeviceMemory:
    """Memory of the emulated device."""

    def __init__(self, size_bytes: int) -> None:
        self._library: Any = Driver().library
        address = ctypes.c_size_t()
        assert self._library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size_bytes)) == 0
        self.region = MemoryRegion(address.value, size_bytes, MemoryKind.VRAM)

    def __del__(self) -> None:
        self._library.cuMemFree_v2(ctypes.c_size_t(self.region.address))

    def read(self, begin: int = 0, end: int | None = None) -> npt.NDArray[np.uint8]:
        """As HostMemory's."""
        begin, end, _ = slice(begin, end).indices(self.region.length_bytes)
        found = np.empty(end - begin, dtype=np.uint8)
        assert not self._library.cuMemcpyDtoH_v2(
            ctypes.c_void_p(found.ctypes.data),
            ctypes.c_size_t(self.region.address + begin),
            ctypes.c_size_t(found.nbytes),
        )
        return found

    def write(self, values: npt.NDArray[np.uint8] | int) -> None:
        """As HostMemory's."""
        data = np.full(self.region.length_bytes, values, dtype=np.uint8) if isinstance(values, int) else values
        data = np.ascontiguousarray(data)
        assert not self._library.cuMemcpyHtoD_v2(
            ctypes.c_size_t(self.region.address), ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes)
        )


@pytest.fixture(autouse=True)
def driver() -> Iterator[Driver]:
    """The emulated driver, without faults before and after each case."""
    driver = Driver()
    driver.reset()
    yield driver
    driver.reset()


class KvikioRigs(MoverRigs):
    """A mover on device memory, by the path that ``compat`` names."""

    compat = "ON"
    close_timeout_s = 5.0
    memory_kind = MemoryKind.VRAM

    @pytest.fixture(autouse=True)
    def compat_mode(self) -> Iterator[None]:
        """As ``KVIKIO_COMPAT_MODE`` would say it."""
        import kvikio.defaults

        with kvikio.defaults.set("compat_mode", kvikio.CompatMode[self.compat]):
            yield

    def make_mover(self) -> Mover:
        return KvikioMover(4, BOUNCE_BYTES, close_timeout_s=self.close_timeout_s)

    def make_memory(self, size_bytes: int) -> Any:
        return DeviceMemory(size_bytes)


class TestHost(KvikioRigs, MoverSuite):
    """Host memory, which KvikIO tells from a device's by asking the driver."""

    memory_kind = MemoryKind.DRAM

    def make_memory(self, size_bytes: int) -> Any:
        return MoverRigs.make_memory(self, size_bytes)


class TestCompat(KvikioRigs, MoverSuite):
    """Device memory through KvikIO's bounce buffers."""


class TestCuFile(KvikioRigs, MoverSuite):
    """Device memory by cuFile."""

    compat = "OFF"


class TestCompatFaults(KvikioRigs):
    """What becomes of faults on the way through bounce buffers."""

    def test_a_file_that_ends_off_the_grid(self, rig: Rig) -> None:
        """A read past the end fails in words, nothing comes late, and the next one works."""
        os.ftruncate(rig.fd, 4 * MIB - 6000)
        transfer = rig.move(Op.READ, WHERE, BACK)
        assert transfer.state is TransferState.FAILED
        assert str(transfer.error) == f"kvikio: read of {rig.path} failed: POSIX error on pread: EOF"
        assert not transfer.quarantine
        rig.assert_memory_is_ours(transfer)
        os.ftruncate(rig.fd, rig.size_bytes)
        assert rig.move(Op.READ, WHERE, BACK).state is TransferState.DONE

    @pytest.mark.parametrize("op", list(Op))
    def test_a_copy_that_fails(self, rig: Rig, driver: Driver, op: Op) -> None:
        """An error of the device is told per transfer, when all its pieces have ended."""
        driver["fail_copy_nth"] = 5
        transfer = rig.move(op, WHERE, BACK)
        assert transfer.state is TransferState.FAILED
        assert "emulated CUDA error" in str(transfer.error)
        assert driver["copies"] == len(WHERE)
        rig.assert_memory_is_ours(transfer)
        assert rig.move(op, WHERE, BACK).state is TransferState.DONE


class TestCuFileFaults(KvikioRigs, CuFileFaults):
    """What becomes of what cuFile says."""

    compat = "OFF"

    def test_late(self, rig: Rig, control: Control, driver: Driver) -> None:
        """Neither slow storage nor a device that computes keeps submit or poll waiting."""
        assert rig.mover.path_of(rig.file_id) == "cufile"  # type: ignore[attr-defined]
        control["delay_us"], driver["sync_us"] = 5000, 1_000_000
        begun = time.monotonic()
        transfer = rig.submit(Op.READ, WHERE[:2], BACK[:2])
        assert rig.mover.poll(transfer) is TransferState.PENDING
        assert time.monotonic() - begun < 0.9
        rig.wait(transfer)
        assert driver["syncs"] == 2, "KvikIO waits for the default stream no more: it need not be kept off the pump"
        assert np.array_equal(rig.memory[: 128 * KIB].reshape(2, -1), rig.stored.reshape(64, -1)[:-3:-1])

    def test_two_regions_of_one_allocation(self, control: Control) -> None:
        """CuFile knows allocations: the first region registers it, the second needs nothing."""
        memory = DeviceMemory(4 * MIB)
        mover = KvikioMover(4, BOUNCE_BYTES)
        before = control["buffers"]
        for n in range(2):
            mover.register_memory(MemoryRegion(memory.region.address + n * 2 * MIB, 2 * MIB, MemoryKind.VRAM))
            assert control["buffers"] == before + 1
        mover.close()
        assert control["buffers"] == before

    def test_refused_buffers_are_said_at_once(self, control: Control) -> None:
        """Registration fails where cuFile does not take the memory, instead of every transfer being slow."""
        control["fail_register"] = 1
        mover, memory = KvikioMover(4, BOUNCE_BYTES), DeviceMemory(MIB)
        with pytest.raises(MoverError, match=r"cannot register 1048576 bytes of device memory: .*COMPAT_MODE=ON"):
            mover.register_memory(memory.region)
        control["fail_register"] = 0
        mover.unregister_memory(mover.register_memory(memory.region))
        mover.close()
