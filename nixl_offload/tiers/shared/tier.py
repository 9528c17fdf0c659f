"""The scheduler's half of a tier that other servers write to as well: a bucket, or a shared directory.

Threading: called by the scheduler's thread alone, except that the prober has threads of its own. No
method waits for storage or raises for reasons of storage.
Ownership: the store (closed with the tier), the prober, the eviction, and what is believed of the store.
The chunks belong to nobody: any server may delete any of them at any time, and the worst that comes of it is a
recompute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from nixl_offload.config.schema import LookupOptions
from nixl_offload.identity.namespace import Namespace
from nixl_offload.index import State
from nixl_offload.stores.base import Store
from nixl_offload.tiers.base import SharedStatistics, Tier, TierContext, TierStatistics, not_arrived
from nixl_offload.tiers.breaker import BreakerState
from nixl_offload.tiers.shared.background_tasks import Discard, Recheck, Refresh, WriteManifest
from nixl_offload.tiers.shared.eviction import Eviction
from nixl_offload.tiers.shared.health import StorageHealth
from nixl_offload.tiers.shared.lookup_queue import LookupQueue, SearchKind
from nixl_offload.tiers.shared.maintenance import Maintenance
from nixl_offload.tiers.shared.naming import manifest_name, shards_of, witness_of
from nixl_offload.tiers.shared.presence import MAX_KEYS, Presence
from nixl_offload.tiers.shared.prober import Prober
from nixl_offload.tiers.shared.prober_events import ProbeAnswer, ProbeCounts, ProbeResult, SearchEnd, TaskEnd, TrialEnd
from nixl_offload.types import Key, Location, Lookup, LookupContext, Outcome, key_group

logger = logging.getLogger(__name__)

EVENTS_PER_FLUSH = 8192
"""A few milliseconds of the scheduler's step."""
RESET_MARGIN_S = 300.0
"""After a reset, what others stored within so long after it does not count either: clocks differ, and a fleet is not
reset in one instant."""


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """Where the ranks find their shards; sent to them once, when the tier opens."""

    namespace: str
    """First part of every name: see ``tiers.shared.naming``."""
    rank_namespaces: tuple[bytes, ...]
    """By rank or by shard, the 32 bytes that shard headers carry."""


@dataclass(slots=True)
class SharedCounts:
    """What a tier has done since it was opened; for metrics."""

    probes: ProbeCounts = field(default_factory=ProbeCounts)
    inferred: int = 0
    """Chunks taken for present because later ones of their chain were."""
    late: int = 0
    """Requests that were not answered in time."""
    damaged: int = 0
    failed_loads: int = 0
    """Chunks."""
    discarded: int = 0
    refreshed: int = 0
    openings: int = 0
    """How often the tier was disabled for a while."""
    known: int = 0
    """Chunks believed present now."""


class SharedTier(Tier):
    """What it says of a chunk is a belief: a load verifies, and corrects it.

    ``health`` says when it is disabled, ``maintenance`` what is done to the store when nobody waits.
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
        eviction: Callable[[], Eviction] | None = None,
        is_local: bool = False,
        threads: int = 16,
        max_keys: int = MAX_KEYS,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Begin with nothing known. Does not reach the store on this thread.

        ``namespace`` says which shards a chunk consists of, and how large each is. ``clock`` must be the one that
        callers take ``now_s`` from. ``eviction`` begins what keeps the store to its capacity; None: somebody else does.
        ``is_local``: only servers on this machine reach the store.
        """
        self.is_local = is_local
        self.place: SharedPlace = SharedPlace(namespace.name, namespace.rank_digests)
        self._position = position
        self._store = store
        self._name = name
        self._options = lookup
        self._ttl_s = ttl_s
        self._namespace = namespace
        self._clock = clock
        self._wall = wall
        self._now_s = clock()
        self._taken_in = False
        """Whether what has been found was taken in since the last step."""
        self._presence = Presence(
            present_for_s=lookup.present_for_s, absent_for_s=lookup.absent_for_s, max_keys=max_keys
        )
        self._lookups = LookupQueue(lookup.timeout_s)
        self._health = StorageHealth(name)
        self._unanswered: set[Key] = set()
        """Asked about, and no answer for longer than a request may wait: nobody else waits for it."""
        self._doubted: set[str] = set()
        """Requests that were told MISS although nothing was known."""
        self._counts = SharedCounts()
        self._prober = Prober(
            store,
            witness_of=partial(witness_of, namespace),
            ttl_s=ttl_s,
            threads=threads,
            clock=clock,
            wall=wall,
        )
        manifest = WriteManifest(manifest_name(namespace.name), namespace.manifest(), wall)
        self._manifest_name = manifest.name
        self._shards_of = partial(shards_of, namespace)
        self._maintenance = Maintenance(
            self._prober, manifest, shards_of=self._shards_of, ttl_s=ttl_s, wall=wall, now_s=self._now_s
        )
        self._eviction: Eviction | None = None
        try:
            if eviction is not None:
                self._eviction = eviction()
        except RuntimeError:  # no thread to be had: those that there are would wait for ever
            self._prober.close()
            raise

    @classmethod
    def open(
        cls,
        context: TierContext,
        store: Store,
        *,
        name: str,
        lookup: LookupOptions,
        ttl_s: float | None,
        required: bool,
        eviction: Callable[[], Eviction] | None = None,
        is_local: bool = False,
    ) -> SharedTier:
        """Return the tier over ``store``, which is closed when that fails.

        ``required``: list the namespace first, and raise StoreError where the store does not answer.
        """
        try:
            if required:
                next(store.list(f"{context.namespace.name}/"), None)
            return cls(
                context.position,
                store,
                context.namespace,
                lookup=lookup,
                ttl_s=ttl_s,
                name=name,
                eviction=eviction,
                is_local=is_local,
            )
        except BaseException:
            store.close()
            raise

    def __len__(self) -> int:
        return len(self._presence)

    # What the catalog asks

    def state(self, key: Key) -> State | None:
        """Return the state of ``key`` in this tier, None when nothing is known or it is known to be absent."""
        if key in self._maintenance.discarding:
            return State.EVICTING
        return self._presence.state(key)

    def lookup(self, key: Key, context: LookupContext, now_s: float) -> Lookup:
        """Say whether ``key`` can be loaded; MISS for everything while the tier is disabled."""
        self._now_s = now_s
        if not self._taken_in:
            self._take_in()  # a step may be long, and an answer that is there must not come too late
        if not self._health.answers:
            return self._unknown(context)
        state, fresh = self._presence.look(key, now_s)
        if fresh:
            return Lookup.HIT if self._health.may_load(context, now_s) else Lookup.MISS
        if state is State.WRITING:
            return Lookup.PENDING
        if state is State.EVICTING or self._presence.is_absent(key, now_s) or key in self._maintenance.discarding:
            return Lookup.MISS
        if key in self._unanswered:
            return self._unknown(context)
        if not self._health.may_load(context, now_s):
            return Lookup.MISS  # not worth a question, though it would be answered: what is computed can be stored
        return self._lookups.ask(key, context, now_s)

    def flush(self, now_s: float) -> None:
        """Take in what was found, and begin what this step's lookups have asked for. Costs no I/O."""
        self._now_s = now_s
        self._take_in()
        self._taken_in = False
        overdue = self._prober.overdue(now_s, self._options.timeout_s)
        self._unanswered = {question.key for question in overdue}
        for question in overdue:
            if question.is_new:
                why = f"no answer within {self._options.timeout_s:g} s"
                self._health.unanswered(question.asked_s, "timeout", why, now_s)
        if not self._health.answers:
            self._lookups.drop_all()
            self._prober.cancel_all()
            self._maintenance.clear()
            if self._health.may_try(now_s):
                self._prober.trial(self._manifest_name)
            return
        for search in self._lookups.begin_searches(now_s):
            self._prober.search(search.number, search.keys, search.plan)
        self._maintenance.begin(now_s)

    def forget_request(self, request_id: str) -> None:
        """No more lookups will come for this request."""
        for number in self._lookups.forget(request_id):
            self._prober.cancel(number)
        self._health.forget_request(request_id)
        self._doubted.discard(request_id)

    def doubts(self, request_id: str) -> bool:
        """Whether a lookup of this request was a MISS because the storage did not answer, not in time, or not now."""
        return request_id in self._doubted or self._lookups.is_late(request_id)

    @property
    def in_use(self) -> bool:
        """Whether the storage answers and loads work, by all that is known."""
        return self._health.in_use

    # Storing

    def reserve(self, key: Key, slot_bytes: int, evicted: list[Key]) -> Location | None:
        """Make ``key`` WRITING. None while the tier is disabled. ``Eviction`` or ``nixl-offload gc`` make room."""
        if not self._health.may_store(self._now_s) or not self._presence.reserve(key):
            return None
        return Location(self._position, 0, slot_bytes)

    def commit(self, key: Key) -> bool:
        """WRITING to READY. False when everything was forgotten meanwhile."""
        now_s, ttl_s = self._clock(), self._ttl_s
        if ttl_s is None:
            return self._presence.commit(key, now_s)
        return self._presence.commit(key, now_s, now_s + ttl_s, now_s + ttl_s / 4)

    def abort(self, key: Key) -> None:
        """Forget a WRITING chunk."""
        self._presence.abort(key)

    def retire(self, key: Key) -> None:
        """Forget a WRITING chunk of which something may still be written, and delete what is there of it, unless it is
        whole: then another server has stored it.

        What arrives even later is an object like any other: a load verifies it.
        """
        self._presence.abort(key)
        self._discard([key])

    def stored(self, keys: Sequence[Key], failed: Mapping[Key, Outcome], now_s: float) -> None:
        """A store is over. Of a chunk that a rank could not store the other ranks' shards are deleted, unless it is
        whole all the same: then another server has stored it.
        """
        self._now_s = now_s
        self._health.stored(keys, failed, now_s)
        self._discard([key for key in failed if self.state(key) is None and len(self._shards_of(key)) > 1])

    # Loading

    def pin(self, key: Key) -> Location:
        """Do not forget a READY chunk while it is loaded, and return where it is."""
        self._presence.pin(key)
        return Location(self._position, 0, self._namespace.slot_bytes(key_group(key)))

    def unpin(self, key: Key) -> None:
        """Take one pin back."""
        self._presence.unpin(key)

    def touch(self, key: Key) -> None:
        """Mark as recently used; unknown keys are ignored. Now and then a chunk in use is refreshed."""
        self._presence.touch(key)
        ttl_s, maintenance = self._ttl_s, self._maintenance
        if (
            ttl_s is not None
            and maintenance.takes_refreshes
            and self._presence.needs_refresh(key, self._now_s, ttl_s / 4)
        ):
            maintenance.refresh(key)

    def loaded(self, keys: Sequence[Key], failed: Mapping[Key, Outcome], now_s: float) -> list[Key]:
        """A load is over: what did not arrive counts as absent, so that it is computed and stored anew.

        What arrived damaged is deleted. Returns what was dropped.
        """
        self._now_s = now_s
        bad = not_arrived(keys, failed)
        self._counts.failed_loads += len(bad)
        doubtful = self._health.loaded(keys, failed, now_s)
        if doubtful is not None and self._health.answers:
            self._prober.do(Recheck(doubtful, self._shards_of(doubtful)))
        dropped = [key for key in bad if self._presence.missed(key, now_s)]
        corrupt = [key for key in bad if failed[key] is Outcome.CORRUPT and self._presence.state(key) is None]
        self._discard(corrupt, even_whole=True)
        return dropped

    def drop(self, key: Key) -> bool:
        """Keep it: other servers may ask for it. ``nixl-offload gc`` deletes."""
        return False

    def clear(self) -> None:
        """Forget everything, and never again believe in what was stored before now; see decision 0010.

        Nothing is deleted: a reset of one server must not empty the cache of all. From now on a chunk counts only when
        this server stored it, or when it was modified ``RESET_MARGIN_S`` from now or later, each looked at itself.
        """
        self._presence.clear()
        self._lookups.drop_all()
        self._lookups.infer = False
        self._prober.cancel_all()
        self._prober.since_s = self._wall() + RESET_MARGIN_S
        self._maintenance.clear()

    def close(self, in_flight: Iterable[Key] = (), *, timeout_s: float = 1.0) -> None:
        """End what runs in the background, waiting ``timeout_s`` at most for each part, and close the store.

        ``in_flight`` needs nothing: what is whole in the store is found there.
        """
        if self._eviction is not None:
            self._eviction.close(timeout_s)
        self._prober.close(timeout_s)
        self._store.close()

    @property
    def is_looking(self) -> bool:
        """Whether some request waits for an answer of the store."""
        return len(self._lookups) > 0

    def counts(self) -> SharedCounts:
        """Return the counters as they are now."""
        counts = self._counts
        counts.probes = self._prober.counts()
        counts.late = self._lookups.late
        counts.openings = self._health.openings
        counts.discarded = self._maintenance.discarded
        counts.known = len(self._presence)
        return counts

    def statistics(self) -> TierStatistics:
        """Return what is believed and how the storage does."""
        counts = self.counts()
        return TierStatistics(
            shared=SharedStatistics(
                probes=counts.probes.heads,
                probe_errors=counts.probes.errors,
                probe_seconds=self.take_probe_seconds(),
                late=counts.late,
                openings=counts.openings,
                known=counts.known,
                breakers=self.breakers(),
                evictions=self._eviction.evicted if self._eviction is not None else None,
            )
        )

    def take_probe_seconds(self) -> list[float]:
        """Return how long questions to the store took since the last call; of very many the latest."""
        return self._prober.take_seconds()

    def breakers(self) -> dict[str, BreakerState]:
        """Return the state of each breaker by what it watches: ``reach``, ``load`` or ``store``."""
        return self._health.breakers()

    @property
    def trouble(self) -> str:
        """Why the tier is disabled, in a word; ``none`` while all is well."""
        return self._health.trouble

    # What comes back from the prober

    def _take_in(self) -> None:
        self._taken_in = True
        for event in self._prober.drain(EVENTS_PER_FLUSH):
            if isinstance(event, ProbeAnswer):
                self._on_sight(event)
            elif isinstance(event, SearchEnd):
                self._on_search_end(event)
            elif isinstance(event, TrialEnd):
                self._health.tried(event.cause, event.message, self._now_s)
            else:
                self._on_task_end(event)
        for search in self._lookups.give_up(self._now_s):
            found = self._prober.cancel(search.number)
            if search.kind is SearchKind.CHAIN:
                self._take_chain(search.keys[:found], found)  # better than nothing, for those that can wait no longer

    def _on_sight(self, answer: ProbeAnswer) -> None:
        if answer.found is ProbeResult.ERROR:
            self._health.unanswered(answer.asked_s, answer.cause, answer.message, self._now_s)
            return
        self._health.answered(self._now_s)
        key = answer.key
        if answer.found is ProbeResult.PRESENT and not self._prober.expired(answer.modified_s):
            if not self._presence.missed_since(key, answer.asked_s) and key not in self._maintenance.discarding:
                self._presence.seen(key, self._now_s, self._expires_s(answer.modified_s))
        elif not self._presence.seen_since(key, answer.asked_s):  # else it was stored after the question went out
            self._presence.missed(key, self._now_s)
            if answer.found is ProbeResult.DAMAGED:
                self._counts.damaged += 1
                self._discard([key])

    def _on_search_end(self, end: SearchEnd) -> None:
        search = self._lookups.finish(end.number, end.boundary, end.found)
        if search is None or search.kind is not SearchKind.CHAIN:
            return
        self._take_chain(search.keys, end.boundary)

    def _take_chain(self, keys: Sequence[Key], boundary: int) -> None:
        """Believe in what lies before the boundary, and no longer in what lies behind it and was not seen lately."""
        presence, now_s = self._presence, self._now_s
        # From the end: what is believed last is forgotten last, and a prefix's beginning is worth most.
        for position in range(boundary - 1, -1, -1):
            key = keys[position]
            if presence.state(key) is State.READY and presence.fresh(key, now_s):
                continue
            if self._lookups.infer and not presence.is_absent(key, now_s) and key not in self._maintenance.discarding:
                presence.seen(key, now_s)
                self._counts.inferred += 1
        for position in range(boundary, len(keys)):
            key = keys[position]
            if presence.state(key) is State.READY and not presence.fresh(key, now_s):
                presence.drop(key)  # so that it is stored anew when it is computed

    def _on_task_end(self, end: TaskEnd) -> None:
        task = end.task
        if end.cause:
            logger.debug("%s: %s: %s", self._name, type(task).__name__.lower(), end.message)
        if isinstance(task, Discard):
            self._maintenance.discard_ended(task)
        elif isinstance(task, Refresh):
            for key, modified_s in task.modified_s.items():
                if self._presence.state(key) is State.READY and not self._prober.expired(modified_s):
                    self._presence.seen(key, self._now_s, self._expires_s(modified_s))
            for key in task.gone:
                if not self._presence.seen_since(key, task.asked_s):
                    self._presence.missed(key, self._now_s)
            self._counts.refreshed += task.refreshed
        elif isinstance(task, Recheck):
            self._health.rechecked(end.cause, end.message, task.whole, self._now_s)
        elif isinstance(task, WriteManifest) and end.cause:
            self._maintenance.manifest_failed(self._now_s)

    # Inside

    def _unknown(self, context: LookupContext) -> Lookup:
        if context.request_id:
            self._doubted.add(context.request_id)
        return Lookup.MISS

    def _expires_s(self, modified_s: float) -> float:
        """When what was modified then, by the store's clock, ceases to count, on the scheduler's clock."""
        if self._ttl_s is None:
            return float("inf")
        return self._now_s + self._ttl_s - max(0.0, self._wall() - modified_s)

    def _discard(self, keys: Sequence[Key], *, even_whole: bool = False) -> None:
        if self._health.answers:
            self._maintenance.discard(keys, even_whole=even_whole)
