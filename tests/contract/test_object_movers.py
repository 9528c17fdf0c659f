"""What every mover of objects must do, against rclone's S3 server: NIXL's OBJ plugin, and obstore.

Objects are written and read raw, behind the mover's back, so that no mover vouches for itself. What all movers share is
proved by ``mover_suite``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nixl_offload.errors import MoverError
from nixl_offload.movers.base import Op, TransferState
from nixl_offload.movers.select import make_object_mover
from nixl_offload.types import PAGE_BYTES
from tests.contract.suites.mover_rig import KIB, MIB, extents, is_closed
from tests.s3.servers import RcloneServer

from .object_rigs import ObjectRig, tier_of

DONE, FAILED = TransferState.DONE, TransferState.FAILED


@pytest.fixture(params=["obj", "obstore"])
def rig(request: pytest.FixtureRequest, rclone: RcloneServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectRig]:
    for name, value in rclone.environment.items():
        monkeypatch.setenv(name, value)
    rig = ObjectRig(make_object_mover(request.param, tier_of(rclone)), rclone, 4 * MIB)
    yield rig
    rig.mover.close()


@pytest.mark.parametrize(("offset", "length"), [(0, 2 * MIB), (4097, 100_003), (17, 1)])
def test_round_trip(rig: ObjectRig, offset: int, length: int) -> None:
    """A write replaces the whole object; a read lands where it should and nowhere else."""
    name, sent = rig.store("trip", b"\x07" * (3 * MIB)), rig.bytes_at(offset, length)
    target = rig.open(name, length)
    transfer = rig.move(Op.WRITE, offset, target, 0, length)
    assert (transfer.state, transfer.error, transfer.bytes_total) == (DONE, None, length)
    assert rig.stored(name) == sent
    rig.set_memory(0)
    assert rig.move(Op.READ, MIB + 1, target, 0, length).state is DONE
    assert rig.bytes_at(MIB + 1, length) == sent
    assert not np.delete(rig.memory, slice(MIB + 1, MIB + 1 + length)).any(), "a read touched memory outside its extent"
    rig.mover.close_file(target)


def test_a_name_used_again_is_not_mistaken(rig: ObjectRig) -> None:
    """Objects opened, closed and opened again, two at a time: each read gives the object that was named."""
    names = [rig.store(f"turn-{number}", bytes([number]) * 5000) for number in range(4)]
    for number in (0, 1, 2, 1, 0):
        for which, target in [(at, rig.open(names[at], 5000)) for at in (number, number + 1)]:
            assert rig.move(Op.READ, 0, target, 0, 5000).state is DONE
            assert rig.bytes_at(0, 5000) == bytes([which]) * 5000
            rig.mover.close_file(target)


def test_many_in_flight_and_one_missing(rig: ObjectRig) -> None:
    """Sixty-four objects at once, written and read back in another order. One that is gone by then fails alone, as
    missing, and nothing comes late.
    """
    size, count, gone = 48 * KIB + 1, 64, 3
    sent = rig.memory[: count * size].reshape(count, size).copy()
    names = [rig.name(f"many-{number}") for number in range(count)]
    writes = [rig.submit(Op.WRITE, at * size, rig.open(name, size), 0, size) for at, name in enumerate(names)]
    rig.wait(*writes[::-1])
    assert {transfer.state for transfer in writes} == {DONE}
    rig.set_memory(0)
    names[gone] = rig.name("gone")
    places = range(count)[::-1]
    reads = [
        rig.submit(Op.READ, place * size, rig.open(name, size), 0, size)
        for place, name in zip(places, names, strict=True)
    ]
    rig.wait(*reads)
    assert [number for number, transfer in enumerate(reads) if transfer.state is FAILED] == [gone]
    assert reads[gone].error
    assert reads[gone].missing
    arrived = rig.memory[: count * size].reshape(count, size)[::-1]
    assert np.array_equal(np.delete(arrived, gone, 0), np.delete(sent, gone, 0))
    rig.assert_memory_is_ours(reads[gone])


@pytest.mark.parametrize("there", [[0], [5000], [0, 5000]], ids=["the begin", "the end", "in two"])
def test_a_part_of_an_object_is_not_written(rig: ObjectRig, there: list[int]) -> None:
    """Nor more read than there is of it."""
    name = rig.store("fit", b"\x31" * 10_000)
    target, before = rig.open(name, 10_000), rig.memory
    for op, where in ((Op.WRITE, extents(there, 5000)), (Op.READ, extents([9_950], 100))):
        with pytest.raises(MoverError):
            rig.mover.submit(op, rig.memory_id, where, target, where)
    assert np.array_equal(rig.memory, before)
    assert rig.stored(name) == b"\x31" * 10_000


def test_files_are_refused_and_closed(rig: ObjectRig, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE_BYTES))
    with pytest.raises(MoverError):
        rig.mover.adopt_file(os.open(path, os.O_RDWR | os.O_CLOEXEC), str(path), PAGE_BYTES, direct=False)
    assert is_closed(path)


@pytest.mark.parametrize("there", [0, 1, 5_000, 20_000])
def test_an_object_of_another_length(rig: ObjectRig, there: int) -> None:
    """Too short, it fails, or the mover has said that it may not tell. Too long, nothing lands outside the extent."""
    name = rig.store("other", b"\x51" * there)
    rig.set_memory(0xEE)
    transfer = rig.move(Op.READ, MIB, rig.open(name, 10_000), 0, 10_000)
    if transfer.state is DONE:
        assert there >= 10_000 or not rig.mover.limits.tells_short_reads
        assert rig.bytes_at(MIB, 10_000) == (b"\x51" * there + b"\xee" * 10_000)[:10_000]
    assert not transfer.missing
    assert bool((rig.memory[:MIB] == 0xEE).all())
    assert bool((rig.memory[MIB + 10_000 :] == 0xEE).all())
    rig.assert_memory_is_ours(transfer)


def test_close_drains(rig: ObjectRig) -> None:
    """Closing waits for what is in flight; twice is fine; afterwards all is refused with a sentence."""
    names = [rig.name(f"drain-{number}") for number in range(24)]
    targets = [rig.open(name, 100_000) for name in names]
    sent = rig.bytes_at(0, 100_000)
    writes = [rig.submit(Op.WRITE, 0, target, 0, 100_000) for target in targets]
    rig.mover.close()
    rig.mover.close()
    assert {rig.mover.poll(transfer) for transfer in writes} == {DONE}
    assert all(rig.stored(name) == sent for name in names)
    with pytest.raises(MoverError, match="closed"):
        rig.open(names[0], 100_000)
    with pytest.raises(MoverError):
        rig.submit(Op.READ, 0, targets[0], 0, 100)
