"""The pages of a group as tiles of one size: what kernels walk through, for pages of any length and place.

Tile t of a block lies at ``base + block * stride`` of row t of the table, and at ``t * tile_bytes`` of the payload row.
Threading: pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MIN_TILE_BYTES = 1024
"""A round of the checksum: what is summed in one piece."""
MAX_TILE_BYTES = 8192
"""What one program of a kernel takes; it takes several tiles where they are smaller."""
ALIGNMENTS = (16, 8)
"""How wide loads and stores can be."""


@dataclass(frozen=True, slots=True)
class PlacedPage:
    """A page of block b: ``bytes`` at ``address + b * stride``, and at ``column`` of the payload row."""

    address: int
    stride: int
    column: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """``table``: base and stride of each tile, int64 of shape (tiles, 2), in the order of the payload row."""

    table: npt.NDArray[np.int64]
    tile_bytes: int
    """A power of two."""
    alignment: int
    """All addresses in the table, and all tiles of a row that begins so, are multiples of this: 16 or 8."""

    @property
    def block_bytes(self) -> int:
        """Length of a payload row."""
        return len(self.table) * self.tile_bytes


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why a group has no tiles."""

    reason: str


def tiles_of(pages: Sequence[PlacedPage]) -> Tiles | Misfit:
    """Return the largest tiles of which all pages of a group are made."""
    pages = sorted(pages, key=lambda page: page.column)
    end = 0
    for page in pages:
        if page.column != end:
            return Misfit(f"column {end} of a payload row belongs to no page or to two")
        end += page.bytes
        if page.bytes % MIN_TILE_BYTES:
            return Misfit(f"a page of {page.bytes} bytes is no multiple of {MIN_TILE_BYTES}")
    shared = math.gcd(*(part for page in pages for part in (page.address, page.stride)))
    alignment = next((width for width in ALIGNMENTS if shared % width == 0), None)
    if not pages or alignment is None:
        return Misfit(f"pages do not begin at multiples of {ALIGNMENTS[-1]} bytes")
    tile_bytes = math.gcd(MAX_TILE_BYTES, *(page.bytes for page in pages))
    table = [
        (page.address + begin, page.stride) for page in pages for begin in range(0, page.bytes, tile_bytes)
    ]  # fmt: skip
    return Tiles(np.array(table, dtype=np.int64), tile_bytes, alignment)
