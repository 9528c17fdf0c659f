"""A shared tier's threads: the prober that asks a store, what it does when nobody waits, and the lookups before it."""

from __future__ import annotations

import time
from collections.abc import Callable

from nixl_offload.errors import StoreError
from nixl_offload.index import State
from nixl_offload.stores.base import Store
from nixl_offload.tiers.shared.chain_search import AskAll, ChainSearch
from nixl_offload.tiers.shared.naming import StoredShard
from nixl_offload.tiers.shared.prober import Prober
from nixl_offload.tiers.shared.prober_events import ProbeAnswer, ProbeResult, SearchEnd, TaskEnd, TrialEnd
from nixl_offload.tiers.shared.tier import RESET_MARGIN_S, SharedTier
from nixl_offload.types import Key, Lookup
from tests.prove.races.exploring import Run, Scenario
from tests.unit.shared_rig import SLOT, MemoryStore, Rig, key_of, keys_of


class _Slow(MemoryStore):
    """Answers after a while, or not at all while it is down."""

    def __init__(self, chance: object) -> None:
        super().__init__()
        self.is_down = False
        self.before = self._before

    def _before(self, operation: str, name: str) -> None:
        time.sleep(0.001)
        if self.is_down:
            raise StoreError(f"{operation} {name}: connection refused", cause="unreachable")


class _Task:
    """Something to do when nobody waits."""

    runs = 0

    def run(self, store: Store) -> None:
        self.runs += 1
        store.head("task")


def _prober(store: Store, threads: int) -> Prober:
    return Prober(store, witness_of=lambda key: StoredShard(key.hex(), SLOT), threads=threads, task_threads=1)


def asking(run: Run) -> None:
    """Searches, questions, a trial and tasks, each of which has to end once; one search is given up."""
    store = _Slow(run.random)
    keys = keys_of(4)
    for key in keys[:2]:
        store.put(key.hex())
    prober = _prober(store, 1)
    tasks = [_Task(), _Task()]
    prober.search(1, keys, ChainSearch(len(keys)))
    assert prober.do(tasks[0])  # type: ignore[arg-type]
    prober.search(2, keys[:2], AskAll(2))
    tried = prober.trial("manifest")
    assert tried
    prober.probe([keys[3]])
    prober.search(3, keys[1:], ChainSearch(3))
    prober.cancel(3)
    events = prober.drain(100)  # among them, perhaps, the end of the search that was given up: it came first
    at_cancel = [event for event in events if isinstance(event, SearchEnd) and event.number == 3]
    assert at_cancel in ([], [SearchEnd(3, 1, 1)]), f"a search that was given up ended: {at_cancel}"
    assert prober.do(tasks[1])  # type: ignore[arg-type]
    end_s = time.monotonic() + 5.0
    while not (prober.idle and not prober._events):
        assert time.monotonic() < end_s, f"it is busy for ever, after {events}"
        events += prober.drain(2)
        time.sleep(0.0005)
    searches = [event for event in events if isinstance(event, SearchEnd) and event not in at_cancel]
    ends = {event.number: event.boundary for event in searches}
    assert sorted(event.number for event in searches) == [1, 2], f"searches: {ends}"
    assert ends == {1: 2, 2: 2}, f"searches ended at {ends}"
    assert sum(isinstance(event, TrialEnd) for event in events) == 1
    assert [task.runs for task in tasks] == [1, 1]
    assert sum(isinstance(event, TaskEnd) for event in events) == 2
    plain = [event for event in events if isinstance(event, ProbeAnswer) and event.key == keys[3]]
    assert plain, "a question was never answered"
    assert all(event.found is ProbeResult.ABSENT for event in plain)
    assert prober.trial("manifest")  # alone: nothing else wakes a thread up
    while not prober.drain(1):
        assert time.monotonic() < end_s, "a trial does not end"
        time.sleep(0.0005)
    prober.close(5.0)


def closing(run: Run) -> None:
    """It is closed while it is asked."""
    store = _Slow(run.random)
    keys = keys_of(3)
    prober = _prober(store, 2)
    prober.search(1, keys, ChainSearch(len(keys)))
    prober.trial("manifest")
    task = _Task()
    prober.do(task)  # type: ignore[arg-type]
    if run.seed % 2:
        time.sleep(0.001)
    prober.probe(keys)
    prober.close(5.0)
    assert not prober._running, "it is closed, and asks"
    assert not prober.do(task), "it is closed, and takes a task"  # type: ignore[arg-type]
    prober.drain(100)
    prober.close(5.0)


def _answers(rig: Rig, request: str, keys: list[Key]) -> list[Lookup]:
    answers = rig.ask(request, keys)
    rig.flush()
    return answers


def lookups(run: Run) -> None:
    """Requests look up prefixes that overlap, some give up, the store goes away and comes back, the cache is reset."""
    chance = run.random
    store = _Slow(chance)
    rig = Rig(store, threads=2, timeout="20ms", absent_for="10s", max_keys=1000)
    keys = [key_of(number) for number in range(6)]
    there = _put(store, rig, keys)
    live: dict[str, list[Key]] = {}
    for step in range(chance.randint(6, 14)):
        act = chance.randrange(9)
        if act <= 2:
            live[f"r{step}"] = keys[: chance.randint(1, 6)]
        elif act == 3 and live:
            request = chance.choice(sorted(live))
            del live[request]
            rig.tier.forget_request(request)
        elif act == 4:
            store.is_down = not store.is_down
        elif act == 5:
            rig.tier.clear()
            there = set()
        elif act == 6:
            time.sleep(chance.choice((0.0005, 0.003, 0.03)))
        elif act == 7:
            _load(rig, keys)
        elif act == 8:
            there = _put(store, rig, keys)
        for request, wanted in live.items():
            for key, answer in zip(wanted, rig.ask(request, wanted), strict=False):
                assert answer is not Lookup.HIT or key in there, "a HIT for what is not there"
        rig.flush()
        rig.tier._presence.check()
        time.sleep(0.0005)
    store.is_down = False
    time.sleep(RESET_MARGIN_S)
    _put(store, rig, keys)
    for request in live:
        rig.tier.forget_request(request)
    end_s = time.monotonic() + 2000.0
    while _answers(rig, f"last{time.monotonic()}", keys[:3]) != [Lookup.HIT] * 3:
        assert time.monotonic() < end_s, f"what is there is never found again: {rig.tier._health.__dict__}"
        time.sleep(0.5)
    assert rig.tier._presence.held == 0
    rig.tier.close()
    assert store.closed


def _put(store: MemoryStore, rig: Rig, keys: list[Key]) -> set[Key]:
    """Have the first of the keys there, anew."""
    for key in keys[:3]:
        for name in rig.names(key):
            store.put(name)
    return set(keys[:3])


def _load(rig: Rig, keys: list[Key]) -> None:
    ready = [key for key in keys if rig.tier.state(key) is State.READY]
    for key in ready:
        rig.tier.pin(key)
    rig.flush()
    for key in ready:
        rig.tier.unpin(key)
    rig.tier.loaded(ready, {}, rig.now())


WATCHED = (Prober, SharedTier)
ALLOWED = {
    "Prober.since_s": "set by the scheduler's thread when everything is forgotten: searches that are out are given up",
}


def _scenario(play: Callable[[Run], None], seeds: int) -> Scenario:
    return Scenario(play, early_s=0.002, seeds=seeds, watched=WATCHED, allowed=ALLOWED)


SCENARIOS = {
    "asking": _scenario(asking, 1),
    "closing": _scenario(closing, 2),
    "lookups": _scenario(lookups, 1000),
}
