"""SharedTier: present chunks are found with few questions, absent ones cost little, and no storage delays a request
long.

The steps are vLLM's: lookups, end of the step, again. By default the store is in memory and only counts.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator
from typing import Final

import pytest
from hypothesis import given, settings, strategies as st

from nixl_offload.catalog.catalog import Catalog
from nixl_offload.errors import StoreError
from nixl_offload.tiers.shared.naming import manifest_name, parse_shard_name
from nixl_offload.tiers.shared.search import WINDOW_KEYS, Search, SearchKind
from nixl_offload.types import Key, Location, Lookup, LookupContext, Outcome
from tests.invariants import check_presence
from tests.unit.engine_rig import until
from tests.unit.shared_rig import SLOT, Gate, MemoryStore, Rig, answer, key_of, keys_of, namespace_of, refuse

MakeRig = Callable[..., Rig]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def make(store: MemoryStore) -> Iterator[MakeRig]:
    """Yield a maker of tiers over ``store``; check their indexes and close them at the end."""
    rigs: list[Rig] = []

    def build(**arguments: object) -> Rig:
        rigs.append(Rig(store, **arguments))  # type: ignore[arg-type]
        return rigs[-1]

    yield build
    if isinstance(store.before, Gate):
        store.before.open()
    store.before = answer
    for rig in rigs:
        check_presence(rig.tier._presence)
        rig.tier.close()
    assert not rigs or store.closed


@pytest.mark.parametrize("is_refused", [False, True])
def test_reads_are_timed_in_the_background(
    make: MakeRig, store: MemoryStore, caplog: pytest.LogCaptureFixture, is_refused: bool
) -> None:
    """One alone and several together, and nothing is left behind. A store that refuses is logged, and used later."""
    store.before = refuse if is_refused else lambda operation, _: time.sleep(0.02 * (operation == "read"))
    rig = make(reads_at_once=4)
    until(lambda: rig.tier.on_step(rig.now()) or rig.tier.timed_reads or caplog.text)
    timed = dict(rig.tier.timed_reads)
    assert timed.keys() == (set() if is_refused else {SLOT, 4 * SLOT})
    assert all(seconds >= 0.02 for seconds in timed.values())
    assert ("No read could be timed" in caplog.text) == is_refused
    assert not [name for name in store.objects if name.startswith("probe")]
    assert store.most_at_once == 1 if is_refused else 4


def _store(rig: Rig, *keys: Key) -> None:
    """Store ``keys`` by this server, all ranks at once."""
    for key in keys:
        assert rig.tier.reserve(key, SLOT, []) == Location(0, 0, SLOT)
        rig.put(key)
        assert rig.tier.commit((key,))
    rig.tier.after_store(keys, {}, rig.now())


# Existence


@pytest.mark.parametrize("present", [0, 1, 17, 3000, 4095, 4096])
def test_the_end_of_a_chain_of_4096_is_found_by_64_heads(make: MakeRig, present: int) -> None:
    rig, keys = make(), keys_of(4096)
    rig.put(*keys[:present])
    assert rig.hits("a", keys) == present
    assert rig.heads() <= 64
    assert rig.hits("b", keys) == present, "the next request knows"
    assert rig.heads() <= 64


def test_requests_share_questions(make: MakeRig, store: MemoryStore) -> None:
    """A key is asked about once at a time, even if two requests look for the same window."""
    rig, keys = make(), keys_of(20, group=1)
    gate = store.before = Gate()
    for request in ("a", "b"):
        rig._scan(request, keys, 4)
    rig.flush()
    gate.open()
    rig.settle()
    assert rig.heads() == len(keys)


def test_who_does_not_wait_is_answered_later(make: MakeRig, store: MemoryStore) -> None:
    """Where nothing was found for a while, by one question; what is found makes the next ones ask more."""
    rig, gate = make(), Gate()
    for number in range(12):
        assert rig.hits(f"r{number}", keys_of(5, 100 * number)) == 0
    asked, store.before = rig.heads(), gate
    assert rig.ask("a", keys_of(5)) == [Lookup.MISS], "known"
    assert rig.ask("b", keys_of(5, 2000)) == [Lookup.RETRY] * 5
    assert rig.tier.lookup(key_of(2000), LookupContext("b", 16, waits=False), rig.now()) is Lookup.MISS
    assert rig.tier.answered("b") is None
    gate.open()
    rig.settle()
    assert rig.tier.answered("b")
    assert rig.heads() == asked + 1
    assert 0.0 < rig.tier.found < 0.1
    assert rig.tier.search_s > 0.0


def test_objects_of_another_size_are_absent(make: MakeRig) -> None:
    rig, keys = make(), keys_of(4)
    rig.put(*keys)
    rig.put(keys[1], size_bytes=SLOT // 2)
    assert rig.hits("a", keys) == 1


def test_old_objects_are_absent(make: MakeRig) -> None:
    rig, keys = make(ttl_s=3600.0), keys_of(4)
    rig.put(*keys[:2], age_s=3000.0)
    rig.put(*keys[2:], age_s=4000.0)
    assert rig.hits("a", keys) == 2
    rig.ahead_s = 599.0
    assert rig.hits("b", keys) == 2
    rig.ahead_s = 601.0
    assert rig.hits("c", keys) == 0, "the lifetime has passed while it was remembered"


# Sliding windows


@pytest.mark.parametrize("window", [1, 5, 40])
def test_a_window_at_the_end_of_what_is_there(make: MakeRig, window: int) -> None:
    """No group tells how far to look: nothing is at the end, and 3,000 of 4,096 are found as for a prefix."""
    rig, keys = make(), keys_of(4096, group=1)
    rig.put(*keys[:3000])
    assert rig.scan("a", keys, window) == 3000
    assert rig.heads() <= 16 + 48 + 2 * max(window, 16) + 16


def test_a_window_is_not_scanned_while_the_same_request_waits_for_a_chain(make: MakeRig, store: MemoryStore) -> None:
    rig, full, window = make(), keys_of(100), keys_of(100, group=1)
    rig.put(*full[:50], *window[:50])
    rig.ask("a", full)
    rig._scan("a", window, 4)
    rig.flush()
    assert rig.hits("a", full) == 50
    assert rig.scan("a", window[:50], 4) == 50
    asked = set(store.names("head"))
    assert not any(rig.names(key)[0] in asked for key in window[50:]), "nobody needs to know of what lies behind"


@pytest.mark.parametrize("outcome", [Outcome.TAINTED, Outcome.DROPPED, Outcome.FAILED])
def test_a_chunk_that_a_rank_could_not_store_is_absent_for_a_while(make: MakeRig, outcome: Outcome) -> None:
    """The other rank's shard is there. What is stored later, by any server, is found."""
    rig, keys = make(world_size=2), keys_of(2)
    for key in keys:
        assert rig.tier.reserve(key, SLOT, []) is not None
    rig.put(keys[0], ranks=[0])
    (rig.tier.retire if outcome is Outcome.TAINTED else rig.tier.abort)(keys[0])
    assert rig.tier.commit([keys[1]])
    rig.tier.after_store(keys, {keys[0]: outcome}, rig.now())
    assert rig.hits("a", keys) == 0
    assert rig.tier.state(keys[0]) is None, "it may be stored again"
    rig.put(keys[0])
    rig.ahead_s = 11.0
    assert rig.hits("b", keys) == 2


# Deadlines, failures, recovery


def test_a_request_is_held_back_for_its_timeout_once(make: MakeRig, store: MemoryStore) -> None:
    rig, keys = make(timeout="20s"), keys_of(4)
    rig.put(*keys)
    gate = store.before = Gate()
    assert rig.ask("a", keys[:1]) == [Lookup.RETRY]
    rig.ahead_s = 21.0
    assert rig.hits("a", keys[:1]) == 0
    for key in keys:
        assert rig.tier.lookup(key, LookupContext("a", 16), rig.now()) is Lookup.MISS, "at once, whatever is asked"
    assert rig.tier.statistics().late == 1
    gate.open()
    rig.ahead_s += 5.0
    rig.wait_for(lambda: 1 if rig.tier.in_use else None)
    assert rig.hits("b", keys) == 4
    rig.tier.forget_request("a")
    assert rig.hits("a", keys) == 4


def test_a_dead_store_costs_a_request_little_and_the_next_ones_nothing_and_comes_back_by_itself(
    make: MakeRig, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rig, keys = make(), keys_of(100)
    rig.put(*keys)
    store.before = refuse
    assert rig.hits("a", keys) == 0
    assert rig.tier.trouble == "unreachable"
    asked = len(store.calls)
    for number in range(100):
        assert rig.ask(f"r{number}", keys) == [Lookup.MISS]
        rig.flush()
    assert rig.tier.reserve(key_of(7000), SLOT, []) is None, "and nothing is stored"
    assert len(store.calls) <= asked + 2
    store.before = answer
    rig.ahead_s = 5.0
    rig.wait_for(lambda: 1 if rig.tier.trouble == "none" else None)
    assert rig.hits("b", keys) == 100
    assert rig.tier.reserve(key_of(7000), SLOT, []) is not None
    rig.tier.abort(key_of(7000))
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "disabled (unreachable)" in warnings[0].getMessage()


def test_a_store_that_fails_again_at_once_is_left_alone_for_longer(make: MakeRig, store: MemoryStore) -> None:
    """A throttling bucket answers the trial, and fails again: the pause of a second is two seconds then."""
    rig = make()
    for number, pause_s in enumerate((1.0, 2.0)):
        store.before = refuse
        assert rig.hits(f"r{number}", keys_of(40, first=100 * number)) == 0
        store.before, asked = answer, len(store.calls)
        rig.ahead_s += pause_s - 0.5
        rig.flush()
        rig.settle()
        assert len(store.calls) == asked, number
        rig.ahead_s += 1.0
        rig.wait_for(lambda: 1 if rig.tier.in_use else None)


def test_a_store_that_hangs_never_holds_the_scheduler(make: MakeRig, store: MemoryStore) -> None:
    """While the store does not answer, no call waits for it, requests wait only once, and threads are bounded."""
    rig, keys = make(timeout="200ms", threads=8), keys_of(500)
    rig.put(*keys)
    gate = store.before = Gate()
    rig.wait_for(lambda: 1 if rig.ask("a", keys) == [Lookup.MISS] else None)
    rig.wait_for(lambda: 1 if rig.tier.trouble == "timeout" else None)
    assert rig.ask("b", keys) == [Lookup.MISS], "the next one does not wait"
    rig.ahead_s = 100.0
    rig.flush()
    rig.ahead_s = 200.0
    rig.flush()
    assert store.most_at_once <= 8 + 2 + 1
    gate.open()
    rig.wait_for(lambda: 1 if rig.tier.trouble == "none" else None)
    names = (f"c{number}" for number in itertools.count())  # on a busy machine an answer may come too late
    rig.wait_for(lambda: 1 if rig.hits(next(names), keys) == 500 else None)


def test_who_can_wait_no_longer_gets_what_is_known_so_far(make: MakeRig, store: MemoryStore) -> None:
    """If a bucket is too slow for all rounds of a search, one round finds most of a chain."""
    rig, keys, gate = make(), keys_of(4096), Gate()
    rig.put(*keys[:3000])

    def slow(operation: str, name: str) -> None:
        if operation == "head" and len(store.names("head")) > 16:
            gate(operation, name)

    rig.settle()
    store.before = slow
    rig.ask("a", keys)
    rig.flush()
    rig.wait_for(lambda: 1 if len(store.names("head")) > 16 else None)  # the first round has been answered
    rig.ahead_s += 21.0
    answers = rig.ask("a", keys)
    assert answers == [*[Lookup.HIT] * (len(answers) - 1), Lookup.MISS]
    assert 2700 < len(answers) <= 3000
    gate.open()


def test_a_store_that_is_well_again_is_used_at_once_whatever_still_hangs(
    make: MakeRig, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor do old questions disable the tier again when they finally fail."""
    rig, keys, gate = make(), keys_of(4096), Gate()
    rig.put(*keys)
    rig.settle()

    def stall(operation: str, name: str) -> None:
        if operation == "head":
            gate(operation, name)
            raise StoreError(f"{operation} {name}: no answer", cause="timeout")

    store.before = stall
    rig.ask("a", keys)
    rig.flush()
    rig.wait_for(lambda: 1 if len(store.names("head")) == 16 else None)
    rig.ahead_s += 21.0
    rig.flush()
    assert rig.tier.trouble == "timeout"
    store.before = answer
    rig.ahead_s += 2.0
    rig.wait_for(lambda: 1 if rig.tier.trouble == "none" else None)
    gate.open()
    rig.settle()
    assert rig.tier.trouble == "none"
    assert caplog.text.count("disabled (timeout)") == 1
    assert rig.hits("b", keys) == 4096


def test_a_manifest_that_is_not_written_for_ever_keeps_no_trial_back(make: MakeRig, store: MemoryStore) -> None:
    rig, gate = make(), Gate()
    store.before = lambda operation, name: gate(operation, name) if operation == "write" else None
    rig.flush()
    while ("write", manifest_name(rig.namespace.name)) not in store.calls:
        time.sleep(0.001)
    store.before = refuse
    assert rig.hits("a", keys_of(100)) == 0
    assert not rig.tier.in_use
    store.before = answer
    rig.ahead_s = 5.0
    rig.wait_for(lambda: 1 if rig.tier.in_use else None)
    gate.open()


def test_a_search_that_nobody_waits_for_ends(make: MakeRig, store: MemoryStore) -> None:
    rig, keys = make(threads=1), keys_of(100)
    gate = store.before = Gate()
    rig.ask("a", keys)
    rig.ask("b", keys)
    rig.flush()
    rig.tier.forget_request("a")
    assert rig.tier.is_looking
    rig.tier.forget_request("b")
    assert not rig.tier.is_looking
    gate.open()
    rig.settle()
    assert rig.heads() <= 1


def test_errors_here_and_there_delay_but_do_not_lie(make: MakeRig, store: MemoryStore) -> None:
    """Every third question fails. No absence is remembered for it, and finally all chunks are found."""
    calls = iter(range(10**6))

    def stumble(operation: str, name: str) -> None:
        if next(calls) % 3 == 2:
            raise StoreError("slow down", cause="throttled")

    rig, keys = make(threads=1), keys_of(200)
    rig.put(*keys[:150])
    store.before = stumble
    assert rig.hits("a", keys) == 150


def test_an_error_that_should_not_be_ends_nothing(
    make: MakeRig, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    def stumble(operation: str, name: str) -> None:
        raise ZeroDivisionError("secret")

    rig, keys = make(threads=1), keys_of(2)
    rig.put(*keys)
    store.before = stumble
    assert rig.hits("a", keys) == 0
    assert "should not be" in caplog.text
    store.before = answer
    rig.wait_for(lambda: 1 if rig.tier.in_use and rig.hits("b", keys) == 2 else None)


def test_a_request_that_was_not_answered_doubts_the_store(make: MakeRig, store: MemoryStore) -> None:
    """No answer in time, and none at all while the tier is disabled, say nothing of what is there; an absence does."""
    rig, keys = make(timeout="20s"), keys_of(8)
    rig.put(*keys[:4])
    assert rig.hits("answered", keys) == 4
    assert rig.tier.answered("answered")
    gate = store.before = Gate()
    assert rig.ask("late", keys_of(8, first=100))[0] is Lookup.RETRY
    rig.ahead_s += 21.0
    assert rig.hits("late", keys_of(8, first=100)) == 0
    gate.open()
    assert rig.tier.answered("late") is False
    rig.ahead_s += 5.0
    rig.wait_for(lambda: 1 if rig.tier.in_use else None)
    store.before = refuse
    rig.wait_for(lambda: 1 if rig.hits("refused", keys_of(8, first=200)) == 0 and not rig.tier.in_use else None)
    assert rig.ask("disabled", keys) == [Lookup.MISS]
    assert rig.tier.answered("disabled") is False
    assert rig.tier.answered("answered")
    store.before = answer
    rig.ahead_s += 5.0
    rig.wait_for(lambda: 1 if rig.tier.in_use else None)
    catalog = Catalog([rig.tier], world_size=1, slot_bytes=lambda key: SLOT, store_backlog_bytes=100 * SLOT)
    assert catalog.reserve(keys[4:], rig.now(), "disabled") is None
    assert catalog.counts == {("unstored_chunks", "unanswered"): 4}
    ticket = catalog.reserve(keys[4:], rig.now(), "answered")
    assert ticket is not None
    catalog.report(ticket.ticket, 1, {}, rig.now())
    rig.tier.forget_request("disabled")
    assert rig.tier.answered("disabled")


# Stores and loads


def test_what_this_server_stores_is_served_without_a_look(make: MakeRig) -> None:
    """A chunk that a load did not bring is stored again at once."""
    rig, keys = make(), keys_of(3)
    assert rig.tier.reserve(keys[2], SLOT, []) is not None
    _store(rig, *keys[:2])
    assert rig.ask("a", keys) == [Lookup.HIT, Lookup.HIT, Lookup.PENDING]
    rig.tier.pin(keys[:2])
    rig.tier.unpin(keys[:2])
    assert rig.tier.after_load(keys[:2], {keys[1]: Outcome.FAILED}, rig.now()) == [keys[1]]
    assert rig.ask("a", keys) == [Lookup.HIT, Lookup.MISS]
    _store(rig, keys[1])
    assert rig.ask("b", keys) == [Lookup.HIT, Lookup.HIT, Lookup.PENDING]
    assert rig.heads() == 0
    rig.tier.abort(keys[2])


def test_while_ranks_cannot_load_one_request_now_and_then_tries(make: MakeRig) -> None:
    """A trial begins with a question, too. A request that finds nothing to load leaves it to the next one."""
    rig, keys = make(), keys_of(50)
    rig.put(*keys)
    assert rig.hits("a", keys) == 50
    catalog = Catalog([rig.tier], world_size=1, slot_bytes=lambda key: SLOT, store_backlog_bytes=100 * SLOT)
    catalog.disable({0}, {0}, rig.now())
    assert not rig.tier.in_use
    for number in range(3):
        assert rig.hits(f"nothing{number}", keys_of(5, 900 + 5 * number)) == 0
    assert rig.ask("b", keys) == [Lookup.HIT] * 50, "the trial"
    for number in range(3):
        assert rig.ask(f"c{number}", keys) == [Lookup.MISS]
    asked = rig.heads()
    assert rig.ask("d", keys_of(1, 950)) == [Lookup.MISS], "nor is it worth a question"
    assert rig.heads() == asked
    assert rig.tier.answered("d"), "what it computes can be stored"
    rig.ahead_s = 6.0
    assert rig.ask("e", keys) == [Lookup.HIT] * 50
    assert rig.ask("d", keys) == [Lookup.MISS]
    catalog.disable((), (), rig.now())
    assert rig.ask("d", keys) == [Lookup.HIT] * 50


def test_while_a_rank_cannot_store_one_chunk_now_and_then_is_tried(make: MakeRig) -> None:
    """Else the other ranks would write shards of chunks that are never whole. Loads go on."""
    rig, keys = make(world_size=2), keys_of(5)
    rig.put(keys[0])
    catalog = Catalog([rig.tier], world_size=2, slot_bytes=lambda key: SLOT, store_backlog_bytes=100 * SLOT)
    catalog.disable({0}, (), rig.now())
    assert rig.hits("a", keys) == 1
    assert catalog.reserve(keys, rig.now()) is None
    for trial in range(2):
        rig.ahead_s += 10.0
        ticket = catalog.reserve(keys, rig.now())
        assert ticket is not None
        assert ticket.keys == (keys[1],), trial
        catalog.report(ticket.ticket, 1, {}, rig.now())
        catalog.report(ticket.ticket, 1, {0: Outcome.FAILED}, rig.now())
    catalog.disable((), (), rig.now())
    ticket = catalog.reserve(keys, rig.now())
    assert ticket is not None
    assert ticket.keys == tuple(keys[1:])
    catalog.report(ticket.ticket, 2, {}, rig.now())


def test_an_answer_older_than_a_store_does_not_undo_it(make: MakeRig, store: MemoryStore) -> None:
    """The question is sent before the chunk is stored; its answer, "absent", comes after."""
    rig, key = make(), key_of(1)
    gate = store.before = Gate()
    rig.ask("a", [key])
    rig.flush()
    while not store.names("head"):
        time.sleep(0.001)
    assert rig.tier.reserve(key, SLOT, []) is not None
    assert rig.tier.commit((key,))
    rig.tier.after_store([key], {}, rig.now())
    gate.open()
    rig.settle()
    assert rig.ask("b", [key]) == [Lookup.HIT]


def test_after_a_reset_only_what_was_stored_since_counts_each_looked_at_itself(
    make: MakeRig, store: MemoryStore
) -> None:
    rig, keys = make(), keys_of(60)
    rig.put(*keys)
    assert rig.hits("a", keys) == 60
    rig.tier.pin([keys[0]])
    rig.tier.clear()
    rig.tier.unpin([keys[0]])
    assert len(store.objects) >= 60, "the others' cache stays"
    assert rig.hits("b", keys) == 0
    _store(rig, keys[0])
    assert rig.hits("c", keys) == 1
    # Other servers store them again, except one in the middle, which is as old as the reset.
    for key in [*keys[:30], *keys[31:]]:
        rig.put(key, age_s=-400.0)
    rig.ahead_s = 400.0
    assert rig.hits("d", keys) == 30
    assert len(rig.tier._presence._held) == 0


# Ranks whose shards have other sizes, or none: uneven pipeline stages


FOUR_LAYERS, THREE_LAYERS = 20_480, 16_384
SIZES: Final = [(FOUR_LAYERS, THREE_LAYERS, THREE_LAYERS), (0, THREE_LAYERS, FOUR_LAYERS)]
"""By KV group and rank: three stages, of which the first has no layer of group 1."""
SPACE: Final = namespace_of(3, sizes=SIZES)


@pytest.mark.parametrize("group", [0, 1])
def test_whole_chunks_are_found_whichever_rank_stands_for_them(make: MakeRig, store: MemoryStore, group: int) -> None:
    rig, keys = make(namespace=SPACE), keys_of(60, group=group)
    rig.put(*keys)
    assert rig.hits("a", keys) == 60
    asked = {parsed.shard for name in store.names("head") if (parsed := parse_shard_name(name))}
    assert asked <= set(SPACE.shards(group))
    asked_before = rig.heads()
    assert rig.hits("b", keys_of(5, group=7)) == 0, "the model has no such group"
    assert rig.heads() == asked_before


# The search itself


@pytest.mark.parametrize(("there", "questions"), [({3000}, 32), ({2950, 2999}, 32), (range(1500), 112), ((), 48)])
def test_a_window_is_looked_for_at_the_end_and_then_before_the_end_of_the_prefix(
    there: Collection[int], questions: int
) -> None:
    """A window at the end counts by itself, even if there are holes before it."""
    search, asked = Search(SearchKind.WINDOW, keys_of(3001), certain=WINDOW_KEYS), set[int]()
    while not search.done:
        positions = search.next_round()
        asked.update(positions)
        for position in positions:
            search.answer(position, position in there)
    assert {*range(3001 - WINDOW_KEYS, 3001)} <= asked
    assert search.found_at_end is any(position in asked for position in {2999, 3000} & {*there})
    if isinstance(there, range):
        assert search.boundary == 1500
        assert {*range(1500 - WINDOW_KEYS, 1500)} <= asked
    assert len(asked) <= questions


@settings(max_examples=300, deadline=None)
@given(st.lists(st.booleans(), max_size=400), st.integers(0, 400), st.randoms(use_true_random=False))
def test_holes_in_any_order_of_answers(there: list[bool], certain: int, random: object) -> None:
    """No key at or after a known absent one counts. The last keys before the boundary are asked about one by one."""
    search = Search(SearchKind.CHAIN, keys_of(len(there)), certain)
    absent, asked = set[int](), set[int]()
    while not search.done:
        positions = search.next_round()
        assert positions
        assert not asked & {*positions}
        asked.update(positions)
        random.shuffle(positions)  # type: ignore[attr-defined]
        for position in positions:
            search.answer(position, there[position])
            if not there[position]:
                absent.add(position)
            assert search.boundary <= min(absent, default=len(there))
    last = range(max(0, search.boundary - max(certain, 1)), search.boundary)
    assert all(there[position] for position in last)
    assert {*last} <= asked
    if all(there):
        assert search.boundary == len(there)
