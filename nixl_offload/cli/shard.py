"""Whether a stored shard is what its name or index row promises: header, identity, lengths, checksum of each block.

Threading: functions over the caller's buffers, safe anywhere. Memory: one piece, however large a shard or a block is.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import xxhash

from nixl_offload.chunk.authentication import ChunkKeys, MacCheck, stated_key_id
from nixl_offload.chunk.header import HEADER_BYTES, ShardHeader, decode_header, slot_bytes
from nixl_offload.errors import FormatError, StoreError
from nixl_offload.tiers.inspect import ChunkInfo, NamespaceInfo, ShardInfo
from nixl_offload.types import PAGE_BYTES, key_group

PIECE_BYTES: Final = 8 << 20
"""How much is read at once; each thread that checks has a buffer of this size."""
NO_KEY: Final = "no_key"
"""As ``ShardFault.reason``: all else is right, and nobody knows of the MAC."""

Read = Callable[[ShardInfo, int, memoryview], None]


class ShardFault(NamedTuple):
    """What is wrong with a shard."""

    rank: int
    place: str
    reason: str
    """As ``FormatError.reason``; or ``missing``, ``rank`` (there is no such rank), ``other`` (a whole shard of another
    chunk), ``unreadable`` (the storage failed; nothing is known of the shard) or ``no_key``."""
    words: str
    created_s: int | None = None
    """By the header, where it can be read."""


class Macs(NamedTuple):
    """How MACs are judged, in tiers whose chunks have some."""

    keys: ChunkKeys | None

    def begin(self, page: memoryview, namespace: NamespaceInfo) -> MacCheck | None:
        """Return what checks the MAC of a shard; None: it has none, and needs none.

        Raises FormatError: ``authentication``, or ``no_key``.
        """
        stated = stated_key_id(page)
        if any(stated):
            if self.keys is None or not self.keys.knows(page):
                raise FormatError(f"not authenticated: no key {stated.hex()}", reason=NO_KEY)
            return self.keys.begin(page)
        if namespace.is_authenticated:
            raise FormatError("there is no MAC, and servers of this namespace want one", reason="authentication")
        if namespace.is_authenticated is None and self.keys is not None:
            raise FormatError("not authenticated: no MAC, and no manifest that asks for one", reason=NO_KEY)
        return None


class Buffer:
    """Page-aligned memory of one thread."""

    def __init__(self) -> None:
        self.memory = memoryview(mmap.mmap(-1, PIECE_BYTES))


def check_shard(
    read: Read,
    namespace: NamespaceInfo,
    chunk: ChunkInfo,
    shard: ShardInfo,
    buffer: Buffer,
    macs: Macs | None = None,
) -> ShardFault | None:
    """Read a shard whole and check it. None: it is right. ``macs``: None where nobody looks at them."""
    created_s, mac, no_key, page = None, None, None, buffer.memory[:HEADER_BYTES]
    first_bytes = min(PIECE_BYTES, max(shard.size_bytes, HEADER_BYTES))
    try:
        try:
            read(shard, 0, buffer.memory[:first_bytes])
        except StoreError as error:
            if error.cause != "short" or first_bytes == HEADER_BYTES:
                raise
            first_bytes = HEADER_BYTES  # a slab may end within a slot; the header says more than that
            read(shard, 0, page)
        created_s = decode_header(page).created_s
        header = check_header(page, namespace, chunk, shard)
        try:
            mac = macs.begin(page, namespace) if macs else None
        except FormatError as error:
            if error.reason != NO_KEY:
                raise
            no_key = error
        _check_blocks(header, _pieces(read, shard, header, buffer, first_bytes), mac)
        if no_key is not None:
            raise no_key
    except FormatError as error:
        return ShardFault(shard.rank, shard.place, error.reason, str(error), created_s)
    except StoreError as error:
        reason = {"missing": "missing", "short": "length"}.get(error.cause, "unreadable")
        return ShardFault(shard.rank, shard.place, reason, str(error), created_s)
    return None


def check_header(page: memoryview, namespace: NamespaceInfo, chunk: ChunkInfo, shard: ShardInfo) -> ShardHeader:
    """Return the header of ``shard``. Raises FormatError for any other; with reason ``other`` for another chunk's."""
    header, digest = decode_header(page), namespace.rank_digest(shard.rank)
    if digest is not None and header.namespace != digest:
        raise FormatError(
            f"the shard belongs to namespace {header.namespace.hex()[:32]}…, "
            f"that of rank {shard.rank} here is {digest.hex()[:32]}…",
            reason="namespace",
        )
    if header.key != chunk.key or header.group != key_group(chunk.key):
        same_namespace = digest is not None and header.group == int.from_bytes(header.key[-4:], "big")
        raise FormatError(
            f"the shard holds key {header.key.hex()} of group {header.group}",
            reason="other" if same_namespace else "key",
        )
    if namespace.blocks_per_chunk not in (None, header.blocks_per_chunk):
        words = f"the shard holds {header.blocks_per_chunk} blocks, expected {namespace.blocks_per_chunk}"
        raise FormatError(words, reason="blocks")
    needed_bytes = slot_bytes(header.blocks_per_chunk, header.block_bytes)
    promised_bytes = namespace.shard_bytes(key_group(chunk.key), shard.rank)
    if promised_bytes not in (None, needed_bytes):
        raise FormatError(
            f"by its header the shard has {needed_bytes} bytes, but shards of rank {shard.rank} have {promised_bytes}",
            reason="length",
        )
    # A slot has room for the largest shard of all ranks and of groups that share its class; an object has its own size.
    if shard.size_bytes < needed_bytes or (shard.modified_s is not None and shard.size_bytes != needed_bytes):
        words = f"by its header the shard has {needed_bytes} bytes, there are {shard.size_bytes}"
        raise FormatError(words, reason="length")
    return header


def _pieces(
    read: Read, shard: ShardInfo, header: ShardHeader, buffer: Buffer, there_bytes: int
) -> Iterator[memoryview]:
    """Yield the valid blocks' bytes, in pieces. ``there_bytes``: of the shard's beginning that lie in ``buffer``.

    Raises StoreError.
    """
    position, end = HEADER_BYTES + header.first_valid_block * header.block_bytes, HEADER_BYTES + header.payload_bytes
    if position < there_bytes:
        yield buffer.memory[position : min(there_bytes, end)]
        position = there_bytes
    while position < end:
        begin = position // PAGE_BYTES * PAGE_BYTES
        length = min(PIECE_BYTES, shard.size_bytes - begin, -(-(end - begin) // PAGE_BYTES) * PAGE_BYTES)
        read(shard, begin, buffer.memory[:length])
        yield buffer.memory[position - begin : min(length, end - begin)]
        position = begin + length


def _check_blocks(header: ShardHeader, pieces: Iterator[memoryview], mac: MacCheck | None) -> None:
    """Raise FormatError naming the blocks whose checksums are not the header's, or for a wrong MAC."""
    number, left_bytes, digest, bad = header.first_valid_block, header.block_bytes, xxhash.xxh3_64(), list[int]()
    for piece in pieces:
        if mac is not None:
            mac.update(piece)
        while piece.nbytes:  # a block may span pieces, and a piece may hold many blocks
            part, piece = piece[:left_bytes], piece[left_bytes:]  # noqa: PLW2901
            digest.update(part)
            left_bytes -= part.nbytes
            if not left_bytes:
                bad += [number] if digest.intdigest() != header.checksums[number] else []
                number, left_bytes, digest = number + 1, header.block_bytes, xxhash.xxh3_64()
    if bad:
        some = ", ".join(map(str, bad[:8])) + (" …" if len(bad) > 8 else "")
        words = f"block{'s' if len(bad) > 1 else ''} {some} of {header.blocks_per_chunk}"
        raise FormatError(f"{words}: the checksum is not the header's", reason="checksum")
    if mac is not None:
        mac.finish()
