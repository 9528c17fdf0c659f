"""Which kernels a group gets: Triton's where it runs and the pages fit it, else torch's.

Triton's are compiled on the machine where they run, so they are tried before they are trusted: one call of each on
scratch memory, against the checksum of the host. What fails, or gives another byte, is not used.
Threading: called once per group at start. It waits for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache

import torch

from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.engine.kernels.base import GroupKernels, Page
from nixl_offload.engine.kernels.tiles import MAX_TILE_BYTES, Misfit, Tiles
from nixl_offload.engine.kernels.torch_kernels import TorchKernels

logger = logging.getLogger(__name__)

Maker = Callable[[Sequence[torch.Tensor], Sequence[Page]], GroupKernels]
_BLOCKS = 5
_tried: dict[tuple[object, ...], str | None] = {}
"""What went wrong with kernels of a kind, None: nothing. Each packer asks, and a trial waits for the device."""


def open_kernels(tensors: Sequence[torch.Tensor], pages: Sequence[Page]) -> GroupKernels:
    """Return the kernels of one group. ``tensors``: all KV tensors, uint8 of shape (num_blocks, page_bytes), rows
    contiguous, any stride; ``pages``: those of the group.
    """
    kernels, why = _chosen(tensors, pages)
    logger.info("Blocks of %d pages are copied and summed by %s: %s", len(pages), kernels.name, why)
    return kernels


def _chosen(tensors: Sequence[torch.Tensor], pages: Sequence[Page]) -> tuple[GroupKernels, str]:
    device = tensors[pages[0].tensor].device
    if device.type != "cuda":
        return TorchKernels(tensors, pages), "they lie in host memory"
    try:
        from nixl_offload.engine.kernels import triton_kernels
    except ImportError as error:
        _warn(f"Triton cannot be imported ({error})")
        return TorchKernels(tensors, pages), "Triton is missing"
    block_bytes = sum(page.bytes for page in pages)
    if not triton_kernels.fits_rows(block_bytes):
        return TorchKernels(tensors, pages), f"blocks of {block_bytes} bytes are not made of 8-byte words, or too short"
    tiles = triton_kernels.placed_tiles(tensors, pages)
    kind = (str(device), block_bytes, None if isinstance(tiles, Misfit) else (tiles.tile_bytes, tiles.alignment))
    if kind not in _tried:
        _tried[kind] = fault_of(triton_kernels.TritonKernels, *sample(tiles, block_bytes, device))
    fault = _tried[kind]
    if fault is not None:
        _warn(f"Triton's kernels do not work on {device} ({fault})")
        return TorchKernels(tensors, pages), "Triton's kernels failed their test"
    kernels = triton_kernels.TritonKernels(tensors, pages)
    if isinstance(tiles, Misfit):
        return kernels, f"copied by torch, since {tiles.reason}"
    return kernels, f"tiles of {tiles.tile_bytes} bytes, {tiles.alignment} at a time"


@cache
def _warn(cause: str) -> None:
    """Say it once, however many groups it concerns."""
    logger.warning("%s: torch copies and sums KV blocks, which is right, but many times slower", cause)


def sample(tiles: Tiles | Misfit, block_bytes: int, device: torch.device) -> tuple[list[torch.Tensor], list[Page]]:
    """Return a small group for which Triton compiles the very same kernels."""
    if isinstance(tiles, Misfit):
        lengths, shift, gap = [_shortened(block_bytes, MAX_TILE_BYTES)], 1, 1
    else:
        count = _shortened(len(tiles.table), MAX_TILE_BYTES // tiles.tile_bytes)
        parts = [part for part in (count - count // 2, count // 2) if part]
        lengths, shift, gap = [part * tiles.tile_bytes for part in parts], 0, tiles.alignment
        shift = tiles.alignment % 16
    random = torch.Generator().manual_seed(1)
    tensors, pages, column = [], [], 0
    for index, length in enumerate(lengths):
        stride = length + gap * (index + 1)
        memory = torch.randint(0, 256, (_BLOCKS * stride + shift,), dtype=torch.uint8, generator=random).to(device)
        tensors.append(memory[shift:].view(_BLOCKS, stride)[:, :length])
        pages.append(Page(index, column, length))
        column += length
    return tensors, pages


def _shortened(length: int, period: int) -> int:
    """A smaller number with the same remainder, if there is one of more than two periods."""
    return length if length < 3 * period else length % period + 2 * period


def fault_of(make: Maker, tensors: Sequence[torch.Tensor], pages: Sequence[Page]) -> str | None:
    """Try everything that kernels can do; return what went wrong, None if nothing did. Overwrites some blocks."""
    try:
        return _fault_of(make(tensors, pages), tensors, pages)
    except Exception as error:  # noqa: BLE001 - compilers, linkers and drivers raise what they like; torch works still
        return f"{type(error).__name__}: {error}"


def _fault_of(kernels: GroupKernels, tensors: Sequence[torch.Tensor], pages: Sequence[Page]) -> str | None:
    device = tensors[0].device
    ids, targets = [3, 0, 4], [1, 3, 2]
    before = [tensor.cpu().clone() for tensor in tensors]
    wanted = torch.cat([page.of(before)[ids] for page in pages], dim=1)
    digests = torch.from_numpy(block_checksums(wanted.numpy()).view("int64"))
    on_device = torch.tensor(ids, device=device)
    apart = torch.full((len(ids), wanted.shape[1] + 64), 0xAA, dtype=torch.uint8, device=device)
    rows = apart[:, : wanted.shape[1]]

    found = kernels.gather_summed(on_device, rows)
    if not torch.equal(rows.cpu(), wanted) or not bool((apart[:, wanted.shape[1] :] == 0xAA).all()):
        return "a summed gather copied other bytes"
    if not torch.equal(found.cpu(), digests):
        return "a summed gather gave other checksums"
    rows.zero_()
    kernels.gather(on_device, rows)
    if not torch.equal(rows.cpu(), wanted):
        return "a gather copied other bytes"
    if not torch.equal(kernels.sums(on_device).cpu(), digests):
        return "blocks gave other checksums"
    if not torch.equal(kernels.sums_of_rows(rows).cpu(), digests):
        return "rows gave other checksums"
    kernels.scatter(torch.tensor(targets, device=device), rows)
    for page in pages:
        page.of(before)[targets] = wanted[:, page.column : page.column + page.bytes]
    if not all(torch.equal(tensor.cpu(), after) for tensor, after in zip(tensors, before, strict=True)):
        return "a scatter left other bytes"
    return None
