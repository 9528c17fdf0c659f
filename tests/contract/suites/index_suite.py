"""What every index must do, as a suite to inherit from: subclass ``IndexSuite``, override ``make_index``, run pytest.

Threading: none. Needs pytest, and nothing else that the package does not need anyway.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nixl_offload.errors import IndexStateError
from nixl_offload.index import Index, State
from nixl_offload.types import PAGE_BYTES, Key, Location

SLOT_BYTES = 16 * PAGE_BYTES
OTHER_SLOT_BYTES = 6 * PAGE_BYTES


def key(number: int, group: int = 0) -> Key:
    """Return the ``number``-th key."""
    return Key(number.to_bytes(32, "big") + group.to_bytes(4, "big"))


def place(number: int, slot_bytes: int = SLOT_BYTES) -> Location:
    """Return the ``number``-th slot of a slab of equal slots."""
    return Location(0, number * slot_bytes, slot_bytes)


class IndexSuite:
    """Conformance of an index. Every test ends with the index's own check of its invariants."""

    def make_index(self) -> Index:
        """Return a new, empty index."""
        raise NotImplementedError

    @pytest.fixture
    def index(self) -> Iterator[Index]:
        """Give a new index to a test, and check it afterwards."""
        index = self.make_index()
        yield index
        index.check()

    def test_a_key_lives_from_writing_to_ready_to_gone(self, index: Index) -> None:
        """The usual life: reserved, committed, evicted; ``len`` and ``location`` follow."""
        assert index.state(key(1)) is None
        index.insert_writing(key(1), place(7))
        assert index.state(key(1)) is State.WRITING
        assert index.location(key(1)) == place(7)
        assert len(index) == 1
        assert index.commit(key(1)) is None
        assert index.state(key(1)) is State.READY
        assert index.evict(SLOT_BYTES) == (key(1), place(7))
        assert index.state(key(1)) is None
        assert len(index) == 0
        with pytest.raises(KeyError):
            index.location(key(1))

    def test_abort_frees_the_reservation(self, index: Index) -> None:
        """A failed store leaves nothing behind, and its slot can be taken at once."""
        index.insert_writing(key(1), place(0))
        assert index.abort(key(1)) == place(0)
        assert index.state(key(1)) is None
        index.insert_writing(key(2), place(0))

    def test_reopened_keys_are_ready(self, index: Index) -> None:
        """``insert_ready`` skips WRITING."""
        index.insert_ready(key(1), place(0))
        assert index.state(key(1)) is State.READY

    def test_keys_of_two_groups_are_two_keys(self, index: Index) -> None:
        """The group index at the end of a key counts."""
        index.insert_ready(key(1, group=0), place(0))
        assert index.state(key(1, group=1)) is None
        index.insert_ready(key(1, group=1), place(1))
        assert index.location(key(1, group=0)) == place(0)
        assert index.location(key(1, group=1)) == place(1)

    def test_every_chunk_has_a_slot_of_its_own_through_many_evictions(self, index: Index) -> None:
        """An eviction that forgets the slot's number before it frees the slot makes all later chunks share one."""
        slots = 8
        free = [place(n) for n in range(slots)]
        held: dict[Key, Location] = {}
        for number in range(20 * slots):
            if not free:
                victim = index.evict(SLOT_BYTES)
                assert victim is not None
                assert held.pop(victim[0]) == victim[1]
                free.append(victim[1])
            location = free.pop()
            index.insert_writing(key(number), location)
            index.commit(key(number))
            held[key(number)] = location
            assert len(set(held.values())) == len(held)
            for k, expected in held.items():
                assert index.location(k) == expected
        assert len(held) == slots

    def test_a_key_cannot_be_inserted_twice(self, index: Index) -> None:
        """A present key is refused in every state, and stays as it was."""
        index.insert_writing(key(1), place(0))
        with pytest.raises(IndexStateError):
            index.insert_writing(key(1), place(1))
        index.commit(key(1))
        with pytest.raises(IndexStateError):
            index.insert_ready(key(1), place(1))
        index.pin(key(1))
        index.drop(key(1))
        assert index.state(key(1)) is State.EVICTING
        with pytest.raises(IndexStateError):
            index.insert_writing(key(1), place(1))
        assert index.location(key(1)) == place(0)
        assert len(index) == 1

    @pytest.mark.parametrize(
        "location",
        [
            place(3),
            Location(0, 3 * SLOT_BYTES + PAGE_BYTES, SLOT_BYTES),
            Location(0, 3 * SLOT_BYTES - PAGE_BYTES, SLOT_BYTES),
            Location(0, 3 * SLOT_BYTES, OTHER_SLOT_BYTES),
            Location(0, 4 * SLOT_BYTES - PAGE_BYTES, OTHER_SLOT_BYTES),
            Location(0, 3 * SLOT_BYTES - OTHER_SLOT_BYTES + PAGE_BYTES, OTHER_SLOT_BYTES),
            Location(0, 0, 64 * SLOT_BYTES),
        ],
    )
    def test_a_location_in_use_is_refused(self, index: Index, location: Location) -> None:
        """Overlap by one page is enough, also between slots of different sizes; the neighbours are free."""
        index.insert_writing(key(1), place(3))
        index.insert_ready(key(9), Location(0, 100 * SLOT_BYTES, OTHER_SLOT_BYTES))
        for insert in (index.insert_writing, index.insert_ready):
            with pytest.raises(IndexStateError):
                insert(key(2), location)
        assert index.state(key(2)) is None
        index.insert_ready(key(3), place(2))
        index.insert_ready(key(4), Location(0, 4 * SLOT_BYTES, OTHER_SLOT_BYTES))

    def test_another_tier_is_refused(self, index: Index) -> None:
        """An index belongs to one tier: offsets of two have nothing to do with each other."""
        index.insert_ready(key(1), Location(0, 0, SLOT_BYTES))
        with pytest.raises(IndexStateError):
            index.insert_ready(key(2), Location(1, SLOT_BYTES, SLOT_BYTES))

    def test_a_pin_forbids_eviction_until_the_last_unpin(self, index: Index) -> None:
        """Pins are counted."""
        index.insert_ready(key(1), place(0))
        assert index.pin(key(1)) == place(0)
        assert index.pin(key(1)) == place(0)
        assert index.evict(SLOT_BYTES) is None
        assert index.unpin(key(1)) is None
        assert index.evict(SLOT_BYTES) is None
        assert index.unpin(key(1)) is None
        assert index.evict(SLOT_BYTES) == (key(1), place(0))

    def test_pinned_keys_do_not_shield_others(self, index: Index) -> None:
        """With all but one key pinned, that one is the victim, wherever it stands."""
        for number in range(50):
            index.insert_ready(key(number), place(number))
        for number in range(50):
            if number != 31:
                index.pin(key(number))
        assert index.evict(SLOT_BYTES) == (key(31), place(31))
        assert index.evict(SLOT_BYTES) is None

    def test_what_is_being_written_is_never_a_victim(self, index: Index) -> None:
        """WRITING is not evictable."""
        index.insert_writing(key(1), place(0))
        assert index.evict(SLOT_BYTES) is None

    def test_evict_keeps_to_the_size_class(self, index: Index) -> None:
        """A victim frees a slot of the size that was asked for."""
        index.insert_ready(key(1), place(0))
        index.insert_ready(key(2), Location(0, SLOT_BYTES, OTHER_SLOT_BYTES))
        assert index.evict(OTHER_SLOT_BYTES) == (key(2), Location(0, SLOT_BYTES, OTHER_SLOT_BYTES))
        assert index.evict(OTHER_SLOT_BYTES) is None
        assert index.evict(12345) is None
        assert index.state(key(1)) is State.READY

    def test_drop_of_a_ready_key_frees_it(self, index: Index) -> None:
        """Nobody holds it: gone at once, and no victim later."""
        index.insert_ready(key(1), place(0))
        assert index.drop(key(1)) == place(0)
        assert index.state(key(1)) is None
        assert index.evict(SLOT_BYTES) is None

    def test_drop_of_an_absent_key_does_nothing(self, index: Index) -> None:
        """So does ``touch``."""
        assert index.drop(key(1)) is None
        index.touch(key(1))
        assert len(index) == 0

    def test_drop_of_a_pinned_key_waits_for_its_readers(self, index: Index) -> None:
        """A miss from now on, but the slot is not given to others while it is read."""
        index.insert_ready(key(1), place(0))
        index.pin(key(1))
        index.pin(key(1))
        assert index.drop(key(1)) is None
        assert index.state(key(1)) is State.EVICTING
        assert index.drop(key(1)) is None
        with pytest.raises(IndexStateError):
            index.pin(key(1))
        with pytest.raises(IndexStateError):
            index.insert_writing(key(2), place(0))
        assert index.evict(SLOT_BYTES) is None
        assert index.unpin(key(1)) is None
        assert index.unpin(key(1)) == place(0)
        assert index.state(key(1)) is None
        index.insert_writing(key(1), place(0))

    @pytest.mark.parametrize("end", ["commit", "abort"])
    def test_drop_of_a_key_being_written_waits_for_its_writer(self, index: Index, end: str) -> None:
        """The writer may still be writing into the slot; whatever it reports, the key goes."""
        index.insert_writing(key(1), place(0))
        assert index.drop(key(1)) is None
        assert index.state(key(1)) is State.EVICTING
        assert index.drop(key(1)) is None
        assert getattr(index, end)(key(1)) == place(0)
        assert index.state(key(1)) is None

    @pytest.mark.parametrize("event", ["commit", "abort", "pin", "unpin"])
    def test_events_of_absent_keys_are_refused(self, index: Index, event: str) -> None:
        """A bug in the caller must not pass for data."""
        with pytest.raises(IndexStateError):
            getattr(index, event)(key(1))

    @pytest.mark.parametrize(("state", "event"), [
        ("writing", "pin"), ("writing", "unpin"),
        ("ready", "commit"), ("ready", "abort"), ("ready", "unpin"),
        ("pinned", "commit"), ("pinned", "abort"),
        ("doomed", "pin"), ("doomed", "unpin"),
        ("leaving", "pin"), ("leaving", "commit"), ("leaving", "abort"),
    ])  # fmt: skip
    def test_events_that_do_not_fit_are_refused_and_change_nothing(self, index: Index, state: str, event: str) -> None:
        """Every hole in the table of transitions."""
        if state in ("writing", "doomed"):
            index.insert_writing(key(1), place(0))
        else:
            index.insert_ready(key(1), place(0))
        if state in ("pinned", "leaving"):
            index.pin(key(1))
        if state in ("doomed", "leaving"):
            index.drop(key(1))
        before = index.state(key(1)), index.location(key(1)), index.occupancy()
        with pytest.raises(IndexStateError):
            getattr(index, event)(key(1))
        assert (index.state(key(1)), index.location(key(1)), index.occupancy()) == before

    def test_clear_frees_what_nobody_holds(self, index: Index) -> None:
        """The rest, which it names, follows when its holders let go: the last of several readers, too."""
        index.insert_ready(key(1), place(1))
        index.insert_ready(key(2), place(2))
        index.insert_writing(key(3), place(3))
        index.insert_writing(key(4), place(4))
        index.drop(key(4))
        index.pin(key(2))
        index.pin(key(2))
        for _ in range(2):
            assert sorted(index.clear()) == [place(2), place(3), place(4)]
            states = [index.state(key(n)) for n in (1, 2, 3, 4)]
            assert states == [None, State.EVICTING, State.EVICTING, State.EVICTING]
        assert index.unpin(key(2)) is None
        assert index.unpin(key(2)) == place(2)
        assert index.commit(key(3)) == place(3)
        assert index.abort(key(4)) == place(4)
        assert len(index) == 0

    def test_clear_of_an_idle_index_frees_all(self, index: Index) -> None:
        """And it can be filled again, with the same keys in the same places."""
        for _ in range(2):
            for number in range(20):
                index.insert_ready(key(number), place(number))
            assert index.clear() == []
            assert len(index) == 0
            assert index.evict(SLOT_BYTES) is None

    def test_keys_between_finds_what_starts_there(self, index: Index) -> None:
        """In every state and size class; the end is exclusive."""
        index.insert_ready(key(0), place(0))
        index.insert_writing(key(1), place(1))
        index.insert_ready(key(2), place(2))
        index.pin(key(2))
        index.drop(key(2))
        index.insert_ready(key(3), Location(0, 3 * SLOT_BYTES, OTHER_SLOT_BYTES))
        index.insert_ready(key(4), place(40_000))
        assert sorted(index.keys_between(SLOT_BYTES, 3 * SLOT_BYTES)) == [key(1), key(2)]
        assert sorted(index.keys_between(1, 1 << 62)) == [key(1), key(2), key(3), key(4)]
        assert index.keys_between(SLOT_BYTES + 1, 2 * SLOT_BYTES) == []
        assert index.keys_between(5, 5) == []

    def test_an_extent_can_change_its_size_class(self, index: Index) -> None:
        """Once every key in it is gone, slots of another size may lie across the old borders."""
        for number in range(6):
            index.insert_ready(key(number), place(number))
        for k in index.keys_between(0, 6 * SLOT_BYTES):
            assert index.drop(k) is not None
        for number in range(16):
            index.insert_ready(key(100 + number), place(number, OTHER_SLOT_BYTES))
        assert len(index.keys_between(0, 6 * SLOT_BYTES)) == 16

    def test_occupancy_counts_slots_by_class(self, index: Index) -> None:
        """What operators and the catalog see."""
        index.insert_writing(key(1), place(1))
        index.insert_ready(key(2), place(2))
        index.insert_ready(key(3), place(3))
        index.pin(key(3))
        index.insert_ready(key(4), place(4))
        index.pin(key(4))
        index.drop(key(4))
        index.insert_ready(key(5), Location(0, 5 * SLOT_BYTES, OTHER_SLOT_BYTES))
        found = index.occupancy()[SLOT_BYTES]
        assert (found.writing, found.ready, found.pinned, found.evicting) == (1, 1, 1, 1)
        assert (found.slots, found.bytes_total) == (4, 4 * SLOT_BYTES)
        assert index.occupancy()[OTHER_SLOT_BYTES].slots == 1

    def test_a_touched_key_outlives_the_others(self, index: Index) -> None:
        """Used twice among keys never used, it is not the victim of half the slots."""
        for number in range(40):
            index.insert_ready(key(number), place(number))
        index.touch(key(0))
        index.touch(key(0))
        for _ in range(20):
            assert index.evict(SLOT_BYTES) is not None
        assert index.state(key(0)) is State.READY

    def test_a_use_while_pinned_counts(self, index: Index) -> None:
        """A load touches what it has pinned."""
        for number in range(40):
            index.insert_ready(key(number), place(number))
        index.pin(key(0))
        index.touch(key(0))
        index.touch(key(0))
        index.unpin(key(0))
        for _ in range(20):
            index.evict(SLOT_BYTES)
        assert index.state(key(0)) is State.READY
