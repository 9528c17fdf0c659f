"""Proves on a GPU: movers pass the whole contract suite with device memory (NIXL's GDS_MT, KvikIO) on the real cuFile,
and with page-locked host memory (NIXL's POSIX). Each device mover is first tried in its own process, and skipped with
the reason if it cannot run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from benchmarks.gpu.ways import unfit_movers
from nixl_offload.movers.base import MemoryKind, MemoryRegion, Mover
from nixl_offload.movers.kvikio import KvikioMover
from nixl_offload.movers.nixl import PLUGINS, NixlMover
from nixl_offload.movers.select import open_mover
from tests.contract.suites.mover_suite import MoverRigs, MoverSuite

pytestmark = pytest.mark.gpu

DEVICE_PAGE_BYTES = 64 << 10
"""Page size of GPU mappings; cuFile registers whole pages."""
TRIED = ("gds_mt", "kvikio")
TRIAL_S = 40.0
"""Less than the time limit of one test."""
CLOSE_S = 5.0
"""Short, so that a hung mover does not hold the machine for its default half minute."""


class TorchMemory:
    """Memory allocated by torch: of a CUDA device, or without ``device`` page-locked host memory."""

    def __init__(self, size_bytes: int, device: torch.device | None = None) -> None:
        whole_bytes = size_bytes + DEVICE_PAGE_BYTES
        if device is None:
            whole = torch.empty(whole_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            whole = torch.empty(whole_bytes, dtype=torch.uint8, device=device)
        begin = -whole.data_ptr() % DEVICE_PAGE_BYTES
        self._tensor = whole[begin : begin + size_bytes]
        kind = MemoryKind.DRAM if device is None else MemoryKind.VRAM
        self.region = MemoryRegion(self._tensor.data_ptr(), size_bytes, kind, whole.device.index or 0)

    def read(self, begin: int = 0, end: int | None = None) -> npt.NDArray[np.uint8]:
        copy: npt.NDArray[np.uint8] = self._tensor[begin:end].cpu().numpy().copy()
        return copy

    def write(self, values: npt.NDArray[np.uint8] | int) -> None:
        if isinstance(values, int):
            self._tensor.fill_(values)
        else:
            self._tensor.copy_(torch.from_numpy(values.copy()))  # torch warns of read-only arrays
        if self._tensor.is_cuda:
            torch.cuda.synchronize(self._tensor.device)  # movers do not wait for streams


@pytest.fixture(scope="session")
def unfit(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Movers that crash, hang or corrupt data, with the reason. All are tried at once."""
    return unfit_movers(str(tmp_path_factory.mktemp("trials")), TRIAL_S, emulate=False, names=TRIED)


class DeviceRigs(MoverRigs):
    """Movers of device memory, by name."""

    name: str
    memory_kind = MemoryKind.VRAM

    @pytest.fixture(autouse=True)
    def _fit(self, unfit: dict[str, str]) -> Iterator[None]:
        if self.name in unfit:
            pytest.skip(f"{self.name} does not run here: {unfit[self.name]}")
        yield
        torch.cuda.synchronize()

    def make_memory(self, size_bytes: int) -> Any:
        return TorchMemory(size_bytes, torch.device("cuda", torch.cuda.current_device()))

    def make_mover(self) -> Mover:
        return NixlMover(PLUGINS[self.name], close_timeout_s=CLOSE_S)


class TestGdsThreaded(DeviceRigs, MoverSuite):
    """NIXL's GDS_MT."""

    name = "gds_mt"


class TestKvikio(DeviceRigs, MoverSuite):
    """KvikIO: by cuFile, or by its bounce buffers if cuFile does not work."""

    name = "kvikio"

    def make_mover(self) -> Mover:
        return KvikioMover(close_timeout_s=CLOSE_S)


class TestPosixPageLocked(MoverSuite):
    """NIXL's POSIX plugin, by the first kernel interface that works, on memory that CUDA has page-locked."""

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self._directory = tmp_path

    def make_memory(self, size_bytes: int) -> Any:
        return TorchMemory(size_bytes)

    def make_mover(self) -> Mover:
        return open_mover("posix", MemoryKind.VRAM, str(self._directory)).mover
