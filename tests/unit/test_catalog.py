"""The catalog's decisions over the tiers' real books.

Proves: a chunk is served only after every rank stored it; one rank's failure drops it; a failed load drops it too; no
location is handed out twice while a ticket is open, resets included; stores are shed, never queued; what is retained is
not evicted before its time, within a tier's share; what is dropped is gone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nixl_offload.catalog import catalog
from nixl_offload.catalog.catalog import Change
from nixl_offload.types import Lookup, LookupContext, Outcome
from tests.unit.catalog_rig import BUCKET, FILE, MEMORY, SLOT, Chain, MakeChain, chains, key, keys

HIT, MISS, PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeChain]:
    with chains(tmp_path, at_rest=_at_rest) as build:
        yield build


def _at_rest(chain: Chain) -> None:
    chain.now_s += 100_000.0
    chain.come_to_rest()
    assert not any(chain.catalog.retention.bytes_by_tier)


@pytest.fixture
def alone(make: MakeChain, request: pytest.FixtureRequest) -> Chain:
    """A memory tier alone, with the number of slots in the test's mark, or 8."""
    return make(file_slots=0, memory_slots=getattr(request, "param", 8))


def slots(count: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("alone", [count], indirect=True)


def ask(chain: Chain, *numbers: int) -> list[Lookup]:
    return [chain.catalog.lookup(key(number), chain.now_s) for number in numbers]


@pytest.mark.parametrize(("outcome", "then"), [(Outcome.CORRUPT, MISS), (Outcome.FAILED, MISS), (Outcome.DROPPED, HIT)])
def test_a_failed_load_drops_the_chunk(alone: Chain, outcome: Outcome, then: Lookup) -> None:
    """Unless the load was given up to shed load."""
    alone.store(1, 2)
    grant = alone.catalog.prepare_load(keys(1, 2), alone.now_s)
    alone.report(grant.ticket, {1: outcome})
    assert ask(alone, 1, 2) == [HIT, then]
    assert alone.catalog.report(grant.ticket, 1, {}, alone.now_s) is None, "an unknown ticket"


@slots(4)
@pytest.mark.parametrize("used", ["stored", "loaded", "touched"])
def test_a_prefix_is_evicted_from_its_end(alone: Chain, used: str) -> None:
    """Otherwise the first eviction would make a whole prompt unreachable, while its other chunks kept their room."""
    if used == "stored":
        alone.store(1, 2, 3, 4)
        expected = [Change(MEMORY, keys(1, 2, 3, 4), removed=False)]
        assert alone.catalog.take_changes() == expected, "reported in its order all the same"
    else:
        alone.store(4, 3, 2, 1)
    if used == "loaded":
        alone.load(1, 2, 3, 4)
    if used == "touched":
        alone.catalog.touch(keys(1, 2, 3, 4))
    alone.store(8, 9)
    assert ask(alone, 1, 2, 3, 4) == [HIT, HIT, MISS, MISS]


@slots(3)
def test_the_end_of_a_prompt_does_not_evict_its_beginning(alone: Chain) -> None:
    """A chunk that is offered again counts as used, however old it is."""
    alone.store(1)
    alone.store(8, 9)
    offered = alone.reserve(1, 2)
    assert offered is not None
    assert offered.keys == (key(2),)
    assert ask(alone, 1) == [HIT]
    assert [change.keys for change in alone.catalog.take_changes() if change.removed] == [keys(9)]


@pytest.mark.parametrize("backlog", [0, 2])
def test_stores_beyond_the_backlog_are_dropped_from_the_end(make: MakeChain, backlog: int) -> None:
    """A prefix is worth keeping, a suffix is not. A chunk larger than the backlog is stored by itself."""
    chain = make(file_slots=0, store_backlog_slots=backlog)
    grant = chain.reserve(*range(5))
    assert grant is not None
    assert grant.keys == tuple(keys(*range(max(1, backlog))))
    assert chain.reserve(7) is None
    chain.report(grant.ticket)
    assert chain.reserve(7) is not None


def test_a_smaller_chunk_is_not_stored_behind_one_that_has_no_room(make: MakeChain) -> None:
    """In a prompt with two groups of layers, chunks after a gap are of no use."""
    chain = make(file_slots=0, memory_slots=2, large=(1,))
    assert chain.reserve(3) is not None
    assert chain.reserve(1, 2) is None
    assert chain.reserve(2) is not None, "it would have had room"


@slots(4)
def test_a_chunk_on_its_way_out_leaves_room_to_the_others(alone: Chain) -> None:
    """A chunk dropped during a load is stored again when the load has ended. Chunks after it need not wait."""
    alone.store(0)
    load = alone.catalog.prepare_load(keys(0), alone.now_s)
    alone.catalog.drop(keys(0))
    store = alone.reserve(0, 1)
    assert store is not None
    assert store.keys == (key(1),)
    assert not alone.catalog.counts
    alone.report(load.ticket)
    assert alone.reserve(0) is not None


def test_stuck_storage_does_not_hold_requests_back(alone: Chain) -> None:
    alone.reserve(1)
    for seconds, answer in ((1.0, PENDING), (2.0, MISS)):
        alone.now_s += seconds
        assert ask(alone, 1) == [answer]


def test_a_request_does_not_wait_for_one_store_after_another(alone: Chain) -> None:
    """A long prompt is stored chunk by chunk. A request with the same prefix waits two seconds in total."""
    request, answers = LookupContext("a", 16), []
    for number in range(6):
        grant = alone.reserve(number)
        assert grant is not None
        answers.append(alone.catalog.lookup(key(number), alone.now_s, request))
        alone.report(grant.ticket)
        alone.now_s += 1.0
    assert answers == [PENDING] * 3 + [MISS] * 3
    assert alone.catalog.lookup(key(5), alone.now_s, request) is HIT
    assert alone.reserve(7) is not None
    alone.catalog.forget_request("a")
    assert alone.catalog.lookup(key(7), alone.now_s, request) is PENDING


# What hints retain and drop


def retain(chain: Chain, seconds: float, *numbers: int) -> None:
    chain.catalog.retention.retain(keys(*numbers), seconds, chain.now_s)


def fill(chain: Chain, *numbers: int) -> None:
    """Store chunks one by one, each written through at once."""
    for number in numbers:
        chain.store(number)
        chain.write_through()


def test_half_of_a_tier_is_left_for_others(make: MakeChain) -> None:
    chain = make(memory_slots=4)
    fill(chain, 1, 2, 3)
    retain(chain, 60.0, 1, 2, 3)
    assert chain.catalog.retention.bytes_by_tier == [2 * SLOT, 3 * SLOT]
    fill(chain, *range(10, 14))
    assert [MEMORY in chain.holders(number) for number in (1, 2, 3)] == [True, True, False]
    assert MEMORY in chain.holders(13)
    chain.catalog.clear()
    assert not any(chain.catalog.retention.bytes_by_tier)


def test_the_last_word_counts(make: MakeChain) -> None:
    chain = make(memory_slots=4)
    fill(chain, 1)
    for seconds in (0.0, 60.0, 600.0):
        retain(chain, seconds, 1)
    chain.now_s += 60.0
    fill(chain, *range(10, 20))
    assert MEMORY in chain.holders(1)
    retain(chain, 0.0, 1)
    assert not any(chain.catalog.retention.bytes_by_tier)
    fill(chain, *range(20, 30))
    assert MEMORY not in chain.holders(1)


def test_a_step_ends_only_so_many(make: MakeChain, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a whole prompt comes at once. Its end goes first, however many steps that takes. Nor are more chunks
    remembered than the limit allows.
    """
    monkeypatch.setattr(catalog, "MAX_EXPIRED", 2)
    monkeypatch.setattr(catalog, "MAX_RETAINED", 5)
    chain = make(memory_slots=16)
    fill(chain, 1, 2, 3, 4, 5)
    retain(chain, 60.0, 1, 2, 3, 4, 5, 6)
    chain.now_s += 60.0
    retained = []
    for _ in range(3):
        chain.begin()
        retained.append([number for number in range(1, 7) if key(number) in chain.catalog.retention])
    assert retained == [[1, 2, 3], [1], []]


def test_being_renewed_for_ever_costs_no_memory(alone: Chain) -> None:
    mine = key(1)
    references = sys.getrefcount(mine)
    for number in range(10_000):
        alone.catalog.retention.retain([mine], 60.0 + number, alone.now_s)
    assert sys.getrefcount(mine) - references < 2_000


def test_damage_frees_what_is_retained(alone: Chain) -> None:
    """Otherwise the chunk could not be stored again before its retention ends."""
    alone.store(1)
    retain(alone, 60.0, 1)
    alone.load(1, failed={0: Outcome.CORRUPT})
    assert alone.tiers[MEMORY].state(key(1)) is None
    assert alone.catalog.retention.bytes_by_tier == [0]
    alone.store(1)
    assert alone.catalog.retention.bytes_by_tier == [SLOT], "and it is retained again"


def test_what_is_dropped_is_gone_from_memory_and_slab_but_not_from_a_bucket(make: MakeChain) -> None:
    """Chunks in use then go when their ticket ends."""
    chain = make(bucket=True)
    fill(chain, 1, 2)
    retain(chain, 60.0, 2)
    chain.catalog.take_changes()
    load, store = chain.catalog.prepare_load(keys(1), chain.now_s), chain.reserve(4)
    assert store is not None
    chain.catalog.drop(keys(4, 3, 2, 1))
    chain.report(load.ticket)
    chain.report(store.ticket)
    assert [chain.holders(number) for number in (1, 2, 4)] == [[BUCKET], [BUCKET], []]
    assert chain.catalog.take_changes() == [
        Change(tier, keys(number), removed=True) for number in (2, 1) for tier in (MEMORY, FILE)
    ]
    assert not any(chain.catalog.retention.bytes_by_tier)
