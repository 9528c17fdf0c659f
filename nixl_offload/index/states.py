"""The life of a key in an index: every transition there is, in one table.

Threading: constants and pure functions.

``State`` is what callers see. ``Phase`` is finer: it also says who holds the slot, its writer or its readers, so
that the table needs no conditions beside it::

                       insert_writing
    ABSENT ──────────────────────────────▶ WRITING ──drop──▶ DOOMED
      │  ▲ ▲                                │  │               │
      │  │ └──────────── abort ─────────────┘  │ commit        │ commit, abort
      │  │                                     ▼               ▼
      └──┼── insert_ready ──────────────────▶ READY          ABSENT
         └── drop, evict ──────────────────── │  ▲
                                          pin ▼  │ last unpin
                                            PINNED ──drop──▶ LEAVING ──last unpin──▶ ABSENT
"""

from __future__ import annotations

from enum import Enum, IntEnum, auto

from nixl_offload.errors import IndexStateError


class State(Enum):
    """What an index says about a key it holds."""

    WRITING = auto()
    """Reserved; its bytes are on their way."""
    READY = auto()
    """May be pinned and read."""
    EVICTING = auto()
    """Given up, but a writer or readers still hold its slot: a miss, and it cannot be stored anew until it is gone."""


class Phase(IntEnum):
    """Where a key stands, holders included. Kept as one byte per key."""

    ABSENT = 0
    WRITING = 1
    DOOMED = 2
    """Dropped while being written: goes as soon as the writer reports, whatever it reports."""
    READY = 3
    """Unpinned: the only phase from which a key can be evicted."""
    PINNED = 4
    LEAVING = 5
    """Dropped while pinned: goes with the last unpin."""


class Event(IntEnum):
    """What can happen to a key."""

    INSERT_WRITING = 0
    INSERT_READY = 1
    COMMIT = 2
    ABORT = 3
    PIN = 4
    UNPIN = 5
    """An unpin that leaves other pins."""
    UNPIN_LAST = 6
    DROP = 7
    EVICT = 8


_TRANSITIONS: dict[Phase, dict[Event, Phase]] = {
    Phase.ABSENT: {Event.INSERT_WRITING: Phase.WRITING, Event.INSERT_READY: Phase.READY, Event.DROP: Phase.ABSENT},
    Phase.WRITING: {Event.COMMIT: Phase.READY, Event.ABORT: Phase.ABSENT, Event.DROP: Phase.DOOMED},
    Phase.DOOMED: {Event.COMMIT: Phase.ABSENT, Event.ABORT: Phase.ABSENT, Event.DROP: Phase.DOOMED},
    Phase.READY: {Event.PIN: Phase.PINNED, Event.DROP: Phase.ABSENT, Event.EVICT: Phase.ABSENT},
    Phase.PINNED: {
        Event.PIN: Phase.PINNED,
        Event.UNPIN: Phase.PINNED,
        Event.UNPIN_LAST: Phase.READY,
        Event.DROP: Phase.LEAVING,
    },
    Phase.LEAVING: {Event.UNPIN: Phase.LEAVING, Event.UNPIN_LAST: Phase.ABSENT, Event.DROP: Phase.LEAVING},
}

_TABLE: tuple[tuple[Phase | None, ...], ...] = tuple(
    tuple(_TRANSITIONS[phase].get(event) for event in Event) for phase in Phase
)

STATE_OF_PHASE: tuple[State | None, ...] = (
    None, State.WRITING, State.EVICTING, State.READY, State.READY, State.EVICTING
)  # fmt: skip
"""Indexed by ``Phase``."""


def next_phase(phase: int, event: Event) -> Phase:
    """Return the phase that ``event`` leads to. Raises IndexStateError where the table has no entry."""
    after = _TABLE[phase][event]
    if after is None:
        allowed = ", ".join(e.name.lower() for e in _TRANSITIONS[Phase(phase)])
        raise IndexStateError(f"{event.name.lower()} of a key that is {Phase(phase).name.lower()}; allowed: {allowed}")
    return after
