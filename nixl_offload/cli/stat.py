"""``nixl-offload stat CONFIG KEY``: what the headers of one chunk's shards say, field by field.

The fields are those of docs/format.md, as they stand there; ``verify.shard`` says what is wrong. Threading: one thread.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TextIO

from nixl_offload.chunk.authentication import ChunkKeys, stated_key_id
from nixl_offload.chunk.header import (
    CHECKSUMS_AT,
    HEADER_BYTES,
    MAGIC,
    MAX_BLOCKS_PER_CHUNK,
    MAX_KEY_BYTES,
    OWN_CHECKSUM_AT,
)
from nixl_offload.cli.common import Commands, TierFailure, add_command, add_selection, keys_of, opened, selected, visit
from nixl_offload.cli.terminal import about_size, moment
from nixl_offload.cli.verify.shard import NO_KEY, Buffer, Macs, check_header, check_shard
from nixl_offload.config import load_config
from nixl_offload.errors import ConfigError, FormatError, StoreError
from nixl_offload.tiers.inspect import ChunkInfo, Inspector, NamespaceInfo, ShardInfo, printable
from nixl_offload.types import key_group

_PLACE: Final = re.compile(r".+\.slab@[0-9]{1,18}|(.*/)?[0-9a-f]{32}/[0-9a-f]{2}/[0-9a-f]+\.[0-9a-f]{4}")
_LIMIT: Final = 64
"""Of keys that begin alike."""
_DESCRIPTION = """\
Prints the header of every shard of one chunk, field by field, and what is wrong with it.

    nixl-offload stat kv.yaml 5f3a9c01                     # a key in hex, or its first digits: four at least
    nixl-offload stat kv.yaml 5f3a9c01 --verify            # reads the payload, too, and checks every block
    nixl-offload stat kv.yaml 5f3a9c01 --blocks            # lists the blocks' checksums
    nixl-offload stat kv.yaml /mnt/shared/kv/0f3a.../5f/5f3a....0000      # a file of a shared directory
    nixl-offload stat kv.yaml 0f3a.../5f/5f3a....0000                     # an object, by its name below the prefix
    nixl-offload stat kv.yaml /mnt/nvme/kv/0f3a.../rank-00000.slab@4096   # a slot, as ls --keys and verify name it

It works beside running servers, which may give a slot to another chunk meanwhile: then the key does not match.

Exit code 0: nothing that was checked is wrong. 1: something is wrong, nothing was found, or the storage failed. 2:
CONFIG or the options are wrong, or several keys begin so. 130: interrupted.
"""


class FoundShard(NamedTuple):
    """A shard, and what it belongs to."""

    inspector: Inspector
    namespace: NamespaceInfo
    chunk: ChunkInfo
    shard: ShardInfo


def add_stat(commands: Commands) -> None:
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
    missing = list(_missing(found)) if arguments.verify else []
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
    if not re.fullmatch("[0-9a-f]{4,128}", digits):
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


def _missing(found: list[FoundShard]) -> Iterator[dict[str, Any]]:
    """Yield the ranks that must have a shard of the chunk, and have none."""
    chunks = {(item.inspector.where, item.namespace.path, item.chunk.key): item for item in found}
    for (where, namespace, key), item in chunks.items():
        for rank in sorted({*item.namespace.holders(key_group(key))} - {shard.rank for shard in item.chunk.shards}):
            yield {"tier": item.inspector.kind, "where": where, "namespace": namespace, "rank": rank}


def _decode(found: FoundShard, arguments: argparse.Namespace, keys: ChunkKeys | None) -> dict[str, Any]:
    """Return a shard as plain data."""
    inspector, namespace, chunk, shard = found
    plain: dict[str, Any] = {
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
        plain["wrong"].append(str(error))
        return plain
    plain["fields"] = fields_of(page)
    if len(plain["fields"]) > 1:
        sums = block_checksums_of(page)
        plain["block_checksums"] = [f"{value:016x}" for value in sums] if arguments.blocks else len(sums)
    if (words := namespace.why_no_shard(chunk.key, shard.rank)) is not None:
        plain["wrong"].append(f"rank: {words}")
    try:
        check_header(page, namespace, chunk, shard)
    except FormatError as error:
        plain["wrong"].append(f"{error.reason}: {error}")
    if arguments.verify:
        macs = None if inspector.exclusive else Macs(keys)
        fault = check_shard(inspector.read_into, namespace, chunk, shard, buffer, macs)
        if fault is not None and fault.reason == NO_KEY:
            plain["no_key"], fault = fault.words, None
        plain["verified"] = fault is None
        if fault is not None and f"{fault.reason}: {fault.words}" not in plain["wrong"]:
            plain["wrong"].append(f"{fault.reason}: {fault.words}")
    return plain


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
    for name, value in shard["fields"].items():
        lines.append((name, f"{value}   ({moment(value)})" if name == "created" else str(value)))
    sums = shard.get("block_checksums", [])
    if isinstance(sums, int):
        lines.append(("block checksums", f"{sums}; --blocks lists them"))
    else:
        lines += [(f"block {number}", value) for number, value in enumerate(sums)]
    if shard["verified"] is not None:
        words = "every block verifies" if shard["verified"] else "does not verify"
        lines.append(("payload", f"{words}; {shard['no_key']}" if "no_key" in shard else words))
    for name, text in lines:
        print(f"    {name:<18}{text}", file=out)
    for words in shard["wrong"]:
        print(f"    WRONG  {printable(words, 600)}", file=out)
    print(file=out)


def fields_of(page: memoryview) -> dict[str, str | int]:
    """Return what a header page says, field by field as docs/format.md lists them, whether it is right or not."""
    if bytes(page[:8]) != MAGIC:
        return {"magic": bytes(page[:8]).hex()}
    version, header_bytes, algorithm, flags = struct.unpack_from("<4H", page, 8)
    group, blocks, first_valid, block_bytes, payload_bytes, created_s, key_bytes = struct.unpack_from(
        "<IHHQQQH", page, 48
    )
    (stated,), mac_key = struct.unpack_from("<Q", page, OWN_CHECKSUM_AT), stated_key_id(page)
    return {
        "magic": MAGIC.decode(),
        "version": version,
        "header bytes": header_bytes,
        "algorithm": algorithm,
        "flags": flags,
        "namespace digest": bytes(page[16:48]).hex(),
        "group": group,
        "blocks": blocks,
        "first valid block": first_valid,
        "block bytes": block_bytes,
        "payload bytes": payload_bytes,
        "created": created_s,
        "key": bytes(page[88 : 88 + min(key_bytes, MAX_KEY_BYTES)]).hex(),
        **({"MAC by key": mac_key.hex()} if any(mac_key) else {}),
        "header checksum": f"{stated:016x}",
    }


def block_checksums_of(page: memoryview) -> list[int]:
    """Return the checksums that a header page lists, as far as its count of blocks is possible."""
    (blocks,) = struct.unpack_from("<H", page, 52)
    return list(struct.unpack_from(f"<{min(blocks, MAX_BLOCKS_PER_CHUNK)}Q", page, CHECKSUMS_AT))
