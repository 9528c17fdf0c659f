"""Proves on a GPU: movers and transfer paths are compared on its real memory, and what is chosen can be opened."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from nixl_offload.config import SlabConfig
from nixl_offload.engine.autotune import plan as plan_module
from nixl_offload.engine.autotune.candidates import BOUNCE_SHARE, Shape
from nixl_offload.engine.autotune.plan import BUDGET_S, plan_transfers
from nixl_offload.engine.streams import Device, device_of
from nixl_offload.errors import MoverUnavailableError
from nixl_offload.hardware.gds import GdsReport
from nixl_offload.movers.base import MemoryRegion
from nixl_offload.movers.select import SCRATCH_BYTES, open_mover
from nixl_offload.types import PAGE_BYTES

pytestmark = pytest.mark.gpu


def the_device() -> Device:
    return device_of(torch.empty(1, device="cuda"))


@pytest.mark.parametrize("piece_bytes", [0, 64 << 10, 2 << 20])
def test_something_is_chosen(tmp_path: Path, piece_bytes: int) -> None:
    """Page-locked host memory at least can be measured; what cannot run says why. Figures are printed: run with -s."""
    tier = SlabConfig.model_validate({"kind": "slab", "path": str(tmp_path), "capacity": "10GiB"})
    device, shape = the_device(), Shape((8 << 20) + PAGE_BYTES, piece_bytes)
    plan_transfers(tier, str(tmp_path), device, shape)  # loads CUDA's libraries
    free_bytes, _ = torch.cuda.mem_get_info()
    began_s = time.monotonic()
    plan = plan_transfers(tier, str(tmp_path), device, shape)
    assert plan is not None
    took_s = time.monotonic() - began_s
    print(f"\n{plan.mover}, {plan.path}: {plan.reason}; {took_s:.1f} s")
    for candidate in plan.candidates:
        print(f"    {candidate}")
    taken = next(found for found in plan.candidates if (found.mover, found.path) == (plan.mover, plan.path))
    able = [found for found in plan.candidates if found.ok]
    assert taken.ok
    assert taken.measured or len(able) == 1
    assert all(found.reason for found in plan.candidates if not found.measured)
    assert took_s < BUDGET_S + 60
    assert not list(tmp_path.iterdir())

    memory = torch.empty(SCRATCH_BYTES + PAGE_BYTES, dtype=torch.uint8, device="cuda")
    address = -(-memory.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    scratch = MemoryRegion(address, SCRATCH_BYTES, device.kind, device.number)
    open_mover(cast(Any, plan.mover), device.kind, str(tmp_path), scratch=scratch).mover.close()
    del memory
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free_bytes - (256 << 20)


def test_what_cufile_is_held_against_is_measured_and_never_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a mover that the config names. The share is printed: run with -s; below 0.7 a warning must say so."""
    found: list[Any] = []
    compare = plan_module.compare

    def kept(*arguments: Any, **options: Any) -> Any:
        found.extend(compare(*arguments, **options))
        return tuple(found)

    monkeypatch.setattr(plan_module, "compare", kept)
    monkeypatch.setattr(plan_module, "gds_report", lambda _: GdsReport(True, "as it would be where it is real", ()))
    tier = SlabConfig.model_validate({"kind": "slab", "path": str(tmp_path), "capacity": "10GiB", "mover": "gds_mt"})
    shape = Shape((8 << 20) + PAGE_BYTES, 2 << 20)
    try:
        plan = plan_transfers(tier, str(tmp_path), the_device(), shape)
    except MoverUnavailableError as error:
        pytest.skip(str(error))
    assert plan is not None
    assert plan.mover == "gds_mt"
    speeds = {(each.mover, each.path): each.read_bytes_s for each in found if each.measured}
    if missing := {("gds_mt", "direct"), ("gds_mt", "device"), ("posix", "host")} - speeds.keys():
        pytest.skip(f"not measured: {missing}: {[each.reason for each in found if not each.measured]}")
    share = max(speeds["gds_mt", "direct"], speeds["gds_mt", "device"]) / speeds["posix", "host"]
    print(f"\ncuFile reads at {share:.2f} of what host memory takes")
    assert caplog.text.count("It probably copies through host memory") == (share < BOUNCE_SHARE)
