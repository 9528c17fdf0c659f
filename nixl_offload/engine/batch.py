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
    """A mover is, or was, at the KV blocks themselves."""
    parts: list[Batch] = field(default_factory=list)
    """What goes on in its place, once it has ended."""
    chunks_begun: int = 0
    """How many the pump has counted in."""
    parts_s: float = math.inf
    """When those that have arrived go on without the others; 0.0: that is to be set when the first one has."""

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
        """Wait until the device is past ``fences``. Until then no slot is given back."""
        self.fences.extend(fences)
        while self.poll() and self.fences:
            yield

    def split(self, groups: Iterable[list[Chunk]], steps_of: Callable[[Batch], Steps]) -> None:
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
        self.chunks = [chunk for chunk in self.chunks if chunk.result is not None]
        self.transfers = []
