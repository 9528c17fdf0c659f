"""What is queued on a device for its KV groups: block ids on their way there, checksums on their way back.

Threading: the thread that drives the stream. Ownership on a CUDA device: what work allocates while it runs belongs to
its stream, so it may be let go at once; page-locked memory is torch's, which keeps it until the copies are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.engine.kernels.base import GroupKernels, Page
from nixl_offload.engine.kernels.select import open_kernels
from nixl_offload.engine.streams import Device, Fence, Stream
from nixl_offload.errors import LayoutError


class QueuedSums:
    """Implements ``packer.Sums``: checksums that a device computes, and then copies to the host."""

    def __init__(self, fence: Fence, host: torch.Tensor) -> None:
        self._fence = fence
        self._host = host

    @classmethod
    def begin(
        cls, stream: Stream, device: Device, count: int, work: Callable[[], torch.Tensor], fence: Fence
    ) -> QueuedSums:
        """Queue ``work``, which returns ``count`` checksums as GroupKernels do, behind ``fence``."""
        host = page_locked(count, torch.int64, device)

        def copied() -> None:
            host.copy_(work(), non_blocking=True)

        with taken_back(stream):
            stream.wait(fence)
            stream.run(copied)
            return cls(stream.record(), host)

    def done(self) -> bool:
        return self._fence.done()

    def values(self) -> npt.NDArray[np.uint64]:
        if not self._fence.done():
            raise RuntimeError("checksums were asked for before the device had them")
        words: npt.NDArray[np.int64] = self._host.numpy()
        return words.view(np.uint64)


class DeviceGroups:
    """The KV groups of one device: their kernels, and what kernels trust their callers to have checked."""

    def __init__(self, tensors: Sequence[torch.Tensor], pages: Sequence[Sequence[Page]], device: Device) -> None:
        """``tensors``: uint8 or int8 of shape (num_blocks, page_bytes); ``pages``: by group, then by layer."""
        bytes_of = [tensor.view(torch.uint8) for tensor in tensors]
        self.kernels: dict[int, GroupKernels] = {
            number: open_kernels(bytes_of, group) for number, group in enumerate(pages) if group
        }
        """By group; one without pages has none."""
        self.block_bytes = [sum(page.bytes for page in group) for group in pages]
        self._num_blocks = [min((len(tensors[page.tensor]) for page in group), default=0) for group in pages]
        self._device = device

    @property
    def sums_slowly(self) -> bool:
        """Whether checksums on a real device are torch's, which take many times as long as any drive."""
        return self._device.page_locks and any(kernels.name == "torch" for kernels in self.kernels.values())

    def check_width(self, group: int, width_bytes: int) -> None:
        """Raise LayoutError for rows of another length than the group's blocks."""
        if width_bytes != self.block_bytes[group]:
            raise LayoutError(f"rows of {width_bytes} bytes for blocks of {self.block_bytes[group]}")

    def ids(self, group: int, *block_ids: npt.NDArray[np.int32]) -> torch.Tensor:
        """Return all ids in page-locked memory, for ``upload``. Raises LayoutError for one outside the KV cache."""
        ids = page_locked(sum(map(len, block_ids)), torch.int64, self._device)
        if len(ids):
            found = np.concatenate(block_ids, out=ids.numpy())
            if not 0 <= found.min() <= found.max() < self._num_blocks[group]:
                raise LayoutError(f"block ids outside a KV cache of {self._num_blocks[group]} blocks")
        return ids

    def upload(self, ids: torch.Tensor) -> torch.Tensor:
        """Within work on a stream: return ``ids`` on the device. Their page-locked memory may be let go at once."""
        return ids.to(self._device.torch_device, non_blocking=True)


def page_locked(count: int, dtype: torch.dtype, device: Device) -> torch.Tensor:
    """Return host memory for copies to and from ``device``: from other memory, or to it, they would make us wait."""
    return torch.empty(count, dtype=dtype, pin_memory=device.page_locks)


def keep(memory: torch.Tensor) -> None:
    """Within work on a stream: whoever lets go of ``memory`` gives it back to the allocator only after that work."""
    if memory.is_cuda:
        memory.record_stream(torch.cuda.current_stream(memory.device))


@contextmanager
def taken_back(stream: Stream) -> Iterator[None]:
    """When an exception comes out, nothing that was queued on ``stream`` touches anything any more."""
    try:
        yield
    except BaseException:
        stream.synchronize()
        raise
