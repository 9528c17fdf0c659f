"""Proves without a device, Triton's kernels by Triton's interpreter: blocks are copied exactly, nothing beside them is
touched, and checksums are as by the ``xxhash`` library, for all lengths, places and distances. Kernels with wrong
results are detected before they are used.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton import knobs
from triton.runtime.interpreter import InterpretedFunction

from nixl_offload.engine.kernels import torch_kernels, triton_code, triton_kernels
from nixl_offload.engine.kernels.torch_kernels import Page, TorchKernels, fault_of, open_kernels, sample
from nixl_offload.engine.kernels.triton_kernels import TritonKernels
from tests.unit.kernels_rig import IDS, SHAPES, TARGETS, Group, check, digests, group_of, slot_of

pytestmark = pytest.mark.no_cover  # coverage would triple the interpreter's time


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
def _triton_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if the host makes a checksum: it would be correct too, and hide a fault."""
    monkeypatch.delattr(TorchKernels, "sums_of_rows")


@pytest.mark.parametrize(
    ("sizes", "between", "first"), [([4096, 1024], 8, 0), ([1004, 300], 0, 4), ([1000, 31], 3, 1), ([100, 40], 0, 0)]
)
@pytest.mark.parametrize(("gap", "shift", "offset"), [(0, 0, 0), (24, 8, 0), (1, 3, 0), (0, 0, 6)])
def test_torch_copies_and_sums_exactly(
    sizes: list[int], between: int, first: int, gap: int, shift: int, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if rows are less aligned than pages, and if blocks are summed in several turns."""
    group = group_of(sizes, gap=between, shift=first, used=5, offset=offset)
    monkeypatch.setattr(torch_kernels, "SCRATCH_BYTES", 2 * group.block_bytes + 1)
    kernels = open_kernels(group.tensors, group.pages)
    assert kernels.name == "torch"
    check(kernels, group, slot_of(5, group.block_bytes, gap=gap, shift=shift), IDS, TARGETS)


@pytest.mark.usefixtures("_triton_sums")
@pytest.mark.parametrize("shape", SHAPES)
def test_triton_copies_and_sums_exactly(shape: str, code: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks apart, not in order; rows apart, in the midst of other memory; tensors of other strides."""
    sizes, gap, shift, offset, tile_bytes = SHAPES[shape]
    group = group_of(sizes, gap=gap, shift=shift, offset=offset)
    monkeypatch.setattr(torch_kernels, "SCRATCH_BYTES", 2 * group.block_bytes)
    kernels = TritonKernels(group.tensors, group.pages, code)
    assert (kernels.tiles and kernels.tiles.tile_bytes) == tile_bytes
    check(kernels, group, slot_of(5, group.block_bytes, gap=16, shift=16), IDS, TARGETS)


@pytest.mark.usefixtures("_triton_sums")
@pytest.mark.parametrize("sizes", [[4096, 8192], [1000, 24]])
def test_one_row_can_go_to_many_blocks(sizes: list[int], code: ModuleType) -> None:
    """With a distance of 0 between rows: this is how blocks are cleared."""
    group = group_of(sizes)
    kernels = TritonKernels(group.tensors, group.pages, code)
    kernels.scatter(torch.tensor(IDS), torch.zeros(group.block_bytes, dtype=torch.uint8).expand(len(IDS), -1))
    for tensor in group.tensors:
        assert [row for row in range(len(tensor)) if not tensor[row].any()] == sorted(IDS)


@pytest.mark.usefixtures("_triton_sums")
@pytest.mark.parametrize("length", [256, 272, 320, 336, 960, 1008, 1040, 1088, 2112, 2128, 8192, 9216, 17408])
def test_rows_that_end_anywhere_in_a_round(length: int, code: ModuleType) -> None:
    """At, before and after a stripe's end; six rows are two programs of the folding, the second half empty."""
    group = group_of([length], blocks=6, gap=16)
    kernels = TritonKernels(group.tensors, group.pages, code)
    assert torch.equal(kernels.sums_of_rows(group.tensors[0]), digests(group.tensors[0]))


@pytest.mark.parametrize("fault", [0x00, 0x80, 0xFF])
def test_sums_of_extreme_words(fault: int, code: ModuleType) -> None:
    """Words with the sign bit set and products near 2**64 are where signed arithmetic could go wrong."""
    rows = torch.full((2, 4112), fault, dtype=torch.uint8)
    kernels = TritonKernels([rows], [Page(0, 0, 4112)], code)
    assert torch.equal(kernels.sums_of_rows(rows), digests(rows))


def test_wrong_ids_and_rows_are_refused(code: ModuleType) -> None:
    """Kernels compute addresses unchecked, and a device stops for good at an unaligned load."""
    group = group_of([4096])
    kernels = TritonKernels(group.tensors, group.pages, code)
    ids, rows = torch.tensor([3, 1]), slot_of(2, 4096)
    for wrong_ids, wrong_rows in (
        (ids.int(), rows),
        (ids[:1], rows),
        (ids, rows[:, :-16]),
        (ids, rows.view(torch.int8)),
        (ids, slot_of(2, 8192)[:, ::2]),
        (ids, slot_of(2, 4096, shift=8)),
    ):
        for work in (kernels.gather, kernels.scatter):
            with pytest.raises(ValueError, match="must be"):
                work(wrong_ids, wrong_rows)


# The trial at start.


def trial(group: Group) -> Callable[[], tuple[list[torch.Tensor], list[Page]]]:
    return lambda: sample(group.tensors, group.pages, triton_kernels.SPAN_BYTES)


@pytest.mark.parametrize("sizes", [[16384] * 3, [41984], [1040]])
def test_the_trial_passes_what_works(sizes: list[int], code: ModuleType) -> None:
    group = group_of(sizes, blocks=2, gap=16)
    assert fault_of(partial(TritonKernels, code=code), trial(group)) is None


@pytest.mark.parametrize(("gap", "shift"), [(0, 0), (16, 16), (8, 8)])
def test_a_sample_gets_the_same_kernels(gap: int, shift: int) -> None:
    """What Triton compiles depends on tiles and alignment, not on how long pages are."""
    group = group_of([1 << 20, 4096], gap=gap, shift=shift)
    tensors, pages = trial(group)()
    found, wanted = triton_kernels.tiles_of(tensors, pages), triton_kernels.tiles_of(group.tensors, group.pages)
    assert (found and found.tile_bytes) == (wanted and wanted.tile_bytes)
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) < 1 << 18


class Wrong(TorchKernels):
    """Kernels with one fault."""

    def __init__(self, tensors: Sequence[torch.Tensor], pages: Sequence[Page], fault: str) -> None:
        super().__init__(tensors, pages)
        self._fault = fault

    def gather(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        super().gather(ids, rows)
        if self._fault == "gather":
            rows[1, 5] ^= 1
        elif self._fault == "beside":
            torch.as_strided(rows, (1,), (1,), rows.stride(0) - 1).zero_()

    def scatter(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        super().scatter(ids if self._fault != "scatter" else ids.flip(0), rows)

    def sums_of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        if self._fault == "crash":
            raise OSError("no compiler")
        return super().sums_of_rows(rows) + (self._fault == "rows")


@pytest.mark.parametrize("fault", ["gather", "beside", "scatter", "rows", "crash", ""])
def test_kernels_that_err_or_fail_are_found_out(fault: str) -> None:
    group = group_of([4096])
    found = fault_of(lambda tensors, pages: Wrong(tensors, pages, fault), trial(group))
    assert (found is None) == (not fault)
    assert fault != "crash" or found == "OSError: no compiler"


@pytest.mark.parametrize("key", [3, *(at.value for at in (triton_code.SCRAMBLE_KEY, triton_code.LAST_KEY))])
def test_the_trial_finds_another_constant(key: int, code: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of the key of a stripe, a scramble, or the last stripe."""
    words = triton_kernels.constants_on(torch.device("cpu")).clone()
    words[key] ^= 1 << 40
    monkeypatch.setattr(triton_kernels, "constants_on", lambda device: words)
    group = group_of([8192] * 3, blocks=2)
    found = fault_of(partial(TritonKernels, code=code), trial(group))
    assert found == "rows gave other checksums"
