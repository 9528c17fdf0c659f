"""Prefetch over the tiers' real books: which chunks are read into memory before anybody asks, from where, how many at
a time, and what is left in anybody's hands afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nixl_offload.catalog import MoveTicket, prefetch
from nixl_offload.tiers.shared.naming import shards_of
from nixl_offload.tiers.shared.tier import SharedTier
from nixl_offload.types import Key, Outcome
from tests.unit.catalog_rig import BUCKET, FILE, MEMORY, SLOT, Chain, MakeChain, chains, key, keys
from tests.unit.shared_rig import WAIT_S, namespace_of


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeChain]:
    with chains(tmp_path) as build:
        yield build


def on_file_only(chain: Chain, *numbers: int) -> None:
    """Let chunks be in the slab and nowhere else."""
    chain.store(*numbers)
    chain.write_through()
    for number in numbers:
        chain.tiers[MEMORY].drop(key(number))
        assert chain.holders(number) == [FILE]


def foretell(
    chain: Chain, *numbers: int, is_prefix: bool = True, groups: int = 1, allowed: frozenset[int] | None = None
) -> None:
    end_tokens = range(256, 256 * len(numbers) + 1, 256)
    chain.catalog.prefetch(keys(*numbers), end_tokens, chain.now_s, allowed, is_prefix=is_prefix, groups=groups)


def begun(chain: Chain) -> list[MoveTicket]:
    return [grant for grant in chain.begin() if grant.targets[0].tier == MEMORY]


def bring(chain: Chain, outcome: Outcome = Outcome.OK) -> list[tuple[bytes, int]]:
    """Begin what may begin and let it end so; return key and source of each chunk."""
    brought = []
    for grant in begun(chain):
        brought += list(zip(grant.keys, [source.tier for source in grant.sources], strict=True))
        chain.report(grant.ticket, {} if outcome is Outcome.OK else dict.fromkeys(range(len(grant.keys)), outcome))
    return brought


def test_a_step_looks_up_and_begins_as_much_as_it_may(make: MakeChain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four looks and four marks with one to spare; then two chunks a step."""
    monkeypatch.setattr(prefetch, "MAX_LOOKED_UP", 9)
    chain = make(memory_slots=16)
    on_file_only(chain, 1, 2, 3, 4)
    foretell(chain, 1, 2, 3, 4)
    assert [brought for brought, _ in bring(chain)] == keys(1, 2, 3, 4)
    assert not chain.catalog.has_pending_writes
    monkeypatch.setattr(prefetch, "MAX_BEGUN", 2)
    on_file_only(chain, 11, 12, 13)
    foretell(chain, 11, 12, 13)
    assert [[brought for brought, _ in bring(chain)] for _ in range(2)] == [keys(11, 12), keys(13)]


def test_a_prefetched_prefix_is_evicted_from_its_end(make: MakeChain) -> None:
    chain = make(memory_slots=8)
    chain.store(1, 2, 3)
    chain.write_through()
    foretell(chain, 1, 2, 3)
    assert bring(chain) == []
    for number in range(10, 16):
        chain.store(number)
        chain.write_through()
    assert [MEMORY in chain.holders(number) for number in (1, 2, 3)] == [True, True, False]


def test_every_rank_has_to_have_it(make: MakeChain) -> None:
    chain = make(world_size=2)
    on_file_only(chain, 1)
    foretell(chain, 1)
    [grant] = begun(chain)
    assert chain.catalog.report(grant.ticket, 1, {}, chain.now_s) is None
    assert chain.holders(1) == [FILE]
    assert chain.catalog.report(grant.ticket, 1, {}, chain.now_s) is not None
    assert chain.holders(1) == [MEMORY, FILE]


def test_a_prefix_ends_where_a_chunk_is_nowhere(make: MakeChain) -> None:
    chain = make()
    on_file_only(chain, 1, 3, 5)
    foretell(chain, 1, 2, 3)
    assert bring(chain) == [(key(1), FILE)]
    foretell(chain, 5, 4, 3, is_prefix=False)
    assert bring(chain) == [(key(5), FILE), (key(3), FILE)], "a window has no beginning"


def test_only_tiers_that_are_allowed_are_read(make: MakeChain) -> None:
    chain = make()
    on_file_only(chain, 1)
    foretell(chain, 1, allowed=frozenset({MEMORY}))
    assert bring(chain) == []


def test_a_bucket_is_asked_first_and_then_read(make: MakeChain) -> None:
    """Found by a search as for a request, and written to the slab as well, as what a load leaves in memory is."""
    chain = make(bucket=True)
    for number in (1, 2):
        for shard in shards_of(namespace_of(), key(number)):
            chain.store_of_bucket.put(shard.name, shard.size_bytes)
    foretell(chain, 1, 2, 3)
    found: list[tuple[bytes, int]] = []
    for _ in range(2000):
        found += bring(chain)
        chain.catalog.flush(chain.now_s)
        if not chain.catalog._prefetches.has_pending:
            break
        chain.wait_a_moment()
    assert found == [(key(1), BUCKET), (key(2), BUCKET)]
    bucket = chain.tiers[BUCKET]
    assert isinstance(bucket, SharedTier)
    assert len(bucket._lookups) == 0, "nothing is remembered of who has asked"
    chain.write_through()
    assert chain.holders(1) == [MEMORY, FILE, BUCKET]


def test_a_bucket_that_does_not_answer_holds_up_no_other(make: MakeChain) -> None:
    chain = make(bucket=True)
    on_file_only_with_bucket = (11, 12)
    chain.store(*on_file_only_with_bucket)
    chain.write_through()
    for number in on_file_only_with_bucket:
        chain.tiers[MEMORY].drop(key(number))
    foretell(chain, 1, 2)  # of these nothing is known: the bucket is asked, and nobody flushes
    foretell(chain, *on_file_only_with_bucket)
    assert bring(chain) == [(key(11), FILE), (key(12), FILE)]
    assert chain.catalog.has_pending_writes
    chain.now_s += prefetch.PATIENCE_S
    assert bring(chain) == []
    assert not chain.catalog.has_pending_writes, "foretold too long ago"


def test_a_step_without_looks_left_gives_no_search_up(make: MakeChain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two long prefixes takes all that a step may look up; a slow bucket answers both all the same."""
    monkeypatch.setattr(prefetch, "MAX_LOOKED_UP", 4)
    chain = make(bucket=True, memory_slots=64)
    prompts = (range(1, 7), range(11, 17))
    for number in (*prompts[0], *prompts[1]):
        for shard in shards_of(namespace_of(), key(number)):
            chain.store_of_bucket.put(shard.name, shard.size_bytes)
    answers = threading.Event()
    chain.store_of_bucket.before = lambda operation, name: assert_in_time(answers)
    for numbers in prompts:
        foretell(chain, *numbers)
    bucket = chain.tiers[BUCKET]
    assert isinstance(bucket, SharedTier)
    for _ in range(6):
        assert begun(chain) == []
        bucket.flush(chain.now_s)
    assert len(bucket._lookups) == 2, "both go on, however many steps the bucket takes"
    answers.set()
    found: set[Key] = set()
    while chain.catalog._prefetches.has_pending:
        found.update(brought for brought, _ in bring(chain))
        chain.catalog.flush(chain.now_s)
        chain.wait_a_moment()
    assert found == {key(number) for numbers in prompts for number in numbers}


def assert_in_time(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


def test_who_waits_for_a_slot_comes_before_who_waits_for_an_answer(make: MakeChain) -> None:
    chain = make(bucket=True, memory_slots=1)
    chain.store(11)
    chain.write_through()
    chain.tiers[MEMORY].drop(key(11))
    chain.store(1)
    chain.write_through()
    load = chain.catalog.prepare_load(keys(1), chain.now_s)
    foretell(chain, 99)  # nobody flushes: the bucket does not answer
    foretell(chain, 11)
    assert bring(chain) == []
    assert [prefetch.keys for prefetch in chain.catalog._prefetches._waiting] == [keys(11), keys(99)]
    chain.report(load.ticket)
    chain.catalog.clear()


def test_one_that_memory_has_no_slot_for_holds_up_no_other(make: MakeChain, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes first again once there is room."""
    chain = make(memory_slots=2)
    on_file_only(chain, 11, 12)
    chain.store(1, 2)
    chain.write_through()
    load = chain.catalog.prepare_load(keys(1, 2), chain.now_s)
    foretell(chain, 11)
    foretell(chain, 1, 2)
    foretell(chain, 12)
    reserve, asked = chain.tiers[MEMORY].reserve, list[Key]()
    monkeypatch.setattr(chain.tiers[MEMORY], "reserve", lambda key, *rest: asked.append(key) or reserve(key, *rest))
    assert bring(chain) == []
    assert asked == keys(11), "memory is asked for a slot of that size once in a step"
    assert [prefetch.keys for prefetch in chain.catalog._prefetches._waiting] == [keys(11), keys(12)]
    chain.report(load.ticket)
    assert bring(chain) == [(key(11), FILE), (key(12), FILE)]
    assert not chain.catalog.has_pending_writes


def test_one_that_gets_no_slot_for_too_long_is_dropped(make: MakeChain) -> None:
    chain = make(memory_slots=1)
    on_file_only(chain, 11)
    chain.store(1)
    chain.write_through()
    load = chain.catalog.prepare_load(keys(1), chain.now_s)
    foretell(chain, 11)
    assert bring(chain) == []
    assert chain.catalog.has_pending_writes
    chain.now_s += prefetch.PATIENCE_S
    assert bring(chain) == []
    assert not chain.catalog.has_pending_writes
    assert chain.catalog.counts().prefetches_given_up == {"late": 1}
    chain.report(load.ticket)


def test_only_so_many_are_under_way_at_a_time(make: MakeChain) -> None:
    chain = make(memory_slots=64, write_through_backlog_slots=16)
    numbers = range(1, 21)
    chain.store(*numbers)
    while chain.catalog.has_pending_writes:
        chain.write_through()
    for number in numbers:
        chain.tiers[MEMORY].drop(key(number))
    foretell(chain, *numbers)
    found = []
    while chain.catalog.has_pending_writes:
        [grant] = begun(chain)
        assert len(grant.keys) == 4, "a quarter of what may be written through at a time"
        assert begun(chain) == [], "the next waits for one to end"
        found += grant.keys
        chain.report(grant.ticket)
    assert found == keys(*numbers)


def test_one_is_under_way_however_little_may_be(make: MakeChain) -> None:
    chain = make(write_through_backlog_slots=1)
    on_file_only(chain, 1)
    on_file_only(chain, 2)
    foretell(chain, 1, 2)
    assert [bring(chain) for _ in range(2)] == [[(key(1), FILE)], [(key(2), FILE)]]


def test_one_that_gets_on_is_not_given_up_however_long_it_takes(make: MakeChain) -> None:
    chain = make(write_through_backlog_slots=4)
    for number in (1, 2, 3, 4):
        on_file_only(chain, number)
    foretell(chain, 1, 2, 3, 4)
    brought = []
    for _ in range(4):
        brought += bring(chain)
        chain.now_s += prefetch.PATIENCE_S - 1.0
    assert brought == [(key(number), FILE) for number in (1, 2, 3, 4)]


def test_what_had_to_make_room_is_told(make: MakeChain) -> None:
    chain = make(memory_slots=2)
    on_file_only(chain, 1)
    chain.store(2, 3)
    chain.write_through()
    chain.catalog.take_changes()
    foretell(chain, 1)
    assert bring(chain) == [(key(1), FILE)]
    assert [(change.keys, change.removed) for change in chain.catalog.take_changes()] == [
        ((key(3),), True),
        ((key(1),), False),
    ]


def test_the_groups_of_a_prompt_share_what_it_takes_of_memory(make: MakeChain) -> None:
    """If each took half, the last would evict the first, and the prompt could not be loaded."""
    chain = make(memory_slots=8)
    for first in (1, 5, 9):
        on_file_only(chain, *range(first, first + 4))
    for first in (1, 7):
        foretell(chain, *range(first, first + 6), groups=2)
    assert bring(chain) == [(key(number), FILE) for number in (1, 2, 7, 8)]
    assert not chain.catalog.has_pending_writes


def test_damage_is_found_and_the_chunk_is_gone_at_its_source(make: MakeChain) -> None:
    chain = make()
    on_file_only(chain, 1)
    foretell(chain, 1)
    bring(chain, Outcome.CORRUPT)
    assert chain.holders(1) == []
    assert chain.tiers[FILE].state(key(1)) is None, "it may be stored anew at once"


def test_a_slot_that_may_still_be_written_to_is_not_used_again(make: MakeChain) -> None:
    chain = make(memory_slots=2)
    on_file_only(chain, 1)
    foretell(chain, 1)
    bring(chain, Outcome.TAINTED)
    assert chain.holders(1) == [FILE]
    assert chain.tiers[MEMORY].statistics().slots.retired_bytes == SLOT  # type: ignore[union-attr]


def test_a_reset_in_the_midst_serves_nothing_afterwards(make: MakeChain) -> None:
    chain = make()
    on_file_only(chain, 1, 2)
    foretell(chain, 1, 2)
    [grant] = begun(chain)
    foretell(chain, 1, 2)
    chain.catalog.clear()
    chain.report(grant.ticket)
    assert chain.holders(1) == chain.holders(2) == []
    assert bring(chain) == []


def test_with_memory_alone_nothing_waits(make: MakeChain) -> None:
    """Nor is anything begun there in any step."""
    chain = make(file_slots=0)
    chain.store(1)
    foretell(chain, 1, 2)
    assert not chain.catalog.has_pending_writes


def test_the_oldest_of_too_many_is_dropped(make: MakeChain) -> None:
    chain = make()
    on_file_only(chain, 1)
    foretell(chain, 1)
    for _ in range(prefetch.MAX_PREFETCHES):
        foretell(chain, 99)
    assert bring(chain) == []
    assert chain.holders(1) == [FILE]
    assert chain.catalog.counts().prefetches_given_up == {"overflow": 1}


def test_of_no_chunks_nothing_waits(make: MakeChain) -> None:
    chain = make()
    foretell(chain)
    assert not chain.catalog.has_pending_writes
