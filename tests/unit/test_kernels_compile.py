"""Proves without a device: Triton's kernels compile as they are launched, for the GPUs that matter; they load and store
16 bytes at a time and keep everything in registers; no number of blocks and no address makes them compile again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import signature
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
from tests.unit.kernels_rig import Group, group_of, slot_of

ACCESSES_16 = 8192 // (16 * 32)
"""Loads or stores of each thread of the one warp that takes 8 KiB."""


@dataclass(frozen=True)
class Launch:
    """How a kernel was launched: what decides about its compilation."""

    kernel: str
    constants: tuple[tuple[str, Any], ...]

    @property
    def flags(self) -> dict[str, Any]:
        return dict(self.constants)

    def __str__(self) -> str:
        return "-".join([self.kernel, *(str(value) for _, value in self.constants)])


@dataclass
class Launches:
    """In the place of ``triton_code``: nothing runs, what would have been launched is kept."""

    ROWS: Any = triton_code.ROWS
    seen: dict[Launch, None] = field(default_factory=dict)

    def __getattr__(self, kernel: str) -> dict[object, Callable[..., None]]:
        def launch(*_: object, **given: Any) -> None:
            constants = {name: value for name, value in given.items() if name not in _OPTIONS}
            assert {name: given[name] for name in _OPTIONS} == _OPTIONS
            self.seen[Launch(kernel, tuple(constants.items()))] = None

        return _Grids(launch)


class _Grids(dict[object, "Callable[..., None]"]):
    def __init__(self, launch: Callable[..., None]) -> None:
        super().__init__()
        self._launch = launch

    def __missing__(self, grid: object) -> Callable[..., None]:
        return self._launch


def launches_of(group: Group, count: int, methods: Sequence[str]) -> set[Launch]:
    code = Launches()
    kernels = TritonKernels(group.tensors, group.pages, code)  # type: ignore[arg-type]
    given = {"ids": torch.arange(count), "rows": slot_of(count, group.block_bytes)}
    for method in methods:
        function = getattr(kernels, method)
        function(**{name: given[name] for name in signature(function).parameters})
    return set(code.seen)


ALL = ("gather", "gather_summed", "scatter", "sums", "sums_of_rows")
GROUPS = {
    "large pages": ([16384, 8192], ALL),
    "small pages": ([1024, 2048], ("gather_summed", "scatter", "sums_of_rows")),
    "eight bytes at a time": ([2048], ("gather_summed",)),
    "rows with a tail": ([1000, 24, 8], ("sums_of_rows",)),
}


def made(name: str, blocks: int = 9) -> Group:
    return group_of(GROUPS[name][0], blocks=blocks, gap=8 if name.startswith("eight") else 0)


def cases() -> list[tuple[Launch, int]]:
    """All that make a difference for sm_90; for the older and the newer one those of a summed gather."""
    found = set().union(*(launches_of(made(name), 3, methods) for name, (_, methods) in GROUPS.items()))
    others = launches_of(made("large pages"), 3, ["gather_summed"])
    return [(each, 90) for each in sorted(found, key=str)] + [
        (each, architecture) for architecture in (80, 100) for each in sorted(others, key=str)
    ]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path) -> Iterator[None]:
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield


def compiled(launch: Launch, architecture: int) -> Any:
    function = getattr(triton_code, launch.kernel)
    types = {name: _type_of(name, function) for name in function.arg_names}
    source = ASTSource(fn=function, signature=types, constexprs=launch.flags)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(_OPTIONS))


def _type_of(name: str, function: Any) -> str:
    """As the launcher's arguments are: tensors of int64, addresses and distances annotated, the rest counts."""
    parameter = next(each for each in function.params if each.name == name)
    if parameter.is_constexpr:
        return "constexpr"
    if name in {"ids", "table", "sums", "constants", "found"}:
        return "*i64"
    return parameter.annotation_type or "i32"


@pytest.mark.parametrize(("launch", "architecture"), cases(), ids=str)
def test_every_launch_compiles_to_wide_loads_and_spills_nothing(launch: Launch, architecture: int) -> None:
    """Warnings are errors: none of them may be about a default of Triton's that we leave open."""
    kernel = compiled(launch, architecture)
    ptx, sass = kernel.asm["ptx"], kernel.asm["sass"]
    assert "EXIT" in sass
    assert "STL" not in sass
    assert "LDL" not in sass
    if launch.kernel == "fold_sums":
        return
    wide = launch.flags["ALIGNMENT"] == 16
    assert ptx.count("ld.global.v2.b64") == (ACCESSES_16 if wide else 0)
    if launch.flags.get("TO", "nothing") != "nothing":
        assert ptx.count("st.global.v2.b64") == (ACCESSES_16 if wide else 0)


@pytest.mark.parametrize("name", GROUPS)
def test_the_number_of_blocks_is_no_constant(name: str) -> None:
    group = made(name, blocks=40)
    assert launches_of(group, 1, ALL) == launches_of(group, 7, ALL) == launches_of(group, 33, ALL)
