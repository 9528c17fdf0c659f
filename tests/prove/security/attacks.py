"""What somebody who can write to a bucket or a shared directory, and lacks the key, can make of what is stored there.

They read all that is stored, know the format, and compute every checksum. An attack is a function of what they have.
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
from tests.prove.security.memory import PROMISED_BYTES

NAMESPACE, GROUP, BLOCKS, FIRST, BLOCK_BYTES, CREATED, KEY = 16, 48, 52, 54, 56, 72, 80
"""Offsets of fields in a header page, of docs/format.md."""
PAGE: Final = 4096


@dataclass(frozen=True, slots=True)
class Loot:
    """What the attacker has: whole shards, as they were stored."""

    target: bytes
    """The shard to be forged: of one key, rank and namespace."""
    other_key: bytes
    other_namespace: bytes
    other_rank: bytes
    """Of the same size, all of them stored by servers with the key."""
    retired: bytes
    """The target's, signed by a key that is not in the file any more."""
    unsigned: bytes
    """The target's, by a server without ``authenticate``."""
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
    """Return a shard whose header says that its blocks have ``PROMISED_BYTES``, its own checksum right."""
    made = bytearray(image)
    (blocks,) = struct.unpack_from("<H", made, BLOCKS)
    struct.pack_into("<QQ", made, BLOCK_BYTES, PROMISED_BYTES // blocks, PROMISED_BYTES // blocks * blocks)
    struct.pack_into("<Q", made, OWN_CHECKSUM_AT, block_checksum(memoryview(made)[:OWN_CHECKSUM_AT]))
    return bytes(made)


def payload(loot: Loot) -> bytes:
    """Another payload, all checksums right, the MAC left."""
    return sealed(_forged(loot))


def one_bit(loot: Loot) -> bytes:
    """One bit of the payload flipped, all checksums right."""
    image = bytearray(loot.target)
    blocks, first, block_bytes = struct.unpack_from("<HHQ", image, BLOCKS)
    at = loot.random.randrange(HEADER_BYTES + first * block_bytes, HEADER_BYTES + blocks * block_bytes)
    image[at] ^= 1 << loot.random.randrange(8)
    return sealed(image)


def downgrade(loot: Loot) -> bytes:
    """Another payload, without a MAC."""
    image = _forged(loot)
    image[MAC_AT:CHECKSUMS_AT] = bytes(CHECKSUMS_AT - MAC_AT)
    return sealed(image)


def unsigned(loot: Loot) -> bytes:
    """The right payload from a server without ``authenticate``."""
    return loot.unsigned


def own_key(loot: Loot) -> bytes:
    """Another payload, signed by the attacker."""
    return _signed(loot, _forged(loot))


def own_key_by_a_known_id(loot: Loot) -> bytes:
    """Likewise, under the id of a key that servers know."""
    image = bytearray(_signed(loot, _forged(loot)))
    image[KEY_ID_AT:CHECKSUMS_AT] = loot.target[KEY_ID_AT:CHECKSUMS_AT]
    return sealed(image)


def zero_key(loot: Loot) -> bytes:
    """Likewise, signed by the key of zeros."""
    return _signed(replace(loot, attackers_key=bytes(32)), _forged(loot))


def mac_of_another(loot: Loot) -> bytes:
    """Another payload, with the MAC of another chunk."""
    image = _forged(loot)
    image[MAC_AT:CHECKSUMS_AT] = loot.other_key[MAC_AT:CHECKSUMS_AT]
    return sealed(image)


def header_of_another(loot: Loot) -> bytes:
    """The payload behind the header of another chunk, that says it is this one."""
    return sealed(bytearray(bytes(_retagged(loot, loot.other_key)[:HEADER_BYTES]) + loot.target[HEADER_BYTES:]))


def payload_of_another(loot: Loot) -> bytes:
    """The payload of another chunk behind the header."""
    return sealed(bytearray(loot.target[:HEADER_BYTES] + loot.other_key[HEADER_BYTES:]))


def another_key(loot: Loot) -> bytes:
    """Another chunk as it is."""
    return loot.other_key


def another_key_retagged(loot: Loot) -> bytes:
    """Another chunk that says it is this one."""
    return sealed(_retagged(loot, loot.other_key))


def another_namespace(loot: Loot) -> bytes:
    """The chunk of another namespace, which has the same key."""
    return loot.other_namespace


def another_namespace_retagged(loot: Loot) -> bytes:
    """Likewise, and it says that it is of this one."""
    return sealed(_retagged(loot, loot.other_namespace))


def another_rank(loot: Loot) -> bytes:
    """Another rank's shard of the chunk."""
    return loot.other_rank


def another_rank_retagged(loot: Loot) -> bytes:
    """Likewise, and it says that it is this rank's."""
    return sealed(_retagged(loot, loot.other_rank))


def blocks_permuted(loot: Loot) -> bytes:
    """The first and the last block changed places, with their checksums."""
    image = bytearray(loot.target)
    blocks, first, block_bytes = struct.unpack_from("<HHQ", image, BLOCKS)
    low, high = HEADER_BYTES + first * block_bytes, HEADER_BYTES + (blocks - 1) * block_bytes
    image[low : low + block_bytes], image[high : high + block_bytes] = (
        loot.target[high : high + block_bytes],
        loot.target[low : low + block_bytes],
    )
    return sealed(image)


def time_changed(loot: Loot) -> bytes:
    """The header says another time; no harm, but it shows that every field counts."""
    image = bytearray(loot.target)
    struct.pack_into("<Q", image, CREATED, 1)
    return sealed(image)


def fields_changed(loot: Loot) -> bytes:
    """Some bytes of the header changed, its checksum right."""
    image = bytearray(loot.target)
    for at in loot.random.sample(range(8, OWN_CHECKSUM_AT), 3):
        image[at] ^= loot.random.randrange(1, 256)
    struct.pack_into("<Q", image, OWN_CHECKSUM_AT, block_checksum(memoryview(image)[:OWN_CHECKSUM_AT]))
    return bytes(image)


def first_block_given_up(loot: Loot) -> bytes:
    """The header says that the first block that is there was never stored."""
    image = bytearray(loot.target)
    (first,) = struct.unpack_from("<H", image, FIRST)
    struct.pack_into("<H", image, FIRST, first + 1)
    struct.pack_into("<Q", image, CHECKSUMS_AT + 8 * first, 0)
    return sealed(image)


def giant(loot: Loot) -> bytes:
    """The header promises more than there is memory in the world."""
    image = bytearray(loot.target)
    struct.pack_into("<HHQQ", image, BLOCKS, 487, 0, 1 << 54, 487 << 54)
    struct.pack_into("<Q", image, OWN_CHECKSUM_AT, block_checksum(memoryview(image)[:OWN_CHECKSUM_AT]))
    return bytes(image)


def large(loot: Loot) -> bytes:
    """The header promises more than was stored, but not more than there is memory for. See ``promising``."""
    return promising(loot.target)


def retired(loot: Loot) -> bytes:
    """The right payload, signed by a key that servers trust no more."""
    return loot.retired


def retired_by_a_known_id(loot: Loot) -> bytes:
    """Likewise, under the id of one that they trust."""
    image = bytearray(loot.retired)
    image[KEY_ID_AT:CHECKSUMS_AT] = loot.target[KEY_ID_AT:CHECKSUMS_AT]
    return sealed(image)


def cut(loot: Loot) -> bytes:
    """The file ends early."""
    return loot.target[: loot.random.choice([0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, -PAGE, -1])]


def longer(loot: Loot) -> bytes:
    """Something is behind it."""
    return loot.target + loot.random.randbytes(PAGE)


FORGERIES: Final[tuple[Attack, ...]] = (
    payload, one_bit, downgrade, own_key, own_key_by_a_known_id, zero_key, mac_of_another, payload_of_another,
    another_key_retagged, another_namespace_retagged, another_rank_retagged, blocks_permuted,
)  # fmt: skip
"""Those that a server without ``authenticate`` takes for what it asked for, and that have other bytes."""
REFUSED: Final[tuple[Attack, ...]] = (
    *FORGERIES, unsigned, header_of_another, another_key, another_namespace, another_rank, time_changed,
    fields_changed, first_block_given_up, giant, large, retired, retired_by_a_known_id, cut,
)  # fmt: skip
"""Those of which no byte is used. ``longer`` is refused where the length of a file is looked at."""
