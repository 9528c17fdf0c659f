"""``nixl-offload stat CONFIG KEY``: prints the headers of one chunk's shards and checks the shards.

docs/format.md explains the fields. Threading: one thread.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import re
from argparse import ArgumentParser, Namespace
from typing import Any, Final

from nixl_offload.chunk.authentication import stated_key_id
from nixl_offload.chunk.header import HEADER_BYTES, decode_header
from nixl_offload.cli.common import TierFailure, about_size, add_selection, keys_of, moment, selected, set_up, visit
from nixl_offload.cli.shard import NO_KEY, ChunkChecker
from nixl_offload.config import load_config
from nixl_offload.errors import ConfigError, FormatError, StoreError
from nixl_offload.tiers.inspect import Inspector, ShardInfo, printable

_KEYS_SHOWN: Final = 4
"""How many keys are shown if several begin with the given digits."""
_DESCRIPTION = """\
Prints the header of every shard of one chunk, field by field. Reads the chunk, checks every block, and says what is
wrong.

    nixl-offload stat kv.yaml 5f3a9c01                     # a key in hex, or its first digits: four at least

Servers may run meanwhile. If one reuses the slot for another chunk during the check, the key does not match.
"""


def add_stat(parser: ArgumentParser) -> None:
    """Add the arguments of ``stat`` to ``parser``."""
    set_up(parser, run, _DESCRIPTION)
    parser.add_argument("key", metavar="KEY", help="key in hex, or its first digits")
    add_selection(parser)


def run(arguments: Namespace) -> int:
    """Print a chunk's shards. Raises ConfigError, StoreError."""
    config = load_config(arguments.file)
    keys, digits = keys_of(config), arguments.key.lower().removeprefix("0x")
    if not re.fullmatch("[0-9a-f]{4,128}", digits):
        raise ConfigError("KEY: allowed: a key in hex, or its first digits, four at least")
    found, shards, missing, failures = set[str](), list[dict[str, Any]](), list[dict[str, Any]](), list[str]()

    def look(inspector: Inspector) -> None:
        """Find chunks by their keys' first digits. If there is only one key, check its chunk."""
        checker = ChunkChecker(inspector, keys)
        chunks = [
            (namespace, chunk)
            for namespace in selected(inspector, arguments)
            for chunk in inspector.find(namespace, digits, _KEYS_SHOWN)
        ]
        found.update(chunk.key.hex() for _, chunk in chunks)
        for namespace, chunk in chunks if len(found) == 1 else ():
            place = {"tier": inspector.kind, "where": inspector.where, "namespace": namespace.path}
            owner = {"tenant": namespace.tenant, "model": namespace.model}
            faults = checker.check(namespace, chunk)
            missing.extend({**place, "shard": fault.shard} for fault in faults if not fault.place)
            for shard in chunk.shards:
                of_shard = [fault for fault in faults if fault.place == shard.place]
                shards.append(
                    {
                        **place,
                        **owner,
                        "place": shard.place,
                        "shard": shard.number,
                        "bytes": shard.size_bytes,
                        "modified_s": shard.modified_s,
                        "fields": _fields_of(inspector, shard),
                        "wrong": [f"{fault.reason}: {fault.words}" for fault in of_shard if fault.reason != NO_KEY],
                        "no_key": next((fault.words for fault in of_shard if fault.reason == NO_KEY), None),
                    }
                )

    for visited in visit(arguments, config, look):
        failures += [visited.words] if isinstance(visited, TierFailure) else []
    if len(found) > 1:
        raise ConfigError(f"KEY: several begin so: {', '.join(sorted(found)[:_KEYS_SHOWN])}")
    if not found and not failures:
        raise StoreError(f"no key that begins with {digits} is there", cause="missing")
    if arguments.json:
        said = {"shards": shards, "missing": missing, "failures": failures} if found else {"error": "; ".join(failures)}
        print(json.dumps(said, indent=2))
    else:
        for each in shards:
            _print(each)
        for each in missing:
            print(f"WRONG  {each['where']}, {each['namespace']}: shard {each['shard']}: missing")
    return 1 if failures or missing or any(each["wrong"] for each in shards) else 0


def _fields_of(inspector: Inspector, shard: ShardInfo) -> dict[str, str | int]:
    """Return the fields of a shard's header page; empty if it is not a header or cannot be read."""
    page = memoryview(mmap.mmap(-1, HEADER_BYTES))
    with contextlib.suppress(FormatError, StoreError):  # the checker reports these
        inspector.read_into(shard, 0, page)
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
    return {}


def _print(shard: dict[str, Any]) -> None:
    print(printable(shard["place"], 4096))
    lines = [
        ("tier", f"{shard['tier']}, {shard['where']}"),
        ("namespace", f"{shard['namespace']}: tenant {shard['tenant'] or '?'}, model {shard['model'] or '?'}"),
        ("shard", f"{shard['shard']}"),
        ("size", f"{shard['bytes']:,} bytes ({about_size(shard['bytes'])})"),
    ]
    if shard["modified_s"] is not None:
        lines.append(("modified", moment(shard["modified_s"])))
    for name, value in shard["fields"].items():
        lines.append((name, f"{value}   ({moment(value)})" if name == "created" else str(value)))
    if not shard["wrong"]:
        lines.append(("payload", "every block verifies" + (f"; {shard['no_key']}" if shard["no_key"] else "")))
    for name, text in lines:
        print(f"    {name:<18}{text}")
    for words in shard["wrong"]:
        print(f"    WRONG  {printable(words, 600)}")
    print()
