"""``nixl-offload ls CONFIG``: what the tiers of a config hold, by namespace or chunk by chunk.

Threading: one thread. ``cli.inventory.base`` looks, ``cli.ls.report`` tells. Locks nothing and changes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any, TextIO

from nixl_offload.cli.common import (
    MEMORY_TOLD,
    TIER_ERRORS,
    check_namespace,
    open_inventory,
    stored_tiers,
    tell_of_nothing,
)
from nixl_offload.cli.ls.report import (
    TierListing,
    chunk_dict,
    print_chunk,
    print_keys_heading,
    print_tier,
    tier_dict,
)
from nixl_offload.cli.terminal import Progress
from nixl_offload.config import Config, MemoryConfig, load_config

if TYPE_CHECKING:
    from nixl_offload.cli.inventory.base import Held, Inventory

_REPORT_EVERY = 1000
_DESCRIPTION = """\
Lists what the tiers of CONFIG hold, by namespace: tenant, model and what else tells it from others, chunks, bytes, how
old, who has it open; how full the tier is. Servers go on meanwhile; nothing is locked or changed.

    nixl-offload ls kv.yaml
    nixl-offload ls kv.yaml --tier slab --tenant blue
    nixl-offload ls kv.yaml --namespace 0f3a... --keys     # chunk by chunk: key, group, rank, size, age, place
    nixl-offload ls kv.yaml --keys --json                  # a line of JSON per chunk

A memory tier lives in the server's processes and cannot be looked at from outside. How often a chunk was hit is not
kept anywhere: the server counts hits by tier since it started, in its metrics (vllm:nixl_offload_hit_decisions_total).
What is known is when an engine last opened a slab's namespace, and in a bucket or tree when a chunk was last written or
refreshed, which servers do to chunks in use where there is a ttl. A slab's namespace is counted by its index, which
lags behind a running server by a moment; --keys looks at each slot's header, too.

A tier that cannot be looked at is told, and the others are listed all the same.

Exit code 0: listed. 1: a tier's storage failed, or nothing is there of the namespace or tenant asked for. 2: CONFIG or
the options are wrong. 130: interrupted.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``ls`` to the command line."""
    parser = commands.add_parser(
        "ls",
        help="list what is stored, by tier and namespace",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="CONFIG", help="the YAML config")
    parser.add_argument("--tier", choices=("slab", "shared_dir", "s3"), help="only this tier of CONFIG")
    parser.add_argument("--namespace", metavar="NAME", help="only this namespace, 32 hex digits")
    parser.add_argument("--tenant", help="only the namespaces of this tenant")
    parser.add_argument("--keys", action="store_true", help="list chunks")
    parser.add_argument("--json", action="store_true", help="print JSON; with --keys a line per chunk")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``. A tier that fails is told, and the others go on. Raises ConfigError."""
    config = load_config(arguments.file)
    check_namespace(arguments.namespace)
    tiers = _memory(config)
    if tiers and not (arguments.json or arguments.keys) and arguments.tier is None:
        print(f"{MEMORY_TOLD[0].upper()}{MEMORY_TOLD[1:]}.\n", file=out)
    found = failed = 0
    for number, tier in enumerate(stored_tiers(config, arguments.file, arguments.tier)):
        try:
            with closing(open_inventory(tier)) as inventory:
                if arguments.keys:
                    found += _list_keys(arguments, inventory, out)
                    continue
                listing = _look(arguments, inventory)
        except TIER_ERRORS as error:
            out.flush()
            print(f"nixl-offload: {error}", file=sys.stderr)
            tiers.append({"kind": tier.kind, "failure": str(error)})
            failed += 1
            continue
        found += len(listing.namespaces)
        tiers.append(tier_dict(listing))
        if not arguments.json:
            print("\n" * bool(number), end="", file=out)
            print_tier(listing, out)
            out.flush()
    if arguments.json and not arguments.keys:
        print(json.dumps({"tiers": tiers}, indent=2), file=out)
    if (arguments.namespace is not None or arguments.tenant is not None) and not found and not failed:
        tell_of_nothing(arguments.namespace, arguments.tenant)
        failed += 1
    return 1 if failed else 0


def _memory(config: Config) -> list[dict[str, Any]]:
    return [
        {"kind": "memory", "capacity_bytes": tier.capacity_bytes, "told": MEMORY_TOLD}
        for tier in config.tiers
        if isinstance(tier, MemoryConfig)
    ]


def _wanted(arguments: argparse.Namespace, held: Held) -> bool:
    return arguments.namespace in (None, held.name) and arguments.tenant in (None, held.tenant)


def _look(arguments: argparse.Namespace, inventory: Inventory) -> TierListing:
    progress = Progress(sys.stderr)
    listing = TierListing(inventory)
    counted = 0
    try:
        for held in inventory.namespaces():
            if _wanted(arguments, held):
                measure = inventory.measure(held)
                listing.namespaces.append((held, measure))
                counted += measure.shards
                progress("counted", counted)
    finally:
        progress.clear()
    listing.selected = arguments.namespace is not None or arguments.tenant is not None
    listing.on_disk_bytes = inventory.used_bytes()
    return listing


def _list_keys(arguments: argparse.Namespace, inventory: Inventory, out: TextIO) -> int:
    """Return of how many namespaces."""
    found = 0
    for held in inventory.namespaces():
        if not _wanted(arguments, held):
            continue
        found += 1
        if not arguments.json:
            print_keys_heading(inventory, held, out)
        for chunk in inventory.chunks(held):
            if arguments.json:
                print(chunk_dict(inventory, held, chunk), file=out)
            else:
                print_chunk(inventory, chunk, out)
    return found
