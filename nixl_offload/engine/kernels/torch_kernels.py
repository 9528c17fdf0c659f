"""Chooses a group's kernels: Triton's if they work and fit the blocks, else torch's operations, which are here.

A *row* is a block as it lies in a payload: the pages of its layers side by side. Calls queue work on the caller's
current stream and return at once. Only torch's checksums wait, because the host computes them.
Triton compiles kernels on the machine where they run, so each is tested first: one call on scratch memory, compared
with the host. Kernels that fail or differ in a byte are not used.
Threading: ``open_kernels`` runs once per group and tier at start; its first test of a kind waits for the device. One
thread at a time per object. Ownership: memory that a call allocates belongs to the caller's current stream.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.chunk.checksum import block_checksums

logger = logging.getLogger(__name__)

SCRATCH_BYTES = 32 << 20
"""Blocks that are copied together to be summed; a larger block is copied alone."""
_BLOCKS = 5
_SHIFT_BYTES = 16
"""Width of a load. A page's offset from a multiple of it decides which kernel Triton compiles."""
_tried: dict[tuple[object, ...], str | None] = {}
"""The fault of kernels of a kind, None if they work. Cached because each tier asks, and a test waits for the device."""

_Rows = TypeVar("_Rows", torch.Tensor, npt.NDArray[np.uint8])


@dataclass(frozen=True, slots=True)
class Page:
    """One layer's share of a block: ``bytes`` bytes at ``offset`` in a row of ``tensor``, and at ``column`` in the
    payload row.
    """

    tensor: int
    column: int
    bytes: int
    offset: int = 0

    def of(self, tensors: Sequence[_Rows]) -> _Rows:
        """Return a view of it in all blocks, of shape (num_blocks, ``bytes``)."""
        return tensors[self.tensor][:, self.offset : self.offset + self.bytes]


class TorchKernels:
    """``ids``: block ids, int64 of shape (n,) on the device. The caller checks them: they give addresses.

    ``rows``: uint8 of shape (n, block_bytes) on the device; rows contiguous, any stride. Checksums are int64 of shape
    (n,) on the device, with the bits of ``checksum.block_checksums``. Wrong shapes or types raise ValueError.
    """

    name = "torch"
    """For logs."""

    def __init__(self, tensors: Sequence[torch.Tensor], pages: Sequence[Page]) -> None:
        """``tensors``: all KV tensors, uint8 of shape (num_blocks, page_bytes), rows contiguous, any stride; ``pages``:
        those of the group.
        """
        self.block_bytes = sum(page.bytes for page in pages)
        self._views = [(page.of(tensors), slice(page.column, page.column + page.bytes)) for page in pages]

    def gather(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy blocks to rows."""
        self._check(rows, ids)
        for source, columns in self._views:
            torch.index_select(source, 0, ids, out=rows[:, columns])

    def scatter(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy rows to blocks."""
        self._check(rows, ids)
        for target, columns in self._views:
            target.index_copy_(0, ids, rows[:, columns])

    def sums_of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the checksums of rows."""
        self._check(rows)
        digests = block_checksums(rows.cpu().numpy())
        return torch.from_numpy(digests.view(np.int64)).to(rows.device)

    def sums(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the checksums of blocks, which are copied to scratch a few at a time."""
        step = max(1, SCRATCH_BYTES // self.block_bytes)
        sums = torch.empty(len(ids), dtype=torch.int64, device=ids.device)
        scratch = torch.empty((min(step, len(ids)), self.block_bytes), dtype=torch.uint8, device=ids.device)
        for begin in range(0, len(ids), step):
            some = ids[begin : begin + step]
            rows = scratch[: len(some)]
            self.gather(some, rows)
            sums[begin : begin + step] = self.sums_of_rows(rows)
        return sums

    def _check(self, rows: torch.Tensor, ids: torch.Tensor | None = None) -> None:
        """Raise ValueError unless ``rows`` fit the group and there is one block id per row."""
        if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != self.block_bytes or rows.stride(1) != 1:
            found = f"{rows.dtype} {tuple(rows.shape)}, strides {rows.stride()}"
            raise ValueError(f"rows must be uint8 of shape (n, {self.block_bytes}), each contiguous, not {found}")
        if ids is not None and (ids.dtype != torch.int64 or ids.shape != (len(rows),)):
            raise ValueError(f"block ids must be int64 of shape ({len(rows)},), not {ids.dtype} {tuple(ids.shape)}")


def open_kernels(tensors: Sequence[torch.Tensor], pages: Sequence[Page]) -> TorchKernels:
    """Return the kernels of one group. Arguments as for ``TorchKernels``."""
    kernels, why = _chosen(tensors, pages)
    logger.info("Blocks of %d pages are copied and summed by %s: %s", len(pages), kernels.name, why)
    return kernels


def _chosen(tensors: Sequence[torch.Tensor], pages: Sequence[Page]) -> tuple[TorchKernels, str]:
    by_torch, device = TorchKernels(tensors, pages), tensors[pages[0].tensor].device
    if device.type != "cuda":
        return by_torch, "they lie in host memory"
    try:
        from nixl_offload.engine.kernels.triton_kernels import SPAN_BYTES, TritonKernels, fits_rows, tiles_of
    except ImportError as error:
        _warn(f"Triton cannot be imported ({error})")
        return by_torch, "Triton is missing"
    if not fits_rows(by_torch.block_bytes):
        return by_torch, f"blocks of {by_torch.block_bytes} bytes are not made of 16-byte words, or too short"
    tiles = tiles_of(tensors, pages)
    kind = device, by_torch.block_bytes, tiles and tiles.tile_bytes
    if kind not in _tried:
        _tried[kind] = fault_of(TritonKernels, lambda: sample(tensors, pages, SPAN_BYTES))
    if (fault := _tried[kind]) is not None:
        _warn(f"Triton's kernels do not work on {device} ({fault})")
        return by_torch, "Triton's kernels failed their test"
    kernels = TritonKernels(tensors, pages)
    if tiles is None:
        return kernels, "copied by torch, since pages are no multiples of 1 KiB, or not aligned to 16 bytes"
    return kernels, f"tiles of {tiles.tile_bytes} bytes"


@cache
def _warn(cause: str) -> None:
    """Warn once for all groups."""
    logger.warning("%s: torch copies KV blocks and the host sums them, which is right, but slower", cause)


def sample(
    tensors: Sequence[torch.Tensor], pages: Sequence[Page], span_bytes: int
) -> tuple[list[torch.Tensor], list[Page]]:
    """Return a group of few blocks for which Triton compiles the same kernels: as many pages, aligned as those of
    ``tensors``. Pages are shortened by whole spans (``span_bytes``), because the KV cache fills the device's memory.
    """
    random = torch.Generator().manual_seed(1)
    found: list[torch.Tensor] = []
    group: list[Page] = []
    for page in pages:
        view = page.of(tensors)
        length = page.bytes if page.bytes < 3 * span_bytes else page.bytes % span_bytes + 2 * span_bytes
        stride = length + (view.stride(0) - length) % _SHIFT_BYTES
        noise = torch.randint(0, 256, (_BLOCKS * stride + _SHIFT_BYTES,), dtype=torch.uint8, generator=random)
        memory = noise.to(view.device)
        shift = (view.data_ptr() - memory.data_ptr()) % _SHIFT_BYTES
        found.append(memory[shift : shift + _BLOCKS * stride].view(_BLOCKS, stride)[:, :length])
        group.append(Page(len(group), sum(each.bytes for each in group), length))
    return found, group


def fault_of(
    make: Callable[[Sequence[torch.Tensor], Sequence[Page]], TorchKernels],
    group: Callable[[], tuple[Sequence[torch.Tensor], Sequence[Page]]],
) -> str | None:
    """Test all operations of kernels on ``group``, overwriting some of its blocks. Return the fault, or None."""
    try:
        tensors, pages = group()
        return _fault_of(make(tensors, pages), tensors, pages)
    except Exception as error:  # noqa: BLE001 - compilers, linkers and drivers raise anything; torch still works
        return f"{type(error).__name__}: {error}"


def _fault_of(kernels: TorchKernels, tensors: Sequence[torch.Tensor], pages: Sequence[Page]) -> str | None:
    device = tensors[0].device
    ids, targets = [3, 0, 4], [1, 3, 2]
    before = [tensor.cpu().clone() for tensor in tensors]
    wanted = torch.cat([page.of(before)[ids] for page in pages], dim=1)
    digests = torch.from_numpy(block_checksums(wanted.numpy()).view("int64"))
    apart = torch.full((len(ids), wanted.shape[1] + 64), 0xAA, dtype=torch.uint8, device=device)
    rows = apart[:, : wanted.shape[1]]
    kernels.gather(torch.tensor(ids, device=device), rows)
    if not torch.equal(rows.cpu(), wanted) or not bool((apart[:, wanted.shape[1] :] == 0xAA).all()):
        return "a gather copied other bytes"
    if not torch.equal(kernels.sums_of_rows(rows).cpu(), digests):
        return "rows gave other checksums"
    kernels.scatter(torch.tensor(targets, device=device), rows)
    for page in pages:
        page.of(before)[targets] = wanted[:, page.column : page.column + page.bytes]
    if not all(torch.equal(tensor.cpu(), after) for tensor, after in zip(tensors, before, strict=True)):
        return "a scatter left other bytes"
    return None
