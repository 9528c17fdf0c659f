"""A shard is accepted only when every byte that will be used is the one that was stored under the wanted key."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.chunk.header import (
    HEADER_BYTES,
    MAX_BLOCKS_PER_CHUNK,
    Expected,
    ShardHeader,
    check_header,
    decode_header,
    slot_bytes,
)
from nixl_offload.errors import FormatError
from tests.headers import encode_header, make_header, verify_payload

BLOCKS, BLOCK_BYTES = 4, 600
EXPECT = Expected(namespace=bytes(range(32)), key=b"k" * 32 + bytes(4), group=0, blocks=BLOCKS, block_bytes=BLOCK_BYTES)


def make_shard(expect: Expected = EXPECT, first_valid_block: int = 0, seed: int = 0) -> npt.NDArray[np.uint8]:
    """A whole slot: header page, payload of random bytes, padding."""
    slot = np.zeros(slot_bytes(expect.blocks, expect.block_bytes), dtype=np.uint8)
    payload = slot[HEADER_BYTES : HEADER_BYTES + expect.blocks * expect.block_bytes]
    payload[:] = np.random.default_rng(seed).integers(0, 256, payload.size, dtype=np.uint8)
    checksums = block_checksums(payload.reshape(expect.blocks, -1)[first_valid_block:])
    header = make_header(expect, checksums, first_valid_block=first_valid_block, created_s=1_800_000_000)
    slot[:HEADER_BYTES] = encode_header(header)
    return slot


def read_shard(
    slot: npt.NDArray[np.uint8], expect: Expected = EXPECT, first: int = 0, last: int = BLOCKS
) -> ShardHeader:
    """Everything a load does before it believes the bytes."""
    header = check_header(slot[:HEADER_BYTES], expect)
    verify_payload(header, slot[HEADER_BYTES:], first, last)
    return header


def reason(slot: npt.NDArray[np.uint8], expect: Expected = EXPECT, first: int = 0, last: int = BLOCKS) -> str:
    with pytest.raises(FormatError) as caught:
        read_shard(slot, expect, first, last)
    return caught.value.reason


def reseal(page: npt.NDArray[np.uint8], offset: int, code: str, value: int) -> npt.NDArray[np.uint8]:
    """Change a field and make the page's own checksum right again: what a faulty writer would leave."""
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
    header = make_header(expect, checksums, first_valid_block=first, created_s=created_s)
    page = encode_header(header)
    assert check_header(page, expect) == header
    assert header.payload_bytes == expect.blocks * expect.block_bytes
    assert header.checksums == (0,) * first + tuple(checksums.tolist())


def test_the_bytes_are_those_of_the_documentation() -> None:
    """docs/format.md is a promise to other readers: the offsets in its table, checked one by one."""
    page = bytes(make_shard(first_valid_block=1)[:HEADER_BYTES])
    header = decode_header(page)
    assert page[0:8] == b"NIXLOFF1"
    assert struct.unpack_from("<4H", page, 8) == (1, 4096, 1, 0)
    assert page[16:48] == EXPECT.namespace
    assert struct.unpack_from("<IHH", page, 48) == (0, BLOCKS, 1)
    assert struct.unpack_from("<3Q", page, 56) == (BLOCK_BYTES, BLOCKS * BLOCK_BYTES, 1_800_000_000)
    assert struct.unpack_from("<H", page, 80) == (len(EXPECT.key),)
    assert page[88:152] == EXPECT.key.ljust(64, b"\0")
    assert struct.unpack_from(f"<{BLOCKS}Q", page, 192) == header.checksums
    assert header.checksums[0] == 0
    rest = set(page[82:88] + page[152:192] + page[192 + 8 * BLOCKS : 4088])
    assert rest == {0}


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


@given(st.integers(0, slot_bytes(BLOCKS, BLOCK_BYTES) - 1))
def test_truncation_is_found(length: int) -> None:
    """Whether the missing rest reads as zeros, or as what the buffer held before."""
    slot = make_shard()
    end = HEADER_BYTES + BLOCKS * BLOCK_BYTES
    for before in (np.zeros_like(slot), make_shard(replace(EXPECT, key=b"old"), seed=1)):
        cut = np.concatenate((slot[:length], before[length:]))
        if not np.array_equal(cut[:end], slot[:end]):
            assert reason(cut) != ""


@given(st.integers(1, slot_bytes(BLOCKS, BLOCK_BYTES) - 1), st.booleans())
def test_a_torn_write_is_found(cut: int, same_key: bool) -> None:
    """New bytes up to some point, then what the slot held before: refused, unless all that counts is of one of them."""
    old_expect = EXPECT if same_key else replace(EXPECT, key=b"o" * 36)
    shards = [(EXPECT, make_shard(seed=1)), (old_expect, make_shard(old_expect, seed=2))]
    torn = np.concatenate((shards[0][1][:cut], shards[1][1][cut:]))
    end = HEADER_BYTES + BLOCKS * BLOCK_BYTES
    for expect, _ in shards:
        if any(expect == owner and np.array_equal(torn[:end], whole[:end]) for owner, whole in shards):
            read_shard(torn, expect)
        else:
            reason(torn, expect)


def test_swapped_shards_are_found() -> None:
    """Each is whole, but not the wanted one."""
    for other in (
        replace(EXPECT, key=b"x" * 36),
        replace(EXPECT, namespace=bytes(32)),
        replace(EXPECT, group=1),
        replace(EXPECT, blocks=2, block_bytes=2 * BLOCK_BYTES),
        replace(EXPECT, block_bytes=BLOCK_BYTES + 1),
    ):
        slot = make_shard(other)
        read_shard(slot, other, last=other.blocks)
        assert reason(slot) in {"key", "namespace", "blocks", "length"}


@given(st.permutations(range(BLOCKS)))
def test_swapped_blocks_are_found(order: list[int]) -> None:
    """Each block is whole; the header binds its place."""
    slot = make_shard()
    payload = slot[HEADER_BYTES : HEADER_BYTES + BLOCKS * BLOCK_BYTES].reshape(BLOCKS, BLOCK_BYTES)
    payload[:] = payload[order]
    if order == sorted(order):
        read_shard(slot)
    else:
        assert reason(slot) == "checksum"


def test_blocks_that_were_never_stored_are_refused() -> None:
    """The sliding window had left them behind: their place in the payload holds anything at all."""
    slot = make_shard(first_valid_block=2)
    read_shard(slot, first=2)
    assert reason(slot, first=1) == "blocks"
    assert reason(slot, first=2, last=BLOCKS + 1) in {"blocks", "length"}
    assert reason(slot, first=3, last=3) == "blocks"


def test_a_page_may_lack_checksums_only_where_the_reader_says_so() -> None:
    """As in memory; of other algorithms than the one and none no reader knows anything."""
    page = make_shard()[:HEADER_BYTES]
    lacking = reseal(page, 12, "<H", 0)
    assert check_header(lacking, EXPECT, may_lack_checksums=True) == check_header(page, EXPECT)
    for bad, may_lack in ((lacking, None), (reseal(page, 12, "<H", 2), True)):
        options = {} if may_lack is None else {"may_lack_checksums": may_lack}
        with pytest.raises(FormatError) as caught:
            check_header(bad, EXPECT, **options)
        assert caught.value.reason == "version"


def test_each_reason_names_what_was_expected_and_what_was_found() -> None:
    page = make_shard()[:HEADER_BYTES]
    cases = [
        (page[:-1], "length", "4096 bytes, this one 4095"),
        (np.zeros_like(page), "magic", b"NIXLOFF1".hex()),
        (reseal(page, 8, "<H", 2), "version", "version 2; this reader knows 1"),
        (reseal(page, 12, "<H", 9), "version", "algorithm 9"),
        (reseal(page, 12, "<H", 0), "version", "algorithm 0"),
        (reseal(page, 14, "<H", 1), "version", "flags 0x1"),
        (reseal(page, 10, "<H", 512), "length", "header of 512 bytes"),
        (reseal(page, 64, "<Q", 7), "length", "payload of 7 bytes"),
        (reseal(reseal(page, 64, "<Q", 0), 56, "<Q", 0), "length", "4 blocks of 0 bytes"),
        (reseal(page, 80, "<H", 65), "key", "65 bytes"),
        (reseal(page, 80, "<H", 0), "key", "0 bytes"),
        (reseal(page, 54, "<H", BLOCKS), "blocks", "first valid one 4"),
        (reseal(page, 200, "<Q", 1), None, ""),
    ]
    for bad, expected_reason, words in cases:
        if expected_reason is None:
            decode_header(bad)
            continue
        with pytest.raises(FormatError, match=words) as caught:
            decode_header(bad)
        assert caught.value.reason == expected_reason
