"""A batch: the chunks of a job that lie in one KV group and travel together, and what is in flight for them.

Threading: the pump's thread. Ownership: a chunk's staging slots, and its share of the KV blocks, belong to its batch
until nothing of the batch is in flight any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nixl_offload.engine.image import GroupPlan
from nixl_offload.engine.records import Chunk
from nixl_offload.engine.states import WorkKind
from nixl_offload.engine.streams import Fence
from nixl_offload.movers.base import Mover, Transfer, TransferState

Steps = Generator[None, None, None]
"""Yields whenever it waits for a transfer or a fence."""
Phase = Callable[[Any, "Batch"], Steps]
"""A piece of the way of a batch. Takes the ``transfer_paths.common.TierPaths`` and the batch."""

HOLD_S = 100e-6
"""The pump releases the interpreter after the first piece of work that ends later than this. Pieces take some 100 µs at
most."""


def _nothing() -> Steps:
    yield from ()


_NO_STEPS = _nothing()


@dataclass(slots=True, eq=False)
class Batch:
    """Chunks of one job, group and kind, and their way: ``phases``, one after the other."""

    chunks: list[Chunk]
    kind: WorkKind
    plan: GroupPlan
    phases: Sequence[Phase]
    mover: Mover | None = None
    """Of every transfer."""
    phase: int = 0
    """The phase that is under way. A batch that fails begins it again, chunk by chunk."""
    steps: Steps = _NO_STEPS
    transfers: list[Transfer] = field(default_factory=list)
    fences: list[Fence] = field(default_factory=list)
    """Work of the device on slots or KV blocks of this batch that is not known to be over."""
    touches_blocks: bool = False
    """A mover reads or writes the KV blocks directly, or did."""
    parts: list[Batch] = field(default_factory=list)
    """The batches that take over its live chunks when it ends."""
    chunks_begun: int = 0
    """Number of chunks that the pump added to its count of chunks in flight."""
    submitted_s: float | None = None
    """When the transfers of this phase were started; None: they were not."""
    may_part: bool = False
    """Chunks have transfers of their own, and those that have arrived may go on without the others."""
    parts_s: float | None = None
    """From this time on they do; None: none has arrived."""

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
        if not self.may_part or pending == len(self.transfers):
            return pending > 0
        return pending > 0 and self.parts_s is not None and now_s < self.parts_s

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

    def split(self, groups: Iterable[list[Chunk]], run: Callable[[Batch], Steps], *, again: bool = False) -> None:
        """Move the live chunks into new batches in this phase, one for each of ``groups``, which hold all of them.
        ``run`` returns a batch's steps. Each chunk keeps its own transfers; nothing else may be in flight.

        ``again``: they begin the phase again, with no transfers.
        ``brought`` is given up, so that no chunk holds such memory while it waits for more. The slots have the bytes.
        """
        for group in groups:
            for chunk in group:
                chunk.brought = None
                chunk.transfers = () if again else chunk.transfers
            part = replace(self, chunks=group, fences=[], parts=[], chunks_begun=0, may_part=False, parts_s=None)
            part.transfers = [transfer for chunk in group for transfer in chunk.transfers]
            part.submitted_s = None if again else self.submitted_s
            part.steps = run(part)
            self.parts.append(part)
        self.chunks = [chunk for chunk in self.chunks if chunk.result is not None]
        self.transfers = []


@dataclass(slots=True)
class InFlight:
    """What a pump has in flight."""

    batches: int = 0
    store_batches: int = 0
    chunks: int = 0
    stores: int = 0
    """Chunks of stores; background work is counted apart."""
    background: int = 0
    """Chunks."""

    def add(self, kind: WorkKind, chunks: int, sign: int) -> None:
        """Count a batch in (1) or out (-1)."""
        count = sign * chunks
        self.batches += sign
        self.chunks += count
        if kind.in_background:
            self.background += count
        elif kind.writes:
            self.store_batches += sign
            self.stores += count


class Turn:
    """A pump's stretch of time without a wait, after which it lets others have the interpreter.

    vLLM's scheduler shares it, and shall not wait for a batch. A thread that wants the interpreter gets it when the one
    that has it waits for something, and otherwise only after the switch interval, 5 ms. The pump's work on a batch is
    many small pieces; between them it asks ``pause``.
    """

    def __init__(self) -> None:
        self._began_s = time.perf_counter()

    def begin(self) -> None:
        """The thread has waited: another stretch begins."""
        self._began_s = time.perf_counter()

    def pause(self) -> None:
        """Between two pieces of work: let go of the interpreter if this stretch has lasted for ``HOLD_S``."""
        if time.perf_counter() - self._began_s >= HOLD_S:
            self._let_go()
            self.begin()

    def _let_go(self) -> None:
        # The kernel makes some 80 us of it, long enough for a thread that waits to wake up. ``sched_yield`` takes half
        # a microsecond: its caller has the interpreter back before anybody else could take it.
        time.sleep(0)
