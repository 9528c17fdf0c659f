"""Proves: pages become tiles, or a reason why not; kernels by torch copy and sum every shape exactly, and nothing
beside it; wrong rows and ids are refused; kernels that err or fail are found out before they are used; the
benchmark of kernels runs.
"""

from __future__ import annotations

import pytest
import torch

from nixl_offload.engine.kernels import torch_kernels
from nixl_offload.engine.kernels.base import Page
from nixl_offload.engine.kernels.select import fault_of, open_kernels, sample
from nixl_offload.engine.kernels.tiles import Misfit, PlacedPage, Tiles, tiles_of
from nixl_offload.engine.kernels.torch_kernels import TorchKernels
from tests.unit.kernels_rig import check, group_of, slot_of

CPU = torch.device("cpu")
SHAPES = {
    "words": ([4096, 1024], 0, 0),
    "words, odd stride": ([4096, 1024], 8, 0),
    "half words": ([1004, 300], 0, 4),
    "bytes": ([1000, 31], 3, 1),
    "short": ([100, 40], 0, 0),
}


def tiles_for(*pages: PlacedPage) -> Tiles:
    found = tiles_of(pages)
    assert isinstance(found, Tiles)
    return found


def reason_for(*pages: PlacedPage) -> str:
    found = tiles_of(pages)
    assert isinstance(found, Misfit)
    return found.reason


def test_tiles_are_the_largest_that_divide_all_pages() -> None:
    """In the order of the payload row, whatever order the pages have."""
    tiles = tiles_for(PlacedPage(1 << 20, 8192, 4096, 6144), PlacedPage(4096, 4096, 0, 4096))
    assert tiles.tile_bytes == 2048
    assert tiles.block_bytes == 10240
    assert tiles.table.tolist() == [
        [4096, 4096],
        [6144, 4096],
        [1 << 20, 8192],
        [(1 << 20) + 2048, 8192],
        [(1 << 20) + 4096, 8192],
    ]
    assert tiles_for(PlacedPage(0, 1 << 21, 0, 1 << 21)).tile_bytes == 8192
    assert tiles_for(PlacedPage(0, 41984, 0, 41984)).tile_bytes == 1024


def test_tiles_know_how_wide_loads_can_be() -> None:
    """Bases and strides decide: rows and tiles are multiples of a kilobyte."""
    assert tiles_for(PlacedPage(4096, 1024, 0, 1024), PlacedPage(16, 1040, 1024, 1024)).alignment == 16
    assert tiles_for(PlacedPage(4096, 1024, 0, 1024), PlacedPage(8, 1024, 1024, 1024)).alignment == 8
    assert tiles_for(PlacedPage(4096, 1024, 0, 1024), PlacedPage(16, 1032, 1024, 1024)).alignment == 8
    assert "multiples of 8" in reason_for(PlacedPage(4100, 1024, 0, 1024))
    assert "multiples of 8" in reason_for(PlacedPage(4096, 1028, 0, 1024))


def test_pages_that_make_no_tiles() -> None:
    assert "1000 bytes" in reason_for(PlacedPage(0, 1024, 0, 1000))
    assert "column 1024" in reason_for(PlacedPage(0, 1024, 0, 1024), PlacedPage(0, 1024, 2048, 1024))
    assert "column 1024" in reason_for(PlacedPage(0, 1024, 0, 1024), PlacedPage(0, 1024, 0, 1024))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("gap", "shift", "offset"), [(0, 0, 0), (24, 8, 0), (1, 3, 0), (0, 0, 8), (0, 0, 6)])
def test_torch_copies_and_sums_exactly(
    shape: str, gap: int, shift: int, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where rows are less aligned than pages, where blocks are summed in several turns, and where pages begin
    somewhere in their blocks.
    """
    sizes, between, first = SHAPES[shape]
    group = group_of(sizes, gap=between, shift=first, used=5, offset=offset)
    monkeypatch.setattr(torch_kernels, "SCRATCH_BYTES", 2 * group.block_bytes + 1)
    kernels = open_kernels(group.tensors, group.pages)
    assert kernels.name == "torch"
    rows = slot_of(5, group.block_bytes, gap=gap, shift=shift)
    check(kernels, group, rows, [7, 2, 3, 8, 0], [1, 0, 8, 5, 6])


def test_a_sample_is_small_and_of_the_same_make() -> None:
    """What Triton compiles depends on tile size, alignment and on how full the last program is."""
    for sizes, gap, shift in (([1 << 21] * 3, 0, 0), ([41984] * 7, 8, 8), ([1024], 0, 0), ([2048, 4096], 16, 0)):
        pages = [PlacedPage(4096 + shift, size + gap, index * size, size) for index, size in enumerate(sizes)]
        if sizes == [2048, 4096]:
            pages[1] = PlacedPage(4096, 4096, 2048, 4096)
        tiles = tiles_for(*pages)
        tensors, picked = sample(tiles, tiles.block_bytes, CPU)
        small = tiles_for(
            *(PlacedPage(tensors[p.tensor].data_ptr(), tensors[p.tensor].stride(0), p.column, p.bytes) for p in picked)
        )
        per_program = 8192 // tiles.tile_bytes
        assert (small.tile_bytes, small.alignment) == (tiles.tile_bytes, tiles.alignment)
        assert len(small.table) % per_program == len(tiles.table) % per_program
        assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) < 1 << 20
    tensors, picked = sample(Misfit("odd"), (1 << 20) + 264, CPU)
    assert sum(page.bytes for page in picked) == (2 << 13) + 264


class Wrong(TorchKernels):
    """Errs in one way."""

    def __init__(self, tensors: list[torch.Tensor], pages: list[Page], fault: str) -> None:
        super().__init__(tensors, pages)
        self._fault = fault

    def gather(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        super().gather(ids, rows)
        if self._fault == "gather":
            rows[1, 5] ^= 1

    def gather_summed(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        TorchKernels.gather(self, ids, rows)
        if self._fault == "beside":
            torch.as_strided(rows, (1,), (1,), rows.stride(0) - 1).zero_()
        return TorchKernels.sums_of_rows(self, rows) + (self._fault == "summed")

    def scatter(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        super().scatter(ids if self._fault != "scatter" else ids.flip(0), rows)

    def sums(self, ids: torch.Tensor) -> torch.Tensor:
        return super().sums(ids if self._fault != "sums" else ids.flip(0))

    def sums_of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        if self._fault == "crash":
            raise OSError("no compiler")
        return super().sums_of_rows(rows) + (self._fault == "rows")


@pytest.mark.parametrize("fault", ["gather", "beside", "summed", "scatter", "sums", "rows", "crash", ""])
def test_kernels_that_err_or_fail_are_found_out(fault: str) -> None:
    tiles = tiles_for(PlacedPage(0, 4096, 0, 4096))
    found = fault_of(lambda tensors, pages: Wrong([*tensors], [*pages], fault), *sample(tiles, 4096, CPU))
    assert (found is None) == (not fault)
    if fault == "crash":
        assert found == "OSError: no compiler"
