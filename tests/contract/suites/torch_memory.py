"""Memory for the suites of movers that torch allocates. Apart from the rest, which needs no torch.

Threading: one test, one thread.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.movers.base import MemoryKind, MemoryRegion

DEVICE_PAGE_BYTES = 64 << 10
"""What GPUs map at once: cuFile registers whole ones."""


class TorchMemory:
    """Memory that torch allocates: that of a CUDA device, or, without a device, page-locked memory of the host."""

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
            self._tensor.copy_(torch.from_numpy(values.copy()))  # torch warns of arrays that cannot be written
        if self._tensor.is_cuda:
            torch.cuda.synchronize(self._tensor.device)  # movers look at no stream
