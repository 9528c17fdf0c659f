"""The contract of a tier: ``Tier`` is what the scheduler's process asks of it, ``Link`` what a rank reaches it by.
``tiers.inspect`` has what commands ask.

Threading: a ``Tier`` is used by the scheduler's thread alone, once it is open. A ``Link`` is used by the pump's thread,
after ``connect`` at start. Nothing here blocks on data or on slow metadata: what takes a link time is a generator, and
yields until it is done on a thread of the link's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from nixl_offload.identity.namespace import Namespace, ShardedFields
from nixl_offload.index import State
from nixl_offload.movers.base import FileId, Mover
from nixl_offload.tiers.breaker import BreakerState
from nixl_offload.types import Key, Location, Lookup, LookupContext, Outcome

T = TypeVar("T")

NOTHING_STORED: Final = "nothing is stored until this is over"
"""What links log while a tier is disabled for stores."""


@dataclass(frozen=True, slots=True)
class TierContext:
    """What a tier is opened for: its position among the tiers, the namespace it serves, and the engines beside it."""

    position: int
    namespace: Namespace
    world_size: int
    """Ranks of this engine."""
    dp_index: int = 0
    """Which of the data-parallel engines this is."""
    dp_engines: range = range(1)
    """Those that divide the capacity, this one among them: see ``vllm.serving_tiers.sharing_engines``."""

    @property
    def slot_classes(self) -> list[int]:
        """The sizes in bytes of the slots that the groups of the model need on each rank, smallest first."""
        return sorted({self.namespace.slot_bytes(group.group_id) for group in self.namespace.fields.groups})

    @property
    def replicas(self) -> dict[int, int]:
        """By slot size: how many ranks in a row have one copy of a chunk, as ``SlotPlaces.replicas``."""
        return dict(self.namespace.slot_replicas)

    @property
    def chunk_bytes(self) -> int:
        """What the largest chunk takes in a shared tier, at most."""
        if isinstance(self.namespace.fields, ShardedFields):
            return max(self.namespace.chunk_bytes(group.group_id) for group in self.namespace.fields.groups)
        return self.slot_classes[-1] * self.world_size


@dataclass(frozen=True, slots=True)
class SlotStatistics:
    """Of a tier whose chunks rest in slots; bytes per rank."""

    used_bytes: int
    capacity_bytes: int
    """What slots can take, retired ones included."""
    retired_bytes: int
    """Out of use for good, because something may still write there."""
    evictions: int
    """Chunks that made room for others, since the start."""


@dataclass(frozen=True, slots=True)
class SharedStatistics:
    """Of a tier that other servers write to as well; counters since the start."""

    probe_errors: int
    """Questions to the storage, whether a shard is there, that were not answered."""
    probe_seconds: list[float]
    """How long they took, since the last call; of very many the latest."""
    late: int
    """Requests that were not answered in time."""
    breakers: Mapping[str, BreakerState]
    """By what each watches: ``reach``, ``load`` or ``store``."""
    evictions: int | None = None
    """Chunks that this engine has deleted to make room for others. None: engines do not."""


class Place(Protocol):
    """What the ranks need to know to open their links; plain data, which travels to them."""

    @property
    def rank_namespaces(self) -> tuple[bytes, ...]:
        """By rank or by shard (``chunk.shards``), the 32 bytes that shard headers carry."""
        ...


def not_arrived(keys: Sequence[Key], failed: Mapping[Key, Outcome]) -> list[Key]:
    """Return which chunks of a load did not arrive as they were stored, of a prefix its end first. DROPPED is a load
    that was given up, and says nothing of the chunk.
    """
    return [key for key in reversed(keys) if failed.get(key, Outcome.DROPPED) is not Outcome.DROPPED]


class Tier:
    """One tier's index and capacity. None of it blocks, none of it raises for reasons of storage.

    The methods here are those of a tier that has nothing and takes nothing.
    """

    place: Place
    """What the ranks need to know of the tier."""
    is_local: bool = False
    """True if only this machine can read the tier."""

    @property
    def is_looking(self) -> bool:
        """Whether a request waits for an answer of the storage."""
        return False

    @property
    def in_use(self) -> bool:
        """Whether loads are expected to work. What is READY and also rests in another tier is served from there."""
        return False

    def statistics(self) -> SlotStatistics | SharedStatistics | None:
        """Return what the tier holds and has done, for metrics. Costs nothing per chunk."""
        return None

    def close(self, in_flight: Iterable[Key] = ()) -> None:
        """Let go of everything, waiting for storage a few seconds at most. Idempotent.

        ``in_flight``: chunks that were being written when the engine shut down, and whose bytes the ranks may have
        finished after their last report.
        """

    def state(self, key: Key) -> State | None:
        """Return the state of ``key`` in this tier, None when it does not know the key."""
        return None

    def reserve(self, key: Key, slot_bytes: int, evicted: list[Key]) -> Location | None:
        """Make ``key``, whose state is None, WRITING at a location, evicting as needed (victims are appended).

        None: no room, or the tier is disabled.
        """
        return None

    def commit(self, key: Key) -> bool:
        """WRITING to READY. False when the chunk was dropped meanwhile and its location is free now."""
        return False

    def abort(self, key: Key) -> None:
        """Forget a chunk that is being written, dropped meanwhile or not; its location is free now."""

    def retire(self, key: Key) -> None:
        """As ``abort``, but its location is never given to another chunk: something may still write there."""

    def pin(self, key: Key) -> Location:
        """Forbid eviction of a READY chunk and return where it is."""
        raise AssertionError("it has no chunk")

    def unpin(self, key: Key) -> None:
        """Take one pin back."""

    def touch(self, key: Key) -> None:
        """Count a use of a chunk, if it is READY."""

    def lookup(self, key: Key, context: LookupContext, now_s: float) -> Lookup:
        """Say whether ``key`` can be loaded. RETRY: not known, and somebody goes to look once ``flush`` is called."""
        return Lookup.MISS

    def flush(self, now_s: float) -> None:
        """The scheduler's step is over: begin what lookups have asked for, take in what was found."""

    def forget_request(self, request_id: str) -> None:
        """No more lookups will come for this request."""

    def doubts(self, request_id: str) -> bool:
        """Whether a lookup of this request went unanswered. The request stores nothing there, to avoid duplicates."""
        return False

    def stored(self, keys: Sequence[Key], failed: Mapping[Key, Outcome], now_s: float) -> None:
        """A store has been settled (committed or aborted already): take note of how the storage did."""

    def loaded(self, keys: Sequence[Key], failed: Mapping[Key, Outcome], now_s: float) -> list[Key]:
        """A load has been settled (unpinned already): never serve again what failed. Returns what was dropped."""
        return []

    def drop(self, key: Key) -> bool:
        """Give up a chunk that nobody is expected to ask for again. A tier that others read as well keeps it.

        True: it could be loaded until now.
        """
        return False

    def clear(self) -> None:
        """Drop every chunk, at a cost that does not grow with their number."""


@dataclass(slots=True, eq=False)
class Target:
    """An opened place for one chunk. Links subclass it with what they must remember."""

    file: FileId
    offset: int
    """Byte offset of the header page in ``file``."""


class Link(ABC):
    """How a rank reaches one tier: turns key and location into what a mover can open, makes a finished write visible,
    and remembers whether the tier works.

    After a failure still holds: other chunks are untouched, and what was visible before is unchanged.

    ``begin_*`` raise TierError after taking note of the cause. For each ``begin`` that returned there is exactly one
    ``end_*`` or ``fail_*``, called when every transfer of the target is final (or was given up with quarantine). An
    ``error`` of None says that storage is not to blame. ``end_*`` and ``fail_*`` let go of the target however they end.
    """

    name: str
    """For logs: ``slab tier /mnt/kv``."""
    mover: Mover
    shares_file: bool = False
    """Whether chunks lie in files that many have, so that one transfer can move several. Where False, each shard is a
    file or an object of its own.
    """

    @abstractmethod
    def connect(self) -> None:
        """Make ready at start; trouble is remembered, not raised: the tier is tried again later."""

    @property
    @abstractmethod
    def trouble(self) -> str:
        """Why nothing is stored now, in a word; ``none`` while all is well."""

    @abstractmethod
    def may_store(self) -> bool:
        """Whether to store now; may be the trial that brings the tier back into use."""

    @abstractmethod
    def may_load(self) -> bool:
        """Whether to load now; may be the trial, too."""

    @property
    def suspect(self) -> bool:
        """Whether loads failed of late, so that what is in flight may never be answered. Pure and quick."""
        return False

    @abstractmethod
    def begin_write(
        self, key: Key, location: Location, length_bytes: int, shard: int | None = None
    ) -> Generator[None, None, Target]:
        """Make room for a shard of ``length_bytes``, header page included, and open it. Returns the target.

        ``shard``: its number, where chunks are cut by their heads; None: it is the rank's.
        """

    @abstractmethod
    def end_write(self, target: Target) -> Generator[None, None, None]:
        """All is written: make it visible as a whole. Raises TierError; then nothing has become visible."""

    @abstractmethod
    def fail_write(self, target: Target, error: str | None) -> None:
        """The write failed or was given up: undo what can be undone, and take note."""

    @abstractmethod
    def begin_read(
        self, key: Key, location: Location, length_bytes: int, shard: int | None = None
    ) -> Generator[None, None, Target]:
        """Open a stored shard of ``length_bytes``. Returns the target; raises TierError (``missing``: it is gone).

        ``shard``: as for ``begin_write``.
        """

    @abstractmethod
    def end_read(self, target: Target) -> None:
        """Storage has answered: all wanted bytes have arrived (whether they verify is another matter), or the shard is
        gone.
        """

    @abstractmethod
    def fail_read(self, target: Target, error: str | None) -> None:
        """The read failed: take note."""

    def overdue(self) -> None:
        """A load was given up while its transfer goes on; ``end_read`` or ``fail_read`` of it still comes."""
        return

    @abstractmethod
    def close(self) -> None:
        """Close what is open in the mover and end threads. Nothing may be in flight. The mover stays open."""


def at_once(value: T) -> Generator[None, None, T]:
    """Return ``value`` without a wait: what a link yields from that has nothing to wait for."""
    yield from ()
    return value
