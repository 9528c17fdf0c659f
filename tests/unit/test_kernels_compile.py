"""Proves without a device: Triton's kernels compile as they are launched, for the GPUs that matter; they load and store
16 bytes at a time and keep everything in registers; no number of blocks makes them compile again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nixl_offload.engine.kernels import triton_code
from nixl_offload.engine.kernels.triton_kernels import _OPTIONS, TritonKernels
from tests.unit.kernels_rig import group_of, slot_of

ACCESSES_16 = 8192 // (16 * 32)
"""Loads or stores of each thread of the one warp that takes 8 KiB."""
GROUPS = {"large pages": [16384, 8192], "small pages": [1024, 2048], "rows with a tail": [1000, 24, 16]}
TENSORS = {"ids", "table", "sums", "constants", "found"}


class Launches:
    """In the place of ``triton_code``: nothing runs. Notes each kernel, and the constants that decide about its
    compilation.
    """

    def __init__(self) -> None:
        self.seen: set[tuple[str, tuple[tuple[str, Any], ...]]] = set()
        self._kernel = ""

    def __getattr__(self, kernel: str) -> Launches:
        self._kernel = kernel
        return self

    def __getitem__(self, grid: object) -> Launches:
        return self

    def __call__(self, *_: object, **given: Any) -> None:
        assert {name: given.pop(name) for name in _OPTIONS} == _OPTIONS
        self.seen.add((self._kernel, tuple(given.items())))


def launches_of(name: str, count: int) -> set[tuple[str, tuple[tuple[str, Any], ...]]]:
    group, code = group_of(GROUPS[name], blocks=40), Launches()
    kernels = TritonKernels(group.tensors, group.pages, code)  # type: ignore[arg-type]
    ids, rows = torch.arange(count), slot_of(count, group.block_bytes)
    kernels.gather(ids, rows)
    kernels.scatter(ids, rows)
    kernels.sums_of_rows(rows)
    return code.seen


CASES = sorted({(*launch, 90) for name in GROUPS for launch in launches_of(name, 3)}, key=str)
CASES += [(*launch, architecture) for architecture in (80, 100) for launch in sorted(launches_of("large pages", 3))]


@pytest.mark.parametrize(("kernel", "constants", "architecture"), CASES, ids=str)
def test_every_launch_compiles_to_wide_loads_and_spills_nothing(
    kernel: str, constants: tuple[tuple[str, Any], ...], architecture: int, tmp_path: Path
) -> None:
    """Warnings are errors: none of them may be about a default of Triton's that we leave open."""
    function = getattr(triton_code, kernel)
    types = {
        each.name: "constexpr"
        if each.is_constexpr
        else "*i64"
        if each.name in TENSORS
        else each.annotation_type or "i32"  # addresses and distances are annotated, the rest counts
        for each in function.params
    }
    source = ASTSource(fn=function, signature=types, constexprs=dict(constants))
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        made: Any = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(_OPTIONS))
    ptx, sass = made.asm["ptx"], made.asm["sass"]
    assert "EXIT" in sass
    assert "STL" not in sass
    assert "LDL" not in sass
    if kernel != "fold_rounds":
        assert ptx.count("ld.global.v2.b64") == ACCESSES_16
    if kernel == "copy_tiles":
        assert ptx.count("st.global.v2.b64") == ACCESSES_16


@pytest.mark.parametrize("name", GROUPS)
def test_the_number_of_blocks_is_no_constant(name: str) -> None:
    assert launches_of(name, 1) == launches_of(name, 7) == launches_of(name, 33)
