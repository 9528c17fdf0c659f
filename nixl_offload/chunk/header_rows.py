"""The header pages of many shards of one group: byte for byte what ``header`` writes and refuses one by one.

A page is compared with the bytes that a reader expects. One that differs, or whose own checksum is wrong, is read by
``header.check_header``, which knows what is wrong with it, or that it does not matter.
Threading: pure functions, safe anywhere. What ``check_headers`` returns refers to the pages: they must not change.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ParamSpec

import numpy as np
import numpy.typing as npt

from nixl_offload.chunk.checksum import ALGORITHM_NONE, ALGORITHM_XXH3_64, block_checksum
from nixl_offload.chunk.header import (
    ALGORITHM,
    ALGORITHM_AT,
    CHECKSUMS_AT,
    HEADER_BYTES,
    MAX_KEY_BYTES,
    OWN_CHECKSUM,
    OWN_CHECKSUM_AT,
    Expected,
    ShardHeader,
    check_header,
    encode_header,
    verify_checksums,
)
from nixl_offload.errors import FormatError, LayoutError

P = ParamSpec("P")

Pages = npt.NDArray[np.uint8]
"""Header pages as rows: shape ``(n, HEADER_BYTES)``, contiguous."""

_BLOCKS_AT, _BLOCKS = 52, struct.Struct("<H")
_FIRST_AT, _FIRST = 54, struct.Struct("<H")
_SIZES_AT = 56
_CREATED_AT, _CREATED = 72, struct.Struct("<Q")
_KEY_AT, _KEY = 80, struct.Struct(f"<H6x{MAX_KEY_BYTES}s")
"""Length of the key, and the key. Behind it lies what ``authentication`` knows of, or zeros, up to the checksums."""
_KEY_END = _KEY_AT + _KEY.size


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """``Expected`` of many shards of one group: what they have in common, and their keys."""

    namespace: bytes
    keys: Sequence[bytes]
    group: int
    blocks: int
    block_bytes: int

    def one(self, row: int) -> Expected:
        """Return what row ``row`` must be."""
        return Expected(self.namespace, self.keys[row], self.group, self.blocks, self.block_bytes)


@dataclass(frozen=True, slots=True)
class HeaderRows:
    """What header pages say, column by column. The other columns of a row with an error mean nothing."""

    expect: ExpectedRows
    errors: dict[int, FormatError]
    """By row: why its shard is not the one that was expected."""
    first_valid_block: list[int]
    checksums: list[npt.NDArray[np.uint64]]
    """Of each row: views of its page, shape ``(blocks,)``."""

    def one(self, row: int) -> ShardHeader:
        """Return a row without an error as a header; ``created_s`` is left out."""
        expect = self.expect.one(row)
        return ShardHeader(
            expect.namespace,
            expect.key,
            expect.group,
            expect.blocks,
            self.first_valid_block[row],
            expect.block_bytes,
            0,
            tuple(self.checksums[row].tolist()),
        )


def encode_headers(
    expect: ExpectedRows,
    checksums: npt.NDArray[np.uint64] | None,
    first_valid_block: Sequence[int],
    *,
    created_s: int = 0,
) -> Pages:
    """Return the header pages of many shards of one group: each row is what ``encode_header`` writes.

    ``checksums``: shape ``(n, blocks)``, zeros before each row's first valid block; None: of images that stay in memory
    until ``add_checksums``. Raises LayoutError when a field does not fit the page.
    """
    count = len(expect.keys)
    with_sums, without, sizes = _common(expect.namespace, expect.group, expect.blocks, expect.block_bytes)
    before = without if checksums is None else with_sums
    if checksums is None:
        checksums = np.zeros((count, expect.blocks), dtype=np.uint64)
    if checksums.shape != (count, expect.blocks) or len(first_valid_block) != count:
        raise LayoutError(f"checksums of shape {checksums.shape} for {count} chunks of {expect.blocks} blocks")
    for key, first in zip(expect.keys, first_valid_block, strict=True):
        if not 0 <= first < expect.blocks or not 0 < len(key) <= MAX_KEY_BYTES:
            raise LayoutError(f"first valid block {first} or key {key.hex()} does not fit")
    created = _CREATED.pack(created_s)
    fixed = [
        before + _FIRST.pack(first) + sizes + created + _KEY.pack(len(key), key) + bytes(CHECKSUMS_AT - _KEY_END)
        for key, first in zip(expect.keys, first_valid_block, strict=True)
    ]
    sums_end = CHECKSUMS_AT + 8 * expect.blocks
    pages = np.empty((count, HEADER_BYTES), dtype=np.uint8)
    pages[:, :CHECKSUMS_AT] = np.frombuffer(b"".join(fixed), dtype=np.uint8).reshape(count, CHECKSUMS_AT)
    pages[:, CHECKSUMS_AT:sums_end] = checksums.astype("<u8", order="C").view(np.uint8)
    pages[:, sums_end:OWN_CHECKSUM_AT] = 0
    own = [block_checksum(page) for page in pages[:, :OWN_CHECKSUM_AT]]
    pages[:, OWN_CHECKSUM_AT:] = np.array(own, dtype="<u8").view(np.uint8).reshape(count, OWN_CHECKSUM.size)
    return pages


def lacks_checksums(page: npt.NDArray[np.uint8]) -> bool:
    """Whether a page that was checked is of an image in memory whose blocks were not summed yet."""
    (algorithm,) = ALGORITHM.unpack_from(page.data, ALGORITHM_AT)
    return bool(algorithm == ALGORITHM_NONE)


def add_checksums(page: npt.NDArray[np.uint8], sums: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    """Return what ``encode_headers`` had written with checksums instead of a page that lacks them.

    ``sums``: of the first valid block and all behind it. Raises LayoutError when these are fewer or more, or the page
    has checksums.
    """
    whole = bytearray(page.tobytes())
    (blocks,), (first,) = _BLOCKS.unpack_from(whole, _BLOCKS_AT), _FIRST.unpack_from(whole, _FIRST_AT)
    if not lacks_checksums(page) or first + len(sums) != blocks:
        raise LayoutError(f"{len(sums)} checksums for blocks {first} to {blocks} of a chunk that lacks them")
    ALGORITHM.pack_into(whole, ALGORITHM_AT, ALGORITHM_XXH3_64)
    begin = CHECKSUMS_AT + 8 * first
    whole[begin : begin + 8 * len(sums)] = sums.astype("<u8").tobytes()
    OWN_CHECKSUM.pack_into(whole, OWN_CHECKSUM_AT, block_checksum(memoryview(whole)[:OWN_CHECKSUM_AT]))
    return np.frombuffer(whole, dtype=np.uint8)


def check_headers(
    pages: Iterable[npt.NDArray[np.uint8]], expect: ExpectedRows, *, may_lack_checksums: bool = False
) -> HeaderRows:
    """Check pages, contiguous bytes of shape ``(HEADER_BYTES,)``, as ``check_header`` does; errors are told by row."""
    with_sums, without, sizes = _common(expect.namespace, expect.group, expect.blocks, expect.block_bytes)
    befores = (with_sums, without) if may_lack_checksums else (with_sums,)
    blocks, end = expect.blocks, CHECKSUMS_AT + 8 * expect.blocks
    headers = HeaderRows(expect, {}, [], [])
    for row, (page, key) in enumerate(zip(pages, expect.keys, strict=True)):
        view = page.data
        fixed = bytes(view[:CHECKSUMS_AT])
        (first,) = _FIRST.unpack_from(fixed, _FIRST_AT)
        (own,) = OWN_CHECKSUM.unpack_from(view, OWN_CHECKSUM_AT)
        alike = (
            fixed[:_FIRST_AT] in befores
            and fixed[_SIZES_AT:_CREATED_AT] == sizes
            and fixed[_KEY_AT:_KEY_END] == _KEY.pack(len(key), key)
            and first < blocks
            and own == block_checksum(view[:OWN_CHECKSUM_AT])
        )
        if not alike:
            error = _error_of(check_header, page, expect.one(row), may_lack_checksums=may_lack_checksums)
            if error is not None:
                headers.errors[row] = error
        headers.first_valid_block.append(first)
        headers.checksums.append(page[CHECKSUMS_AT:end].view("<u8"))
    return headers


def verify_rows(
    headers: HeaderRows, rows: Sequence[int], first_blocks: Sequence[int], found: Sequence[npt.NDArray[np.uint64]]
) -> None:
    """Compare the checksums that were ``found`` with those of the headers, as ``verify_checksums`` does for one.

    ``rows``: which headers; ``first_blocks`` and ``found`` are aligned with them. What does not agree is added to
    ``headers.errors``.
    """
    for row, begin, sums in zip(rows, first_blocks, found, strict=True):
        end = begin + len(sums)
        held = headers.first_valid_block[row] <= begin < end
        if held and headers.checksums[row][begin:end].tobytes() == sums.tobytes():
            continue
        error = _error_of(verify_checksums, headers.one(row), sums, begin)
        if error is not None:
            headers.errors[row] = error


@lru_cache(maxsize=64)
def _common(namespace: bytes, group: int, blocks: int, block_bytes: int) -> tuple[bytes, bytes, bytes]:
    """Return what all pages of a group have before the first valid block, with checksums and without, and between that
    and the time.

    Raises LayoutError for fields that ``encode_header`` refuses.
    """
    page = np.asarray(encode_header(ShardHeader(namespace, b"k", group, blocks, 0, block_bytes, 0, (0,) * blocks)))
    with_sums = page[:_FIRST_AT].tobytes()
    without = with_sums[:ALGORITHM_AT] + ALGORITHM.pack(ALGORITHM_NONE) + with_sums[ALGORITHM_AT + ALGORITHM.size :]
    return with_sums, without, page[_SIZES_AT:_CREATED_AT].tobytes()


def _error_of(check: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> FormatError | None:
    """Return the FormatError that ``check`` raises, if it does."""
    try:
        check(*args, **kwargs)
    except FormatError as error:
        return error
    return None
