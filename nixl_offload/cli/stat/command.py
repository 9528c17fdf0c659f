"""``nixl-offload stat CONFIG KEY``: what the headers of one chunk's shards say, field by field.

Threading: one thread. ``cli.stat.find`` finds, ``cli.stat.header`` explains.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from nixl_offload.cli.common import TierFailure, attempt, check_namespace, open_inventories, stored_tiers
from nixl_offload.cli.gc.collect import shown
from nixl_offload.cli.terminal import about_size, moment
from nixl_offload.config import load_config
from nixl_offload.errors import ConfigError, StoreError
from nixl_offload.types import key_group

if TYPE_CHECKING:
    from nixl_offload.cli.stat.find import Found
    from nixl_offload.cli.stat.header import Field

_DESCRIPTION = """\
Decodes the header page of every shard of one chunk and says, field by field, what it holds and what is wrong with it.

    nixl-offload stat kv.yaml 5f3a9c01                     # a key in hex, or the beginning of one: four digits at least
    nixl-offload stat kv.yaml 5f3a9c01 --verify            # reads the payload, too, and checks every block
    nixl-offload stat kv.yaml 5f3a9c01 --blocks            # lists the blocks' checksums
    nixl-offload stat kv.yaml /mnt/shared/kv/0f3a.../5f/5f3a....0000      # a file of a tree
    nixl-offload stat kv.yaml 0f3a.../5f/5f3a....0000                     # an object, by its name below the prefix
    nixl-offload stat kv.yaml /mnt/nvme/kv/0f3a.../rank-00000.slab@4096   # a slot, as ls --keys and verify name it

ls --keys lists keys. Of a key that lies in several tiers or namespaces all are shown; --namespace and --tier choose.
Works beside running servers. A slab's slot may be given to another chunk at any moment: then the key does not fit.

Exit code 0: found, and nothing is wrong with it as far as was looked. 1: something is wrong, nothing was found, or the
storage failed. 2: CONFIG or the options are wrong, or several keys begin so. 130: interrupted.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``stat`` to the command line."""
    parser = commands.add_parser(
        "stat",
        help="decode the headers of one chunk",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="CONFIG", help="the YAML config")
    parser.add_argument("key", metavar="KEY", help="key in hex or its beginning, path of a shard, or object name")
    parser.add_argument("--tier", choices=("slab", "shared_dir", "s3"), help="only this tier of CONFIG")
    parser.add_argument("--namespace", metavar="NAME", help="only this namespace, 32 hex digits")
    parser.add_argument("--blocks", action="store_true", help="list the checksums of all blocks")
    parser.add_argument("--verify", action="store_true", help="read the payload and check every block")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``. Raises ConfigError, StoreError, TierError."""
    from nixl_offload.cli.stat.find import find

    config = load_config(arguments.file)
    check_namespace(arguments.namespace)
    tiers = stored_tiers(config, arguments.file, arguments.tier)
    with ExitStack() as opened:
        inventories, failures = open_inventories(tiers, opened)
        found = []
        for inventory in inventories:
            some = attempt(
                inventory.kind, inventory.where, partial(find, [inventory], arguments.key, arguments.namespace)
            )
            if isinstance(some, TierFailure):
                failures.append(some)
            else:
                found += some
        if not found and failures:
            return 1
        if not found:
            wheres = ", ".join(inventory.where for inventory in inventories)
            raise StoreError(f"{shown(arguments.key, 300)!r} is not in {wheres}", cause="missing")
        keys = sorted({item.chunk.key.hex() for item in found})
        if len(keys) > 1:
            raise ConfigError(f"KEY: several begin so: {', '.join(keys[:4])}{', …' if len(keys) > 4 else ''}")
        shards = [_look(item, arguments) for item in found]
        missing = _missing(found) if arguments.verify else []
    if arguments.json:
        print(json.dumps({"shards": shards, "missing": missing}, indent=2), file=out)
    else:
        for shard in shards:
            _print(shard, out)
        for lacking in missing:
            print(f"WRONG  {lacking['where']}, {lacking['namespace']}: rank {lacking['rank']}: missing", file=out)
    return 1 if failures or missing or any(shard["wrong"] for shard in shards) else 0


def _missing(found: Sequence[Found]) -> list[dict[str, Any]]:
    """Return what each chunk lacks, as plain data: the shards of ranks that must have one."""
    chunks = {(item.inventory.where, item.held.path, item.chunk.key): item for item in found}
    return [
        {"tier": item.inventory.kind, "where": item.inventory.where, "namespace": item.held.path, "rank": rank}
        for item in chunks.values()
        for rank in item.held.holders(key_group(item.chunk.key))
        if rank not in {shard.rank for shard in item.chunk.shards}
    ]


def _look(found: Found, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what there is to tell of a shard, as plain data."""
    from nixl_offload.chunk.header import HEADER_BYTES
    from nixl_offload.cli.stat.header import block_checksums_of, explain
    from nixl_offload.cli.verify.check import Buffer, check_shard

    inventory, held, chunk, shard = found
    told: dict[str, Any] = {
        "tier": inventory.kind,
        "where": inventory.where,
        "namespace": held.path,
        "tenant": held.tenant,
        "model": held.model,
        "place": shard.place,
        "rank": shard.rank,
        "bytes": shard.size_bytes,
        "modified_s": shard.modified_s,
        "fields": {},
        "wrong": [],
        "verified": None,
    }
    buffer = Buffer()
    page = buffer.memory[:HEADER_BYTES]
    try:
        inventory.read_into(shard, 0, page)
    except StoreError as error:
        if error.cause not in ("short", "missing"):
            raise
        told["wrong"].append(str(error))
        return told
    fields = explain(page, held, chunk, shard)
    told["fields"] = {field.name: _plain(field) for field in fields}
    told["wrong"] += [f"{field.name}: {field.wrong}" for field in fields if field.wrong]
    if len(fields) > 1:
        sums = block_checksums_of(page)
        told["block_checksums"] = [f"{value:016x}" for value in sums] if arguments.blocks else len(sums)
    if (words := held.why_no_shard(chunk.key, shard.rank)) is not None:
        told["wrong"].append(f"rank: {words}")
    if arguments.verify:
        problem = check_shard(inventory.read_into, held, chunk, shard, buffer)
        told["verified"] = problem is None
        if problem is not None and (problem.reason == "checksum" or not told["wrong"]):
            told["wrong"].append(f"payload: {problem.words}")
    return told


def _plain(field: Field) -> dict[str, Any]:
    return {"value": field.value, "wrong": field.wrong, "note": field.note}


def _print(shard: dict[str, Any], out: TextIO) -> None:
    print(shown(shard["place"], 4096), file=out)
    whose = f"tenant {shard['tenant'] or '?'}, model {shard['model'] or '?'}"
    lines = [
        ("tier", f"{shard['tier']}, {shard['where']}"),
        ("namespace", f"{shard['namespace']}: {whose}"),
        ("rank", f"{shard['rank']}"),
        ("size", f"{shard['bytes']:,} bytes ({about_size(shard['bytes'])})"),
    ]
    if shard["modified_s"] is not None:
        lines.append(("modified", moment(shard["modified_s"])))
    for name, field in shard["fields"].items():
        note = f"   ({field['note']})" if field["note"] else ""
        wrong = f"   WRONG: {field['wrong']}" if field["wrong"] else ""
        lines.append((name, f"{field['value']}{note}{wrong}"))
    sums = shard.get("block_checksums")
    if isinstance(sums, int):
        lines.append(("block checksums", f"{sums}; --blocks lists them"))
    elif sums is not None:
        lines += [(f"block {number}", value) for number, value in enumerate(sums)]
    if shard["verified"] is not None:
        lines.append(("payload", "every block verifies" if shard["verified"] else "does not verify"))
    for name, text in lines:
        print(f"    {name:<18}{text}", file=out)
    for words in shard["wrong"]:
        print(f"    WRONG  {shown(words, 600)}", file=out)
    print(file=out)
