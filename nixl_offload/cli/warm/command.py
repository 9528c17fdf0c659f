"""``nixl-offload warm CONFIG``: copies chunks from a bucket or a shared directory into a nearer tier, ahead of traffic.

Threading: the main thread decides, threads of ``cli.warm.copy`` carry.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, TextIO

from nixl_offload.cli.common import open_existing
from nixl_offload.cli.gc.collect import model_words, shown
from nixl_offload.cli.terminal import Progress, about_size, plural, rate_argument, size_argument
from nixl_offload.config import Config, S3Config, SharedDirConfig, SlabConfig, load_config
from nixl_offload.errors import ConfigError

if TYPE_CHECKING:
    from nixl_offload.cli.warm.copy import Copied
    from nixl_offload.cli.warm.source import Selection
    from nixl_offload.identity.namespace import Namespace

_NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
_EACH_S: Final = 0.2
_EACH_LOG_LINE_S: Final = 10.0
_DESCRIPTION = """\
Copies chunks of one namespace from the shared tier of CONFIG (a bucket, or a shared directory) into its
nearer tier, so that a new server finds them close by, and checks every byte on the way: header, identity, checksums.

    nixl-offload warm kv.yaml                                 # from the bucket into the directory of kv.yaml
    nixl-offload warm kv.yaml --namespace 0f3a...             # where the bucket holds several; gc lists them
    nixl-offload warm kv.yaml --from /mnt/shared/kv           # from a shared directory that CONFIG does not name
    nixl-offload warm kv.yaml --max-size 200GiB --rate 500MB/s
    nixl-offload ls kv.yaml --tier s3 --keys --json | grep ... | nixl-offload warm kv.yaml --keys -

Into a shared directory it copies beside running servers. A slab belongs to one engine at a time: stop the
server first; all ranks' slabs of this machine are filled. Memory cannot be warmed from outside: what a server loads
from a farther tier it keeps there by itself.

The newest chunks come first, until the tier's capacity, or --max-size, is reached; nothing that is there makes room.
What is there already is skipped, so that an interrupted run goes on where it was.

Exit code 0: done. 1: the storage failed, or a chunk is damaged in the source (nixl-offload verify finds those); run
again. 2: CONFIG or the options are wrong. 130: interrupted; what was copied stays.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``warm`` to the command line."""
    parser = commands.add_parser(
        "warm",
        help="copy chunks from a bucket or shared directory into a nearer tier",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="CONFIG", help="the YAML config")
    parser.add_argument("--from", dest="source", metavar="TIER", help="s3, or the absolute path of a shared directory")
    parser.add_argument("--to", dest="target", metavar="TIER", help="slab or shared_dir; default: the one of CONFIG")
    parser.add_argument("--namespace", metavar="NAME", help="which namespace; needed where the source holds several")
    parser.add_argument(
        "--keys", metavar="LIST", help="copy these: a file (or -), a key in hex per line, or what ls --keys prints"
    )
    parser.add_argument(
        "--max-size",
        metavar="SIZE",
        type=size_argument,
        help="the namespace holds at most so much in the nearer tier afterwards; default: what the capacity leaves",
    )
    parser.add_argument("--rate", metavar="SIZE/s", type=rate_argument, help="read no faster, such as 500MB/s")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``. Raises ConfigError, StoreError and TierError (nothing was copied yet), KeyboardInterrupt."""
    if arguments.namespace is not None and not _NAMESPACE.fullmatch(arguments.namespace):
        raise ConfigError(
            f"--namespace: {shown(arguments.namespace)!r} is not one; allowed: 32 hex digits, as gc prints"
        )
    config = load_config(arguments.file)
    source, target_tier = _tiers(config, arguments)
    from nixl_offload.cli.verify.judge import Throttle
    from nixl_offload.cli.warm import source as warm_source
    from nixl_offload.cli.warm.copy import Copied, copy_all
    from nixl_offload.cli.warm.target import held_namespaces, open_target

    counting, progress, copied = Progress(sys.stderr), _Progress(sys.stderr), Copied()
    store = open_existing(source)
    try:
        namespace = warm_source.choose_namespace(store, arguments.namespace, held_namespaces(target_tier))
        target = open_target(target_tier, namespace, arguments.max_size, replace=arguments.namespace is not None)
        try:
            if arguments.keys is not None:
                selection = warm_source.listed_keys(arguments.keys, namespace)
            else:
                selection = warm_source.newest_first(
                    store,
                    namespace,
                    max_bytes=min(target_tier.capacity_bytes, arguments.max_size or target_tier.capacity_bytes),
                    ttl_s=source.ttl_s if isinstance(source, S3Config) else None,
                    report=counting,
                )
            counting.clear()
            try:
                copy_all(
                    store,
                    target,
                    namespace,
                    selection.candidates,
                    copied,
                    throttle=Throttle(arguments.rate),
                    report=progress,
                )
            finally:
                progress.clear()
                _tell(arguments, store.where, target.where, namespace, selection, copied, out)
        finally:
            target.close()
    finally:
        counting.clear()
        store.close()
    return 1 if copied.failed or copied.damaged or copied.gave_up else 0


def _tiers(
    config: Config, arguments: argparse.Namespace
) -> tuple[S3Config | SharedDirConfig, SlabConfig | SharedDirConfig]:
    """Return where to copy from and to. Raises ConfigError."""
    file = arguments.file
    if arguments.target == "memory":
        raise ConfigError(
            "--to: memory cannot be warmed from outside: it belongs to the server's process, which keeps in it what it "
            "loads from a farther tier (promote)"
        )
    target = next((tier for tier in config.tiers if isinstance(tier, SlabConfig | SharedDirConfig)), None)
    if target is None:
        raise ConfigError(f"{file}: tiers: none has kind: slab or shared_dir, so there is nothing to warm")
    if arguments.target not in (None, target.kind):
        raise ConfigError(f"--to: {shown(arguments.target)!r} cannot be warmed; allowed: {target.kind}")
    source = next((tier for tier in config.tiers if isinstance(tier, S3Config)), None)
    wanted = arguments.source
    if wanted is not None and os.path.isabs(wanted):
        path = os.path.normpath(wanted)
        if os.path.realpath(path) == os.path.realpath(target.path):
            raise ConfigError(f"--from: {wanted!r} is the directory to be warmed")
        return SharedDirConfig(kind="shared_dir", path=path, capacity=target.capacity_bytes), target
    if wanted not in (None, "s3"):
        which = "is the tier to be warmed" if wanted == target.kind else "is no tier"
        raise ConfigError(f"--from: {shown(wanted)!r} {which}; allowed: s3, or the absolute path of a shared directory")
    if source is None:
        raise ConfigError(
            f"{file}: tiers: none has kind: s3 behind the directory; say --from with the path of a shared directory"
        )
    return source, target


def _tell(
    arguments: argparse.Namespace,
    source: str,
    target: str,
    namespace: Namespace,
    selection: Selection,
    copied: Copied,
    out: TextIO,
) -> None:
    left_out = {name: getattr(selection, name) for name in ("incomplete", "expired", "surplus", "unknown")}
    if arguments.json:
        plain: dict[str, Any] = {
            "from": source,
            "to": target,
            "namespace": namespace.name,
            **asdict(copied),
            "left_out": left_out,
        }
        print(json.dumps(plain, indent=2), file=out)
        return
    fields = namespace.fields
    print(f"{source} -> {target}", file=out)
    print(f"Namespace {namespace.name}: tenant {shown(fields.tenant)}, model {model_words(asdict(fields))}.", file=out)
    speed = f", {about_size(int(copied.copied_bytes / copied.seconds))}/s" if copied.seconds > 0.05 else ""
    size = about_size(copied.copied_bytes)
    print(f"Copied: {plural(copied.copied, 'chunk')}, {size} in {copied.seconds:.1f} s{speed}.", file=out)
    for count, words in (
        (copied.present, "were there already"),
        (copied.gone, "not in the source, or deleted meanwhile"),
        (copied.no_room + selection.surplus, "left out, the oldest: no room for them"),
        (selection.incomplete, "incomplete in the source: no server could load them"),
        (selection.expired, "past the ttl"),
        (selection.unknown, "keys of no KV group of this namespace"),
        (copied.damaged, "damaged in the source, and not copied; nixl-offload verify finds them"),
        (copied.failed, "failed"),
    ):
        if count:
            print(f"  {count:,} {words}", file=out)
    for words in copied.failures:
        print(f"nixl-offload: {words}", file=sys.stderr)
    if copied.interrupted or copied.gave_up:
        print("Not finished; run it again to go on.", file=out)


class _Progress:
    """One line that is written over on a terminal; a line every ten seconds in a log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._began_s = time.monotonic()
        self._pause_s = _EACH_S if self._terminal else _EACH_LOG_LINE_S
        self._next_s = self._began_s + self._pause_s

    def __call__(self, copied: Copied) -> None:
        """Show how far it is, unless something was shown just now."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        speed = copied.copied_bytes / max(now_s - self._began_s, 0.001)
        text = (
            f"{copied.done:,} of {plural(copied.total, 'chunk')}, {about_size(copied.copied_bytes)} copied, "
            f"{about_size(int(speed))}/s"
        )
        self._stream.write(f"\r\x1b[K{text}" if self._terminal else f"nixl-offload: {text}\n")
        self._stream.flush()
        self._next_s = now_s + self._pause_s

    def clear(self) -> None:
        """Leave no half line behind."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
