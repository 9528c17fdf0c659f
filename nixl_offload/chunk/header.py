"""The bytes of a stored shard: a header page that says whose bytes follow, and a checksum for each block of them.

docs/format.md describes the same bytes for readers outside this package; a change here is a change there and, where
old readers would misread it, a new ``FORMAT_VERSION``.
Threading: pure functions over buffers that the caller owns and keeps unchanged during the call; safe anywhere.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ParamSpec

import numpy as np
import numpy.typing as npt

from nixl_offload.chunk.checksum import ALGORITHM_XXH3_64, block_checksum, block_checksums
from nixl_offload.errors import FormatError, LayoutError
from nixl_offload.types import PAGE_BYTES, align_up

P = ParamSpec("P")

MAGIC = b"NIXLOFF1"
FORMAT_VERSION = 1
HEADER_BYTES = PAGE_BYTES
NAMESPACE_BYTES = 32
MAX_KEY_BYTES = 64

_FIXED = struct.Struct("<8s4H32sIHHQQQH6x64s")
"""magic, version, header bytes, algorithm, flags, namespace, group, blocks, first valid block, block bytes, payload
bytes, created, key bytes, key."""
_CREATED_AT, _CREATED = 72, struct.Struct("<Q")
_KEY_BYTES_AT, _KEY_AT, _KEY = 80, 88, struct.Struct("<H6x64s")
"""The length of the key, and the key: the end of ``_FIXED``."""
_CHECKSUMS_AT = 192
_OWN_CHECKSUM_AT = HEADER_BYTES - 8
_OWN_CHECKSUM = struct.Struct("<Q")

MAX_BLOCKS_PER_CHUNK = (_OWN_CHECKSUM_AT - _CHECKSUMS_AT) // 8
"""As many block checksums as one header page holds: 487."""

_COLUMNS = np.dtype(
    {
        "names": ["first_valid_block", "key_bytes", "key", "fixed", "checksums", "own_checksum"],
        "formats": ["<u2", "<u2", ("u1", MAX_KEY_BYTES), ("u1", _CHECKSUMS_AT), ("<u8", MAX_BLOCKS_PER_CHUNK), "<u8"],
        "offsets": [54, 80, 88, 0, _CHECKSUMS_AT, _OWN_CHECKSUM_AT],
        "itemsize": HEADER_BYTES,
    }
)
"""A header page as a row of a matrix; ``fixed`` is everything before the checksums."""
_VARIES = np.zeros(_CHECKSUMS_AT, dtype=np.bool_)
"""The bytes of ``fixed`` that a reader cannot know: ``first_valid_block`` and ``created_s``."""
_VARIES[54:56] = _VARIES[_CREATED_AT:_KEY_BYTES_AT] = True

Pages = npt.NDArray[np.uint8]
"""Header pages as rows: shape ``(n, HEADER_BYTES)``, contiguous."""

Buffer = memoryview | npt.NDArray[np.uint8] | bytes | bytearray
"""C-contiguous bytes in host memory."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a reader knows of a shard before it has seen any of its bytes."""

    namespace: bytes
    """Digest of the namespace with the rank in it: 32 bytes."""
    key: bytes
    group: int
    """The key's KV-cache group index."""
    blocks: int
    """``blocks_per_chunk``."""
    block_bytes: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """What the header page of one shard says."""

    namespace: bytes
    key: bytes
    group: int
    blocks_per_chunk: int
    first_valid_block: int
    """Blocks before this one were not there to be stored: the sliding window had left them behind."""
    block_bytes: int
    created_s: int
    """Seconds since 1970; for people, nothing is decided by it."""
    checksums: tuple[int, ...]
    """One per block of the chunk, 0 for the blocks before ``first_valid_block``."""

    @property
    def payload_bytes(self) -> int:
        """Length of the payload, the padding to a whole page not counted."""
        return self.blocks_per_chunk * self.block_bytes


def slot_bytes(blocks_per_chunk: int, block_bytes: int) -> int:
    """Return what one shard takes on the medium: header page, payload, and padding to a whole page."""
    return HEADER_BYTES + align_up(blocks_per_chunk * block_bytes)


def make_header(
    expect: Expected, checksums: npt.NDArray[np.uint64], *, first_valid_block: int = 0, created_s: int = 0
) -> ShardHeader:
    """Return the header of a shard about to be stored.

    ``checksums``: shape ``(blocks - first_valid_block,)``, those of the blocks that are there. Raises LayoutError
    when there are fewer or more.
    """
    if checksums.shape != (expect.blocks - first_valid_block,):
        raise LayoutError(
            f"blocks {first_valid_block} to {expect.blocks} of a chunk need a checksum each, "
            f"not an array of shape {checksums.shape}"
        )
    return ShardHeader(
        namespace=expect.namespace,
        key=expect.key,
        group=expect.group,
        blocks_per_chunk=expect.blocks,
        first_valid_block=first_valid_block,
        block_bytes=expect.block_bytes,
        created_s=created_s,
        checksums=(0,) * first_valid_block + tuple(checksums.tolist()),
    )


def encode_header(
    header: ShardHeader, out: memoryview | npt.NDArray[np.uint8] | None = None
) -> memoryview | npt.NDArray[np.uint8]:
    """Write ``header`` into ``out``, 4096 writable bytes, or into a new array, and return it.

    Raises LayoutError when a field does not fit the page: more than ``MAX_BLOCKS_PER_CHUNK`` blocks, a namespace that
    is not 32 bytes, a key that is empty or longer than ``MAX_KEY_BYTES``. Nothing was written then.
    """
    _refuse_unfit(header)
    if out is None:
        out = np.zeros(HEADER_BYTES, dtype=np.uint8)
    page = _bytes_of(out)
    if page.nbytes != HEADER_BYTES:
        raise LayoutError(f"a header page has {HEADER_BYTES} bytes, the buffer for it {page.nbytes}")
    page[:] = _ZERO_PAGE
    _FIXED.pack_into(
        page,
        0,
        MAGIC,
        FORMAT_VERSION,
        HEADER_BYTES,
        ALGORITHM_XXH3_64,
        0,
        header.namespace,
        header.group,
        header.blocks_per_chunk,
        header.first_valid_block,
        header.block_bytes,
        header.payload_bytes,
        header.created_s,
        len(header.key),
        header.key,
    )
    struct.pack_into(f"<{header.blocks_per_chunk}Q", page, _CHECKSUMS_AT, *header.checksums)
    _OWN_CHECKSUM.pack_into(page, _OWN_CHECKSUM_AT, block_checksum(page[:_OWN_CHECKSUM_AT]))
    return out


def decode_header(page: Buffer) -> ShardHeader:
    """Read a header page. Says only that the page is whole, not that it is the wanted one: that is ``check_header``.

    Raises FormatError with reason ``length`` (not 4096 bytes, or sizes that contradict each other), ``magic``,
    ``version`` (or an unknown algorithm or flag), ``header_checksum``, ``key`` or ``blocks``.
    """
    view = _bytes_of(page)
    if view.nbytes != HEADER_BYTES:
        raise FormatError(f"a header page has {HEADER_BYTES} bytes, this one {view.nbytes}", reason="length")
    (
        magic,
        version,
        header_bytes,
        algorithm,
        flags,
        namespace,
        group,
        blocks,
        first_valid_block,
        block_bytes,
        payload_bytes,
        created_s,
        key_bytes,
        key,
    ) = _FIXED.unpack_from(view)
    if magic != MAGIC:
        raise FormatError(f"not a shard: it begins with {magic.hex()}, not with {MAGIC.hex()}", reason="magic")
    if version != FORMAT_VERSION:
        raise FormatError(f"format version {version}; this reader knows {FORMAT_VERSION}", reason="version")
    (stated,) = _OWN_CHECKSUM.unpack_from(view, _OWN_CHECKSUM_AT)
    found = block_checksum(view[:_OWN_CHECKSUM_AT])
    if stated != found:
        raise FormatError(
            f"the header page states its own checksum as {stated:016x} but has {found:016x}", reason="header_checksum"
        )
    if algorithm != ALGORITHM_XXH3_64 or flags != 0:
        raise FormatError(
            f"checksum algorithm {algorithm} and flags {flags:#x}; this reader knows {ALGORITHM_XXH3_64} and 0x0",
            reason="version",
        )
    if header_bytes != HEADER_BYTES or payload_bytes != blocks * block_bytes or block_bytes == 0:
        raise FormatError(
            f"header of {header_bytes} bytes, {blocks} blocks of {block_bytes} bytes, "
            f"payload of {payload_bytes} bytes: these contradict each other",
            reason="length",
        )
    if not 0 < key_bytes <= MAX_KEY_BYTES:
        raise FormatError(f"a key of {key_bytes} bytes; 1 to {MAX_KEY_BYTES} are possible", reason="key")
    if not first_valid_block < blocks <= MAX_BLOCKS_PER_CHUNK:
        raise FormatError(
            f"{blocks} blocks, the first valid one {first_valid_block}; at most {MAX_BLOCKS_PER_CHUNK} are possible",
            reason="blocks",
        )
    return ShardHeader(
        namespace=namespace,
        key=key[:key_bytes],
        group=group,
        blocks_per_chunk=blocks,
        first_valid_block=first_valid_block,
        block_bytes=block_bytes,
        created_s=created_s,
        checksums=struct.unpack_from(f"<{blocks}Q", view, _CHECKSUMS_AT),
    )


def check_header(page: Buffer, expect: Expected) -> ShardHeader:
    """Read a header page and make sure that it is the one of ``expect``.

    Raises FormatError as ``decode_header`` does, and with reason ``namespace``, ``key``, ``blocks`` or ``length``
    where the page is whole but another shard's.
    """
    header = decode_header(page)
    if header.namespace != expect.namespace:
        raise FormatError(
            f"the shard belongs to namespace {header.namespace.hex()}, expected {expect.namespace.hex()}",
            reason="namespace",
        )
    if header.key != expect.key or header.group != expect.group:
        raise FormatError(
            f"the shard holds key {header.key.hex()} of group {header.group}, "
            f"expected {expect.key.hex()} of group {expect.group}",
            reason="key",
        )
    if header.blocks_per_chunk != expect.blocks:
        raise FormatError(
            f"the shard holds {header.blocks_per_chunk} blocks, expected {expect.blocks}", reason="blocks"
        )
    if header.block_bytes != expect.block_bytes:
        raise FormatError(
            f"the shard's blocks have {header.block_bytes} bytes, expected {expect.block_bytes}", reason="length"
        )
    return header


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
    """What many header pages say, column by column. The other columns of a row with an error mean nothing."""

    expect: ExpectedRows
    errors: dict[int, FormatError]
    """By row: why its shard is not the one that was expected."""
    first_valid_block: npt.NDArray[np.int64]
    """Shape ``(n,)``."""
    checksums: npt.NDArray[np.uint64]
    """Shape ``(n, blocks)``."""

    def one(self, row: int) -> ShardHeader:
        """Return a row without an error as a header; ``created_s`` is left out."""
        expect = self.expect.one(row)
        return ShardHeader(
            expect.namespace,
            expect.key,
            expect.group,
            expect.blocks,
            int(self.first_valid_block[row]),
            expect.block_bytes,
            0,
            tuple(self.checksums[row].tolist()),
        )


def encode_headers(
    expect: ExpectedRows,
    checksums: npt.NDArray[np.uint64],
    first_valid_block: Sequence[int],
    *,
    created_s: int = 0,
) -> Pages:
    """Return the header pages of many shards of one group: each row is what ``encode_header`` writes, byte for byte.

    ``checksums``: shape ``(n, blocks)``, zeros before each row's first valid block. Raises LayoutError when a field
    does not fit the page.
    """
    count = len(expect.keys)
    if checksums.shape != (count, expect.blocks) or len(first_valid_block) != count:
        raise LayoutError(f"checksums of shape {checksums.shape} for {count} chunks of {expect.blocks} blocks")
    for row in range(count):
        if not 0 <= first_valid_block[row] < expect.blocks or not 0 < len(expect.keys[row]) <= MAX_KEY_BYTES:
            raise LayoutError(
                f"first valid block {first_valid_block[row]} or key {expect.keys[row].hex()} does not fit"
            )
    pages = np.zeros((count, HEADER_BYTES), dtype=np.uint8)
    if not count:
        return pages
    pages[:, :_CHECKSUMS_AT] = _fixed_rows(expect, created_s)
    columns = pages.reshape(-1).view(_COLUMNS)
    columns["first_valid_block"] = first_valid_block
    columns["checksums"][:, : expect.blocks] = checksums
    columns["own_checksum"] = block_checksums(pages[:, :_OWN_CHECKSUM_AT])
    return pages


def check_headers(pages: Pages, expect: ExpectedRows) -> HeaderRows:
    """Check each page as ``check_header`` does, all of them in one pass; errors are told by row."""
    columns = pages.reshape(-1).view(_COLUMNS)
    first = columns["first_valid_block"].astype(np.int64)
    # A page that agrees in all that a reader knows, and with its own checksum, is right. Any other is read by
    # ``check_header``, which knows what is wrong, or that it does not matter.
    alike = ((columns["fixed"] == _fixed_rows(expect, 0)) | _VARIES).all(axis=1)
    alike &= columns["own_checksum"] == block_checksums(pages[:, :_OWN_CHECKSUM_AT])
    alike &= first < expect.blocks
    errors: dict[int, FormatError] = {}
    for row in np.flatnonzero(~alike).tolist():
        if (error := _error_of(check_header, pages[row], expect.one(row))) is not None:
            errors[row] = error
    return HeaderRows(expect, errors, first, columns["checksums"][:, : expect.blocks])


def verify_rows(
    headers: HeaderRows, rows: Sequence[int], first_blocks: Sequence[int], found: Sequence[npt.NDArray[np.uint64]]
) -> None:
    """Compare the checksums that were ``found`` with those of the headers, as ``verify_checksums`` does for one.

    ``rows``: which headers; ``first_blocks`` and ``found`` are aligned with them. What does not agree is added to
    ``headers.errors``.
    """
    stated, firsts = headers.checksums, headers.first_valid_block.tolist()
    for row, begin, sums in zip(rows, first_blocks, found, strict=True):
        end = begin + len(sums)
        if firsts[row] <= begin < end and stated[row, begin:end].tobytes() == sums.tobytes():
            continue
        error = _error_of(verify_checksums, headers.one(row), sums, begin)
        if error is not None:
            headers.errors[row] = error


def _fixed_rows(expect: ExpectedRows, created_s: int) -> npt.NDArray[np.uint8]:
    """Return what precedes the checksums, for each key; the first valid block is 0."""
    page = bytearray(_fixed_page(expect.namespace, expect.group, expect.blocks, expect.block_bytes))
    _CREATED.pack_into(page, _CREATED_AT, created_s)
    before, after = bytes(page[:_KEY_BYTES_AT]), bytes(page[_KEY_AT + MAX_KEY_BYTES :])
    made = b"".join(before + _KEY.pack(len(key), key) + after for key in expect.keys)
    return np.frombuffer(made, dtype=np.uint8).reshape(len(expect.keys), _CHECKSUMS_AT)


@lru_cache(maxsize=64)
def _fixed_page(namespace: bytes, group: int, blocks: int, block_bytes: int) -> bytes:
    """Return what precedes the checksums, but for the key; fields are refused as those of a single header are."""
    template = ShardHeader(namespace, b"\0", group, blocks, 0, block_bytes, 0, (0,) * blocks)
    return bytes(np.asarray(encode_header(template), dtype=np.uint8)[:_CHECKSUMS_AT])


def verify_checksums(header: ShardHeader, found: npt.NDArray[np.uint64], first_block: int) -> None:
    """Compare ``found``, the checksums of blocks ``first_block`` onwards, with the header's, wherever they were
    computed.

    Raises FormatError with reason ``checksum`` naming the first bad block, or ``blocks`` when a block was never stored.
    """
    last_block = first_block + len(found)
    _refuse_absent(header, first_block, last_block)
    stated = header.checksums[first_block:last_block]
    values = tuple(found.tolist())
    if values == stated:
        return
    for block, (expected, value) in enumerate(zip(stated, values, strict=True), start=first_block):
        if expected != value:
            raise FormatError(
                f"block {block} of {header.blocks_per_chunk} of key {header.key.hex()} has checksum {value:016x}, "
                f"expected {expected:016x}",
                reason="checksum",
            )


def verify_blocks(header: ShardHeader, blocks: npt.NDArray[np.uint8], first_block: int) -> None:
    """Verify blocks that lie in host memory: ``blocks`` has shape ``(n, block_bytes)`` and begins with ``first_block``.

    Raises FormatError as ``verify_checksums`` does, and with reason ``length`` when the rows are not ``block_bytes``
    long.
    """
    if blocks.ndim != 2 or blocks.shape[1] != header.block_bytes:
        raise FormatError(
            f"blocks of shape {blocks.shape}, expected rows of {header.block_bytes} bytes", reason="length"
        )
    _refuse_absent(header, first_block, first_block + len(blocks))
    verify_checksums(header, block_checksums(blocks), first_block)


def verify_payload(header: ShardHeader, payload: Buffer, first_block: int, last_block: int) -> None:
    """Verify blocks ``first_block`` to ``last_block``, the latter excluded, of a payload that lies in host memory.

    ``payload`` begins with block 0 of the chunk and reaches at least to the end of the last wanted block; what lies
    outside the wanted blocks is not looked at. Raises FormatError as ``verify_blocks`` does, with reason ``length``
    when it is too short.
    """
    data: npt.NDArray[np.uint8] = np.frombuffer(payload, dtype=np.uint8)
    end = last_block * header.block_bytes
    if data.nbytes < end:
        raise FormatError(
            f"the payload has {data.nbytes} bytes, {end} are needed for block {last_block - 1} "
            f"of key {header.key.hex()}",
            reason="length",
        )
    _refuse_absent(header, first_block, last_block)
    verify_blocks(header, data[first_block * header.block_bytes : end].reshape(-1, header.block_bytes), first_block)


def _error_of(check: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> FormatError | None:
    """Return the FormatError that ``check`` raises, if it does."""
    try:
        check(*args, **kwargs)
    except FormatError as error:
        return error
    return None


_ZERO_PAGE = bytes(HEADER_BYTES)


def _bytes_of(buffer: Buffer) -> memoryview:
    return (buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)).cast("B")


def _refuse_unfit(header: ShardHeader) -> None:
    if not 0 < header.blocks_per_chunk <= MAX_BLOCKS_PER_CHUNK:
        raise LayoutError(
            f"a chunk of {header.blocks_per_chunk} blocks; "
            f"one header page has checksums for 1 to {MAX_BLOCKS_PER_CHUNK}: "
            "choose a smaller chunk_tokens or a larger block size"
        )
    if not 0 <= header.first_valid_block < header.blocks_per_chunk:
        raise LayoutError(
            f"first valid block {header.first_valid_block} is not one of the {header.blocks_per_chunk} of the chunk"
        )
    if len(header.checksums) != header.blocks_per_chunk:
        raise LayoutError(f"{len(header.checksums)} checksums for {header.blocks_per_chunk} blocks")
    if len(header.namespace) != NAMESPACE_BYTES:
        raise LayoutError(f"a namespace digest of {len(header.namespace)} bytes; it has {NAMESPACE_BYTES}")
    if not 0 < len(header.key) <= MAX_KEY_BYTES:
        raise LayoutError(f"a key of {len(header.key)} bytes; 1 to {MAX_KEY_BYTES} are possible")
    if header.block_bytes <= 0 or not 0 <= header.group < 2**32 or not 0 <= header.created_s < 2**64:
        raise LayoutError(
            f"block_bytes {header.block_bytes}, group {header.group} or created_s {header.created_s} is out of range"
        )


def _refuse_absent(header: ShardHeader, first_block: int, last_block: int) -> None:
    if not header.first_valid_block <= first_block < last_block <= header.blocks_per_chunk:
        raise FormatError(
            f"blocks {first_block} to {last_block} were asked for, the shard of key {header.key.hex()} holds "
            f"{header.first_valid_block} to {header.blocks_per_chunk}",
            reason="blocks",
        )
