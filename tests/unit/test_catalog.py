"""The catalog's decisions, with the real index and slot allocator behind a tier that has no disk.

Proves: a chunk is served only after every rank stored it; one rank's failure drops it; a failed load drops it too; no
location is handed out twice while a ticket is open, resets included; stores are shed, never queued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nixl_offload.catalog import Catalog, Change
from nixl_offload.index import DurableIndex
from nixl_offload.tiers.slab.file import SlabPlace
from nixl_offload.tiers.slab.tier import SlabTier
from nixl_offload.tiers.slots import SlotAllocator
from nixl_offload.types import Key, Lookup, LookupContext, Outcome

SLOT = 8192


MakeCatalog = Callable[..., Catalog]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeCatalog]:
    """Return a maker of catalogs over one file tier; closes their durable twins."""
    opened: list[SlabTier] = []

    def build(slots: int = 8, world_size: int = 1, backlog: int = 1 << 30) -> Catalog:
        place = SlabPlace(
            directory=str(tmp_path), rank_namespaces=(b"n" * 32,), rank_bytes=slots * SLOT, extent_bytes=SLOT
        )
        journal, _ = DurableIndex.open(str(tmp_path / "index.sqlite"), {})
        tier = SlabTier(0, place, SlotAllocator(slots * SLOT, [SLOT], extent_bytes=SLOT), journal)
        opened.append(tier)
        return Catalog([tier], world_size=world_size, slot_bytes=lambda key: SLOT, store_backlog_bytes=backlog)

    yield build
    for tier in opened:
        tier.close()


def _key(number: int) -> Key:
    return Key(number.to_bytes(32, "big") + bytes(4))


def _store(catalog: Catalog, *numbers: int) -> None:
    grant = catalog.reserve([_key(number) for number in numbers], 0.0)
    assert grant is not None
    catalog.report(grant.ticket, 1, {}, 0.0)


def test_a_chunk_is_served_only_after_all_ranks_have_stored_it(make: MakeCatalog) -> None:
    catalog = make(world_size=2)
    grant = catalog.reserve([_key(1)], 0.0)
    assert grant is not None
    assert catalog.lookup(_key(1), 0.1) is Lookup.PENDING
    assert catalog.report(grant.ticket, 1, {}, 0.0) is None
    assert catalog.lookup(_key(1), 0.1) is Lookup.PENDING
    assert catalog.report(grant.ticket, 1, {}, 0.0) is not None
    assert catalog.lookup(_key(1), 0.1) is Lookup.HIT
    assert catalog.take_changes() == [Change(0, [_key(1)], removed=False)]


def test_one_failed_rank_drops_the_chunk_and_keeps_its_siblings(make: MakeCatalog) -> None:
    catalog = make(world_size=2)
    grant = catalog.reserve([_key(1), _key(2)], 0.0)
    assert grant is not None
    catalog.report(grant.ticket, 1, {0: Outcome.FAILED}, 0.0)
    settled = catalog.report(grant.ticket, 1, {}, 0.0)
    assert settled is not None
    assert settled.failed == {_key(1): Outcome.FAILED}
    assert catalog.lookup(_key(1), 0.0) is Lookup.MISS
    assert catalog.lookup(_key(2), 0.0) is Lookup.HIT
    again = catalog.reserve([_key(1), _key(2)], 0.0)
    assert again is not None
    assert again.keys == (_key(1),), "the damaged chunk is stored anew, the good one is not"


@pytest.mark.parametrize(
    ("outcome", "then"),
    [(Outcome.CORRUPT, Lookup.MISS), (Outcome.FAILED, Lookup.MISS), (Outcome.DROPPED, Lookup.HIT)],
)
def test_a_failed_load_drops_the_chunk(make: MakeCatalog, outcome: Outcome, then: Lookup) -> None:
    """Unless it was given up to shed load."""
    catalog = make()
    _store(catalog, 1, 2)
    grant = catalog.prepare_load([_key(1), _key(2)], 0.0)
    catalog.report(grant.ticket, 1, {1: outcome}, 0.0)
    assert catalog.lookup(_key(1), 0.0) is Lookup.HIT
    assert catalog.lookup(_key(2), 0.0) is then
    assert catalog.report(grant.ticket, 1, {}, 0.0) is None, "an unknown ticket"


def test_a_chunk_that_is_gone_gets_a_location_nobody_can_read(make: MakeCatalog) -> None:
    catalog = make()
    grant = catalog.prepare_load([_key(9)], 0.0)
    assert grant.locations[0].offset < 0
    catalog.report(grant.ticket, 1, {0: Outcome.FAILED}, 0.0)
    assert catalog.open_tickets == 0


def test_a_pinned_chunk_is_not_evicted_and_its_slot_not_reused(make: MakeCatalog) -> None:
    catalog = make(slots=2)
    _store(catalog, 1, 2)
    load = catalog.prepare_load([_key(1)], 0.0)
    grant = catalog.reserve([_key(3), _key(4)], 0.0)
    assert grant is not None
    assert grant.keys == (_key(3),), "only one slot could be had: the other is being read"
    assert load.locations[0] not in grant.locations
    assert catalog.lookup(_key(1), 0.0) is Lookup.HIT


def test_a_reset_serves_nothing_and_reuses_no_slot_that_a_rank_may_still_touch(make: MakeCatalog) -> None:
    catalog = make(slots=2)
    _store(catalog, 1)
    loading = catalog.prepare_load([_key(1)], 0.0)
    storing = catalog.reserve([_key(2)], 0.0)
    assert storing is not None
    catalog.clear()
    assert catalog.lookup(_key(1), 0.0) is Lookup.MISS
    assert catalog.lookup(_key(2), 0.0) is Lookup.MISS
    assert catalog.reserve([_key(3)], 0.0) is None, "both slots are still in somebody's hands"
    catalog.report(loading.ticket, 1, {}, 0.0)
    catalog.report(storing.ticket, 1, {}, 0.0)
    assert catalog.lookup(_key(2), 0.0) is Lookup.MISS, "stored before the reset, so never served after it"
    grant = catalog.reserve([_key(3), _key(4)], 0.0)
    assert grant is not None
    assert set(grant.locations) == {*loading.locations, *storing.locations}


@pytest.mark.parametrize("used", ["stored", "loaded", "touched"])
def test_a_prefix_is_evicted_from_its_end(make: MakeCatalog, used: str) -> None:
    """Or the first eviction would make a whole prompt unreachable, while all that is left of it kept its room."""
    catalog = make(slots=4)
    prefix = [_key(number) for number in (1, 2, 3, 4)]
    if used == "stored":
        _store(catalog, 1, 2, 3, 4)
        assert catalog.take_changes() == [Change(0, prefix, removed=False)], "told in its order all the same"
    else:
        _store(catalog, 4, 3, 2, 1)
    if used == "loaded":
        catalog.report(catalog.prepare_load(prefix, 0.0).ticket, 1, {}, 0.0)
    if used == "touched":
        catalog.touch(prefix)
    _store(catalog, 8, 9)
    assert [catalog.lookup(key, 0.0) for key in prefix] == [Lookup.HIT, Lookup.HIT, Lookup.MISS, Lookup.MISS]


def test_the_end_of_a_prompt_does_not_evict_its_beginning(make: MakeCatalog) -> None:
    """What is offered again is in use, however long ago it was stored."""
    catalog = make(slots=3)
    _store(catalog, 1)
    _store(catalog, 8, 9)
    _store(catalog, 1, 2)
    assert catalog.lookup(_key(1), 0.0) is Lookup.HIT
    assert [change.keys for change in catalog.take_changes() if change.removed] == [[_key(9)]]


def test_stores_beyond_the_backlog_are_dropped_from_the_end(make: MakeCatalog) -> None:
    catalog = make(backlog=2 * SLOT)
    grant = catalog.reserve([_key(number) for number in range(5)], 0.0)
    assert grant is not None
    assert grant.keys == (_key(0), _key(1)), "a prefix is worth keeping, a suffix is not"
    assert catalog.reserve([_key(7)], 0.0) is None
    catalog.report(grant.ticket, 1, {}, 0.0)
    assert catalog.reserve([_key(7)], 0.0) is not None


def test_a_chunk_larger_than_the_backlog_is_stored_alone(make: MakeCatalog) -> None:
    catalog = make(backlog=SLOT - 1)
    grant = catalog.reserve([_key(1), _key(2)], 0.0)
    assert grant is not None
    assert grant.keys == (_key(1),)


def test_a_smaller_chunk_is_not_stored_behind_one_that_has_no_room(tmp_path: Path) -> None:
    """Of a prompt with two groups of layers: what lies behind a gap is of no use."""
    large, small, held = _key(1), _key(2), _key(3)
    journal, _ = DurableIndex.open(str(tmp_path / "index.sqlite"), {})
    place = SlabPlace(str(tmp_path), (b"n" * 32,), rank_bytes=2 * SLOT, extent_bytes=2 * SLOT)
    allocator = SlotAllocator(2 * SLOT, [SLOT, 2 * SLOT], extent_bytes=2 * SLOT)
    tier = SlabTier(0, place, allocator, journal)
    catalog = Catalog(
        [tier],
        world_size=1,
        slot_bytes=lambda key: 2 * SLOT if key == large else SLOT,
        store_backlog_bytes=1 << 30,
    )
    assert catalog.reserve([held], 0.0) is not None
    assert catalog.reserve([large, small], 0.0) is None
    assert catalog.reserve([small], 0.0) is not None, "it would have had room"
    tier.close()


def test_a_chunk_on_its_way_out_leaves_room_to_the_others(make: MakeCatalog) -> None:
    """Dropped while a load reads it, a chunk is stored anew once that has ended. Those behind it need not wait."""
    catalog = make(slots=4)
    _store(catalog, 0)
    load = catalog.prepare_load([_key(0)], 0.0)
    catalog.drop([_key(0)])
    store = catalog.reserve([_key(0), _key(1)], 0.0)
    assert store is not None
    assert store.keys == (_key(1),)
    assert not catalog.counts
    catalog.report(load.ticket, 1, {}, 0.0)
    assert catalog.reserve([_key(0)], 0.0) is not None


def test_stuck_storage_does_not_hold_requests_back(make: MakeCatalog) -> None:
    catalog = make()
    catalog.reserve([_key(1)], 10.0)
    assert catalog.lookup(_key(1), 11.0) is Lookup.PENDING
    assert catalog.lookup(_key(1), 13.0) is Lookup.MISS


def test_a_request_does_not_wait_for_one_store_after_another(make: MakeCatalog) -> None:
    """A long prompt is stored chunk by chunk; who has the same beginning waits for two seconds in all."""
    catalog, answers = make(slots=100), []
    for number in range(10):
        grant = catalog.reserve([_key(number)], float(number))
        assert grant is not None
        answers.append(catalog.lookup(_key(number), float(number), LookupContext("a", 16)))
        catalog.report(grant.ticket, 1, {}, number + 0.9)
    assert answers == [Lookup.PENDING] * 3 + [Lookup.MISS] * 7
    assert catalog.lookup(_key(9), 10.0, LookupContext("a", 16)) is Lookup.HIT
    assert catalog.reserve([_key(10)], 10.0) is not None
    catalog.forget_request("a")
    assert catalog.lookup(_key(10), 10.0, LookupContext("a", 16)) is Lookup.PENDING
