"""GDS_MT over the emulated cuFile: the suite and injected faults. Run in a child by ``test_movers.py``.

The child's loader must find the emulation, so this module is not collected on its own: its name lacks ``test_``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nixl_offload.errors import MoverError
from nixl_offload.movers import pinning
from nixl_offload.movers.base import MemoryKind, MemoryRegion, Mover, Op, TransferState
from nixl_offload.movers.nixl import NixlMover
from nixl_offload.movers.nixl_plugins import PLUGINS
from nixl_offload.movers.paired import PairedMover
from nixl_offload.movers.select import open_mover
from tests.contract.suites.mover_suite import KIB, MIB, HostMemory, MoverRigs, MoverSuite, Rig, extents

from .build import Control


@pytest.fixture(autouse=True)
def control() -> Iterator[Control]:
    """The emulation's control file, without faults before and after each case; nothing may stay registered."""
    control = Control(Path(os.environ["CUFILE_EMULATION_CONTROL"]))
    control.reset()
    registered = control["buffers"], control["files"]
    yield control
    control.reset()
    assert (control["buffers"], control["files"]) == registered


class TestThreaded(MoverSuite):
    """GDS_MT, bare."""

    memory_kind = MemoryKind.VRAM

    def make_mover(self) -> Mover:
        return NixlMover(PLUGINS["gds_mt"])


class TestPaired(MoverSuite):
    """GDS_MT for device memory, POSIX for that of the host."""

    memory_kind = MemoryKind.VRAM

    def make_mover(self) -> Mover:
        return PairedMover(NixlMover(PLUGINS["gds_mt"]), NixlMover(PLUGINS["posix_aio"]))


class TestPairedHostMemory(TestPaired):
    """CuFile hears of no host memory, and moves none."""

    memory_kind = MemoryKind.DRAM

    @pytest.fixture(autouse=True)
    def without_cufile(self, control: Control) -> Iterator[None]:
        yield
        assert control["largest"] == control["reads"] == control["writes"] == 0


WHERE = extents(np.arange(64) * 64 * KIB, 64 * KIB)
BACK = WHERE[::-1]


class TestThreadedFaults(MoverRigs):
    """What GDS_MT does when cuFile misbehaves."""

    memory_kind = MemoryKind.VRAM

    def make_mover(self) -> Mover:
        return NixlMover(PLUGINS["gds_mt"])

    @pytest.mark.parametrize(
        ("op", "faults"),
        [
            (Op.READ, {"fail_read_nth": 5}),
            (Op.READ, {"short_read_nth": 5, "short_bytes": 4096}),
            (Op.READ, {"short_read_nth": 64, "short_bytes": 1}),
            (Op.WRITE, {"fail_write_nth": 1}),
            (Op.WRITE, {"short_write_nth": 40, "short_bytes": 64 * KIB}),
        ],
    )
    def test_one_of_many_fails(self, rig: Rig, control: Control, op: Op, faults: dict[str, int]) -> None:
        """FAILED, only when all siblings are through: nothing comes late, so no quarantine. The next one works."""
        for place, value in {**faults, "delay_us": 200}.items():
            control[place] = value
        transfer = rig.move(op, WHERE, BACK)
        assert transfer.state is TransferState.FAILED
        assert not transfer.quarantine
        assert control["reads"] + control["writes"] == len(WHERE)
        rig.assert_memory_is_ours(transfer)
        assert rig.move(op, WHERE, BACK).state is TransferState.DONE

    def test_late(self, rig: Rig, control: Control) -> None:
        """Slow storage: submit returns before anything is read, and the state is PENDING until the end."""
        control["delay_us"] = 5000
        transfer = rig.submit(Op.READ, WHERE, BACK)
        assert rig.mover.poll(transfer) is TransferState.PENDING
        assert control["reads"] < len(WHERE)
        rig.wait(transfer)
        assert np.array_equal(rig.memory.reshape(64, -1), rig.stored.reshape(64, -1)[::-1])

    def test_memory_that_cufile_refuses_is_an_error(self, control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
        """So the caller packs; NIXL would bounce without a word."""
        monkeypatch.setattr(pinning, "pinning_route", lambda *_: "nvidia-fs")
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

    @pytest.mark.parametrize("stays", [0, 1], ids=["the first stays", "the second stays"])
    def test_memory_of_two_tiers_is_registered_until_the_last_has_closed(
        self, control: Control, monkeypatch: pytest.MonkeyPatch, stays: int
    ) -> None:
        """CuFile counts no registrations: the first to let go would take the memory from all, and they would bounce."""
        monkeypatch.setattr(pinning, "pinning_route", lambda *_: "nvidia-fs")
        before = control["buffers"]
        memory = HostMemory(4 * MIB)
        movers = [NixlMover(PLUGINS["gds_mt"]) for _ in range(2)]
        for mover in movers:
            mover.register_memory(replace(memory.region, kind=MemoryKind.VRAM))
            assert control["buffers"] == before + 1
        movers.pop(1 - stays).close()
        assert control["buffers"] == before + 1
        movers[0].close()
        assert control["buffers"] == before

    def test_auto_takes_it(self, tmp_path: Path) -> None:
        """Device memory: auto takes GDS_MT when a round trip through it works."""
        page = np.zeros(5 * 4096, dtype=np.uint8)
        address = -(-int(page.ctypes.data) // 4096) * 4096
        mover, report = open_mover(
            "auto", MemoryKind.VRAM, str(tmp_path), scratch=MemoryRegion(address, 4 * 4096, MemoryKind.VRAM)
        )
        mover.close()
        assert mover.name == "gds_mt"
        assert [probe.name for probe in report] == ["gds_mt"]
        assert not list(tmp_path.iterdir())


class TestClosing(MoverRigs):
    """What becomes of a transfer that outlives its mover."""

    memory_kind = MemoryKind.VRAM

    def make_mover(self) -> Mover:
        return NixlMover(PLUGINS["gds_mt"], close_timeout_s=0.2)

    def test_what_does_not_end_is_leaked_not_freed(
        self, tmp_path: Path, control: Control, caplog: pytest.LogCaptureFixture
    ) -> None:
        """CuFile takes longer than ``close`` waits: closing quarantines the transfer, and warns once."""
        rig = Rig(self.make_mover(), tmp_path / "data", self.memory_kind, 4 * MIB, direct_io=True)
        control["delay_us"] = 500_000
        transfer = rig.submit(Op.READ, WHERE, BACK)
        assert rig.mover.poll(transfer) is TransferState.PENDING
        rig.close()
        assert (transfer.state, transfer.quarantine) == (TransferState.FAILED, True)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        with pytest.raises(MoverError):
            rig.submit(Op.READ, WHERE, BACK)
        control["delay_us"] = 0
        deadline_s = time.monotonic() + 10
        while control["reads"] < len(WHERE) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        time.sleep(0.2)  # the late reads must land before their memory goes
        assert rig.memory.size
        control["buffers"] -= 1  # leaked on purpose
        control["files"] -= 1
