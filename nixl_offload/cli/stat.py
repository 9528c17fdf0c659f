"""``nixl-offload stat CONFIG KEY``: what the headers of one chunk's shards say, field by field.

Threading: one thread. ``cli.explain_header`` knows the fields.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any, Final, NamedTuple, TextIO

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.cli.common import Commands, TierFailure, add_command, add_selection, keys_of, opened, selected, visit
from nixl_offload.cli.explain_header import block_checksums_of, explain
from nixl_offload.cli.terminal import about_size, moment
from nixl_offload.cli.verify.shard import NO_KEY, Buffer, Macs, check_shard
from nixl_offload.config import load_config
from nixl_offload.errors import ConfigError, StoreError
from nixl_offload.tiers.inspect import ChunkInfo, Inspector, NamespaceInfo, ShardInfo, printable
from nixl_offload.types import key_group

_DIGITS: Final = re.compile(r"[0-9a-f]{4,128}")
_PLACE: Final = re.compile(r".+\.slab@[0-9]{1,18}|(.*/)?[0-9a-f]{32}/[0-9a-f]{2}/[0-9a-f]+\.[0-9a-f]{4}")
_LIMIT: Final = 64
"""Of keys that begin alike."""
_DESCRIPTION = """\
Decodes the header page of every shard of one chunk and says, field by field, what it holds and what is wrong with it.

    nixl-offload stat kv.yaml 5f3a9c01                     # a key in hex, or its first digits: four at least
    nixl-offload stat kv.yaml 5f3a9c01 --verify            # reads the payload, too, and checks every block
    nixl-offload stat kv.yaml 5f3a9c01 --blocks            # lists the blocks' checksums
    nixl-offload stat kv.yaml /mnt/shared/kv/0f3a.../5f/5f3a....0000      # a file of a shared directory
    nixl-offload stat kv.yaml 0f3a.../5f/5f3a....0000                     # an object, by its name below the prefix
    nixl-offload stat kv.yaml /mnt/nvme/kv/0f3a.../rank-00000.slab@4096   # a slot, as ls --keys and verify name it

ls --keys lists keys. A key that lies in several tiers or namespaces is shown from each; --namespace and --tier choose.
Works beside running servers. A slab's slot may be given to another chunk at any moment: then the key does not match.

Exit code 0: found, and nothing that was checked is wrong. 1: something is wrong, nothing was found, or the storage
failed. 2: CONFIG or the options are wrong, or several keys begin so. 130: interrupted.
"""


class FoundShard(NamedTuple):
    """A shard, and what it belongs to."""

    inspector: Inspector
    namespace: NamespaceInfo
    chunk: ChunkInfo
    shard: ShardInfo


def add_parser(commands: Commands) -> None:
    """Add ``stat`` to the command line."""
    parser = add_command(commands, "stat", run, description=_DESCRIPTION)
    parser.add_argument("key", metavar="KEY", help="key in hex or its first digits, path of a shard, or object name")
    add_selection(parser, tenant=False)
    parser.add_argument("--blocks", action="store_true", help="list the checksums of all blocks")
    parser.add_argument("--verify", action="store_true", help="read the payload and check every block")


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``. Raises ConfigError, StoreError, TierError."""
    config = load_config(arguments.file)
    with opened(arguments, config) as tiers:
        results = [visit(tier, lambda inspector: _find(inspector, arguments)) for tier in tiers]
        failures = [result.words for result in results if isinstance(result, TierFailure)]
        found = [shard for result in results if not isinstance(result, TierFailure) for shard in result]
        if not found and failures:
            if arguments.json:
                print(json.dumps({"error": "; ".join(failures)}), file=out)
            return 1
        if not found:
            wheres = ", ".join(tier.where for tier in tiers if isinstance(tier, Inspector))
            raise StoreError(f"{printable(arguments.key, 300)!r} is not in {wheres}", cause="missing")
        keys = sorted({item.chunk.key.hex() for item in found})
        if len(keys) > 1:
            raise ConfigError(f"KEY: several begin so: {', '.join(keys[:4])}{', …' if len(keys) > 4 else ''}")
        secret = keys_of(config) if arguments.verify else None
        shards = [_decode(item, arguments, secret) for item in found]
    missing = _missing(found) if arguments.verify else []
    if arguments.json:
        print(json.dumps({"shards": shards, "missing": missing, "failures": failures}, indent=2), file=out)
    else:
        for shard in shards:
            _print(shard, out)
        for each in missing:
            print(f"WRONG  {each['where']}, {each['namespace']}: rank {each['rank']}: missing", file=out)
    return 1 if failures or missing or any(shard["wrong"] for shard in shards) else 0


def _find(inspector: Inspector, arguments: argparse.Namespace) -> list[FoundShard]:
    """Return the shards that KEY names. Raises ConfigError where it cannot name any."""
    text = arguments.key
    if _PLACE.fullmatch(text):
        return [FoundShard(inspector, *found) for found in inspector.find_place(text)]
    digits = text.lower().removeprefix("0x")
    if not _DIGITS.fullmatch(digits):
        raise ConfigError(
            "KEY: allowed: a key in hex or its first digits (four at least), the path of a file in a shared directory, "
            "an object's name, or PATH.slab@OFFSET"
        )
    return [
        FoundShard(inspector, namespace, chunk, shard)
        for namespace in selected(inspector, arguments)
        for chunk in inspector.find(namespace, digits, _LIMIT)
        for shard in chunk.shards
    ]


def _missing(found: list[FoundShard]) -> list[dict[str, Any]]:
    """Return as plain data the ranks that must have a shard of the chunk, and have none."""
    chunks = {(item.inspector.where, item.namespace.path, item.chunk.key): item for item in found}
    return [
        {"tier": item.inspector.kind, "where": item.inspector.where, "namespace": item.namespace.path, "rank": rank}
        for item in chunks.values()
        for rank in item.namespace.holders(key_group(item.chunk.key))
        if rank not in {shard.rank for shard in item.chunk.shards}
    ]


def _decode(found: FoundShard, arguments: argparse.Namespace, keys: ChunkKeys | None) -> dict[str, Any]:
    """Return what there is to tell of a shard, as plain data."""
    inspector, namespace, chunk, shard = found
    told: dict[str, Any] = {
        "tier": inspector.kind,
        "where": inspector.where,
        "namespace": namespace.path,
        "tenant": namespace.tenant,
        "model": namespace.model,
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
        inspector.read_into(shard, 0, page)
    except StoreError as error:
        if error.cause not in ("short", "missing"):
            raise
        told["wrong"].append(str(error))
        return told
    fields = explain(page, namespace, chunk, shard)
    told["fields"] = {field.name: {"value": field.value, "wrong": field.wrong, "note": field.note} for field in fields}
    told["wrong"] += [f"{field.name}: {field.wrong}" for field in fields if field.wrong]
    if len(fields) > 1:
        sums = block_checksums_of(page)
        told["block_checksums"] = [f"{value:016x}" for value in sums] if arguments.blocks else len(sums)
    if (words := namespace.why_no_shard(chunk.key, shard.rank)) is not None:
        told["wrong"].append(f"rank: {words}")
    if arguments.verify:
        macs = None if inspector.exclusive else Macs(keys)
        fault = check_shard(inspector.read_into, namespace, chunk, shard, buffer, macs)
        if fault is not None and fault.reason == NO_KEY:
            told["no_key"], fault = fault.words, None
        told["verified"] = fault is None
        if fault is not None and (fault.reason in ("checksum", "authentication") or not told["wrong"]):
            told["wrong"].append(f"payload: {fault.words}")
    return told


def _print(shard: dict[str, Any], out: TextIO) -> None:
    print(printable(shard["place"], 4096), file=out)
    owner = f"tenant {shard['tenant'] or '?'}, model {shard['model'] or '?'}"
    lines = [
        ("tier", f"{shard['tier']}, {shard['where']}"),
        ("namespace", f"{shard['namespace']}: {owner}"),
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
        words = "every block verifies" if shard["verified"] else "does not verify"
        lines.append(("payload", f"{words}; {shard['no_key']}" if "no_key" in shard else words))
    for name, text in lines:
        print(f"    {name:<18}{text}", file=out)
    for words in shard["wrong"]:
        print(f"    WRONG  {printable(words, 600)}", file=out)
    print(file=out)
