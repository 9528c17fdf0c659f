"""What a rank knows of its work: the kinds of work, the states of a chunk with every transition between them, the
records of chunks and jobs, and what tiers have done, added up.

Threading: ``jobs.JobTable`` has one lock for all records. The fields of a chunk from ``result`` on belong to the pump
while it has the chunk in a batch. Completions and reports are values, which travel to the scheduler's half.
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
from nixl_offload.engine.staging import DeviceSlot, Slot, SlotPool
from nixl_offload.engine.streams import Fence
from nixl_offload.movers.base import Transfer, TransferState
from nixl_offload.tiers.base import Target
from nixl_offload.types import Key, Location, Outcome, worst

if TYPE_CHECKING:
    from nixl_offload.engine.jobs import TierQueue

Operation = Literal["store", "load", "write_through", "fetch"]
"""What metrics tell apart. store: from KV blocks to the tier. load: from the tier to KV blocks. write_through: from
another tier. fetch: for a farther one."""


class WorkKind(Enum):
    """What is done with a chunk. Columns: for metrics; does it write to the tier, fill a host slot, can it wait."""

    __hash__ = object.__hash__  # Enum's own is Python code, run each time that a set or dict is asked

    STORE = ("store", True, False, False)
    """KV blocks to the tier."""
    LOAD = ("load", False, False, False)
    """The tier to KV blocks."""
    PROMOTION = ("load", False, True, False)
    """The tier to a slot in host memory, which keeps the chunk, and from there to the KV blocks of a load."""
    WRITE_THROUGH = ("write_through", True, False, True)
    """A slot in host memory to the tier. No KV block takes part."""
    FETCH = ("fetch", False, True, True)
    """The tier to a slot in host memory. No KV block takes part."""

    def __init__(self, operation: Operation, writes: bool, fills_slot: bool, in_background: bool) -> None:
        self.operation = operation
        self.writes = writes
        self.fills_slot = fills_slot
        self.in_background = in_background
        """Nobody waits for it: it comes behind everything else, and is dropped rather than failed while it waits."""
        self.has_ticket = fills_slot or in_background
        """What becomes of a host slot, or of a place in another tier, is reported under a ticket."""
        self.waits_as = "background" if in_background else "store" if writes else "load"
        """Where its bytes are counted while they wait."""


class Lane(Enum):
    """Queues, served in this order: loads overtake stores, and what a caller is blocked on comes first."""

    __hash__ = object.__hash__

    URGENT_STORE = auto()
    EXPEDITED_LOAD = auto()
    LOAD = auto()
    STORE = auto()
    BACKGROUND = auto()


LANES = tuple(Lane)


class ChunkState(Enum):
    """Where a chunk stands."""

    __hash__ = object.__hash__

    QUEUED = auto()
    CLAIMED = auto()
    """Writes only: the KV blocks are being copied or summed. Nothing has been written, so it can still be dropped."""
    BORROWED = auto()
    """Stores only: a mover or a device reads the KV blocks and cannot be stopped."""
    DISOWNED = auto()
    """As BORROWED, but the KV blocks were given away meanwhile: what is written is worthless, so it can only fail."""
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
    reader has let go. A load is failed unless its KV blocks are being written.
    """
    if kind.writes:
        if state is ChunkState.BORROWED:
            return ChunkState.DISOWNED
        return Outcome.DROPPED if state in {ChunkState.QUEUED, ChunkState.CLAIMED} else None
    if state is ChunkState.QUEUED:
        return Outcome.DROPPED if kind.in_background else Outcome.FAILED
    return Outcome.FAILED if state is ChunkState.TRANSFER else None


def when_closed(kind: WorkKind, state: ChunkState) -> Outcome:
    """Return the outcome of a chunk whose end nobody will see."""
    if state is ChunkState.QUEUED and (kind.writes or kind.in_background):
        return Outcome.DROPPED
    if kind is WorkKind.WRITE_THROUGH:
        return Outcome.TAINTED  # its host slot may still be read
    return Outcome.FAILED


# -- records ----------------------------------------------------------------------------------------------------------

NO_BLOCKS = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Chunk:
    """A chunk, or a shard of one, on its way on this rank: the only record of it. It is of one job."""

    key: Key
    location: Location
    """In the tier whose pump moves it."""
    group: int
    """Position in ``KVLayout.groups``."""
    block_ids: npt.NDArray[np.int32]
    """GPU blocks that hold consecutive blocks of the chunk; shape (n,). Empty only where ``host_offset`` is given: then
    no KV block takes part."""
    first_block: int = 0
    """Position in the chunk of ``block_ids[0]``; 0 unless only a tail of the chunk is wanted."""
    host_offset: int | None = None
    """Byte offset of a slot in the host slab. A write-through takes the whole image from there. A promotion or fetch
    reads the whole image to there, verifies it, and serves its KV blocks, if any, from it."""
    onward: Location | None = None
    """Of a fetch between two farther tiers: where the other tier's pump writes it to. Its host slot is a relay slot."""
    position: int = 0
    """In its job; shards of one chunk have the same."""

    kind: WorkKind = field(init=False)
    """Set by ``make_move``, or by the chunk's ``Job``."""
    job: Job = field(init=False, repr=False)
    queue: TierQueue | None = field(default=None, init=False, repr=False)
    """None: it was never queued."""
    size_bytes: int = field(default=0, init=False)
    """Payload bytes of its blocks: what the queue limit and ``bytes_moved`` count."""
    queued_s: float = field(default=0.0, init=False)
    state: ChunkState = field(default=ChunkState.QUEUED, init=False)
    outcome: Outcome | None = field(default=None, init=False)
    """As the job's completion reports it, with ``error`` and ``cause``."""
    error: str | None = field(default=None, init=False)
    cause: str = field(default="", init=False)
    """``error`` in one word, for metrics."""
    slot_outcome: Outcome | None = field(default=None, init=False)
    """As its ticket's completion reports it; None if it has no ticket."""

    result: tuple[Outcome, str | None, str] | None = field(default=None, init=False)
    """What its batch has made of it, with ``error`` and ``cause``; None while it is alive there. It becomes the outcome
    unless the chunk was given up before."""
    pool: SlotPool[Any] | None = field(default=None, init=False, repr=False)
    """Takes ``slot`` back."""
    slot: Slot | DeviceSlot | None = field(default=None, init=False)
    """The staging slot in which it is packed; of a direct chunk its header page."""
    host: Slot | None = field(default=None, init=False)
    """A slot of the host slab that holds its image, or is to."""
    is_kept: bool = field(default=False, init=False)
    """The image in ``host`` is whole and verified."""
    summed_rows: Source | None = field(default=None, init=False, repr=False)
    """Its blocks from ``summed_from`` on, verified, where ``Packer.bring`` has them; given up with the chunk."""
    summed_from: int = field(default=0, init=False)
    sums: npt.NDArray[np.uint64] | None = field(default=None, init=False, repr=False)
    """Checksums of its blocks, where a device computed them."""
    row: int = field(default=0, init=False)
    """Its row among the headers that were read together."""
    target: Target | None = field(default=None, init=False)
    """Its place in the tier, from the begin of a read or write to its end."""
    transfers: tuple[Transfer, ...] = field(default=(), init=False, repr=False)
    """Its own, where no other chunk takes part in them; they are among the batch's too."""
    is_overdue: bool = field(default=False, init=False)
    """It was given up while it was read, and the link has heard of it."""

    @property
    def transfer_state(self) -> TransferState:
        """Where its own transfers stand: PENDING as long as any is, FAILED if one failed."""
        states = [transfer.state for transfer in self.transfers]
        for state in (TransferState.PENDING, TransferState.FAILED):
            if state in states:
                return state
        return TransferState.DONE

    def end(self, outcome: Outcome, error: str | None = None, cause: str = "") -> None:
        """Decide its result; the first one counts. It is reported when the batch ends."""
        if self.result is None:
            self.result, self.summed_rows = (outcome, error, cause), None

    def travels_with(self, other: Chunk) -> bool:
        """Whether both may be of one batch: one job, group and kind, and keys that name one group in the header."""
        alike = self.job is other.job and self.group == other.group and self.kind is other.kind
        return alike and self.key[-4:] == other.key[-4:]


def make_move(key: Key, group: int, source: Location, target: Location, *, memory: int | None) -> Chunk:
    """Return a chunk that goes from tier to tier. A location of the memory tier is a byte offset in the host slab."""
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
    wanted_bytes: int = 0
    bytes_moved: int = 0
    """Of chunks that are OK."""
    seconds: float = 0.0
    """From submit to its last chunk."""
    unfinished: int = 0
    failures: Counter[tuple[Outcome, str]] = field(default_factory=Counter)
    """Chunks that are not OK: by outcome, and why in one word."""


@dataclass(slots=True, eq=False)
class Job:
    """Chunks that are reported together: a job of vLLM, a ticket of moves, or a load with the ticket of its promotions.

    The only record of it; its chunks may lie in several tiers, and belong to it.
    """

    kind: WorkKind
    """STORE, LOAD, or WRITE_THROUGH for moves of any kind."""
    chunks: list[Chunk]
    count: int
    """Of the caller's chunks, each of which may be none, one or several of these."""
    fence: Fence
    """Done when the compute stream is past the submit: only then may KV blocks be touched."""
    job_id: int | None = None
    """None: moves have none."""
    ticket: int = 0
    """0: none of its chunks has one."""
    promoted: Sequence[int] = ()
    """Of a load: the positions of the caller's chunks that its ticket reports."""
    is_expedited: bool = False
    """It goes before the loads that wait already."""
    refused: tuple[Outcome, str] | None = None
    """Why nothing of it is done: the outcome of its chunks, and the words."""

    submitted_s: float = field(default=0.0, init=False)
    unfinished: int = field(default=0, init=False)
    """Chunks that have no outcome."""
    unreported: int = field(default=0, init=False)
    """Chunks whose host slots are not reported."""
    shares: dict[tuple[Operation, int], Share] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for chunk in self.chunks:
            chunk.job = self
            if not self.kind.in_background:
                is_promoted = self.ticket and self.kind is WorkKind.LOAD and chunk.host_offset is not None
                chunk.kind = WorkKind.PROMOTION if is_promoted else self.kind

    def completion(self) -> Completion:
        """Return what became of it, now that all of its chunks are DONE."""
        assert self.job_id is not None
        failed = [chunk for chunk in self.chunks if chunk.outcome is not Outcome.OK]
        shares = sorted(self.shares.values(), key=lambda share: share.tier)
        return Completion(
            self.job_id,
            _folded(self.count, ((chunk.position, chunk.outcome) for chunk in failed)),
            sum(share.bytes_moved for share in shares),
            max((share.seconds for share in shares), default=0.0),
            tuple(dict.fromkeys(chunk.error for chunk in failed if chunk.error is not None)),
            tuple(shares),
            self.chunks,
        )

    def ticket_completion(self) -> Completion:
        """Return what became of its ticket, now that the host slots of all of its chunks are reported."""
        reported = [chunk for chunk in self.chunks if chunk.slot_outcome is not None]
        outcomes = _folded(self.count, ((chunk.position, chunk.slot_outcome) for chunk in reported))
        return Completion(
            self.ticket, outcomes if self.kind.in_background else tuple(outcomes[at] for at in self.promoted)
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of a job, or of a ticket. Success and failure come by this one record.

    A load with promotions has two: of the job as soon as nobody needs its blocks, of the ticket as soon as nothing
    touches its host slots any more.
    """

    job_id: int
    """Of a ticket: its number."""
    outcomes: tuple[Outcome, ...]
    """One per chunk, in the order they were submitted: the gravest of its shards. In a ticket TAINTED says that a place
    must never be used again."""
    bytes_moved: int = 0
    """Payload bytes of the chunks that are OK."""
    seconds: float = 0.0
    """From submit to the last chunk."""
    errors: tuple[str, ...] = ()
    """Short distinct phrases for a log line; empty if all is well."""
    shares: tuple[Share, ...] = ()
    """What each tier did of it."""
    chunks: Sequence[Chunk] = ()


def _folded(count: int, ended: Iterable[tuple[int, Outcome | None]]) -> tuple[Outcome, ...]:
    """Return the gravest outcome of each position. One of which this rank has nothing is OK."""
    outcomes = [Outcome.OK] * count
    for position, outcome in ended:
        outcomes[position] = worst(outcomes[position], outcome or Outcome.FAILED)
    return tuple(outcomes)


# -- what tiers have done ----------------------------------------------------------------------------------------------

MAX_SAMPLES = 256
"""Durations per tier and operation between two reports; more are not reported."""


class Act(NamedTuple):
    """An operation of one tier. Tiers are positions in the config."""

    operation: Operation
    tier: int


class Failure(NamedTuple):
    """What did not end well: of which operation, as what ``types.Outcome``, and why in one word."""

    operation: Operation
    tier: int
    outcome: str
    cause: str


@dataclass(slots=True)
class Work:
    """What was done since the last report, on one rank or several."""

    payload_bytes: Counter[Act] = field(default_factory=Counter)
    """Of shards that are OK; without headers and padding."""
    seconds: dict[Act, list[float]] = field(default_factory=dict)
    """From submit to the last shard, waiting included: one number for each job of which something is OK."""
    failures: Counter[Failure] = field(default_factory=Counter)
    """Shards."""

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
        """Add two reports up, into a new one."""
        seconds = {act: list(samples) for act, samples in self.seconds.items()}
        for act, samples in other.seconds.items():
            seconds.setdefault(act, []).extend(samples)
        return Work(self.payload_bytes + other.payload_bytes, seconds, self.failures + other.failures)


class Waiting(NamedTuple):
    """Payload bytes that wait for their turn in one tier on one rank; what is under way is no part of it."""

    load_bytes: int = 0
    store_bytes: int = 0
    move_bytes: int = 0


class TierAccess(NamedTuple):
    """What one tier runs on, on one rank."""

    mover: str
    paths: tuple[str, ...]
    """Between KV blocks and the tier, of all KV groups: ``direct``, ``device``, ``host``."""


class TierStatus(NamedTuple):
    """How one tier stands on one rank."""

    waiting: Waiting = Waiting()
    trouble: str = ""
    """Why it is left alone now, in a word; empty while all is well."""
    access: TierAccess | None = None
    """None: the tier cannot be used on this rank."""
