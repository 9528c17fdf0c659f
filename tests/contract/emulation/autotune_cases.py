"""Autotune with the real GDS_MT over the emulated cuFile, and POSIX on the real disk. Run in a child by
``test_autotune_movers.py``, whose loader must find the emulation: so its name lacks ``test_``.

KvikIO cannot run without a driver: it knows device memory from host memory, and is passed over.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nixl_offload.config import SlabConfig
from nixl_offload.engine import autotune
from nixl_offload.engine.autotune import plan_tier
from nixl_offload.engine.streams import Device, HostStreams
from nixl_offload.movers.base import MemoryKind
from tests.unit.test_autotune import layout_of

from .build import Control

SLOW_US = 40_000
"""Before each of cuFile's I/Os: large beside what a disk does with a MiB, so that a busy machine changes nothing."""


@pytest.fixture(autouse=True)
def control(monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    """The emulation's control file; nothing may stay registered."""
    monkeypatch.setattr(autotune, "TRIAL_BYTES", 1 << 20)
    control = Control(Path(os.environ["CUFILE_EMULATION_CONTROL"]))
    control.reset()
    registered = control["buffers"], control["files"]
    yield control
    control.reset()
    assert (control["buffers"], control["files"]) == registered


@pytest.mark.parametrize(("case", "taken"), [("as fast", "gds_mt"), ("slow", "posix"), ("fails", "posix")])
def test_gpudirect_storage_is_taken_where_it_is_fast_enough(
    case: str,
    taken: str,
    tmp_path: Path,
    control: Control,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All figures, and why others have none, are in one line. Nothing is left behind."""
    if case == "as fast":
        monkeypatch.setattr(autotune, "MARGIN", 1000)
    control["delay_us" if case == "slow" else "fail_write_nth"] = {"as fast": 0, "slow": SLOW_US, "fails": 3}[case]
    tier = SlabConfig.model_validate({"kind": "slab", "path": str(tmp_path), "capacity": "1GiB"})
    with caplog.at_level(logging.INFO, logger=autotune.logger.name):
        plan = plan_tier(tier, Device(torch.device("cpu"), MemoryKind.VRAM, HostStreams()), layout_of())
    assert plan == (taken, "host" if taken == "posix" else "device")
    [line] = [record.message for record in caplog.records if record.name == autotune.logger.name]
    assert re.search(r"gds_mt: [^;]*failed" if case == "fails" else "gds_mt: read ", line)
    assert "posix: read " in line
    assert "kvikio: no NVIDIA driver" in line
    assert not list(tmp_path.iterdir())
