"""Proves on a GPU: movers are compared on its real memory, and the chosen one opens."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from nixl_offload.config import SlabConfig
from nixl_offload.engine import autotune
from nixl_offload.engine.autotune import BUDGET_S, open_file_mover, plan_tier
from nixl_offload.engine.streams import device_of
from tests.unit.test_autotune import layout_of

pytestmark = pytest.mark.gpu


def test_a_mover_is_chosen_by_its_speed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At least page-locked host memory can be measured. Run with -s to see the figures."""
    tier = SlabConfig.model_validate({"kind": "slab", "path": str(tmp_path), "capacity": "10GiB"})
    device, layout = device_of(torch.empty(1, device="cuda")), layout_of(1 << 20)
    plan_tier(tier, device, layout)  # loads CUDA's libraries
    free_bytes, _ = torch.cuda.mem_get_info()
    began_s = time.monotonic()
    with caplog.at_level("INFO", logger=autotune.logger.name):
        plan = plan_tier(tier, device, layout)
    took_s = time.monotonic() - began_s
    print(f"\n{caplog.messages[-1]}; {took_s:.1f} s")
    assert plan is not None
    assert took_s < 3 * BUDGET_S + 60
    assert not list(tmp_path.iterdir())

    open_file_mover(plan, tier, str(tmp_path), device).close()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free_bytes - (256 << 20)
