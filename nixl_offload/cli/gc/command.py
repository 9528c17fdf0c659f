"""``nixl-offload gc CONFIG``: brings a bucket or a shared directory down to a size and an age, oldest first.

Threading: one thread. ``cli.gc.collect`` does the work, ``tiers.sweep`` decides; ``cli.gc.slab`` is for slabs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from typing import Final, TextIO

from nixl_offload.cli.common import collected_tier, open_existing, tell_of_nothing
from nixl_offload.cli.gc.collect import Outcome, collect, remove_stale_drafts, take_census
from nixl_offload.cli.gc.report import GcReport
from nixl_offload.cli.gc.slab import run_on_slab
from nixl_offload.cli.terminal import Progress, duration_argument, size_argument
from nixl_offload.config import S3Config, SharedDirConfig, SlabConfig, load_config
from nixl_offload.errors import ConfigError
from nixl_offload.tiers.shared.sweep import make_plan

_NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
_DESCRIPTION = """\
Counts what the shared tier of CONFIG holds (a bucket, or a shared directory), by namespace, and deletes
the oldest chunks until at most --max-size is left, and every chunk older than --older-than. Without --delete it
only says what it would delete. Run it every hour or so, from one machine:

    nixl-offload gc kv.yaml                              # look
    nixl-offload gc kv.yaml --delete                     # keep to the capacity and ttl of kv.yaml
    nixl-offload gc kv.yaml --tenant blue --max-size 2TiB --delete
    nixl-offload gc kv.yaml --namespace 0f3a... --older-than 0s --delete      # all of a model that is no longer served
    nixl-offload gc kv.yaml --tier s3 --delete           # CONFIG has a shared directory and a bucket: one run each

Servers go on meanwhile: one whose chunk is deleted computes it anew. Nothing of the last ten minutes is deleted, by
the clock of this machine, and nothing that is not named like a chunk of ours. A chunk is as old as its last refresh.
A namespace that has been empty for a day loses its manifest; a tree, what writers that died an hour ago left.
Memory does not grow with the number of objects; the listing is read twice.

A slab keeps to its capacity by itself, but whole namespaces of models that are no longer served may lie
there. gc lists them with their last use, and removes those chosen while no engine has the directory open:

    nixl-offload gc kv.yaml                              # a slab, if CONFIG has nothing shared; else say --tier slab
    nixl-offload gc kv.yaml --older-than 30d --delete    # not opened by an engine for so long
    nixl-offload gc kv.yaml --namespace 0f3a... --delete

Exit code 0: done, a look included. 1: the storage failed, or not all could be deleted; run again. 2: CONFIG or the
options are wrong. 130: interrupted; what is deleted is deleted, run again to go on.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``gc`` to the command line."""
    parser = commands.add_parser(
        "gc",
        help="delete the oldest chunks of a bucket or shared directory, unused namespaces of a slab",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="CONFIG", help="the YAML config")
    parser.add_argument(
        "--max-size",
        metavar="SIZE",
        type=size_argument,
        help="leave at most so much, such as 20TiB; default: the capacity",
    )
    parser.add_argument(
        "--older-than",
        metavar="DURATION",
        type=duration_argument,
        help="delete what is older, such as 7d; default: the ttl. Slab: not opened for so long",
    )
    parser.add_argument("--namespace", metavar="NAME", help="look at one namespace only; SIZE counts for it alone")
    parser.add_argument("--tenant", help="look at the namespaces of one tenant only; SIZE counts for them together")
    parser.add_argument(
        "--tier",
        choices=("slab", "shared_dir", "s3"),
        help="which tier of CONFIG; needed if it has a shared directory and a bucket",
    )
    parser.add_argument("--delete", action="store_true", help="do it, instead of saying what would be done")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``. Raises ConfigError, StoreError (nothing was deleted yet), KeyboardInterrupt."""
    _check_namespace(arguments)
    tier = collected_tier(load_config(arguments.file), arguments.file, arguments.tier)
    if isinstance(tier, SlabConfig):
        return run_on_slab(arguments, tier, out)
    max_bytes = tier.capacity_bytes if arguments.max_size is None else arguments.max_size
    ttl_s = tier.ttl_s if isinstance(tier, S3Config) else None
    older_than_s = ttl_s if arguments.older_than is None else arguments.older_than
    _check(arguments, max_bytes, older_than_s)
    selection: dict[str, str | None] = {"namespace": arguments.namespace, "tenant": arguments.tenant}
    progress = Progress(sys.stderr)
    store = open_existing(tier)
    try:
        census = take_census(store, namespace=arguments.namespace, tenant=arguments.tenant, report=progress)
        if any(selection.values()) and not census.namespaces:
            progress.clear()
            tell_of_nothing(arguments.namespace, arguments.tenant)
        now_s = _now_s()
        plan = make_plan(census.ages(), now_s=now_s, max_bytes=max_bytes, older_than_s=older_than_s)
        report = GcReport(
            store.where, selection, census, max_bytes, older_than_s, plan, tree=isinstance(tier, SharedDirConfig)
        )
        progress.clear()
        if not arguments.json:
            report.print_findings(out)
            out.flush()
        try:
            if arguments.delete:
                report.outcome = Outcome()
                collect(store, census, plan, report.outcome, now_s=now_s, report=progress)
                if not any(selection.values()):
                    remove_stale_drafts(store, report.outcome)
        finally:
            progress.clear()
            if arguments.json:
                print(json.dumps(report.to_dict(), indent=2), file=out)
            else:
                report.print_outcome(out)
            report.print_failures(sys.stderr)
        return 1 if report.outcome and report.outcome.failures else 0
    finally:
        progress.clear()
        store.close()


def _now_s() -> float:
    return time.time()


def _check_namespace(arguments: argparse.Namespace) -> None:
    if arguments.namespace is not None and not _NAMESPACE.fullmatch(arguments.namespace):
        raise ConfigError(f"--namespace: {arguments.namespace!r} is not one; allowed: 32 hex digits, as gc prints them")


def _check(arguments: argparse.Namespace, max_bytes: int | None, older_than_s: float | None) -> None:
    if arguments.delete and max_bytes is None and older_than_s is None:
        raise ConfigError(
            f"--delete: down to what? Say --max-size or --older-than, or capacity or ttl in {arguments.file}"
        )
