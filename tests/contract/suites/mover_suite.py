"""The conformance suite of movers.

Subclass ``MoverSuite`` in a test module under a name that pytest collects, and override ``make_mover``; if the mover's
memory is not the host's, ``make_memory`` too. Files are written and read raw, behind the mover's back, so that no mover
vouches for itself. Threading: one test, one thread.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from nixl_offload.errors import MoverError
from nixl_offload.movers.base import Extents, FileId, MemoryId, MemoryKind, MemoryRegion, Op, TransferState
from nixl_offload.types import PAGE_BYTES
from tests.contract.suites.mover_rig import KIB, MIB, WAIT_S, MoverRigs, Rig, extents, is_closed


class MoverSuite(MoverRigs):
    """What every mover of files must do."""

    # Bytes go where they should

    @pytest.mark.parametrize("direct_io", [True, False])
    def test_round_trip_in_any_order(self, tmp_path: Path, direct_io: bool) -> None:
        """Row i of one side meets row i of the other, in any order. All other bytes and the file's size stay."""
        with self.open_rig(tmp_path / "data", direct_io=direct_io) as rig:
            assert np.array_equal(rig.raw_read(), rig.stored), "opening changed the file"
            slots = np.random.default_rng(1).permutation(64)[:40]
            memory, file = extents(np.arange(40) * 64 * KIB, 64 * KIB), extents(slots * 64 * KIB, 64 * KIB)
            written = rig.memory.reshape(64, -1)
            assert rig.move(Op.WRITE, memory, file).state is TransferState.DONE
            want = rig.stored.copy().reshape(64, -1)
            want[slots] = written[:40]
            assert np.array_equal(rig.raw_read().reshape(64, -1), want)
            rig.set_memory(0)
            assert rig.move(Op.READ, memory[::-1].copy(), file[::-1].copy()).state is TransferState.DONE
            got = rig.memory.reshape(64, -1)
            assert np.array_equal(got[:40], written[:40])
            assert not got[40:].any(), "a read touched memory outside its extents"

    def test_adopted_file(self, rig: Rig) -> None:
        """A descriptor that the caller opened moves bytes as an opened file does, and is the mover's to close."""
        own_name = rig.path.with_name("adopted")
        own_name.hardlink_to(rig.path)
        fd = os.open(own_name, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if self.direct_io else 0))
        file = rig.mover.adopt_file(fd, "elsewhere", rig.size_bytes, direct=self.direct_io)
        where = extents([0], MIB)
        transfer = rig.mover.submit(Op.READ, rig.memory_id, where, file, extents([3 * MIB], MIB))
        assert rig.wait(transfer).state is TransferState.DONE
        assert np.array_equal(rig.memory[:MIB], rig.stored[3 * MIB :])
        transfer = rig.mover.submit(Op.WRITE, rig.memory_id, where, file, extents([2 * MIB], MIB))
        assert rig.wait(transfer).state is TransferState.DONE
        want = rig.stored.copy()
        want[2 * MIB : 3 * MIB] = want[3 * MIB :]
        assert np.array_equal(rig.raw_read(), want)
        rig.mover.close_file(file)
        assert is_closed(own_name)

    def test_many_extents_of_many_sizes(self, tmp_path: Path) -> None:
        """512 extents, the usual shape of blocks that are not contiguous."""
        with self.open_rig(tmp_path / "data", 32 * MIB) as rig:
            order = np.random.default_rng(2).permutation(512)
            lengths = np.resize([4, 64, 8, 32, 64, 16], 512) * KIB
            transfer = rig.move(
                Op.READ, extents(order * 64 * KIB, lengths), extents(np.arange(512) * 64 * KIB, lengths)
            )
            assert transfer.state is TransferState.DONE
            assert transfer.bytes_total == lengths.sum()
            got, want = rig.memory.reshape(512, -1), rig.stored.reshape(512, -1)
            for number, length in enumerate(lengths):
                assert np.array_equal(got[order[number], :length], want[number, :length])

    def test_two_transfers_interleaved(self, rig: Rig) -> None:
        """Two in flight at once, polled in turn, the later one first."""
        half = np.arange(16) * 64 * KIB
        a = rig.submit(Op.READ, extents(half, 64 * KIB), extents(half + MIB, 64 * KIB))
        b = rig.submit(Op.READ, extents(half + 2 * MIB, 64 * KIB), extents(half + 3 * MIB, 64 * KIB))
        rig.wait(b, a)
        assert (a.state, b.state) == (TransferState.DONE, TransferState.DONE)
        assert np.array_equal(rig.memory[:MIB], rig.stored[MIB : 2 * MIB])
        assert np.array_equal(rig.memory[2 * MIB : 3 * MIB], rig.stored[3 * MIB :])

    def test_nothing_to_move(self, rig: Rig) -> None:
        """No rows: done at once, nothing touched."""
        before = rig.memory
        transfer = rig.submit(Op.READ, extents([], 0), extents([], 0))
        assert (transfer.state, transfer.bytes_total) == (TransferState.DONE, 0)
        assert rig.mover.poll(transfer) is TransferState.DONE
        assert np.array_equal(rig.memory, before)

    # States

    def test_pending_until_the_last_byte(self, rig: Rig) -> None:
        """When poll says DONE, all bytes are in the file. Polling again changes nothing and moves nothing."""
        where = extents(np.arange(64) * 64 * KIB, 64 * KIB)
        transfer = rig.submit(Op.WRITE, where, extents(np.arange(64)[::-1] * 64 * KIB, 64 * KIB))
        deadline_s = time.monotonic() + WAIT_S
        while rig.mover.poll(transfer) is TransferState.PENDING:
            assert time.monotonic() < deadline_s
        assert np.array_equal(rig.raw_read().reshape(64, -1), rig.memory.reshape(64, -1)[::-1])
        rig.raw_write(0, bytes(64 * KIB))
        for _ in range(20):
            assert rig.mover.poll(transfer) is TransferState.DONE
        assert not rig.raw_read()[: 64 * KIB].any(), "polling a final transfer moved bytes"

    def test_closing_drains(self, rig: Rig) -> None:
        """Closing with transfers in flight waits for them: afterwards their state is final and the memory is ours."""
        there = extents(np.arange(8) * 512 * KIB, 64 * KIB)
        wheres = [extents(np.arange(8) * 64 * KIB + n * MIB, 64 * KIB) for n in range(3)]
        transfers = [rig.submit(Op.READ, where, there) for where in wheres]
        rig.mover.close()
        assert [rig.mover.poll(transfer) for transfer in transfers] == [TransferState.DONE] * 3
        assert np.array_equal(rig.memory[: 64 * KIB], rig.stored[: 64 * KIB])
        rig.assert_memory_is_ours(transfers[0])
        rig.mover.close()
        with pytest.raises(MoverError):
            rig.submit(Op.READ, extents([0], 4 * KIB), extents([0], 4 * KIB))

    def test_a_file_in_use_stays_open(self, rig: Rig) -> None:
        """Once the transfer is final, region and file can be given up, and their ids die."""
        where = extents(np.arange(32) * 128 * KIB, 64 * KIB)
        transfer = rig.submit(Op.READ, where, where)
        if transfer.state is TransferState.PENDING:
            with pytest.raises(MoverError):
                rig.mover.close_file(rig.file_id)
        rig.wait(transfer)
        rig.mover.unregister_memory(rig.memory_id)
        with pytest.raises(MoverError):
            rig.submit(Op.READ, where, where)
        rig.mover.close_file(rig.file_id)
        with pytest.raises(MoverError):
            rig.mover.close_file(rig.file_id)

    # Failures: told by the state alone

    def test_short_read_is_a_failure(self, rig: Rig) -> None:
        """The file was cut behind the mover's back; the stale tail of the buffer must not be served."""
        os.ftruncate(rig.fd, 32 * KIB)
        transfer = rig.move(Op.READ, extents([0], 64 * KIB), extents([0], 64 * KIB))
        assert transfer.state is TransferState.FAILED
        assert transfer.error
        rig.assert_memory_is_ours(transfer)
        # Only that transfer is lost.
        again = rig.move(Op.READ, extents([MIB], 32 * KIB), extents([0], 32 * KIB))
        assert again.state is TransferState.DONE
        assert np.array_equal(rig.memory[MIB : MIB + 32 * KIB], rig.stored[: 32 * KIB])

    def test_one_bad_among_siblings(self, rig: Rig) -> None:
        """One row beyond the end of the file, first of many: FAILED, and no sibling writes late."""
        os.ftruncate(rig.fd, 3 * MIB)
        for bad in (0, 20):
            offsets = np.arange(48) * 64 * KIB
            offsets[bad] = 3 * MIB + 512 * KIB
            transfer = rig.move(Op.READ, extents(np.arange(48) * 64 * KIB, 64 * KIB), extents(offsets, 64 * KIB))
            assert transfer.state is TransferState.FAILED
            rig.assert_memory_is_ours(transfer)

    def test_failed_write(self, rig: Rig) -> None:
        """The kernel refuses to write past a limit (as it would on a full disk): FAILED, and the next one works."""
        where = extents(np.arange(32) * 128 * KIB, 64 * KIB)
        with _file_size_limit(2 * MIB):
            transfer = rig.move(Op.WRITE, where, where)
        assert transfer.state is TransferState.FAILED
        assert transfer.error
        rig.assert_memory_is_ours(transfer)
        assert rig.move(Op.WRITE, where, where).state is TransferState.DONE

    # Refusals: nothing was started

    @pytest.mark.parametrize(
        ("memory", "file"),
        [
            pytest.param(extents([4 * MIB - 4 * KIB], 8 * KIB), extents([0], 8 * KIB), id="past-the-region"),
            pytest.param(extents([0], 8 * KIB), extents([4 * MIB - 4 * KIB], 8 * KIB), id="past-the-file"),
            pytest.param(extents([-4 * KIB], 4 * KIB), extents([0], 4 * KIB), id="negative-offset"),
            pytest.param(extents([0], 0), extents([0], 0), id="no-length"),
            pytest.param(extents([4 * KIB], 2**63 - 1), extents([4 * KIB], 2**63 - 1), id="overflow"),
            pytest.param(extents([0], 4 * KIB), extents([0], 8 * KIB), id="lengths-differ"),
            pytest.param(extents([0, 8 * KIB], 4 * KIB), extents([0], 4 * KIB), id="counts-differ"),
            pytest.param(extents([512], 4 * KIB), extents([0], 4 * KIB), id="memory-off-the-grid"),
            pytest.param(extents([0], 4 * KIB), extents([512], 4 * KIB), id="file-off-the-grid"),
            pytest.param(extents([0], 512), extents([0], 512), id="length-off-the-grid"),
        ],
    )
    def test_refuses_what_does_not_fit(self, tmp_path: Path, memory: Extents, file: Extents) -> None:
        """Rows outside their region or file, that do not match, or off O_DIRECT's grid: no byte moves."""
        with self.open_rig(tmp_path / "data", direct_io=True) as rig:
            before = rig.memory
            for op in Op:
                with pytest.raises(MoverError):
                    rig.submit(op, memory, file)
            assert np.array_equal(rig.memory, before)
            assert np.array_equal(rig.raw_read(), rig.stored)

    def test_refuses_bad_ids_and_foreign_memory(self, rig: Rig) -> None:
        """An id that was never given out, and memory of a kind that the mover does not name."""
        where = extents([0], 4 * KIB)
        with pytest.raises(MoverError):
            rig.mover.submit(Op.READ, MemoryId(10**6), where, rig.file_id, where)
        with pytest.raises(MoverError):
            rig.mover.submit(Op.READ, rig.memory_id, where, FileId(10**6), where)
        with pytest.raises(MoverError):
            rig.mover.unregister_memory(MemoryId(10**6))
        with pytest.raises(MoverError):
            rig.mover.close_file(FileId(10**6))
        for kind in set(MemoryKind) - rig.mover.memory_kinds:
            with pytest.raises(MoverError):
                rig.mover.register_memory(MemoryRegion(rig.region.address, PAGE_BYTES, kind))

    def test_too_many_extents(self, tmp_path: Path) -> None:
        """More than 65,536 extents stop NIXL's POSIX plugin for good."""
        with self.open_rig(tmp_path / "data", direct_io=False) as rig:
            pages = extents(np.arange(70_000) % 1024 * 4 * KIB, 4 * KIB)
            before = rig.memory
            with pytest.raises(MoverError):
                rig.submit(Op.READ, pages, pages)
            assert np.array_equal(rig.memory, before)


@contextmanager
def _file_size_limit(size_bytes: int) -> Iterator[None]:
    """Let this process write no file past ``size_bytes``; Python ignores the signal, so the write fails with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
