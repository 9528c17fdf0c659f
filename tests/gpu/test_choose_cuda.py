"""Proves on a GPU: movers and ways are compared on its real memory, something is chosen and can be opened, and a second
start reads what the first one found.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from nixl_offload.config import SlabConfig
from nixl_offload.engine.choose import BUDGET_S, Shape, choose, read_cached
from nixl_offload.engine.streams import Device, device_of
from nixl_offload.movers.base import MemoryRegion
from nixl_offload.movers.select import SCRATCH_BYTES, open_mover
from nixl_offload.types import PAGE_BYTES

pytestmark = pytest.mark.gpu


def the_device() -> Device:
    return device_of(torch.empty(1, device="cuda"))


@pytest.mark.parametrize("piece_bytes", [0, 64 << 10, 2 << 20])
def test_something_is_chosen_and_remembered(tmp_path: Path, piece_bytes: int) -> None:
    """Page-locked host memory at least can be measured; what cannot run says why. Figures are printed: run with -s."""
    tier = SlabConfig.model_validate({"kind": "slab", "path": str(tmp_path), "capacity": "10GiB"})
    device, shape = the_device(), Shape((8 << 20) + PAGE_BYTES, piece_bytes)
    choose(tier.model_copy(update={"threads": 4}), str(tmp_path), device, shape)  # loads CUDA's libraries
    free_bytes, _ = torch.cuda.mem_get_info()
    began_s = time.monotonic()
    choice = choose(tier, str(tmp_path), device, shape)
    took_s = time.monotonic() - began_s
    print(f"\n{choice.mover}, {choice.way}: {choice.reason}; {took_s:.1f} s")
    for candidate in choice.candidates:
        print(f"    {candidate}")
    taken = next(found for found in choice.candidates if (found.mover, found.way) == (choice.mover, choice.way))
    able = [found for found in choice.candidates if found.ok]
    assert taken.ok
    assert taken.measured or len(able) == 1
    assert all(found.reason for found in choice.candidates if not found.measured)
    assert took_s < BUDGET_S + 60
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".lock"}

    memory = torch.empty(SCRATCH_BYTES + PAGE_BYTES, dtype=torch.uint8, device="cuda")
    address = -(-memory.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    scratch = MemoryRegion(address, SCRATCH_BYTES, device.kind, device.number)
    open_mover(cast(Any, choice.mover), device.kind, str(tmp_path), scratch=scratch).mover.close()

    began_s = time.monotonic()
    again = choose(tier, str(tmp_path), device, shape)
    assert again.cached
    assert (again.mover, again.way, again.candidates) == (choice.mover, choice.way, choice.candidates)
    assert time.monotonic() - began_s < 2
    [cached] = read_cached(str(tmp_path))
    assert cached.current
    assert torch.cuda.get_device_name() in cached.machine["device"]
    del memory
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free_bytes - (256 << 20)
