"""Where a chunk is stored, decision by decision: backlog, stuck storage, disabled tiers, and what was refused before.

The tiers here are the memory tier's real books; what a rank would do is said by the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count

import pytest

from nixl_offload.catalog.placing import Placing
from nixl_offload.index import State
from nixl_offload.types import Key, Location

SLOT = 4096
BACKLOG_SLOTS = 2
STUCK_S = 5.0


class Shelf:
    """A tier with so many slots, as far as a store asks it, which counts how often it is asked."""

    def __init__(self, position: int, slots: int) -> None:
        self.position, self.slots, self.asked = position, slots, 0
        self._offsets = count()

    def reserve(self, key: Key, needed: int, evicted: list[Key]) -> Location | None:
        self.asked += 1
        if not self.slots:
            return None
        self.slots -= 1
        evicted.append(Key(b"gone" + key))
        return Location(self.position, next(self._offsets) * SLOT, needed)


class World:
    """A placing over shelves, with what was evicted."""

    def __init__(self, *slots: int) -> None:
        self.shelves = [Shelf(position, room) for position, room in enumerate(slots)]
        self.evicted: list[tuple[int, list[Key]]] = []
        self.placing = Placing(
            self.shelves,  # type: ignore[arg-type]
            slot_bytes=lambda _: SLOT,
            backlog_bytes=BACKLOG_SLOTS * SLOT,
            stuck_after_s=STUCK_S,
            evicted=self._note,
        )

    def place(
        self, number: int, now_s: float, refused: set[tuple[int, int]] | None = None, *states: State | None
    ) -> int | None:
        """Return the tier that key ``number`` goes to."""
        found = self.placing.place(
            key(number), states or (None,) * len(self.shelves), set() if refused is None else refused, now_s
        )
        return None if found is None else found.tier

    def end(self, number: int, tier: int, now_s: float) -> None:
        self.placing.ended(key(number), Location(tier, 0, SLOT), now_s)

    def _note(self, position: int, keys: Iterable[Key]) -> None:
        self.evicted.append((position, list(keys)))


def key(number: int) -> Key:
    return Key(bytes([number]) * 8)


@pytest.fixture
def make() -> Callable[..., World]:
    return World


def test_what_is_being_stored_is_known_until_it_ends(make: Callable[..., World]) -> None:
    world = make(8)
    assert world.place(1, 0.0) == 0
    assert key(1) in world.placing
    assert key(2) not in world.placing
    assert world.placing.bytes_by_tier == (SLOT,)
    world.end(1, 0, 1.0)
    assert key(1) not in world.placing
    assert world.placing.bytes_by_tier == (0,)
    assert world.evicted == [(0, [Key(b"gone" + key(1))])]


def test_a_second_store_does_not_begin_the_time_anew(make: Callable[..., World]) -> None:
    world = make(8, 8)
    assert [world.place(1, 0.0), world.place(2, 4.0)] == [0, 0]
    assert world.place(3, 0.1 + STUCK_S) == 1


def test_a_chunk_larger_than_the_backlog_is_stored_alone(make: Callable[..., World]) -> None:
    large = BACKLOG_SLOTS * SLOT + SLOT
    placing = Placing(
        [Shelf(0, 8)],  # type: ignore[list-item]
        slot_bytes=lambda _: large,
        backlog_bytes=BACKLOG_SLOTS * SLOT,
        stuck_after_s=STUCK_S,
        evicted=lambda *_: None,
    )
    assert placing.place(key(1), (None,), set(), 0.0) == Location(0, 0, large)
    assert placing.place(key(2), (None,), set(), 0.0) is None


def test_a_tier_that_has_no_room_is_not_asked_again_for_that_size(make: Callable[..., World]) -> None:
    world = make(0, 8)
    refused: set[tuple[int, int]] = set()
    assert [world.place(number, 0.0, refused) for number in (1, 2)] == [1, 1]
    assert refused == {(0, SLOT)}
    assert world.shelves[0].asked == 1
    world.end(1, 1, 0.0)
    assert world.place(3, 0.0) == 1
    assert world.shelves[0].asked == 2


def test_a_tier_that_holds_the_key_does_not_take_it_again(make: Callable[..., World]) -> None:
    world = make(8, 8)
    assert world.place(1, 0.0, None, State.EVICTING, None) == 1
    assert world.place(2, 0.0, None, State.EVICTING, State.WRITING) is None
