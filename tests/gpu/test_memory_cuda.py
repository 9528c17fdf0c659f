"""The memory that mover suites use on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nixl_offload.movers.base import MemoryKind
from tests.contract.suites.torch_memory import TorchMemory

pytestmark = pytest.mark.gpu


def test_memory_that_torch_allocates() -> None:
    """What is written is read back, whole and in part; it lies where the region says, on a GPU's page."""
    memory = TorchMemory(1 << 16, torch.device("cuda"))
    assert memory.region.kind is MemoryKind.VRAM
    assert (memory.region.length_bytes, memory.region.address % (64 << 10)) == (1 << 16, 0)
    noise = np.random.default_rng(1).integers(0, 256, 1 << 16, dtype=np.uint8)
    memory.write(noise)
    assert np.array_equal(memory.read(), noise)
    assert np.array_equal(memory.read(100, 200), noise[100:200])
    memory.write(7)
    assert bool((memory.read(1 << 15) == 7).all())
