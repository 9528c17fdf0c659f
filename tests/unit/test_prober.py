"""The prober: each key is asked about once at a time, and nobody waits for a hung store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from nixl_offload.errors import StoreError
from nixl_offload.tiers.shared.chain_search import ChainSearch
from nixl_offload.tiers.shared.lookups import Search, SearchKind
from nixl_offload.tiers.shared.naming import StoredShard
from nixl_offload.tiers.shared.prober import MAX_TASKS, Answer, Event, Prober, Sight
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
        witness_of = lambda key: StoredShard(key.hex(), SLOT)  # noqa: E731
        made.append(Prober(store, witness_of=witness_of, threads=threads, **arguments))  # type: ignore[arg-type]
        return made[-1]

    yield build
    if isinstance(store.before, Gate):
        store.before.open()
    for prober in made:
        prober.close()


def _search(prober: Prober, keys: list[Key], *, each: bool = False) -> Search:
    search = Search(SearchKind.CHAIN, keys, ChainSearch(len(keys), len(keys) if each else 0))
    prober.search(search)
    return search


def _collect(prober: Prober, until: Callable[[list[Event]], bool]) -> list[Event]:
    events: list[Event] = []
    deadline_s = time.monotonic() + WAIT_S
    while not until(events):
        assert time.monotonic() < deadline_s, "nothing comes"
        events += prober.drain(7)
        time.sleep(0.0005)
    return events


def _sights(events: list[Event]) -> dict[Key, Sight | None]:
    return {event.key: event.sight for event in events if isinstance(event, Answer)}


def test_searches_share_questions_and_each_ends_once(make: MakeProber, store: MemoryStore) -> None:
    keys = keys_of(4096)
    for key in keys[:3000]:
        store.put(key.hex())
    prober = make()
    searches = [_search(prober, keys), _search(prober, keys)]
    events = _collect(prober, lambda events: all(search in events for search in searches))
    assert [search.plan.boundary for search in searches] == [3000, 3000]
    assert sum(isinstance(event, Search) for event in events) == 2
    assert (_sights(events)[keys[2999]], _sights(events)[keys[3000]]) == (Sight.PRESENT, Sight.ABSENT)
    assert prober.questions == len(store.names("head")) <= 64
    _collect(prober, lambda _: not prober.is_busy)


def test_a_thread_outlives_an_error_that_should_not_be(
    make: MakeProber, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    def stumble(operation: str, name: str) -> None:
        raise ZeroDivisionError("secret")

    store.before = stumble
    prober = make(threads=1)
    searches = [_search(prober, [key]) for key in keys_of(2)]
    events = _collect(prober, lambda events: all(search in events for search in searches))
    errors = [event.error for event in events if isinstance(event, Answer) and event.error is not None]
    assert [(error.cause, str(error)) for error in errors] == [("io", "ZeroDivisionError")] * 2
    assert all(search.failed for search in searches)
    assert "should not be" in caplog.text


def test_too_many_tasks_are_refused(make: MakeProber, store: MemoryStore) -> None:
    gate = store.before = Gate()
    prober = make(threads=2)
    taken = sum(prober.do(lambda store: store.head("x"), lambda *_: None) for _ in range(MAX_TASKS + 100))
    assert taken == MAX_TASKS
    gate.open()


def test_a_trial_waits_for_nothing_and_goes_alone(make: MakeProber, store: MemoryStore) -> None:
    gate = store.before = Gate()
    prober = make(threads=1)
    ended: list[StoreError | None] = []

    def try_it() -> None:
        prober.try_store(lambda store: store.head("manifest"), lambda _, error: ended.append(error))

    def tell(events: list[Event]) -> bool:
        for event in events:
            if callable(event):
                event()
        return bool(ended)

    _search(prober, keys_of(3), each=True)
    try_it()
    try_it()
    while not store.names("head") or len(store.calls) < 2:
        time.sleep(0.001)
    gate.open()
    _collect(prober, tell)
    assert [name for _, name in store.calls].count("manifest") == 1
    assert ended == [None]
    store.before = refuse
    ended.clear()
    while prober.is_busy:
        time.sleep(0.001)
    try_it()
    _collect(prober, tell)
    assert [error.cause for error in ended if error] == ["unreachable"]
