"""The records of a rank: a chunk, the job that it is of, and what became of both.

Threading: ``jobs.JobTable`` has one lock for all of them. The fields of a chunk from ``result`` on belong to the pump
while it has the chunk in a batch. ``Completion`` does not change any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nixl_offload.engine.copies import Source
from nixl_offload.engine.staging import DeviceSlot, Slot, SlotPool
from nixl_offload.engine.states import ChunkState, Operation, WorkKind
from nixl_offload.engine.streams import Fence
from nixl_offload.movers.base import Transfer, TransferState
from nixl_offload.tiers.base import Target
from nixl_offload.types import Key, Location, Outcome, worst

if TYPE_CHECKING:
    from nixl_offload.engine.jobs import TierQueue

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
    brought: Source | None = field(default=None, init=False, repr=False)
    """What ``Packer.bring`` returned: its blocks from ``brought_from`` on, verified; given up with the chunk."""
    brought_from: int = field(default=0, init=False)
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
            self.result, self.brought = (outcome, error, cause), None

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
    unsettled: int = field(default=0, init=False)
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

    def settlement(self) -> Completion:
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
