"""The kinds of work, the states of a chunk, and every transition between them. The whole state table of the engine.

Threading: constants and pure functions.
"""

from __future__ import annotations

from enum import Enum

from nixl_offload.types import Outcome


class Kind(Enum):
    """What is done with a chunk. Columns: does it write to the tier, does it fill a host slot, can it wait."""

    STORE = ("store", True, False, False)
    """KV blocks to the tier."""
    LOAD = ("load", False, False, False)
    """The tier to KV blocks."""
    PROMOTION = ("promotion", False, True, False)
    """The tier to a slot in host memory, which keeps the chunk, and from there to the KV blocks of a load."""
    WRITE_THROUGH = ("write_through", True, False, True)
    """A slot in host memory to the tier. No KV block takes part."""
    FETCH = ("fetch", False, True, True)
    """The tier to a slot in host memory. No KV block takes part."""

    def __init__(self, label: str, writes: bool, fills_slot: bool, in_background: bool) -> None:
        self.label = label
        self.writes = writes
        self.fills_slot = fills_slot
        self.in_background = in_background
        """Nobody waits for it: it comes behind everything else, and is dropped rather than failed while it waits."""


class Lane(Enum):
    """Queues, served in this order: loads overtake stores, and what a caller is blocked on comes first."""

    URGENT_STORE = "urgent_store"
    EXPEDITED_LOAD = "expedited_load"
    LOAD = "load"
    STORE = "store"
    BACKGROUND = "background"


class State(Enum):
    """Where a chunk stands."""

    QUEUED = "queued"
    CLAIMED = "claimed"
    """Writes only: the KV blocks are being copied or summed. Nothing has been written, so it can still be dropped."""
    BORROWED = "borrowed"
    """Stores only: a mover or a device reads the KV blocks and cannot be stopped."""
    DISOWNED = "disowned"
    """As BORROWED, but the KV blocks were given away meanwhile: what is written is worthless, so it can only fail."""
    TRANSFER = "transfer"
    """On its way between the tier and memory that belongs to the engine. The KV blocks are not touched."""
    SCATTER = "scatter"
    """Loads only: the KV blocks are being written. Nothing can stop that."""
    DONE = "done"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.CLAIMED, State.TRANSFER, State.DONE}),
    State.CLAIMED: frozenset({State.BORROWED, State.TRANSFER, State.DONE}),
    State.BORROWED: frozenset({State.DISOWNED, State.TRANSFER, State.DONE}),
    State.DISOWNED: frozenset({State.DONE}),
    State.TRANSFER: frozenset({State.SCATTER, State.DONE}),
    State.SCATTER: frozenset({State.DONE}),
    State.DONE: frozenset(),
}

READS_BLOCKS = frozenset({State.QUEUED, State.CLAIMED, State.BORROWED})
"""States in which a store needs its KV blocks unchanged."""


def claimed(kind: Kind) -> State:
    """Return the state of a chunk that the engine begins with."""
    return State.CLAIMED if kind.writes else State.TRANSFER


def when_given_up(kind: Kind, state: State) -> State | Outcome | None:
    """Return what becomes of a chunk that nobody waits for any more: its outcome, another state, or None (it goes on).

    A write that has written nothing is dropped. A store whose blocks are being read keeps its location until the
    reader has let go. A load is failed unless its KV blocks are being written.
    """
    if kind.writes:
        if state is State.BORROWED:
            return State.DISOWNED
        return Outcome.DROPPED if state in {State.QUEUED, State.CLAIMED} else None
    if state is State.QUEUED:
        return Outcome.DROPPED if kind.in_background else Outcome.FAILED
    return Outcome.FAILED if state is State.TRANSFER else None


def when_closed(kind: Kind, state: State) -> Outcome:
    """Return the outcome of a chunk whose end nobody will see."""
    if state is State.QUEUED and (kind.writes or kind.in_background):
        return Outcome.DROPPED
    if kind is Kind.WRITE_THROUGH:
        return Outcome.TAINTED  # its host slot may still be read
    return Outcome.FAILED
