"""The kinds of work, the states of a chunk, and every transition between them. The whole state table of the engine.

Threading: constants and pure functions.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Literal

from nixl_offload.types import Outcome

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
