"""Whether a stored shard is what its name or index row promises: header, identity, lengths, checksum of each block.

Threading: functions over buffers of the caller's, safe anywhere. Memory: one piece, however large a shard or a block.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Final, NamedTuple

import xxhash

from nixl_offload.chunk.checksum import block_checksum
from nixl_offload.chunk.header import HEADER_BYTES, ShardHeader, decode_header, slot_bytes
from nixl_offload.cli.inventory.base import Chunk, Held, Shard
from nixl_offload.errors import FormatError, StoreError
from nixl_offload.types import PAGE_BYTES, key_group

PIECE_BYTES: Final = 8 << 20
"""Read at once; each thread that checks has a buffer of this size."""

Read = Callable[[Shard, int, memoryview], None]


class Problem(NamedTuple):
    """What is wrong with a shard."""

    rank: int
    place: str
    reason: str
    """As ``FormatError.reason``; or ``missing``, ``rank`` (there is no such rank), ``other`` (whole, another chunk's)
    or ``unreadable`` (the storage failed; nothing is known of the shard)."""
    words: str
    created_s: int | None = None
    """By the header, where that can be read."""


class Buffer:
    """Page-aligned memory of one thread, given back when nothing refers to it any more."""

    def __init__(self) -> None:
        self.memory = memoryview(mmap.mmap(-1, PIECE_BYTES))


def check_shard(read: Read, held: Held, chunk: Chunk, shard: Shard, buffer: Buffer) -> Problem | None:
    """Read a shard whole and check it. None: all is well."""
    header: ShardHeader | None = None
    try:
        first = min(PIECE_BYTES, max(shard.size_bytes, HEADER_BYTES))
        try:
            read(shard, 0, buffer.memory[:first])
        except StoreError as error:
            if error.cause != "short" or first == HEADER_BYTES:
                raise
            first = HEADER_BYTES  # a slab may end within a slot; the header tells more than that
            read(shard, 0, buffer.memory[:first])
        header = decode_header(buffer.memory[:HEADER_BYTES])
        check_identity(header, held, chunk, shard)
        found = checksums(read, shard, header, buffer, first)
        compare(header, found)
    except FormatError as error:
        return Problem(shard.rank, shard.place, error.reason, str(error), header.created_s if header else None)
    except StoreError as error:
        reason = {"missing": "missing", "short": "length"}.get(error.cause, "unreadable")
        return Problem(shard.rank, shard.place, reason, str(error), header.created_s if header else None)
    return None


def check_identity(header: ShardHeader, held: Held, chunk: Chunk, shard: Shard) -> None:
    """Raise FormatError where a whole header is not that of ``shard``; ``other`` where it is another chunk's."""
    digest = held.rank_digest(shard.rank)
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
    if held.blocks_per_chunk not in (None, header.blocks_per_chunk):
        raise FormatError(
            f"the shard holds {header.blocks_per_chunk} blocks, expected {held.blocks_per_chunk}", reason="blocks"
        )
    needed_bytes = slot_bytes(header.blocks_per_chunk, header.block_bytes)
    promised_bytes = held.shard_bytes(chunk.key, shard.rank)
    if promised_bytes not in (None, needed_bytes):
        raise FormatError(
            f"by its header the shard has {needed_bytes} bytes, those of rank {shard.rank} have {promised_bytes}",
            reason="length",
        )
    # A slot has room for the largest shard of all ranks and of groups that share its class; an object has its own size.
    if shard.size_bytes < needed_bytes or (shard.modified_s is not None and shard.size_bytes != needed_bytes):
        raise FormatError(
            f"by its header the shard has {needed_bytes} bytes, there are {shard.size_bytes}", reason="length"
        )


def checksums(read: Read, shard: Shard, header: ShardHeader, buffer: Buffer, there_bytes: int) -> list[int]:
    """Return the checksums of all blocks from ``first_valid_block`` on, reading what is not in the buffer yet.

    ``there_bytes``: so much of the shard's beginning lies in ``buffer``. Raises StoreError.
    """
    sums = _Sums(header.block_bytes, header.first_valid_block)
    end = HEADER_BYTES + header.payload_bytes
    sums.feed(buffer.memory[HEADER_BYTES : min(there_bytes, end)])
    position = there_bytes
    while position < end:
        length = min(PIECE_BYTES, shard.size_bytes - position, -(-(end - position) // PAGE_BYTES) * PAGE_BYTES)
        read(shard, position, buffer.memory[:length])
        sums.feed(buffer.memory[: min(length, end - position)])
        position += length
    return sums.found


def compare(header: ShardHeader, found: list[int]) -> None:
    """Raise FormatError naming the blocks whose checksums are not the header's."""
    first = header.first_valid_block
    stated = header.checksums[first:]
    bad = [number for number, pair in enumerate(zip(stated, found, strict=True), start=first) if pair[0] != pair[1]]
    if not bad:
        return
    some = ", ".join(map(str, bad[:8])) + (" …" if len(bad) > 8 else "")
    noun = "block" if len(bad) == 1 else "blocks"
    raise FormatError(
        f"{noun} {some} of {header.blocks_per_chunk}: the checksum is not the header's", reason="checksum"
    )


class _Sums:
    """Checksums of blocks out of bytes that come in pieces of any length."""

    def __init__(self, block_bytes: int, first_valid: int) -> None:
        self.found: list[int] = []
        self._block_bytes = block_bytes
        self._skip_bytes = first_valid * block_bytes
        self._part: xxhash.xxh3_64 | None = None
        self._part_bytes = 0

    def feed(self, piece: memoryview) -> None:
        skipped = min(self._skip_bytes, piece.nbytes)
        self._skip_bytes -= skipped
        piece = piece[skipped:]
        while piece.nbytes:
            if self._part is None and piece.nbytes >= self._block_bytes:
                self.found.append(block_checksum(piece[: self._block_bytes]))
                piece = piece[self._block_bytes :]
                continue
            self._part = self._part or xxhash.xxh3_64()
            take = min(self._block_bytes - self._part_bytes, piece.nbytes)
            self._part.update(piece[:take])
            self._part_bytes += take
            piece = piece[take:]
            if self._part_bytes == self._block_bytes:
                self.found.append(self._part.intdigest())
                self._part, self._part_bytes = None, 0
