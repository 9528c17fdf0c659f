"""An engine over NIXL's real GDS_MT plugin and the emulated cuFile. Run in a child by ``test_engine_gds.py``.

The child's loader must find the emulation, so this module is not collected on its own: its name lacks ``test_``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nixl_offload.config import SlabConfig
from nixl_offload.engine.autotune import TransferPlan, open_planned
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.states import WorkKind
from nixl_offload.movers import pinning
from nixl_offload.movers.nixl import NixlMover
from nixl_offload.movers.nixl_plugins import PLUGINS
from nixl_offload.movers.paired import PairedMover
from nixl_offload.types import Outcome
from tests.unit.device_lab import Lab, open_lab
from tests.unit.device_rig import emulated
from tests.unit.kv_shapes import Way, assert_round_trip

from .build import Control

OK = Outcome.OK
WAYS: tuple[Way, ...] = ("direct", "device")


@pytest.fixture
def control() -> Iterator[Control]:
    """The emulation's control file; what the engine registered is gone at the end."""
    control = Control(Path(os.environ["CUFILE_EMULATION_CONTROL"]))
    control.reset()
    registered = control["buffers"], control["files"]
    yield control
    control.reset()
    assert (control["buffers"], control["files"]) == registered


@pytest.fixture
def lab(control: Control, tmp_path: Path) -> Iterator[Lab]:
    with open_lab(tmp_path) as lab:
        yield lab


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", ["lbhnc_interleaved", "blhnc", "mla_41k", "hybrid"])
def test_round_trips(lab: Lab, control: Control, shape: str, way: Way) -> None:
    """By cuFile alone, on its own threads, while the model writes."""
    rig = lab.make(NixlMover(PLUGINS["gds_mt"]), shape, way)
    assert control["buffers"] > 0
    assert_round_trip(rig, lambda: time.sleep(0.005))
    assert control["reads"] > 0
    assert control["writes"] > 0


@pytest.mark.parametrize("way", WAYS)
def test_host_memory_is_none_of_cufiles(lab: Lab, control: Control, tmp_path: Path, way: Way) -> None:
    """A memory tier larger than anything else: neither it nor its relay slots, nor header pages, are registered with
    cuFile, and chunks go between them and the tier all the same.
    """
    tier = SlabConfig(kind="slab", path=str(tmp_path), capacity=1 << 30)
    device, plan = emulated(lab.streams), TransferPlan("gds_mt", "host" if way == "host" else "device")
    mover, _ = open_planned(tier, str(tmp_path), device, plan)
    host = HostSlab(memory_bytes=64 << 20, relay_slots=1, slot_bytes=1 << 20)
    control.reset()
    rig = lab.make(mover, "blhnc", way, host=host)
    assert 0 < control["largest"] < host.length_bytes
    rig.write(range(8))
    wanted = rig.rows([0, 1, 2, 3])
    assert rig.store(0, [rig.chunk(0, [0, 1, 2, 3])]) == (OK,)
    moved = control["reads"], control["writes"]
    for job, kind, slot in ((1, WorkKind.FETCH, 0), (2, WorkKind.WRITE_THROUGH, 5)):
        offset = host.relay_offsets[0]
        chunk = replace(rig.chunk(0, [], slot=slot), host_offset=offset)
        rig.engine.submit_background(job, [chunk], kind)
        assert rig.collect(job).outcomes == (OK,)
    assert (control["reads"], control["writes"]) == moved
    assert rig.load(3, [rig.chunk(0, [4, 5, 6, 7], slot=5)]) == (OK,)
    rig.expect([4, 5, 6, 7], wanted)
    rig.assert_as_expected()
    assert control["reads"] > moved[0]
    assert control["bounced"] == 0


def test_kv_memory_that_cufile_refuses_is_packed(
    lab: Lab, control: Control, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing bounces, the log says why, and what is stored comes back."""
    caplog.set_level("INFO")
    monkeypatch.setattr(pinning, "pinning_route", lambda *_: "nvidia-fs")
    control["max_register"] = 128 << 10
    rig = lab.make(PairedMover(NixlMover(PLUGINS["gds_mt"]), NixlMover(PLUGINS["posix_aio"])), "blhnc", "direct")
    assert rig.engine.paths.link_memory.plans[0].path != "direct"
    assert "cuFile refuses to register" in caplog.text
    assert_round_trip(rig, lambda: time.sleep(0.005))
    assert control["bounced"] == 0
