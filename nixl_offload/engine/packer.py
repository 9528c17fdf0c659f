"""Copies between KV blocks and chunks' payloads, where each block is one row: its pages side by side, layer by layer.

Threading: ``fence`` is called by the submitting thread, everything else by the pump. ``HostPacker`` is done when it
returns.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine.brought import BlockIds, DeviceRows, Parts, Payload, ScatterParts, Summed, SummedByHost
from nixl_offload.engine.bus_packer import BusPacker
from nixl_offload.engine.host_copies import HostCopy, host_copies_of, runs_of
from nixl_offload.engine.kernels.base import Page
from nixl_offload.engine.streams import READY, Device, Fence, ReadyFence, device_of
from nixl_offload.errors import LayoutError


class Sums(Fence, Protocol):
    """Checksums on their way to the host."""

    def values(self) -> npt.NDArray[np.uint64]:
        """One per block, in the order asked for. Raises RuntimeError before ``done``."""


class Packer(Protocol):
    """How KV blocks and payloads are copied. ``pages`` is indexed by group, then by layer; a group without pages has no
    blocks.
    """

    def fence(self) -> Fence:
        """Mark this point of the compute stream. KV blocks may be touched once it is done."""

    def gather_many(self, group: int, parts: Parts, fence: Fence) -> Summed:
        """KV blocks to payloads, summed. It is done when the blocks may change and the payloads are complete. If it
        raises, nothing touches any payload any more.
        """

    def scatter_many(self, group: int, parts: ScatterParts, fence: Fence) -> Fence:
        """Payloads to KV blocks. The returned fence is done when the blocks are complete and the payloads may change.
        If it raises, nothing touches any block any more.
        """

    def bring(self, group: int, payloads: Sequence[Payload]) -> Generator[None, None, Summed]:
        """Sum blocks that lie in host memory, in scratch of the device where there is one, from which they can be
        scattered then. Yields as long as there is no scratch.
        """

    def sums(self, group: int, block_ids: BlockIds, fence: Fence) -> Sums:
        """The checksum of each block where it lies, read once ``fence`` is done. The blocks must not change before."""

    def clear(self, group: int, block_ids: BlockIds, fence: Fence) -> Fence:
        """Zero the group's pages of KV blocks once ``fence`` is done. The returned fence is done when they are zero."""


class HostPacker:
    """KV blocks in host memory, as uint8 arrays of shape (num_blocks, page_bytes); rows contiguous, any stride."""

    def __init__(self, tensors: Sequence[npt.NDArray[np.uint8]], pages: Sequence[Sequence[Page]]) -> None:
        self._views = [[page.of(tensors) for page in group] for group in pages]
        self._num_blocks = [min((len(tensors[page.tensor]) for page in group), default=0) for group in pages]
        self._copies: list[list[HostCopy]] = [
            host_copies_of([(page.of(tensors), page.column, page.bytes) for page in group]) for group in pages
        ]

    def fence(self) -> Fence:
        """Return a fence that is done: on the host the model's writes are over when its call returns."""
        return READY

    def gather_many(self, group: int, parts: Parts, fence: Fence) -> Summed:
        """Raises LayoutError for block ids outside the KV cache."""
        block_ids, payloads = self._checked_ids(group, parts), [payload for _, payload in parts]
        runs = runs_of(block_ids, [len(payload) for payload in payloads])
        for copy in self._copies[group]:
            copy.gather(runs, payloads)
        return SummedByHost(READY, payloads)

    def scatter_many(self, group: int, parts: ScatterParts, fence: Fence) -> Fence:
        """Raises LayoutError for block ids outside the KV cache."""
        self._checked_ids(group, parts)
        rows = [(block_ids, payload) for block_ids, payload in parts if not isinstance(payload, DeviceRows)]
        for copy in self._copies[group]:
            copy.scatter(rows)
        return READY

    def bring(self, group: int, payloads: Sequence[Payload]) -> Generator[None, None, Summed]:
        """Nothing is copied; they are summed when asked for."""
        yield from ()
        return SummedByHost(READY, payloads)

    def _checked_ids(self, group: int, parts: ScatterParts) -> BlockIds:
        """The ids of all parts. Host copies reckon with addresses: nothing else would stop a wrong one."""
        block_ids = np.concatenate([block_ids for block_ids, _ in parts])
        if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < self._num_blocks[group]:
            raise LayoutError(f"block ids outside a KV cache of {self._num_blocks[group]} blocks")
        return block_ids

    def sums(self, group: int, block_ids: BlockIds, fence: Fence) -> Sums:
        """Summed when this returns."""
        found = np.empty(len(block_ids), dtype=np.uint64)
        for row, block in enumerate(block_ids.tolist()):
            digest = xxhash.xxh3_64()
            for view in self._views[group]:
                digest.update(view[block].data)
            found[row] = digest.intdigest()
        return _ReadySums(found)

    def clear(self, group: int, block_ids: BlockIds, fence: Fence) -> Fence:
        """Zeroed when this returns."""
        for view in self._views[group]:
            view[block_ids] = 0
        return READY


class _ReadySums(ReadyFence):
    """What was summed at once."""

    def __init__(self, values: npt.NDArray[np.uint64]) -> None:
        self._values = values

    def values(self) -> npt.NDArray[np.uint64]:
        return self._values


def make_packer(
    tensors: Sequence[torch.Tensor], pages: Sequence[Sequence[Page]], device: Device | None = None
) -> Packer:
    """Return the packer for where ``tensors`` lie; each uint8 or int8 of shape (num_blocks, page_bytes).

    ``device``: None asks the tensors.
    """
    if device is None and tensors:
        device = device_of(tensors[0])
    if device is not None and device.is_accelerator:
        return BusPacker(tensors, pages, device)
    return HostPacker([tensor.view(torch.uint8).numpy() for tensor in tensors], pages)


def pages_of(layout: KVLayout) -> list[list[Page]]:
    """Return what each group stores of its pages, side by side in the order of its refs."""
    groups = []
    for group in layout.groups:
        pages, column = [], 0
        for tensor, page_offset, length in group.refs:
            pages.append(Page(tensor, column, length, page_offset))
            column += length
        groups.append(pages)
    return groups


def require_agreement(tensors: Sequence[torch.Tensor], layout: KVLayout) -> None:
    """Raise LayoutError unless ``layout`` describes exactly these tensors."""
    if len(tensors) != len(layout.tensors):
        raise LayoutError(f"{len(tensors)} KV tensors, the layout describes {len(layout.tensors)}")
    for index, (tensor, spec) in enumerate(zip(tensors, layout.tensors, strict=True)):
        if tensor.dim() != 2 or tensor.element_size() != 1 or tensor.stride(1) != 1:
            raise LayoutError(f"KV tensor {index} is not bytes of shape (num_blocks, page_bytes)")
        found = (tensor.data_ptr(), tensor.shape[0], tensor.stride(0), tensor.shape[1])
        stated = (spec.base_address, spec.num_blocks, spec.stride_bytes, spec.page_bytes)
        if found != stated:
            raise LayoutError(f"KV tensor {index} is {found} (address, blocks, stride, page), the layout says {stated}")
    if len({tensor.device for tensor in tensors}) > 1:
        raise LayoutError("the KV tensors lie on different devices")
