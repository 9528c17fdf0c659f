"""``nixl-offload stat CONFIG KEY``: what the headers of one chunk's shards say, and what is wrong with them.

docs/format.md explains the fields; ``cli.shard`` says what is wrong. Threading: one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from functools import partial
from typing import Any, Final, TextIO

from nixl_offload.chunk.authentication import ChunkKeys, stated_key_id
from nixl_offload.chunk.header import HEADER_BYTES, decode_header
from nixl_offload.cli.common import (
    Commands,
    TierFailure,
    about_size,
    add_command,
    add_selection,
    keys_of,
    moment,
    selected,
    visit,
)
from nixl_offload.cli.shard import NO_KEY, Buffer, Macs, check_shard
from nixl_offload.config import load_config
from nixl_offload.errors import ConfigError, FormatError, StoreError
from nixl_offload.tiers.inspect import ChunkInfo, Inspector, NamespaceInfo, ShardInfo, printable
from nixl_offload.types import key_group

_KEYS_SHOWN: Final = 4
"""Of several that begin alike."""
_DESCRIPTION = """\
Prints the header of every shard of one chunk, field by field. Reads the chunk, checks every block, and says what is
wrong.

    nixl-offload stat kv.yaml 5f3a9c01                     # a key in hex, or its first digits: four at least

It works beside running servers, which may give a slot to another chunk meanwhile: then the key does not match.

Exit code 0: nothing is wrong. 1: something is wrong, nothing was found, or the storage failed. 2: CONFIG or the options
are wrong, or several keys begin so. 130: interrupted.
"""


def add_stat(commands: Commands) -> None:
    """Add ``stat`` to the command line."""
    parser = add_command(commands, "stat", run, description=_DESCRIPTION)
    parser.add_argument("key", metavar="KEY", help="key in hex, or its first digits")
    add_selection(parser, tenant=False)


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``. Raises ConfigError, StoreError."""
    config = load_config(arguments.file)
    digits = arguments.key.lower().removeprefix("0x")
    if not re.fullmatch("[0-9a-f]{4,128}", digits):
        raise ConfigError("KEY: allowed: a key in hex, or its first digits, four at least")
    tiers = list(visit(arguments, config, partial(_look, arguments, digits, keys_of(config))))
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
    plain = []
    for namespace, chunk in found:
        place = {"tier": inspector.kind, "where": inspector.where, "namespace": namespace.path}
        shards = list[dict[str, Any]]()
        if len({chunk.key for _, chunk in found}) == 1:
            shards = [place | _decode(inspector, namespace, chunk, each, buffer, macs) for each in chunk.shards]
        absent = {*namespace.holders(key_group(chunk.key))} - {shard.rank for shard in chunk.shards}
        missing = [{**place, "rank": rank} for rank in sorted(absent)]
        plain.append({"key": chunk.key.hex(), "shards": shards, "missing": missing})
    return plain


def _decode(
    inspector: Inspector,
    namespace: NamespaceInfo,
    chunk: ChunkInfo,
    shard: ShardInfo,
    buffer: Buffer,
    macs: Macs | None,
) -> dict[str, Any]:
    """Return a shard, and what is wrong with it, as plain data."""
    fields, page = dict[str, str | int](), buffer.memory[:HEADER_BYTES]
    with contextlib.suppress(FormatError, StoreError):  # ``check_shard`` says so
        inspector.read_into(shard, 0, page)
        fields = _fields_of(page)
    fault = check_shard(inspector.read_into, namespace, chunk, shard, buffer, macs)
    rank_words = namespace.why_no_shard(chunk.key, shard.rank)
    wrong = [] if rank_words is None else [f"rank: {rank_words}"]
    no_key = fault.words if fault and fault.reason == NO_KEY else None
    if fault and not no_key:
        wrong.append(f"{fault.reason}: {fault.words}")
    return {
        "tenant": namespace.tenant,
        "model": namespace.model,
        "place": shard.place,
        "rank": shard.rank,
        "bytes": shard.size_bytes,
        "modified_s": shard.modified_s,
        "fields": fields,
        "wrong": wrong,
        "no_key": no_key,
    }


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
    if not shard["wrong"]:
        lines.append(("payload", "every block verifies" + (f"; {shard['no_key']}" if shard["no_key"] else "")))
    for name, text in lines:
        print(f"    {name:<18}{text}", file=out)
    for words in shard["wrong"]:
        print(f"    WRONG  {printable(words, 600)}", file=out)
    print(file=out)
