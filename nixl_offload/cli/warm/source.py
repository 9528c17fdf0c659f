"""What ``nixl-offload warm`` copies: one namespace of a bucket or a shared directory, and the chunks of it, in order.

Threading: one thread; the store is the caller's. Memory: some 200 bytes for each chunk that the target could hold.
"""

from __future__ import annotations

import heapq
import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from nixl_offload.cli.gc.collect import list_namespaces, read_manifest, shown
from nixl_offload.errors import ConfigError, NamespaceError
from nixl_offload.format import MAX_KEY_BYTES
from nixl_offload.namespace import GroupFields, Namespace, NamespaceFields, make_namespace
from nixl_offload.stores.base import ObjectInfo, Store
from nixl_offload.tiers.naming import parse_shard_name
from nixl_offload.tiers.sweep import chunks_of
from nixl_offload.types import Key, key_group

_LISTED_EACH = 500


class Candidate(NamedTuple):
    """A chunk that may be copied."""

    key: Key
    slot_bytes: int
    """Of each of its shards."""


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
    """Return the namespace that a manifest describes. Raises ConfigError for one of another version of this package."""
    plain = manifest["fields"]
    try:
        groups = tuple(GroupFields(**group) for group in plain["groups"])
        return make_namespace(NamespaceFields(**{**plain, "groups": groups}))
    except (TypeError, KeyError, NamespaceError) as error:
        known = ", ".join(field.name for field in fields(NamespaceFields))
        raise ConfigError(
            f"the namespace was made by another version of nixl-offload ({error}); this one knows {known}"
        ) from error


def newest_first(
    store: Store,
    namespace: Namespace,
    *,
    max_bytes: int,
    ttl_s: float | None,
    report: Callable[[str, int], None],
) -> Selection:
    """List the namespace and return its youngest chunks, as many as ``max_bytes`` hold. Raises StoreError."""
    sizes = slot_sizes(namespace)
    ranks = namespace.fields.world_size
    selection = Selection([])
    youngest: list[tuple[float, Candidate]] = []
    total_bytes = 0
    oldest_s = -1.0 if ttl_s is None else time.time() - ttl_s
    for chunk in chunks_of(_counted(store.list(f"{namespace.name}/"), report)):
        parts = [parse_shard_name(name) for name in chunk.names]
        key = parts[0].key if parts[0] is not None else Key(b"")
        size = sizes.get(key_group(key), 0)
        here = {part.rank for part in parts if part is not None}
        complete = len(here) == ranks and max(here) < ranks and chunk.size_bytes == ranks * size
        if not complete or len(key) > MAX_KEY_BYTES:
            selection.incomplete += 1
        elif chunk.modified_s < oldest_s:
            selection.expired += 1
        else:
            heapq.heappush(youngest, (chunk.modified_s, Candidate(key, size)))
            total_bytes += ranks * size
            while total_bytes > max_bytes:
                total_bytes -= ranks * heapq.heappop(youngest)[1].slot_bytes
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
    sizes, selection = slot_sizes(namespace), Selection([])
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
        size = sizes.get(key_group(key))
        if size is None:
            selection.unknown += 1
        else:
            selection.candidates.append(Candidate(key, size))
    return selection


def slot_sizes(namespace: Namespace) -> dict[int, int]:
    """Return what a shard of each KV group takes."""
    return {group.group_id: group.slot_bytes for group in namespace.fields.groups}


def _counted(listing: Iterable[ObjectInfo], report: Callable[[str, int], None]) -> Iterator[ObjectInfo]:
    for number, info in enumerate(listing, 1):
        if not number % _LISTED_EACH:
            report("listed", number)
        yield info


def _described(store: Store, name: str) -> str:
    plain = (read_manifest(store, name) or {}).get("fields", {})
    return f"{name}  tenant {shown(plain.get('tenant')) or '-'}, model {shown(plain.get('model')) or '-'}"


def _ignore(info: ObjectInfo) -> None:
    """What lies beside namespaces is nobody's concern here."""
