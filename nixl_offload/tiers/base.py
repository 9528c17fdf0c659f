"""The contract of a tier: ``Tier`` is the scheduler's half, ``Link`` a rank's half. ``tiers.inspect`` is the contract
for commands.

Threading: once open, a ``Tier`` is used by the scheduler's thread alone. A ``Link`` is used by the pump's thread, after
``connect`` at start. Nothing here blocks on data or on slow metadata. A slow method of a link is a generator: it yields
until a thread of the link's own has done the work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from nixl_offload.identity.namespace import Namespace
from nixl_offload.index import Index, State
from nixl_offload.movers.base import FileId, Mover
from nixl_offload.tiers.breaker import BreakerState
from nixl_offload.types import Key, Location, Lookup, LookupContext, Outcome

NOTHING_STORED: Final = "nothing is stored until this is over"
"""Part of the message that a link logs when it stops storing."""


@dataclass(frozen=True, slots=True)
class TierContext:
    """The engine that opens a tier: the tier's position in its config, its namespace, its ranks and its neighbours."""

    position: int
    namespace: Namespace
    world_size: int
    """Ranks of this engine."""
    dp_index: int = 0
    """The index of this engine among the data-parallel engines."""
    dp_engines: range = range(1)
    """The engines that divide the capacity, this one included: see ``vllm.serving_tiers.sharing_engines``."""

    @property
    def slot_classes(self) -> list[int]:
        """The sizes in bytes of the slots that the groups of the model need on each rank, smallest first."""
        return sorted({self.namespace.slot_bytes(group.group_id) for group in self.namespace.fields.groups})

    @property
    def chunk_bytes(self) -> int:
        """The bytes of the largest chunk in a shared tier."""
        return max(self.namespace.chunk_bytes(group.group_id) for group in self.namespace.fields.groups)


@dataclass(frozen=True, slots=True)
class SlotStatistics:
    """Statistics of a tier whose chunks rest in slots; bytes per rank."""

    used_bytes: int
    capacity_bytes: int
    """Bytes of all slots, retired ones included."""
    retired_bytes: int
    """Bytes out of use for good, because late I/O may still write there."""
    evictions: int
    """Chunks evicted since the start."""


@dataclass(frozen=True, slots=True)
class SharedStatistics:
    """Statistics of a tier that other servers write to as well; counters since the start."""

    probes: int
    """Questions whether a shard exists."""
    probe_errors: int
    """Those that the storage failed to answer."""
    probe_seconds: list[float]
    """Durations of such questions since the last call; only the latest if there are very many."""
    late: int
    """Requests that were not answered in time."""
    breaker: BreakerState
    """CLOSED while the storage answers."""
    evictions: int | None = None
    """Chunks that this engine has deleted to make room. None: engines do not evict from this tier."""


@dataclass(frozen=True, slots=True)
class Place:
    """The tier's data for the ranks; sent to them once, when the tier opens."""

    namespace: bytes
    """``Namespace.digest``."""


def not_arrived(keys: Sequence[Key], failed: Mapping[Key, Outcome]) -> list[Key]:
    """Return the chunks of a load that did not arrive or are damaged, last first. DROPPED chunks are not among them:
    their load was given up, so nothing is known of them.
    """
    return [key for key in reversed(keys) if failed.get(key, Outcome.DROPPED) is not Outcome.DROPPED]


class Tier:
    """One tier's index and capacity. No method blocks, and none raises for reasons of storage.

    The methods of this base class are those of a tier that holds nothing and accepts nothing.
    """

    place: Place
    """The data that ranks need to open their links."""
    is_local: bool = False
    """True if only this machine can read the tier."""
    ranks_load: bool = True
    """False while the loads of some rank fail, as the ranks report."""
    timed_reads: Sequence[tuple[int, float]] = ()
    """Bytes and seconds of reads that were timed when the tier was opened. The reader empties it."""

    found: float = 0.0
    """The part of their chunks that searches have found of late; 0 if the tier never searches."""
    search_s: float = 0.0
    """How long a search takes of late."""

    @property
    def is_looking(self) -> bool:
        """Whether a request is waiting for the storage to answer a lookup."""
        return False

    @property
    def in_use(self) -> bool:
        """Whether loads are expected to work. If not, READY chunks are loaded from another tier that has them."""
        return False

    def statistics(self) -> SlotStatistics | SharedStatistics | None:
        """Return statistics for metrics, if the tier has any. The cost does not depend on the number of chunks."""
        return None

    def close(self, in_flight: Iterable[Key] = ()) -> None:
        """Release everything, waiting for storage a few seconds at most. Idempotent.

        ``in_flight``: chunks that were being written when the engine shut down. Ranks may have finished them after
        their last report.
        """

    def __init__(self, index: Index | None = None) -> None:
        """``index``: of the chunks that the tier knows; None: an empty one."""
        self._index = Index() if index is None else index

    def states(self, keys: Sequence[Key]) -> list[State | None]:
        """Return the state of each key in this tier, None if the tier does not know it."""
        return self._index.states(keys)

    def state(self, key: Key) -> State | None:
        """Return the state of one key."""
        return self.states((key,))[0]

    def reserve(self, key: Key, slot_bytes: int, evicted: list[Key]) -> Location | None:
        """Make ``key`` (now None) WRITING and return its location. Evicts as needed, appending victims to ``evicted``.

        Returns None if there is no room or the tier is disabled.
        """
        return None

    def commit(self, keys: Iterable[Key]) -> list[Key]:
        """Make WRITING chunks READY, and return them. The others were dropped meanwhile; their locations are free now.

        In lists of keys here and below, the last is used most recently.
        """
        return []

    def abort(self, key: Key) -> None:
        """Forget a chunk that is being written, even if it was dropped meanwhile, and free its location."""

    def retire(self, key: Key) -> None:
        """Forget a chunk that is being written. Its location is never used again: late I/O may still write there. (An
        object that arrives late is like any other: a load verifies it.)
        """
        self.abort(key)

    def pin(self, keys: Sequence[Key]) -> list[Location]:
        """Forbid eviction of READY chunks and return their locations."""
        return self._index.pin(keys)

    def unpin(self, keys: Iterable[Key]) -> None:
        """Take one pin of each chunk back. A chunk counts as used when it has none left."""
        self._index.unpin(keys)

    def touch(self, keys: Iterable[Key]) -> None:
        """Mark READY chunks as recently used; others are ignored."""
        self._index.touch(keys)

    def lookup(self, key: Key, context: LookupContext, now_s: float) -> Lookup:
        """Return whether ``key`` can be loaded. RETRY: unknown; ``on_step`` starts a search."""
        return Lookup.MISS

    def on_step(self, now_s: float) -> None:
        """Called at the end of each scheduler step: start the searches of its lookups, take in finished ones."""

    def forget_request(self, request_id: str) -> None:
        """No more lookups will come for this request."""

    def answered(self, request_id: str) -> bool | None:
        """Whether the lookups of this request were answered; None: not yet, so it has to wait with its stores."""
        return True

    def after_store(self, keys: Sequence[Key], failed: Mapping[Key, Outcome], now_s: float) -> None:
        """Called when a store has been settled (committed or aborted): record whether the storage worked."""

    def after_load(self, keys: Sequence[Key], failed: Mapping[Key, Outcome], now_s: float) -> list[Key]:
        """Called when a load has been settled (unpinned): drop the chunks that failed, and return them."""
        return []

    def clear(self) -> None:
        """Drop every chunk. The cost does not grow with their number."""


@dataclass(slots=True, eq=False)
class Target:
    """The opened location of one shard. A link may subclass it to remember more."""

    file: FileId
    offset: int
    """Byte offset of the header page in ``file``."""


class Link(ABC):
    """A rank's access to one tier: opens the target of a key and location in a mover, makes a finished write visible,
    and remembers whether the tier works.

    After a failure, other chunks are untouched, and shards that were visible before are unchanged.

    ``begin_*`` record the cause of a failure, then raise TierError. For each ``begin_*`` that returned, exactly one
    ``end_*`` or ``fail_*`` is called, when every transfer of the target is final (or was given up with quarantine). An
    ``error`` of None means that storage is not to blame. ``end_*`` and ``fail_*`` always release the target.
    """

    name: str
    """For logs: ``slab tier /mnt/kv``."""
    mover: Mover
    shares_file: bool = False
    """True if one file holds many chunks, so that one transfer can move several; False if each shard is a file or an
    object of its own.
    """

    @abstractmethod
    def connect(self) -> None:
        """Prepare at start. A failure is recorded, not raised; the tier is tried again later."""

    @property
    @abstractmethod
    def trouble(self) -> str:
        """Why nothing is stored or loaded now, in a word; ``none`` while all is well."""

    @property
    def refuses(self) -> bool:
        """Whether stores fail now, but for trials. Pure and quick."""
        return self.trouble != "none"

    @abstractmethod
    def may_store(self) -> bool:
        """Whether to store now. True may mean a trial, after which the tier is in use again."""

    @abstractmethod
    def may_load(self) -> bool:
        """Whether to load now. True may mean a trial."""

    @property
    def suspect(self) -> bool:
        """Whether recent loads failed, so that loads in flight may never end. Pure and quick."""
        return False

    @abstractmethod
    def begin_write(self, key: Key, location: Location, length_bytes: int, shard: int) -> Generator[None, None, Target]:
        """Make room for a shard of ``length_bytes``, header page included, and open it. Returns the target.

        ``shard``: its number.
        """

    @abstractmethod
    def end_write(self, target: Target) -> Generator[None, None, None]:
        """Make the written shard visible as a whole. If it raises TierError, nothing has become visible."""

    @abstractmethod
    def fail_write(self, target: Target, error: str | None) -> None:
        """The write failed or was given up: undo what can be undone, and record the failure."""

    @abstractmethod
    def begin_read(self, key: Key, location: Location, length_bytes: int, shard: int) -> Generator[None, None, Target]:
        """Open a stored shard of ``length_bytes``. Returns the target; raises TierError (``missing``: it is gone).

        ``shard``: as for ``begin_write``.
        """

    @abstractmethod
    def end_read(self, target: Target) -> None:
        """Storage has answered: all wanted bytes have arrived (not yet verified), or the shard is gone."""

    @abstractmethod
    def fail_read(self, target: Target, error: str | None) -> None:
        """The read failed: record the failure."""

    def overdue(self) -> None:
        """A load was given up while its transfer goes on; ``end_read`` or ``fail_read`` still follows."""
        return

    @abstractmethod
    def close(self) -> None:
        """Close the link's files in the mover and end its threads. Nothing may be in flight. The mover stays open."""
