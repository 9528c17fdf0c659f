"""A header page, field by field, for people: what it says, what it should say, and what a difference means.

The fields are those of docs/format.md. ``chunk.header.decode_header`` decides whether a header is valid; this explains.
Threading: pure functions.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from nixl_offload.chunk.authentication import stated_key_id
from nixl_offload.chunk.checksum import ALGORITHM_XXH3_64, block_checksum
from nixl_offload.chunk.header import (
    CHECKSUMS_AT,
    FORMAT_VERSION,
    HEADER_BYTES,
    MAGIC,
    MAX_BLOCKS_PER_CHUNK,
    MAX_KEY_BYTES,
    OWN_CHECKSUM_AT,
    slot_bytes,
)
from nixl_offload.cli.terminal import moment
from nixl_offload.tiers.inspect import ChunkInfo, NamespaceInfo, ShardInfo
from nixl_offload.types import key_group


class HeaderField(NamedTuple):
    """One line of what a header says."""

    name: str
    value: str | int
    wrong: str | None
    """What is wrong with it, in words; None: it is right, or nothing is known to compare it with."""
    note: str = ""


def explain(
    page: memoryview, namespace: NamespaceInfo | None, chunk: ChunkInfo | None, shard: ShardInfo | None
) -> list[HeaderField]:
    """Return the fields of a header page; what is not known of the shard (None) is not compared."""
    magic = bytes(page[:8])
    if magic != MAGIC:
        return [HeaderField("magic", magic.hex(), _no_magic(page), "")]
    version, header_bytes, algorithm, flags = struct.unpack_from("<4H", page, 8)
    group, blocks, first_valid, block_bytes, payload_bytes, created_s, key_bytes = struct.unpack_from(
        "<IHHQQQH", page, 48
    )
    digest, key = bytes(page[16:48]), bytes(page[88 : 88 + min(key_bytes, MAX_KEY_BYTES)])
    (stated,) = struct.unpack_from("<Q", page, OWN_CHECKSUM_AT)
    found, mac_key = block_checksum(page[:OWN_CHECKSUM_AT]), stated_key_id(page)
    return [
        HeaderField("magic", MAGIC.decode(), None),
        HeaderField("version", version, _unless(version == FORMAT_VERSION, f"this reader knows {FORMAT_VERSION}")),
        HeaderField("header bytes", header_bytes, _unless(header_bytes == HEADER_BYTES, f"expected {HEADER_BYTES}")),
        HeaderField(
            "algorithm",
            algorithm,
            _unless(algorithm == ALGORITHM_XXH3_64, f"this reader knows {ALGORITHM_XXH3_64}, XXH3-64"),
            "XXH3-64" if algorithm == ALGORITHM_XXH3_64 else "",
        ),
        HeaderField("flags", flags, _unless(flags == 0, "this reader knows none")),
        _namespace(digest, namespace, shard),
        HeaderField(
            "group", group, _unless(chunk is None or group == key_group(chunk.key), "not the group in the key")
        ),
        _blocks(blocks, namespace),
        HeaderField("first valid block", first_valid, _unless(first_valid < blocks, "no block would be there")),
        HeaderField("block bytes", block_bytes, _unless(block_bytes > 0, "a block has bytes")),
        _payload(payload_bytes, blocks, block_bytes, shard),
        HeaderField("created", created_s, None, moment(float(created_s))),
        _key(key, key_bytes, chunk),
        *([HeaderField("MAC by key", mac_key.hex(), None)] if any(mac_key) else []),
        HeaderField(
            "header checksum",
            f"{stated:016x}",
            _unless(stated == found, f"the page has {found:016x}: at least one of its bytes is not what was written"),
        ),
    ]


def block_checksums_of(page: memoryview) -> list[int]:
    """Return the checksums that a header page lists, as far as its count of blocks is possible."""
    (blocks,) = struct.unpack_from("<H", page, 52)
    return list(struct.unpack_from(f"<{min(blocks, MAX_BLOCKS_PER_CHUNK)}Q", page, CHECKSUMS_AT))


def _unless(fine: bool, words: str) -> str | None:
    return None if fine else words


def _no_magic(page: memoryview) -> str:
    if not any(page):
        return "the page is zero: never written, a hole in the file, or invalidated by verify --delete-bad"
    return f"not a shard of ours: a header begins with {MAGIC.hex()} ({MAGIC.decode()}). The other fields mean nothing."


def _namespace(digest: bytes, namespace: NamespaceInfo | None, shard: ShardInfo | None) -> HeaderField:
    if namespace is None or shard is None:
        return HeaderField("namespace digest", digest.hex(), None, "nothing to compare it with")
    expected = namespace.rank_digest(shard.rank)
    if expected is None:
        return HeaderField("namespace digest", digest.hex(), None, "no manifest that fits to compare it with")
    if digest == expected:
        return HeaderField("namespace digest", digest.hex(), None, f"that of rank {shard.rank}")
    for rank in range(min(namespace.ranks or 0, 4096)):
        if namespace.rank_digest(rank) == digest:
            return HeaderField(
                "namespace digest", digest.hex(), f"that of rank {rank}, expected that of rank {shard.rank}"
            )
    return HeaderField("namespace digest", digest.hex(), f"another namespace's; expected {expected.hex()}")


def _blocks(blocks: int, namespace: NamespaceInfo | None) -> HeaderField:
    expected = namespace.blocks_per_chunk if namespace else None
    if not 0 < blocks <= MAX_BLOCKS_PER_CHUNK:
        return HeaderField("blocks", blocks, f"1 to {MAX_BLOCKS_PER_CHUNK} are possible")
    return HeaderField(
        "blocks", blocks, _unless(expected in (None, blocks), f"chunks of the namespace have {expected}")
    )


def _payload(payload_bytes: int, blocks: int, block_bytes: int, shard: ShardInfo | None) -> HeaderField:
    if payload_bytes != blocks * block_bytes:
        words: str | None = f"{blocks} blocks of {block_bytes} bytes are {blocks * block_bytes}"
    elif shard is not None and slot_bytes(blocks, block_bytes) > shard.size_bytes:
        words = f"with header and padding {slot_bytes(blocks, block_bytes)} bytes, there are {shard.size_bytes}"
    else:
        words = None
    return HeaderField("payload bytes", payload_bytes, words)


def _key(key: bytes, key_bytes: int, chunk: ChunkInfo | None) -> HeaderField:
    if not 0 < key_bytes <= MAX_KEY_BYTES:
        return HeaderField("key", key.hex(), f"a length of {key_bytes} bytes; 1 to {MAX_KEY_BYTES} are possible")
    fits = chunk is None or key == chunk.key
    return HeaderField(
        "key", key.hex(), _unless(fits, "another chunk's: a swapped file, or a slot given to another chunk")
    )
