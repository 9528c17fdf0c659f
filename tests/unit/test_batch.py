"""Proves what a batch knows of itself: whether anything is under way, what is told of its chunks and their host slots
when it ends, and what it hands on to its parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from nixl_offload.engine.batch import Batch, Steps
from nixl_offload.engine.records import Chunk
from nixl_offload.engine.staging import Slot
from nixl_offload.engine.states import WorkKind
from nixl_offload.movers.base import Op, Transfer, TransferState
from nixl_offload.movers.copy import CopyMover
from nixl_offload.types import Key, Location, Outcome

OK, FAILED, DROPPED = Outcome.OK, Outcome.FAILED, Outcome.DROPPED
CORRUPT, TAINTED = Outcome.CORRUPT, Outcome.TAINTED
PENDING, DONE, BROKEN = TransferState.PENDING, TransferState.DONE, TransferState.FAILED
STORE, LOAD, PROMOTION, FETCH = WorkKind.STORE, WorkKind.LOAD, WorkKind.PROMOTION, WorkKind.FETCH


def make(kind: WorkKind = LOAD, chunks: int = 3) -> Batch:
    places = [Location(0, at * 4096, 4096) for at in range(chunks)]
    return Batch([Chunk(Key(bytes(36)), place, 0, np.array([0]), kind=kind) for place in places], kind)


def transfers(*states: TransferState) -> list[Transfer]:
    made = [Transfer(Op.READ, 4096) for _ in states]
    for transfer, state in zip(made, states, strict=True):
        transfer.state = state
    return made


class Gate:
    """A fence that is passed when the test says so."""

    def __init__(self) -> None:
        self.passed = False

    def done(self) -> bool:
        return self.passed


def test_a_new_batch_has_nothing_to_do() -> None:
    batch = make(STORE)
    assert list(batch.steps) == []
    assert not batch.poll()
    assert batch.failure is None
    assert not any(chunk.is_kept or chunk.is_overdue for chunk in batch.chunks)
    assert (batch.touches_blocks, batch.parts, batch.chunks_begun, batch.parts_s) == (False, [], 0, math.inf)


def test_the_first_outcome_counts_and_gives_up_what_was_brought() -> None:
    batch = make()
    first, second, _ = batch.chunks
    first.brought = second.brought = np.zeros((1, 4096), dtype=np.uint8)
    first.end(CORRUPT, "flipped", "checksum")
    first.end(OK)
    assert (first.result, first.brought) == ((CORRUPT, "flipped", "checksum"), None)
    second.end(OK)
    second.end(FAILED, "late", "io")
    assert second.result == (OK, None, "")
    assert batch.alive == batch.chunks[2:]


@pytest.mark.parametrize(
    ("states", "state"),
    [
        ([], DONE),
        ([DONE, DONE], DONE),
        ([DONE, BROKEN], BROKEN),
        ([BROKEN, PENDING], PENDING),
        ([PENDING, DONE], PENDING),
    ],
)
def test_where_the_transfers_of_a_chunk_stand(states: Sequence[TransferState], state: TransferState) -> None:
    [chunk] = make(chunks=1).chunks
    chunk.transfers = tuple(transfers(*states))
    assert chunk.transfer_state is state


def test_what_is_under_way_is_known_by_fences_and_transfers() -> None:
    batch = make()
    assert not batch.is_pending
    batch.transfers = transfers(DONE, BROKEN)
    assert not batch.is_pending
    assert batch.failure is batch.transfers[1]
    assert not batch.is_quarantined
    batch.transfers[1].quarantine = True
    assert batch.is_quarantined
    batch.transfers[0].state = PENDING
    assert batch.is_pending
    assert batch.failure is batch.transfers[0]
    batch.transfers, batch.fences = transfers(DONE), [Gate()]
    assert batch.is_pending
    assert batch.failure is None


def test_when_only_the_mover_can_help_a_batch_on() -> None:
    batch = make()
    assert not batch.waits_for_mover(10.0)
    batch.transfers = transfers(PENDING, PENDING)
    assert batch.waits_for_mover(10.0)
    batch.parts_s = 5.0
    assert batch.waits_for_mover(10.0), "nothing has arrived that could go on"
    batch.transfers[0].state = DONE
    assert batch.waits_for_mover(4.9)
    assert not batch.waits_for_mover(5.0), "what has arrived goes on"
    batch.parts_s = math.inf
    assert batch.waits_for_mover(10.0)
    batch.fences = [Gate()]
    assert not batch.waits_for_mover(10.0), "no mover knows of a fence"
    batch.fences, batch.transfers = [], transfers(DONE, DONE)
    assert not batch.waits_for_mover(10.0)


def test_only_what_is_not_final_is_polled() -> None:
    batch = make()
    polled = []

    class Mover(CopyMover):
        def poll(self, transfer: Transfer) -> TransferState:
            polled.append(transfer)
            transfer.state = DONE
            return transfer.state

    mover = Mover()
    batch.mover, batch.transfers = mover, transfers(DONE, PENDING, BROKEN)
    open_gate, gate = Gate(), Gate()
    open_gate.passed = True
    batch.fences = [open_gate, gate]
    assert batch.poll()
    assert polled == batch.transfers[1:2]
    assert batch.fences == [gate]
    gate.passed = True
    assert not batch.poll()
    mover.close()


def test_a_batch_waits_for_the_fences_that_it_is_given_and_for_those_before_them() -> None:
    """Not for transfers: they go on meanwhile."""
    batch, gates = make(), [Gate(), Gate()]
    batch.fences, batch.transfers = [gates[0]], transfers(PENDING)
    steps = batch.passes(gates[1:])
    next(steps)
    gates[1].passed = True
    next(steps)
    assert batch.is_pending
    gates[0].passed = True
    assert list(steps) == []
    assert batch.fences == []
    batch.transfers = []
    steps = batch.passes([Gate()])
    next(steps)
    assert len(batch.fences) == 1


def test_a_split_batch_hands_on_what_lives_with_its_transfers() -> None:
    batch = make(chunks=4)
    ended, *others = batch.chunks
    ended.end(FAILED)
    own = transfers(PENDING, DONE, DONE)
    for chunk, transfer in zip(others, own, strict=True):
        chunk.transfers, chunk.brought = (transfer,), np.zeros((1, 4096), dtype=np.uint8)
    batch.transfers, batch.touches_blocks = [*own, *transfers(BROKEN)], True
    asked = []

    def steps_of(part: Batch) -> Steps:
        asked.append((list(part.chunks), list(part.transfers)))
        yield

    batch.split([others[:2], others[2:]], steps_of)
    assert batch.chunks == [ended]
    assert batch.transfers == []
    assert [part.chunks for part in batch.parts] == [others[:2], others[2:]]
    assert [part.transfers for part in batch.parts] == [own[:2], own[2:]]
    assert all(part.kind is LOAD and part.touches_blocks for part in batch.parts)
    assert not any(chunk.brought is not None for chunk in others), "what waits for that memory must hold none of it"
    assert [len(list(part.steps)) for part in batch.parts] == [1, 1]
    assert asked == [(others[:2], own[:2]), (others[2:], own[2:])], "steps see the part whole"


@pytest.mark.parametrize("kind", [PROMOTION, FETCH])
@pytest.mark.parametrize(
    ("outcome", "told", "is_kept", "tainted", "has_host", "slot"),
    [
        (OK, None, True, False, True, OK),
        (OK, None, True, True, True, TAINTED),
        (FAILED, None, True, False, True, OK),  # the image is whole, though its blocks could not be served
        (FAILED, None, False, False, True, FAILED),
        (CORRUPT, None, False, False, True, CORRUPT),
        (CORRUPT, None, False, True, True, TAINTED),
        (CORRUPT, None, False, True, False, CORRUPT),  # nothing was begun with the slot
        (None, None, False, False, True, FAILED),
        (FAILED, DROPPED, False, False, True, DROPPED),  # the caller was told so when it gave the load up
        (OK, None, False, False, True, FAILED),  # served by another way than the slot
        (OK, OK, False, False, True, FAILED),
    ],
)
def test_what_is_told_of_host_slots(
    kind: WorkKind,
    outcome: Outcome | None,
    told: Outcome | None,
    is_kept: bool,
    tainted: bool,
    has_host: bool,
    slot: Outcome,
) -> None:
    [chunk] = make(kind, chunks=1).chunks
    chunk.outcome, chunk.is_kept = told, is_kept
    chunk.host = Slot(0, 0, np.empty(4096, dtype=np.uint8)) if has_host else None
    if outcome is not None:
        chunk.end(outcome, "words", "cause")
    assert chunk.slot_outcome(tainted=tainted) is slot
