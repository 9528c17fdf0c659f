"""A shard is accepted only when every byte that will be used is the one that was stored under the wanted key."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given, strategies as st

from nixl_offload.chunk.checksum import block_checksums, payload_checksums
from nixl_offload.chunk.header import (
    HEADER_BYTES,
    MAX_BLOCKS_PER_CHUNK,
    ExpectedRows,
    add_checksums,
    check_headers,
    decode_header,
    encode_headers,
    lacks_checksums,
    slot_bytes,
    verify_rows,
)
from nixl_offload.errors import FormatError, LayoutError
from tests.headers import Expected, check_blocks, check_header, make_page

BLOCKS, BLOCK_BYTES = 4, 600
END = HEADER_BYTES + BLOCKS * BLOCK_BYTES
EXPECT = Expected(namespace=bytes(range(32)), key=b"k" * 32 + bytes(4), group=0, blocks=BLOCKS, block_bytes=BLOCK_BYTES)

Bytes = npt.NDArray[np.uint8]


def make_shard(expect: Expected = EXPECT, first_valid_block: int = 0, seed: int = 0) -> Bytes:
    """A whole slot: header page, payload of random bytes, padding."""
    slot = np.zeros(slot_bytes(expect.blocks, expect.block_bytes), dtype=np.uint8)
    payload = slot[HEADER_BYTES : HEADER_BYTES + expect.blocks * expect.block_bytes]
    payload[:] = np.random.default_rng(seed).integers(0, 256, payload.size, dtype=np.uint8)
    sums = block_checksums(payload.reshape(expect.blocks, -1)[first_valid_block:])
    slot[:HEADER_BYTES] = make_page(expect, sums, first_valid_block=first_valid_block, created_s=1_800_000_000)
    return slot


def read_shard(slot: Bytes, expect: Expected = EXPECT, first: int = 0, last: int = BLOCKS) -> None:
    """All checks of a load before it uses the bytes."""
    check_blocks(slot[:HEADER_BYTES], expect, slot[HEADER_BYTES:], first, last)


def reason(slot: Bytes, expect: Expected = EXPECT, first: int = 0, last: int = BLOCKS) -> str:
    with pytest.raises(FormatError) as caught:
        read_shard(slot, expect, first, last)
    return caught.value.reason


def reseal(page: Bytes, offset: int, code: str, value: int) -> Bytes:
    """Change a field and correct the page's own checksum, as a faulty writer would."""
    page = page.copy()
    struct.pack_into(code, page.data, offset, value)
    page[-8:] = block_checksums(page[None, :-8]).view(np.uint8)
    return page


@given(
    expect=st.builds(
        Expected,
        namespace=st.binary(min_size=32, max_size=32),
        key=st.binary(min_size=1, max_size=64),
        group=st.integers(0, 2**32 - 1),
        blocks=st.integers(1, MAX_BLOCKS_PER_CHUNK),
        block_bytes=st.integers(1, 2**40),
    ),
    created_s=st.integers(0, 2**64 - 1),
    data=st.data(),
)
def test_a_header_comes_back_as_it_was(expect: Expected, created_s: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, expect.blocks - 1))
    checksums = np.random.default_rng(first).integers(0, 2**64 - 1, expect.blocks - first, dtype=np.uint64)
    header = check_header(make_page(expect, checksums, first_valid_block=first, created_s=created_s), expect)
    assert (header.namespace, header.key, header.group) == (expect.namespace, expect.key, expect.group)
    assert (header.blocks_per_chunk, header.block_bytes) == (expect.blocks, expect.block_bytes)
    assert (header.first_valid_block, header.created_s) == (first, created_s)
    assert header.payload_bytes == expect.blocks * expect.block_bytes
    assert header.checksums == (0,) * first + tuple(checksums.tolist())


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_of_the_header_is_found(bit: int) -> None:
    slot = make_shard()
    slot[bit // 8] ^= 1 << (bit % 8)
    assert reason(slot) in {"magic", "version", "header_checksum"}


@given(st.integers(0, BLOCKS * BLOCK_BYTES * 8 - 1))
def test_any_flipped_bit_of_the_payload_is_found_in_its_block(bit: int) -> None:
    slot = make_shard()
    slot[HEADER_BYTES + bit // 8] ^= 1 << (bit % 8)
    bad = bit // 8 // BLOCK_BYTES
    with pytest.raises(FormatError, match=f"^block {bad} of {BLOCKS} ") as caught:
        read_shard(slot)
    assert caught.value.reason == "checksum"
    if bad + 1 < BLOCKS:
        read_shard(slot, first=bad + 1)


@given(st.integers(1, slot_bytes(BLOCKS, BLOCK_BYTES) - 1), st.sampled_from(["zeros", "same key", "other key"]))
def test_a_cut_or_torn_write_is_found(cut: int, behind: str) -> None:
    """New bytes, then zeros or the slot's old bytes: refused, unless all bytes in use are of one shard."""
    old_expect = EXPECT._replace(key=b"o" * 36) if behind == "other key" else EXPECT
    new, old = make_shard(seed=1), make_shard(old_expect, seed=2)
    torn = np.concatenate((new[:cut], np.zeros_like(old[cut:]) if behind == "zeros" else old[cut:]))
    for expect in (EXPECT, old_expect):
        if any(
            expect == of and np.array_equal(torn[:END], one[:END]) for of, one in ((EXPECT, new), (old_expect, old))
        ):
            read_shard(torn, expect)
        else:
            reason(torn, expect)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"key": b"x" * 36}, "key"),
        ({"namespace": bytes(32)}, "namespace"),
        ({"group": 1}, "key"),
        ({"blocks": 2, "block_bytes": 2 * BLOCK_BYTES}, "blocks"),
        ({"block_bytes": BLOCK_BYTES + 1}, "length"),
    ],
)
def test_swapped_shards_are_found(changes: dict[str, object], why: str) -> None:
    """Each is whole, but not the wanted one."""
    other = EXPECT._replace(**changes)  # type: ignore[arg-type]
    slot = make_shard(other)
    read_shard(slot, other, last=other.blocks)
    assert reason(slot) == why


@given(st.permutations(range(BLOCKS)))
def test_swapped_blocks_are_found(order: list[int]) -> None:
    """Each block is whole; the header binds its place."""
    slot = make_shard()
    payload = slot[HEADER_BYTES:END].reshape(BLOCKS, BLOCK_BYTES)
    payload[:] = payload[order]
    if order == sorted(order):
        read_shard(slot)
    else:
        assert reason(slot) == "checksum"


def test_blocks_that_were_never_stored_are_refused() -> None:
    """The sliding window had passed them: their bytes in the payload are arbitrary."""
    slot = make_shard(first_valid_block=2)
    read_shard(slot, first=2)
    assert reason(slot, first=1) == "blocks"
    assert reason(slot, first=2, last=BLOCKS + 1) == "blocks"
    assert reason(slot, first=3, last=3) == "blocks"


PAGE = make_shard()[:HEADER_BYTES]


@pytest.mark.parametrize(
    ("spoil", "why", "words"),
    [
        (lambda page: page[:-1], "length", "4096 bytes, this one 4095"),
        (np.zeros_like, "magic", b"NIXLOFF1".hex()),
        (lambda page: reseal(page, 8, "<H", 2), "version", "version 2; this reader knows 1"),
        (lambda page: reseal(page, 12, "<H", 9), "version", "algorithm 9"),
        (lambda page: reseal(page, 12, "<H", 0), "version", "algorithm 0"),
        (lambda page: reseal(page, 14, "<H", 1), "version", "flags 0x1"),
        (lambda page: reseal(page, 10, "<H", 512), "length", "header of 512 bytes"),
        (lambda page: reseal(page, 64, "<Q", 7), "length", "payload of 7 bytes"),
        (lambda page: reseal(reseal(page, 64, "<Q", 0), 56, "<Q", 0), "length", "4 blocks of 0 bytes"),
        (lambda page: reseal(page, 80, "<H", 65), "key", "65 bytes"),
        (lambda page: reseal(page, 80, "<H", 0), "key", "0 bytes"),
        (lambda page: reseal(page, 54, "<H", BLOCKS), "blocks", "first valid one 4"),
    ],
)
def test_each_reason_names_what_was_found(spoil: Callable[[Bytes], Bytes], why: str, words: str) -> None:
    decode_header(reseal(PAGE, 200, "<Q", 1))
    with pytest.raises(FormatError, match=words) as caught:
        decode_header(spoil(PAGE))
    assert caught.value.reason == why


# Many shards at once


def rows_of(count: int, blocks: int) -> tuple[ExpectedRows, list[int], npt.NDArray[np.uint64]]:
    """Keys of 1 to 64 bytes, their first valid blocks, and checksums."""
    keys = [bytes([7 + n]) * (1 + 21 * n % 64) for n in range(count)]
    firsts = [n % blocks for n in range(count)]
    sums = np.random.default_rng(1).integers(1, 1 << 63, (count, blocks), dtype=np.uint64)
    for row, first in enumerate(firsts):
        sums[row, :first] = 0
    return ExpectedRows(bytes(range(32)), keys, 3, blocks, 1000), firsts, sums


@pytest.mark.parametrize("blocks", [1, 4, MAX_BLOCKS_PER_CHUNK])
@pytest.mark.parametrize("count", [1, 2, 17])
def test_checksums_that_come_later_make_the_same_page(count: int, blocks: int) -> None:
    """Until then readers of storage refuse the page, but readers of memory accept it."""
    expect, firsts, sums = rows_of(count, blocks)
    whole = encode_headers(expect, sums, firsts, created_s=1_700_000_000)
    pages = encode_headers(expect, None, firsts, created_s=1_700_000_000)
    refused = check_headers(pages, expect).errors
    assert {row: error.reason for row, error in refused.items()} == dict.fromkeys(range(count), "version")
    for mixed in (whole, pages, np.concatenate([pages[:2], whole[2:]])):
        headers = check_headers(mixed, expect, may_lack_checksums=mixed is not whole)
        assert (headers.errors, headers.first_valid_block) == ({}, firsts)
        assert mixed is not whole or (np.stack(headers.checksums) == sums).all()
    for row, first in enumerate(firsts):
        header = decode_header(whole[row])
        assert (header.key, header.first_valid_block) == (expect.keys[row], first)
        assert header.checksums == tuple(sums[row].tolist())
        assert lacks_checksums(pages[row])
        completed = add_checksums(pages[row], sums[row, first:])
        assert completed.tobytes() == whole[row].tobytes()
        assert not lacks_checksums(completed)
        for page, late in ((completed, sums[row, first:]), (pages[row], sums[row, first + 1 :])):
            with pytest.raises(LayoutError):
                add_checksums(page, late)


@pytest.mark.parametrize("lacking", [False, True])
def test_damage_is_the_error_of_its_row_alone(lacking: bool) -> None:
    """Each byte of the fixed part, some of the rest; other keys, groups, namespaces and sizes; an algorithm that nobody
    knows.
    """
    expect, firsts, sums = rows_of(6, 4)
    pages = encode_headers(expect, None if lacking else sums, firsts, created_s=5)
    for place in [*range(200), 300, 3000, HEADER_BYTES - 9, HEADER_BYTES - 8, HEADER_BYTES - 1]:
        damaged = pages.copy()
        damaged[place % 6, place] ^= 0x10
        assert list(check_headers(damaged, expect, may_lack_checksums=lacking).errors) == [place % 6]
    of, keys = expect.namespace, expect.keys
    sizes = [(of, keys, *each) for each in ((4, 4, 1000), (3, 5, 1000), (3, 4, 1001))]
    for others in ((bytes(32), keys, 3, 4, 1000), (of, keys[::-1], 3, 4, 1000), *sizes):
        other = ExpectedRows(*others)
        assert set(check_headers(pages, other, may_lack_checksums=lacking).errors) == set(range(6))
    unknown = np.stack([reseal(page, 12, "<H", 2) for page in pages])
    errors = check_headers(unknown, expect, may_lack_checksums=lacking).errors
    assert [errors[row].reason for row in range(6)] == ["version"] * 6


@pytest.mark.parametrize("begins", [[0, 1, 2], [2, 2, 2], [0, 1, 3]])
@pytest.mark.parametrize("bad", [None, 0, 2])
def test_checksums_of_rows_are_verified(begins: list[int], bad: int | None) -> None:
    """All blocks are verified, the last one too. A block that was never stored is refused, even with the sum 0."""
    expect, firsts, sums = rows_of(3, 4)
    headers = check_headers(encode_headers(expect, sums, firsts), expect)
    found = [sums[row, begin:].copy() for row, begin in enumerate(begins)]
    if bad is not None:
        found[bad][-1] ^= np.uint64(1)
    verify_rows(headers, [0, 1, 2], begins, found)
    assert {row: error.reason for row, error in headers.errors.items()} == ({} if bad is None else {bad: "checksum"})
    unstored = check_headers(encode_headers(expect, sums, firsts), expect)
    verify_rows(unstored, [0, 1, 2], [0, 0, 0], list(sums))
    assert {row: error.reason for row, error in unstored.errors.items()} == {1: "blocks", 2: "blocks"}


def test_a_block_is_summed_as_its_bytes_lie_side_by_side() -> None:
    """Blocks may lie apart."""
    wide = np.random.default_rng(1).integers(0, 256, (6, 100), dtype=np.uint8)
    for payload in (wide[:2], wide[2:3, :50], wide[::2, 2:52]):
        (sums,) = payload_checksums([payload])
        assert sums.tolist() == [xxhash.xxh3_64_intdigest(row.tobytes()) for row in payload]
    with pytest.raises((ValueError, BufferError)):
        block_checksums(wide[:, ::2])
