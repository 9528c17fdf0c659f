"""``nixl-offload warm CONFIG``: copies chunks from a bucket or a shared directory into a nearer tier, ahead of traffic.

Threading: one thread here; ``copying`` has threads that copy a chunk each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import closing
from dataclasses import asdict
from typing import TextIO

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.chunk.key_file import read_key_file
from nixl_offload.cli.common import Commands, add_command, check_namespace
from nixl_offload.cli.terminal import Progress, about_size, plural, rate_argument, size_argument
from nixl_offload.cli.warm.copying import Warming, WarmReport
from nixl_offload.cli.warm.source import choose_namespace, newest_first
from nixl_offload.cli.warm.target import held_namespaces, open_target
from nixl_offload.config import Config, SharedConfig, SharedDirConfig, SlabConfig, load_config, parse_config
from nixl_offload.errors import ConfigError
from nixl_offload.identity.namespace import Namespace
from nixl_offload.tiers.inspect import NamespaceInfo, printable
from nixl_offload.tiers.kinds import open_inspector

_DESCRIPTION = """\
Copies chunks of one namespace from the shared tier of CONFIG (a bucket or a shared directory) into its nearer tier, so
that a new server finds them close by, and checks every byte on the way: header, identity, checksums.

    nixl-offload warm kv.yaml                                 # from the bucket into the directory of kv.yaml
    nixl-offload warm kv.yaml --namespace 0f3a...             # where the bucket holds several; ls lists them
    nixl-offload warm kv.yaml --from /mnt/shared/kv           # from a shared directory that CONFIG does not name
    nixl-offload warm kv.yaml --max-size 200GiB --rate 500MB/s

Into a shared directory it copies beside running servers. A slab belongs to one engine at a time: stop the server first;
the slabs of all ranks of this machine are filled. Memory cannot be warmed from outside: the server keeps there by
itself what it loads from a farther tier.

The newest chunks come first, until the tier's capacity, or --max-size, is reached; nothing that is there makes room.
What is there already is skipped, so an interrupted run continues where it was.

Exit code 0: done. 1: the storage failed, or a chunk is damaged in the source (nixl-offload verify finds those); run
again. 2: CONFIG or the options are wrong. 130: interrupted; what was copied stays.
"""


def add_parser(commands: Commands) -> None:
    """Add ``warm`` to the command line."""
    parser = add_command(commands, "warm", run, description=_DESCRIPTION)
    parser.add_argument("--from", dest="source", metavar="TIER", help="s3, or the absolute path of a shared directory")
    parser.add_argument("--namespace", metavar="NAME", help="which namespace; needed where the source holds several")
    parser.add_argument(
        "--max-size",
        metavar="SIZE",
        type=size_argument,
        help="the namespace holds at most so much in the nearer tier afterwards; default: what the capacity leaves",
    )
    parser.add_argument("--rate", metavar="SIZE/s", type=rate_argument, help="read no faster, such as 500MB/s")


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``. Raises ConfigError, StoreError and TierError (nothing was copied yet), KeyboardInterrupt."""
    check_namespace(arguments.namespace)
    config = load_config(arguments.file)
    source_tier, target_tier = _tiers(config, arguments)
    progress = Progress(sys.stderr)
    with closing(open_inspector(source_tier)) as source:
        assert source.store is not None, "only shared tiers are sources"
        info, namespace = choose_namespace(source, arguments.namespace, held_namespaces(target_tier.path))
        keys = _keys(config, namespace, arguments.file)
        replace = arguments.namespace is not None
        with closing(open_target(target_tier, namespace, arguments.max_size, replace=replace)) as target:
            capacity = target_tier.capacity_bytes
            max_bytes = capacity if arguments.max_size is None else min(capacity, arguments.max_size)
            try:
                chunks, left_out = newest_first(source, info, namespace, max_bytes, source_tier.ttl_s, progress)
            finally:
                progress.clear()
            warming = Warming(source.store, target, namespace, arguments.rate, progress, keys)
            warming.report.left_out = left_out
            try:
                warming.run(chunks)
            finally:
                progress.clear()
                _print_report(arguments, source.where, target.where, info, warming.report, out)
    report = warming.report
    return 1 if report.failed or report.damaged or report.gave_up else 0


def _tiers(config: Config, arguments: argparse.Namespace) -> tuple[SharedConfig, SlabConfig | SharedDirConfig]:
    """Return where to copy from and to: into the nearest directory. Raises ConfigError."""
    file, wanted = arguments.file, arguments.source
    target = next(iter(config.directories), None)
    if target is None:
        raise ConfigError(f"{file}: tiers: none has kind: slab or shared_dir, so there is nothing to warm")
    if wanted is not None and os.path.isabs(wanted):
        tier = {"kind": "shared_dir", "path": wanted, "capacity": target.capacity_bytes}
        [named] = parse_config({"tiers": [tier]}, "--from").shared
        if os.path.realpath(wanted) == os.path.realpath(target.path):
            raise ConfigError(f"--from: {wanted!r} is the directory to be warmed")
        return named, target
    if wanted not in (None, "s3"):
        raise ConfigError(f"--from: {printable(wanted)!r}: allowed: s3, or the absolute path of a shared directory")
    source = config.s3 if wanted else next((tier for tier in config.shared[::-1] if tier is not target), None)
    if source is None:
        why = "no shared tier behind the directory; say --from with the path of a shared directory"
        raise ConfigError(f"{file}: tiers: {why}")
    return source, target


def _keys(config: Config, namespace: Namespace, file: str) -> ChunkKeys | None:
    """Return what MACs are checked with; None: the namespace has none. Raises ConfigError where there are no keys: a
    slab's chunks are believed without a MAC, so what comes there must have had one.
    """
    if "authenticate" not in namespace.fields.settings:
        return None
    if config.authenticate is None:
        raise ConfigError(f"{file}: authenticate: chunks of {namespace.name} have MACs; say whose key_file checks them")
    return read_key_file(config.authenticate.key_file)


def _print_report(
    arguments: argparse.Namespace, source: str, target: str, info: NamespaceInfo, report: WarmReport, out: TextIO
) -> None:
    if arguments.json:
        plain = {"from": source, "to": target, "namespace": info.name, **asdict(report)}
        print(json.dumps(plain, indent=2), file=out)
        return
    print(f"{source} -> {target}", file=out)
    print(f"Namespace {info.name}: {info.owner}.", file=out)
    speed = f", {about_size(int(report.copied_bytes / report.seconds))}/s" if report.seconds > 0.05 else ""
    size = about_size(report.copied_bytes)
    print(f"Copied: {plural(report.copied, 'chunk')}, {size} in {report.seconds:.1f} s{speed}.", file=out)
    for count, words in (
        (report.present, "were there already"),
        (report.gone, "deleted in the source meanwhile"),
        (report.no_room + report.left_out["surplus"], "left out, the oldest: no room for them"),
        (report.left_out["incomplete"], "incomplete in the source: no server could load them"),
        (report.left_out["expired"], "past the ttl"),
        (report.damaged, "damaged in the source, and not copied; nixl-offload verify finds them"),
        (report.failed, "failed"),
    ):
        if count:
            print(f"  {count:,} {words}", file=out)
    for words in report.failures:
        print(f"nixl-offload: {words}", file=sys.stderr)
    if report.interrupted or report.gave_up:
        print("Not finished; run it again to go on.", file=out)
