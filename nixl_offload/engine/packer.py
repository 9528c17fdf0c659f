"""The packer for where the KV blocks lie, and that of the host's own memory.

Threading: see ``copies``. Each call of ``HostPacker`` is done when it returns.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine.copies import (
    BlockIds,
    Packer,
    Parts,
    Payload,
    Sources,
    Summed,
    SummedByHost,
)
from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.host_copies import HostCopy, host_copies_of, runs_of
from nixl_offload.engine.kernels.torch_kernels import Page
from nixl_offload.engine.streams import READY, Device, Fence, device_of
from nixl_offload.errors import LayoutError


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
        block_ids, payloads = self._checked(group, parts)
        runs = runs_of(block_ids, [len(payload) for payload in payloads])
        for copy in self._copies[group]:
            copy.gather(runs, payloads)
        return SummedByHost(READY, payloads)

    def scatter_many(self, group: int, parts: Sources, fence: Fence) -> Fence:
        """Raises LayoutError for block ids outside the KV cache."""
        _, payloads = self._checked(group, parts)
        rows = [(block_ids, payload) for (block_ids, _), payload in zip(parts, payloads, strict=True)]
        for copy in self._copies[group]:
            copy.scatter(rows)
        return READY

    def bring(self, group: int, payloads: Sequence[Payload]) -> Generator[None, None, Summed]:
        """Nothing is copied; they are summed when asked for."""
        yield from ()
        return SummedByHost(READY, payloads)

    def sums(self, group: int, block_ids: Sequence[BlockIds], fence: Fence) -> Summed:
        """Summed when this returns."""
        found = []
        for chunk in block_ids:
            sums = np.empty(len(chunk), dtype=np.uint64)
            for row, block in enumerate(chunk.tolist()):
                digest = xxhash.xxh3_64()
                for view in self._views[group]:
                    digest.update(view[block].data)
                sums[row] = digest.intdigest()
            found.append(sums)
        return SummedByHost(READY, (), found)

    def clear(self, group: int, block_ids: BlockIds, fence: Fence) -> Fence:
        """Zeroed when this returns."""
        for view in self._views[group]:
            view[block_ids] = 0
        return READY

    def _checked(self, group: int, parts: Sources) -> tuple[BlockIds, list[Payload]]:
        """The ids and payloads of all parts. Host copies reckon with addresses: nothing else would stop a wrong id."""
        block_ids = np.concatenate([block_ids for block_ids, _ in parts])
        if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < self._num_blocks[group]:
            raise LayoutError(f"block ids outside a KV cache of {self._num_blocks[group]} blocks")
        return block_ids, [rows for _, rows in parts if isinstance(rows, np.ndarray)]


def make_packer(
    tensors: Sequence[torch.Tensor], pages: Sequence[Sequence[Page]], device: Device | None = None
) -> Packer:
    """Return the packer for where ``tensors`` lie; each uint8 or int8 of shape (num_blocks, page_bytes).

    ``device``: None asks the tensors.
    """
    if device is None and tensors:
        device = device_of(tensors[0])
    if device is not None and device.is_accelerator:
        return DevicePacker(tensors, pages, device)
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
