"""Attacks by somebody who can write to a bucket or a shared directory but lacks the key.

They can read everything stored, know the format, and compute every checksum. An attack is a function of a ``Loot``.
Threading: pure functions.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from nixl_offload.chunk.authentication import KEY_ID_AT, MAC_AT, ChunkKeys
from nixl_offload.chunk.checksum import block_checksum
from nixl_offload.chunk.header import CHECKSUMS_AT, HEADER_BYTES, OWN_CHECKSUM_AT

NAMESPACE, GROUP, BLOCKS, FIRST, BLOCK_BYTES, CREATED, KEY = 16, 48, 52, 54, 56, 72, 80
"""Offsets of fields in a header page, of docs/format.md."""
PAGE: Final = 4096
PROMISED_BYTES: Final = 2 << 30
"""The bytes that a forged header claims. A machine has this much memory, so allocating it would work, and show."""


@dataclass(frozen=True, slots=True)
class Loot:
    """The attacker's material: whole shards, as they were stored."""

    target: bytes
    """The shard to be forged: of one key, number and namespace."""
    other_key: bytes
    other_namespace: bytes
    other_shard: bytes
    """Shards of the same size, stored by servers with the key."""
    retired: bytes
    """The target, signed by a key that is no longer in the file."""
    unsigned: bytes
    """The target, stored by a server without ``authenticate``."""
    attackers_key: bytes
    random: random.Random


Attack = Callable[[Loot], bytes]


def sealed(image: bytearray) -> bytes:
    """Make every checksum right."""
    blocks, first, block_bytes = struct.unpack_from("<HHQ", image, BLOCKS)
    for block in range(first, blocks):
        begin = HEADER_BYTES + block * block_bytes
        struct.pack_into("<Q", image, CHECKSUMS_AT + 8 * block, block_checksum(memoryview(image)[begin:][:block_bytes]))
    struct.pack_into("<Q", image, OWN_CHECKSUM_AT, block_checksum(memoryview(image)[:OWN_CHECKSUM_AT]))
    return bytes(image)


def _forged(loot: Loot) -> bytearray:
    """The target with another payload."""
    image = bytearray(loot.target)
    image[HEADER_BYTES:] = loot.random.randbytes(len(image) - HEADER_BYTES)
    return image


def _retagged(loot: Loot, donor: bytes) -> bytearray:
    """Another shard with the target's identity."""
    image = bytearray(donor)
    image[NAMESPACE:FIRST] = loot.target[NAMESPACE:FIRST]
    image[KEY:MAC_AT] = loot.target[KEY:MAC_AT]
    return image


def _signed(loot: Loot, image: bytearray) -> bytes:
    """Sign with the attacker's key."""
    page = np.frombuffer(sealed(image), dtype=np.uint8)
    blocks, first, block_bytes = struct.unpack_from("<HHQ", image, BLOCKS)
    end = HEADER_BYTES + blocks * block_bytes
    rows = page[HEADER_BYTES + first * block_bytes : end].reshape(-1, block_bytes)
    return ChunkKeys([loot.attackers_key]).signed(page[:HEADER_BYTES], rows).tobytes() + bytes(image[HEADER_BYTES:])


def promising(image: bytes) -> bytes:
    """Return a shard whose header claims ``PROMISED_BYTES`` of blocks, with a correct checksum of its own."""
    made = bytearray(image)
    (blocks,) = struct.unpack_from("<H", made, BLOCKS)
    struct.pack_into("<QQ", made, BLOCK_BYTES, PROMISED_BYTES // blocks, PROMISED_BYTES // blocks * blocks)
    return _own_sum(made)


def _changed(image: bytes, at: int, put: bytes) -> bytearray:
    """Return the image with other bytes at a place."""
    return bytearray(image[:at] + put + image[at + len(put) :])


def _own_sum(image: bytearray) -> bytes:
    """Make the header's own checksum right, and no other."""
    struct.pack_into("<Q", image, OWN_CHECKSUM_AT, block_checksum(memoryview(image)[:OWN_CHECKSUM_AT]))
    return bytes(image)


def _own_key(loot: Loot) -> bytearray:
    """Another payload, signed by the attacker."""
    return bytearray(_signed(loot, _forged(loot)))


def _known_id(loot: Loot, image: bytes) -> bytes:
    """The image under the id of a key that servers know."""
    return sealed(_changed(image, KEY_ID_AT, loot.target[KEY_ID_AT:CHECKSUMS_AT]))


def _one_bit(loot: Loot) -> bytes:
    image = bytearray(loot.target)
    blocks, first, block_bytes = struct.unpack_from("<HHQ", image, BLOCKS)
    at = loot.random.randrange(HEADER_BYTES + first * block_bytes, HEADER_BYTES + blocks * block_bytes)
    image[at] ^= 1 << loot.random.randrange(8)
    return sealed(image)


def _permuted(loot: Loot) -> bytes:
    blocks, first, block_bytes = struct.unpack_from("<HHQ", loot.target, BLOCKS)
    low, high = HEADER_BYTES + first * block_bytes, HEADER_BYTES + (blocks - 1) * block_bytes
    image = _changed(loot.target, low, loot.target[high : high + block_bytes])
    return sealed(_changed(bytes(image), high, loot.target[low : low + block_bytes]))


def _fields_changed(loot: Loot) -> bytes:
    image = bytearray(loot.target)
    for at in loot.random.sample(range(8, OWN_CHECKSUM_AT), 3):
        image[at] ^= loot.random.randrange(1, 256)
    return _own_sum(image)


def _first_block_given_up(loot: Loot) -> bytes:
    image = bytearray(loot.target)
    (first,) = struct.unpack_from("<H", image, FIRST)
    struct.pack_into("<H", image, FIRST, first + 1)
    struct.pack_into("<Q", image, CHECKSUMS_AT + 8 * first, 0)
    return sealed(image)


_NO_MAC: Final = bytes(CHECKSUMS_AT - MAC_AT)
FORGERIES: Final[dict[str, Attack]] = {
    "another payload, all checksums right": lambda loot: sealed(_forged(loot)),
    "one bit of the payload flipped, all checksums right": _one_bit,
    "another payload without a MAC": lambda loot: sealed(_changed(bytes(_forged(loot)), MAC_AT, _NO_MAC)),
    "another payload, signed by the attacker": lambda loot: bytes(_own_key(loot)),
    "the same under a known key's id": lambda loot: _known_id(loot, _own_key(loot)),
    "another payload, signed by the key of zeros": lambda loot: bytes(_own_key(replace(loot, attackers_key=bytes(32)))),
    "another payload with another chunk's MAC": lambda loot: sealed(
        _changed(bytes(_forged(loot)), MAC_AT, loot.other_key[MAC_AT:CHECKSUMS_AT])
    ),
    "another chunk's payload": lambda loot: sealed(
        bytearray(loot.target[:HEADER_BYTES] + loot.other_key[HEADER_BYTES:])
    ),
    "another chunk that says it is this one": lambda loot: sealed(_retagged(loot, loot.other_key)),
    "another namespace's that says it is this one's": lambda loot: sealed(_retagged(loot, loot.other_namespace)),
    "another rank's that says it is this one's": lambda loot: sealed(_retagged(loot, loot.other_shard)),
    "two blocks changed places, with their checksums": _permuted,
}
"""Attacks that fool a server without ``authenticate``: it takes other bytes for the chunk."""
REFUSED: Final[dict[str, Attack]] = {
    **FORGERIES,
    "the right payload without a MAC": lambda loot: loot.unsigned,
    "another chunk's header, retagged": lambda loot: sealed(
        bytearray(bytes(_retagged(loot, loot.other_key)[:HEADER_BYTES]) + loot.target[HEADER_BYTES:])
    ),
    "another chunk": lambda loot: loot.other_key,
    "another namespace's chunk": lambda loot: loot.other_namespace,
    "another rank's shard": lambda loot: loot.other_shard,
    "another time in the header": lambda loot: sealed(_changed(loot.target, CREATED, struct.pack("<Q", 1))),
    "bytes of the header changed": _fields_changed,
    "the first block said not to be stored": _first_block_given_up,
    "a header that promises more than all memory": lambda loot: _own_sum(
        _changed(loot.target, BLOCKS, struct.pack("<HHQQ", 487, 0, 1 << 54, 487 << 54))
    ),
    "a header that promises 2 GiB": lambda loot: promising(loot.target),
    "signed by a key that was retired": lambda loot: loot.retired,
    "the same under a trusted key's id": lambda loot: _known_id(loot, loot.retired),
    **{
        f"cut at {at}": lambda loot, at=at: loot.target[:at]  # type: ignore[misc]
        for at in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, -PAGE, -1)
    },
}
"""Those of which no byte is used."""
