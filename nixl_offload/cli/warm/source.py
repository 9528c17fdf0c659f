"""What ``nixl-offload warm`` copies: one namespace of a bucket or a shared directory, and the chunks of it, in order.

Threading: one thread; the store is the caller's. Memory: some 200 bytes for each chunk that the target could hold.
"""

from __future__ import annotations

import heapq
import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nixl_offload.chunk.header import MAX_KEY_BYTES
from nixl_offload.cli.gc.collect import list_namespaces, model_words, read_manifest, shown
from nixl_offload.errors import ConfigError, NamespaceError
from nixl_offload.identity.namespace import (
    GroupFields,
    Namespace,
    NamespaceFields,
    make_namespace,
    manifest_digest,
)
from nixl_offload.stores.base import ObjectInfo, Store
from nixl_offload.tiers.shared.naming import parse_shard_name
from nixl_offload.tiers.shared.sweep import chunks_of
from nixl_offload.types import PAGE_BYTES, Key, key_group
from nixl_offload.units import format_size

MAX_SHARD_BYTES = 5 << 30
"""What one PUT of S3 takes. A shard is held in memory until it is verified, and a manifest may say anything."""
_LISTED_EACH = 500


class Candidate(NamedTuple):
    """A chunk that may be copied."""

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


@dataclass(slots=True)
class Selection:
    """The chunks to copy, best first, and what was left out."""

    candidates: list[Candidate]
    incomplete: int = 0
    """Chunks of which the source lacks a shard, or has one of another length: no server could load them either."""
    expired: int = 0
    """Older than the tier's ttl: they count as absent."""
    surplus: int = 0
    """Older than what fills the target's capacity by itself."""
    unknown: int = 0
    """Keys that belong to no KV group of the namespace."""


def choose_namespace(store: Store, wanted: str | None, held: Collection[str]) -> Namespace:
    """Return the namespace to copy: the one ``wanted``, or the only one, or the only one that the target holds too.

    ``held``: names in the target. Raises ConfigError (which one? or none that can be verified), StoreError.
    """
    names = [wanted] if wanted is not None else list(list_namespaces(store, _ignore))
    if not names:
        raise ConfigError(f"{store.where}: holds no namespace, so there is nothing to copy")
    if len(names) > 1:
        both = [name for name in names if name in held]
        if len(both) != 1:
            lines = "".join(f"\n    {_described(store, name)}" for name in names)
            raise ConfigError(f"{store.where}: holds several namespaces; say --namespace:{lines}")
        names = both
    manifest = read_manifest(store, names[0])
    if manifest is None:
        raise ConfigError(
            f"{store.where}: namespace {names[0]} has no manifest that fits it, so its chunks cannot be verified; "
            "a server of that model writes it when it starts"
        )
    return namespace_of(manifest)


def namespace_of(manifest: Mapping[str, Any]) -> Namespace:
    """Return the namespace that a manifest describes, which fits its digest but may be forged.

    Raises ConfigError for one of another version of this package, and for one that cannot be true.
    """
    plain, digest = manifest["fields"], manifest_digest(manifest)
    name = digest.hex()[:32] if digest else "?"
    other_version = f"namespace {name} was written by another version of nixl-offload; only that version can copy it"
    try:
        groups = tuple(GroupFields(**{**group, "slot_bytes": tuple(group["slot_bytes"])}) for group in plain["groups"])
        namespace = make_namespace(NamespaceFields(**{**plain, "groups": groups, "ranks": tuple(plain["ranks"])}))
    except (TypeError, KeyError) as error:
        raise ConfigError(other_version) from error
    except NamespaceError as error:
        raise ConfigError(f"the manifest of namespace {name} cannot be true: {shown(str(error), 300)}") from error
    if namespace.digest != digest:
        raise ConfigError(other_version)
    all_sizes = {size for sizes in shard_sizes(namespace).values() for size in sizes if size}
    if any(size % PAGE_BYTES or size < 2 * PAGE_BYTES for size in all_sizes):
        raise ConfigError(
            f"the manifest of namespace {name} cannot be true: a shard is a header page and whole pages behind it"
        )
    largest = max(all_sizes)
    if largest > MAX_SHARD_BYTES:
        raise ConfigError(
            f"the manifest of namespace {namespace.name} says that a shard has {largest} bytes; more than"
            f" {format_size(MAX_SHARD_BYTES)} is not believed, and nothing is copied"
        )
    return namespace


def newest_first(
    store: Store,
    namespace: Namespace,
    *,
    max_bytes: int,
    ttl_s: float | None,
    report: Callable[[str, int], None],
) -> Selection:
    """List the namespace and return its youngest chunks, as many as ``max_bytes`` hold. Raises StoreError."""
    sizes = shard_sizes(namespace)
    selection = Selection([])
    youngest: list[tuple[float, Candidate]] = []
    total_bytes = 0
    oldest_s = -1.0 if ttl_s is None else time.time() - ttl_s
    for chunk in chunks_of(_own(_counted(store.list(f"{namespace.name}/"), report), sizes)):
        parts = [parse_shard_name(name) for name in chunk.names]
        key = parts[0].key if parts[0] is not None else Key(b"")
        candidate = Candidate(key, sizes.get(key_group(key), ()))
        here = [part.rank for part in parts if part is not None]
        complete = here == candidate.holders and chunk.size_bytes == candidate.total_bytes
        if not complete or not here or len(key) > MAX_KEY_BYTES:
            selection.incomplete += 1
        elif chunk.modified_s < oldest_s:
            selection.expired += 1
        else:
            heapq.heappush(youngest, (chunk.modified_s, candidate))
            total_bytes += candidate.total_bytes
            while total_bytes > max_bytes:
                total_bytes -= heapq.heappop(youngest)[1].total_bytes
                selection.surplus += 1
    selection.candidates = [candidate for _, candidate in sorted(youngest, reverse=True)]
    return selection


def listed_keys(file: str, namespace: Namespace) -> Selection:
    """Read keys in hex, one per line, from a file or (``-``) standard input, and return them in their order.

    What ``ls --keys`` prints is such a list: what follows a key on its line is not looked at. So are lines of its JSON,
    of which those of other namespaces are passed over. Raises ConfigError for a line that is neither.
    """
    try:
        if file == "-":
            lines = sys.stdin.readlines()
        else:
            with open(file, encoding="ascii") as opened:
                lines = opened.readlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no plain text"
        raise ConfigError(f"--keys: {file}: cannot be read: {why}") from error
    sizes, selection = shard_sizes(namespace), Selection([])
    keys: dict[Key, None] = {}
    for number, line in enumerate(lines, 1):
        text = (line.split() or [""])[0]
        if not text or text.startswith("#"):
            continue
        try:
            if text.startswith("{"):
                told = json.loads(line)
                if told["namespace"].rpartition("/")[2] != namespace.name:
                    continue
                text = told["key"]
            key = Key(bytes.fromhex(text))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            key = Key(b"")
        if not 4 < len(key) <= MAX_KEY_BYTES:
            raise ConfigError(f"--keys: {file}, line {number}: {shown(text)!r} is not a key; allowed: its hex digits")
        keys[key] = None
    for key in keys:
        of_ranks = sizes.get(key_group(key))
        if of_ranks is None:
            selection.unknown += 1
        else:
            selection.candidates.append(Candidate(key, of_ranks))
    return selection


def shard_sizes(namespace: Namespace) -> dict[int, tuple[int, ...]]:
    """Return by KV group how large the shards of each rank are."""
    return {group.group_id: group.slot_bytes for group in namespace.fields.groups}


def _counted(listing: Iterable[ObjectInfo], report: Callable[[str, int], None]) -> Iterator[ObjectInfo]:
    for number, info in enumerate(listing, 1):
        if not number % _LISTED_EACH:
            report("listed", number)
        yield info


def _own(listing: Iterable[ObjectInfo], sizes: Mapping[int, Sequence[int]]) -> Iterator[ObjectInfo]:
    """Leave out shards of ranks that can have none: no server looks at them."""
    for info in listing:
        part = parse_shard_name(info.name)
        of_ranks = sizes.get(key_group(part.key)) if part is not None else None
        if part is None or of_ranks is None or any(of_ranks[part.rank : part.rank + 1]):
            yield info


def _described(store: Store, name: str) -> str:
    plain = (read_manifest(store, name) or {}).get("fields", {})
    return f"{name}  tenant {shown(plain.get('tenant')) or '-'}, model {model_words(plain) or '-'}"


def _ignore(info: ObjectInfo) -> None:
    """What lies beside namespaces is nobody's concern here."""
