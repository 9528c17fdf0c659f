"""What waiting for a shared tier costs the scheduler's step, counted in lookups; and what questions that hang cost."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from nixl_offload.errors import StoreError
from nixl_offload.types import Lookup
from tests.unit.shared_rig import Gate, MemoryStore, Rig, keys_of


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def rig(store: MemoryStore) -> Iterator[Rig]:
    rig = Rig(store)
    yield rig
    if isinstance(store.before, Gate):
        store.before.open()
    rig.tier._presence.check()
    rig.tier.close()


def test_who_can_wait_no_longer_gets_what_is_known_so_far(rig: Rig, store: MemoryStore) -> None:
    """A bucket that is too slow for all the rounds of a search: one round tells most of a chain."""
    keys = keys_of(4096)
    rig.put(*keys[:3000])
    rounds = iter(range(10**6))
    gate = Gate()

    def slow(operation: str, name: str) -> None:
        if operation == "head" and next(rounds) >= 16:
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


class Stall:
    """As ``before``: what is asked while it lasts hangs until ``drop`` and fails; later questions do not."""

    def __init__(self) -> None:
        self.lasts = True
        self._dropped = threading.Event()

    def __call__(self, operation: str, name: str) -> None:
        if self.lasts and operation == "head":
            self._dropped.wait(60.0)
            raise StoreError(f"{operation} {name}: no answer", cause="timeout")

    def drop(self) -> None:
        self._dropped.set()


@pytest.fixture
def stalled(rig: Rig, store: MemoryStore) -> Iterator[Stall]:
    """The store hangs until the tier is given up; then it is well again, but the old questions hang on."""
    keys = keys_of(4096)
    rig.put(*keys)
    rig.settle()
    stall = store.before = Stall()
    rig.ask("a", keys)
    rig.flush()
    rig.wait_for(lambda: 1 if len(store.names("head")) == 16 else None)
    rig.ahead_s += 21.0
    rig.flush()
    assert rig.tier.trouble == "timeout"
    stall.lasts = False
    yield stall
    stall.drop()


def _openings(rig: Rig) -> int:
    statistics = rig.tier.statistics()
    assert statistics is not None
    return statistics.openings


def test_a_store_that_is_well_again_is_used_at_once_whatever_still_hangs(rig: Rig, stalled: Stall) -> None:
    rig.ahead_s += 2.0
    rig.wait_for(lambda: 1 if rig.tier.trouble == "none" else None)
    assert _openings(rig) == 1


def test_old_questions_that_fail_in_the_end_do_not_close_it_again(rig: Rig, stalled: Stall) -> None:
    rig.ahead_s += 2.0
    rig.wait_for(lambda: 1 if rig.tier.trouble == "none" else None)
    stalled.drop()
    rig.settle()
    assert rig.tier.trouble == "none"
    assert _openings(rig) == 1
    assert rig.hits("b", keys_of(4096)) == 4096
