"""What every mover over the emulated cuFile must do when it misbehaves, and the emulation's control file.

Threading: one test, one thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nixl_offload.keep import keep_forever
from nixl_offload.movers.base import MemoryKind, Op, TransferState
from tests.contract.suites.mover_rig import KIB, MIB, MoverRigs, Rig, extents

from .build import Control

WHERE = extents(np.arange(64) * 64 * KIB, 64 * KIB)
BACK = WHERE[::-1]
"""Backwards, so that no row joins the one before."""


@pytest.fixture(autouse=True)
def control() -> Iterator[Control]:
    """The emulation's control file, without faults before and after each case; nothing may stay registered."""
    control = Control(Path(os.environ["CUFILE_EMULATION_CONTROL"]))
    control.reset()
    registered = control["buffers"], control["files"]
    yield control
    control.reset()
    assert (control["buffers"], control["files"]) == registered


class CuFileFaults(MoverRigs):
    """Faults of cuFile, told per transfer."""

    memory_kind = MemoryKind.VRAM
    close_timeout_s = 5.0
    """Of the movers that are made."""
    says_why = True
    """Whether the mover hands on the words of an error."""

    @pytest.mark.parametrize(
        ("op", "faults", "words"),
        [
            (Op.READ, {"fail_read_nth": 5}, "an error of cuFile's that KvikIO does not hand on"),
            (Op.READ, {"short_read_nth": 5, "short_bytes": 4096}, "short, 61440 of 65536 bytes"),
            (Op.READ, {"short_read_nth": 64, "short_bytes": 64 * KIB}, "short, 0 of 65536 bytes"),
            (Op.READ, {"short_read_nth": 64, "short_bytes": 1}, ""),
            (Op.WRITE, {"fail_write_nth": 1}, "Input/output error"),
            (Op.WRITE, {"short_write_nth": 40, "short_bytes": 64 * KIB}, "short, 0 of 65536 bytes"),
        ],
    )
    def test_one_of_many_fails(self, rig: Rig, control: Control, op: Op, faults: dict[str, int], words: str) -> None:
        """FAILED, only when all siblings are through: nothing comes late, so no quarantine. The next one works."""
        for place, value in {**faults, "delay_us": 200}.items():
            control[place] = value
        transfer = rig.move(op, WHERE, BACK)
        assert (transfer.state, transfer.quarantine) == (TransferState.FAILED, False)
        assert words in str(transfer.error) or not self.says_why
        assert control["reads"] + control["writes"] == len(WHERE)
        rig.assert_memory_is_ours(transfer)
        assert rig.move(op, WHERE, BACK).state is TransferState.DONE

    def test_what_does_not_end_is_leaked_not_freed(
        self, tmp_path: Path, control: Control, caplog: pytest.LogCaptureFixture
    ) -> None:
        """CuFile takes longer than ``close`` waits: closing quarantines the transfer, and warns once."""
        self.close_timeout_s = 0.1
        memory = self.make_memory(4 * MIB)
        keep_forever(memory)
        rig = Rig(self.make_mover(), tmp_path / "data", memory, direct_io=True)
        control["delay_us"] = 500_000
        transfer = rig.submit(Op.READ, WHERE[:16], BACK[:16])
        assert rig.mover.poll(transfer) is TransferState.PENDING
        rig.close()
        assert (transfer.state, transfer.quarantine) == (TransferState.FAILED, True)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        while control["reads"] < 16:  # or the late ones would count in other cases
            time.sleep(0.01)
        time.sleep(0.6)
        control["buffers"] -= 1  # leaked on purpose
        control["files"] -= 1
