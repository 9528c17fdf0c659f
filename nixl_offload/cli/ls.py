"""``nixl-offload ls CONFIG``: lists the contents of a config's tiers, by namespace or chunk by chunk.

Threading: one thread. Locks nothing and changes nothing.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from typing import Any, Final

from nixl_offload.cli.common import (
    Progress,
    TierFailure,
    about_size,
    add_selection,
    moment,
    plural,
    report_nothing_found,
    selected,
    set_up,
    visit,
)
from nixl_offload.config import load_config
from nixl_offload.errors import ConfigError
from nixl_offload.tiers.inspect import Inspector, NamespaceInfo, printable
from nixl_offload.types import key_group

_DESCRIPTION = """\
Lists the content of the tiers of CONFIG by namespace: tenant, model, chunks, bytes, age, and the engine that has it
open; and how full each tier is. Servers may run meanwhile; ls locks and changes nothing.

    nixl-offload ls kv.yaml
    nixl-offload ls kv.yaml --tier s3 --tenant blue
    nixl-offload ls kv.yaml --namespace 0f3a... --keys     # chunk by chunk: key, group, shard, size, written, place
    nixl-offload ls kv.yaml --keys --json                  # a line of JSON per chunk, or per tier that failed
    nixl-offload ls kv.yaml --diff 0f3a 77c1               # what separates two namespaces, by how their names begin

The figures of a slab come from its index, which lags slightly behind a running server; --keys reads each
slot's header too. In a bucket the age of a chunk counts from its last write, in a shared directory from its last use.
"""
_MEMORY_NOTE: Final = (
    "memory tier: lives in the server's processes and cannot be looked at from outside; the server's metrics tell what "
    "it holds"
)


def add_ls(parser: ArgumentParser) -> None:
    """Add the arguments of ``ls`` to ``parser``."""
    set_up(parser, run, _DESCRIPTION, json="print JSON; with --keys a line per chunk")
    add_selection(parser)
    parser.add_argument("--keys", action="store_true", help="list chunks")
    parser.add_argument("--diff", metavar=("A", "B"), nargs=2, help="show the fields in which two namespaces differ")


def run(arguments: Namespace) -> int:
    """Print the listing. A tier that fails is reported, and the other tiers are listed. Raises ConfigError."""
    config = load_config(arguments.file)
    if arguments.diff is not None:
        visited = visit(arguments, config, lambda inspector: list(selected(inspector, arguments)))
        return _diff(arguments, [each for listed in visited if isinstance(listed, list) for each in listed])
    is_plain = not (arguments.json or arguments.keys)
    tiers, found, failed = list[dict[str, Any]](), 0, 0
    if config.memory is not None:
        tiers.append({"kind": "memory", "capacity_bytes": config.memory.capacity_bytes, "note": _MEMORY_NOTE})
        if is_plain and not arguments.tier:
            print(f"{_MEMORY_NOTE.capitalize()}.\n")

    def look(inspector: Inspector) -> dict[str, Any]:
        namespaces = selected(inspector, arguments)
        if arguments.keys:
            return {"namespaces": _print_keys(inspector, namespaces, as_json=arguments.json)}
        return _listed(inspector, namespaces, is_whole=arguments.namespace is None and arguments.tenant is None)

    for number, tier in enumerate(visit(arguments, config, look)):
        if isinstance(tier, TierFailure):
            failed += 1
            tiers.append({"kind": tier.kind, "failure": tier.words})
            if arguments.keys and arguments.json:
                print(json.dumps({"tier": tier.kind, "where": tier.where, "error": tier.words}))
            continue
        found += len(tier["namespaces"])
        tiers.append(tier)
        if is_plain:
            print("\n" * bool(number), end="")
            _print_tier(tier)
    if arguments.json and not arguments.keys:
        print(json.dumps({"tiers": tiers}, indent=2))
    return 1 if failed or report_nothing_found(arguments, found) else 0


def _listed(inspector: Inspector, selection: Iterable[NamespaceInfo], *, is_whole: bool) -> dict[str, Any]:
    """Return a tier's contents by namespace. ``is_whole``: all are selected. Times are seconds since the epoch."""
    progress, namespaces, shards = Progress(), list[dict[str, Any]](), 0
    try:
        for namespace in selection:
            size = inspector.measure(namespace)
            shards += size.shards
            namespaces.append(
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
                    "open_now": inspector.in_use(namespace),
                    "trouble": printable(namespace.trouble, 300),
                }
            )
            progress(f"{plural(shards, 'shard')} counted so far")
    finally:
        progress.clear()
    capacity, used = inspector.capacity_bytes, inspector.used_bytes()
    if used is None and is_whole:
        used = sum(each["bytes"] for each in namespaces)
    return {
        "kind": inspector.kind,
        "where": inspector.where,
        "capacity_bytes": capacity,
        "used_bytes": used,
        "used_share": used / capacity if used is not None and capacity else None,
        "other_objects": inspector.other_objects,
        "namespaces": namespaces,
    }


def _print_tier(tier: Mapping[str, Any]) -> None:
    namespaces, used, is_slab = tier["namespaces"], tier["used_bytes"], tier["kind"] == "slab"
    chunks, size_bytes = (sum(each[name] for each in namespaces) for name in ("chunks", "bytes"))
    words = [f"{plural(chunks, 'chunk')} in {plural(len(namespaces), 'namespace')}, {about_size(size_bytes)}"]
    words += [f"{about_size(used)} on disk"] if is_slab and used is not None else []
    if tier["used_share"] is not None:
        words.append(f"{tier['used_share']:.1%} of the capacity, {about_size(tier['capacity_bytes'])}")
    elif used is not None:
        words.append("no capacity given")
    print(f"{tier['where']} ({tier['kind']}): {'; '.join(words)}")
    if tier["other_objects"]:
        print(f"{plural(tier['other_objects'], 'other object')} beside them, never touched")
    for each in namespaces:
        path = f"{each['part']}/{each['name']}" if each["part"] else each["name"]
        print(f"\nnamespace {path}: tenant {each['tenant'] or '?'}, model {each['model'] or '?'}")
        details = ", ".join(f"{name} {value}" for name, value in each["made_for"].items() if value != 1)
        print(f"    {details or 'no manifest that fits: its owner is unknown'}")
        shards = f" in {plural(each['shards'], 'shard')}" if each["shards"] != each["chunks"] else ""
        ages = f"; written {moment(each['oldest_s'])} to {moment(each['newest_s'])}" if each["oldest_s"] else ""
        counted = f"{plural(each['chunks'], 'chunk')}{shards}, {about_size(each['bytes'])}{ages}"
        print(f"    {each['trouble'] or counted}")
        if is_slab:
            last = f"last opened {moment(each['last_opened_s'])}" if each["last_opened_s"] else "last use unknown"
            holder = f"its directory is open now: {each['open_now']}"
            print(f"    {last}; {holder if each['open_now'] else 'no engine has its directory open'}")
    sys.stdout.flush()


def _print_keys(inspector: Inspector, selection: Iterable[NamespaceInfo], *, as_json: bool) -> list[str]:
    """Print the chunks of the selected namespaces, and return the namespaces' names."""
    names = list[str]()
    for namespace in selection:
        names.append(namespace.name)
        if not as_json:  # as comments, because a program may read the lines below
            print(f"# {inspector.where}, namespace {namespace.path}: {namespace.owner}")
            print("# " + (printable(namespace.trouble, 300) or "key  group  shard  size  written  place"))
        for chunk in inspector.chunks(namespace):
            written_s, group = inspector.created_s(chunk), key_group(chunk.key)
            if as_json:
                shards = [
                    {"shard": each.number, "bytes": each.size_bytes, "place": each.place} for each in chunk.shards
                ]
                line = {"tier": inspector.kind, "where": inspector.where, "namespace": namespace.path}
                said = {"key": chunk.key.hex(), "group": group, "written_s": written_s, "shards": shards}
                print(json.dumps({**line, **said}))
                continue
            for each in chunk.shards:
                size, place = about_size(each.size_bytes), printable(each.place, 4096)
                print(f"{chunk.key.hex()}  {group}  {each.number}  {size}  {moment(written_s)}  {place}")
    return names


def _diff(arguments: Namespace, namespaces: list[NamespaceInfo]) -> int:
    """Print the fields in which two namespaces differ, from their manifests."""
    chosen = list[NamespaceInfo]()
    fields = list[dict[str, str]]()
    for prefix in arguments.diff:
        # Several tiers may hold a namespace; prefer one with a manifest.
        fitting = [each for each in namespaces if each.name.startswith(prefix)]
        fitting.sort(key=lambda each: not each.manifest)
        if not fitting:
            print(f"nixl-offload: nothing is there of namespace {prefix}", file=sys.stderr)
            return 1
        if (count := len({each.name for each in fitting})) > 1:
            raise ConfigError(f"--diff: {prefix!r} begins the names of {count} namespaces; say more of it")
        if fitting[0].manifest is None:
            raise ConfigError(f"--diff: namespace {fitting[0].path} has no manifest that fits its name")
        chosen.append(fitting[0])
        fields.append(_as_json(fitting[0].manifest["fields"]))
    first, second = fields
    pairs = {name: (first.get(name), second.get(name)) for name in {**first, **second}}
    differs = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if arguments.json:
        values = {name: [each and json.loads(each) for each in pair] for name, pair in differs.items()}
        print(json.dumps({"namespaces": [each.path for each in chosen], "differs": values}, indent=2))
        return 0
    for namespace in chosen:
        print(f"namespace {namespace.path}: {namespace.owner}")
    for name, pair in differs.items():
        values_of = " | ".join(printable(each, 200) or "(not there)" for each in pair)
        print(f"    {printable(name, 200)}: {values_of}")
    return 0


def _as_json(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return each field as JSON, in which 1 and true differ. Each of the ``settings`` becomes a field."""
    settings = fields.get("settings")
    flat = {**fields, **settings} if isinstance(settings, dict) else fields
    return {name: json.dumps(value, sort_keys=True) for name, value in flat.items() if name != "settings"}
