"""A share per salt: whoever holds most beyond it gives way, in memory and in a slab, whichever way chunks came there.

Proves: a flood spares what others hold, and without shares it does not; room that nobody wants is not left empty; bytes
count over all slot sizes, pins included; salts are told apart as long as they hold something, and so many at most;
after a restart a use says whose a chunk is; write-throughs, promotions and prefetches count for who caused them.
"""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nixl_offload.config import MemoryConfig, SlabConfig, parse_config
from nixl_offload.index import Index, State, policy, shares
from nixl_offload.tiers.memory.tier import MemoryTier
from nixl_offload.tiers.slab.tier import SlabTier
from nixl_offload.types import NO_SALT, Key, Location, Salt
from tests.unit.catalog_rig import FILE, MEMORY, SLOT, Chain, MakeChain, chains, key, keys
from tests.unit.shared_rig import namespace_of

QUIET, NOISY, THIRD = Salt(101), Salt(-202), Salt(303)
SMALL, LARGE = 4096, 12288


class Room:
    """Slots of one size or more, an index over them, and who is in them."""

    def __init__(self, slots: int, share_slots: int | None, policy: str = "lru", slot_bytes: int = SMALL) -> None:
        self.index = Index(policy, None if share_slots is None else share_slots * slot_bytes)
        self._free = [Location(0, number * slot_bytes, slot_bytes) for number in range(slots)]
        self._slot_bytes = slot_bytes

    def store(self, number: int, salt: Salt) -> Key | None:
        """Store a chunk; return what was evicted for it."""
        evicted = None
        if not self._free:
            found = self.index.evict(self._slot_bytes, salt)
            assert found is not None
            evicted, location = found
        else:
            location = self._free.pop(0)
        self.index.insert_writing(key(number), location, salt)
        self.index.commit(key(number))
        return evicted

    def has(self, *numbers: int) -> bool:
        return all(self.index.state(key(number)) is State.READY for number in numbers)


@pytest.fixture(params=["lru", "s3fifo"])
def make_room(request: pytest.FixtureRequest) -> Iterator[Callable[[int, int | None], Room]]:
    rooms: list[Room] = []

    def make(slots: int, share_slots: int | None) -> Room:
        rooms.append(Room(slots, share_slots, request.param))
        return rooms[-1]

    yield make
    for room in rooms:
        room.index.check()


MakeRoom = Callable[[int, "int | None"], Room]


@pytest.mark.parametrize("share_slots", [5, None])
def test_a_flood_spares_the_others_and_without_shares_it_does_not(make_room: MakeRoom, share_slots: int | None) -> None:
    room = make_room(20, share_slots)
    for number in range(4):
        room.store(number, QUIET)
    room.store(4, NO_SALT)
    for number in range(100, 200):
        room.store(number, NOISY)
    assert room.has(0, 1, 2, 3, 4) == (share_slots is not None)
    assert room.index.share_evictions == (None if share_slots is None else 85)


def test_room_that_nobody_wants_is_not_left_empty(make_room: MakeRoom) -> None:
    """A salt has all of it as long as it is alone, and gives back what another needs."""
    room = make_room(20, 5)
    assert [room.store(number, NOISY) for number in range(20)] == [None] * 20
    evicted = [room.store(number, QUIET) for number in range(100, 105)]
    assert sorted(evicted, key=str) == sorted(keys(*range(5)), key=str)
    assert room.store(105, QUIET) == key(5), "15 slots are farther beyond than 6"


def test_who_is_farthest_beyond_gives_way_first(make_room: MakeRoom) -> None:
    room = make_room(20, 4)
    for number in range(6):
        room.store(number, QUIET)
    for number in range(10, 18):
        room.store(number, NOISY)
    for number in range(20, 26):
        room.store(number, THIRD)
    assert [room.store(number, NO_SALT) for number in (30, 31)] == keys(10, 11)


def test_who_asks_is_as_far_beyond_as_it_will_be(make_room: MakeRoom) -> None:
    """Of two that hold as much, the one that wants more gives way."""
    for asks in (QUIET, NOISY):
        room = make_room(8, 2)
        for number in range(4):
            room.store(number, QUIET)
            room.store(10 + number, NOISY)
        assert room.store(20, asks) == (key(0) if asks is QUIET else key(10))


def test_shares_cost_a_dozen_bytes_for_each_chunk() -> None:
    grown_bytes = []
    for share_slots in (None, 100):
        index = Room(0, share_slots).index
        tracemalloc.start()
        for number in range(8_000):
            index.insert_ready(key(number), Location(0, number * SMALL, SMALL))
        grown_bytes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert grown_bytes[1] - grown_bytes[0] < 8_000 * 16


def test_where_nobody_is_beyond_the_oldest_of_all_goes() -> None:
    room = Room(6, 3)
    for number, salt in enumerate((QUIET, NOISY, QUIET, NOISY, THIRD, THIRD)):
        room.store(number, salt)
    room.index.touch(key(0), QUIET)
    assert room.store(10, THIRD) == key(1)
    assert room.store(11, THIRD) == key(4), "its own, for it would have four"
    assert room.index.share_evictions == 1
    room.index.check()


def test_bytes_count_over_all_slot_sizes_and_where_there_is_no_candidate_the_next_gives_way() -> None:
    index = Index(share_bytes=2 * LARGE)
    for number in range(3):
        index.insert_writing(key(number), Location(0, number * LARGE, LARGE), NOISY)
        index.commit(key(number))
    for number, salt in enumerate((QUIET, NOISY, QUIET)):
        index.insert_writing(key(10 + number), Location(0, 100 * LARGE + number * SMALL, SMALL), salt)
        index.commit(key(10 + number))
    assert index.evict(SMALL, QUIET) == (key(11), Location(0, 100 * LARGE + SMALL, SMALL)), "large ones made it noisy"
    assert index.evict(SMALL, NOISY) == (key(10), Location(0, 100 * LARGE, SMALL)), "it has no small one any more"
    assert index.share_evictions == 1
    index.check()


def test_what_is_pinned_counts_and_stays() -> None:
    room = Room(6, 2)
    for number in range(3):
        room.store(number, NOISY)
        room.index.pin(key(number))
    for number, salt in ((3, NOISY), (4, QUIET), (5, QUIET)):
        room.store(number, salt)
    assert room.store(6, NOISY) == key(3), "its only one that nobody holds"
    room.index.pin(key(6))
    assert room.store(7, NOISY) == key(4), "it has none; that is no reason to store nothing"
    room.index.unpin(key(0))
    assert [room.store(number, QUIET) for number in (8, 9)] == keys(7, 0)
    room.index.check()


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_many_salts_one_after_another_leave_nothing_behind(policy: str) -> None:
    """Users make salts up. One that holds nothing any more takes no memory."""
    room = Room(8, 4, policy)

    def store(salts: range) -> None:
        for number in salts:
            room.store(number, Salt(number))

    store(range(1, 2000))
    tracemalloc.start()
    try:
        store(range(2000, 3000))
        before = tracemalloc.get_traced_memory()[0]
        store(range(3000, 13_000))
        grown_bytes = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown_bytes < 50_000, "five bytes for each salt that came and went"
    room.index.check()


def test_salts_that_were_beyond_their_share_once_keep_no_table_of_victims_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have the size of their largest time, as long as the engine runs."""
    tables: list[int] = []

    class Counted(policy.Ghosts):
        def __init__(self, capacity: int) -> None:
            super().__init__(capacity)
            tables.append(capacity)

    monkeypatch.setattr(policy, "Ghosts", Counted)
    room = Room(100, 20, "s3fifo")
    numbers = itertools.count()
    for salt in range(1, 41):
        first = next(numbers)
        room.store(first, Salt(salt))
        room.index.pin(key(first))  # it holds something from now on
        for _ in range(60):
            room.store(next(numbers), Salt(salt))
    assert len(tables) < 5, "one of all salts, and one of the policy over all, made anew where they doubled"
    room.index.check()


def test_of_too_many_salts_the_last_count_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_SALTS", 2)
    room = Room(12, 4)
    for number in range(2):
        room.store(number, Salt(number + 1))
    for number in range(2, 12):
        room.store(number, Salt(number + 1))
    assert room.store(20, QUIET) == key(2), "ten slots of nobody's"
    room.index.drop(key(0))
    room.index.touch(key(5), Salt(6))
    assert room.index._shares is not None
    assert room.index._shares.held_bytes() == {NO_SALT: 9 * SMALL, Salt(2): SMALL, Salt(6): SMALL}
    room.index.check()


def test_a_reset_keeps_who_holds_what_is_held() -> None:
    room = Room(6, 2)
    for number in range(6):
        room.store(number, NOISY)
    room.index.pin(key(0))
    room.index.insert_writing(key(9), Location(0, 1 << 20, SMALL), QUIET)
    room.index.clear()
    assert room.index._shares is not None
    assert room.index._shares.held_bytes() == {NOISY: SMALL, QUIET: SMALL}
    room.index.unpin(key(0))
    assert room.index._shares.held_bytes() == {QUIET: SMALL}
    assert room.index.share_evictions == 0
    room.index.check()


# Tiers


def memory(capacity_slots: int, **options: object) -> MemoryTier:
    raw = {"kind": "memory", "capacity": capacity_slots * SLOT, **options}
    (config,) = parse_config({"tiers": [raw]}).tiers
    assert isinstance(config, MemoryConfig)
    return MemoryTier.open(config, position=0, namespace=namespace_of(1), slot_classes=[SLOT], world_size=1)


def fill(tier: MemoryTier | SlabTier, numbers: range, salt: Salt) -> None:
    for number in numbers:
        assert tier.reserve(key(number), SLOT, [], salt) is not None
        assert tier.commit(key(number))


def test_the_share_is_one_of_the_capacity_and_statistics_say_how_often_it_told() -> None:
    tier = memory(10, share_per_salt="30%")
    fill(tier, range(3), QUIET)
    fill(tier, range(10, 30), NOISY)
    assert [tier.state(key(number)) for number in range(3)] == [State.READY] * 3
    slots = tier.statistics().slots
    assert slots is not None
    assert (slots.share_bytes, slots.evictions, slots.share_evictions) == (3 * SLOT, 13, 13)
    plain = memory(10).statistics().slots
    assert plain is not None
    assert (plain.share_bytes, plain.share_evictions) == (None, None)


def test_after_a_restart_a_use_says_whose_a_chunk_is(tmp_path: Path) -> None:
    """A slab does not write salts down. What is not used counts as nobody's, and goes first while that is most."""
    raw = {"kind": "slab", "path": str(tmp_path / "kv"), "capacity": "40MiB", "share_per_salt": "25%"}
    (config,) = parse_config({"tiers": [raw]}).tiers
    assert isinstance(config, SlabConfig)

    def reopen() -> SlabTier:
        return SlabTier.open(config, position=0, namespace=namespace_of(1), slot_classes=[SLOT], world_size=1)

    tier = reopen()
    slots = tier.capacity_bytes // SLOT
    fill(tier, range(slots), QUIET)
    tier.close()
    tier = reopen()
    try:
        index = tier._index
        assert index._shares is not None
        assert index._shares.held_bytes() == {NO_SALT: slots * SLOT}
        for number in range(5):
            tier.touch(key(number), QUIET)
            tier.touch(key(number))
        assert index._shares.held_bytes() == {NO_SALT: (slots - 5) * SLOT, QUIET: 5 * SLOT}
        fill(tier, range(1000, 1000 + 3 * slots), NOISY)
        assert [tier.state(key(number)) for number in range(5)] == [State.READY] * 5
        index.check()
        tier.clear()
        fill(tier, range(4), QUIET)
        assert index._shares is not None
        assert index._shares.held_bytes() == {QUIET: 4 * SLOT}
    finally:
        tier.close()


# The catalog


@pytest.fixture
def make_chain(tmp_path: Path) -> Iterator[MakeChain]:
    with chains(tmp_path) as build:
        yield build


def held(chain: Chain, position: int) -> dict[Salt, int]:
    """Slots by salt."""
    shares_of = chain.indexes[position]._shares
    assert shares_of is not None
    return {salt: size // SLOT for salt, size in shares_of.held_bytes().items()}


def test_stores_write_throughs_and_promotions_count_for_their_request(make_chain: MakeChain) -> None:
    chain = make_chain(memory_slots=8, file_slots=16, share_slots=4)
    chain.store(1, 2, salt=QUIET)
    chain.store(3, salt=NOISY)
    chain.store(4)
    chain.write_through()
    assert held(chain, MEMORY) == held(chain, FILE) == {QUIET: 2, NOISY: 1, NO_SALT: 1}
    for number in (1, 2, 3):
        chain.tiers[MEMORY].drop(key(number))
    chain.load(1, 2, salt=QUIET)
    assert held(chain, MEMORY) == {QUIET: 2, NO_SALT: 1}


def test_what_is_offered_again_counts_for_its_request_where_it_is_written_to(make_chain: MakeChain) -> None:
    chain = make_chain(memory_slots=8, file_slots=16, share_slots=4)
    chain.store(1, 2, salt=QUIET)
    chain.write_through()
    for number in (1, 2):
        chain.tiers[FILE].drop(key(number))
    assert chain.reserve(1, 2, salt=QUIET) is None
    chain.write_through()
    assert held(chain, FILE) == {QUIET: 2}


def test_prefetches_count_for_their_requests_and_take_a_share_at_most(make_chain: MakeChain) -> None:
    chain = make_chain(memory_slots=12, file_slots=64, share_slots=3)
    for first, salt in ((0, QUIET), (20, NOISY)):
        chain.store(*range(first, first + 5), salt=salt)
        chain.write_through()
    for number in (*range(5), *range(20, 25)):
        chain.tiers[MEMORY].drop(key(number))
    for first, salt in ((0, QUIET), (20, NOISY)):
        chain.catalog.prefetch(
            keys(*range(first, first + 5)), range(256, 6 * 256, 256), chain.now_s, is_prefix=True, groups=1, salt=salt
        )
    tickets = chain.begin()
    assert [len(ticket.keys) for ticket in tickets] == [3, 3], "a ticket is one salt's"
    for ticket in tickets:
        chain.report(ticket.ticket)
    assert held(chain, MEMORY) == {QUIET: 3, NOISY: 3}


def test_what_a_bucket_gave_to_memory_goes_on_to_the_slab_for_its_request(make_chain: MakeChain) -> None:
    chain = make_chain(memory_slots=8, file_slots=16, bucket=True, share_slots=4)
    chain.store(1, salt=QUIET)
    chain.write_through()
    for position in (MEMORY, FILE):
        chain.tiers[position].drop(key(1))
    chain.load(1, salt=QUIET)
    chain.write_through()
    assert held(chain, MEMORY) == held(chain, FILE) == {QUIET: 1}


def test_a_flood_through_the_chain_spares_the_others(make_chain: MakeChain) -> None:
    """Memory and slab each keep what another salt holds of them, pins of unsaved chunks notwithstanding."""
    chain = make_chain(memory_slots=16, file_slots=32, share_slots=4, unsaved_slots=4)
    chain.store(1, 2, 3, salt=QUIET)
    chain.write_through()
    for number in range(100, 200, 2):
        chain.store(number, number + 1, salt=NOISY)
        chain.write_through()
    for number in (1, 2, 3):
        assert chain.holders(number) == [MEMORY, FILE]
    assert held(chain, MEMORY) == {QUIET: 3, NOISY: 13}
    assert held(chain, FILE) == {QUIET: 3, NOISY: 29}
