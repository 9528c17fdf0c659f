"""``nixl-offload ls CONFIG``: what the tiers of a config hold, by namespace or chunk by chunk.

Threading: one thread. Locks nothing and changes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from nixl_offload.cli.common import (
    MEMORY_NOTE,
    Commands,
    TierFailure,
    add_command,
    add_selection,
    opened,
    report_nothing_found,
    selected,
    visit,
)
from nixl_offload.cli.ls_diff import find_namespace, print_diff
from nixl_offload.cli.terminal import Progress, about_size, moment, plural
from nixl_offload.config import load_config
from nixl_offload.tiers.inspect import ChunkInfo, Inspector, NamespaceInfo, NamespaceSize, printable
from nixl_offload.types import key_group

_DESCRIPTION = """\
Lists what the tiers of CONFIG hold, by namespace: tenant, model and what else tells it from others, chunks, bytes, age,
which engine has it open; how full the tier is. Servers go on meanwhile; nothing is locked or changed.

    nixl-offload ls kv.yaml
    nixl-offload ls kv.yaml --tier s3 --tenant blue
    nixl-offload ls kv.yaml --namespace 0f3a... --keys     # chunk by chunk: key, group, rank, size, age, place
    nixl-offload ls kv.yaml --keys --json                  # a line of JSON per chunk, or per tier that failed
    nixl-offload ls kv.yaml --diff 0f3a 77c1               # what separates two namespaces, by how their names begin

A memory tier lives in the server's processes and cannot be looked at from outside. Nothing stores how often a chunk was
hit; the server counts hits by tier in its metrics (vllm:nixl_offload_lookup_tokens_total). A slab's namespace is
counted by its index, which lags behind a running server by a moment; --keys reads each slot's header too. In a bucket
or a shared directory a chunk is as old as its last write or refresh.

If a tier fails, ls says so and lists the others.

Exit code 0: listed. 1: a tier's storage failed, or nothing is there of the namespace or tenant asked for. 2: CONFIG or
the options are wrong. 130: interrupted.
"""


def add_parser(commands: Commands) -> None:
    """Add ``ls`` to the command line."""
    parser = add_command(
        commands,
        "ls",
        run,
        description=_DESCRIPTION,
        json="print JSON; with --keys a line per chunk",
    )
    add_selection(parser, tenant=True)
    parser.add_argument("--keys", action="store_true", help="list chunks")
    parser.add_argument("--diff", metavar=("A", "B"), nargs=2, help="show the fields in which two namespaces differ")


@dataclass(slots=True)
class TierListing:
    """What one tier holds."""

    inspector: Inspector
    namespaces: list[tuple[NamespaceInfo, NamespaceSize]] = field(default_factory=list)
    used_bytes: int | None = None
    """What the capacity bounds; None where only a part was listed."""

    @property
    def chunk_bytes(self) -> int:
        """Of all namespaces listed."""
        return sum(size.size_bytes for _, size in self.namespaces)


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``. A tier that fails is told, and the others go on. Raises ConfigError."""
    config = load_config(arguments.file)
    memory, plain = config.memory, list[dict[str, Any]]()
    if memory is not None:
        plain.append({"kind": "memory", "capacity_bytes": memory.capacity_bytes, "told": MEMORY_NOTE})
    found = failed = 0
    with opened(arguments, config) as tiers:
        if arguments.diff is not None:
            return _diff(arguments, tiers, out)
        if memory and not (arguments.json or arguments.keys) and arguments.tier is None:
            print(f"{MEMORY_NOTE[0].upper()}{MEMORY_NOTE[1:]}.\n", file=out)
        for number, tier in enumerate(tiers):
            if arguments.keys:
                count = visit(tier, lambda inspector: _list_keys(arguments, inspector, out))
                if isinstance(count, TierFailure):
                    failed += 1
                    if arguments.json:
                        print(json.dumps({"tier": count.kind, "where": count.where, "error": count.words}), file=out)
                else:
                    found += count
                continue
            listing = visit(tier, lambda inspector: _list(arguments, inspector))
            if isinstance(listing, TierFailure):
                plain.append({"kind": listing.kind, "failure": listing.words})
                failed += 1
                continue
            found += len(listing.namespaces)
            plain.append(_tier_dict(listing))
            if not arguments.json:
                print("\n" * bool(number), end="", file=out)
                _print_tier(listing, out)
                out.flush()
    if arguments.json and not arguments.keys:
        print(json.dumps({"tiers": plain}, indent=2), file=out)
    if (arguments.namespace is not None or arguments.tenant is not None) and not found and not failed:
        report_nothing_found(arguments)
        failed += 1
    return 1 if failed else 0


def _diff(arguments: argparse.Namespace, tiers: Sequence[Inspector | TierFailure], out: TextIO) -> int:
    visited = [visit(tier, lambda inspector: [*selected(inspector, arguments)]) for tier in tiers]
    namespaces = [each for listed in visited if not isinstance(listed, TierFailure) for each in listed]
    first, second = (find_namespace(namespaces, prefix) for prefix in arguments.diff)
    if first is None or second is None:
        missing = " and ".join(
            prefix for prefix, each in zip(arguments.diff, (first, second), strict=True) if each is None
        )
        print(f"nixl-offload: nothing is there of namespace {missing}", file=sys.stderr)
        return 1
    print_diff(first, second, out, as_json=arguments.json)
    return 0


def _list(arguments: argparse.Namespace, inspector: Inspector) -> TierListing:
    progress = Progress(sys.stderr)
    listing = TierListing(inspector)
    shards = 0
    try:
        for namespace in selected(inspector, arguments):
            size = inspector.measure(namespace)
            listing.namespaces.append((namespace, size))
            shards += size.shards
            progress(f"{plural(shards, 'shard')} counted so far")
    finally:
        progress.clear()
    listing.used_bytes = inspector.used_bytes()
    if listing.used_bytes is None and arguments.namespace is None and arguments.tenant is None:
        listing.used_bytes = listing.chunk_bytes
    return listing


def _list_keys(arguments: argparse.Namespace, inspector: Inspector, out: TextIO) -> int:
    """Print chunks, and return of how many namespaces."""
    found = 0
    for namespace in selected(inspector, arguments):
        found += 1
        if not arguments.json:  # as comments: a program may read what follows
            print(f"# {inspector.where}, namespace {namespace.path}: {namespace.owner}", file=out)
            print("# " + (printable(namespace.trouble, 300) or "key  group  rank  size  age  place"), file=out)
        for chunk in inspector.chunks(namespace):
            if arguments.json:
                print(json.dumps(_chunk_dict(inspector, namespace, chunk)), file=out)
            else:
                _print_chunk(inspector, chunk, out)
    return found


def _print_tier(listing: TierListing, out: TextIO) -> None:
    inspector = listing.inspector
    chunks = sum(size.chunks for _, size in listing.namespaces)
    print(
        f"{inspector.where} ({inspector.kind}): {plural(chunks, 'chunk')} in "
        f"{plural(len(listing.namespaces), 'namespace')}, {about_size(listing.chunk_bytes)}{_share(listing)}",
        file=out,
    )
    if inspector.other_objects:
        print(f"{plural(inspector.other_objects, 'other object')} beside them, never touched", file=out)
    for namespace, size in listing.namespaces:
        print(f"\nnamespace {namespace.path}: {namespace.owner}", file=out)
        print(f"    {_details(namespace)}", file=out)
        if namespace.trouble:
            print(f"    {printable(namespace.trouble, 300)}", file=out)
        else:
            pieces = f" in {plural(size.shards, 'shard')}" if size.shards != size.chunks else ""
            ages = (
                f"; written {moment(size.oldest_s)} to {moment(size.newest_s)}"
                if size.oldest_s is not None and size.newest_s is not None
                else ""
            )
            print(f"    {plural(size.chunks, 'chunk')}{pieces}, {about_size(size.size_bytes)}{ages}", file=out)
        if inspector.exclusive:
            last = (
                f"last opened {moment(namespace.used_s)}"
                if namespace.used_s is not None
                else "not known when last opened"
            )
            use = (
                f"its directory is open now: {namespace.in_use}"
                if namespace.in_use
                else "no engine has its directory open"
            )
            print(f"    {last}; {use}", file=out)


def _print_chunk(inspector: Inspector, chunk: ChunkInfo, out: TextIO) -> None:
    """Print a line per shard."""
    created_s = inspector.created_s(chunk)
    age = "?" if created_s is None else about_age(time.time() - created_s)
    for shard in chunk.shards:
        print(
            f"{chunk.key.hex()}  {key_group(chunk.key)}  {shard.rank}  {about_size(shard.size_bytes)}  {age}  "
            f"{printable(shard.place, 4096)}",
            file=out,
        )


def _chunk_dict(inspector: Inspector, namespace: NamespaceInfo, chunk: ChunkInfo) -> dict[str, Any]:
    """Return a chunk as plain data. ``written_s`` is null for a slot whose header is not the chunk's."""
    return {
        "tier": inspector.kind,
        "where": inspector.where,
        "namespace": namespace.path,
        "key": chunk.key.hex(),
        "group": key_group(chunk.key),
        "written_s": inspector.created_s(chunk),
        "shards": [{"rank": shard.rank, "bytes": shard.size_bytes, "place": shard.place} for shard in chunk.shards],
    }


def about_age(seconds: float) -> str:
    """Render an age for people: ``45s``, ``12m``, ``5h``, ``9d``."""
    for limit_s, unit_s, unit in ((120, 1, "s"), (7200, 60, "m"), (172_800, 3600, "h")):
        if seconds < limit_s:
            return f"{max(0.0, seconds) / unit_s:.0f}{unit}"
    return f"{seconds / 86_400:.0f}d"


def _share(listing: TierListing) -> str:
    used, capacity = listing.used_bytes, listing.inspector.capacity_bytes
    if used is None:
        return ""
    on_disk = f"; {about_size(used)} on disk" if listing.inspector.exclusive else ""
    if not capacity:
        return f"{on_disk}; no capacity given"
    return f"{on_disk}; {used / capacity:.1%} of the capacity, {about_size(capacity)}"


def _details(namespace: NamespaceInfo) -> str:
    found = namespace.details()
    if not found:
        return "no manifest that fits: its owner is unknown"
    words = [str(found[name]) for name in ("engine", "platform", "dtype", "kv_layout") if name in found]
    words += [f"{name} {found[name]}" for name in ("tp", "pp", "pcp", "dcp") if found.get(name, 1) != 1]
    if "revision" in found:
        words.append(f"revision {found['revision']}")
    if namespace.chunk_tokens:
        words.append(f"{namespace.chunk_tokens} tokens a chunk")
    if namespace.ranks:
        ranges = namespace.layer_ranges
        sizes = "any tensor parallelism" + (" that divides them" if namespace.ranks > ranges else "")
        cut = (f" in {ranges} ranges of layers, " if ranges > 1 else ", ") + sizes if namespace.is_cut else ""
        words.append(plural(namespace.ranks, "shard" if cut else "rank") + cut)
    return ", ".join(words)


def _tier_dict(listing: TierListing) -> dict[str, Any]:
    """Return a tier as plain data. Times are seconds since the epoch, sizes bytes."""
    inspector, used = listing.inspector, listing.used_bytes
    capacity = inspector.capacity_bytes
    return {
        "kind": inspector.kind,
        "where": inspector.where,
        "capacity_bytes": capacity,
        "used_bytes": used,
        "used_share": used / capacity if used is not None and capacity else None,
        "other_objects": inspector.other_objects,
        "namespaces": [
            {
                "name": namespace.name,
                "part": namespace.part or None,
                "tenant": namespace.tenant,
                "model": namespace.model,
                "chunk_tokens": namespace.chunk_tokens,
                "made_for": namespace.details(),
                "chunks": size.chunks,
                "shards": size.shards,
                "bytes": size.size_bytes,
                "oldest_s": size.oldest_s,
                "newest_s": size.newest_s,
                "last_opened_s": namespace.used_s,
                "open_now": namespace.in_use is not None if inspector.exclusive else None,
                "trouble": namespace.trouble,
            }
            for namespace, size in listing.namespaces
        ],
    }
