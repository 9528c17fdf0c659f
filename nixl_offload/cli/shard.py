"""Checks that a stored chunk is the one that its name or index row claims: shards, headers, lengths, checksums, MACs.

Threading: a ``ChunkChecker`` per thread. Memory: one piece, regardless of the sizes of shards and blocks.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import xxhash

from nixl_offload.chunk.authentication import ChunkKeys, MacCheck, stated_key_id
from nixl_offload.chunk.header import HEADER_BYTES, ShardHeader, decode_header, slot_bytes
from nixl_offload.errors import FormatError, StoreError
from nixl_offload.tiers.inspect import ChunkInfo, Inspector, NamespaceInfo, ShardInfo
from nixl_offload.types import PAGE_BYTES, key_group

PIECE_BYTES: Final = 8 << 20
"""Bytes per read."""
NO_KEY: Final = "no_key"
"""A ``ShardFault.reason``: the MAC cannot be checked without the key; all else is right."""

Read = Callable[[ShardInfo, int, memoryview], None]


class ShardFault(NamedTuple):
    """A fault of one shard."""

    shard: int
    place: str
    """Empty for a missing shard."""
    reason: str
    """As ``FormatError.reason``; or ``missing``, ``number`` (there is no such shard), ``other`` (a whole shard of
    another chunk), ``unreadable`` (the storage failed; nothing is known of the shard) or ``no_key``."""
    words: str
    created_s: int | None = None
    """The time in the header; None if the header cannot be read."""


class ChunkChecker:
    """Reads and checks the chunks of one tier."""

    def __init__(self, inspector: Inspector, keys: ChunkKeys | None, read: Read | None = None) -> None:
        """``keys``: to check MACs in tiers whose chunks have MACs. ``read``: as the inspector's ``read_into``."""
        self._keys = keys
        self._has_macs = not inspector.exclusive
        self._read = read or inspector.read_into
        self._memory = memoryview(mmap.mmap(-1, PIECE_BYTES))

    def check(self, namespace: NamespaceInfo, chunk: ChunkInfo) -> tuple[ShardFault, ...]:
        """Read all shards of a chunk completely, and return their faults."""
        faults, group = [], key_group(chunk.key)
        numbers = {*namespace.shards_of(group)}
        for shard in chunk.shards:
            if namespace.shards is not None and shard.number not in numbers:
                words = f"a chunk of KV group {group} has no shard {shard.number}"
                faults.append(ShardFault(shard.number, shard.place, "number", words))
            elif fault := self._check_shard(namespace, chunk, shard):
                faults.append(fault)
        for number in sorted(numbers - {shard.number for shard in chunk.shards}):
            words = f"shard {number} is not there: the chunk is incomplete, and cannot be loaded"
            faults.append(ShardFault(number, "", "missing", words))
        return tuple(faults)

    def _check_shard(self, namespace: NamespaceInfo, chunk: ChunkInfo, shard: ShardInfo) -> ShardFault | None:
        created_s, mac, no_key, page = None, None, None, self._memory[:HEADER_BYTES]
        try:
            there_bytes = min(PIECE_BYTES, max(shard.size_bytes, HEADER_BYTES))
            self._read(shard, 0, self._memory[:there_bytes])
            header = decode_header(page)
            created_s = header.created_s
            _check_header(header, namespace, chunk, shard)
            if self._has_macs:
                try:
                    mac = _begin_mac(page, namespace, self._keys)
                except FormatError as error:
                    if error.reason != NO_KEY:
                        raise
                    no_key = error
            _check_blocks(header, self._pieces(shard, header, there_bytes), mac)
            if no_key is not None:
                raise no_key
        except FormatError as error:
            return ShardFault(shard.number, shard.place, error.reason, str(error), created_s)
        except StoreError as error:
            reason = {"missing": "missing", "short": "length"}.get(error.cause, "unreadable")
            return ShardFault(shard.number, shard.place, reason, str(error), created_s)
        return None

    def _pieces(self, shard: ShardInfo, header: ShardHeader, there_bytes: int) -> Iterator[memoryview]:
        """Yield the valid blocks' bytes, in pieces. ``there_bytes``: how many bytes of the shard are in memory already.

        Raises StoreError.
        """
        position = HEADER_BYTES + header.first_valid_block * header.block_bytes
        end = HEADER_BYTES + header.payload_bytes
        if position < there_bytes:
            yield self._memory[position : min(there_bytes, end)]
            position = there_bytes
        while position < end:
            begin = position // PAGE_BYTES * PAGE_BYTES
            length = min(PIECE_BYTES, shard.size_bytes - begin, -(-(end - begin) // PAGE_BYTES) * PAGE_BYTES)
            self._read(shard, begin, self._memory[:length])
            yield self._memory[position - begin : min(length, end - begin)]
            position = begin + length


def _check_header(header: ShardHeader, namespace: NamespaceInfo, chunk: ChunkInfo, shard: ShardInfo) -> None:
    """Raise FormatError if the header belongs to another shard; reason ``other`` for a shard of another chunk."""
    digest = namespace.shard_digest(shard.number)
    if digest is not None and header.namespace != digest:
        said = f"the shard belongs to namespace {header.namespace.hex()[:32]}…, shard {shard.number} here is of "
        raise FormatError(f"{said}{digest.hex()[:32]}…", reason="namespace")
    if header.key != chunk.key or header.group != key_group(chunk.key):
        same_namespace = digest is not None and header.group == int.from_bytes(header.key[-4:], "big")
        said = f"the shard holds key {header.key.hex()} of group {header.group}"
        raise FormatError(said, reason="other" if same_namespace else "key")
    if namespace.blocks_per_chunk not in (None, header.blocks_per_chunk):
        said = f"the shard holds {header.blocks_per_chunk} blocks, expected {namespace.blocks_per_chunk}"
        raise FormatError(said, reason="blocks")
    needed_bytes = slot_bytes(header.blocks_per_chunk, header.block_bytes)
    said = f"by its header the shard has {needed_bytes} bytes"
    promised_bytes = namespace.shard_bytes(key_group(chunk.key), shard.number)
    if promised_bytes not in (None, needed_bytes):
        raise FormatError(f"{said}, but shard {shard.number} has {promised_bytes}", reason="length")
    # A slot is as large as the largest shard of its size class, but an object is exactly as large as its shard.
    if shard.size_bytes < needed_bytes or (shard.modified_s is not None and shard.size_bytes != needed_bytes):
        raise FormatError(f"{said}, there are {shard.size_bytes}", reason="length")


def _begin_mac(page: memoryview, namespace: NamespaceInfo, keys: ChunkKeys | None) -> MacCheck | None:
    """Begin the check of a shard's MAC; None if it has no MAC and needs none.

    Raises FormatError: ``authentication``, or ``no_key``.
    """
    stated = stated_key_id(page)
    if any(stated):
        if keys is None or not keys.knows(page):
            raise FormatError(f"not authenticated: no key {stated.hex()}", reason=NO_KEY)
        return keys.begin(page)
    if namespace.is_authenticated:
        raise FormatError("there is no MAC, and servers of this namespace want one", reason="authentication")
    if namespace.is_authenticated is None and keys is not None:
        raise FormatError("not authenticated: no MAC, and no manifest that asks for one", reason=NO_KEY)
    return None


def _check_blocks(header: ShardHeader, pieces: Iterator[memoryview], mac: MacCheck | None) -> None:
    """Raise FormatError if checksums differ from the header's (it names the blocks), or if the MAC is wrong."""
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
