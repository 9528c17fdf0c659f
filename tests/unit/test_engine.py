"""Proves, over real files: every layout comes back bit for bit; nothing unverified reaches a KV block; ``wait`` frees
source blocks and nothing sooner; loads overtake stores; each job ends exactly once; ``close`` leaves nothing running.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.engine import LinkEngine, jobs
from nixl_offload.errors import LayoutError, MoverError
from nixl_offload.movers.base import Mover, Op
from nixl_offload.movers.copy import CopyMover
from nixl_offload.movers.select import make_mover
from nixl_offload.tiers.slab.link import SlabLink
from nixl_offload.types import Location, Outcome
from tests.contract.suites.faulty_mover import Fault, FaultKind, FaultyMover
from tests.unit.engine_rig import CHUNK_BLOCKS, NUM_BLOCKS, SHAPES, Rig, assert_every_part_loads, rigs, until

OK, FAILED, CORRUPT, DROPPED = Outcome.OK, Outcome.FAILED, Outcome.CORRUPT, Outcome.DROPPED
Make = Callable[..., Rig]


make = pytest.fixture(rigs)


def real_mover(name: str) -> Mover:
    mover = make_mover(name)
    try:
        from nixl_offload.engine.staging import host_pool

        pool = host_pool(slot_bytes=4096, budget_bytes=8192)
        mover.unregister_memory(mover.register_memory(pool.region))
    except MoverError as error:
        mover.close()
        pytest.skip(str(error))
    return mover


# -- round trips ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mover", ["copy", "posix_aio", "posix_uring"])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_come_back_into_other_blocks(make: Make, shape: str, mover: str) -> None:
    """Stored from scattered blocks, loaded into other scattered blocks, by every mover; nothing else changes."""
    rig = make(shape, real_mover(mover))
    groups = range(len(rig.shape.groups))
    sources = [[7, 8, 9, 10], [39, 0, 20, 3]]
    targets = [[30, 12, 13, 5], [25, 26, 27, 28]]
    wanted = {(n, g): rig.bytes_of(sources[n], g) for n in range(2) for g in groups}
    stores = [rig.chunk(2 * g + n, sources[n], group=g) for g in groups for n in range(2)]
    assert set(rig.store(1, stores)) == {OK}
    for group in groups:
        rig.wipe(0xEE)
        loads = [rig.chunk(2 * group + n, targets[n], group=group) for n in range(2)]
        assert rig.load(2 + group, loads) == (OK, OK)
        for n in range(2):
            assert rig.bytes_of(targets[n], group) == wanted[n, group]
        untouched = sorted(set(range(NUM_BLOCKS)) - set(targets[0]) - set(targets[1]))
        assert set(rig.bytes_of(untouched, group)) == {0xEE}
    result = rig.collect(2)
    assert result.bytes_moved == 2 * CHUNK_BLOCKS * rig.layout.groups[0].block_bytes
    assert result.seconds >= 0
    assert result.errors == ()


@pytest.mark.parametrize("shape", ["per_layer", "packed_blocks", "padded", "mla", "direct_blocks"])
def test_any_part_of_a_chunk_can_be_loaded(make: Make, shape: str) -> None:
    assert_every_part_loads(make(shape))


@pytest.mark.parametrize("shape", ["mla", "packed_blocks", "direct_blocks"])
def test_a_chunk_stored_from_its_middle_serves_its_tail_only(make: Make, shape: str) -> None:
    """A sliding window stores a tail. Its head was never there: asking for it is CORRUPT and touches nothing."""
    rig = make(shape)
    source = [11, 12]
    wanted = rig.bytes_of(source)
    assert rig.store(0, [rig.chunk(0, source, first=2)]) == (OK,)
    rig.wipe(0xEE)
    assert rig.load(1, [rig.chunk(0, [20, 21], first=2)]) == (OK,)
    assert rig.bytes_of([20, 21]) == wanted
    rig.wipe(0xEE)
    assert rig.load(2, [rig.chunk(0, [20, 21, 22], first=1)]) == (CORRUPT,)
    if not rig.shape.direct:
        assert set(rig.bytes_of(range(NUM_BLOCKS))) == {0xEE}


def test_a_reopened_slab_serves_what_an_earlier_engine_stored(make: Make, tmp_path: Path) -> None:
    first = make("per_layer")
    wanted = first.bytes_of([1, 2, 3, 4])
    assert first.store(0, [first.chunk(0, [1, 2, 3, 4])]) == (OK,)
    first.close()
    second = make("per_layer", seed=2)
    assert second.load(0, [second.chunk(0, [5, 6, 7, 8])]) == (OK,)
    assert second.bytes_of([5, 6, 7, 8]) == wanted


def test_stored_files_hold_no_leftovers_of_other_chunks(make: Make) -> None:
    """Padding is zero even when the staging slot was used for something else before."""
    rig = make("mla", staging_slots=2)
    for number in range(4):
        assert rig.store(number, [rig.chunk(number, [1, 2, 3, 4])]) == (OK,)
    size = rig.location(0).slot_bytes
    payload_end = HEADER_BYTES + CHUNK_BLOCKS * 1152
    stored = rig.slab.path.read_bytes()
    for number in range(4):
        assert not any(stored[number * size + payload_end : (number + 1) * size])
    assert rig.store(9, [rig.chunk(0, [1], first=3)]) == (OK,)
    begin, row = HEADER_BYTES, HEADER_BYTES + 3 * 1152
    assert not any(rig.slab.path.read_bytes()[begin:row])


# -- never a wrong token --------------------------------------------------------------------------------------------


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("shape", ["per_layer", "two_groups", "direct_blocks"])
def test_a_flipped_byte_anywhere_is_corrupt(make: Make, shape: str) -> None:
    """Header and payload: 60 places, drawn with a fixed seed plus the edges. Packed blocks stay untouched."""
    rig = make(shape)
    assert rig.store(0, [rig.chunk(2, [1, 2, 3, 4])]) == (OK,)
    used = HEADER_BYTES + CHUNK_BLOCKS * rig.layout.groups[0].block_bytes
    places = {0, 7, 8, HEADER_BYTES - 1, HEADER_BYTES, used - 1}
    places |= {int(place) for place in np.random.default_rng(3).integers(0, used, 54)}
    for job, place in enumerate(sorted(places), start=1):
        _flip(rig.slab.path, rig.location(2).offset + place)
        rig.wipe(0xEE)
        assert rig.load(job, [rig.chunk(2, [5, 6, 7, 8])]) == (CORRUPT,), place
        if not rig.shape.direct:
            assert set(rig.bytes_of(range(NUM_BLOCKS))) == {0xEE}
        _flip(rig.slab.path, rig.location(2).offset + place)
    assert rig.load(999, [rig.chunk(2, [5, 6, 7, 8])]) == (OK,)


def test_a_flip_outside_the_wanted_tail_does_no_harm(make: Make) -> None:
    rig = make("per_layer")
    tail = rig.bytes_of([4])
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)
    _flip(rig.slab.path, HEADER_BYTES + 10)
    assert rig.load(1, [rig.chunk(0, [9], first=3)]) == (OK,)
    assert rig.bytes_of([9]) == tail
    assert rig.load(2, [rig.chunk(0, [9, 10, 11, 12])]) == (CORRUPT,)


def test_swapped_slots_and_foreign_shards_are_corrupt(make: Make, tmp_path: Path) -> None:
    """The right bytes of the wrong key, and the right key of another namespace, group or geometry."""
    rig = make("shared_tensors")
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4]), rig.chunk(1, [5, 6, 7, 8])]) == (OK, OK)
    rig.wipe(0xEE)
    swapped = [rig.chunk(0, [10, 11, 12, 13], slot=1), rig.chunk(1, [14, 15, 16, 17], slot=0)]
    assert rig.load(1, swapped) == (CORRUPT, CORRUPT)
    assert rig.load(2, [rig.chunk(0, [10, 11, 12, 13], group=1)]) == (CORRUPT,)
    assert rig.load(3, [rig.chunk(7, [10, 11, 12, 13])])[0] in {CORRUPT, FAILED}
    assert set(rig.bytes_of(range(NUM_BLOCKS))) == {0xEE}
    rig.close()
    stranger = make("shared_tensors", namespace=bytes(32))
    assert stranger.load(0, [stranger.chunk(0, [1, 2, 3, 4])]) == (CORRUPT,)


def test_verify_header_checks_identity_but_not_payload(make: Make) -> None:
    rig = make("per_layer", verify="header")
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)
    _flip(rig.slab.path, HEADER_BYTES + 5)
    assert rig.load(1, [rig.chunk(0, [5, 6, 7, 8])]) == (OK,)
    assert rig.load(2, [rig.chunk(1, [5, 6, 7, 8], slot=0)]) == (CORRUPT,)


# -- wait, order, pressure ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["per_layer", "direct_blocks"])
def test_blocks_overwritten_after_wait_do_not_change_what_was_stored(make: Make, shape: str) -> None:
    """A block reused before its store had read it: wrong output after a few hundred requests. Chunks that ``wait`` gave
    up are DROPPED, never stored with later bytes.
    """
    rig = make(shape, staging_slots=4)
    rng = np.random.default_rng(5)
    stored = 0
    for round_ in range(60):
        for rows in rig.kv:
            rows[:] = rng.integers(0, 256, rows.shape, dtype=np.uint8)
        wanted = [rig.bytes_of(range(4 * n, 4 * n + 4)) for n in range(6)]
        rig.engine.submit_store(2 * round_, [rig.chunk(n, range(4 * n, 4 * n + 4)) for n in range(6)])
        rig.engine.wait({2 * round_})
        rig.wipe(0xDD)
        outcomes = rig.collect(2 * round_).outcomes
        assert set(outcomes) <= {OK, DROPPED}
        good = [n for n in range(6) if outcomes[n] is OK]
        assert rig.load(2 * round_ + 1, [rig.chunk(n, range(4 * n, 4 * n + 4)) for n in good]) == (OK,) * len(good)
        for n in good:
            assert rig.bytes_of(range(4 * n, 4 * n + 4)) == wanted[n]
        stored += len(good)
    assert stored > 60


def test_wait_returns_at_once_when_storage_hangs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Staged chunks do not hold ``wait`` up; those that never got a slot are DROPPED."""
    monkeypatch.setattr(jobs, "STORE_GRACE_S", 0.5)  # for the pump of a busy machine
    mover = FaultyMover(CopyMover(), [Fault(0, FaultKind.STUCK, every=True)])
    rig = make("per_layer", mover, staging_slots=4)
    rig.engine.submit_store(1, [rig.chunk(n, range(4 * n, 4 * n + 4)) for n in range(8)])
    waiter = threading.Thread(target=rig.engine.wait, args=({1},))
    waiter.start()
    waiter.join(20.0)
    assert not waiter.is_alive()
    assert rig.engine.finished() == []
    mover.release()
    outcomes = rig.collect(1).outcomes
    assert outcomes == (OK,) * 3 + (DROPPED,) * 5


def test_wait_for_a_direct_store_waits_for_the_mover(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mover reads the KV blocks themselves, so they are not free before it is done."""
    monkeypatch.setattr(jobs, "STORE_GRACE_S", 10.0)  # for the pump to begin, on a busy machine too
    mover = FaultyMover(CopyMover(), [Fault(1, FaultKind.STUCK)])
    rig = make("direct_blocks", mover)
    rig.engine.submit_store(1, [rig.chunk(0, [1, 2, 3, 4])])
    waiter = threading.Thread(target=rig.engine.wait, args=({1},))
    waiter.start()
    until(lambda: len(mover.submitted) == 2)
    waiter.join(0.1)
    assert waiter.is_alive()
    mover.release()
    waiter.join(10)
    assert not waiter.is_alive()
    assert rig.collect(1).outcomes == (OK,)


def test_wait_for_a_load_waits_until_it_is_finished(make: Make) -> None:
    rig = make("per_layer")
    wanted = rig.bytes_of([1, 2, 3, 4])
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)
    for job in range(1, 30):
        rig.wipe()
        rig.engine.submit_load(job, [rig.chunk(0, [1, 2, 3, 4])], expedited=job % 2 == 0)
        rig.engine.wait([job])
        assert rig.bytes_of([1, 2, 3, 4]) == wanted
        assert [result.job_id for result in rig.engine.finished()] == [job]
    rig.engine.wait([1, 99999])  # drained and unknown jobs are no reason to wait


def test_loads_overtake_stores_and_find_room(make: Make) -> None:
    """With every store in flight hanging, a load still gets staging and ends."""
    mover = FaultyMover(CopyMover(), [Fault(1, FaultKind.STUCK, op=Op.WRITE, every=True)])
    rig = make("per_layer", mover, staging_slots=2)
    wanted = rig.bytes_of([1, 2, 3, 4])
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)
    rig.engine.submit_store(1, [rig.chunk(n, [1, 2, 3, 4]) for n in range(1, 8)])
    until(lambda: mover.submitted.count(Op.WRITE) == 2)
    assert rig.load(2, [rig.chunk(0, [5, 6, 7, 8])]) == (OK,)
    assert rig.bytes_of([5, 6, 7, 8]) == wanted
    mover.release()
    assert rig.collect(1).outcomes == (OK,) * 7


# -- jobs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [False, True])
def test_numbers_that_do_not_fit_fail_their_chunk_only(make: Make, direct: bool) -> None:
    """Block ids outside the cache must never become addresses."""
    rig = make("direct_blocks" if direct else "per_layer")
    good = rig.chunk(0, [1, 2, 3, 4])
    tiny = rig.chunk(1, [1, 2, 3, 4])
    object.__setattr__(tiny, "location", Location(0, 0, 4096))
    elsewhere = rig.chunk(1, [1, 2, 3, 4])
    object.__setattr__(elsewhere, "location", Location(3, 0, 1 << 20))
    group = rig.chunk(1, [1, 2, 3, 4])
    object.__setattr__(group, "group", 9)
    bad = [
        rig.chunk(1, [1, 2, 3, NUM_BLOCKS]),
        rig.chunk(1, [-1, 2, 3, 4]),
        rig.chunk(1, []),
        rig.chunk(1, [1, 2, 3, 4, 5]),
        rig.chunk(1, [1, 2], first=3),
        tiny,
        elsewhere,
        group,
        rig.chunk(10**6, [5, 6, 7, 8]),
    ]
    assert rig.store(1, [good, *bad, good]) == (OK, *(FAILED,) * len(bad), OK)
    assert rig.load(2, [good, *bad, good]) == (OK, *(FAILED,) * len(bad), OK)
    # A store has to fill its chunk to the end.
    assert rig.store(3, [rig.chunk(1, [1, 2])]) == (FAILED,)


def test_main_thread_and_pump_share_jobs_without_losing_any(make: Make) -> None:
    """A thousand jobs from one thread while others drain, wait and ask: each ends exactly once."""
    rig = make("mla", staging_slots=6)
    assert rig.store(0, [rig.chunk(n, [1, 2, 3, 4]) for n in range(6)]) == (OK,) * 6
    seen: list[int] = []
    done = threading.Event()
    jobs = range(1, 1001)

    def drain() -> None:
        while not done.is_set():
            seen.extend(result.job_id for result in rig.engine.finished())
            time.sleep(0.0002)

    def pester() -> None:
        while not done.is_set():
            rig.engine.wait([len(seen), len(seen) + 3])
            rig.engine.idle()
            time.sleep(0.0002)

    threads = [threading.Thread(target=drain), threading.Thread(target=drain), threading.Thread(target=pester)]
    for thread in threads:
        thread.start()
    try:
        for job in jobs:
            chunks = [rig.chunk((job + n) % 6, [5 * n, 5 * n + 1, 5 * n + 2, 5 * n + 3]) for n in range(3)]
            if job % 3:
                rig.engine.submit_load(job, chunks)
            else:
                rig.engine.submit_store(job, chunks)
        until(lambda: len(seen) >= len(jobs))
    finally:
        done.set()
        for thread in threads:
            thread.join()
    seen.extend(result.job_id for result in rig.engine.finished())
    assert sorted(seen) == list(jobs)
    assert rig.engine.idle()


# -- start and end --------------------------------------------------------------------------------------------------


def test_direct_is_chosen_where_it_can_and_said(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="nixl_offload.engine"):
        make("direct_blocks")
        make("packed_blocks", direct_min_extent_bytes=1 << 20)
        make("per_layer", direct_min_extent_bytes=1)
    lines = [record.message for record in caplog.records if "KV group" in record.message]
    assert lines[0].endswith("KV group 0: direct")
    assert "smaller than 1048576" in lines[1]
    assert "not aligned to 4096" in lines[2]


def test_tensors_that_are_not_those_of_the_layout_are_refused(make: Make) -> None:
    rig = make("per_layer")
    with pytest.raises(LayoutError):
        LinkEngine(
            table=rig.engine,
            tensors=rig.tensors[::-1],
            layout=rig.layout,
            link=SlabLink(rig.slab, CopyMover(), time.monotonic),
            rank_namespace=bytes(32),
            staging_bytes=1 << 20,
        )


def test_close_finishes_what_is_queued_and_leaves_no_thread(make: Make) -> None:
    rig = make("per_layer")
    before = {thread.name for thread in threading.enumerate()}
    assert "nixl-offload-pump" in before
    rig.engine.submit_store(1, [rig.chunk(n, [1, 2, 3, 4]) for n in range(20)])
    rig.engine.close()
    assert rig.collect(1).outcomes == (OK,) * 20
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nixl-offload")]
    rig.engine.close()
    rig.engine.submit_load(2, [rig.chunk(0, [1, 2, 3, 4])])
    rig.engine.submit_store(3, [rig.chunk(0, [1, 2, 3, 4])])
    rig.engine.wait([2, 3])
    assert {result.outcomes for result in rig.engine.finished()} == {(FAILED,)}
