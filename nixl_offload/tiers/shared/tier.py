"""The scheduler's half of a tier that other servers write to as well: a bucket or a shared directory.

Threading: called by the scheduler's thread alone; the prober and the eviction have threads of their own. No method
waits for storage or raises for reasons of storage.
Ownership: the store (closed with the tier), the prober, the eviction, and the beliefs about the store. The chunks
belong to nobody: any server may delete any of them at any time, at the cost of a recompute.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, Final

from nixl_offload.calls import CallThreads
from nixl_offload.config.schema import LookupOptions
from nixl_offload.errors import StoreError
from nixl_offload.identity.namespace import Namespace
from nixl_offload.index import State
from nixl_offload.stores.base import Store
from nixl_offload.tiers.base import Place, SharedStatistics, Tier, not_arrived
from nixl_offload.tiers.breaker import Breaker
from nixl_offload.tiers.shared.eviction import Eviction
from nixl_offload.tiers.shared.naming import manifest_name, witness_shard
from nixl_offload.tiers.shared.presence import MAX_KEYS, Presence
from nixl_offload.tiers.shared.prober import KeyProbe, Prober
from nixl_offload.tiers.shared.search import Lookups, Search, SearchKind
from nixl_offload.types import Key, Location, Lookup, LookupContext, Outcome, key_group

logger = logging.getLogger(__name__)

MANIFEST_RETRY_S = 60.0
RESET_MARGIN_S = 300.0
"""Chunks stored within this time after a reset do not count either: clocks differ, and a fleet is not reset at one
instant."""
LOAD_TRIAL_S: Final = 5.0
"""While ranks cannot load, one request in this time may, as a trial."""
FLAP_WINDOW_S: Final = 30.0
"""A throttling bucket may still answer the next trial. Failures that return within this time double the pause."""
TIMED_BYTES: Final = 64 << 20
"""The most that is read at a time to learn how fast a bucket is; an eighth of it is the most of one object."""


class SharedTier(Tier):
    """A tier whose answers are beliefs; a load verifies and corrects them.

    The lookup of an unknown chunk goes through ``_lookups`` (which request waits for which search) and ``_prober``
    (which asks the store).
    """

    def __init__(
        self,
        position: int,
        store: Store,
        namespace: Namespace,
        *,
        lookup: LookupOptions,
        ttl_s: float | None,
        name: str,
        eviction: Eviction | None = None,
        is_local: bool = False,
        reads_at_once: int = 0,
        threads: int = 16,
        max_keys: int = MAX_KEYS,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Start with nothing known. Does not access the store on this thread.

        ``namespace`` gives the shards of a chunk and their sizes. Callers' ``now_s`` must come from ``clock``.
        ``eviction`` enforces the store's capacity and is closed with the tier; None: somebody else enforces it.
        ``is_local``: only servers on this machine can access the store. ``reads_at_once``: how many reads to time
        together, in the background; 0: none are timed.
        """
        self.is_local = is_local
        self.place = Place(namespace.digest)
        self._position = position
        self._store = store
        self._timeout_s = lookup.timeout_s
        self._ttl_s = ttl_s
        self._namespace = namespace
        self._clock = clock
        self._wall = wall
        self._now_s = clock()
        self._taken_in = False
        """Whether results were taken in since the last step."""
        self._absent_for_s = lookup.absent_for_s
        self._presence = Presence(present_for_s=min(lookup.present_for_s, ttl_s or math.inf), max_keys=max_keys)
        super().__init__(self._presence)
        self._lookups = Lookups(lookup.timeout_s)
        self.found = self._lookups.found
        self._reach = Breaker(name, flap_window_s=FLAP_WINDOW_S)
        """Whether the storage answers questions. While it is not closed, one question at a time is sent, as a trial."""
        self._is_trying = False
        """Whether a trial has not ended."""
        self._load_trial: str | None = None
        """The request whose load is the trial while ranks cannot load."""
        self._next_load_trial_s = 0.0
        self._doubted: set[str] = set()
        """Requests that got a MISS for a key of which nothing was known."""
        self._prober = Prober(
            store,
            witness_of=partial(witness_shard, namespace),
            on_answer=self._on_answer,
            on_end=self._on_search_end,
            ttl_s=ttl_s,
            threads=threads,
            clock=clock,
            wall=wall,
        )
        self._eviction = eviction
        self._manifest_due_s = -math.inf
        """When to write the manifest; infinite once it exists or is being written."""
        if reads_at_once:
            self._prober.do(partial(self._time_reads, reads_at_once), self._on_timed)

    # Questions of the catalog

    def lookup(self, key: Key, context: LookupContext, now_s: float) -> Lookup:
        """Return whether ``key`` can be loaded; MISS for everything while the tier is disabled."""
        self._now_s = now_s
        if not self._taken_in:
            self._take_in()  # a step may be long; results that have come must not count as late
        if not self._reach.closed:
            self._doubted.add(context.request_id)
            return Lookup.MISS
        state, fresh = self._presence.look(key, now_s)
        if fresh:
            return Lookup.HIT if self._may_load(context, now_s) else Lookup.MISS
        if state is State.WRITING:
            return Lookup.PENDING
        if state is State.EVICTING or now_s < self._presence.missed_s(key) + self._absent_for_s:
            return Lookup.MISS
        if not self.ranks_load and now_s < self._next_load_trial_s and self._load_trial != context.request_id:
            return Lookup.MISS  # a question would be wasted; the key is not doubted, so it may be stored
        return self._lookups.ask(key, context, now_s)

    def on_step(self, now_s: float) -> None:
        """Take in results, and begin the searches of this step's lookups. Does no I/O."""
        self._now_s = now_s
        self._take_in()
        self._taken_in = False
        for probe in self._prober.overdue(now_s, self._timeout_s):
            late = StoreError(f"no answer within {self._timeout_s:g} s", cause="timeout")
            self._answered(late, probe.asked_s)
        if not self._reach.closed:
            for search in self._lookups.drop_all():
                self._prober.cancel(search)
            if not self._is_trying and self._reach.allows(now_s):
                self._is_trying, manifest = True, manifest_name(self._namespace.name)
                self._prober.do(lambda store: store.head(manifest), self._on_trial_end)
            return
        for search in self._lookups.begin_searches():
            self._prober.search(search)
        if now_s >= self._manifest_due_s:
            self._manifest_due_s = math.inf
            self._prober.do(partial(write_manifest, self._namespace, self._wall), self._on_manifest_end)

    def forget_request(self, request_id: str) -> None:
        for search in self._lookups.forget(request_id):
            self._prober.cancel(search)
        self._doubted.discard(request_id)

    def answered(self, request_id: str) -> bool | None:
        """False, too, if an answer did not come in time."""
        return False if request_id in self._doubted else self._lookups.answered(request_id)

    @property
    def in_use(self) -> bool:
        """Whether the storage answers and ranks can load, as far as is known."""
        return self._reach.closed and self.ranks_load

    # Storing

    def reserve(self, key: Key, slot_bytes: int, evicted: list[Key]) -> Location | None:
        """Make ``key`` WRITING. None while the tier is disabled. Evicts nothing: ``Eviction`` or gc does."""
        if not self._reach.closed or not self._presence.reserve(key):
            return None
        return Location(self._position, 0, slot_bytes)

    def commit(self, keys: Iterable[Key]) -> list[Key]:
        """Make WRITING chunks READY, and return them; none if everything was forgotten meanwhile."""
        now_s = self._clock()
        return [key for key in keys if self._presence.stored(key, now_s, now_s + (self._ttl_s or math.inf))]

    def abort(self, key: Key) -> None:
        self._presence.abort(key)

    def after_store(self, keys: Sequence[Key], failed: Mapping[Key, Outcome], now_s: float) -> None:
        """Chunks that a rank could not store count as absent, although shards of other ranks may be there."""
        self._now_s = now_s
        for key in failed:
            if self.state(key) is None:
                self._presence.missed(key, now_s)

    # Loading

    def pin(self, keys: Sequence[Key]) -> list[Location]:
        """Keep READY chunks while they are loaded, and return their locations."""
        self._presence.pin(keys)
        return [Location(self._position, 0, self._namespace.slot_bytes(key_group(key))) for key in keys]

    def after_load(self, keys: Sequence[Key], failed: Mapping[Key, Outcome], now_s: float) -> list[Key]:
        """Chunks that did not arrive or are damaged count as absent, so they are computed and stored. Returns them."""
        self._now_s = now_s
        return [key for key in not_arrived(keys, failed) if self._presence.missed(key, now_s)]

    def clear(self) -> None:
        """Forget everything, and never again use chunks that were stored before now; see decision 0010.

        Nothing is deleted: a reset of one server must not empty the cache of all. From now on a chunk counts only if
        this server stored it, or if a question finds that it was modified ``RESET_MARGIN_S`` from now or later.
        """
        self._presence.clear()
        for search in self._lookups.drop_all():
            self._prober.cancel(search)
        self._lookups.infer = False
        self._prober.since_s = self._wall() + RESET_MARGIN_S

    def close(self, in_flight: Iterable[Key] = (), *, timeout_s: float = 1.0) -> None:
        """Stop the background threads, waiting ``timeout_s`` at most for each part, and close the store.

        ``in_flight`` is not needed: chunks that are whole in the store will be found there.
        """
        if self._eviction is not None:
            self._eviction.close(timeout_s)
        self._prober.close(timeout_s)
        self._store.close()

    @property
    def is_looking(self) -> bool:
        return len(self._lookups) > 0

    def statistics(self) -> SharedStatistics:
        return SharedStatistics(
            probes=self._prober.questions,
            probe_errors=self._prober.errors,
            probe_seconds=self._prober.take_seconds(),
            late=self._lookups.late,
            breaker=self._reach.state,
            evictions=self._eviction.evicted if self._eviction is not None else None,
        )

    @property
    def trouble(self) -> str:
        """Why the tier is disabled, in a word; ``none`` while all is well."""
        return self._reach.cause or "none"

    # Results of the prober

    def _take_in(self) -> None:
        self._taken_in = True
        self._prober.take_in()
        for search in self._lookups.give_up(self._now_s):
            known = self._prober.cancel(search)
            if search.kind is SearchKind.CHAIN:  # use the part that is known: its requests can wait no longer
                self._take_chain(search.keys[:known], known)

    def _on_answer(self, probe: KeyProbe) -> None:
        self._answered(probe.error, probe.asked_s)
        key = probe.key
        if probe.is_there and not self._prober.expired(probe.modified_s):
            if self._presence.missed_s(key) < probe.asked_s:
                left_s = (self._ttl_s or math.inf) - max(0.0, self._wall() - probe.modified_s)
                self._presence.seen(key, self._now_s, self._now_s + left_s)
        elif probe.error is None and not self._presence.seen_since(key, probe.asked_s):
            # Otherwise it was stored after the question was sent.
            self._presence.missed(key, self._now_s)

    def _on_search_end(self, search: Search) -> None:
        if self._lookups.finish(search, self._now_s) and search.kind is SearchKind.CHAIN:
            self._take_chain(search.keys, search.boundary)
        self.found, self.search_s = self._lookups.found, self._lookups.search_s

    def _take_chain(self, keys: Sequence[Key], boundary: int) -> None:
        """Mark the keys before the boundary present, and forget stale keys after it."""
        presence, now_s = self._presence, self._now_s
        # Last key first: keys marked last are forgotten last, and the start of a prefix is worth most.
        for key in reversed(keys[:boundary]):
            is_known = presence.look(key, now_s)[1] or now_s < presence.missed_s(key) + self._absent_for_s
            if self._lookups.infer and not is_known:
                presence.seen(key, now_s)
        for key in keys[boundary:]:
            state, is_fresh = presence.look(key, now_s)
            if state is State.READY and not is_fresh:
                presence.forget(key)  # so that it is stored again when it is computed

    def _on_trial_end(self, error: StoreError | None) -> None:
        self._is_trying = False
        self._answered(error, None)

    def _on_manifest_end(self, error: StoreError | None) -> None:
        if error is not None:
            self._manifest_due_s = self._now_s + MANIFEST_RETRY_S

    def _on_timed(self, error: StoreError | None) -> None:
        if error is not None:
            logger.warning("No read could be timed, so first hits may be slower than computing: %s", error)

    # Inside

    def _time_reads(self, at_once: int, store: Store) -> None:
        """Time reads of an object that is like a chunk: one alone, and ``at_once`` together as in a load. On a thread.

        Raises StoreError.
        """
        groups = self._namespace.fields.groups
        size_bytes = min(TIMED_BYTES // 8, max(self._namespace.slot_bytes(group.group_id) for group in groups))
        memories = [memoryview(bytearray(size_bytes)) for _ in range(min(at_once, TIMED_BYTES // size_bytes))]
        name, timed = f"probe-{secrets.token_hex(8)}", list[tuple[int, float]]()
        try:
            store.write(name, memoryview(secrets.token_bytes(size_bytes)))
            with closing(CallThreads("nixl-offload-time", at_once)) as threads:
                for count in (at_once, 1, at_once, 1):
                    began_s, read_into = time.monotonic(), partial(store.read_into, name, 0)
                    for call in [threads.start(partial(read_into, memory)) for memory in memories[:count]]:
                        call.result()
                    timed.append((len(memories[:count]) * size_bytes, time.monotonic() - began_s))
        finally:
            with suppress(StoreError):
                store.delete([name])
        self.timed_reads = timed[1:]  # the first ones connected

    def _answered(self, error: StoreError | None, asked_s: float | None) -> None:
        """Record the outcome of a probe. ``asked_s``: when it was sent; None: it was the trial.

        Ignored: failures of questions sent before the storage last recovered, and, while the storage does not answer,
        all questions but the trial.
        """
        if (asked_s is None) is self._reach.closed:
            return
        if error is None:
            self._reach.succeeded(self._now_s)
        elif asked_s is None or asked_s >= self._reach.closed_s:
            self._reach.failed(error.cause, str(error), self._now_s)

    def _may_load(self, context: LookupContext, now_s: float) -> bool:
        """Whether a request may load what is there. While ranks cannot load, one at a time may, as a trial."""
        if self.ranks_load:
            return True
        if self._load_trial != context.request_id and now_s >= self._next_load_trial_s:
            self._load_trial, self._next_load_trial_s = context.request_id, now_s + LOAD_TRIAL_S
        return self._load_trial == context.request_id


def write_manifest(namespace: Namespace, wall: Callable[[], float], store: Store) -> None:
    """Write the namespace's manifest, unless it exists. Two servers that write it at once differ only in the time."""
    name = manifest_name(namespace.name)
    if store.head(name) is None:
        content: dict[str, Any] = {**namespace.manifest(), "created_s": round(wall(), 3)}
        store.write(name, memoryview((json.dumps(content, indent=2, sort_keys=True) + "\n").encode()))
