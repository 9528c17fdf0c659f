"""Prefetch over the tiers' real indexes: which chunks are read into memory before a request asks, from which tier, how
many at a time, and that nothing is held afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from nixl_offload.catalog import moves
from nixl_offload.catalog.catalog import MoveTicket
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.tiers.shared.tier import SharedTier
from nixl_offload.tiers.slot_tier import MemoryTier
from nixl_offload.types import Key, Lookup, LookupContext, Outcome
from tests.unit.catalog_rig import BUCKET, FILE, MEMORY, SLOT, Chain, MakeChain, chains, key, keys
from tests.unit.shared_rig import WAIT_S, namespace_of

CORRUPT, TAINTED = Outcome.CORRUPT, Outcome.TAINTED


make = pytest.fixture(chains)


def on_file_only(chain: Chain, *numbers: int) -> None:
    """Put chunks into the slab alone."""
    chain.store(*numbers)
    chain.write_through()
    for number in numbers:
        chain.tiers[MEMORY].drop(key(number))
        assert chain.holders(number) == [FILE]


def foretell(
    chain: Chain, *numbers: int, is_prefix: bool = True, groups: int = 1, allowed: frozenset[int] | None = None
) -> None:
    end_tokens = range(256, 256 * len(numbers) + 1, 256)
    chain.catalog.moves.prefetch(keys(*numbers), end_tokens, chain.now_s, allowed, is_prefix=is_prefix, groups=groups)


def begun(chain: Chain) -> list[MoveTicket]:
    return [grant for grant in chain.begin() if grant.targets[0].tier == MEMORY]


def iter_begun(chain: Chain) -> Iterator[MoveTicket]:
    """Yield each prefetch that begins until none waits, and end it with OK."""
    while grants := begun(chain):
        for grant in grants:
            yield grant
            chain.report(grant.ticket)


def bring(chain: Chain, outcome: Outcome = Outcome.OK) -> list[tuple[bytes, int]]:
    """Begin the prefetches that may begin, and end them like this; return key and source of each chunk."""
    brought = []
    for grant in begun(chain):
        brought += list(zip(grant.keys, [source.tier for source in grant.sources], strict=True))
        chain.report(grant.ticket, {} if outcome is Outcome.OK else dict.fromkeys(range(len(grant.keys)), outcome))
    return brought


def test_a_prefetched_prefix_is_evicted_from_its_end(make: MakeChain) -> None:
    """Whether its chunks were in memory or were read, and with any number of tickets."""
    chain = make(memory_slots=8, write_through_backlog_slots=8)
    chain.store(1, 2, 3, 4)
    while chain.catalog.moves.has_pending:
        chain.write_through()
    for number in (1, 2, 3):
        chain.tiers[MEMORY].drop(key(number))
    foretell(chain, 1, 2, 3, 4)
    assert [len(grant.keys) for grant in iter_begun(chain)] == [1, 1, 1]
    for number in range(10, 16):
        chain.store(number)
        chain.write_through()
    assert [MEMORY in chain.holders(number) for number in (1, 2, 3, 4)] == [True, True, False, False]


def test_a_prefetched_prefix_is_touched_once(make: MakeChain, monkeypatch: pytest.MonkeyPatch) -> None:
    """If each of its tickets touched all of it, a long prompt would cost the square of its length."""
    chain = make(memory_slots=64, file_slots=32, write_through_backlog_slots=4)
    for number in range(1, 13):
        on_file_only(chain, number)
    foretell(chain, *range(1, 25))
    touched: list[Key] = []
    for tier in chain.tiers:
        monkeypatch.setattr(tier, "touch", touched.extend)
    assert len(list(iter_begun(chain))) == 12
    assert touched == [*keys(*range(1, 13)), *keys(*range(12, 0, -1))], "as it was looked up, and when all has come"


def test_one_that_memory_has_no_slot_for_holds_up_no_other(make: MakeChain, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a model with two sizes of chunks. The chunk is read once there is room."""
    chain = make(memory_slots=4, large=(11, 12))
    for number in (11, 12, 13):
        on_file_only(chain, number)
    chain.store(1, 2, 3)
    chain.write_through()
    load = chain.catalog.prepare_load(keys(1, 2, 3), chain.now_s)
    foretell(chain, 11, 12, groups=2)
    foretell(chain, 13, groups=2)
    reserve, asked = chain.tiers[MEMORY].reserve, list[Key]()
    monkeypatch.setattr(chain.tiers[MEMORY], "reserve", lambda key, *rest: asked.append(key) or reserve(key, *rest))
    assert bring(chain) == [(key(13), FILE)]
    assert asked == keys(11, 13), "memory is asked for a slot of a size once in a step"
    chain.report(load.ticket)
    assert bring(chain)[0] == (key(11), FILE)


def test_a_hit_is_fetched_for_a_request_that_waits(make: MakeChain, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as half of memory goes, and no longer than until the request has ended."""
    chain = make(memory_slots=8, file_slots=32, write_through_backlog_slots=2)
    monkeypatch.setattr(moves, "FETCHED_AT_ONCE", 2)
    for number in range(1, 9):
        on_file_only(chain, number)
    own, now_s = chain.catalog.moves, chain.now_s
    assert not own.fetch("large", keys(1, 2, 3, 4, 5), now_s, None), "more than half of memory"
    assert not own.fetch("other tiers", keys(1), now_s, {FILE})
    assert own.fetch("a", keys(1, 2, 9), now_s, None)
    assert own.fetch("b", keys(3, 4), now_s, None)
    assert own.fetch("like b", keys(3, 4), now_s, None), "counted once"
    assert not own.fetch("c", keys(5), now_s, None), "too many wait"
    [first, second] = begun(chain)
    assert (first.keys, second.keys) == ((key(1),), (key(2),))
    assert [chain.catalog.lookup(key(at), now_s) for at in (1, 3)] == [Lookup.PENDING, Lookup.HIT]
    assert chain.catalog.leading_hits(keys(3, 4, 1)) == 2, "memory is about to have it"
    chain.report(first.ticket)
    own.end_fetch("b")
    assert [own.awaits_fetch(name, now_s) for name in ("a", "b")] == [True, False]
    chain.report(second.ticket, {0: Outcome.FAILED})
    assert chain.holders(2) == [], "else its request would try the same once more"
    assert not own.awaits_fetch("a", now_s)
    assert begun(chain) == []
    assert not own.fetch("c", keys(1), now_s, None), "memory has it"


def test_only_so_many_are_under_way_at_a_time(make: MakeChain, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of write-throughs, but at least some."""
    monkeypatch.setattr(moves, "FETCHED_AT_ONCE", 2)
    for slots, at_once in ((4, 4), (1, 2)):
        chain = make(memory_slots=64, file_slots=32, write_through_backlog_slots=slots)
        for number in range(1, 13):
            on_file_only(chain, number)
        foretell(chain, *range(1, 13))
        found: list[Key] = []
        while chain.catalog.moves.has_pending:
            grants = begun(chain)
            assert sum(len(grant.keys) for grant in grants) == at_once
            assert begun(chain) == [], "the next waits for one to end"
            for grant in grants:
                found += grant.keys
                chain.report(grant.ticket)
            chain.now_s += moves.PATIENCE_S - 1.0  # a prefetch that makes progress is not given up
        assert found == keys(*range(1, 13))
        chain.catalog.clear()


def test_one_that_gets_no_slot_for_too_long_is_dropped(make: MakeChain) -> None:
    chain = make(memory_slots=2)
    on_file_only(chain, 11, 12)
    chain.store(1, 2)
    chain.write_through()
    load = chain.catalog.prepare_load(keys(1, 2), chain.now_s)
    foretell(chain, 11)
    foretell(chain, 12)
    assert bring(chain) == []
    assert chain.catalog.moves.has_pending
    chain.now_s += moves.PATIENCE_S
    assert bring(chain) == []
    assert not chain.catalog.moves.has_pending
    assert chain.told(MEMORY) == {"refused": 2}
    foretell(chain, 11)
    assert bring(chain) == []
    chain.report(load.ticket)
    assert bring(chain) == [(key(11), FILE)], "once there is room"


def test_a_prefix_ends_where_a_chunk_is_in_no_tier_that_is_allowed(make: MakeChain) -> None:
    chain = make()
    on_file_only(chain, 1, 3, 5)
    foretell(chain, 1, allowed=frozenset({MEMORY}))
    assert bring(chain) == []
    foretell(chain, 1, 2, 3)
    assert bring(chain) == [(key(1), FILE)]
    foretell(chain, 5, 4, 3, is_prefix=False)
    assert bring(chain) == [(key(5), FILE), (key(3), FILE)], "a window has no beginning"


def test_a_bucket_is_asked_first_and_then_read(make: MakeChain) -> None:
    """Chunks are found by a search as for a request, and also written to the slab, like promoted ones."""
    chain = make(buckets=1)
    for number in (1, 2):
        chain.store_of_bucket.put(shard_name(namespace_of().name, key(number), 0))
    foretell(chain, 1, 2, 3)
    found: list[tuple[bytes, int]] = []
    for _ in range(2000):
        found += bring(chain)
        chain.catalog.on_step(chain.now_s)
        if not chain.catalog.moves.has_pending:
            break
        chain.wait_a_moment()
    assert found == [(key(1), BUCKET), (key(2), BUCKET)]
    bucket = chain.tiers[BUCKET]
    assert isinstance(bucket, SharedTier)
    assert len(bucket._lookups) == 0, "nothing is remembered of who has asked"
    for ticket in [*chain.open]:
        chain.report(ticket)
    assert chain.holders(1) == [MEMORY, FILE, BUCKET]


def test_the_trial_of_a_tier_that_cannot_be_loaded_from_is_left_to_a_request(make: MakeChain) -> None:
    chain = make(buckets=1)
    chain.store(1)
    chain.write_through()
    for tier in (MEMORY, FILE):
        chain.tiers[tier].drop(key(1))
    chain.catalog.disable((), {BUCKET}, chain.now_s)
    foretell(chain, 1)
    assert bring(chain) == []
    assert chain.catalog.lookup(key(1), chain.now_s, LookupContext("a", 16)) is Lookup.HIT
    assert chain.catalog.lookup(key(1), chain.now_s, LookupContext("b", 16)) is Lookup.MISS


def test_a_bucket_that_does_not_answer_holds_up_no_other(make: MakeChain) -> None:
    chain = make(buckets=1)
    on_file_only_with_bucket = (11, 12)
    chain.store(*on_file_only_with_bucket)
    chain.write_through()
    for number in on_file_only_with_bucket:
        chain.tiers[MEMORY].drop(key(number))
    foretell(chain, 1, 2)  # nothing is known of these: the bucket is asked, and nobody flushes
    foretell(chain, *on_file_only_with_bucket)
    assert bring(chain) == [(key(11), FILE), (key(12), FILE)]
    assert chain.catalog.moves.has_pending
    chain.now_s += moves.PATIENCE_S
    assert bring(chain) == []
    assert not chain.catalog.moves.has_pending, "foretold too long ago"


def test_a_step_without_looks_left_gives_no_search_up(make: MakeChain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two long prefixes takes all lookups of a step; a slow bucket answers both nevertheless."""
    monkeypatch.setattr(moves, "MAX_LOOKED_UP", 4)
    chain = make(buckets=1, memory_slots=64)
    prompts = (range(1, 7), range(11, 17))
    for number in (*prompts[0], *prompts[1]):
        chain.store_of_bucket.put(shard_name(namespace_of().name, key(number), 0))
    answers = threading.Event()
    chain.store_of_bucket.before = lambda operation, name: answers.wait(WAIT_S)
    for numbers in prompts:
        foretell(chain, *numbers)
    bucket = chain.tiers[BUCKET]
    assert isinstance(bucket, SharedTier)
    for _ in range(6):
        assert begun(chain) == []
        bucket.on_step(chain.now_s)
    assert len(bucket._lookups) == 2, "both go on, however many steps the bucket takes"
    answers.set()
    found: set[Key] = set()
    while chain.catalog.moves.has_pending:
        found.update(brought for brought, _ in bring(chain))
        chain.catalog.on_step(chain.now_s)
        chain.wait_a_moment()
    assert found == {key(number) for numbers in prompts for number in numbers}


def test_the_groups_of_a_prompt_share_what_it_takes_of_memory(make: MakeChain) -> None:
    """If each took half, the last would evict the first, and the prompt could not be loaded."""
    chain = make(memory_slots=8)
    for first in (1, 5, 9):
        on_file_only(chain, *range(first, first + 4))
    for first in (1, 7):
        foretell(chain, *range(first, first + 6), groups=2)
    assert bring(chain) == [(key(number), FILE) for number in (1, 2, 7, 8)]
    assert not chain.catalog.moves.has_pending


@pytest.mark.parametrize(("outcome", "holders", "retired_bytes"), [(CORRUPT, [], 0), (TAINTED, [FILE], SLOT)])
def test_a_damaged_chunk_is_gone_at_its_source_and_a_tainted_slot_in_memory(
    make: MakeChain, outcome: Outcome, holders: list[int], retired_bytes: int
) -> None:
    chain = make(memory_slots=2)
    on_file_only(chain, 1)
    foretell(chain, 1)
    bring(chain, outcome)
    assert chain.holders(1) == holders
    assert (chain.tiers[FILE].state(key(1)) is None) == (not holders), "it may be stored anew at once"
    memory = chain.tiers[MEMORY]
    assert isinstance(memory, MemoryTier)
    assert memory.statistics().retired_bytes == retired_bytes


def test_the_oldest_of_too_many_is_dropped(make: MakeChain) -> None:
    chain = make()
    on_file_only(chain, 1)
    foretell(chain, 1)
    for _ in range(moves.MAX_PREFETCHES):
        foretell(chain, 99)
    assert bring(chain) == []
    assert chain.holders(1) == [FILE]
    assert chain.catalog.counts == {("hints", "prefetch", "overflow"): 1}
    memory_alone = make(file_slots=0)
    foretell(memory_alone, 1)
    assert not memory_alone.catalog.moves.has_pending, "there is nothing to read it from"
