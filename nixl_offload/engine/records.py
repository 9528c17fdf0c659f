"""A rank's work: kinds of work, the states of a chunk with every transition between them, records of chunks and jobs,
and sums of what the tiers did.

Threading: ``jobs.JobTable`` has one lock for all records. The fields of a chunk from ``result`` on belong to the pump
while it has the chunk in a batch. Completions and reports are values that are sent to the scheduler's half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from nixl_offload.engine.packer import Source
from nixl_offload.engine.staging import HostSlot, Slot, SlotPool
from nixl_offload.engine.streams import Fence
from nixl_offload.movers.base import Op, Transfer, TransferState
from nixl_offload.tiers.base import Target
from nixl_offload.types import Key, Location, Outcome, worst

if TYPE_CHECKING:
    from nixl_offload.engine.jobs import TierQueue

Operation = Literal["store", "load", "write_through", "fetch"]
"""Operations in metrics. store: KV blocks to the tier. load: the tier to KV blocks. write_through: another tier to this
one. fetch: this tier to a host slot, for another tier."""


class WorkKind(Enum):
    """What is done with a chunk. Columns: operation in metrics, writes to the tier, fills a host slot, background."""

    __hash__ = object.__hash__  # Enum's own is Python code, run at each lookup in a set or dict

    STORE = ("store", True, False, False)
    """KV blocks to the tier."""
    LOAD = ("load", False, False, False)
    """The tier to KV blocks."""
    PROMOTION = ("load", False, True, False)
    """The tier to a slot in host memory, which keeps the chunk; from the slot to a load's KV blocks."""
    WRITE_THROUGH = ("write_through", True, False, True)
    """A slot in host memory to the tier. No KV block takes part."""
    FETCH = ("fetch", False, True, True)
    """The tier to a slot in host memory. No KV block takes part."""

    def __init__(self, operation: Operation, writes: bool, fills_slot: bool, in_background: bool) -> None:
        self.operation = operation
        self.writes = writes
        self.op = Op.WRITE if writes else Op.READ
        self.fills_slot = fills_slot
        self.in_background = in_background
        """Nobody waits for it: it is served last, and if it ends while queued it is DROPPED, not FAILED."""
        self.reports_location = fills_slot or in_background
        """The outcome of its host slot, or of its location in another tier, is reported under a ticket."""
        self.waits_as = "background" if in_background else "store" if writes else "load"
        """The key of ``TierQueue.waiting_bytes`` that counts its queued bytes."""


class Lane(Enum):
    """Queues, served in this order: stores that a caller blocks on, loads, stores, moves into memory, other moves."""

    __hash__ = object.__hash__

    URGENT_STORE = auto()
    LOAD = auto()
    STORE = auto()
    FETCH = auto()
    BACKGROUND = auto()


LANES = tuple(Lane)


class ChunkState(Enum):
    """The state of a chunk."""

    __hash__ = object.__hash__

    QUEUED = auto()
    CLAIMED = auto()
    """Writes only: the KV blocks are being copied or summed. Nothing has been written, so it can still be dropped."""
    BORROWED = auto()
    """Stores only: a mover or a device reads the KV blocks and cannot be stopped."""
    DISOWNED = auto()
    """As BORROWED, but vLLM has reused the KV blocks: the bytes are worthless, so the store can only fail."""
    TRANSFER = auto()
    """On its way between the tier and memory that belongs to the engine. The KV blocks are not touched."""
    SCATTER = auto()
    """Loads only: the KV blocks are being written. Nothing can stop that."""
    DONE = auto()


TRANSITIONS: dict[ChunkState, frozenset[ChunkState]] = {
    ChunkState.QUEUED: frozenset({ChunkState.CLAIMED, ChunkState.TRANSFER, ChunkState.DONE}),
    ChunkState.CLAIMED: frozenset({ChunkState.BORROWED, ChunkState.TRANSFER, ChunkState.DONE}),
    ChunkState.BORROWED: frozenset({ChunkState.DISOWNED, ChunkState.TRANSFER, ChunkState.DONE}),
    ChunkState.DISOWNED: frozenset({ChunkState.DONE}),
    ChunkState.TRANSFER: frozenset({ChunkState.SCATTER, ChunkState.DONE}),
    ChunkState.SCATTER: frozenset({ChunkState.DONE}),
    ChunkState.DONE: frozenset(),
}

READS_BLOCKS = frozenset({ChunkState.QUEUED, ChunkState.CLAIMED, ChunkState.BORROWED})
"""States in which a store needs its KV blocks unchanged."""


def when_given_up(kind: WorkKind, state: ChunkState) -> ChunkState | Outcome | None:
    """Return what becomes of a chunk that nobody waits for any more: its outcome, another state, or None (it goes on).

    A write that has written nothing is dropped. A store whose blocks are being read keeps its location until the
    reading ends. A load is failed unless its KV blocks are being written.
    """
    if kind.writes:
        if state is ChunkState.BORROWED:
            return ChunkState.DISOWNED
        return Outcome.DROPPED if state in {ChunkState.QUEUED, ChunkState.CLAIMED} else None
    if state is ChunkState.QUEUED:
        return Outcome.DROPPED if kind.in_background else Outcome.FAILED
    return Outcome.FAILED if state is ChunkState.TRANSFER else None


def when_closed(kind: WorkKind, state: ChunkState) -> Outcome:
    """Return the outcome of a chunk whose pump ends first."""
    if state is ChunkState.QUEUED and (kind.writes or kind.in_background):
        return Outcome.DROPPED
    if kind is WorkKind.WRITE_THROUGH:
        return Outcome.TAINTED  # its host slot may still be read
    return Outcome.FAILED


# -- records ----------------------------------------------------------------------------------------------------------

NO_BLOCKS = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Chunk:
    """A chunk, or a shard of one, that this rank moves for one job: the only record of it."""

    key: Key
    location: Location
    """In the tier whose pump moves it."""
    group: int
    """Position in ``KVLayout.groups``: of the rank's shard, not vLLM's KV cache group, which ``key`` has."""
    block_ids: npt.NDArray[np.int32]
    """Ids of the GPU blocks that hold consecutive blocks of the chunk; shape (n,). It may be empty if ``host_offset``
    is given: then no KV block takes part."""
    first_block: int = 0
    """Position in the chunk of ``block_ids[0]``; 0 unless only a tail of the chunk is wanted."""
    host_offset: int | None = None
    """Byte offset of a slot in the host slab. A write-through takes the whole image from there. A promotion or fetch
    reads the whole image into it, verifies the image, and fills its KV blocks, if any, from there."""
    onward: Location | None = None
    """For a fetch between two farther tiers: where the other tier's pump writes it. The host slot is a relay slot."""
    position: int = 0
    """Index of the caller's chunk in the job; shards of one chunk share it."""

    kind: WorkKind = field(init=False)
    """Set by ``make_move``, or by the chunk's ``Job``."""
    job: Job = field(init=False, repr=False)
    queue: TierQueue | None = field(default=None, init=False, repr=False)
    """None: it was never queued."""
    share: Share | None = field(default=None, init=False)
    size_bytes: int = field(default=0, init=False)
    """Payload bytes of its blocks, which the queue limit and ``bytes_moved`` count."""
    queued_s: float = field(default=0.0, init=False)
    state: ChunkState = field(default=ChunkState.QUEUED, init=False)
    outcome: Outcome | None = field(default=None, init=False)
    """As the job's completion reports it, with ``error`` and ``cause``."""
    error: str | None = field(default=None, init=False)
    cause: str = field(default="", init=False)
    """``error`` in one word, for metrics."""
    location_outcome: Outcome | None = field(default=None, init=False)
    """As its ticket's completion reports it; None if it has no ticket."""

    result: tuple[Outcome, str | None, str] | None = field(default=None, init=False)
    """The outcome in its batch, with ``error`` and ``cause``; None while the batch goes on. It becomes ``outcome``
    unless the chunk was given up before."""
    pool: SlotPool[Any] | None = field(default=None, init=False, repr=False)
    """The pool of ``staging_slot``."""
    staging_slot: Slot[Any] | None = field(default=None, init=False)
    """The staging slot in which it is packed; for a direct chunk, its header page."""
    host_slot: HostSlot | None = field(default=None, init=False)
    """The slot of the host slab that holds its image, or will hold it."""
    is_kept: bool = field(default=False, init=False)
    """The image in ``host_slot`` is whole and verified."""
    summed_rows: Source | None = field(default=None, init=False, repr=False)
    """Its verified blocks from ``summed_from`` on, where ``Packer.bring`` put them; released when the chunk ends."""
    summed_from: int = field(default=0, init=False)
    sums: npt.NDArray[np.uint64] | None = field(default=None, init=False, repr=False)
    """Checksums of its blocks, if a device computed them."""
    row: int = field(default=0, init=False)
    """Its row in the batch's ``HeaderRows``."""
    target: Target | None = field(default=None, init=False)
    """The link's target, from the begin of a read or write to its end."""
    transfers: tuple[Transfer, ...] = field(default=(), init=False, repr=False)
    """Transfers that move it. The batch lists them too."""
    is_overdue: bool = field(default=False, init=False)
    """It was given up while it was read, and the link was told."""

    @property
    def failure(self) -> Transfer | None:
        """The first of its transfers that has failed, or None."""
        return next((transfer for transfer in self.transfers if transfer.state is TransferState.FAILED), None)

    @property
    def is_held(self) -> bool:
        """Whether a transfer may still touch its memory: one that is not final, or one that failed with late I/O."""
        return any(transfer.state is TransferState.PENDING or transfer.quarantine for transfer in self.transfers)

    def end(self, outcome: Outcome, error: str | None = None, cause: str = "") -> None:
        """Set ``result``; the first call counts. It is reported when the batch ends."""
        if self.result is None:
            self.result, self.summed_rows = (outcome, error, cause), None

    def travels_with(self, other: Chunk) -> bool:
        """Whether both may share a batch: the same job, group and kind, and the same group index in their keys."""
        alike = self.job is other.job and self.group == other.group and self.kind is other.kind
        return alike and self.key[-4:] == other.key[-4:]


def make_move(key: Key, group: int, source: Location, target: Location, *, memory: int | None) -> Chunk:
    """Return a chunk that moves between tiers. A location of the memory tier is a byte offset in the host slab."""
    if source.tier == memory:
        chunk = Chunk(key, target, group, NO_BLOCKS, host_offset=source.offset)
    else:
        offset, onward = (target.offset, None) if target.tier == memory else (None, target)
        chunk = Chunk(key, source, group, NO_BLOCKS, host_offset=offset, onward=onward)
    chunk.kind = WorkKind.WRITE_THROUGH if source.tier == memory else WorkKind.FETCH
    return chunk


@dataclass(slots=True, eq=False)
class Share:
    """A tier's part in a job. Changes until its last chunk has ended."""

    operation: Operation
    tier: int
    bytes_moved: int = 0
    """Payload bytes of OK chunks."""
    seconds: float = 0.0
    """From submit to its last chunk."""
    unfinished: int = 0
    failures: Counter[tuple[Outcome, str]] = field(default_factory=Counter)
    """Numbers of chunks that are not OK, by outcome and cause."""


@dataclass(slots=True, eq=False)
class Job:
    """What this rank does of a ticket: a store, a load with the promotions of some of its chunks, or moves.

    It is the only record and owns its chunks, which may lie in several tiers.
    """

    kind: WorkKind
    """STORE, LOAD, FETCH for moves into memory, or WRITE_THROUGH for other moves."""
    chunks: list[Chunk]
    count: int
    """Number of the caller's chunks. Each has no, one or several entries in ``chunks``."""
    fence: Fence
    """Done when the compute stream has passed the submit. KV blocks may be touched only then."""
    job_id: int | None = None
    """None: moves have none."""
    ticket: int = 0
    """Its number."""
    promotion_ticket: int = 0
    """For a load: the ticket that reports its promotions; 0: there are none."""
    promoted: Sequence[int] = ()
    """For a load: the positions of the caller's chunks that ``promotion_ticket`` reports."""
    refused: tuple[Outcome, str] | None = None
    """If the job is not done at all: the outcome and error of its chunks."""

    submitted_s: float = field(default=0.0, init=False)
    unfinished: int = field(default=0, init=False)
    """Chunks that have no outcome."""
    unreported: int = field(default=0, init=False)
    """Chunks whose host slot or location is not reported yet."""
    shares: dict[tuple[Operation, int], Share] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for chunk in self.chunks:
            chunk.job = self
            if not self.kind.in_background:
                is_promoted = self.promotion_ticket and chunk.host_offset is not None
                chunk.kind = WorkKind.PROMOTION if is_promoted else self.kind

    @property
    def location_ticket(self) -> int:
        """The ticket that reports host slots and locations in other tiers; 0: there is none."""
        return self.ticket if self.kind.in_background else self.promotion_ticket

    def completion(self) -> Completion:
        """Return the completion of vLLM's job. All of its chunks must be DONE."""
        assert self.job_id is not None
        failed = [chunk for chunk in self.chunks if chunk.outcome is not Outcome.OK]
        shares = sorted(self.shares.values(), key=lambda share: share.tier)
        return Completion(
            self,
            self.job_id,
            _folded(self.count, ((chunk.position, chunk.outcome) for chunk in failed)),
            sum(share.bytes_moved for share in shares),
            max((share.seconds for share in shares), default=0.0),
            tuple(dict.fromkeys(chunk.error for chunk in failed if chunk.error is not None)),
            tuple(shares),
        )

    def location_completion(self) -> Completion:
        """Return the completion of ``location_ticket``. No chunk may be unreported."""
        reported = [chunk for chunk in self.chunks if chunk.location_outcome is not None]
        outcomes = _folded(self.count, ((chunk.position, chunk.location_outcome) for chunk in reported))
        if not self.kind.in_background:
            outcomes = tuple(outcomes[at] for at in self.promoted)
        return Completion(self, self.location_ticket, outcomes)


@dataclass(frozen=True, slots=True)
class Completion:
    """The outcome of a ticket, success or failure.

    A load with promotions has two tickets: its own ends when nobody needs its blocks any more, that of the promotions
    when nothing touches their host slots any more.
    """

    job: Job
    job_id: int
    """Of vLLM's job; for promotions and moves, the ticket's number."""
    outcomes: tuple[Outcome, ...]
    """One per chunk, in order of submission: the gravest of its shards. TAINTED in a ticket: the slot or location must
    never be used again."""
    bytes_moved: int = 0
    """Payload bytes of the chunks that are OK."""
    seconds: float = 0.0
    """From submit to the last chunk."""
    errors: tuple[str, ...] = ()
    """Short distinct phrases for a log line; empty if all is well."""
    shares: tuple[Share, ...] = ()
    """Each tier's part in it."""


def _folded(count: int, ended: Iterable[tuple[int, Outcome | None]]) -> tuple[Outcome, ...]:
    """Return the gravest outcome of each position; OK if this rank has no part of that chunk."""
    outcomes = [Outcome.OK] * count
    for position, outcome in ended:
        outcomes[position] = worst(outcomes[position], outcome or Outcome.FAILED)
    return tuple(outcomes)


# -- what tiers have done ----------------------------------------------------------------------------------------------

MAX_SAMPLES = 256
"""Most durations per tier and operation between two reports; further ones are discarded."""


class Act(NamedTuple):
    """An operation of one tier. Tiers are positions in the config."""

    operation: Operation
    tier: int


class Failure(NamedTuple):
    """A kind of failure: operation, tier, value of ``types.Outcome``, and cause in one word."""

    operation: Operation
    tier: int
    outcome: str
    cause: str


@dataclass(slots=True)
class Work:
    """Work since the last report, on one rank or several."""

    payload_bytes: Counter[Act] = field(default_factory=Counter)
    """Bytes of OK shards, without headers and padding."""
    seconds: dict[Act, list[float]] = field(default_factory=dict)
    """From submit to the last shard, waiting included: one number for each job with an OK shard."""
    failures: Counter[Failure] = field(default_factory=Counter)
    """Numbers of shards."""

    def __bool__(self) -> bool:
        return bool(self.payload_bytes or self.failures)

    def add(self, share: Share) -> None:
        """Count what one tier has done of a job."""
        if share.bytes_moved:
            act = Act(share.operation, share.tier)
            self.payload_bytes[act] += share.bytes_moved
            samples = self.seconds.setdefault(act, [])
            if len(samples) < MAX_SAMPLES:
                samples.append(share.seconds)
        for (outcome, cause), shards in share.failures.items():
            self.failures[Failure(share.operation, share.tier, outcome.value, cause)] += shards

    def merge(self, other: Work) -> Work:
        """Return the sum of two reports."""
        seconds = {act: list(samples) for act, samples in self.seconds.items()}
        for act, samples in other.seconds.items():
            seconds.setdefault(act, []).extend(samples)
        return Work(self.payload_bytes + other.payload_bytes, seconds, self.failures + other.failures)


class Waiting(NamedTuple):
    """Payload bytes that are queued for one tier on one rank, without those in flight."""

    load_bytes: int = 0
    store_bytes: int = 0
    move_bytes: int = 0


class TierAccess(NamedTuple):
    """How one rank reaches one tier."""

    mover: str
    paths: tuple[str, ...]
    """Transfer paths of its KV groups: ``direct``, ``device``, ``host``."""


class TierStatus(NamedTuple):
    """The status of one tier on one rank."""

    waiting: Waiting = Waiting()
    trouble: str = ""
    """Why the tier is not used now, in a word; empty if it is."""
    access: TierAccess | None = None
    """None: the tier cannot be used on this rank."""
    loads_fail: bool = False
    stores_fail: bool = False
