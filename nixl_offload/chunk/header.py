"""The header page of a stored shard. It identifies the blocks that follow and has a checksum for each.

docs/format.md describes the same bytes for readers outside this package; change both together. If old readers would
misread the change, raise ``FORMAT_VERSION``.
Threading: pure functions over buffers that the caller owns and keeps unchanged during the call; safe anywhere.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from nixl_offload.chunk.checksum import ALGORITHM_NONE, ALGORITHM_XXH3_64, block_checksum
from nixl_offload.errors import FormatError, LayoutError
from nixl_offload.types import PAGE_BYTES, align_up

MAGIC = b"NIXLOFF1"
FORMAT_VERSION = 1
HEADER_BYTES = PAGE_BYTES
NAMESPACE_BYTES = 32
MAX_KEY_BYTES = 64

_FIXED = struct.Struct("<8s4H32sIHHQQQH6x64s")
"""magic, version, header bytes, algorithm, flags, namespace, group, blocks, first valid block, block bytes, payload
bytes, created, key bytes, key."""
CHECKSUMS_AT = 192
OWN_CHECKSUM_AT = HEADER_BYTES - 8
OWN_CHECKSUM = struct.Struct("<Q")

_ALGORITHM_AT, _BLOCKS_AT, _FIRST_AT, _SIZES_AT, _CREATED_AT, _KEY_AT = 12, 52, 54, 56, 72, 80
_U16, _U64 = struct.Struct("<H"), struct.Struct("<Q")
_KEY = struct.Struct(f"<H6x{MAX_KEY_BYTES}s")
"""Length of the key, and the key. Between it and the checksums lie the fields of ``authentication``, or zeros."""
_KEY_END = _KEY_AT + _KEY.size

MAX_BLOCKS_PER_CHUNK = (OWN_CHECKSUM_AT - CHECKSUMS_AT) // 8
"""A header page has room for 487 block checksums."""

Pages = npt.NDArray[np.uint8]
"""Header pages as rows: shape ``(n, HEADER_BYTES)``, contiguous."""

Buffer = memoryview | npt.NDArray[np.uint8] | bytes | bytearray
"""C-contiguous bytes in host memory."""


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """The header fields that a reader expects of many shards of one group."""

    namespace: bytes
    """Digest of the namespace and the rank: 32 bytes."""
    keys: Sequence[bytes]
    group: int
    """The KV-cache group index of the keys."""
    blocks: int
    """``blocks_per_chunk``."""
    block_bytes: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """The fields of one shard's header page."""

    namespace: bytes
    key: bytes
    group: int
    blocks_per_chunk: int
    first_valid_block: int
    """Blocks before this one were not stored: the sliding window had passed them already."""
    block_bytes: int
    created_s: int
    """Seconds since 1970, for people; no decision depends on it."""
    checksums: tuple[int, ...]
    """One per block of the chunk; 0 for blocks before ``first_valid_block``. All 0 if the page lacks checksums."""

    @property
    def payload_bytes(self) -> int:
        """Length of the payload, without padding."""
        return self.blocks_per_chunk * self.block_bytes


def slot_bytes(blocks_per_chunk: int, block_bytes: int) -> int:
    """Return the bytes that one shard takes on the medium: header page, payload, padding to a whole page."""
    return HEADER_BYTES + align_up(blocks_per_chunk * block_bytes)


def decode_header(page: Buffer, *, may_lack_checksums: bool = False) -> ShardHeader:
    """Read a header page. Checks that the page is whole; ``check_headers`` checks that it is the expected one.

    ``may_lack_checksums``: accept the page of an image in memory whose blocks have no checksums yet.
    Raises FormatError with reason ``length`` (not 4096 bytes, or sizes that contradict each other), ``magic``,
    ``version`` (or an unknown algorithm or flag), ``header_checksum``, ``key`` or ``blocks``.
    """
    view = bytes_of(page)
    _require(view.nbytes == HEADER_BYTES, "length", f"a header page has {HEADER_BYTES} bytes, this one {view.nbytes}")
    magic, version, *sizes, key_bytes, key = _FIXED.unpack_from(view)
    header_bytes, algorithm, flags, namespace, group, blocks, first_valid, block_bytes, payload_bytes, created_s = sizes
    _require(magic == MAGIC, "magic", f"not a shard: it begins with {magic.hex()}, not with {MAGIC.hex()}")
    _require(version == FORMAT_VERSION, "version", f"format version {version}; this reader knows {FORMAT_VERSION}")
    (stated,), found = OWN_CHECKSUM.unpack_from(view, OWN_CHECKSUM_AT), block_checksum(view[:OWN_CHECKSUM_AT])
    said = f"the header page states its own checksum as {stated:016x} but has {found:016x}"
    _require(stated == found, "header_checksum", said)
    known = (ALGORITHM_XXH3_64, ALGORITHM_NONE) if may_lack_checksums else (ALGORITHM_XXH3_64,)
    said = f"checksum algorithm {algorithm} and flags {flags:#x}; this reader knows {ALGORITHM_XXH3_64} and 0x0"
    _require(algorithm in known and flags == 0, "version", said)
    fits = header_bytes == HEADER_BYTES and payload_bytes == blocks * block_bytes and block_bytes > 0
    said = f"header of {header_bytes} bytes, {blocks} blocks of {block_bytes} bytes, payload of {payload_bytes} bytes"
    _require(fits, "length", f"{said}: these contradict each other")
    _require(0 < key_bytes <= MAX_KEY_BYTES, "key", f"a key of {key_bytes} bytes; 1 to {MAX_KEY_BYTES} are possible")
    said = f"{blocks} blocks, the first valid one {first_valid}; at most {MAX_BLOCKS_PER_CHUNK} are possible"
    _require(first_valid < blocks <= MAX_BLOCKS_PER_CHUNK, "blocks", said)
    sums = struct.unpack_from(f"<{blocks}Q", view, CHECKSUMS_AT)
    return ShardHeader(namespace, key[:key_bytes], group, blocks, first_valid, block_bytes, created_s, sums)


def _require(holds: bool, reason: str, words: str) -> None:
    if not holds:
        raise FormatError(words, reason=reason)


@dataclass(frozen=True, slots=True)
class HeaderRows:
    """The fields of header pages, column by column. If a row has an error, ignore its other columns."""

    expect: ExpectedRows
    errors: dict[int, FormatError]
    """By row: why its shard is not the expected one."""
    first_valid_block: list[int]
    checksums: npt.NDArray[np.uint64]
    """Shape ``(n, blocks)``."""


def encode_headers(
    expect: ExpectedRows,
    checksums: npt.NDArray[np.uint64] | None,
    first_valid_block: Sequence[int],
    *,
    created_s: int = 0,
) -> Pages:
    """Return the header pages of many shards of one group.

    ``checksums``: shape ``(n, blocks)``, zeros before each row's first valid block. None: the images stay in memory
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
    created = _U64.pack(created_s)
    fixed = [
        before + _U16.pack(first) + sizes + created + _KEY.pack(len(key), key) + bytes(CHECKSUMS_AT - _KEY_END)
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
    """Whether a checked page belongs to an image in memory whose blocks have no checksums yet."""
    (algorithm,) = _U16.unpack_from(page.data, _ALGORITHM_AT)
    return bool(algorithm == ALGORITHM_NONE)


def add_checksums(page: npt.NDArray[np.uint8], sums: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    """Return a copy of a page that lacks checksums, with ``sums`` filled in as ``encode_headers`` does.

    ``sums``: one for each block from the first valid one on. Raises LayoutError if not, or if the page has sums.
    """
    whole = bytearray(page.tobytes())
    (blocks,), (first,) = _U16.unpack_from(whole, _BLOCKS_AT), _U16.unpack_from(whole, _FIRST_AT)
    if not lacks_checksums(page) or first + len(sums) != blocks:
        raise LayoutError(f"{len(sums)} checksums for blocks {first} to {blocks} of a chunk that lacks them")
    _U16.pack_into(whole, _ALGORITHM_AT, ALGORITHM_XXH3_64)
    begin = CHECKSUMS_AT + 8 * first
    whole[begin : begin + 8 * len(sums)] = sums.astype("<u8").tobytes()
    OWN_CHECKSUM.pack_into(whole, OWN_CHECKSUM_AT, block_checksum(memoryview(whole)[:OWN_CHECKSUM_AT]))
    return np.frombuffer(whole, dtype=np.uint8)


def check_headers(
    pages: Sequence[Pages] | Pages, expect: ExpectedRows, *, may_lack_checksums: bool = False
) -> HeaderRows:
    """Check header pages, contiguous, of shape ``(HEADER_BYTES,)``. A bad one gives an error.

    Reasons are those of ``decode_header``; of another shard's page ``namespace``, ``key``, ``blocks``, ``length``.
    """
    with_sums, without, sizes = _common(expect.namespace, expect.group, expect.blocks, expect.block_bytes)
    befores = (with_sums, without) if may_lack_checksums else (with_sums,)
    rows: Pages = np.asarray(pages)
    alike = [
        fixed[:_FIRST_AT] in befores
        and fixed[_SIZES_AT:_CREATED_AT] == sizes
        and fixed[_KEY_AT:] == _KEY.pack(len(key), key)
        for fixed, key in zip(map(bytes, rows[:, :_KEY_END]), expect.keys, strict=True)
    ]
    firsts = rows[:, _FIRST_AT:_SIZES_AT].view("<u2")[:, 0]
    own = np.array([block_checksum(page) for page in rows[:, :OWN_CHECKSUM_AT]], dtype=np.uint64)
    bad = ~np.array(alike) | (firsts >= expect.blocks) | (own != rows[:, OWN_CHECKSUM_AT:].view("<u8")[:, 0])
    headers = HeaderRows(expect, {}, firsts.tolist(), rows[:, CHECKSUMS_AT:].view("<u8")[:, : expect.blocks])
    for row in np.flatnonzero(bad).tolist():
        try:
            _require_match(decode_header(rows[row], may_lack_checksums=may_lack_checksums), expect, expect.keys[row])
        except FormatError as error:
            headers.errors[row] = error
    return headers


def _require_match(header: ShardHeader, expect: ExpectedRows, key: bytes) -> None:
    for reason, found, wanted, words in (
        ("namespace", header.namespace.hex(), expect.namespace.hex(), "the shard belongs to namespace"),
        ("key", header.key.hex(), key.hex(), "the shard holds key"),
        ("key", header.group, expect.group, "the shard's key is of group"),
        ("blocks", header.blocks_per_chunk, expect.blocks, "the number of blocks in the shard is"),
        ("length", header.block_bytes, expect.block_bytes, "the number of bytes in each block of the shard is"),
    ):
        _require(found == wanted, reason, f"{words} {found}, expected {wanted}")


def verify_rows(
    headers: HeaderRows, rows: Sequence[int], first_blocks: Sequence[int], found: Iterable[npt.NDArray[np.uint64]]
) -> None:
    """Compare the ``found`` checksums with those in the headers.

    ``rows``: the rows of ``headers`` to compare. For each of them, ``first_blocks`` has the first block that was summed
    and ``found`` the sums from that block on; a matrix if shards have one block. One that differs gets an error:
    ``checksum``, which names the first bad block, or ``blocks`` if a summed block was never stored.
    """
    expect = headers.expect
    if isinstance(found, np.ndarray) and np.array_equal(headers.checksums[rows], found):
        return
    for row, begin, sums in zip(rows, first_blocks, found, strict=True):
        end, first, stated = begin + len(sums), headers.first_valid_block[row], headers.checksums[row]
        of_key = f"of key {expect.keys[row].hex()}"
        if not first <= begin < end <= expect.blocks:
            said = f"blocks {begin} to {end} were asked for, the shard {of_key} holds {first} to {expect.blocks}"
            headers.errors[row] = FormatError(said, reason="blocks")
        elif stated[begin:end].tobytes() != sums.tobytes():
            bad = int(np.flatnonzero(stated[begin:end] != sums)[0])
            said = f"block {begin + bad} of {expect.blocks} {of_key} has checksum {int(sums[bad]):016x}"
            said += f", expected {int(stated[begin + bad]):016x}"
            headers.errors[row] = FormatError(said, reason="checksum")


@lru_cache(maxsize=64)
def _common(namespace: bytes, group: int, blocks: int, block_bytes: int) -> tuple[bytes, bytes, bytes]:
    """Return the bytes that all pages of a group share: those before the ``first valid block`` field, with checksums
    and without, and those between that field and the time.

    Raises LayoutError for fields that do not fit the page.
    """
    if not 0 < blocks <= MAX_BLOCKS_PER_CHUNK:
        raise LayoutError(
            f"a chunk of {blocks} blocks; one header page has checksums for 1 to {MAX_BLOCKS_PER_CHUNK}: "
            "choose a smaller chunk_tokens or a larger block size"
        )
    if len(namespace) != NAMESPACE_BYTES:
        raise LayoutError(f"a namespace digest of {len(namespace)} bytes; it has {NAMESPACE_BYTES}")
    if block_bytes <= 0 or not 0 <= group < 2**32:
        raise LayoutError(f"block_bytes {block_bytes} or group {group} is out of range")
    fixed = (0, namespace, group, blocks, 0, block_bytes, blocks * block_bytes, 0, 0, b"")
    with_sums, without = (
        _FIXED.pack(MAGIC, FORMAT_VERSION, HEADER_BYTES, algorithm, *fixed)
        for algorithm in (ALGORITHM_XXH3_64, ALGORITHM_NONE)
    )
    return with_sums[:_FIRST_AT], without[:_FIRST_AT], with_sums[_SIZES_AT:_CREATED_AT]


def bytes_of(buffer: Buffer) -> memoryview:
    """Return the bytes of a buffer as a flat view."""
    return (buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)).cast("B")
