"""The engine's state table, said a second time: kinds of work, what may follow a state, and how chunks end."""

from __future__ import annotations

from itertools import product

import pytest

from nixl_offload.engine.states import (
    LANES,
    READS_BLOCKS,
    TRANSITIONS,
    ChunkState,
    Lane,
    WorkKind,
    claimed,
    when_closed,
    when_given_up,
)
from nixl_offload.types import Outcome

STORE, LOAD, PROMOTION, WRITE_THROUGH, FETCH = WorkKind
QUEUED, CLAIMED, BORROWED, DISOWNED, TRANSFER, SCATTER, DONE = ChunkState
FAILED, DROPPED, TAINTED = Outcome.FAILED, Outcome.DROPPED, Outcome.TAINTED


def test_kinds_of_work() -> None:
    assert [(kind.operation, kind.writes, kind.fills_slot, kind.in_background) for kind in WorkKind] == [
        ("store", True, False, False),
        ("load", False, False, False),
        ("load", False, True, False),
        ("write_through", True, False, True),
        ("fetch", False, True, True),
    ]


def test_loads_overtake_stores_and_nobody_waits_for_what_comes_last() -> None:
    assert LANES == (Lane.URGENT_STORE, Lane.EXPEDITED_LOAD, Lane.LOAD, Lane.STORE, Lane.BACKGROUND)


def test_every_state_leads_to_the_end_and_never_back() -> None:
    order = list(ChunkState)
    for state, following in TRANSITIONS.items():
        assert all(order.index(after) > order.index(state) for after in following)
        assert (DONE in following) is (state is not DONE)
    pairs = {(state, after) for state, following in TRANSITIONS.items() for after in following if after is not DONE}
    assert pairs == {
        (QUEUED, CLAIMED), (QUEUED, TRANSFER), (CLAIMED, BORROWED), (CLAIMED, TRANSFER),
        (BORROWED, DISOWNED), (BORROWED, TRANSFER), (TRANSFER, SCATTER),
    }  # fmt: skip
    assert {QUEUED, CLAIMED, BORROWED} == READS_BLOCKS


@pytest.mark.parametrize("kind", list(WorkKind))
def test_writes_are_claimed_before_they_travel(kind: WorkKind) -> None:
    assert claimed(kind) is (CLAIMED if kind in (STORE, WRITE_THROUGH) else TRANSFER)


def test_what_is_given_up() -> None:
    """A write that has written nothing is dropped, one that is read goes on without an owner; a load fails."""
    ends = {
        **dict.fromkeys(product((STORE, WRITE_THROUGH), (QUEUED, CLAIMED)), DROPPED),
        **dict.fromkeys(product((STORE, WRITE_THROUGH), (BORROWED,)), DISOWNED),
        **dict.fromkeys(product((LOAD, PROMOTION), (QUEUED, TRANSFER)), FAILED),
        (FETCH, QUEUED): DROPPED,
        (FETCH, TRANSFER): FAILED,
    }
    for kind, state in product(WorkKind, ChunkState):
        assert when_given_up(kind, state) is ends.get((kind, state)), (kind, state)


def test_what_a_closed_engine_says() -> None:
    """What had not begun, and nobody waits for, is dropped. A slot that may still be read is used no more."""
    ends = dict.fromkeys(product(WorkKind, ChunkState), FAILED)
    ends.update({(WRITE_THROUGH, state): TAINTED for state in ChunkState})
    ends.update({(kind, QUEUED): DROPPED for kind in (STORE, WRITE_THROUGH, FETCH)})
    for (kind, state), outcome in ends.items():
        assert when_closed(kind, state) is outcome, (kind, state)
