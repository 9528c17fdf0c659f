"""A batch: the chunks of a job that lie in one KV group and travel together, and what is in flight for them.

Threading: the pump's thread. Ownership: a chunk's staging slots, and its share of the KV blocks, belong to its batch
until nothing of the batch is in flight any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nixl_offload.engine.brought import ScatterSource
from nixl_offload.engine.records import ChunkIO, Ending, Task
from nixl_offload.engine.staging import DeviceSlot, Slot, SlotPool
from nixl_offload.engine.states import WorkKind
from nixl_offload.engine.streams import Fence
from nixl_offload.movers.base import Mover, Transfer, TransferState
from nixl_offload.tiers.base import Target
from nixl_offload.types import Outcome

Steps = Generator[None, None, None]
"""Yields whenever it waits for a transfer or a fence."""


@dataclass(slots=True, eq=False)
class BatchChunk:
    """One chunk of a batch."""

    task: Task
    io: ChunkIO
    """What was submitted."""
    outcome: Outcome | None = None
    """None while the chunk is alive. It is told when the batch ends."""
    error: str | None = None
    cause: str = ""
    held: tuple[tuple[SlotPool[Any], Slot | DeviceSlot], ...] = ()
    """Slots to give back to their pools."""
    slot: Slot | DeviceSlot | None = None
    """The staging slot in which it is packed."""
    page: Slot | None = None
    """A header page beside that."""
    host: Slot | None = None
    """A slot of the host slab that holds its image, or is to."""
    is_kept: bool = False
    """The image in ``host`` is whole and verified."""
    brought: ScatterSource | None = None
    """Its blocks from ``brought_from`` on, where they were summed and verified; given up with the chunk."""
    brought_from: int = 0
    sums: npt.NDArray[np.uint64] | None = None
    """Checksums of its blocks, where a device computed them."""
    row: int = 0
    """Its row among the headers that were read together."""
    target: Target | None = None
    """Its place in the tier, from the begin of a read or write to its end."""
    transfers: tuple[Transfer, ...] = ()
    """Its own, where no other chunk takes part in them; they are among the batch's too."""
    is_overdue: bool = False
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
        """Decide the outcome; the first one counts."""
        if self.outcome is None:
            self.outcome, self.error, self.cause, self.brought = outcome, error, cause, None


def _nothing() -> Steps:
    yield from ()


_NO_STEPS = _nothing()


@dataclass(slots=True, eq=False)
class Batch:
    """Chunks of one job, group and kind."""

    chunks: list[BatchChunk]
    kind: WorkKind
    steps: Steps = _NO_STEPS
    mover: Mover | None = None
    """Of every transfer."""
    transfers: list[Transfer] = field(default_factory=list)
    fences: list[Fence] = field(default_factory=list)
    """Work of the device on slots or KV blocks of this batch that is not known to be over."""
    touches_blocks: bool = False
    """A mover is, or was, at the KV blocks themselves."""
    parts: list[Batch] = field(default_factory=list)
    """What goes on in its place, once it has ended."""
    chunks_begun: int = 0
    """How many the pump has counted in."""
    parts_s: float = math.inf
    """When those that have arrived go on without the others; 0.0: that is to be set when the first one has."""

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> Batch:
        """Return a batch of chunks that were just taken."""
        return cls([BatchChunk(task, task.io) for task in tasks], tasks[0].kind)

    @property
    def alive(self) -> list[BatchChunk]:
        """The chunks that have no outcome yet."""
        return [chunk for chunk in self.chunks if chunk.outcome is None]

    @property
    def is_pending(self) -> bool:
        """Whether some transfer is not final, or some fence was not passed when it was last polled."""
        return bool(self.fences) or any(transfer.state is TransferState.PENDING for transfer in self.transfers)

    def waits_for_mover(self, now_s: float) -> bool:
        """Whether the next step can do nothing unless a transfer has ended meanwhile."""
        if self.fences:
            return False
        pending = sum(transfer.state is TransferState.PENDING for transfer in self.transfers)
        return pending > 0 and (pending == len(self.transfers) or now_s < self.parts_s)

    @property
    def is_quarantined(self) -> bool:
        """Whether late I/O of a failed transfer is possible."""
        return any(transfer.quarantine for transfer in self.transfers)

    @property
    def failure(self) -> Transfer | None:
        """A transfer that did not end well, if there is one."""
        return next((transfer for transfer in self.transfers if transfer.state is not TransferState.DONE), None)

    def poll(self) -> bool:
        """Push on every transfer that is not final; whether anything is still under way. Raises what a fence raises:
        then nothing is known of the device any more.
        """
        if self.mover is not None:
            for transfer in self.transfers:
                if transfer.state is TransferState.PENDING:
                    self.mover.poll(transfer)
        if self.fences:
            self.fences = [fence for fence in self.fences if not fence.done()]
        return self.is_pending

    def passes(self, fences: Iterable[Fence]) -> Iterator[None]:
        """Wait until the device is past ``fences``. Until then no slot is given back, whatever happens."""
        self.fences.extend(fences)
        while self.poll() and self.fences:
            yield

    def split(self, groups: Iterable[list[BatchChunk]], steps_of: Callable[[Batch], Steps]) -> None:
        """Have the chunks that are alive, which ``groups`` has, go on in parts, by ``steps_of``. Nothing may be in
        flight but transfers that are a chunk's own, which it takes along.

        Their ``brought`` is given up: what waits for that memory must not hold some of it. Their slots have the bytes.
        """
        for group in groups:
            for chunk in group:
                chunk.brought = None
            part = Batch(group, self.kind, touches_blocks=self.touches_blocks)
            part.transfers = [transfer for chunk in group for transfer in chunk.transfers]
            part.steps = steps_of(part)
            self.parts.append(part)
        self.chunks = [chunk for chunk in self.chunks if chunk.outcome is not None]
        self.transfers = []

    def endings(self, *, tainted: bool) -> list[Ending]:
        """Return what to tell of the chunks. ``tainted``: something may still touch their slots."""
        if not self.kind.fills_slot:
            return [
                Ending(chunk.task, chunk.outcome or Outcome.FAILED, chunk.error, chunk.cause) for chunk in self.chunks
            ]
        return [_ending(chunk, tainted=tainted) for chunk in self.chunks]


def _ending(chunk: BatchChunk, *, tainted: bool) -> Ending:
    """As ``endings``, of a chunk that was to fill a host slot."""
    outcome = chunk.outcome or Outcome.FAILED
    if tainted and chunk.host is not None:
        slot = Outcome.TAINTED
    elif chunk.is_kept:
        slot = Outcome.OK
    else:
        # What the caller was told when it gave the load up says more than what the batch thinks of it.
        told = chunk.task.outcome or outcome
        slot = Outcome.FAILED if told is Outcome.OK else told
    return Ending(chunk.task, outcome, chunk.error, chunk.cause, slot)
