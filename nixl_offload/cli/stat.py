"""``nixl-offload stat CONFIG KEY``: what the headers of one chunk's shards say, and what is wrong with them.

The fields are those of docs/format.md; ``verify.shard`` says what is wrong. Threading: one thread.
"""

from __future__ import annotations

import argparse
import json
import re
from functools import partial
from typing import Any, Final, TextIO

from nixl_offload.chunk.authentication import ChunkKeys, stated_key_id
from nixl_offload.chunk.header import HEADER_BYTES, decode_header
from nixl_offload.cli.common import Commands, TierFailure, add_command, add_selection, keys_of, selected, visit
from nixl_offload.cli.terminal import about_size, moment
from nixl_offload.cli.verify.shard import NO_KEY, Buffer, Macs, check_header, check_shard
from nixl_offload.config import load_config
from nixl_offload.errors import ConfigError, FormatError, StoreError
from nixl_offload.tiers.inspect import ChunkInfo, Inspector, NamespaceInfo, ShardInfo, printable
from nixl_offload.types import key_group

_KEYS_SHOWN: Final = 4
"""Of several that begin alike."""
_DESCRIPTION = """\
Prints the header of every shard of one chunk, field by field, and what is wrong with it.

    nixl-offload stat kv.yaml 5f3a9c01                     # a key in hex, or its first digits: four at least
    nixl-offload stat kv.yaml 5f3a9c01 --verify            # reads the payload, too, and checks every block

It works beside running servers, which may give a slot to another chunk meanwhile: then the key does not match.

Exit code 0: nothing that was checked is wrong. 1: something is wrong, nothing was found, or the storage failed. 2:
CONFIG or the options are wrong, or several keys begin so. 130: interrupted.
"""


def add_stat(commands: Commands) -> None:
    """Add ``stat`` to the command line."""
    parser = add_command(commands, "stat", run, description=_DESCRIPTION)
    parser.add_argument("key", metavar="KEY", help="key in hex, or its first digits")
    add_selection(parser, tenant=False)
    parser.add_argument("--verify", action="store_true", help="read the payload and check every block")


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``. Raises ConfigError, StoreError."""
    config = load_config(arguments.file)
    digits = arguments.key.lower().removeprefix("0x")
    if not re.fullmatch("[0-9a-f]{4,128}", digits):
        raise ConfigError("KEY: allowed: a key in hex, or its first digits, four at least")
    secret = keys_of(config) if arguments.verify else None
    tiers = list(visit(arguments, config, partial(_look, arguments, digits, secret)))
    chunks = [chunk for tier in tiers if not isinstance(tier, TierFailure) for chunk in tier]
    failures = [tier.words for tier in tiers if isinstance(tier, TierFailure)]
    if not chunks and failures:
        if arguments.json:
            print(json.dumps({"error": "; ".join(failures)}), file=out)
        return 1
    if not chunks:
        raise StoreError(f"no key that begins with {digits} is there", cause="missing")
    keys = sorted({chunk["key"] for chunk in chunks})
    if len(keys) > 1:
        raise ConfigError(f"KEY: several begin so: {', '.join(keys[:_KEYS_SHOWN])}")
    shards = [shard for chunk in chunks for shard in chunk["shards"]]
    missing = [each for chunk in chunks for each in chunk["missing"]]
    if arguments.json:
        print(json.dumps({"shards": shards, "missing": missing, "failures": failures}, indent=2), file=out)
    else:
        for shard in shards:
            _print(shard, out)
        for each in missing:
            print(f"WRONG  {each['where']}, {each['namespace']}: rank {each['rank']}: missing", file=out)
    return 1 if failures or missing or any(shard["wrong"] for shard in shards) else 0


def _look(
    arguments: argparse.Namespace, digits: str, keys: ChunkKeys | None, inspector: Inspector
) -> list[dict[str, Any]]:
    """Return the chunks whose keys begin with ``digits`` as plain data. Of several only the keys count."""
    buffer, macs = Buffer(), None if inspector.exclusive else Macs(keys)
    found = [
        (namespace, chunk)
        for namespace in selected(inspector, arguments)
        for chunk in inspector.find(namespace, digits, _KEYS_SHOWN)
    ]
    is_one = len({chunk.key for _, chunk in found}) == 1
    plain = []
    for namespace, chunk in found:
        shards, missing = [], []
        if is_one:
            shards = [_decode(arguments, inspector, namespace, chunk, each, buffer, macs) for each in chunk.shards]
        if arguments.verify:
            place = {"tier": inspector.kind, "where": inspector.where, "namespace": namespace.path}
            absent = {*namespace.holders(key_group(chunk.key))} - {shard.rank for shard in chunk.shards}
            missing = [{**place, "rank": rank} for rank in sorted(absent)]
        plain.append({"key": chunk.key.hex(), "shards": shards, "missing": missing})
    return plain


def _decode(
    arguments: argparse.Namespace,
    inspector: Inspector,
    namespace: NamespaceInfo,
    chunk: ChunkInfo,
    shard: ShardInfo,
    buffer: Buffer,
    macs: Macs | None,
) -> dict[str, Any]:
    """Return a shard as plain data."""
    wrong = list[str]()
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
        "wrong": wrong,
        "verified": None,
    }
    page = buffer.memory[:HEADER_BYTES]
    try:
        inspector.read_into(shard, 0, page)
    except StoreError as error:
        if error.cause not in ("short", "missing"):
            raise
        wrong.append(str(error))
        return plain
    if (words := namespace.why_no_shard(chunk.key, shard.rank)) is not None:
        wrong.append(f"rank: {words}")
    try:
        plain["fields"] = _fields_of(page)
        check_header(page, namespace, chunk, shard)
    except FormatError as error:
        wrong.append(f"{error.reason}: {error}")
    if arguments.verify:
        fault = check_shard(inspector.read_into, namespace, chunk, shard, buffer, macs)
        if fault is not None and fault.reason == NO_KEY:
            plain["no_key"], fault = fault.words, None
        plain["verified"] = fault is None
        if fault is not None and f"{fault.reason}: {fault.words}" not in wrong:
            wrong.append(f"{fault.reason}: {fault.words}")
    return plain


def _fields_of(page: memoryview) -> dict[str, str | int]:
    """Return what a header page says. Raises FormatError: it is none that is whole."""
    header, mac_key = decode_header(page), stated_key_id(page)
    fields: dict[str, str | int] = {
        "namespace digest": header.namespace.hex(),
        "group": header.group,
        "blocks": header.blocks_per_chunk,
        "first valid block": header.first_valid_block,
        "block bytes": header.block_bytes,
        "created": header.created_s,
        "key": header.key.hex(),
    }
    return fields | ({"MAC by key": mac_key.hex()} if any(mac_key) else {})


def _print(shard: dict[str, Any], out: TextIO) -> None:
    print(printable(shard["place"], 4096), file=out)
    lines = [
        ("tier", f"{shard['tier']}, {shard['where']}"),
        ("namespace", f"{shard['namespace']}: tenant {shard['tenant'] or '?'}, model {shard['model'] or '?'}"),
        ("rank", f"{shard['rank']}"),
        ("size", f"{shard['bytes']:,} bytes ({about_size(shard['bytes'])})"),
    ]
    if shard["modified_s"] is not None:
        lines.append(("modified", moment(shard["modified_s"])))
    for name, value in shard["fields"].items():
        lines.append((name, f"{value}   ({moment(value)})" if name == "created" else str(value)))
    if shard["verified"] is not None:
        words = "every block verifies" if shard["verified"] else "does not verify"
        lines.append(("payload", f"{words}; {shard['no_key']}" if "no_key" in shard else words))
    for name, text in lines:
        print(f"    {name:<18}{text}", file=out)
    for words in shard["wrong"]:
        print(f"    WRONG  {printable(words, 600)}", file=out)
    print(file=out)
