"""Namespaces whose chunks are real images, put into any store."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.chunk.header import HEADER_BYTES, slot_bytes
from nixl_offload.identity.namespace import GroupFields, Namespace, make_namespace
from nixl_offload.stores.base import Store
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.types import Key
from tests.headers import Expected, make_page
from tests.unit.gc_rig import RANKS, key, namespace_of, put_manifest

BLOCKS = 16
BLOCK_BYTES = 1000
SLOT_BYTES = slot_bytes(BLOCKS, BLOCK_BYTES)
CHUNK_BYTES = RANKS * SLOT_BYTES

__all__ = [
    "BLOCKS",
    "CHUNK_BYTES",
    "RANKS",
    "SLOT_BYTES",
    "Key",
    "image",
    "key",
    "namespace",
    "put_chunk",
    "put_manifest",
]


def namespace(tenant: str = "default") -> Namespace:
    fields = namespace_of(tenant).fields
    group = GroupFields(0, 16, (SLOT_BYTES,) * RANKS)
    return make_namespace(replace(fields, groups=(group,), blocks_per_chunk=BLOCKS))


def image(space: Namespace, number: int, rank: int, *, first_valid_block: int = 0, seed: int = 0) -> bytearray:
    """Return a shard as a server would have stored it; the padding holds noise."""
    content = bytearray(random.Random(1000 * number + rank + 10**6 * seed).randbytes(SLOT_BYTES))
    payload = np.frombuffer(content, dtype=np.uint8)[HEADER_BYTES:][: BLOCKS * BLOCK_BYTES]
    expected = Expected(space.rank_digest(rank), key(number), 0, BLOCKS, BLOCK_BYTES)
    sums = block_checksums(payload.reshape(BLOCKS, BLOCK_BYTES)[first_valid_block:])
    content[:HEADER_BYTES] = make_page(expected, sums, first_valid_block=first_valid_block).tobytes()
    return content


def put_chunk(store: Store, space: Namespace, number: int) -> list[str]:
    """Put all shards of a chunk in, and return their names."""
    names = [shard_name(space.name, key(number), rank) for rank in range(RANKS)]
    for rank, name in enumerate(names):
        store.write(name, memoryview(image(space, number, rank, first_valid_block=number % 3)))
    return names
