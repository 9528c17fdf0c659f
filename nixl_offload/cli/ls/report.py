"""What ``nixl-offload ls`` found: as text for people and as JSON.

Threading: pure but for printing, and for reading the header of a slab's chunk that is listed by its key.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any, TextIO

from nixl_offload.cli.gc.collect import shown
from nixl_offload.cli.inventory.base import BENCH_SCRATCH, Chunk, Held, Inventory, Measure
from nixl_offload.cli.terminal import about_size, moment, plural
from nixl_offload.types import key_group


@dataclass(slots=True)
class TierListing:
    """What one tier holds."""

    inventory: Inventory
    namespaces: list[tuple[Held, Measure]] = field(default_factory=list)
    on_disk_bytes: int | None = None
    """Under a slab's directory, everything; None elsewhere."""
    selected: bool = False
    """Only some namespaces were asked for: what they hold is not what fills the tier."""

    @property
    def chunk_bytes(self) -> int:
        """Of all namespaces listed."""
        return sum(measure.size_bytes for _, measure in self.namespaces)

    @property
    def used_bytes(self) -> int | None:
        """What the capacity bounds; None where only a part was looked at."""
        if self.on_disk_bytes is not None:
            return self.on_disk_bytes
        return None if self.selected else self.chunk_bytes


def print_tier(listing: TierListing, out: TextIO) -> None:
    """Print a tier and its namespaces."""
    inventory = listing.inventory
    chunks = sum(measure.chunks for _, measure in listing.namespaces)
    print(
        f"{inventory.where} ({inventory.kind}): {plural(chunks, 'chunk')} in "
        f"{plural(len(listing.namespaces), 'namespace')}, {about_size(listing.chunk_bytes)}{_share(listing)}",
        file=out,
    )
    if inventory.foreign:
        print(f"{plural(inventory.foreign, 'foreign object')} beside them, never touched", file=out)
    for held, measure in listing.namespaces:
        print(file=out)
        print(f"namespace {held.path}: tenant {held.tenant or '?'}, model {held.model or '?'}", file=out)
        print(f"    {_details(held)}", file=out)
        if held.trouble:
            print(f"    {shown(held.trouble, 300)}", file=out)
        else:
            pieces = f" in {plural(measure.shards, 'shard')}" if measure.shards != measure.chunks else ""
            print(
                f"    {plural(measure.chunks, 'chunk')}{pieces}, {about_size(measure.size_bytes)}{_ages(measure)}",
                file=out,
            )
        if inventory.locks:
            opened = f"last opened {moment(held.used_s)}" if held.used_s is not None else "not known when last opened"
            use = f"its directory is open now: {held.in_use}" if held.in_use else "no engine has its directory open"
            print(f"    {opened}; {use}", file=out)


def tier_dict(listing: TierListing) -> dict[str, Any]:
    """Return a tier as plain data. Times are seconds since the epoch, sizes bytes."""
    inventory = listing.inventory
    used, capacity = listing.used_bytes, inventory.capacity_bytes
    return {
        "kind": inventory.kind,
        "where": inventory.where,
        "capacity_bytes": capacity,
        "used_bytes": used,
        "used_share": used / capacity if used is not None and capacity else None,
        "foreign_objects": inventory.foreign,
        "namespaces": [_namespace_dict(inventory, held, measure) for held, measure in listing.namespaces],
    }


def print_keys_heading(inventory: Inventory, held: Held, out: TextIO) -> None:
    """Print whose chunks follow, as comments: what follows may be read by a program."""
    whose = f"tenant {held.tenant or '?'}, model {held.model or '?'}"
    print(f"# {inventory.where}, namespace {held.path}: {whose}", file=out)
    print("# " + (shown(held.trouble, 300) or "" if held.trouble else "key  group  rank  size  age  place"), file=out)


def print_chunk(inventory: Inventory, chunk: Chunk, out: TextIO) -> None:
    """Print a line per shard."""
    created_s = inventory.created_s(chunk)
    age = "?" if created_s is None else about_age(time.time() - created_s)
    for shard in chunk.shards:
        print(
            f"{chunk.key.hex()}  {key_group(chunk.key)}  {shard.rank}  {about_size(shard.size_bytes)}  {age}  "
            f"{shown(shard.place, 4096)}",
            file=out,
        )


def chunk_dict(inventory: Inventory, held: Held, chunk: Chunk) -> str:
    """Return a chunk as one line of JSON. ``written_s`` null: of a slab's slot whose header is not the chunk's."""
    return json.dumps(
        {
            "tier": inventory.kind,
            "where": inventory.where,
            "namespace": held.path,
            "key": chunk.key.hex(),
            "group": key_group(chunk.key),
            "written_s": inventory.created_s(chunk),
            "shards": [{"rank": shard.rank, "bytes": shard.size_bytes, "place": shard.place} for shard in chunk.shards],
        }
    )


def about_age(seconds: float) -> str:
    """Render an age for people: ``45s``, ``12m``, ``5h``, ``9d``."""
    for limit_s, unit_s, unit in ((120, 1, "s"), (7200, 60, "m"), (172_800, 3600, "h")):
        if seconds < limit_s:
            return f"{max(0.0, seconds) / unit_s:.0f}{unit}"
    return f"{seconds / 86_400:.0f}d"


def _share(listing: TierListing) -> str:
    used, capacity = listing.used_bytes, listing.inventory.capacity_bytes
    if used is None:
        return ""
    on_disk = f"; {about_size(used)} on disk" if listing.on_disk_bytes is not None else ""
    if not capacity:
        return f"{on_disk}; no capacity given"
    return f"{on_disk}; {used / capacity:.1%} of the capacity, {about_size(capacity)}"


def _details(held: Held) -> str:
    found = held.details()
    if not found and held.name.startswith(BENCH_SCRATCH):
        return "scratch of nixl-offload bench: it runs, or was killed: gc --namespace ... --older-than 0s --delete"
    if not found:
        return "no manifest that fits: nobody can tell whose it is"
    words = [str(found[name]) for name in ("engine", "platform", "dtype", "kv_layout") if name in found]
    words += [f"{name} {found[name]}" for name in ("tp", "pp", "pcp", "dcp") if found.get(name, 1) != 1]
    if "revision" in found:
        words.append(f"revision {found['revision']}")
    if held.chunk_tokens:
        words.append(f"{held.chunk_tokens} tokens a chunk")
    if held.ranks:
        words.append(plural(held.ranks, "rank"))
    return ", ".join(words)


def _ages(measure: Measure) -> str:
    if measure.oldest_s is None or measure.newest_s is None:
        return ""
    return f"; written {moment(measure.oldest_s)} to {moment(measure.newest_s)}"


def _namespace_dict(inventory: Inventory, held: Held, measure: Measure) -> dict[str, Any]:
    return {
        "name": held.name,
        "part": held.part or None,
        "tenant": held.tenant,
        "model": held.model,
        "chunk_tokens": held.chunk_tokens,
        "made_for": held.details(),
        "chunks": measure.chunks,
        "shards": measure.shards,
        "bytes": measure.size_bytes,
        "oldest_s": measure.oldest_s,
        "newest_s": measure.newest_s,
        "last_opened_s": held.used_s,
        "open_now": held.in_use is not None if inventory.locks else None,
        "trouble": held.trouble,
    }
