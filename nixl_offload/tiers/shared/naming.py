"""What shards are called in a bucket or a shared directory, and back.

Threading: pure functions. Names are made of digests in hex and numbers alone: nothing that a user typed gets in.

    <namespace>/manifest.json        what the namespace is, for people
    <namespace>/<xx>/<key>.<rank>    one shard; xx are the first two digits of the key, 256 ways of spreading

``namespace`` is ``Namespace.name``, ``key`` the hex of vLLM's key (a block hash and the group), ``rank`` four hex
digits: the rank, or the number of the shard where chunks are cut by their heads (``chunk.shards``); "rank" stands for
either here. So a plain listing gives the keys back, in order, with all ranks of a key side by side.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from nixl_offload.identity.namespace import Namespace
from nixl_offload.types import Key, key_group

MANIFEST: Final = "manifest.json"
_NAMESPACE: Final = r"[0-9a-f]{32}"
_SHARD: Final = re.compile(rf"({_NAMESPACE})/([0-9a-f]{{2}})/((?:[0-9a-f]{{2}})+)\.([0-9a-f]{{4}})")


class ShardName(NamedTuple):
    """A shard's name, taken apart."""

    namespace: str
    key: Key
    rank: int


class StoredShard(NamedTuple):
    """A shard as it lies in a bucket or a shared directory; one of another size is damaged."""

    name: str
    size_bytes: int


def shard_name(namespace: str, key: Key, rank: int) -> str:
    """Return the name of the shard that ``rank`` holds of ``key``."""
    digits = key.hex()
    return f"{namespace}/{digits[:2]}/{digits}.{rank:04x}"


def parse_shard_name(name: str) -> ShardName | None:
    """Take a name apart; None when it is not one that ``shard_name`` makes."""
    match = _SHARD.fullmatch(name)
    if match is None or not match[3].startswith(match[2]):
        return None
    return ShardName(match[1], Key(bytes.fromhex(match[3])), int(match[4], 16))


def manifest_name(namespace: str) -> str:
    """Return the name of a namespace's manifest."""
    return f"{namespace}/{MANIFEST}"


def parse_manifest_name(name: str) -> str | None:
    """Return the namespace whose manifest ``name`` is, else None."""
    namespace, _, rest = name.partition("/")
    return namespace if rest == MANIFEST and re.fullmatch(_NAMESPACE, namespace) else None


def is_ours(name: str) -> bool:
    """Whether ``name`` is one of a shard or a manifest."""
    return parse_shard_name(name) is not None or parse_manifest_name(name) is not None


def witness_rank(key: Key, holders: Sequence[int]) -> int:
    """Return the rank whose shard stands for the whole chunk when somebody asks whether the chunk exists.

    ``holders``: the ranks that hold a shard (``Namespace.holders``). One question instead of one per rank. Where
    another rank's shard is missing the load fails, and the chunk is computed and stored anew.
    """
    return holders[int.from_bytes(key[:4], "big") % len(holders)]


def shards_of(namespace: Namespace, key: Key) -> tuple[StoredShard, ...]:
    """Return all shards of a whole chunk, the one that stands for it first; none for a KV group that there is not."""
    group = key_group(key)
    try:
        holders = namespace.holders(group)
    except LookupError:
        return ()
    witness = holders and witness_rank(key, holders)
    return tuple(
        StoredShard(shard_name(namespace.name, key, rank), namespace.shard_bytes(group, rank))
        for rank in sorted(holders, key=lambda rank: rank != witness)
    )
