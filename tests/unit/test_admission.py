"""Admission: a chunk is stored when it is asked for the N-th time, and remembering that costs little.

Proves: counts are per chunk, old ones are forgotten and no others, memory has a bound and is not taken without need.
"""

from __future__ import annotations

import pytest

from nixl_offload.catalog.admission import Admission
from nixl_offload.types import Key


def _key(number: int) -> Key:
    return Key(number.to_bytes(32, "big") + bytes(4))


def test_everything_is_admitted_at_once_by_default() -> None:
    admission = Admission(1)
    assert all(admission.admits(_key(number)) for number in range(100))


@pytest.mark.parametrize("store_after", [2, 3, 255])
def test_a_chunk_is_admitted_from_the_nth_time_on(store_after: int) -> None:
    admission = Admission(store_after, max_chunks=64)
    answers = [admission.admits(_key(1)) for _ in range(store_after + 300)]
    assert answers == [False] * (store_after - 1) + [True] * 301
    assert not admission.admits(_key(2)), "counts are a chunk's own"


def test_what_was_not_asked_for_longest_is_forgotten_first() -> None:
    admission = Admission(2, max_chunks=16)
    for number in range(16):
        admission.admits(_key(number))
    assert admission.admits(_key(0)), "used again, so the youngest now"
    admission.admits(_key(16))
    assert [admission.admits(_key(number)) for number in (0, 2, 16)] == [True, True, True]
    assert not admission.admits(_key(1)), "made room"


def test_a_reset_forgets_all() -> None:
    admission = Admission(2, max_chunks=64)
    admission.admits(_key(1))
    admission.clear()
    assert not admission.admits(_key(1))
