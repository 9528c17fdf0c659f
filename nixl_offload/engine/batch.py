"""A batch: the chunks of a job that lie in one KV group and travel together, and what is in flight for them.

Threading: the pump's thread. Ownership: a chunk's staging slots, and its share of the KV blocks, belong to its batch
until nothing of the batch is in flight any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field

from nixl_offload.engine.records import Chunk
from nixl_offload.engine.states import WorkKind
from nixl_offload.engine.streams import Fence
from nixl_offload.movers.base import Mover, Transfer, TransferState

Steps = Generator[None, None, None]
"""Yields whenever it waits for a transfer or a fence."""


def _nothing() -> Steps:
    yield from ()


_NO_STEPS = _nothing()


@dataclass(slots=True, eq=False)
class Batch:
    """Chunks of one job, group and kind."""

    chunks: list[Chunk]
    kind: WorkKind
    steps: Steps = _NO_STEPS
    mover: Mover | None = None
    """Of every transfer."""
    transfers: list[Transfer] = field(default_factory=list)
    fences: list[Fence] = field(default_factory=list)
    """Work of the device on slots or KV blocks of this batch that is not known to be over."""
    touches_blocks: bool = False
    """A mover reads or writes the KV blocks directly, or did."""
    parts: list[Batch] = field(default_factory=list)
    """The batches that take over its live chunks when it ends."""
    chunks_begun: int = 0
    """Number of chunks that the pump added to its count of chunks in flight."""
    parts_s: float = math.inf
    """Deadline: from this time on, chunks that have arrived go on without the others. inf: no deadline. 0.0: the
    deadline is set when the first chunk has arrived."""

    @property
    def alive(self) -> list[Chunk]:
        """The chunks that have no outcome yet."""
        return [chunk for chunk in self.chunks if chunk.result is None]

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
        """Advance every transfer that is not final. Return whether anything is still under way.

        Raises what a fence raises; the state of the device is then unknown.
        """
        if self.mover is not None:
            for transfer in self.transfers:
                if transfer.state is TransferState.PENDING:
                    self.mover.poll(transfer)
        if self.fences:
            self.fences = [fence for fence in self.fences if not fence.done()]
        return self.is_pending

    def passes(self, fences: Iterable[Fence]) -> Iterator[None]:
        """Wait until the device is past ``fences``. Until then no slot is given back."""
        self.fences.extend(fences)
        while self.poll() and self.fences:
            yield

    def split(self, groups: Iterable[list[Chunk]], steps_of: Callable[[Batch], Steps]) -> None:
        """Move the live chunks into new batches, one for each of ``groups``; ``steps_of`` returns a batch's steps.

        ``groups`` must hold all live chunks. Each chunk keeps its own transfers; nothing else may be in flight.
        ``brought`` is given up, so that no chunk holds such memory while it waits for more. The slots have the bytes.
        """
        for group in groups:
            for chunk in group:
                chunk.brought = None
            part = Batch(group, self.kind, touches_blocks=self.touches_blocks)
            part.transfers = [transfer for chunk in group for transfer in chunk.transfers]
            part.steps = steps_of(part)
            self.parts.append(part)
        self.chunks = [chunk for chunk in self.chunks if chunk.result is not None]
        self.transfers = []
