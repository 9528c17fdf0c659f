"""What ``nixl-offload warm`` copies: one namespace of a shared tier, and its chunks, the newest first.

Threading: one thread. Memory: some 200 bytes for each chunk that the target could hold.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from nixl_offload.chunk.header import MAX_KEY_BYTES
from nixl_offload.cli.terminal import Progress, plural
from nixl_offload.errors import ConfigError, NamespaceError
from nixl_offload.identity.namespace import Namespace, fields_of, make_namespace, manifest_digest
from nixl_offload.tiers.inspect import Inspector, NamespaceInfo, printable
from nixl_offload.types import PAGE_BYTES, Key, key_group
from nixl_offload.units import format_size

MAX_SHARD_BYTES: Final = 5 << 30
"""What one PUT of S3 takes. A shard is held in memory until it is verified, and a manifest may say anything."""


class WholeChunk(NamedTuple):
    """A chunk to copy."""

    key: Key
    sizes: tuple[int, ...]
    """By rank: bytes of its shard; 0: the rank has none."""

    @property
    def holders(self) -> Sequence[int]:
        """The ranks that have a shard of it."""
        return [rank for rank, size in enumerate(self.sizes) if size]

    @property
    def total_bytes(self) -> int:
        """Of all its shards."""
        return sum(self.sizes)

    @property
    def slot_bytes(self) -> int:
        """What it takes in each rank's slab: room for the largest shard."""
        return max(self.sizes)


def choose_namespace(source: Inspector, wanted: str | None, held: set[str]) -> tuple[NamespaceInfo, Namespace]:
    """Return the namespace ``wanted``, or the only one, or the only one that the target holds too (``held``).

    Raises ConfigError (which one? or none that can be verified), StoreError.
    """
    found = [namespace for namespace in source.namespaces() if wanted in (None, namespace.name)]
    if not found:
        raise ConfigError(f"{source.where}: holds no namespace{f' {wanted}' if wanted else ''}: nothing to copy")
    if len(found) > 1:
        both = [namespace for namespace in found if namespace.name in held]
        if len(both) != 1:
            lines = "".join(f"\n    {namespace.name}  {namespace.owner}" for namespace in found)
            raise ConfigError(f"{source.where}: holds several namespaces; say --namespace:{lines}")
        found = both
    if found[0].manifest is None:
        raise ConfigError(
            f"{source.where}: namespace {found[0].name} has no manifest that fits it, so its chunks cannot be "
            "verified; a server of that model writes it when it starts"
        )
    return found[0], _namespace_of(found[0].name, found[0].manifest)


def _namespace_of(name: str, manifest: Mapping[str, Any]) -> Namespace:
    """Return the namespace that a manifest describes, which fits its digest but may be forged.

    Raises ConfigError for one of another version of this package, and for one that cannot be true.
    """
    plain = manifest["fields"]
    other_version = f"namespace {name} was written by another version of nixl-offload; only that version can copy it"
    try:
        namespace = make_namespace(fields_of(plain))
    except (TypeError, KeyError) as error:
        raise ConfigError(other_version) from error
    except NamespaceError as error:
        raise ConfigError(f"the manifest of namespace {name} cannot be true: {printable(str(error), 300)}") from error
    if namespace.digest != manifest_digest(manifest):
        raise ConfigError(other_version)
    for size in sorted({size for group in namespace.fields.groups for size in group.slot_bytes if size}):
        if size % PAGE_BYTES or not 2 * PAGE_BYTES <= size <= MAX_SHARD_BYTES:
            raise ConfigError(
                f"the manifest of namespace {name} cannot be true: a shard is a header page and whole pages behind it, "
                f"{format_size(MAX_SHARD_BYTES)} at most, and it says {size} bytes; nothing is copied"
            )
    return namespace


def newest_first(
    source: Inspector, info: NamespaceInfo, namespace: Namespace, max_bytes: int, ttl_s: float | None, show: Progress
) -> tuple[list[WholeChunk], dict[str, int]]:
    """List the namespace and return its youngest chunks, as many as ``max_bytes`` hold, and how many were left out.

    ``incomplete``: the source lacks a shard, or has one of another length, so no server could load the chunk either.
    ``expired``: older than the tier's ttl. ``surplus``: older than what fills the target. Raises StoreError.
    """
    sizes = {group.group_id: group.slot_bytes for group in namespace.fields.groups}
    left_out = {"incomplete": 0, "expired": 0, "surplus": 0}
    youngest: list[tuple[float, WholeChunk]] = []
    total_bytes = 0
    oldest_s = -1.0 if ttl_s is None else time.time() - ttl_s
    for number, listed in enumerate(source.chunks(info), 1):
        show(f"{plural(number, 'chunk')} listed so far")
        chunk = WholeChunk(listed.key, sizes.get(key_group(listed.key), ()))
        # Servers ignore shards of ranks that can have none.
        shards = [shard for shard in listed.shards if any(chunk.sizes[shard.rank : shard.rank + 1])]
        there = [(shard.rank, shard.size_bytes) for shard in shards]
        whole = bool(there) and there == [(rank, chunk.sizes[rank]) for rank in chunk.holders]
        if not whole or len(chunk.key) > MAX_KEY_BYTES:
            left_out["incomplete"] += 1
        elif (modified_s := max(shard.modified_s or 0.0 for shard in shards)) < oldest_s:
            left_out["expired"] += 1
        else:
            heapq.heappush(youngest, (modified_s, chunk))
            total_bytes += chunk.total_bytes
            while total_bytes > max_bytes:
                total_bytes -= heapq.heappop(youngest)[1].total_bytes
                left_out["surplus"] += 1
    return [chunk for _, chunk in sorted(youngest, reverse=True)], left_out
