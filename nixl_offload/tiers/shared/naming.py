"""The names of shards in a bucket or a shared directory, and how to parse them.

Threading: pure functions. Names consist of hex digests and numbers alone, never of text from a user.

    <namespace>/manifest.json        describes the namespace, for people
    <namespace>/<xx>/<key>.<shard>   one shard; xx are the first two digits of the key (256 directories)

``namespace`` is ``Namespace.name``. ``key`` is vLLM's key (a block hash and the group) in hex. ``shard`` is the number
of the shard (``chunk.shards``) as four hex digits. A plain listing thus gives the keys in order, with all shards of a
key side by side.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from nixl_offload.identity.namespace import Namespace
from nixl_offload.types import Key, key_group

MANIFEST: Final = "manifest.json"
_NAMESPACE: Final = r"[0-9a-f]{32}"
_SHARD: Final = re.compile(rf"({_NAMESPACE})/([0-9a-f]{{2}})/((?:[0-9a-f]{{2}})+)\.([0-9a-f]{{4}})")


class ShardName(NamedTuple):
    """A parsed shard name."""

    namespace: str
    key: Key
    shard: int


def shard_name(namespace: str, key: Key, shard: int) -> str:
    """Return the name of a shard of ``key``."""
    digits = key.hex()
    return f"{namespace}/{digits[:2]}/{digits}.{shard:04x}"


def parse_shard_name(name: str) -> ShardName | None:
    """Parse a shard's name; None if ``shard_name`` does not make such names."""
    match = _SHARD.fullmatch(name)
    if match is None or not match[3].startswith(match[2]):
        return None
    return ShardName(match[1], Key(bytes.fromhex(match[3])), int(match[4], 16))


def manifest_name(namespace: str) -> str:
    """Return the name of a namespace's manifest."""
    return f"{namespace}/{MANIFEST}"


def parse_manifest_name(name: str) -> str | None:
    """Return the namespace if ``name`` is that of a manifest, else None."""
    namespace, _, rest = name.partition("/")
    return namespace if rest == MANIFEST and re.fullmatch(_NAMESPACE, namespace) else None


def is_ours(name: str) -> bool:
    """Whether ``name`` is that of a shard or a manifest."""
    return parse_shard_name(name) is not None or parse_manifest_name(name) is not None


def witness_shard(namespace: Namespace, key: Key) -> tuple[str, int] | None:
    """Return name and bytes of the shard that is looked for to learn whether a chunk exists; None if there is no such
    KV group. A shard of another size is damaged.

    It is one question, not one for each shard. If another shard is missing, the load fails, and the chunk is computed
    and stored again.
    """
    group = key_group(key)
    try:
        shards = namespace.shards(group)
    except LookupError:
        return None
    shard = shards[int.from_bytes(key[:4], "big") % len(shards)]
    return shard_name(namespace.name, key, shard), namespace.shard_bytes(group, shard)
