"""Proves: headers written and checked as rows of a matrix are those that are written and checked one by one."""

from __future__ import annotations

import numpy as np
import pytest

from nixl_offload.chunk.header import (
    HEADER_BYTES,
    MAX_BLOCKS_PER_CHUNK,
    ExpectedRows,
    add_checksums,
    check_header,
    check_headers,
    decode_header,
    encode_headers,
    lacks_checksums,
    verify_checksums,
    verify_rows,
)
from nixl_offload.errors import FormatError, LayoutError
from tests.headers import make_header

NAMESPACE = bytes(range(32))


def expected(count: int, blocks: int = 4, block_bytes: int = 1000, group: int = 3) -> ExpectedRows:
    """Keys of 1 to 64 bytes."""
    keys = [bytes([7 + n]) * (1 + 21 * n % 64) for n in range(count)]
    return ExpectedRows(NAMESPACE, keys, group, blocks, block_bytes)


def sums(count: int, blocks: int, firsts: list[int]) -> np.ndarray:  # type: ignore[type-arg]
    found = np.random.default_rng(1).integers(1, 1 << 63, (count, blocks), dtype=np.uint64)
    for row, first in enumerate(firsts):
        found[row, :first] = 0
    return found


@pytest.mark.parametrize("blocks", [1, 4, MAX_BLOCKS_PER_CHUNK])
@pytest.mark.parametrize("count", [1, 2, 17])
def test_each_row_is_read_as_the_header_of_its_shard(count: int, blocks: int) -> None:
    expect = expected(count, blocks)
    firsts = [n % blocks for n in range(count)]
    checksums = sums(count, blocks, firsts)
    pages = encode_headers(expect, checksums, firsts, created_s=1_700_000_000)
    for row, first in enumerate(firsts):
        single = make_header(expect.one(row), checksums[row, first:], first_valid_block=first, created_s=1_700_000_000)
        assert decode_header(pages[row]) == single
    headers = check_headers(pages, expect)
    assert not headers.errors
    assert headers.first_valid_block == firsts
    assert (np.stack(headers.checksums) == checksums).all()


@pytest.mark.parametrize("blocks", [1, 4, MAX_BLOCKS_PER_CHUNK])
def test_checksums_that_come_later_make_the_same_page(blocks: int) -> None:
    """Until then readers of storage refuse the page, and readers of memory take it."""
    expect, firsts = expected(5, blocks), [n % blocks for n in range(5)]
    checksums = sums(5, blocks, firsts)
    whole = encode_headers(expect, checksums, firsts, created_s=1_700_000_000)
    pages = encode_headers(expect, None, firsts, created_s=1_700_000_000)
    assert {error.reason for error in check_headers(pages, expect).errors.values()} == {"version"}
    assert set(check_headers(pages, expect).errors) == set(range(5))
    for mixed in (pages, np.concatenate([pages[:2], whole[2:]])):
        headers = check_headers(mixed, expect, may_lack_checksums=True)
        assert not headers.errors
        assert headers.first_valid_block == firsts
    for row, first in enumerate(firsts):
        assert lacks_checksums(pages[row])
        completed = add_checksums(pages[row], checksums[row, first:])
        assert completed.tobytes() == whole[row].tobytes()
        assert not lacks_checksums(completed)
        with pytest.raises(LayoutError):
            add_checksums(completed, checksums[row, first:])
        with pytest.raises(LayoutError):
            add_checksums(pages[row], checksums[row, first + 1 :])


@pytest.mark.parametrize("lacking", [False, True])
def test_every_damage_is_told_as_for_a_single_header(lacking: bool) -> None:
    """Each byte of the fixed part, some of the rest, other keys, groups, namespaces and sizes."""
    expect, firsts = expected(6), [0, 1, 2, 3, 0, 1]
    pages = encode_headers(expect, None if lacking else sums(6, 4, firsts), firsts, created_s=5)
    places = [*range(200), 300, 3000, HEADER_BYTES - 9, HEADER_BYTES - 8, HEADER_BYTES - 1]
    for place in places:
        row = place % 6
        damaged = pages.copy()
        damaged[row, place] ^= 0x10
        headers = check_headers(damaged, expect, may_lack_checksums=lacking)
        with pytest.raises(FormatError) as single:
            check_header(damaged[row], expect.one(row), may_lack_checksums=lacking)
        assert list(headers.errors) == [row]
        assert (headers.errors[row].reason, str(headers.errors[row])) == (single.value.reason, str(single.value))
    others = (
        ExpectedRows(bytes(32), expect.keys, 3, 4, 1000),
        ExpectedRows(NAMESPACE, expect.keys[::-1], 3, 4, 1000),
        ExpectedRows(NAMESPACE, expect.keys, 4, 4, 1000),
        ExpectedRows(NAMESPACE, expect.keys, 3, 5, 1000),
        ExpectedRows(NAMESPACE, expect.keys, 3, 4, 1001),
    )
    for other in others:
        assert set(check_headers(pages, other, may_lack_checksums=lacking).errors) == set(range(6))
    assert set(check_headers(np.zeros_like(pages), expect).errors) == set(range(6))


@pytest.mark.parametrize("firsts", [[0, 0, 0], [2, 2, 2], [0, 1, 3]])
def test_checksums_of_rows_are_verified_as_those_of_one(firsts: list[int]) -> None:
    expect = expected(3)
    checksums = sums(3, 4, [0, 0, 0])
    pages = encode_headers(expect, checksums, [0, 0, 0])
    for bad in (None, 0, 2):
        headers = check_headers(pages, expect)
        found = [checksums[row, first:].copy() for row, first in enumerate(firsts)]
        if bad is not None:
            found[bad][-1] ^= np.uint64(1)
        verify_rows(headers, [0, 1, 2], firsts, found)
        assert set(headers.errors) == (set() if bad is None else {bad})
        if bad is not None:
            with pytest.raises(FormatError) as single:
                verify_checksums(headers.one(bad), found[bad], firsts[bad])
            assert str(headers.errors[bad]) == str(single.value)


def test_blocks_that_were_never_stored_are_refused_whatever_their_sum() -> None:
    expect = expected(2)
    checksums = sums(2, 4, [0, 2])
    headers = check_headers(encode_headers(expect, checksums, [0, 2]), expect)
    verify_rows(headers, [0, 1], [1, 1], [checksums[0, 1:], checksums[1, 1:]])
    assert {row: error.reason for row, error in headers.errors.items()} == {1: "blocks"}
