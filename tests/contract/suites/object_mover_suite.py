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
from nixl_offload.movers.base import Extents, FileId, MemoryId, MemoryKind, MemoryRegion, Mover, Op, TransferState
from nixl_offload.types import PAGE_BYTES
from tests.contract.suites.mover_rig import KIB, MIB, extents, is_closed
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
        """A write replaces the whole object; a read lands where it should and nowhere else."""
        name, sent = rig.store("trip", b"\x07" * (3 * MIB)), rig.bytes_at(offset, length)
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

    def test_a_name_used_again_is_not_mistaken(self, rig: ObjectRig) -> None:
        """Objects opened, closed and opened again, two at a time: each read gives the object that was named."""
        names = [rig.store(f"turn-{number}", bytes([number]) * 5000) for number in range(4)]
        for number in (0, 1, 2, 1, 0):
            for which, target in [(at, rig.open(names[at], 5000)) for at in (number, number + 1)]:
                assert rig.move(Op.READ, 0, target, 0, 5000).state is TransferState.DONE
                assert rig.bytes_at(0, 5000) == bytes([which]) * 5000
                rig.mover.close_file(target)

    def test_many_in_flight(self, rig: ObjectRig) -> None:
        """Sixty-four objects at once, written and read back in another order."""
        size, count = 48 * KIB + 1, 64
        sent = rig.memory[: count * size].reshape(count, size).copy()
        targets = [rig.open(rig.name(f"many-{number}"), size) for number in range(count)]

        def move(op: Op, places: list[int]) -> None:
            transfers = [
                rig.submit(op, extents([place * size], size), target, extents([0], size))
                for place, target in zip(places, targets, strict=True)
            ]
            rig.wait(*transfers[::-1])
            assert {transfer.state for transfer in transfers} == {TransferState.DONE}

        move(Op.WRITE, list(range(count)))
        rig.memory[:] = 0
        move(Op.READ, list(range(count))[::-1])
        assert np.array_equal(rig.memory[: count * size].reshape(count, size), sent[::-1])

    def test_nothing_to_move(self, rig: ObjectRig) -> None:
        """No rows: done at once, and no object comes into being."""
        name = rig.name("nothing")
        transfer = rig.submit(Op.WRITE, extents([], 0), rig.open(name, 100), extents([], 0))
        assert (transfer.state, transfer.bytes_total) == (TransferState.DONE, 0)
        assert rig.mover.poll(transfer) is TransferState.DONE
        assert not rig.raw.exists(name)

    # Refusals: nothing was started

    @pytest.mark.parametrize(
        ("where", "there", "ops"),
        [
            pytest.param(extents([4 * MIB - 10], 100), extents([0], 100), tuple(Op), id="past-the-region"),
            pytest.param(extents([0], 100), extents([9_950], 100), tuple(Op), id="past-the-object"),
            pytest.param(extents([-1], 100), extents([0], 100), tuple(Op), id="negative-offset"),
            pytest.param(extents([0], 0), extents([0], 0), tuple(Op), id="no-length"),
            pytest.param(extents([0], 100), extents([0], 200), tuple(Op), id="lengths-differ"),
            pytest.param(extents([0], 100), extents([0, 200], 100), tuple(Op), id="counts-differ"),
            pytest.param(extents([0], 5000), extents([0], 5000), (Op.WRITE,), id="writes-the-begin"),
            pytest.param(extents([0], 5000), extents([5000], 5000), (Op.WRITE,), id="writes-the-end"),
            pytest.param(extents([0, 5000], 5000), extents([0, 5000], 5000), (Op.WRITE,), id="writes-in-two"),
        ],
    )
    def test_refuses_what_does_not_fit(
        self, rig: ObjectRig, where: Extents, there: Extents, ops: tuple[Op, ...]
    ) -> None:
        """Extents outside their region or object, that do not match, or that write a part: no byte moves."""
        name = rig.store("fit", b"\x31" * 10_000)
        target, before = rig.open(name, 10_000), rig.memory.copy()
        for op in ops:
            with pytest.raises(MoverError):
                rig.submit(op, where, target, there)
        assert np.array_equal(rig.memory, before)
        assert rig.raw.read(name) == b"\x31" * 10_000

    def test_refuses_bad_ids_files_and_foreign_memory(self, rig: ObjectRig, tmp_path: Path) -> None:
        """The descriptor of a file is closed all the same."""
        where = extents([0], 100)
        target = rig.open(rig.name("ids"), 100)
        with pytest.raises(MoverError):
            rig.mover.submit(Op.READ, MemoryId(10**6), where, target, where)
        with pytest.raises(MoverError):
            rig.mover.close_file(FileId(10**6))
        rig.mover.close_file(target)
        with pytest.raises(MoverError):
            rig.submit(Op.READ, where, target, where)
        path = tmp_path / "file"
        path.write_bytes(bytes(PAGE_BYTES))
        with pytest.raises(MoverError):
            rig.mover.adopt_file(os.open(path, os.O_RDWR | os.O_CLOEXEC), str(path), PAGE_BYTES, direct=False)
        assert is_closed(path)
        for kind in set(MemoryKind) - rig.mover.memory_kinds:
            with pytest.raises(MoverError):
                rig.mover.register_memory(MemoryRegion(rig.region.address, PAGE_BYTES, kind))

    # Failures: told by the state alone

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

    def test_one_missing_among_siblings(self, rig: ObjectRig) -> None:
        """One object of many is gone: only it fails, as missing if the mover can tell. Nothing comes late."""
        names = [rig.store(f"sibling-{number}", bytes([number]) * 9000) for number in range(20)]
        names[3] = rig.name("gone")
        reads = [
            rig.submit(Op.READ, extents([number * 9000], 9000), rig.open(name, 9000), extents([0], 9000))
            for number, name in enumerate(names)
        ]
        rig.wait(*reads)
        assert [n for n, transfer in enumerate(reads) if transfer.state is TransferState.FAILED] == [3]
        assert reads[3].error
        assert reads[3].missing or not self.tells_missing
        for number in (n for n in range(20) if n != 3):
            assert rig.bytes_at(number * 9000, 9000) == bytes([number]) * 9000
        rig.assert_memory_is_ours(reads[3])

    # Life

    def test_an_object_in_use_stays_open(self, rig: ObjectRig) -> None:
        target = rig.open(rig.store("held", b"\x71" * MIB), MIB)
        transfer = rig.submit(Op.READ, extents([0], MIB), target, extents([0], MIB))
        if transfer.state is TransferState.PENDING:
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
