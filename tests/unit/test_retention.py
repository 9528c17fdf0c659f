"""Retain and drop over the tiers' real books: what is retained is not evicted before its time, within a tier's share,
and what is dropped is gone; no pin is left behind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nixl_offload.catalog import Change, catalog
from nixl_offload.types import Outcome
from tests.unit.catalog_rig import BUCKET, FILE, MEMORY, SLOT, Chain, MakeChain, chains, key, keys


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeChain]:
    with chains(tmp_path, at_rest=_at_rest) as build:
        yield build


def _at_rest(chain: Chain) -> None:
    chain.now_s += 100_000.0
    chain.come_to_rest()
    assert not any(chain.catalog.retention.bytes_by_tier)


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
    retain(chain, 0.0, 1)
    retain(chain, 60.0, 1)
    retain(chain, 600.0, 1)
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
    chain = make(memory_slots=16)
    fill(chain, 1, 2, 3, 4, 5)
    monkeypatch.setattr(catalog, "MAX_RETAINED", 5)
    retain(chain, 60.0, 1, 2, 3, 4, 5, 6)
    chain.now_s += 60.0
    retained = []
    for _ in range(3):
        chain.begin()
        retained.append([number for number in range(1, 7) if key(number) in chain.catalog.retention])
    assert retained == [[1, 2, 3], [1], []]


def test_being_renewed_for_ever_costs_no_memory(make: MakeChain) -> None:
    chain, mine = make(), key(1)
    references = sys.getrefcount(mine)
    for number in range(10_000):
        chain.catalog.retention.retain([mine], 60.0 + number, chain.now_s)
    assert sys.getrefcount(mine) - references < 2_000


def test_damage_frees_what_is_retained(make: MakeChain) -> None:
    """Else the chunk could not be stored anew before its time."""
    chain = make(file_slots=0)
    chain.store(1)
    retain(chain, 60.0, 1)
    chain.load(1, failed={0: Outcome.CORRUPT})
    assert chain.tiers[MEMORY].state(key(1)) is None
    assert chain.catalog.retention.bytes_by_tier == [0]
    chain.store(1)
    assert chain.catalog.retention.bytes_by_tier == [SLOT], "and it is retained again"


def test_what_is_dropped_is_gone_from_memory_and_slab_but_not_from_a_bucket(make: MakeChain) -> None:
    chain = make(bucket=True)
    fill(chain, 1, 2)
    retain(chain, 60.0, 2)
    chain.catalog.take_changes()
    load = chain.catalog.prepare_load(keys(1), chain.now_s)
    chain.catalog.drop(keys(3, 2, 1))
    chain.report(load.ticket)
    assert chain.holders(1) == chain.holders(2) == [BUCKET], "what is read then goes with its ticket"
    assert chain.catalog.take_changes() == [
        Change(tier, keys(number), removed=True) for number in (2, 1) for tier in (MEMORY, FILE)
    ]
    assert not any(chain.catalog.retention.bytes_by_tier)


def test_what_is_dropped_while_it_is_written_goes_with_its_ticket(make: MakeChain) -> None:
    chain = make(file_slots=0)
    grant = chain.reserve(1)
    assert grant is not None
    chain.catalog.drop(keys(1))
    chain.report(grant.ticket)
    assert chain.holders(1) == []
