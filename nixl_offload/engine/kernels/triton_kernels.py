"""Gather, scatter and checksums by Triton: one launch for the pages of all layers.

Importing this needs Triton. Threading and ownership: see ``torch_kernels``. Tables live as long as the object.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

from nixl_offload.engine.kernels import triton_code
from nixl_offload.engine.kernels.torch_kernels import Page, TorchKernels

SHORT_BYTES = 240
"""Up to this length XXH3 uses another algorithm. No KV block is so short."""
ALIGNMENT = 16
"""Bytes that a thread loads at once."""
MIN_TILE_BYTES, SPAN_BYTES = 1024, 8192
"""Pages must be multiples of the first. One program of a kernel handles the second."""

_ROUND_BYTES, _STRIPE_BYTES, _LANES = 1024, 64, 8
_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
"""No floats here; newer versions of Triton warn if ``enable_fp_fusion`` is unset."""
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""XXH3's default secret: 192 bytes, part of the algorithm."""
_PRIME32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_START = _PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0]


class Tiles(NamedTuple):
    """The pages of a group as tiles of one size. Tile t of a block lies at ``base + block * stride`` (row t of
    ``table``), and at ``t * tile_bytes`` of the payload row.
    """

    table: torch.Tensor
    """Base and stride of each tile, int64 of shape (tiles, 2)."""
    tile_bytes: int
    """A power of two."""


def tiles_of(tensors: Sequence[torch.Tensor], pages: Sequence[Page]) -> Tiles | None:
    """Return the largest tiles that divide all pages of a group. None if pages are not multiples of ``MIN_TILE_BYTES``,
    or do not begin at multiples of ``ALIGNMENT``.
    """
    views = [page.of(tensors) for page in pages]
    tile_bytes = math.gcd(SPAN_BYTES, *(page.bytes for page in pages))
    places = math.gcd(*(part for view in views for part in (view.data_ptr(), view.stride(0))))
    if tile_bytes < MIN_TILE_BYTES or places % ALIGNMENT:
        return None
    table = [
        (view.data_ptr() + begin, view.stride(0))
        for view, page in zip(views, pages, strict=True)
        for begin in range(0, page.bytes, tile_bytes)
    ]
    return Tiles(torch.tensor(table, dtype=torch.int64, device=views[0].device), tile_bytes)


def fits_rows(block_bytes: int) -> bool:
    """Return whether rows of this length can be summed."""
    return SHORT_BYTES < block_bytes < 1 << 31 and block_bytes % ALIGNMENT == 0


class TritonKernels(TorchKernels):
    """Torch copies blocks whose pages cannot be tiled."""

    name = "triton"

    def __init__(self, tensors: Sequence[torch.Tensor], pages: Sequence[Page], code: ModuleType = triton_code) -> None:
        """``pages``: their total bytes must pass ``fits_rows``. ``code``: ``triton_code`` or another instance of it."""
        super().__init__(tensors, pages)
        self.tiles = tiles_of(tensors, pages)
        self._code = code
        constants_on(tensors[0].device)  # the first call waits for the device

    def gather(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        if self.tiles is None:
            super().gather(ids, rows)
        else:
            self._copy(self.tiles, ids, rows, gather=True)

    def scatter(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        if self.tiles is None:
            super().scatter(ids, rows)
        else:
            self._copy(self.tiles, ids, rows, gather=False)

    def sums_of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        self._check(rows)
        device, count, length = rows.device, len(rows), self.block_bytes
        rounds, rounds_per_span = -(-length // _ROUND_BYTES), SPAN_BYTES // _ROUND_BYTES
        spans = -(-rounds // rounds_per_span)
        sums = torch.empty(count * rounds * _LANES, dtype=torch.int64, device=device)
        found = torch.empty(count, dtype=torch.int64, device=device)
        if not count:
            return found
        with _current(device):
            self._code.sum_rounds[(count * spans,)](
                rows.data_ptr(),
                rows.stride(0),
                sums,
                constants_on(device),
                spans,
                rounds,
                (length - 1) // _STRIPE_BYTES,  # the last stripe, whole or not, belongs to no round
                ROUNDS=rounds_per_span,
                **_OPTIONS,
            )
            self._code.fold_rounds[(-(-count // triton_code.ROWS.value),)](
                sums,
                found,
                rows.data_ptr() + length - _STRIPE_BYTES,
                rows.stride(0),
                _signed(length * _PRIME64[0]),
                constants_on(device),
                count,
                rounds,
                **_OPTIONS,
            )
        return found

    def _copy(self, tiles: Tiles, ids: torch.Tensor, rows: torch.Tensor, *, gather: bool) -> None:
        self._check(rows, ids)
        tiles_per_span = SPAN_BYTES // tiles.tile_bytes
        spans = -(-len(tiles.table) // tiles_per_span)
        if len(ids):
            with _current(ids.device):
                self._code.copy_tiles[(len(ids) * spans,)](
                    ids.contiguous(),
                    tiles.table,
                    rows.data_ptr(),
                    rows.stride(0),
                    spans,
                    len(tiles.table),
                    GATHER=gather,
                    TILES=tiles_per_span,
                    TILE_WORDS=tiles.tile_bytes // 8,
                    **_OPTIONS,
                )

    def _check(self, rows: torch.Tensor, ids: torch.Tensor | None = None) -> None:
        """Also check alignment: an unaligned load stops a device for good."""
        super()._check(rows, ids)
        if rows.data_ptr() % ALIGNMENT or (len(rows) > 1 and rows.stride(0) % ALIGNMENT):
            raise ValueError(f"rows must begin at multiples of {ALIGNMENT} bytes")


@cache
def constants_on(device: torch.device) -> torch.Tensor:
    """Return XXH3's constants on ``device``: int64, see ``triton_code.SCRAMBLE_KEY``. The first call waits for it."""
    last, merge = (np.frombuffer(_SECRET, "<u8", _LANES, offset) for offset in (len(_SECRET) - _STRIPE_BYTES - 7, 11))
    words = np.concatenate([np.frombuffer(_SECRET, "<u8"), last, merge, np.array(_START, dtype=np.uint64)])
    return torch.from_numpy(words.view(np.int64)).to(device)


def _signed(value: int) -> int:
    """Return the int64 with the low 64 bits of ``value``."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context for launches: Triton uses the current device, not the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
