"""The bytes of a stored shard: a header page that says whose bytes follow, and a checksum for each block of them.

docs/format.md describes the same bytes for readers outside this package; a change here is a change there and, where
old readers would misread it, a new ``FORMAT_VERSION``.
Threading: pure functions over buffers that the caller owns and keeps unchanged during the call; safe anywhere.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

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
ALGORITHM_AT, ALGORITHM = 12, struct.Struct("<H")
CHECKSUMS_AT = 192
OWN_CHECKSUM_AT = HEADER_BYTES - 8
OWN_CHECKSUM = struct.Struct("<Q")

MAX_BLOCKS_PER_CHUNK = (OWN_CHECKSUM_AT - CHECKSUMS_AT) // 8
"""As many block checksums as one header page holds: 487."""

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
    """One per block of the chunk, 0 for the blocks before ``first_valid_block``; all 0 while there are none."""

    @property
    def payload_bytes(self) -> int:
        """Length of the payload, the padding to a whole page not counted."""
        return self.blocks_per_chunk * self.block_bytes


def slot_bytes(blocks_per_chunk: int, block_bytes: int) -> int:
    """Return what one shard takes on the medium: header page, payload, and padding to a whole page."""
    return HEADER_BYTES + align_up(blocks_per_chunk * block_bytes)


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
    page = bytes_of(out)
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
    struct.pack_into(f"<{header.blocks_per_chunk}Q", page, CHECKSUMS_AT, *header.checksums)
    OWN_CHECKSUM.pack_into(page, OWN_CHECKSUM_AT, block_checksum(page[:OWN_CHECKSUM_AT]))
    return out


def decode_header(page: Buffer, *, may_lack_checksums: bool = False) -> ShardHeader:
    """Read a header page. Says only that the page is whole, not that it is the wanted one: that is ``check_header``.

    ``may_lack_checksums``: of an image in memory, whose blocks may not have been summed yet.
    Raises FormatError with reason ``length`` (not 4096 bytes, or sizes that contradict each other), ``magic``,
    ``version`` (or an unknown algorithm or flag), ``header_checksum``, ``key`` or ``blocks``.
    """
    view = bytes_of(page)
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
    (stated,) = OWN_CHECKSUM.unpack_from(view, OWN_CHECKSUM_AT)
    found = block_checksum(view[:OWN_CHECKSUM_AT])
    if stated != found:
        raise FormatError(
            f"the header page states its own checksum as {stated:016x} but has {found:016x}", reason="header_checksum"
        )
    known = algorithm == ALGORITHM_XXH3_64 or (may_lack_checksums and algorithm == ALGORITHM_NONE)
    if not known or flags != 0:
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
        checksums=struct.unpack_from(f"<{blocks}Q", view, CHECKSUMS_AT),
    )


def check_header(page: Buffer, expect: Expected, *, may_lack_checksums: bool = False) -> ShardHeader:
    """Read a header page, as ``decode_header`` does, and make sure that it is the one of ``expect``.

    Raises FormatError as ``decode_header`` does, and with reason ``namespace``, ``key``, ``blocks`` or ``length``
    where the page is whole but another shard's.
    """
    header = decode_header(page, may_lack_checksums=may_lack_checksums)
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


_ZERO_PAGE = bytes(HEADER_BYTES)


def bytes_of(buffer: Buffer) -> memoryview:
    """Return the bytes of a buffer as a flat view."""
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
