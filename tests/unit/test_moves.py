"""Write-through and promotion: what goes from tier to tier, and what is pinned meanwhile, over the tiers' real books.

Proves: a chunk in memory is kept until a farther tier has it, within a limit; what cannot be written is dropped and
counted, and an idle engine is not kept awake for it; no pin and no reservation is left behind, whatever happens in
whatever order.
"""

from __future__ import annotations

import random
import sys

import pytest

from nixl_offload.catalog import catalog, moves
from nixl_offload.catalog.catalog import Change
from nixl_offload.index import State
from nixl_offload.tiers.shared.tier import SharedTier
from nixl_offload.tiers.slot_tier import MemoryTier
from nixl_offload.types import Lookup, LookupContext, Outcome
from tests.unit.catalog_rig import BUCKET, FILE, MEMORY, SLOT, Chain, MakeChain, chains, key, keys

make = pytest.fixture(chains)


# Write-through


def test_a_store_goes_on_from_memory_to_every_farther_tier(make: MakeChain) -> None:
    chain = make(buckets=1)
    settled = chain.store(1, 2)
    assert (settled.kind, set(settled.tiers)) == ("store", {MEMORY})
    assert chain.catalog.moves.has_pending
    written = chain.write_through()
    assert sorted(written) == [(key(n), MEMORY, target) for n in (1, 2) for target in (FILE, BUCKET)]
    assert chain.holders(1) == chain.holders(2) == [MEMORY, FILE, BUCKET]
    assert not chain.catalog.moves.has_pending
    assert chain.begin() == []
    assert chain.catalog.take_changes() == [Change(tier, keys(1, 2), removed=False) for tier in (MEMORY, FILE, BUCKET)]
    assert chain.catalog.counts == {}


def test_a_tier_that_a_rank_has_disabled_is_passed_over_but_for_trials(make: MakeChain) -> None:
    """Otherwise a full drive in front of a bucket would keep all chunks out of the bucket too."""
    chain = make(buckets=1)
    chain.catalog.disable({MEMORY, FILE}, (), chain.now_s)
    chain.store(1)
    assert chain.holders(1) == [BUCKET]
    chain.now_s += 1.0
    chain.catalog.disable({MEMORY}, (), chain.now_s)  # reported again: the time of its trial does not change
    chain.store(2)
    assert chain.holders(2) == [FILE], "works again"
    for pause_s, trial in ((1.5, 10), (10.0, 20)):
        chain.now_s += pause_s
        chain.store(trial)
        chain.store(trial + 1)
        assert [chain.holders(number) for number in (trial, trial + 1)] == [[MEMORY], [FILE]], "one chunk as a trial"
    chain.catalog.disable((), (), chain.now_s)
    chain.store(5)
    assert chain.holders(5) == [MEMORY]
    alone = make(file_slots=0)
    alone.catalog.disable({MEMORY}, (), alone.now_s)
    alone.store(1)
    assert alone.holders(1) == [MEMORY], "ranks look at their storage when they store"


def test_writes_begin_in_the_order_in_which_chunks_were_stored(make: MakeChain) -> None:
    """The search in a bucket assumes that if a chunk is there, those before it are."""
    chain = make(memory_slots=64, write_through_backlog_slots=16)
    for first in (10, 20, 30):
        chain.store(*range(first, first + 10))
    begun = []
    while chain.catalog.moves.has_pending:
        grants = chain.begin()
        assert sum(len(grant.keys) for grant in grants) <= 16, "no more in flight than the limit"
        assert {len(grant.keys) for grant in grants} == {2}, "an eighth of that each, or it would go by fits and starts"
        for grant in grants:
            begun += grant.keys
            chain.report(grant.ticket)
    assert begun == keys(*range(10, 40))


def test_a_smaller_chunk_does_not_overtake_a_larger_one(make: MakeChain) -> None:
    """In two groups of a prompt, chunks after a gap are of no use, and a large chunk would wait for ever."""
    chain = make(memory_slots=16, large=(1, 2), write_through_backlog_slots=3)
    chain.store(1, 2, 3)
    assert [write[0] for write in chain.write_through()] == keys(1)
    assert [write[0] for write in chain.write_through()] == keys(2, 3)


def test_a_pending_write_whose_source_is_evicted_is_dropped(make: MakeChain) -> None:
    chain = make(memory_slots=2)
    chain.store(1, 2)
    assert chain.pinned(MEMORY) == 0
    chain.store(3)
    assert chain.holders(2) == [], "the prompt's end makes room, though no other tier has it"
    assert [written[0] for written in chain.write_through()] == keys(1, 3)
    assert chain.told(FILE) == {"ok": 2, "gone": 1}


def test_the_slot_of_a_move_under_way_is_given_to_nobody(make: MakeChain) -> None:
    """Nobody else has the chunk yet. Its rank may read the slot until it reports, whoever drops the chunk meanwhile."""
    chain = make(memory_slots=2, write_through_backlog_slots=1)
    chain.store(1, 2)
    (grant,) = chain.begin()
    chain.store(3)
    assert (chain.holders(1), chain.holders(2)) == ([MEMORY], []), "the one that waits makes room"
    chain.tiers[MEMORY].drop(key(1))
    for number in (4, 5):
        chain.store(number)
        assert chain.tiers[MEMORY].pin(keys(number)) != [grant.sources[0]]
        chain.tiers[MEMORY].unpin(keys(number))
    chain.report(grant.ticket)
    assert chain.holders(1) == [FILE], "whole, as it was read"


def test_the_bucket_gets_a_chunk_from_the_file_once_memory_has_given_it_up(make: MakeChain) -> None:
    chain = make(memory_slots=2, buckets=1)
    chain.store(1, 2)
    chain.write_through(to=(FILE,))
    for grant in [ticket for ticket in chain.open if ticket]:
        chain.report(grant, dict.fromkeys(range(2), Outcome.FAILED))
    assert chain.reserve(1, 2) is None
    chain.store(3, 4)
    assert [write[1:] for write in chain.write_through(to=(BUCKET,))][:2] == [(FILE, BUCKET)] * 2


def test_nothing_is_fetched_from_a_farther_tier_to_be_stored_in_a_nearer_one(make: MakeChain) -> None:
    chain = make(buckets=1)
    chain.store(1)
    (to_file, to_bucket) = chain.begin()
    chain.report(to_file.ticket, {0: Outcome.FAILED})
    chain.report(to_bucket.ticket)
    chain.reserve(1)
    chain.tiers[MEMORY].clear()
    assert chain.holders(1) == [BUCKET]
    assert chain.begin() == []
    assert chain.told(FILE) == {"failed": 1, "gone": 1}


def test_a_known_chunk_is_written_where_it_is_lacking(make: MakeChain) -> None:
    chain = make(file_slots=1)
    chain.store(1, 2)
    chain.write_through()
    assert chain.told(FILE) == {"ok": 1}, "while one is on its way the slab has no room for the other"
    assert chain.reserve(1, 2) is None, "nothing to store"
    assert chain.write_through() == [(key(2), MEMORY, FILE)], "which the slab has room for by giving up the first"
    assert chain.holders(1) == [MEMORY]
    assert Change(FILE, keys(1), removed=True) in chain.catalog.take_changes()


# Tiers that take nothing


def test_a_tier_that_is_out_of_use_keeps_nobody_awake_for_long(make: MakeChain) -> None:
    """Its failing trials do not count as progress: a chunk begins now and then, and the others would wait for ever."""
    chain = make(buckets=1)
    chain.catalog.disable({BUCKET}, (), chain.now_s)
    chain.store(*range(6))
    started_s = chain.now_s
    while chain.catalog.moves.has_pending:
        assert chain.now_s < started_s + 60.0
        chain.catalog.on_step(chain.now_s)
        for grant in chain.begin():
            failed = grant.targets[0].tier == BUCKET
            chain.report(grant.ticket, dict.fromkeys(range(len(grant.keys)), Outcome.FAILED) if failed else {})
        chain.now_s += 0.5
    assert chain.now_s >= started_s + 30.0, "it was given a chance"
    assert chain.told(FILE) == {"ok": 6}
    told = chain.told(BUCKET)
    assert told["refused"] + told["failed"] == 6
    assert chain.pinned(MEMORY) == 0


def test_a_tier_that_hangs_is_given_up_and_holds_up_no_other(make: MakeChain) -> None:
    chain = make(memory_slots=64, buckets=1, write_through_backlog_slots=4)
    chain.store(*range(20))
    stuck = []
    for _ in range(70):
        for grant in chain.begin():
            if grant.targets[0].tier == FILE:
                chain.report(grant.ticket)
            else:
                stuck.append(grant)
        chain.now_s += 0.5
    assert chain.told(FILE) == {"ok": 20}
    assert sum(len(grant.keys) for grant in stuck) == 4, "no more in flight than the limit"
    assert chain.told(BUCKET) == {"refused": 16}
    assert not chain.catalog.moves.has_pending
    assert chain.pinned(MEMORY) == 4, "what is on its way"
    for grant in stuck:
        chain.report(grant.ticket, {0: Outcome.FAILED})


def test_so_many_writes_are_pending_at_most(make: MakeChain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "MAX_PENDING", 3)
    chain = make()
    chain.store(*range(5))
    assert chain.catalog.moves.pending == (0, 3)
    assert chain.told(FILE) == {"overflow": 2}
    assert [written[0] for written in chain.write_through()] == keys(2, 3, 4), "the oldest went"


def test_a_chunk_larger_than_the_backlog_goes_alone(make: MakeChain) -> None:
    chain = make(write_through_backlog_slots=0)
    chain.store(1, 2)
    (grant,) = chain.begin()
    assert chain.begin() == []
    chain.report(grant.ticket)
    assert chain.write_through() == [(key(2), MEMORY, FILE)]


# Write-throughs that fail


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.DROPPED, Outcome.TAINTED])
def test_a_write_that_failed_is_counted_and_made_again_when_it_is_offered(make: MakeChain, outcome: Outcome) -> None:
    chain = make()
    chain.store(1)
    chain.write_through(outcome)
    assert chain.holders(1) == [MEMORY]
    assert chain.told(FILE) == {outcome.value: 1}
    assert not chain.catalog.moves.has_pending, "not tried for ever"
    assert chain.pinned(MEMORY) == 0
    chain.reserve(1)
    assert chain.write_through() == [(key(1), MEMORY, FILE)]


# Resets and failed loads, while something is on its way


def test_a_reset_forgets_what_is_pending_and_what_is_on_its_way(make: MakeChain) -> None:
    chain = make(write_through_backlog_slots=1)
    chain.store(1, 2)
    (grant,) = chain.begin()
    chain.catalog.clear()
    assert not chain.catalog.moves.has_pending
    assert chain.catalog.in_flight_stores() == [], "nothing that a next engine should look for"
    assert chain.held() == 2, "source and target, as long as a rank touches them"
    chain.report(grant.ticket)
    assert chain.held() == 0
    assert chain.holders(1) == []
    assert chain.told(FILE) == {"gone": 1}
    assert chain.catalog.take_changes() == []


@pytest.mark.parametrize("begun", [False, True])
def test_a_chunk_that_a_load_finds_damaged_while_its_write_is_pending(make: MakeChain, begun: bool) -> None:
    chain = make()
    chain.store(1)
    grants = chain.begin() if begun else []
    chain.load(1, failed={0: Outcome.CORRUPT})
    assert chain.holders(1) == []
    assert chain.tiers[MEMORY].state(key(1)) is (State.EVICTING if begun else None)
    for grant in grants:
        chain.report(grant.ticket, {0: Outcome.CORRUPT})
    chain.begin()
    assert chain.tiers[MEMORY].state(key(1)) is None, "its slot is free"
    assert chain.told(FILE) == ({"corrupt": 1} if begun else {"gone": 1})


# Promotions


def _in_file_alone(chain: Chain, *numbers: int) -> None:
    chain.store(*numbers)
    chain.write_through()
    chain.tiers[MEMORY].clear()
    chain.catalog.take_changes()


def test_what_a_farther_tier_serves_is_kept_in_memory(make: MakeChain) -> None:
    chain = make()
    _in_file_alone(chain, 1, 2)
    grant = chain.catalog.prepare_load(keys(1, 9, 2), chain.now_s)
    assert [location.tier for location in grant.locations] == [FILE, -1, FILE]
    assert [slot and slot.tier for slot in grant.promotion_slots] == [MEMORY, None, MEMORY]
    assert chain.catalog.lookup(key(1), chain.now_s) is Lookup.PENDING, "memory is about to have it"
    assert chain.catalog.where(keys(1)) == [FILE]
    assert chain.catalog.in_flight_stores() == [(MEMORY, key(1)), (MEMORY, key(2))]
    assert chain.report(grant.ticket, {1: Outcome.FAILED}).tiers == (FILE, -1, FILE)
    assert chain.catalog.where(keys(1)) == [FILE], "told of later, and separately"
    settled = chain.report(grant.promotion_ticket, {1: Outcome.FAILED})
    assert (settled.kind, settled.keys, set(settled.tiers)) == ("promotion", tuple(keys(1, 2)), {MEMORY})
    assert chain.catalog.where(keys(1)) == [MEMORY]
    assert chain.catalog.where(keys(2)) == [FILE]
    assert chain.catalog.take_changes() == [Change(MEMORY, keys(1), removed=False)]
    assert not chain.catalog.moves.has_pending


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CORRUPT, Outcome.DROPPED, Outcome.TAINTED])
def test_a_promotion_that_failed_leaves_the_farther_copy(make: MakeChain, outcome: Outcome) -> None:
    chain = make(memory_slots=1)
    _in_file_alone(chain, 1)
    chain.load(1, promoted=outcome)
    assert chain.holders(1) == [FILE]
    memory = chain.tiers[MEMORY]
    assert isinstance(memory, MemoryTier)
    assert memory.statistics().retired_bytes == (SLOT if outcome is Outcome.TAINTED else 0)
    again = chain.catalog.prepare_load(keys(1), chain.now_s)
    assert (again.promotion_ticket == 0) == (outcome is Outcome.TAINTED), "the only slot is gone for good"
    chain.report(again.ticket)
    if again.promotion_ticket:
        chain.report(again.promotion_ticket)


def test_a_promotion_pushes_nothing_out_that_the_same_load_reads(make: MakeChain) -> None:
    chain = make(memory_slots=2)
    _in_file_alone(chain, 1, 2)
    chain.store(8, 9)
    chain.write_through()
    grant = chain.catalog.prepare_load(keys(1, 2, 8), chain.now_s)
    assert [location.tier for location in grant.locations] == [FILE, FILE, MEMORY]
    assert [slot is not None for slot in grant.promotion_slots] == [True, False, False], "as far as there is room"
    assert chain.holders(9) == [FILE]
    assert Change(MEMORY, keys(9), removed=True) in chain.catalog.take_changes()
    chain.report(grant.ticket)
    chain.report(grant.promotion_ticket)


def test_a_chunk_whose_load_failed_is_stored_anew_though_its_promotion_is_still_open(make: MakeChain) -> None:
    """The promotion is reported when its slot is no longer written, maybe after the chunk was computed again."""
    chain = make()
    _in_file_alone(chain, 1)
    grant = chain.catalog.prepare_load(keys(1), chain.now_s)
    chain.report(grant.ticket, {0: Outcome.FAILED})
    assert chain.holders(1) == []
    chain.store(1)
    assert chain.holders(1) == [FILE]
    chain.report(grant.promotion_ticket, {0: Outcome.TAINTED})
    assert chain.catalog.lookup(key(1), chain.now_s) is Lookup.HIT


# Who serves


def test_a_request_that_may_not_load_from_a_tier_gets_nothing_of_it(make: MakeChain) -> None:
    chain = make()
    chain.store(1, 2)
    chain.write_through()
    chain.tiers[MEMORY].clear()
    chain.load(1)
    ask = chain.catalog.lookup
    assert [ask(key(1), chain.now_s, allowed=tiers) for tiers in ({MEMORY}, {FILE}, set())] == [
        Lookup.HIT,
        Lookup.HIT,
        Lookup.MISS,
    ]
    assert ask(key(2), chain.now_s, allowed=frozenset({MEMORY})) is Lookup.MISS
    assert [chain.catalog.where(keys(1), tiers)[0] for tiers in (None, {FILE}, {BUCKET})] == [MEMORY, FILE, None]
    grant = chain.catalog.prepare_load(keys(1, 2), chain.now_s, {FILE})
    assert [location.tier for location in grant.locations] == [FILE, FILE]
    chain.report(grant.ticket)
    chain.report(grant.promotion_ticket)


def test_a_chunk_that_one_tier_lost_is_served_by_the_next(make: MakeChain) -> None:
    chain = make(buckets=1)
    chain.store(1)
    chain.write_through()
    chain.load(1, failed={0: Outcome.CORRUPT})
    assert chain.catalog.where(keys(1)) == [FILE]
    chain.load(1, failed={0: Outcome.FAILED}, promoted=Outcome.FAILED)
    assert chain.catalog.where(keys(1)) == [BUCKET]
    assert chain.catalog.lookup(key(1), chain.now_s) is Lookup.HIT


def test_a_tier_that_is_out_of_use_serves_only_what_no_other_has(make: MakeChain) -> None:
    """Of two shared tiers, the nearer does not answer."""
    chain = make(file_slots=0, buckets=2)
    chain.store(1, 2, 3)
    (to_nearer, to_farther) = chain.begin()
    chain.report(to_nearer.ticket)
    chain.report(to_farther.ticket, {1: Outcome.FAILED, 2: Outcome.FAILED})
    chain.tiers[MEMORY].clear()
    assert chain.catalog.where(keys(1, 2)) == [1, 1]
    nearer = chain.tiers[1]
    assert isinstance(nearer, SharedTier)
    for _ in range(3):
        nearer._reach.failed("timeout", "no answer", chain.now_s)
    assert not nearer.in_use
    assert chain.catalog.where(keys(1, 2)) == [2, 1]
    grant = chain.catalog.prepare_load(keys(1, 2), chain.now_s)
    assert [location.tier for location in grant.locations] == [2, 1]
    chain.report(grant.ticket)
    chain.report(grant.promotion_ticket, {0: Outcome.FAILED, 1: Outcome.FAILED})
    chain.reserve(3)
    assert chain.begin() == [], "nor does anything go on from it"
    assert chain.told(2) == {"ok": 1, "failed": 2, "gone": 1}


def test_nobody_looks_in_a_bucket_for_what_is_being_stored(make: MakeChain) -> None:
    chain = make(buckets=1)
    grant = chain.reserve(1)
    assert grant is not None
    context = LookupContext("a", 16)
    assert chain.catalog.lookup(key(1), chain.now_s, context) is Lookup.PENDING
    bucket = chain.tiers[BUCKET]
    assert isinstance(bucket, SharedTier)
    bucket.on_step(chain.now_s)
    assert not bucket.is_looking
    chain.now_s += 3.0
    assert chain.catalog.lookup(key(1), chain.now_s, context) is Lookup.RETRY, "waited long enough: it may be there"
    chain.catalog.forget_request("a")


# Where stores go


def test_a_busy_tier_sheds_and_a_stuck_one_is_passed_over(make: MakeChain) -> None:
    chain = make(store_backlog_slots=2)
    first = chain.reserve(1, 2, 3)
    assert first is not None
    assert len(first.keys) == 2
    assert chain.catalog.counts["unstored_chunks", "no_room"] == 1
    chain.now_s += 1.0
    assert chain.reserve(3) is None
    chain.now_s += 2.0
    grant = chain.reserve(3)
    assert grant is not None
    assert grant.locations[0].tier == FILE, "nothing has ended there for long"
    assert chain.catalog.storing_bytes == [2 * SLOT, SLOT]
    chain.report(first.ticket)
    again = chain.reserve(4)
    assert again is not None
    assert again.locations[0].tier == MEMORY


def test_chunks_are_admitted_when_they_are_offered_again(make: MakeChain, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make(store_after=2)
    assert chain.reserve(1, 2) is None
    assert chain.catalog.counts["unstored_chunks", "not_admitted"] == 2
    chain.store(2)
    chain.catalog.clear()
    assert chain.reserve(2) is None, "a reset forgets that as well"
    monkeypatch.setattr(catalog, "MAX_OFFERED", 2)
    assert chain.reserve(3, 2) is not None, "offered twice, and the youngest now"
    assert chain.reserve(4) is None
    assert chain.reserve(3) is None, "forgotten first"


# Whatever happens


@pytest.mark.parametrize("seed", range(12))
def test_no_pin_is_left_whatever_happens(make: MakeChain, seed: int) -> None:
    """Hundreds of random steps, then ``come_to_rest`` checks that nothing is held any more."""
    chance = random.Random(seed)
    chain = make(
        memory_slots=chance.choice([2, 6]),
        file_slots=chance.choice([0, 3, 12]),
        buckets=chance.random() < 0.7,
        exclusive=chance.random() < 0.5,
        write_through_backlog_slots=chance.choice([1, 4, 100]),
        store_backlog_slots=chance.choice([2, 100]),
        store_after=chance.choice([1, 1, 2]),
    )
    outcomes = [None] * 6 + [Outcome.FAILED, Outcome.CORRUPT, Outcome.DROPPED, Outcome.TAINTED]
    tainted = 0
    for _ in range(600):
        what = chance.random()
        some = chance.sample(range(24), chance.randint(1, 8))
        if what < 0.25:
            chain.reserve(*some)
        elif what < 0.4:
            grant = chain.catalog.prepare_load(keys(*some), chain.now_s)
            chain.open[grant.ticket] = len(some)
            if grant.promotion_ticket:
                chain.open[grant.promotion_ticket] = sum(slot is not None for slot in grant.promotion_slots)
        elif what < 0.55:
            chain.begin()
        elif what < 0.9 and chain.open:
            ticket = chance.choice(list(chain.open))
            failed = {at: outcome for at in range(chain.open[ticket]) if (outcome := chance.choice(outcomes))}
            if tainted > 2:
                failed = {at: o for at, o in failed.items() if o is not Outcome.TAINTED}
            tainted += sum(outcome is Outcome.TAINTED for outcome in failed.values())
            chain.report(ticket, failed)
        elif what < 0.92:
            chain.catalog.clear()
        elif what < 0.96:
            chain.now_s += chance.choice([0.1, 5.0, 31.0])
        elif what < 0.98:
            chain.tiers[MEMORY].touch(keys(*some)[::-1])
            chain.catalog.on_step(chain.now_s)
        else:
            is_prefix = chance.random() < 0.5
            chain.catalog.moves.prefetch(keys(*some), range(len(some)), chain.now_s, is_prefix=is_prefix, groups=1)
        chain.check()


def test_what_a_request_computes_without_an_answer_stays_out_of_that_tier(make: MakeChain) -> None:
    """The chunk may be there already. Nearer tiers take it; it goes on when a request that got an answer has it."""
    chain = make(buckets=1)
    bucket = chain.tiers[BUCKET]
    assert isinstance(bucket, SharedTier)
    bucket._doubted.add("doubtful")
    grant = chain.catalog.reserve(keys(1, 2), chain.now_s, "doubtful")
    assert grant is not None
    chain.report(grant.ticket)
    assert chain.write_through() == [(key(1), MEMORY, FILE), (key(2), MEMORY, FILE)]
    assert chain.catalog.reserve(keys(1, 2), chain.now_s, "doubtful") is None
    assert chain.write_through() == []
    assert chain.catalog.reserve(keys(1, 2), chain.now_s, "answered") is None
    assert chain.write_through() == [(key(1), MEMORY, BUCKET), (key(2), MEMORY, BUCKET)]
    chain.come_to_rest()


def test_a_chunk_whose_slot_is_still_read_there_holds_up_no_other(make: MakeChain) -> None:
    chain = make(exclusive=True)
    chain.store(1)
    chain.write_through()
    chain.tiers[MEMORY].drop(key(1))
    load = chain.catalog.prepare_load(keys(1), chain.now_s)
    chain.tiers[FILE].drop(key(1))
    chain.store(1, 2)
    assert chain.write_through() == [(key(2), MEMORY, FILE)]
    chain.catalog.report(load.ticket, 1, {}, chain.now_s)
    assert chain.write_through() == [(key(1), MEMORY, FILE)]


def test_memory_gives_up_what_is_saved_and_takes_it_when_it_leaves_the_gpu(make: MakeChain) -> None:
    chain = make(memory_slots=4, exclusive=True)
    chain.store(1, 2, 3, 4)
    assert len(chain.write_through()) == 4
    assert [chain.holders(number) for number in (3, 4)] == [[MEMORY, FILE], [FILE]], "no longer nearly full"
    grant = chain.catalog.prepare_load(keys(4), chain.now_s)
    assert not grant.promotion_slots, "the GPU has it then"
    chain.report(grant.ticket)
    store = chain.catalog.reserve(keys(1, 4), chain.now_s, leaving=keys(1, 4))
    assert store is not None
    assert [(key, place.tier) for key, place in zip(store.keys, store.locations, strict=True)] == [(key(4), MEMORY)]
    chain.report(store.ticket)
    chain.store(5)
    assert chain.holders(1) == [MEMORY, FILE], "leaving counts as a use"
    chain.load(1)
    assert chain.holders(1) == [MEMORY, FILE], "its request may put nothing off"
    chain.catalog.give_up(keys(1, 5))
    assert chain.holders(1) == [FILE], "the GPU has it again"
    assert chain.holders(5) == [MEMORY], "the file waits for it"


def test_what_begins_late_keeps_those_behind_it(make: MakeChain) -> None:
    """The tier had no room for a long time; now it accepts chunks one by one."""
    chain = make(write_through_backlog_slots=1)
    chain.store(1, 2)
    chain.now_s += moves.PATIENCE_S
    assert [write[0] for write in chain.write_through()] == keys(1)
    assert [write[0] for write in chain.write_through()] == keys(2)
    assert chain.told(FILE) == {"ok": 2}


def test_a_chunk_that_is_gone_is_held_by_nobody(make: MakeChain) -> None:
    """After any operation: a server sees new keys for months, so nothing may be kept per key."""
    chain, mine, request = make(file_slots=0, memory_slots=2), key(1), LookupContext("a", 16)
    references = sys.getrefcount(mine)
    for others in ((2, 3), (4, 5)):
        assert chain.catalog.reserve([mine], chain.now_s) is not None
        assert chain.catalog.lookup(mine, chain.now_s, request) is Lookup.PENDING
        chain.report(max(chain.catalog._tickets))
        chain.report(chain.catalog.prepare_load([mine], chain.now_s).ticket)
        chain.now_s += 1.0
        chain.begin()
        chain.catalog.forget_request("a")
        chain.store(*others)
        assert chain.catalog.lookup(mine, chain.now_s, request) is Lookup.MISS
        chain.catalog.take_changes()
    chain.catalog.recent.clear()  # has the latest only
    assert sys.getrefcount(mine) == references
