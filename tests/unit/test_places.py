"""Which slots overlap: the maps of offsets agree with lists that are searched from end to end.

Slots are a few bytes long, so that each way of touching, within a page and across two, comes up.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from nixl_offload.errors import IndexStateError
from nixl_offload.index.links import Links
from nixl_offload.index.places import Places
from nixl_offload.index.policy import LruPolicy
from nixl_offload.index.rows import Rows
from nixl_offload.index.slot_map import SlotMap
from nixl_offload.types import Key, Location

PAGE_SLOTS = 1024


def somewhere(chance: random.Random, slot_bytes: int) -> int:
    """Return an offset at the beginning, around the border of two pages, or far away."""
    border = chance.choice((0, 1, 1, 2, 1_000_000)) * PAGE_SLOTS * slot_bytes
    return max(0, border + chance.randrange(-4 * slot_bytes, 4 * slot_bytes))


@pytest.mark.parametrize("slot_bytes", [1, 3, 8])
def test_slots_of_one_size(slot_bytes: int) -> None:
    """What overlaps a slot, or any of several ranges, and what lies between two offsets."""
    chance = random.Random(slot_bytes)
    slots, offsets, held = SlotMap(slot_bytes), array("q", [0]), dict[int, int]()
    assert not slots.clashes(np.array([0]), np.array([9]), np.array(offsets))
    for _ in range(2000):
        offset = somewhere(chance, slot_bytes)
        overlapping = {node for node, other in held.items() if abs(other - offset) < slot_bytes}
        assert slots.clash(offset, offsets) in (overlapping or {0})
        if overlapping:
            slots.clear(held.pop(max(overlapping)))
        else:
            fresh = {offset}
            for other in (somewhere(chance, slot_bytes) for _ in range(chance.choice((0, 0, 3)))):
                if all(abs(other - taken) >= slot_bytes for taken in (*held.values(), *fresh)):
                    fresh.add(other)
            nodes = range(len(offsets), len(offsets) + len(fresh))
            offsets.extend(fresh)
            held.update(zip(nodes, fresh, strict=True))
            if len(fresh) == 1:
                slots.set(offset, nodes[0])
            else:
                slots.set_many(np.array([*fresh]), np.array(nodes, dtype=np.uint32))
        starts = [somewhere(chance, slot_bytes) for _ in range(chance.choice((1, 1, 4)))]
        ends = [start + chance.randrange(1, 4 * slot_bytes) for start in starts]
        overlap = any(
            start - slot_bytes < other < end for start, end in zip(starts, ends, strict=True) for other in held.values()
        )
        assert slots.clashes(np.array(starts), np.array(ends), np.array(offsets)) == overlap
        start, end = starts[0] - chance.choice((0, 99)), chance.choice(ends)
        found = [*slots.near(start, end)]
        assert {node for node, other in held.items() if start <= other < end} <= set(found)
        assert all(start - slot_bytes < held[node] < end + slot_bytes for node in found)
        assert len(found) == len(set(found))


def rests(location: Location, among: Iterable[Location]) -> bool:
    """Whether a slot can rest there."""
    _, start, slot_bytes = location
    return min(start, slot_bytes - 1) >= 0 and all(
        start >= other + other_bytes or other >= start + slot_bytes for _, other, other_bytes in among
    )


def is_refused(refuse: Callable[..., None], *arguments: object) -> bool:
    try:
        refuse(*arguments)
    except IndexStateError:
        return True
    return False


def test_slots_of_several_sizes() -> None:
    """One by one and many at a time: refused is what overlaps, and what is no place."""
    chance = random.Random(1)
    places, held = Places(lambda _: LruPolicy(Links())), dict[int, Location]()
    for _ in range(1500):
        wanted = list[Location]()
        for _ in range(chance.choice((1, 1, 2, 3))):
            slot_bytes = chance.choice((1, 5, 8))
            offset = chance.choice((chance.randrange(60), somewhere(chance, slot_bytes)))
            wanted.append(Location(0, chance.choice((*[offset] * 20, -1)), chance.choice((*[slot_bytes] * 20, 0))))
        rest, among = True, [*held.values()]
        for location in wanted:
            rest, among = rest and rests(location, among), [*among, location]
        many = Rows([Key(b"")] * len(wanted), *(np.array([one[column] for one in wanted]) for column in (1, 2)))
        assert is_refused(places.refuse_many, 0, many) is not rest, wanted
        assert is_refused(places.refuse, wanted[0]) is not rests(wanted[0], [*held.values()])
        if rest:
            first = len(places.offsets)
            places.grow(len(wanted))
            if len(wanted) == 1:
                places.put(first, wanted[0])
            else:
                nodes = np.arange(first, first + len(wanted), dtype=np.uint32)
                assert sum(len(of_class) for _, of_class in places.put_many(nodes, 0, many)) == len(wanted)
            held.update(enumerate(wanted, first))
        elif held and chance.random() < 0.5:
            node = chance.choice([*held])
            places.size_class(node).slots.clear(held.pop(node).offset)
        assert all(places.location(node) == location for node, location in held.items())
        start = somewhere(chance, 3)
        end = start + chance.randrange(-2, 60)
        between = {node for node, (_, offset, _) in held.items() if start <= offset < end}
        assert sorted(places.between(start, end)) == sorted(between)
    assert is_refused(places.refuse, Location(1, 1 << 50, 3))
    assert is_refused(places.refuse_many, 1, Rows([Key(b"")], np.array([1 << 50]), np.array([3])))
