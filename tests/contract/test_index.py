"""The life of a key in the index, by example; ``tests/model/test_index_model.py`` has any sequence of calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nixl_offload.errors import IndexStateError
from nixl_offload.index import Index, State
from nixl_offload.types import Key, Location

SLOT_BYTES, OTHER_SLOT_BYTES = 16 << 12, 6 << 12


def key(number: int, group: int = 0) -> Key:
    return Key(number.to_bytes(32, "big") + group.to_bytes(4, "big"))


def place(number: int, slot_bytes: int = SLOT_BYTES) -> Location:
    """Return the ``number``-th slot of a slab of equal slots."""
    return Location(0, number * slot_bytes, slot_bytes)


@pytest.fixture
def index() -> Iterator[Index]:
    """An index whose invariants hold after the test."""
    made = Index()
    yield made
    made.check()


def test_a_key_lives_from_writing_to_ready_to_gone(index: Index) -> None:
    """A pinned key is never a victim; one that is dropped while it is read is a miss, and keeps its slot till then."""
    index.insert_writing(key(1), place(7))
    assert (index.state(key(1)), index.location(key(1)), index.evict(SLOT_BYTES)) == (State.WRITING, place(7), None)
    assert index.commit(key(1)) is None
    assert index.pin(key(1)) == place(7)
    assert index.evict(SLOT_BYTES) is None
    assert index.drop(key(1)) is None
    assert index.state(key(1)) is State.EVICTING
    with pytest.raises(IndexStateError):
        index.insert_writing(key(2), place(7))
    assert index.unpin(key(1)) == place(7)
    assert (index.state(key(1)), len(index)) == (None, 0)
    with pytest.raises(KeyError):
        index.location(key(1))
    for call in (index.commit, index.abort, index.pin, index.unpin):
        with pytest.raises(IndexStateError):
            call(key(1))


def test_a_location_of_another_tier_is_refused(index: Index) -> None:
    """Offsets of two tiers have nothing to do with each other."""
    index.insert_ready(key(1), place(0))
    with pytest.raises(IndexStateError):
        index.insert_ready(key(2), Location(1, SLOT_BYTES, SLOT_BYTES))


def test_every_chunk_has_a_slot_of_its_own_through_many_evictions(index: Index) -> None:
    """An eviction that forgets the slot's number before it frees the slot makes all later chunks share one."""
    held: dict[Key, Location] = {}
    for number in range(160):
        location = place(number)
        if number >= 8:
            victim = index.evict(SLOT_BYTES)
            assert victim is not None
            assert victim[0] == key(number - 8), "the least recently used"
            location = held.pop(victim[0])
            assert victim[1] == location
        index.insert_writing(key(number), location)
        index.commit(key(number))
        held[key(number)] = location
        assert len(set(held.values())) == len(held)
        assert all(index.location(each) == where for each, where in held.items())
