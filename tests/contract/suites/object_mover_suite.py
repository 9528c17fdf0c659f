"""The conformance suite of movers that move objects.

Subclass ``ObjectMoverSuite`` in a test module under a name that pytest collects, and override ``make_mover`` and
``raw``. Objects are written and read raw, behind the mover's back, so that no mover vouches for itself.
Threading: one test, one thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nixl_offload.errors import MoverError
from nixl_offload.movers.base import (
    Extents,
    FileId,
    MemoryId,
    MemoryKind,
    MemoryRegion,
    Mover,
    Op,
    TransferState,
)
from nixl_offload.movers.handles import open_file
from nixl_offload.types import PAGE_BYTES
from tests.contract.suites.mover_rig import exit_code_of_fork, is_closed
from tests.contract.suites.mover_suite import KIB, MIB, extents
from tests.contract.suites.object_mover_rig import ObjectRig, RawObjects


class ObjectMoverSuite:
    """What every mover of objects must do. Attributes say what the mover is."""

    memory_kind: MemoryKind = MemoryKind.DRAM
    tells_missing: bool = True
    """False for a mover that cannot tell an absent object from other failures."""

    def make_mover(self) -> Mover:
        """Return a fresh mover; skip the test where this machine cannot run it."""
        raise NotImplementedError

    def raw(self) -> RawObjects:
        """Return access to the objects of the mover that ``make_mover`` makes."""
        raise NotImplementedError

    @pytest.fixture
    def rig(self) -> Iterator[ObjectRig]:
        """The rig of every case."""
        rig = ObjectRig(self.make_mover(), self.raw(), self.memory_kind, 4 * MIB)
        try:
            yield rig
        finally:
            rig.mover.close()

    # Bytes go where they should

    @pytest.mark.parametrize(("offset", "length"), [(0, 2 * MIB), (4097, 100_003), (17, 1)])
    def test_round_trip(self, rig: ObjectRig, offset: int, length: int) -> None:
        """What is written is the whole object; what is read back lands where it should and nowhere else."""
        name, sent = rig.name("trip"), rig.bytes_at(offset, length)
        target = rig.open(name, length)
        transfer = rig.move(Op.WRITE, offset, target, 0, length)
        assert (transfer.state, transfer.error, transfer.bytes_total) == (TransferState.DONE, None, length)
        assert rig.raw.read(name) == sent
        rig.memory[:] = 0
        assert rig.move(Op.READ, MIB + 1, target, 0, length).state is TransferState.DONE
        assert rig.bytes_at(MIB + 1, length) == sent
        rig.memory[MIB + 1 : MIB + 1 + length] = 0
        assert not rig.memory.any(), "a read touched memory outside its extent"
        rig.mover.close_file(target)

    def test_ranges(self, rig: ObjectRig) -> None:
        """Any part of an object can be read, its last byte too."""
        data = np.random.default_rng(5).integers(0, 256, 300_001, dtype=np.uint8).tobytes()
        target = rig.open(rig.store("ranges", data), len(data))
        for there, length in ((0, 4096), (1, 1), (150_000, 150_001), (300_000, 1)):
            assert rig.move(Op.READ, 12_345, target, there, length).state is TransferState.DONE
            assert rig.bytes_at(12_345, length) == data[there : there + length]

    def test_several_ranges_at_once(self, rig: ObjectRig) -> None:
        """Row i of one side meets row i of the other; a mover of single extents refuses instead."""
        data = np.random.default_rng(6).integers(0, 256, 64 * KIB, dtype=np.uint8).tobytes()
        target = rig.open(rig.store("several", data), len(data))
        where, there = extents([0, MIB, 8 * KIB], [100, 200, 300]), extents([60_000, 0, 4_000], [100, 200, 300])
        if rig.mover.limits.max_extents_per_transfer < 3:
            with pytest.raises(MoverError):
                rig.submit(Op.READ, where, target, there)
            return
        assert rig.wait(rig.submit(Op.READ, where, target, there)).state is TransferState.DONE
        assert rig.bytes_at(0, 100) == data[60_000:60_100]
        assert rig.bytes_at(MIB, 200) == data[:200]
        assert rig.bytes_at(8 * KIB, 300) == data[4_000:4_300]

    def test_overwrite_replaces(self, rig: ObjectRig) -> None:
        """A write is the whole object: a shorter one leaves nothing of the longer one behind."""
        name = rig.store("over", b"\x07" * 200_000)
        sent = rig.bytes_at(0, 1000)
        assert rig.move(Op.WRITE, 0, rig.open(name, 1000), 0, 1000).state is TransferState.DONE
        assert rig.raw.read(name) == sent

    def test_a_name_used_again_is_not_mistaken(self, rig: ObjectRig) -> None:
        """Objects opened, closed and opened again, two at a time: each read gives the object that was named."""
        names = [rig.store(f"turn-{number}", bytes([number]) * 5000) for number in range(6)]
        before = rig.open(names[5], 5000)
        for number in (0, 1, 2, 1, 0):
            one, other = rig.open(names[number], 5000), rig.open(names[number + 2], 5000)
            assert rig.move(Op.READ, 0, one, 0, 5000).state is TransferState.DONE
            assert rig.bytes_at(0, 5000) == bytes([number]) * 5000
            rig.mover.close_file(one)
            assert rig.move(Op.READ, 0, other, 0, 5000).state is TransferState.DONE
            assert rig.bytes_at(0, 5000) == bytes([number + 2]) * 5000
            rig.mover.close_file(other)
        assert rig.move(Op.READ, 0, before, 0, 5000).state is TransferState.DONE
        assert rig.bytes_at(0, 5000) == bytes([5]) * 5000

    def test_many_in_flight(self, rig: ObjectRig) -> None:
        """Sixty-four objects at once, written and read back in another order."""
        size, count = 48 * KIB + 1, 64
        names = [rig.name(f"many-{number}") for number in range(count)]
        sent = rig.memory.copy()
        targets = [rig.open(name, size) for name in names]
        writes = [
            rig.submit(Op.WRITE, extents([number * size], size), target, extents([0], size))
            for number, target in enumerate(targets)
        ]
        rig.wait(*writes)
        assert {transfer.state for transfer in writes} == {TransferState.DONE}
        rig.memory[:] = 0
        reads = [
            rig.submit(Op.READ, extents([(count - 1 - number) * size], size), target, extents([0], size))
            for number, target in enumerate(targets)
        ]
        rig.wait(*reads[::-1])
        assert {transfer.state for transfer in reads} == {TransferState.DONE}
        for number in range(count):
            assert np.array_equal(rig.memory[(count - 1 - number) * size :][:size], sent[number * size :][:size])

    def test_nothing_to_move(self, rig: ObjectRig) -> None:
        """No rows: done at once, and no object comes into being."""
        name = rig.name("nothing")
        transfer = rig.submit(Op.WRITE, extents([], 0), rig.open(name, 100), extents([], 0))
        assert (transfer.state, transfer.bytes_total) == (TransferState.DONE, 0)
        assert rig.mover.poll(transfer) is TransferState.DONE
        assert not rig.raw.exists(name)

    def test_arguments_may_change_after_submit(self, rig: ObjectRig) -> None:
        """The mover keeps no view of the caller's arrays."""
        target = rig.open(rig.store("arguments", b"\x21" * 5000), 5000)
        where, there = extents([100], 2000), extents([3000], 2000)
        transfer = rig.submit(Op.READ, where, target, there)
        where[:] = there[:] = 0
        assert rig.wait(transfer).state is TransferState.DONE
        assert rig.bytes_at(100, 2000) == b"\x21" * 2000

    # Refusals: nothing was started

    def test_refuses_partial_writes(self, rig: ObjectRig) -> None:
        """Only all of an object can be written, as one extent; what is there stays, and nothing new appears."""
        assert rig.mover.limits.whole_writes
        old, fresh = rig.store("partial", b"\x11" * 8192), rig.name("fresh")
        for name in (old, fresh):
            target = rig.open(name, 8192)
            for where, there in (
                (extents([0], 4096), extents([0], 4096)),
                (extents([0], 4096), extents([4096], 4096)),
                (extents([0, 4096], 4096), extents([0, 4096], 4096)),
            ):
                with pytest.raises(MoverError):
                    rig.submit(Op.WRITE, where, target, there)
        assert rig.raw.read(old) == b"\x11" * 8192
        assert not rig.raw.exists(fresh)

    @pytest.mark.parametrize(
        ("where", "there"),
        [
            pytest.param(extents([4 * MIB - 10], 100), extents([0], 100), id="past-the-region"),
            pytest.param(extents([0], 100), extents([9_950], 100), id="past-the-object"),
            pytest.param(extents([-1], 100), extents([0], 100), id="negative-offset"),
            pytest.param(extents([0], 0), extents([0], 0), id="no-length"),
            pytest.param(extents([0], 100), extents([0], 200), id="lengths-differ"),
            pytest.param(extents([0], 100), extents([0, 200], 100), id="counts-differ"),
            pytest.param(np.zeros(2, dtype=np.int64), extents([0], 100), id="shape"),
        ],
    )
    def test_refuses_what_does_not_fit(self, rig: ObjectRig, where: Extents, there: Extents) -> None:
        """Extents outside their region or object, or that do not match, raise, and no byte moves."""
        name = rig.store("fit", b"\x31" * 10_000)
        target, before = rig.open(name, 10_000), rig.memory.copy()
        for op in Op:
            with pytest.raises(MoverError):
                rig.submit(op, where, target, there)
        assert np.array_equal(rig.memory, before)
        assert rig.raw.read(name) == b"\x31" * 10_000

    def test_refuses_bad_ids_and_files(self, rig: ObjectRig, tmp_path: Path) -> None:
        """An id that was never given out is an error; so is a file, whose descriptor is closed all the same."""
        where = extents([0], 100)
        target = rig.open(rig.name("ids"), 100)
        with pytest.raises(MoverError):
            rig.mover.submit(Op.READ, MemoryId(10**6), where, target, where)
        with pytest.raises(MoverError):
            rig.submit(Op.READ, where, FileId(10**6), where)
        with pytest.raises(MoverError):
            rig.mover.close_file(FileId(10**6))
        rig.mover.close_file(target)
        with pytest.raises(MoverError):
            rig.submit(Op.READ, where, target, where)
        path = tmp_path / "file"
        path.write_bytes(bytes(PAGE_BYTES))
        with pytest.raises(MoverError):
            open_file(rig.mover, str(path), PAGE_BYTES, direct_io=False)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        with pytest.raises(MoverError):
            rig.mover.adopt_file(fd, str(path), PAGE_BYTES, direct=False)
        assert is_closed(path)

    @pytest.mark.parametrize("kind", list(MemoryKind))
    def test_refuses_foreign_memory(self, rig: ObjectRig, kind: MemoryKind) -> None:
        """Memory of a kind that the mover does not name is refused at registration."""
        if kind in rig.mover.memory_kinds:
            return
        with pytest.raises(MoverError):
            rig.mover.register_memory(MemoryRegion(rig.region.address, PAGE_BYTES, kind))

    # Failures: told by the state, alone

    def test_missing_object(self, rig: ObjectRig) -> None:
        """What is not there is FAILED, said to be missing by who can tell, and the next one works."""
        transfer = rig.move(Op.READ, 0, rig.open(rig.name("absent"), 5000), 0, 5000)
        assert transfer.state is TransferState.FAILED
        assert transfer.error
        assert transfer.missing or not self.tells_missing
        rig.assert_memory_is_ours(transfer)
        target = rig.open(rig.store("present", b"\x41" * 5000), 5000)
        assert rig.move(Op.READ, 0, target, 0, 5000).state is TransferState.DONE

    @pytest.mark.parametrize("kept", [0, 1, 5_000])
    def test_truncated_object(self, rig: ObjectRig, kept: int) -> None:
        """An object that is shorter than it should be fails, or the mover has said that it may not tell."""
        name = rig.store("cut", b"\x51" * kept)
        rig.memory[:] = 0xEE
        transfer = rig.move(Op.READ, MIB, rig.open(name, 10_000), 0, 10_000)
        if transfer.state is TransferState.DONE:
            assert not rig.mover.limits.tells_short_reads
            assert rig.bytes_at(MIB, 10_000) == b"\x51" * kept + b"\xee" * (10_000 - kept)
        else:
            assert not transfer.missing
        assert bool((rig.memory[:MIB] == 0xEE).all())
        assert bool((rig.memory[MIB + 10_000 :] == 0xEE).all())
        rig.assert_memory_is_ours(transfer)

    def test_longer_object(self, rig: ObjectRig) -> None:
        """Of an object that is longer than it should be no byte lands outside the extent."""
        name = rig.store("long", b"\x61" * 20_000)
        rig.memory[:] = 0xEE
        transfer = rig.move(Op.READ, MIB, rig.open(name, 10_000), 0, 10_000)
        if transfer.state is TransferState.DONE:
            assert rig.bytes_at(MIB, 10_000) == b"\x61" * 10_000
        assert bool((rig.memory[:MIB] == 0xEE).all())
        assert bool((rig.memory[MIB + 10_000 :] == 0xEE).all())

    def test_one_failed_among_siblings(self, rig: ObjectRig) -> None:
        """One object of many is gone: only it fails, and no sibling writes after its own end."""
        names = [rig.store(f"sibling-{number}", bytes([number]) * 9000) for number in range(20)]
        names[3] = rig.name("gone")
        reads = [
            rig.submit(Op.READ, extents([number * 9000], 9000), rig.open(name, 9000), extents([0], 9000))
            for number, name in enumerate(names)
        ]
        rig.wait(*reads)
        assert [n for n, transfer in enumerate(reads) if transfer.state is TransferState.FAILED] == [3]
        for number in (n for n in range(20) if n != 3):
            assert rig.bytes_at(number * 9000, 9000) == bytes([number]) * 9000
        rig.assert_memory_is_ours(reads[3])

    # Life

    def test_nothing_is_released_in_flight(self, rig: ObjectRig) -> None:
        """Until its state has been told, neither the memory nor the object of a transfer can be let go."""
        target = rig.open(rig.store("held", b"\x71" * MIB), MIB)
        transfer = rig.submit(Op.READ, extents([0], MIB), target, extents([0], MIB))
        if transfer.state is TransferState.PENDING:
            with pytest.raises(MoverError):
                rig.mover.unregister_memory(rig.memory_id)
            with pytest.raises(MoverError):
                rig.mover.close_file(target)
        assert rig.wait(transfer).state is TransferState.DONE
        rig.mover.close_file(target)
        rig.mover.unregister_memory(rig.memory_id)
        with pytest.raises(MoverError):
            rig.mover.unregister_memory(rig.memory_id)

    def test_close_drains(self, rig: ObjectRig) -> None:
        """Closing waits for what is in flight; twice is fine; afterwards all is refused with a sentence."""
        names = [rig.name(f"drain-{number}") for number in range(24)]
        targets = [rig.open(name, 100_000) for name in names]
        sent = rig.bytes_at(0, 100_000)
        writes = [rig.submit(Op.WRITE, extents([0], 100_000), t, extents([0], 100_000)) for t in targets]
        rig.mover.close()
        rig.mover.close()
        assert {rig.mover.poll(transfer) for transfer in writes} == {TransferState.DONE}
        assert all(rig.raw.read(name) == sent for name in names)
        with pytest.raises(MoverError, match="closed"):
            rig.open(names[0], 100_000)
        with pytest.raises(MoverError):
            rig.submit(Op.READ, extents([0], 100), targets[0], extents([0], 100))

    def test_a_fork_cannot_use_it(self, rig: ObjectRig) -> None:
        """In a fork the mover refuses with a sentence and closing does no harm; the parent goes on."""
        target = rig.open(rig.store("fork", b"\x81" * MIB), MIB)
        transfer = rig.submit(Op.READ, extents([0], MIB), target, extents([0], MIB))
        where = extents([0], MIB)
        assert exit_code_of_fork(rig.mover, lambda: rig.submit(Op.READ, where, target, where), transfer) == 0
        assert rig.wait(transfer).state is TransferState.DONE
        assert rig.bytes_at(0, MIB) == b"\x81" * MIB
