"""The prober: each key is asked about once at a time, questions overtake tasks, and nobody waits for a hung store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from nixl_offload.tiers.shared.background_tasks import Discard
from nixl_offload.tiers.shared.chain_search import ChainSearch
from nixl_offload.tiers.shared.naming import StoredShard
from nixl_offload.tiers.shared.prober import MAX_TASKS, Prober
from nixl_offload.tiers.shared.prober_events import Event, ProbeAnswer, ProbeResult, SearchEnd, TrialEnd
from nixl_offload.types import Key
from tests.unit.shared_rig import SLOT, WAIT_S, Gate, MemoryStore, keys_of, refuse

MakeProber = Callable[..., Prober]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def make(store: MemoryStore) -> Iterator[MakeProber]:
    made: list[Prober] = []

    def build(threads: int = 4, **arguments: object) -> Prober:
        made.append(Prober(store, witness_of=_witness, threads=threads, **arguments))  # type: ignore[arg-type]
        return made[-1]

    yield build
    if isinstance(store.before, Gate):
        store.before.open()
    store.before = lambda operation, name: None
    for prober in made:
        prober.close()


def _name(key: Key) -> str:
    return key.hex()


def _witness(key: Key) -> StoredShard:
    return StoredShard(_name(key), SLOT)


def _put(store: MemoryStore, *keys: Key, size_bytes: int = SLOT, age_s: float = 0.0) -> None:
    for key in keys:
        store.put(_name(key), size_bytes, age_s)


def _collect(prober: Prober, until: type, count: int = 1) -> list[Event]:
    """Drain until ``count`` events of type ``until`` have come."""
    events: list[Event] = []
    deadline_s = time.monotonic() + WAIT_S
    while sum(isinstance(event, until) for event in events) < count:
        assert time.monotonic() < deadline_s, "nothing comes"
        events += prober.drain(7)
        time.sleep(0.0005)
    return events


def _sights(events: list[Event]) -> dict[Key, ProbeResult]:
    return {event.key: event.found for event in events if isinstance(event, ProbeAnswer)}


def test_a_search_asks_round_by_round_and_tells_each_answer_and_the_boundary(
    make: MakeProber, store: MemoryStore
) -> None:
    keys = keys_of(4096)
    _put(store, *keys[:3000])
    prober = make()
    prober.search(7, keys, ChainSearch(len(keys)))
    events = _collect(prober, SearchEnd)
    (end,) = (event for event in events if isinstance(event, SearchEnd))
    assert (end.number, end.boundary) == (7, 3000)
    sights = _sights(events)
    assert sights[keys[2999]] is ProbeResult.PRESENT
    assert sights[keys[3000]] is ProbeResult.ABSENT
    counts = prober.counts()
    assert counts.heads == len(store.names("head")) == len(set(store.names("head"))) <= 64
    assert counts.rounds <= 4
    assert prober.idle


def test_what_an_object_must_be_to_count(make: MakeProber, store: MemoryStore) -> None:
    good, short, long, old, cleared, gone = keys_of(6)
    _put(store, good)
    _put(store, short, size_bytes=SLOT - 1)
    _put(store, long, size_bytes=SLOT + 1)
    _put(store, old, age_s=101.0)
    _put(store, cleared, age_s=60.0)
    prober = make(ttl_s=100.0)
    prober.since_s = time.time() - 50.0
    prober.probe([good, short, long, old, cleared, gone])
    assert _sights(_collect(prober, ProbeAnswer, 6)) == {
        good: ProbeResult.PRESENT,
        short: ProbeResult.DAMAGED,
        long: ProbeResult.DAMAGED,
        old: ProbeResult.ABSENT,
        cleared: ProbeResult.ABSENT,
        gone: ProbeResult.ABSENT,
    }


def test_a_thread_outlives_an_error_that_should_not_be(
    make: MakeProber, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    def stumble(operation: str, name: str) -> None:
        raise ZeroDivisionError("secret")

    store.before = stumble
    prober = make(threads=1)
    prober.probe(keys_of(2))
    events = _collect(prober, ProbeAnswer, 2)
    assert {event.cause for event in events if isinstance(event, ProbeAnswer)} == {"io"}
    assert {event.message for event in events if isinstance(event, ProbeAnswer)} == {"ZeroDivisionError"}
    assert "should not be" in caplog.text


def test_too_many_tasks_are_refused(make: MakeProber, store: MemoryStore) -> None:
    gate = store.before = Gate()
    prober = make(threads=2)
    taken = sum(
        prober.do(Discard((), ((StoredShard(str(number), 0),),), even_whole=True)) for number in range(MAX_TASKS + 100)
    )
    assert MAX_TASKS <= taken <= MAX_TASKS + 2
    gate.open()


def test_a_trial_goes_before_all_else_and_alone(make: MakeProber, store: MemoryStore) -> None:
    gate = store.before = Gate()
    prober = make(threads=1)
    prober.probe(keys_of(3))
    assert prober.trial("a/manifest")
    assert not prober.trial("a/manifest")
    gate.open()
    events = _collect(prober, TrialEnd)
    assert TrialEnd("") in events
    _collect(prober, ProbeAnswer, 3 - sum(isinstance(event, ProbeAnswer) for event in events))
    assert [name for _, name in store.calls].index("a/manifest") <= 1, "at most the question that was out came first"
    store.before = refuse
    assert prober.trial("a/manifest")
    (end,) = (event for event in _collect(prober, TrialEnd) if isinstance(event, TrialEnd))
    assert end.cause == "unreachable"
