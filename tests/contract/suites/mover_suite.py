"""The conformance suite of movers.

Subclass ``MoverSuite`` in a test module under a name that pytest collects, and override ``make_mover``; where the
mover's memory is not the host's, ``make_memory`` too. Files are written and read raw, behind the mover's back, so that
no mover vouches for itself. Threading: one test, one thread.
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
from nixl_offload.movers.base import Extents, Op, TransferState
from tests.contract.suites.mover_refusals import RefusalSuite
from tests.contract.suites.mover_rig import (
    KIB,
    MIB,
    WAIT_S,
    HostMemory,
    MoverRigs,
    Rig,
    SuiteMemory,
    exit_code_of_fork,
    extents,
    is_closed,
)

__all__ = [
    "KIB",
    "MIB",
    "WAIT_S",
    "HostMemory",
    "MoverRigs",
    "MoverSuite",
    "Rig",
    "SuiteMemory",
    "extents",
]


class MoverSuite(RefusalSuite):
    """What every mover must do, whatever its size limits."""

    # Bytes go where they should

    @pytest.mark.parametrize("direct_io", [True, False])
    def test_round_trip_in_any_order(self, tmp_path: Path, direct_io: bool) -> None:
        """Row i of one side meets row i of the other, whatever the order; all else keeps its bytes."""
        with self.open_rig(tmp_path / "data", direct_io=direct_io) as rig:
            slots = np.random.default_rng(1).permutation(64)[:40]
            memory, file = extents(np.arange(40) * 64 * KIB, 64 * KIB), extents(slots * 64 * KIB, 64 * KIB)
            written = rig.memory.reshape(64, -1)
            assert rig.move(Op.WRITE, memory, file).state is TransferState.DONE
            want = rig.stored.copy().reshape(64, -1)
            want[slots] = written[:40]
            assert np.array_equal(rig.raw_read().reshape(64, -1), want)
            rig.set_memory(0)
            assert rig.move(Op.READ, memory[::-1], file[::-1]).state is TransferState.DONE
            got = rig.memory.reshape(64, -1)
            assert np.array_equal(got[:40], written[:40])
            assert not got[40:].any(), "a read touched memory outside its extents"

    def test_other_offsets_survive_opening_and_writing(self, rig: Rig) -> None:
        """Others opened the file so that all other offsets were cut off. Neither size nor neighbours may change."""
        assert np.array_equal(rig.raw_read(), rig.stored)
        assert rig.move(Op.WRITE, extents([0], 4 * KIB), extents([2 * MIB], 4 * KIB)).state is TransferState.DONE
        want = rig.stored.copy()
        want[2 * MIB : 2 * MIB + 4 * KIB] = rig.memory[: 4 * KIB]
        assert np.array_equal(rig.raw_read(), want)

    def test_adopted_file(self, rig: Rig) -> None:
        """A descriptor that somebody else opened moves bytes as an opened file does, and is the mover's to close."""
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

    def test_adopts_no_directory(self, rig: Rig, tmp_path: Path) -> None:
        """What is refused is closed all the same."""
        fd = os.open(tmp_path, os.O_RDONLY | os.O_CLOEXEC)
        with pytest.raises(MoverError, match="elsewhere"):
            rig.mover.adopt_file(fd, "elsewhere", rig.size_bytes, direct=False)
        assert is_closed(tmp_path)

    def test_extents_of_many_sizes(self, rig: Rig) -> None:
        """Lengths may differ from row to row."""
        lengths = np.array([4, 64, 8, 512, 4, 128]) * KIB
        offsets = np.cumsum(lengths) - lengths
        assert rig.move(Op.READ, extents(offsets, lengths), extents(offsets + MIB, lengths)).state is TransferState.DONE
        total = int(lengths.sum())
        assert np.array_equal(rig.memory[:total], rig.stored[MIB : MIB + total])

    def test_many_small_extents(self, tmp_path: Path) -> None:
        """512 extents of 64 KiB, the usual shape of blocks that are not contiguous."""
        with self.open_rig(tmp_path / "data", 32 * MIB) as rig:
            order = np.random.default_rng(2).permutation(512)
            count = min(512, rig.mover.limits.max_extents_per_transfer)
            transfer = rig.move(
                Op.READ,
                extents(order[:count] * 64 * KIB, 64 * KIB),
                extents(np.arange(count) * 64 * KIB, 64 * KIB),
            )
            assert transfer.state is TransferState.DONE
            assert transfer.bytes_total == count * 64 * KIB
            got, want = rig.memory.reshape(512, -1), rig.stored.reshape(512, -1)
            assert np.array_equal(got[order[:count]], want[:count])

    def test_two_transfers_interleaved(self, rig: Rig) -> None:
        """Two in flight at once, polled in turn, the later one first."""
        half = np.arange(16) * 64 * KIB
        a = rig.submit(Op.READ, extents(half, 64 * KIB), extents(half + MIB, 64 * KIB))
        b = rig.submit(Op.READ, extents(half + 2 * MIB, 64 * KIB), extents(half + 3 * MIB, 64 * KIB))
        rig.wait(b, a)
        assert (a.state, b.state) == (TransferState.DONE, TransferState.DONE)
        assert np.array_equal(rig.memory[:MIB], rig.stored[MIB : 2 * MIB])
        assert np.array_equal(rig.memory[2 * MIB : 3 * MIB], rig.stored[3 * MIB :])

    def test_arguments_may_change_after_submit(self, rig: Rig) -> None:
        """The mover keeps no view of the caller's arrays."""
        memory, file = extents(np.arange(8) * 64 * KIB, 64 * KIB), extents(np.arange(8) * 64 * KIB, 64 * KIB)
        transfer = rig.submit(Op.READ, memory, file)
        memory[:] = file[:] = 0
        assert rig.wait(transfer).state is TransferState.DONE
        assert np.array_equal(rig.memory[: 512 * KIB], rig.stored[: 512 * KIB])

    def test_nothing_to_move(self, rig: Rig) -> None:
        """No rows: done at once, nothing touched."""
        before = rig.memory
        transfer = rig.submit(Op.READ, extents([], 0), extents([], 0))
        assert (transfer.state, transfer.bytes_total) == (TransferState.DONE, 0)
        assert rig.mover.poll(transfer) is TransferState.DONE
        assert np.array_equal(rig.memory, before)

    # States

    def test_pending_until_the_last_byte(self, rig: Rig) -> None:
        """DONE means done: whenever poll says so, all bytes are in the file. No state follows a final one."""
        transfer = rig.submit(Op.WRITE, extents(np.arange(64) * 64 * KIB, 64 * KIB), _backwards(64, 64 * KIB))
        seen = [transfer.state]
        deadline = time.monotonic() + WAIT_S
        while seen[-1] is TransferState.PENDING and time.monotonic() < deadline:
            seen.append(rig.mover.poll(transfer))
        assert seen[-1] is TransferState.DONE
        assert np.array_equal(rig.raw_read().reshape(64, -1), rig.memory.reshape(64, -1)[::-1])
        assert rig.mover.poll(transfer) is TransferState.DONE

    def test_polling_again_moves_nothing_again(self, rig: Rig) -> None:
        """Others launched the same transfer twice. A final transfer stays what it is, and a new submit is a new one."""
        where = extents([0], 64 * KIB)
        first = rig.move(Op.READ, where, where)
        rig.raw_write(0, bytes(64 * KIB))
        rig.set_memory(7)
        for _ in range(20):
            assert rig.mover.poll(first) is TransferState.DONE
        assert bool((rig.memory == 7).all()), "polling a final transfer moved bytes"
        second = rig.move(Op.READ, where, where)
        assert second is not first
        assert not rig.memory[: 64 * KIB].any()

    def test_closing_drains(self, rig: Rig) -> None:
        """Closing with transfers in flight waits for them: afterwards their state is final and the memory is ours."""
        half = extents(np.arange(8) * 512 * KIB, 64 * KIB)
        transfers = [
            rig.submit(
                Op.READ,
                extents(np.arange(8) * 64 * KIB + n * MIB, 64 * KIB),
                half,
            )
            for n in range(3)
        ]
        rig.mover.close()
        assert [rig.mover.poll(transfer) for transfer in transfers] == [TransferState.DONE] * 3
        assert np.array_equal(rig.memory[: 64 * KIB], rig.stored[: 64 * KIB])
        rig.assert_memory_is_ours(transfers[0])
        rig.mover.close()
        with pytest.raises(MoverError):
            rig.submit(Op.READ, extents([0], 4 * KIB), extents([0], 4 * KIB))

    def test_nothing_is_forgotten_in_flight(self, rig: Rig) -> None:
        """A region and a file in use cannot be given up; once the transfer is final they can, and their ids die."""
        where = extents(np.arange(32) * 128 * KIB, 64 * KIB)
        transfer = rig.submit(Op.READ, where, where)
        if transfer.state is TransferState.PENDING:
            with pytest.raises(MoverError):
                rig.mover.unregister_memory(rig.memory_id)
            with pytest.raises(MoverError):
                rig.mover.close_file(rig.file_id)
        rig.wait(transfer)
        rig.mover.unregister_memory(rig.memory_id)
        with pytest.raises(MoverError):
            rig.submit(Op.READ, where, where)
        rig.mover.close_file(rig.file_id)
        with pytest.raises(MoverError):
            rig.mover.close_file(rig.file_id)

    # Failures: told by the state, alone

    def test_short_read_is_a_failure(self, rig: Rig) -> None:
        """The file was cut behind the mover's back. Others served the stale tail of the buffer."""
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
            memory = extents(np.arange(48) * 64 * KIB, 64 * KIB)
            offsets[bad] = 3 * MIB + 512 * KIB
            transfer = rig.move(Op.READ, memory, extents(offsets[:: 1 if bad else -1], 64 * KIB))
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

    # Processes

    def test_a_fork_cannot_use_it(self, rig: Rig) -> None:
        """In a fork the mover refuses with a sentence and closing does no harm; the parent goes on."""
        where = extents(np.arange(16) * 64 * KIB, 64 * KIB)
        transfer = rig.submit(Op.READ, where, where)
        assert exit_code_of_fork(rig.mover, lambda: rig.submit(Op.READ, where, where), transfer) == 0
        assert rig.wait(transfer).state is TransferState.DONE
        assert np.array_equal(rig.memory[:MIB], rig.stored[:MIB])


def _backwards(count: int, length_bytes: int) -> Extents:
    return extents(np.arange(count)[::-1] * length_bytes, length_bytes)


@contextmanager
def _file_size_limit(size_bytes: int) -> Iterator[None]:
    """Let this process write no file past ``size_bytes``; Python ignores the signal, so the write fails with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
