"""Gather, scatter and checksums by Triton: pages are read once and rows written once, with the checksum on the way.

Importing this needs Triton. Where pages do not fit tiles, blocks are copied by torch and summed as rows.
Threading: see base. Ownership: tables live as long as the object; what a call allocates belongs to the caller's
current stream, on which it launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch

from nixl_offload.chunk.checksum_torch import ROUND_BYTES, SHORT_BYTES, length_term, words_on
from nixl_offload.engine.kernels import triton_code
from nixl_offload.engine.kernels.base import Page
from nixl_offload.engine.kernels.tiles import MAX_TILE_BYTES, Misfit, PlacedPage, Tiles, tiles_of
from nixl_offload.engine.kernels.torch_kernels import TorchKernels, check_ids, check_rows, sums_of_copies

_WORD_BYTES = 8
_LANES = 8
_STRIPE_BYTES = 64
_SPAN_BYTES = MAX_TILE_BYTES
"""What one program copies or sums."""
_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
"""Nothing here is a floating-point number; unset, newer versions of Triton warn about its default."""


def fits_rows(block_bytes: int) -> bool:
    """Return whether rows of that length can be summed."""
    return SHORT_BYTES < block_bytes < 1 << 31 and block_bytes % _WORD_BYTES == 0


def placed_tiles(tensors: Sequence[torch.Tensor], pages: Sequence[Page]) -> Tiles | Misfit:
    """Return the tiles of a group, or why it has none."""
    places = []
    for page in pages:
        view = page.of(tensors)
        places.append(PlacedPage(view.data_ptr(), view.stride(0), page.column, page.bytes))
    return tiles_of(places)


class TritonKernels:
    """Implements GroupKernels. Rows that do not begin at multiples of what loads want are left to torch."""

    name = "triton"

    def __init__(self, tensors: Sequence[torch.Tensor], pages: Sequence[Page], code: ModuleType = triton_code) -> None:
        """``pages``: ``fits_rows`` their sum. ``code``: ``triton_code``, or another instance of it."""
        self.block_bytes = sum(page.bytes for page in pages)
        self.tiles = placed_tiles(tensors, pages)
        self._device = tensors[pages[0].tensor].device
        self._by_torch = TorchKernels(tensors, pages)
        self._rows = _RowSums(self.block_bytes, self._device, code)
        self._tiled = None
        if isinstance(self.tiles, Tiles):
            self._tiled = _TiledCopies(self.tiles, self._device, code)

    def gather(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        if (tiled := self._tiled_for(ids, rows)) is None:
            self._by_torch.gather(ids, rows)
        else:
            tiled.run(ids, rows, "pages", "rows")

    def gather_summed(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if (tiled := self._tiled_for(ids, rows)) is None:
            self._by_torch.gather(ids, rows)
            return self.sums_of_rows(rows)
        return self._rows.folded(rows, tiled.run(ids, rows, "pages", "rows", summed=True))

    def scatter(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        if (tiled := self._tiled_for(ids, rows)) is None:
            self._by_torch.scatter(ids, rows)
        else:
            tiled.run(ids, rows, "rows", "pages")

    def sums(self, ids: torch.Tensor) -> torch.Tensor:
        check_ids(ids, len(ids))
        if self._tiled is None:
            return sums_of_copies(self._by_torch.gather, self.sums_of_rows, ids, self.block_bytes)
        return self._tiled.folded(ids, self._tiled.run(ids, None, "pages", "nothing", summed=True))

    def sums_of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        check_rows(rows, self.block_bytes)
        if not _aligned(rows, self._rows.alignment):
            return self._by_torch.sums_of_rows(rows)
        return self._rows.folded(rows, self._rows.run(rows))

    def _tiled_for(self, ids: torch.Tensor, rows: torch.Tensor) -> _TiledCopies | None:
        check_ids(ids, len(rows))
        check_rows(rows, self.block_bytes)
        tiled = self._tiled
        return tiled if tiled is not None and _aligned(rows, tiled.tiles.alignment) else None


class _TiledCopies:
    """Blocks whose pages are made of tiles."""

    def __init__(self, tiles: Tiles, device: torch.device, code: ModuleType) -> None:
        self.tiles = tiles
        self._device, self._code = device, code
        self._table = torch.from_numpy(tiles.table).to(device)
        self._tiles_per_span = _SPAN_BYTES // tiles.tile_bytes
        self._spans = -(-len(tiles.table) // self._tiles_per_span)
        self._rounds = tiles.block_bytes // ROUND_BYTES
        base, stride = tiles.table[-1].tolist()
        self._last = base + tiles.tile_bytes - _STRIPE_BYTES, stride

    def run(
        self, ids: torch.Tensor, rows: torch.Tensor | None, source: str, target: str, *, summed: bool = False
    ) -> torch.Tensor:
        """Queue one pass over blocks and rows; return the sums of all rounds, if they are wanted."""
        ids = ids.contiguous()
        sums = _scratch(len(ids) * self._rounds if summed else 0, self._device)
        if len(ids):
            with _current(self._device):
                self._code.copy_tiles[(len(ids) * self._spans,)](
                    ids,
                    self._table,
                    0 if rows is None else rows.data_ptr(),
                    0 if rows is None else rows.stride(0),
                    sums,
                    words_on(self._device),
                    self._spans,
                    len(self.tiles.table),
                    FROM=source,
                    TO=target,
                    SUM=summed,
                    TILES=self._tiles_per_span,
                    TILE_WORDS=self.tiles.tile_bytes // _WORD_BYTES,
                    ROUNDS=_SPAN_BYTES // ROUND_BYTES,
                    EVEN=len(self.tiles.table) % self._tiles_per_span == 0,
                    ALIGNMENT=self.tiles.alignment,
                    **_OPTIONS,
                )
        return sums

    def folded(self, ids: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """Queue what makes checksums of sums; the last bytes are read where the blocks lie."""
        return _folded(
            self._code, ids.contiguous(), sums, len(ids), self._last, self.tiles.block_bytes, by_id=True
        )  # fmt: skip


class _RowSums:
    """Rows of one length, side by side or apart."""

    def __init__(self, row_bytes: int, device: torch.device, code: ModuleType) -> None:
        self.alignment = 16 if row_bytes % 16 == 0 else 8
        self._row_bytes, self._device, self._code = row_bytes, device, code
        self._rounds = -(-row_bytes // ROUND_BYTES)
        self._spans = -(-self._rounds * ROUND_BYTES // _SPAN_BYTES)
        # Of a row that ends within a round, the last stripe overlaps others: it is not one of those.
        self._stripes = row_bytes // _STRIPE_BYTES if row_bytes % ROUND_BYTES == 0 else (row_bytes - 1) // _STRIPE_BYTES

    def run(self, rows: torch.Tensor) -> torch.Tensor:
        """Queue one pass over the rows; return the sums of all rounds."""
        sums = _scratch(len(rows) * self._rounds, self._device)
        if len(rows):
            with _current(self._device):
                self._code.sum_rows[(len(rows) * self._spans,)](
                    rows.data_ptr(),
                    rows.stride(0),
                    sums,
                    words_on(self._device),
                    self._spans,
                    self._rounds,
                    self._stripes,
                    ROUNDS=_SPAN_BYTES // ROUND_BYTES,
                    EVEN=self._row_bytes % _SPAN_BYTES == 0,
                    ALIGNMENT=self.alignment,
                    **_OPTIONS,
                )
        return sums

    def folded(self, rows: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """Queue what makes checksums of sums; the last bytes are read in the rows."""
        last = rows.data_ptr() + self._row_bytes - _STRIPE_BYTES, rows.stride(0)
        return _folded(self._code, sums, sums, len(rows), last, self._row_bytes, by_id=False)


def _folded(
    code: ModuleType,
    ids: torch.Tensor,
    sums: torch.Tensor,
    count: int,
    last: tuple[int, int],
    length: int,
    *,
    by_id: bool,
) -> torch.Tensor:
    """Queue ``fold_sums``. ``last``: the address of block or row 0's last stripe, and how far apart they lie."""
    found = torch.empty(count, dtype=torch.int64, device=sums.device)
    if count:
        with _current(sums.device):
            code.fold_sums[(-(-count // code.ROWS.value),)](
                ids,
                sums,
                found,
                *last,
                length_term(length),
                words_on(sums.device),
                count,
                -(-length // ROUND_BYTES),
                BY_ID=by_id,
                WHOLE=length % ROUND_BYTES == 0,
                **_OPTIONS,
            )
    return found


def _aligned(rows: torch.Tensor, alignment: int) -> bool:
    return rows.data_ptr() % alignment == 0 and (len(rows) < 2 or rows.stride(0) % alignment == 0)


def _scratch(rounds: int, device: torch.device) -> torch.Tensor:
    """Memory for the sums of so many rounds."""
    return torch.empty(rounds * _LANES, dtype=torch.int64, device=device)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, not on that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
