"""The records of the engine: a chunk of a job, the job, and what became of both.

Threading: ``Job`` and ``Task`` belong to ``jobs.JobTable``, whose lock guards every mutable field; all others are
immutable.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nixl_offload.engine.states import ChunkState, WorkKind
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
    """Byte offset of a slot in the host slab (``engine.host``). A write-through takes the whole image, header included,
    from there. A load reads the whole image to there, verifies all of it, and serves its KV blocks, if any, from it;
    the image stays (it was *promoted*)."""


@dataclass(frozen=True, slots=True)
class Share:
    """A tier's part in a job: ``bytes_moved`` of chunks that are OK, ``seconds`` from submit to its last chunk."""

    tier: int
    bytes_moved: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of a job, or of a ticket. Success and failure come by this one record.

    ``outcomes`` and ``slots`` are told exactly once each: together, unless something may still touch a host slot when
    the job's chunks are done. Then ``slots`` is None, and another completion of the same job, without ``outcomes``,
    tells of the slots as soon as nothing touches them any more.
    """

    job_id: int
    """Of a ticket: its number."""
    kind: WorkKind
    outcomes: tuple[Outcome, ...]
    """One per chunk, in the order they were submitted."""
    slots: tuple[Outcome, ...] | None = ()
    """One per chunk that fills a host slot, in their order. TAINTED: the slot must never be used again."""
    bytes_moved: int = 0
    """Payload bytes of the chunks that are OK. Of a ticket: by their slots."""
    seconds: float = 0.0
    """From submit to the last chunk."""
    errors: tuple[str, ...] = ()
    """Short distinct phrases for a log line; empty if all is well."""
    causes: tuple[tuple[Outcome, str, int], ...] = ()
    """Of what is not OK: the outcome, why in one word, and of how many chunks; for metrics."""
    shares: tuple[Share, ...] = ()
    """What each tier did of it: see ``chain.ChainEngine``."""

    @property
    def ends_job(self) -> bool:
        """False where it only tells of host slots whose job has ended before."""
        return bool(self.outcomes) or not self.slots


@dataclass(slots=True, eq=False)
class Task:
    """One chunk of a job on its way. Fields change only through ``JobTable``."""

    job: Job
    io: ChunkIO
    kind: WorkKind
    size_bytes: int
    """Payload bytes of its blocks: what the queue limit and ``bytes_moved`` count."""
    state: ChunkState = ChunkState.QUEUED
    outcome: Outcome | None = None
    error: str | None = None
    cause: str = ""
    """``error`` in one word, for metrics."""
    slot: Outcome | None = None
    """Of the host slot that it fills: known once nothing touches that any more."""


@dataclass(slots=True, eq=False)
class Job:
    """One transfer job of vLLM, or one between tiers: the only record of it."""

    job_id: int
    kind: WorkKind
    fence: Fence
    """Done when the compute stream is past the submit: only then may KV blocks be touched."""
    submitted_s: float
    tasks: list[Task] = field(default_factory=list)
    unfinished: int = 0
    slots_total: int = 0
    """Host slots to fill."""
    unknown_slots: int = 0
    """Of those, how many of which nothing is known yet."""


class Ending(NamedTuple):
    """How a chunk ended, as the pump tells it."""

    task: Task
    outcome: Outcome
    error: str | None = None
    cause: str = ""
    slot: Outcome | None = None
    """Of the host slot that it filled, if it did."""


def kind_of(kind: WorkKind, io: ChunkIO) -> WorkKind:
    """Return what is done with one chunk of a job of ``kind``."""
    return WorkKind.PROMOTION if kind is WorkKind.LOAD and io.host_offset is not None else kind


def travel_together(task: Task, other: Task) -> bool:
    """Whether two chunks may be of one batch: one job, group and kind, and keys that name one group in the header."""
    alike = task.job is other.job and task.io.group == other.io.group and task.kind is other.kind
    return alike and task.io.key[-4:] == other.io.key[-4:]


def slots_of(job: Job) -> tuple[Outcome, ...]:
    """Return what became of the host slots that a job fills."""
    return tuple([task.slot or Outcome.FAILED for task in job.tasks if task.kind.fills_slot])


def completion_of(job: Job, seconds: float) -> Completion:
    """Return what to tell of a job whose chunks are all DONE."""
    tasks, is_ok, failed_as = job.tasks, Outcome.OK, Outcome.FAILED
    outcomes = tuple([task.outcome or failed_as for task in tasks])
    slots = None if job.unknown_slots else slots_of(job) if job.slots_total else ()
    bytes_moved = sum([task.size_bytes for task in tasks if task.outcome is is_ok])
    failed = [task for task in tasks if task.outcome is not is_ok]
    if not failed:
        return Completion(job.job_id, job.kind, outcomes, slots, bytes_moved, seconds)
    errors = dict.fromkeys([task.error for task in failed if task.error is not None])
    counts = Counter([(task.outcome or failed_as, task.cause or "io") for task in failed])
    causes = tuple([(outcome, cause, shards) for (outcome, cause), shards in counts.items()])
    return Completion(job.job_id, job.kind, outcomes, slots, bytes_moved, seconds, tuple(errors), causes)
