"""Admission: a chunk is stored when it is asked for the N-th time, and remembering that costs little.

Proves: counts are per chunk, old ones are forgotten and no others, memory has a bound and is not taken without need.
"""

from __future__ import annotations

import pytest

from nixl_offload.catalog.admission import Admission
from nixl_offload.types import Key


def _key(number: int) -> Key:
    return Key(number.to_bytes(32, "big") + bytes(4))


def test_everything_is_admitted_at_once_by_default_and_nothing_remembered() -> None:
    admission = Admission(1)
    assert all(admission.admits(_key(number)) for number in range(100))
    assert len(admission._digests) == 0


@pytest.mark.parametrize("store_after", [2, 3, 255])
def test_a_chunk_is_admitted_from_the_nth_time_on(store_after: int) -> None:
    admission = Admission(store_after, max_chunks=64)
    answers = [admission.admits(_key(1)) for _ in range(store_after + 300)]
    assert answers == [False] * (store_after - 1) + [True] * 301
    assert not admission.admits(_key(2)), "counts are a chunk's own"


@pytest.mark.parametrize("store_after", [0, 256])
def test_what_cannot_be_counted_is_refused(store_after: int) -> None:
    with pytest.raises(ValueError, match="1 to 255"):
        Admission(store_after)


def test_what_was_not_asked_for_longest_is_forgotten_first() -> None:
    admission = Admission(2, max_chunks=16)
    for number in range(16):
        admission.admits(_key(number))
    assert admission.admits(_key(0)), "used again, so the youngest now"
    admission.admits(_key(16))
    assert [admission.admits(_key(number)) for number in (0, 2, 16)] == [True, True, True]
    assert not admission.admits(_key(1)), "made room"


def test_many_are_remembered_and_memory_has_a_bound() -> None:
    """Rows fill unevenly: of half as many chunks as there is room for hardly any is lost."""
    admission = Admission(2, max_chunks=1 << 14)
    for number in range(1 << 13):
        assert not admission.admits(_key(number))
    again = sum(admission.admits(_key(number)) for number in range(1 << 13))
    assert again > 0.95 * (1 << 13)
    for number in range(1 << 14, 1 << 16):
        admission.admits(_key(number))
    assert len(admission._digests) == len(admission._counts) == 1 << 14
    assert not admission.admits(_key(0)), "a scan has pushed it out"


def test_a_reset_forgets_all() -> None:
    admission = Admission(2, max_chunks=64)
    admission.admits(_key(1))
    admission.clear()
    assert not admission.admits(_key(1))


def test_a_million_chunks_cost_nine_megabytes() -> None:
    admission = Admission(2)
    assert len(admission._digests) == 1 << 20
    assert admission._digests.itemsize + admission._counts.itemsize == 9
