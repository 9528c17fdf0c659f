"""Proves what is told of the host slot that a chunk was to fill, when its batch has ended."""

from __future__ import annotations

import numpy as np
import pytest

from nixl_offload.engine.records import Chunk
from nixl_offload.engine.staging import Slot
from nixl_offload.engine.states import WorkKind
from nixl_offload.types import Key, Location, Outcome

OK, FAILED, DROPPED = Outcome.OK, Outcome.FAILED, Outcome.DROPPED
CORRUPT, TAINTED = Outcome.CORRUPT, Outcome.TAINTED


@pytest.mark.parametrize("kind", [WorkKind.PROMOTION, WorkKind.FETCH])
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
    chunk = Chunk(Key(bytes(36)), Location(0, 0, 4096), 0, np.array([0]), kind=kind)
    chunk.outcome, chunk.is_kept = told, is_kept
    chunk.host = Slot(0, 0, np.empty(4096, dtype=np.uint8)) if has_host else None
    if outcome is not None:
        chunk.end(outcome, "words", "cause")
    assert chunk.slot_outcome(tainted=tainted) is slot
