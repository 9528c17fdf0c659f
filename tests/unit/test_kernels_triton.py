"""Proves by Triton's interpreter, without a device: its kernels copy exactly what they should, touch nothing beside it,
and sum as the ``xxhash`` library does, whatever the lengths, places and distances; an error in them is found out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton import knobs
from triton.runtime.interpreter import InterpretedFunction

from nixl_offload.chunk import checksum_torch
from nixl_offload.engine.kernels import torch_kernels, triton_code
from nixl_offload.engine.kernels.select import fault_of, sample
from nixl_offload.engine.kernels.tiles import Misfit, Tiles
from nixl_offload.engine.kernels.triton_kernels import TritonKernels, placed_tiles
from tests.unit.kernels_rig import check, digests, group_of, slot_of

pytestmark = pytest.mark.no_cover  # tracing the interpreter would triple its time
CPU = torch.device("cpu")
IDS, TARGETS = [7, 2, 3, 8, 0], [1, 0, 8, 5, 6]


@pytest.fixture(scope="module")
def code() -> Iterator[ModuleType]:
    """``triton_code`` once more, to be interpreted.

    Functions that kernels call are given as the interpreter would run them: it would prepare the language anew for
    every call. ``tl.sum`` is one of them.
    """
    spec = importlib.util.spec_from_file_location("interpreted_triton_code", triton_code.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with knobs.runtime.scope():
        knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tl, "sum", InterpretedFunction(tl.sum.fn).rewrite())
        for name, function in vars(module).copy().items():
            if name.startswith("_") and isinstance(function, InterpretedFunction):
                setattr(module, name, function.rewrite())
        yield module


@pytest.fixture
def _triton_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to torch, whose checksums would be right as well."""
    monkeypatch.delattr(torch_kernels.TorchKernels, "sums_of_rows")


TILED = {
    "full programs": ([8192, 16384], 0, 0, 0, 16),
    "several tiles a program, the last not full": ([4096, 4096, 4096], 16, 0, 0, 16),
    "the smallest tiles": ([1024, 3072, 5120], 16, 16, 0, 16),
    "eight bytes at a time": ([2048, 4096], 8, 8, 0, 8),
    "one tile": ([1024], 0, 0, 0, 16),
    "heads in the midst of pages": ([4096, 4096, 2048], 16, 0, 2048, 16),
    "heads at odd words": ([4096, 1024], 0, 0, 1048, 8),
}
"""Lengths, gap, shift, offset in the page; the alignment that must be found."""


@pytest.mark.usefixtures("_triton_alone")
@pytest.mark.parametrize("shape", TILED)
def test_tiles_are_copied_and_summed(shape: str, code: ModuleType) -> None:
    """Blocks apart, not in order; rows apart, in the midst of other memory; tensors of other strides."""
    sizes, gap, shift, offset, alignment = TILED[shape]
    group = group_of(sizes, gap=gap, shift=shift, offset=offset)
    kernels = TritonKernels(group.tensors, group.pages, code)
    assert isinstance(kernels.tiles, Tiles)
    assert kernels.tiles.alignment == alignment
    rows = slot_of(5, group.block_bytes, gap=16, shift=16)
    check(kernels, group, rows, IDS, TARGETS)


@pytest.mark.usefixtures("_triton_alone")
@pytest.mark.parametrize(("sizes", "offset"), [([1000, 24], 0), ([1032, 8], 0), ([1000, 24], 12)])
def test_pages_without_tiles_are_copied_by_torch_and_summed(
    sizes: list[int], offset: int, code: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of(sizes, gap=8, offset=offset)
    monkeypatch.setattr(torch_kernels, "SCRATCH_BYTES", 2 * group.block_bytes)
    kernels = TritonKernels(group.tensors, group.pages, code)
    assert isinstance(kernels.tiles, Misfit)
    check(kernels, group, slot_of(5, group.block_bytes, gap=16), IDS, TARGETS)


@pytest.mark.usefixtures("_triton_alone")
@pytest.mark.parametrize("sizes", [[4096, 8192], [1000, 24]])
def test_one_row_can_go_to_many_blocks(sizes: list[int], code: ModuleType) -> None:
    """Rows no distance apart: how blocks are cleared."""
    group = group_of(sizes)
    kernels = TritonKernels(group.tensors, group.pages, code)
    kernels.scatter(torch.tensor(IDS), torch.zeros(group.block_bytes, dtype=torch.uint8).expand(len(IDS), -1))
    for tensor in group.tensors:
        assert [row for row in range(len(tensor)) if not tensor[row].any()] == sorted(IDS)


@pytest.mark.parametrize("shift", [8, 4])
def test_rows_that_loads_cannot_take_are_left_to_torch(
    shift: int, code: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody makes such rows, but they are allowed. A device would stop for good; the interpreter does not mind."""
    group = group_of([4096])
    kernels, rows = TritonKernels(group.tensors, group.pages, code), slot_of(2, 4096, shift=shift)
    check(kernels, group, rows, [3, 1], [0, 2])
    monkeypatch.delattr(code, "copy_tiles")
    monkeypatch.delattr(code, "sum_rows")
    ids = torch.tensor([3, 1])
    kernels.gather(ids, rows)
    assert torch.equal(kernels.gather_summed(ids, rows), kernels.sums_of_rows(rows))
    kernels.scatter(ids, rows)


@pytest.mark.usefixtures("_triton_alone")
@pytest.mark.parametrize("length", [248, 256, 264, 320, 328, 960, 1088, 2112, 2120, 9216])
def test_rows_that_end_anywhere_in_a_round(length: int, code: ModuleType) -> None:
    """At, before and after a stripe's end; six rows are two programs of the folding, the second half empty."""
    group = group_of([length], blocks=6, gap=16)
    kernels = TritonKernels(group.tensors, group.pages, code)
    assert torch.equal(kernels.sums_of_rows(group.tensors[0]), digests(group.tensors[0]))


@pytest.mark.parametrize("sizes", [[16384] * 3, [41984], [1032]])
def test_the_test_at_start_passes_what_works(sizes: list[int], code: ModuleType) -> None:
    group = group_of(sizes, blocks=2)
    picked = sample(placed_tiles(group.tensors, group.pages), group.block_bytes, CPU)
    assert fault_of(partial(TritonKernels, code=code), *picked) is None


@pytest.mark.parametrize("key", [3, checksum_torch.SCRAMBLE_KEY, checksum_torch.LAST_KEY, checksum_torch.MERGE_KEY])
def test_the_test_at_start_finds_another_constant(key: int, code: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of the key of a stripe, a scramble, the last stripe, the merge."""
    words = checksum_torch.words_on(CPU).clone()
    words[key] ^= 1 << 40
    monkeypatch.setattr("nixl_offload.engine.kernels.triton_kernels.words_on", lambda device: words)
    group = group_of([8192] * 3, blocks=2)
    picked = sample(placed_tiles(group.tensors, group.pages), group.block_bytes, CPU)
    assert fault_of(partial(TritonKernels, code=code), *picked) == "a summed gather gave other checksums"
