"""Proves without a device: Triton's kernels compile as they are launched, for the GPUs that matter; they load and store
16 bytes at a time and keep everything in registers; no number of blocks makes them compile again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
Launch = tuple[str, tuple[tuple[str, Any], ...]]
"""A kernel, and the constants that decide about its compilation."""


class Launches:
    """In the place of ``triton_code``: nothing runs, what would have been launched is kept."""

    def __init__(self) -> None:
        self.seen: set[Launch] = set()

    def __getattr__(self, kernel: str) -> _AnyGrid:
        def launch(*_: object, **given: Any) -> None:
            assert {name: given.pop(name) for name in _OPTIONS} == _OPTIONS
            self.seen.add((kernel, tuple(given.items())))

        return _AnyGrid(launch)


class _AnyGrid:
    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._launch


def launches_of(name: str, count: int) -> set[Launch]:
    group, code = group_of(GROUPS[name], blocks=40), Launches()
    kernels = TritonKernels(group.tensors, group.pages, code)  # type: ignore[arg-type]
    ids, rows = torch.arange(count), slot_of(count, group.block_bytes)
    kernels.gather(ids, rows)
    kernels.scatter(ids, rows)
    kernels.sums_of_rows(rows)
    return code.seen


CASES = sorted({(*launch, 90) for name in GROUPS for launch in launches_of(name, 3)}, key=str)
CASES += [(*launch, architecture) for architecture in (80, 100) for launch in sorted(launches_of("large pages", 3))]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path) -> Iterator[None]:
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield


@pytest.mark.parametrize(("kernel", "constants", "architecture"), CASES, ids=str)
def test_every_launch_compiles_to_wide_loads_and_spills_nothing(
    kernel: str, constants: tuple[tuple[str, Any], ...], architecture: int
) -> None:
    """Warnings are errors: none of them may be about a default of Triton's that we leave open."""
    function = getattr(triton_code, kernel)
    types = {name: _type_of(name, function) for name in function.arg_names}
    source = ASTSource(fn=function, signature=types, constexprs=dict(constants))
    made: Any = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(_OPTIONS))
    ptx, sass = made.asm["ptx"], made.asm["sass"]
    assert "EXIT" in sass
    assert "STL" not in sass
    assert "LDL" not in sass
    if kernel != "fold_rounds":
        assert ptx.count("ld.global.v2.b64") == ACCESSES_16
    if kernel == "copy_tiles":
        assert ptx.count("st.global.v2.b64") == ACCESSES_16


def _type_of(name: str, function: Any) -> str:
    """As the launcher's arguments are: tensors of int64, addresses and distances annotated, the rest counts."""
    parameter = next(each for each in function.params if each.name == name)
    if parameter.is_constexpr:
        return "constexpr"
    if name in {"ids", "table", "sums", "constants", "found"}:
        return "*i64"
    return parameter.annotation_type or "i32"


@pytest.mark.parametrize("name", GROUPS)
def test_the_number_of_blocks_is_no_constant(name: str) -> None:
    assert launches_of(name, 1) == launches_of(name, 7) == launches_of(name, 33)
