"""From what somebody typed to the shards that it names: the beginning of a key, a file, an object, a slot of a slab.

Threading: one thread.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from nixl_offload.cli.inventory.base import Chunk, Held, Inventory, Shard
from nixl_offload.cli.inventory.shared import SharedInventory
from nixl_offload.cli.inventory.slab import SlabInventory
from nixl_offload.errors import ConfigError
from nixl_offload.tiers.shared.naming import ShardName, parse_shard_name

_DIGITS: Final = re.compile(r"[0-9a-f]{4,128}")
_SLOT: Final = re.compile(r"(.+\.slab)@([0-9]{1,18})")
_SHARD: Final = re.compile(r"(?:.*/)?([0-9a-f]{32}/[0-9a-f]{2}/[0-9a-f]+\.[0-9a-f]{4})")
_LIMIT: Final = 64
"""Of keys that begin alike."""


class Found(NamedTuple):
    """A shard, and whose."""

    inventory: Inventory
    held: Held
    chunk: Chunk
    shard: Shard


def find(inventories: Sequence[Inventory], text: str, namespace: str | None) -> list[Found]:
    """Return the shards that ``text`` names. Raises ConfigError where it cannot name any."""
    slot = _SLOT.fullmatch(text)
    if slot is not None:
        return _at_slot(inventories, os.path.abspath(slot[1]), int(slot[2]))
    named = _SHARD.fullmatch(text)
    name = parse_shard_name(named[1]) if named else None
    if name is not None:
        return _by_name(inventories, text, name)
    digits = text.lower().removeprefix("0x")
    if not _DIGITS.fullmatch(digits):
        raise ConfigError(
            "KEY: allowed: a key in hex or its beginning (four digits at least), the path of a file of a tree, "
            "an object's name, or PATH.slab@OFFSET"
        )
    found = []
    for inventory in inventories:
        for held in inventory.namespaces():
            if namespace in (None, held.name):
                for chunk in inventory.find(held, digits, _LIMIT):
                    found += [Found(inventory, held, chunk, shard) for shard in chunk.shards]
    return found


def _by_name(inventories: Sequence[Inventory], text: str, name: ShardName) -> list[Found]:
    """Find the one shard. An absolute path is looked for where it leads, a name in every tree and bucket."""
    found = []
    for inventory in inventories:
        if not isinstance(inventory, SharedInventory):
            continue
        if text.startswith("/") and not os.path.abspath(text).startswith(f"{inventory.where}/"):
            continue
        for held in inventory.namespaces():
            if held.name == name.namespace:
                for chunk in inventory.find(held, name.key.hex(), _LIMIT):
                    shards = [shard for shard in chunk.shards if shard.rank == name.rank and chunk.key == name.key]
                    found += [Found(inventory, held, chunk, shard) for shard in shards]
    return found


def _at_slot(inventories: Sequence[Inventory], path: str, offset: int) -> list[Found]:
    for inventory in inventories:
        if isinstance(inventory, SlabInventory):
            at = inventory.at(path, offset)
            if at is not None:
                held, chunk = at
                return [Found(inventory, held, chunk, s) for s in chunk.shards if s.place == f"{path}@{offset}"]
    return []
