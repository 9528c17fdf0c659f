"""The rig of tests of shared tiers: a store in memory that counts, delays, fails and hangs on demand, and its tier.

The store is not a model of a bucket (tests/s3 has real ones). It gives tests control that a server cannot, such as
which question is unanswered at which moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from nixl_offload.config.schema import LookupOptions
from nixl_offload.errors import StoreError
from nixl_offload.identity.namespace import GroupFields, Namespace, NamespaceFields, make_namespace
from nixl_offload.stores.base import ObjectInfo, Store
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.tiers.shared.prober import Prober
from nixl_offload.tiers.shared.tier import SharedTier
from nixl_offload.types import Key, Lookup, LookupContext, key_group

SLOT = 8192
WAIT_S = 20.0
"""A time limit; whatever works ends sooner."""


class MemoryStore(Store):
    """A dictionary. ``before`` is called with the operation and the name before each access, outside the lock."""

    name = "memory"
    where = "memory://"

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        """Name -> content, modification time."""
        self.calls: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = answer
        self.most_at_once = 0
        self.closed = False
        self._wall = wall
        self._at_once = 0
        self._lock = threading.Lock()

    def names(self, operation: str) -> list[str]:
        """Return the shards that ``operation`` was called with, in order."""
        return [name for called, name in self.calls if called == operation and "manifest" not in name]

    def put(self, name: str, size_bytes: int = SLOT, age_s: float = 0.0) -> None:
        """Put an object there directly, without a tier."""
        self.objects[name] = (_zeros(size_bytes), self._wall() - age_s)

    def head(self, name: str) -> ObjectInfo | None:
        with self._call("head", name):
            return self._info(name)

    def read_into(self, name: str, offset: int, memory: memoryview) -> None:
        with self._call("read", name):
            content, _ = self.objects.get(name, (None, 0.0))
            if content is None:
                raise StoreError(f"{name} is not there", cause="missing")
            if offset + memory.nbytes > len(content):
                raise StoreError(f"{name} ends early", cause="short")
            memory[:] = content[offset : offset + memory.nbytes]

    def write(self, name: str, memory: memoryview) -> None:
        with self._call("write", name):
            self.objects[name] = memory.tobytes(), self._wall()

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with self._call("delete", name):
                self.objects.pop(name, None)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        with self._call("list", prefix):
            found = sorted(name for name in list(self.objects) if name.startswith(prefix) and name > start_after)
        for name in found:
            if (info := self._info(name)) is not None:
                yield info

    def close(self) -> None:
        self.closed = True

    def _info(self, name: str) -> ObjectInfo | None:
        found = self.objects.get(name)
        return None if found is None else ObjectInfo(name, len(found[0]), found[1])

    @contextmanager
    def _call(self, operation: str, name: str) -> Iterator[None]:
        with self._lock:
            self.calls.append((operation, name))
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            self.before(operation, name)
            yield
        finally:
            with self._lock:
                self._at_once -= 1


_zeros = cache(bytes)


def is_at_work(prober: Prober) -> bool:
    """Whether anything is queued or running, or a callback is due."""
    return bool(prober._asking.pending or prober._tasks.pending or prober._events)


def answer(operation: str, name: str) -> None:
    """For ``before``: the server is well."""


def refuse(operation: str, name: str) -> None:
    """For ``before``: the server is gone."""
    raise StoreError(f"{operation} {name}: connection refused", cause="unreachable")


class Gate:
    """For ``before``: holds every call until the gate is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def __call__(self, operation: str, name: str) -> None:
        self._open.wait(60.0)

    def open(self) -> None:
        self._open.set()


def namespace_of(
    world_size: int = 1, tenant: str = "default", sizes: Sequence[tuple[int, ...]] | None = None
) -> Namespace:
    """Return a plausible namespace of chunks that are not cut, with two groups. ``sizes``: by group and rank, bytes of
    the shard; None: all equal.
    """
    groups = tuple(GroupFields(n, 16, of) for n, of in enumerate(sizes or [(SLOT,) * world_size] * 2))
    return make_namespace(
        NamespaceFields(
            tenant=tenant,
            engine="vllm 0.33.0",
            platform="cpu",
            attention_backend=None,
            model="model",
            revision=None,
            weights=None,
            dtype="bfloat16",
            tokens_per_block=16,
            blocks_per_chunk=1,
            tokens_per_hash=16,
            hash_algorithm="sha256",
            hash_seed=None,
            groups=groups,
            ranks=("ab",) * world_size,
            shards=world_size,
            shard_order="LBHNC",
            settings={"tp": world_size},
        )
    )


def key_of(number: int, group: int = 0) -> Key:
    """Return a key that looks like vLLM's: the first bytes spread."""
    return Key((number * 2654435761 % 2**32).to_bytes(4, "big") + number.to_bytes(12, "big") + group.to_bytes(4, "big"))


def keys_of(count: int, first: int = 0, group: int = 0) -> list[Key]:
    return [key_of(number, group) for number in range(first, first + count)]


def options(**changes: object) -> LookupOptions:
    """Return lookup options with a long timeout by default."""
    return LookupOptions.model_validate({"timeout": "20s", "present_for": "10m", "absent_for": "10s", **changes})


class Rig:
    """One server's tier over a store, driven as by vLLM: lookups, then the end of the step."""

    def __init__(
        self,
        store: Store,
        *,
        world_size: int = 1,
        ttl_s: float | None = None,
        threads: int = 16,
        namespace: Namespace | None = None,
        max_keys: int = 100_000,
        reads_at_once: int = 0,
        **lookup: object,
    ) -> None:
        self.store = store
        self.namespace = namespace or namespace_of(world_size)
        self.ahead_s = 0.0
        """Seconds by which this rig's clocks are ahead of the real ones."""
        self.tier = SharedTier(
            0,
            store,
            self.namespace,
            lookup=options(**lookup),
            ttl_s=ttl_s,
            name="Tier under test",
            threads=threads,
            max_keys=max_keys,
            reads_at_once=reads_at_once,
            clock=self.now,
            wall=lambda: time.time() + self.ahead_s,
        )

    def now(self) -> float:
        return time.monotonic() + self.ahead_s

    def names(self, key: Key) -> list[str]:
        """All shards of a whole chunk, by rank."""
        return [shard_name(self.namespace.name, key, rank) for rank in self.namespace.shards(key_group(key))]

    def ask(self, request: str, keys: Sequence[Key], end_tokens: Iterable[int | None] | None = None) -> list[Lookup]:
        """Look keys up as a prefix scan does: go on after RETRY, stop at a MISS."""
        answers = []
        ends = range(16, 16 * len(keys) + 16, 16) if end_tokens is None else end_tokens
        now_s = self.now()
        for key, end in zip(keys, ends, strict=False):
            answers.append(self.tier.lookup(key, LookupContext(request, end), now_s))
            if answers[-1] is Lookup.MISS:
                break
        return answers

    def flush(self) -> None:
        self.tier.on_step(self.now())

    def hits(self, request: str, keys: Sequence[Key], wait_s: float = WAIT_S) -> int:
        """Ask, step by step, until no answer is RETRY; return the number of leading hits."""

        def count() -> int | None:
            answers = self.ask(request, keys)
            return None if Lookup.RETRY in answers else answers.count(Lookup.HIT)

        return self.wait_for(count, wait_s)

    def scan(self, request: str, keys: Sequence[Key], window: int) -> int:
        """Ask as vLLM's sliding-window lookup does: return the end of the last run of ``window`` hits, 0 for none."""
        return self.wait_for(lambda: self._scan(request, keys, window), WAIT_S)

    def _scan(self, request: str, keys: Sequence[Key], window: int) -> int | None:
        run, deferred, now_s = 0, False, self.now()
        for position in range(len(keys) - 1, -1, -1):
            answer = self.tier.lookup(keys[position], LookupContext(request, 16 * (position + 1)), now_s)
            deferred = deferred or answer is Lookup.RETRY
            run = run + 1 if answer is Lookup.HIT else 0
            if run == window:
                return None if deferred else position + window
        return None if deferred else run

    def wait_for(self, what: Callable[[], int | None], wait_s: float = WAIT_S) -> int:
        """Step until ``what`` returns something other than None, and return it."""
        deadline_s = time.monotonic() + wait_s
        while time.monotonic() < deadline_s:
            answer = what()
            self.flush()
            if answer is not None:
                return answer
            time.sleep(0.001)
        raise AssertionError("no answer in time")

    def settle(self) -> None:
        """Step until no background work is left."""
        self.flush()
        self.wait_for(lambda: None if is_at_work(self.tier._prober) else 1)
        self.flush()

    def put(
        self, *keys: Key, ranks: Iterable[int] | None = None, size_bytes: int | None = None, age_s: float = 0.0
    ) -> None:
        """Put ``keys`` into the store as another server would. ``size_bytes``: None for each rank's own size."""
        assert isinstance(self.store, MemoryStore)
        for key in keys:
            group = key_group(key)
            for rank in self.namespace.shards(group) if ranks is None else ranks:
                size = self.namespace.shard_bytes(group, rank) if size_bytes is None else size_bytes
                self.store.put(shard_name(self.namespace.name, key, rank), size, age_s)

    def heads(self) -> int:
        assert isinstance(self.store, MemoryStore)
        return len(self.store.names("head"))
