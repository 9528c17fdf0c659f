"""The records of the engine: a chunk on its way, its job, and what became of both.

Threading: ``Job`` and ``Task`` belong to ``jobs.JobTable``, whose lock guards every mutable field; all others are
immutable.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from nixl_offload.engine.streams import Fence
from nixl_offload.types import Key, Location, Outcome


@dataclass(frozen=True, slots=True)
class ChunkIO:
    """One chunk of a job on this rank."""

    key: Key
    location: Location
    group: int
    """Position in ``KVLayout.groups``."""
    block_ids: npt.NDArray[np.int32]
    """GPU blocks that hold consecutive blocks of the chunk; shape (n,). Empty only where ``host_offset`` is given: then
    no KV block takes part."""
    first_block: int
    """Position in the chunk of ``block_ids[0]``; 0 unless only a tail of the chunk is wanted."""
    host_offset: int | None = None
    """Byte offset of a slot in the host slab (``engine.host``). A store takes the whole image, header included, from
    there, not from KV blocks. A load reads the whole image to there, verifies all of it, and serves its KV blocks, if
    any, from it; the image stays (it was *landed*)."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of a job. ``outcomes`` has one entry per ChunkIO, in the order they were submitted."""

    job_id: int
    is_store: bool
    outcomes: tuple[Outcome, ...]
    bytes_moved: int
    """Payload bytes of the chunks that are OK."""
    seconds: float
    """From submit to the last chunk."""
    errors: tuple[str, ...]
    """Short distinct phrases for a log line; empty if all is well."""
    shares: tuple[Share, ...] = ()
    """What each tier did of it: see ``chain.ChainEngine``."""
    causes: tuple[tuple[Outcome, str, int], ...] = ()
    """Of what is not OK: the outcome, why in one word, and of how many chunks; for metrics."""


@dataclass(frozen=True, slots=True)
class Share:
    """A tier's part in a job: ``bytes_moved`` of chunks that are OK, ``seconds`` from submit to its last chunk."""

    tier: int
    bytes_moved: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Landed:
    """What became of the host slots of a load, told once nothing moves there any more, which may be long after its
    ``JobResult``. ``outcomes`` has one entry per ChunkIO of the job that has a ``host_offset``, in their order.
    TAINTED: the slot must never be used again.
    """

    job_id: int
    outcomes: tuple[Outcome, ...]


class Stage(Enum):
    """Where a chunk stands. ``SOURCE`` is the only stage of a store in which its KV blocks must not be overwritten by
    others; a queued store may be dropped instead.
    """

    QUEUED = "queued"
    SOURCE = "source"
    """Store: the KV blocks are being read (gathered, or by the mover itself)."""
    IO = "io"
    """Store: only staging is read from here on. Load: reading from storage."""
    SCATTER = "scatter"
    """Load: verified, on its way from staging to the KV blocks."""
    DONE = "done"


TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    Stage.QUEUED: frozenset({Stage.SOURCE, Stage.IO, Stage.DONE}),
    Stage.SOURCE: frozenset({Stage.IO, Stage.DONE}),
    Stage.IO: frozenset({Stage.SCATTER, Stage.DONE}),
    Stage.SCATTER: frozenset({Stage.DONE}),
    Stage.DONE: frozenset(),
}


class Lane(Enum):
    """Queues, served in this order: loads overtake stores, and what a caller stands waiting for comes first."""

    URGENT_STORE = "urgent_store"
    EXPEDITED_LOAD = "expedited_load"
    LOAD = "load"
    STORE = "store"
    MOVE = "move"
    """Between tiers: nobody waits for it."""


@dataclass(slots=True, eq=False)
class Task:
    """One chunk of a job on its way. ``stage`` and ``outcome`` change only through ``JobTable``."""

    job: Job
    io: ChunkIO
    size_bytes: int
    """Payload bytes of its blocks: what the queue limit and ``bytes_moved`` count."""
    stage: Stage = Stage.QUEUED
    in_place: bool = False
    """The mover is at the KV blocks themselves: only a final transfer ends this."""
    disowned: bool = False
    """A store in place whose blocks were given away under it: what it writes is worthless, so it cannot be OK."""
    outcome: Outcome | None = None
    error: str | None = None
    cause: str = ""
    """``error`` in one word, for metrics."""
    landed: Outcome | None = None
    """Of the host slot of a load: known once nothing moves there any more."""

    @property
    def is_landing(self) -> bool:
        """Whether it fills a host slot."""
        return not self.job.is_store and self.io.host_offset is not None


@dataclass(slots=True, eq=False)
class Job:
    """One transfer job of vLLM, or of moves between tiers: the only record of it."""

    job_id: int
    is_store: bool
    fence: Fence
    """Done when the compute stream is past the submit: only then may KV blocks be touched."""
    submitted_s: float
    is_move: bool = False
    """Bounded by whoever submits it, not by the store queue's limit; dropped rather than failed while it waits."""
    tasks: list[Task] = field(default_factory=list)
    unfinished: int = 0
    unlanded: int = 0
    """Host slots to fill of which nothing was told yet."""
