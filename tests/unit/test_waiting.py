"""What requests that wait for a shared tier cost the scheduler's step: counted in lookups, not in time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nixl_offload.types import Asker, Lookup
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


def test_a_waiting_request_is_told_so_once_a_step(rig: Rig, store: MemoryStore) -> None:
    """A scan goes on after RETRY and stops at MISS: 32 requests of 4,096 keys took half a second of every step."""
    keys = keys_of(4096)
    rig.put(*keys[:3000])
    gate = store.before = Gate()
    assert rig.ask("a", keys) == [Lookup.RETRY] * 4096, "once, so that the whole chain is known"
    rig.flush()
    for _ in range(3):
        assert rig.ask("a", keys) == [Lookup.RETRY, Lookup.MISS]
        assert rig.ask("a", keys) == [Lookup.RETRY, Lookup.MISS], "a second scan in a step repeats the first"
        rig.flush()
    gate.open()
    assert rig.hits("a", keys) == 3000


def test_behind_what_is_known_too(rig: Rig, store: MemoryStore) -> None:
    keys = keys_of(600)
    rig.put(*keys[:500])
    assert rig.hits("a", keys[:100]) == 100
    gate = store.before = Gate()
    rig.ask("b", keys)
    rig.flush()
    assert rig.ask("b", keys) == [*[Lookup.HIT] * 100, Lookup.RETRY, Lookup.MISS]
    gate.open()
    assert rig.hits("b", keys) == 500


def test_a_window_is_scanned_to_its_end(rig: Rig, store: MemoryStore) -> None:
    """From the end of a window on MISS would say that nothing is there."""
    keys = keys_of(50, group=1)
    rig.put(*keys)
    gate = store.before = Gate()
    for _ in range(3):
        now_s = rig.now()
        answers = [rig.tier.lookup(key, Asker("a", 16 * n), now_s) for n, key in reversed([*enumerate(keys, 1)])]
        assert answers == [Lookup.RETRY] * 50
        rig.flush()
    gate.open()
    assert rig.scan("a", keys, 4) == 50
