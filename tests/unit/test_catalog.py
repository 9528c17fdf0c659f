"""The catalog's decisions over the tiers' real books.

Proves: a chunk is served only after every rank stored it; one rank's failure drops it; a failed load drops it too; no
location is handed out twice while a ticket is open, resets included; stores are shed, never queued.
"""

from __future__ import annotations

import pytest

from nixl_offload.catalog.catalog import Change
from nixl_offload.types import Lookup, LookupContext, Outcome
from tests.unit.catalog_rig import MEMORY, Chain, MakeChain, chains, key, keys

HIT, MISS, PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING


make = pytest.fixture(chains)


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
        alone.tiers[0].touch(keys(4, 3, 2, 1))
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
    alone.tiers[MEMORY].drop(key(0))
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
