"""Groups of KV tensors, and what kernels must make of them: by torch's indexing and the ``xxhash`` library alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from nixl_offload.engine.kernels.torch_kernels import Page, TorchKernels

BLANK = 0xAA
IDS, TARGETS = [7, 2, 3, 8, 0], [1, 0, 8, 5, 6]
SHAPES: dict[str, tuple[list[int], int, int, int, int | None]] = {
    "full programs": ([8192, 16384], 0, 0, 0, 8192),
    "several tiles a program, the last not full": ([4096, 4096, 4096], 16, 0, 0, 4096),
    "the smallest tiles": ([1024, 3072, 5120], 16, 16, 0, 1024),
    "one tile": ([1024], 0, 0, 0, 1024),
    "heads in the midst of pages": ([4096, 4096, 2048], 16, 0, 2048, 2048),
    "heads at odd words": ([4096, 1024], 0, 0, 1048, None),
    "no tiles": ([1000, 24], 16, 0, 12, None),
    "no tiles, a tail of 16": ([1032, 8], 16, 0, 0, None),
}
"""Lengths, gap, shift, offset in the page; the tiles that must be found, None: torch copies, and Triton sums."""


@dataclass(frozen=True)
class Group:
    """KV tensors with their pages, on some device, and their bytes as they were when the group was made."""

    tensors: list[torch.Tensor]
    pages: list[Page]
    memory: list[torch.Tensor]
    """Each tensor's whole memory, gaps between its blocks included."""
    before: list[torch.Tensor]

    @property
    def block_bytes(self) -> int:
        return sum(page.bytes for page in self.pages)

    def blocks(self, ids: Sequence[int]) -> torch.Tensor:
        """What the rows of these blocks were when the group was made, in host memory."""
        views = [_blocks_of(old, tensor) for old, tensor in zip(self.before, self.tensors, strict=True)]
        return torch.cat(
            [views[page.tensor][list(ids), page.offset : page.offset + page.bytes] for page in self.pages], dim=1
        )


def group_of(
    sizes: Sequence[int],
    *,
    blocks: int = 9,
    gap: int = 0,
    shift: int = 0,
    used: int = 0,
    offset: int = 0,
    device: str = "cpu",
) -> Group:
    """Make a tensor of random bytes for each page.

    ``gap``: bytes between blocks, times the tensor's number; ``shift``: of the first one from a multiple of 256;
    ``used``: bytes by which a page is shorter than its tensor's blocks; ``offset``: of the page from its block's begin.
    """
    tensors, pages, memories, column = [], [], [], 0
    for index, size in enumerate(sizes):
        row = offset + size + used
        stride = row + gap * (index + 1)
        noise = np.random.default_rng((index, size)).integers(0, 256, blocks * stride + shift + 256, dtype=np.uint8)
        memory = torch.from_numpy(noise).to(device)
        begin = -memory.data_ptr() % 256 + shift
        tensors.append(memory[begin : begin + blocks * stride].view(blocks, stride)[:, :row])
        memories.append(memory)
        pages.append(Page(index, column, size, offset))
        column += size
    return Group(tensors, pages, memories, [memory.cpu().clone() for memory in memories])


def digests(rows: torch.Tensor) -> torch.Tensor:
    """The library's XXH3-64 of rows in host memory, as kernels return it."""
    found = [xxhash.xxh3_64_intdigest(row.numpy()) for row in rows.contiguous()]
    return torch.from_numpy(np.array(found, dtype=np.uint64).view(np.int64))


def slot_of(count: int, block_bytes: int, *, gap: int = 0, shift: int = 0, device: str = "cpu") -> torch.Tensor:
    """Rows in the midst of blank memory: ``shift`` bytes from a multiple of 256, ``gap`` bytes between them."""
    stride = block_bytes + gap
    memory = torch.full((count * stride + shift + 1024,), BLANK, dtype=torch.uint8, device=device)
    begin = -memory.data_ptr() % 256 + 256 + shift
    return memory[begin : begin + count * stride].view(count, stride)[:, :block_bytes]


def around(rows: torch.Tensor) -> torch.Tensor:
    """A copy of the memory of ``rows`` with the rows themselves blank: all blank, if nothing else was written."""
    memory = torch.empty(0, dtype=torch.uint8, device=rows.device).set_(rows.untyped_storage()).clone()
    torch.as_strided(memory, rows.shape, rows.stride(), rows.storage_offset()).fill_(BLANK)
    return memory


def check(kernels: TorchKernels, group: Group, rows: torch.Tensor, ids: Sequence[int], targets: Sequence[int]) -> None:
    """Try everything that kernels do: blocks ``ids`` to ``rows``, and those to blocks ``targets``."""
    device = rows.device
    wanted = group.blocks(ids)
    sums = digests(wanted)
    on_device = torch.tensor(ids, dtype=torch.int64, device=device)
    rows.fill_(BLANK)
    kernels.gather(on_device, rows)
    assert torch.equal(rows.cpu(), wanted)
    assert (around(rows) == BLANK).all()
    assert torch.equal(kernels.sums(on_device).cpu(), sums)
    assert torch.equal(kernels.sums_of_rows(rows).cpu(), sums)
    assert all(torch.equal(now.cpu(), old) for now, old in zip(group.memory, group.before, strict=True))

    kernels.scatter(torch.tensor(targets, dtype=torch.int64, device=device), rows)
    after = [old.clone() for old in group.before]
    for page in group.pages:
        view = _blocks_of(after[page.tensor], group.tensors[page.tensor])
        columns = slice(page.offset, page.offset + page.bytes)
        view[list(targets), columns] = wanted[:, page.column : page.column + page.bytes]
    assert all(torch.equal(now.cpu(), new) for now, new in zip(group.memory, after, strict=True))
    assert torch.equal(rows.cpu(), wanted)


def _blocks_of(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's blocks in a copy of its memory."""
    return torch.as_strided(memory, tensor.shape, tensor.stride(), tensor.storage_offset())
