"""A fleet on one bucket, simulated: real catalogs, memory tiers, shared tiers, lookup queues and probers, on a played
clock. What is played: vLLM (requests, steps), the ranks (loads and stores always succeed unless the bucket throttles),
the prober's threads, and the bucket. Same seed, same figures.

Threading: one thread.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from benchmarks.scale.bucket import Bucket
from benchmarks.scale.shapes import SMALL, Shape
from nixl_offload.catalog import Catalog, ChainOptions
from nixl_offload.config.schema import LookupOptions
from nixl_offload.errors import StoreError
from nixl_offload.index import Index
from nixl_offload.tiers.memory.tier import MemoryPlace, MemoryTier
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.tiers.shared.prober import Prober
from nixl_offload.tiers.shared.prober_events import ProbeAnswer, TaskEnd, TrialEnd
from nixl_offload.tiers.shared.tier import SharedTier
from nixl_offload.tiers.slot_allocator import SlabAllocator
from nixl_offload.types import Key, Lookup, LookupContext, Outcome

MEMORY, BUCKET = 0, 1
STEP_S: Final = 0.02
"""A step of a server that has something to look up."""
PREFILL_TOKENS_PER_S: Final = 10_000.0
THREADS: Final = 16


@dataclass(frozen=True)
class Load:
    """What a fleet is asked. Sessions have a shared prefix, chosen by Zipf's law, and turns."""

    servers: int = 16
    seconds: float = 30.0
    requests_per_s: float = 1.0
    """Per server."""
    prefixes: int = 200
    prefix_tokens: int = 4096
    turn_tokens: int = 3300
    """New in each turn, its answer included."""
    turns: int = 4
    think_s: float = 4.0
    """Mean time between turns: agents more than people. Short, so that the warm-up is as long as a session."""
    sticky: float = 0.0
    """Part of the turns that go to the server of the turn before; the others go anywhere."""
    memory_chunks: int = 2048
    partitions: int = 256
    limit_servers: int | None = None
    """S3's limits are those of a fleet of so many servers, of which these are a part; None: not scaled."""
    shape: Shape = SMALL
    seed: int = 0


@dataclass
class Session:
    """A conversation: ``tokens`` of it have been said."""

    number: int
    prefix: int
    turns_left: int
    tokens: int
    server: int


@dataclass
class Request:
    """One turn on its way: asked about step by step until the catalog has answered."""

    name: str
    keys: list[Key]
    session: Session
    asked_s: float


class _Idle(Exception):  # noqa: N818 - not an error
    pass


class _NeverWaits(threading.Condition):
    def wait(self, timeout: float | None = None) -> bool:
        raise _Idle


class PlayedProber:
    """Does for a prober without threads what its threads would do: one call of ``ask`` is one look at what is queued.

    Reaches into the prober: its own decisions (what goes out, how many at a time, what an answer means) stay its own.
    """

    def __init__(self, prober: Prober, bucket: Bucket) -> None:
        self._prober, self._bucket = prober, bucket
        prober._busy_threads = THREADS
        prober._changed = _NeverWaits()

    def ask(self) -> list[tuple[float, Callable[[], None]]]:
        """Take all that is queued and that threads are free for; return when each is over, and what to do then."""
        prober = self._prober
        out: list[tuple[float, Callable[[], None]]] = []
        while True:
            try:
                with prober._changed:
                    task: Any = prober._take()
            except _Idle:
                return out
            self._bucket.last_s = 0.0
            if hasattr(task, "run"):
                cause, message = prober._try(partial(task.run, prober._store))
                out.append((self._bucket.last_s, partial(self._done, TaskEnd(task, cause, message))))
            elif hasattr(task, "key"):
                answer = prober._look(task.key, task.asked_s)
                out.append((self._bucket.last_s, partial(self._answered, task, answer, self._bucket.last_s)))
            else:
                # The manifest stands for the whole bucket: the trial is throttled as a request of a shard would be.
                cause, message = prober._try(partial(self._bucket.request, "head", task.name))
                out.append((self._bucket.last_s, partial(self._tried, TrialEnd(cause, message))))

    def _answered(self, probe: Any, answer: ProbeAnswer, seconds: float) -> None:
        with self._prober._changed:
            self._prober._answered(probe, answer, seconds)

    def _done(self, end: TaskEnd) -> None:
        self._prober._tasks_running -= 1
        self._prober._events.append(end)

    def _tried(self, end: TrialEnd) -> None:
        self._prober._trial_out = False
        self._prober._events.append(end)


class Server:
    """One server's scheduler half: a memory tier before the bucket."""

    def __init__(self, load: Load, bucket: Bucket, clock: Callable[[], float]) -> None:
        shape, namespace = load.shape, load.shape.namespace()
        slot = shape.shard_bytes
        memory_bytes = load.memory_chunks * slot
        self.memory = MemoryTier(
            MEMORY,
            MemoryPlace((b"n" * 32,) * shape.ranks, memory_bytes),
            Index(),
            SlabAllocator(memory_bytes, [slot], extent_bytes=slot),
        )
        self.tier = SharedTier(
            BUCKET,
            bucket,
            namespace,
            lookup=LookupOptions(),
            ttl_s=None,
            name="simulated",
            threads=-1,
            clock=clock,
            wall=clock,
        )
        self.prober = PlayedProber(self.tier._prober, bucket)
        self.catalog = Catalog(
            [self.memory, self.tier],
            world_size=shape.ranks,
            slot_bytes=lambda key: slot,
            store_backlog_bytes=1 << 40,
            chain=ChainOptions(unsaved_limit_bytes=memory_bytes // 4, memory=MEMORY),
        )
        self.waiting: list[Request] = []
        self.is_stepping = False


@dataclass
class Figures:
    """What a fleet has done, after its warm-up."""

    load: Load
    requests: int = 0
    chunks: Counter[str] = field(default_factory=Counter)
    """By where they came from: memory, bucket, computed."""
    calls: dict[str, float] = field(default_factory=dict)
    """Requests to the bucket per request of a user."""
    throttled: dict[str, float] = field(default_factory=dict)
    """Answers of 503 per request of a user."""
    again: int = 0
    """PUTs of an object that was there."""
    waits_s: list[float] = field(default_factory=list)
    """How long requests waited for the bucket's answer."""
    busiest_reads: int = 0
    busiest_writes: int = 0
    openings: int = 0
    late: int = 0

    def wait_ms(self, part: float) -> float:
        """A percentile of the waits."""
        ordered = sorted(self.waits_s)
        return 1e3 * ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


class Fleet:
    """Runs one load. ``run`` once. The first third of the time is warm-up and not counted."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._now_s = 0.0
        self._random = random.Random(f"fleet {load.seed}")
        part = 1.0 if load.limit_servers is None else load.servers / load.limit_servers
        self.bucket = Bucket(lambda: self._now_s, partitions=load.partitions, limit_part=part, seed=load.seed)
        self.servers = [Server(load, self.bucket, lambda: self._now_s) for _ in range(load.servers)]
        self._namespace = load.shape.namespace().name
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(load.prefixes)))
        self._figures = Figures(load)
        self._counts = False

    def run(self) -> Figures:
        """Play it all, and return the figures of the last two thirds."""
        load, figures, bucket = self._load, self._figures, self.bucket
        arrivals = load.servers * load.requests_per_s / load.turns
        when = 0.0
        while when < load.seconds:
            self._at(when, self._begin_session)
            when += self._random.expovariate(arrivals)
        self._play(load.seconds / 3)
        self._counts = True
        calls, throttled = bucket.requests.copy(), bucket.throttled.copy()
        bucket.by_second.clear()
        openings = sum(server.tier.counts().openings for server in self.servers)
        late = sum(server.tier.counts().late for server in self.servers)
        self._play(load.seconds)
        self._counts = False
        each = max(1, figures.requests)
        figures.calls = {kind: (count - calls[kind]) / each for kind, count in sorted(bucket.requests.items())}
        figures.throttled = {kind: (count - throttled[kind]) / each for kind, count in bucket.throttled.items()}
        figures.busiest_reads, figures.busiest_writes = bucket.busiest(writes=False), bucket.busiest(writes=True)
        figures.openings = sum(server.tier.counts().openings for server in self.servers) - openings
        figures.late = sum(server.tier.counts().late for server in self.servers) - late
        return figures

    def settle(self) -> None:
        """Play on until nothing is under way, sessions included; nothing of it is counted."""
        self._play(float("inf"))

    def close(self) -> None:
        for server in self.servers:
            server.tier.close()

    def _at(self, when_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), what))

    def _in(self, seconds: float, what: Callable[[], None]) -> None:
        self._at(self._now_s + seconds, what)

    def _play(self, until_s: float) -> None:
        while self._events and self._events[0][0] < until_s:
            self._now_s, _, what = heapq.heappop(self._events)
            what()

    # Users

    def _begin_session(self) -> None:
        prefix = self._random.choices(range(self._load.prefixes), cum_weights=self._weights)[0]
        turns = min(4 * self._load.turns, 1 + int(self._random.expovariate(1 / (self._load.turns - 0.5))))
        session = Session(next(self._numbers), prefix, turns, self._load.prefix_tokens, -1)
        self._begin_turn(session)

    def _begin_turn(self, session: Session) -> None:
        if session.server < 0 or self._random.random() >= self._load.sticky:
            session.server = self._random.randrange(self._load.servers)
        session.turns_left -= 1
        session.tokens += self._load.turn_tokens
        tokens, shared = self._load.shape.chunk_tokens, self._load.prefix_tokens
        keys = []
        for number in range(session.tokens // tokens):
            whose = f"p{session.prefix}" if (number + 1) * tokens <= shared else f"s{session.number}"
            digest = hashlib.sha256(f"{self._load.seed} {whose} {number}".encode()).digest()
            keys.append(Key(digest + bytes(4)))
        server = self.servers[session.server]
        server.waiting.append(Request(f"{session.number}-{session.turns_left}", keys, session, self._now_s))
        self._wake(server)

    # vLLM's scheduler

    def _wake(self, server: Server) -> None:
        if not server.is_stepping:
            server.is_stepping = True
            self._step(server)

    def _step(self, server: Server) -> None:
        catalog, now_s = server.catalog, self._now_s
        still = []
        for request in server.waiting:
            hits = self._look_up(catalog, request, now_s)
            if hits is None:
                still.append(request)
            else:
                self._schedule(server, request, hits)
        server.waiting = still
        catalog.flush(now_s)
        for move in catalog.begin_write_throughs(now_s):
            self._write(server, move.ticket, move.keys)
        self._ask(server)
        server.is_stepping = bool(still) or catalog.has_pending_writes
        if server.is_stepping:
            self._in(STEP_S, partial(self._step, server))

    @staticmethod
    def _look_up(catalog: Catalog, request: Request, now_s: float) -> int | None:
        """As vLLM: on after RETRY, no further after MISS. Returns the leading hits, None: ask again."""
        hits, waits = 0, False
        for position, key in enumerate(request.keys):
            answer = catalog.lookup(key, now_s, LookupContext(request.name, position + 1))
            if answer is Lookup.MISS:
                break
            waits = waits or answer is not Lookup.HIT
            hits += 1
        return None if waits else hits

    def _schedule(self, server: Server, request: Request, hits: int) -> None:
        catalog, figures, keys = server.catalog, self._figures, request.keys
        catalog.forget_request(request.name)
        if self._counts:
            figures.requests += 1
            figures.waits_s.append(self._now_s - request.asked_s)
            figures.chunks["computed"] += len(keys) - hits
        if hits:
            ticket = catalog.prepare_load(keys[:hits], self._now_s)
            failed = {}
            for position, (key, location) in enumerate(zip(ticket.keys, ticket.locations, strict=True)):
                if self._counts:
                    figures.chunks["memory" if location.tier == MEMORY else "bucket"] += 1
                if location.tier == BUCKET and not self._read(key):
                    failed[position] = Outcome.FAILED
            self._report(server, ticket.ticket, failed)
            if ticket.promotion_ticket:
                promoted = [p for p, slot in enumerate(ticket.promotion_slots) if slot is not None]
                lost = {number: Outcome.FAILED for number, position in enumerate(promoted) if position in failed}
                self._report(server, ticket.promotion_ticket, lost)
        computed_s = (len(keys) - hits) * self._load.shape.chunk_tokens / PREFILL_TOKENS_PER_S
        self._in(computed_s, partial(self._computed, server, request))

    def _computed(self, server: Server, request: Request) -> None:
        ticket = server.catalog.reserve(request.keys, self._now_s)
        if ticket is not None:
            self._report(server, ticket.ticket, {})
        self._wake(server)
        if request.session.turns_left > 0:
            self._in(self._random.expovariate(1 / self._load.think_s), partial(self._begin_turn, request.session))

    # Ranks and the prober's threads

    def _ask(self, server: Server) -> None:
        for took_s, what in server.prober.ask():
            self._in(took_s, partial(self._answer, server, what))

    def _answer(self, server: Server, what: Callable[[], None]) -> None:
        what()
        self._ask(server)  # the next round goes out at once, not with the next step

    def _read(self, key: Key) -> bool:
        shape = self._load.shape
        try:
            for rank in range(shape.ranks):
                self.bucket.request("get", shard_name(self._namespace, key, rank))
        except StoreError:
            return False
        return shard_name(self._namespace, key, 0) in self.bucket.objects

    def _write(self, server: Server, ticket: int, keys: tuple[Key, ...]) -> None:
        failed, took_s = {}, 0.0
        for position, key in enumerate(keys):
            if not self._put(key):
                failed[position] = Outcome.FAILED
            took_s = max(took_s, self.bucket.last_s)
        self._in(took_s, partial(self._report, server, ticket, failed))

    def _put(self, key: Key) -> bool:
        shape = self._load.shape
        try:
            for rank in range(shape.ranks):
                is_new = self.bucket.put(shard_name(self._namespace, key, rank), shape.shard_bytes)
                self._figures.again += self._counts and not is_new
        except StoreError:
            return False
        return True

    def _report(self, server: Server, ticket: int, failed: dict[int, Outcome]) -> None:
        server.catalog.report(ticket, self._load.shape.ranks, failed, self._now_s)
