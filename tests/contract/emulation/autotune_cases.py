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
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nixl_offload.config import SlabConfig
from nixl_offload.engine import autotune
from nixl_offload.engine.autotune import plan_tier
from nixl_offload.engine.streams import READY, Device, Fence
from nixl_offload.movers.base import MemoryKind
from tests.unit.test_autotune import layout_of

from .build import Control

SLOW_US = 40_000


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
def _few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "_TRIAL_BYTES", (0, 1 << 20))


@pytest.fixture(autouse=True)
def control() -> Iterator[Control]:
    """The emulation's control file, without delays before and after each case; nothing may stay registered."""
    control = Control(Path(os.environ["CUFILE_EMULATION_CONTROL"]))
    control.reset()
    registered = control["buffers"], control["files"]
    yield control
    control.reset()
    assert (control["buffers"], control["files"]) == registered


def taken(directory: Path, caplog: pytest.LogCaptureFixture, *, bus_s: float = 0.0) -> tuple[str, str]:
    """Return the mover that is taken, with host memory in the part of a device's, and the line in the log."""
    tier = SlabConfig.model_validate({"kind": "slab", "path": str(directory), "capacity": "1GiB"})
    device = Device(torch.device("cpu"), MemoryKind.VRAM, Bus(bus_s))
    with caplog.at_level(logging.INFO, logger=autotune.logger.name):
        plan = plan_tier(tier, device, layout_of())
    assert plan is not None
    assert not list(directory.iterdir())
    assert plan.side == ("host" if plan.mover == "posix" else "device")
    [line] = [record.message for record in caplog.records if record.name == autotune.logger.name]
    return plan.mover, line


def test_gpudirect_storage_is_taken_where_the_bus_is_slower(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All figures, and why KvikIO has none, are in one line."""
    mover, line = taken(tmp_path, caplog, bus_s=2 * SLOW_US / 1e6)
    assert mover == "gds_mt"
    assert "gds_mt: read " in line
    assert "posix: read " in line
    assert "kvikio: no NVIDIA driver" in line


def test_host_memory_is_taken_where_cufile_is_slower(
    tmp_path: Path, control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    control["delay_us"] = SLOW_US
    mover, line = taken(tmp_path, caplog)
    assert mover == "posix"
    assert "gds_mt: read " in line


def test_a_mover_that_fails_meanwhile_is_not_taken(
    tmp_path: Path, control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    control["fail_write_nth"] = 4  # the first is that of the round trip
    mover, line = taken(tmp_path, caplog, bus_s=2 * SLOW_US / 1e6)
    assert mover == "posix"
    assert re.search(r"gds_mt: [^;]*failed", line)
