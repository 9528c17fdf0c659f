"""Autotune with the real GDS_MT over the emulated cuFile, and POSIX on the real disk: the slower loses. Run in a
child by ``test_autotune_movers.py``.

Delays decide: cuFile's before each of its I/Os, and the bus's before each copy between device and host. They are large
beside what a disk does with a MiB, so that a busy machine changes nothing. KvikIO cannot run without a driver: it knows
device memory from host memory, and is passed over.
The child's loader must find the emulation, so this module is not collected on its own: its name lacks ``test_``.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nixl_offload.config import SlabConfig
from nixl_offload.engine.autotune import compare as compare_module
from nixl_offload.engine.autotune.candidates import Shape, TransferPlan
from nixl_offload.engine.autotune.plan import plan_transfers
from nixl_offload.engine.streams import READY, Device, Fence
from nixl_offload.movers.base import MemoryKind
from nixl_offload.types import PAGE_BYTES

from .build import Control

KIB = 1 << 10
SLOW_US = 40_000
BUDGET_S = 5.0
SLOT_BYTES = 64 * KIB + PAGE_BYTES


class Bus:
    """Streams of a device whose every copy takes ``delay_s``."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s

    def compute_fence(self) -> Fence:
        return READY

    def new(self) -> Bus:
        return self

    def run(self, work: Callable[[], None]) -> None:
        time.sleep(self._delay_s)
        work()

    def wait(self, fence: Fence) -> None:
        assert fence.done()

    def record(self) -> Fence:
        return READY

    def synchronize(self) -> None:
        return


@pytest.fixture(autouse=True)
def _small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image goes through each slot once per turn, so that the time is never over."""
    monkeypatch.setattr(compare_module, "MAX_LAPS", 1)


@pytest.fixture(autouse=True)
def control() -> Iterator[Control]:
    """The emulation's control file, without delays before and after each case; nothing may stay registered."""
    control = Control(Path(os.environ["CUFILE_EMULATION_CONTROL"]))
    control.reset()
    registered = control["buffers"], control["files"]
    yield control
    control.reset()
    assert (control["buffers"], control["files"]) == registered


def planned(directory: Path, piece_bytes: int = 0, *, mover: str = "auto", bus_s: float = 0.0) -> TransferPlan:
    """Plan, with host memory in the part of a device's."""
    tier = SlabConfig.model_validate({"kind": "slab", "path": str(directory), "capacity": "1GiB", "mover": mover})
    device = Device(torch.device("cpu"), MemoryKind.VRAM, Bus(bus_s))
    plan = plan_transfers(tier, str(directory), device, Shape(SLOT_BYTES, piece_bytes), budget_s=BUDGET_S)
    assert plan is not None
    return plan


def measured(plan: TransferPlan) -> set[tuple[str, str]]:
    return {(found.mover, found.path) for found in plan.candidates if found.measured}


def test_direct_wins(tmp_path: Path, control: Control) -> None:
    """A chunk in one piece takes as long as one that is packed on the device, and a copy less."""
    control["delay_us"] = 3 * SLOW_US
    plan = planned(tmp_path, SLOT_BYTES - PAGE_BYTES, mover="gds_mt")
    assert (plan.mover, plan.path) == ("gds_mt", "direct")
    assert measured(plan) == {("gds_mt", "direct"), ("gds_mt", "device")}


def test_device_wins(tmp_path: Path, control: Control) -> None:
    """Each I/O costs much: one for a chunk beats many small ones."""
    control["delay_us"] = SLOW_US // 8
    plan = planned(tmp_path, 16 * KIB, bus_s=SLOW_US / 8e6)
    assert (plan.mover, plan.path, plan.reason) == ("gds_mt", "device", "the fastest")
    assert measured(plan) == {("gds_mt", "direct"), ("gds_mt", "device"), ("posix", "host")}
    assert not [found for found in plan.candidates if found.mover == "kvikio" and (found.ok or not found.reason)]
    assert not list(tmp_path.iterdir())


def test_host_wins(tmp_path: Path, control: Control, caplog: pytest.LogCaptureFixture) -> None:
    """What cuFile does is slower than page-locked memory and O_DIRECT. The figures of all are in one line."""
    caplog.set_level(logging.INFO, logger="nixl_offload.engine.autotune.plan")
    control["delay_us"] = SLOW_US
    plan = planned(tmp_path, 32 * KIB)
    assert (plan.mover, plan.path) == ("posix", "host")
    [told] = [record.message for record in caplog.records if record.name == "nixl_offload.engine.autotune.plan"]
    assert told.startswith(f"Files in {tmp_path}: posix, host, ")
    assert all(words in told for words in ("; gds_mt direct: read ", "; gds_mt device: read ", "; posix host: read "))


def test_the_only_path_is_not_measured(tmp_path: Path, control: Control) -> None:
    """Nothing is opened or written. But for cuFile's, which may bounce without a word."""
    plan = planned(tmp_path, mover="posix")
    assert (plan.mover, plan.path, plan.candidates) == ("posix", "host", ())
    assert not control["writes"]
    assert not list(tmp_path.iterdir())
    plan = planned(tmp_path, mover="gds_mt")
    assert (plan.mover, plan.path) == ("gds_mt", "device")
    assert [found.mover for found in plan.candidates if found.measured] == ["gds_mt"]
    assert control["writes"]


def test_one_that_fails_is_out_of_the_running(tmp_path: Path, control: Control) -> None:
    """An error in the middle costs a candidate its place, until the next start."""
    control["fail_write_nth"] = 10  # the first is that of the round trip, the next ones fill the file
    plan = planned(tmp_path, 32 * KIB)
    failed = [found for found in plan.candidates if not found.ok and found.mover == "gds_mt"]
    assert len(failed) == 1
    assert "failed" in failed[0].reason
    assert plan.path != failed[0].path
