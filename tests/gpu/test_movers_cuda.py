"""Proves on a GPU: movers keep their contract with device memory (NIXL's GDS_MT and GDS, KvikIO) and with page-locked
memory of the host (NIXL's POSIX): the whole shipped suite, the real cuFile beneath. Each is tried in a process of its
own first, and skipped with the reason where it cannot run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.ways import unfit_movers
from nixl_offload.movers.base import MemoryKind, Mover
from nixl_offload.movers.kvikio import KvikioMover
from nixl_offload.movers.nixl import PLUGINS, NixlMover
from nixl_offload.movers.select import open_mover
from tests.contract.suites.mover_rig import SuiteMemory
from tests.contract.suites.mover_suite import MoverRigs, MoverSuite
from tests.contract.suites.torch_memory import TorchMemory

pytestmark = pytest.mark.gpu

TRIED = ("gds_mt", "kvikio")
TRIAL_S = 40.0
"""Less than what one test may take."""
CLOSE_S = 5.0
"""What hangs shall not keep the machine for the half minute that a mover would wait."""


@pytest.fixture(scope="session")
def unfit(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Movers that crash, hang, or do not bring back what they stored, with the reason; all tried at once."""
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

    def make_memory(self, size_bytes: int) -> SuiteMemory:
        return TorchMemory(size_bytes, torch.device("cuda", torch.cuda.current_device()))

    def make_mover(self) -> Mover:
        return NixlMover(PLUGINS[self.name], close_timeout_s=CLOSE_S)


class TestGdsThreaded(DeviceRigs, MoverSuite):
    """NIXL's GDS_MT."""

    name = "gds_mt"


class TestKvikio(DeviceRigs, MoverSuite):
    """KvikIO: cuFile, or its bounce buffers where cuFile cannot be had."""

    name = "kvikio"

    def make_mover(self) -> Mover:
        return KvikioMover(close_timeout_s=CLOSE_S)


class TestPosixPageLocked(MoverSuite):
    """NIXL's POSIX, with whichever of the kernel's interfaces runs, on memory that CUDA has locked."""

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self._directory = tmp_path

    def make_memory(self, size_bytes: int) -> SuiteMemory:
        return TorchMemory(size_bytes)

    def make_mover(self) -> Mover:
        return open_mover("posix", MemoryKind.VRAM, str(self._directory)).mover
