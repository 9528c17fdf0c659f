"""NIXL's real GDS_MT over the emulated cuFile: the suite, injected faults, the engine, and how autotune judges it. Run
in a child by ``test_movers.py``.

The child's loader must find the emulation, so this module is not collected on its own: its name lacks ``test_``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nixl_offload.config import SlabConfig
from nixl_offload.engine import autotune
from nixl_offload.engine.autotune import plan_tier
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.records import WorkKind
from nixl_offload.engine.streams import Device
from nixl_offload.errors import MoverError
from nixl_offload.movers import pinning, select
from nixl_offload.movers.base import MemoryKind, MemoryRegion, Mover, Op, TransferState, open_file
from nixl_offload.movers.nixl import PLUGINS, NixlMover
from nixl_offload.movers.select import open_mover, probe_round_trip
from nixl_offload.types import Outcome
from tests.contract.suites.mover_rig import KIB, MIB, HostMemory, MoverRigs, Rig
from tests.contract.suites.mover_suite import MoverSuite
from tests.unit.device_lab import Lab, Way, assert_round_trip, open_lab
from tests.unit.test_autotune import layout_of

from .build import Control
from .cufile_rig import BACK, WHERE, CuFileFaults, control

__all__ = ["control"]

OK = Outcome.OK
SLOW_US = 40_000
"""Before each of cuFile's I/Os: large beside what a disk does with a MiB, so that a busy machine changes nothing."""


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nvidia-fs is loaded."""
    monkeypatch.setattr(pinning, "pins_memory", lambda *_: True)


@pytest.fixture
def lab(control: Control, tmp_path: Path) -> Iterator[Lab]:
    with open_lab(tmp_path) as lab:
        yield lab


class GdsRigs(MoverRigs):
    """GDS_MT with POSIX."""

    memory_kind = MemoryKind.VRAM

    def make_mover(self) -> Mover:
        return NixlMover(PLUGINS["gds_mt"])


class TestDeviceMemory(GdsRigs, MoverSuite):
    """By cuFile."""


class TestHostMemory(GdsRigs, MoverSuite):
    """By POSIX. CuFile hears of no host memory, and moves none."""

    memory_kind = MemoryKind.DRAM

    @pytest.fixture(autouse=True)
    def without_cufile(self, control: Control) -> Iterator[None]:
        yield
        assert control["largest"] == control["reads"] == control["writes"] == 0


class TestFaults(CuFileFaults):
    """What GDS_MT does when cuFile misbehaves."""

    says_why = False

    def make_mover(self) -> Mover:
        return NixlMover(PLUGINS["gds_mt"], close_timeout_s=self.close_timeout_s)

    def test_late(self, rig: Rig, control: Control) -> None:
        """Slow storage: submit returns before anything is read, and the state is PENDING until the end."""
        control["delay_us"] = 5000
        transfer = rig.submit(Op.READ, WHERE, BACK)
        assert rig.mover.poll(transfer) is TransferState.PENDING
        assert control["reads"] < len(WHERE)
        rig.wait(transfer)
        assert np.array_equal(rig.memory.reshape(64, -1), rig.stored.reshape(64, -1)[::-1])

    @pytest.mark.usefixtures("pinned")
    def test_memory_that_cufile_refuses_is_an_error(self, control: Control) -> None:
        """So the caller packs; NIXL would bounce without a word."""
        before = control["buffers"]
        control["max_register"] = 64 * KIB
        with contextlib.closing(self.make_mover()) as mover:
            region = replace(HostMemory(4 * MIB).region, kind=MemoryKind.VRAM)
            with pytest.raises(MoverError, match=r"cuFile refuses to register 4MiB .*turn `block_outermost` off"):
                mover.register_memory(region)
            assert control["buffers"] == before
            control["max_register"] = 0
            mover.unregister_memory(mover.register_memory(region))
            assert control["buffers"] == before

    def test_a_file_that_cufile_refuses_is_refused_though_posix_takes_it(
        self, control: Control, tmp_path: Path
    ) -> None:
        """Neither descriptors nor registrations stay behind."""
        path = tmp_path / "data"
        path.write_bytes(bytes(4096))
        with contextlib.closing(self.make_mover()) as mover:
            mover.close_file(open_file(mover, str(path), 4096, direct_io=False))
            before = os.listdir("/proc/self/fd"), control["files"]
            control["fail_file"] = 1
            with pytest.raises(MoverError, match="register"):
                open_file(mover, str(path), 4096, direct_io=False)
            assert (os.listdir("/proc/self/fd"), control["files"]) == before
            control["fail_file"] = 0
            mover.close_file(open_file(mover, str(path), 4096, direct_io=False))

    @pytest.mark.usefixtures("pinned")
    @pytest.mark.parametrize("stays", [0, 1], ids=["the first stays", "the second stays"])
    def test_memory_of_two_tiers_is_registered_until_the_last_has_closed(self, control: Control, stays: int) -> None:
        """CuFile counts no registrations: the first to let go would take the memory from all, and they would bounce."""
        before = control["buffers"]
        memory = HostMemory(4 * MIB)
        movers = [self.make_mover() for _ in range(2)]
        for mover in movers:
            mover.register_memory(replace(memory.region, kind=MemoryKind.VRAM))
            assert control["buffers"] == before + 1
        movers.pop(1 - stays).close()
        assert control["buffers"] == before + 1
        movers[0].close()
        assert control["buffers"] == before


# The engine


@pytest.mark.parametrize("way", ["direct", "device"])
@pytest.mark.parametrize("shape", ["packed_blocks", "mla", "shared_tensors"])
def test_the_engine_brings_chunks_back_by_cufile(lab: Lab, control: Control, shape: str, way: Way) -> None:
    """By cuFile alone, on its own threads, while the model writes."""
    rig = lab.make(NixlMover(PLUGINS["gds_mt"]), shape, way)
    assert control["buffers"] > 0
    assert_round_trip(rig, lambda: time.sleep(0.005))
    assert control["reads"] > 0
    assert control["writes"] > 0


@pytest.mark.parametrize("way", ["direct", "device"])
def test_host_memory_is_none_of_cufiles(lab: Lab, control: Control, way: Way) -> None:
    """A memory tier larger than anything else: neither it nor its relay slots, nor header pages, are registered with
    cuFile, and chunks go between them and the tier all the same.
    """
    host = HostSlab(memory_bytes=64 << 20, relay_slots=1, slot_bytes=1 << 20)
    rig = lab.make(NixlMover(PLUGINS["gds_mt"]), "packed_blocks", way, host=host)
    assert 0 < control["largest"] < host.length_bytes
    rig.write(range(8))
    wanted = rig.blocks([0, 1, 2, 3])
    assert rig.store(0, [rig.chunk(0, [0, 1, 2, 3])]) == (OK,)
    moved = control["reads"], control["writes"]
    for job, kind, slot in ((1, WorkKind.FETCH, 0), (2, WorkKind.WRITE_THROUGH, 5)):
        chunk = replace(rig.chunk(0, [], slot=slot), host_offset=host.relay_offsets[0])
        rig.engine.submit_background(job, [chunk], kind)
        assert rig.collect(job).outcomes == (OK,)
    assert (control["reads"], control["writes"]) == moved
    assert rig.load(3, [rig.chunk(0, [4, 5, 6, 7], slot=5)]) == (OK,)
    rig.expect([4, 5, 6, 7], wanted)
    rig.assert_as_expected()
    assert control["reads"] > moved[0]
    assert control["bounced"] == 0


@pytest.mark.usefixtures("pinned")
def test_kv_memory_that_cufile_refuses_is_packed(lab: Lab, control: Control, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing bounces, the log says why, and what is stored comes back."""
    caplog.set_level("INFO")
    control["max_register"] = 128 << 10
    rig = lab.make(NixlMover(PLUGINS["gds_mt"]), "packed_blocks", "direct")
    assert rig.engine.paths.link_memory.plans[0].path != "direct"
    assert "cuFile refuses to register" in caplog.text
    assert_round_trip(rig, lambda: time.sleep(0.005))
    assert control["bounced"] == 0


# The choice


@pytest.mark.parametrize("posix", ["POSIX", "none"])
def test_auto_takes_it(
    posix: str, tmp_path: Path, control: Control, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device memory: auto takes GDS_MT when a round trip through it works. Host memory has been tried as well, and goes
    by cuFile where POSIX does not start: this machine may be out of aio contexts.
    """
    caplog.set_level("INFO")
    plugin = replace(PLUGINS["gds_mt"], host=replace(PLUGINS["posix_aio"], plugin=posix))
    monkeypatch.setattr(select, "PLUGINS", {**PLUGINS, "gds_mt": plugin})
    page = np.zeros(5 * 4096, dtype=np.uint8)
    address = -(-int(page.ctypes.data) // 4096) * 4096
    mover, report = open_mover(
        "auto", MemoryKind.VRAM, str(tmp_path), scratch=MemoryRegion(address, 4 * 4096, MemoryKind.VRAM)
    )
    assert [probe.name for probe in report] == ["gds_mt"] == [mover.name]
    moved = control["reads"]
    probe_round_trip(mover, MemoryKind.DRAM, str(tmp_path))
    mover.close()
    assert control["reads"] - moved == int(posix == "none") < moved
    assert ("posix_aio does not start" in caplog.text) is (posix == "none")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("case", "taken"), [("as fast", "gds_mt"), ("slow", "posix"), ("fails", "posix")])
def test_it_is_taken_where_it_is_fast_enough(
    case: str,
    taken: str,
    tmp_path: Path,
    control: Control,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All figures, and why others have none, are in one line. Nothing is left behind. KvikIO lacks a driver here."""
    monkeypatch.setattr(autotune, "TRIAL_BYTES", 1 << 20)
    if case == "as fast":
        monkeypatch.setattr(autotune, "MARGIN", 1000)
    control["delay_us" if case == "slow" else "fail_write_nth"] = {"as fast": 0, "slow": SLOW_US, "fails": 3}[case]
    tier = SlabConfig.model_validate({"kind": "slab", "path": str(tmp_path), "capacity": "1GiB"})
    with caplog.at_level(logging.INFO, logger=autotune.logger.name):
        plan = plan_tier(tier, Device(torch.device("cpu"), MemoryKind.VRAM), layout_of())
    assert plan == taken
    [line] = [record.message for record in caplog.records if record.name == autotune.logger.name]
    assert re.search(r"gds_mt: [^;]*failed" if case == "fails" else "gds_mt: read ", line)
    assert "posix: read " in line
    assert "kvikio: no NVIDIA driver" in line
    assert not list(tmp_path.iterdir())
