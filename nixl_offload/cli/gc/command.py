"""``nixl-offload gc CONFIG``: brings a bucket or a shared directory down to a size and an age, oldest first.

Threading: one thread. ``cli.gc.collection`` counts and deletes, ``tiers.shared.sweep`` decides.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any, TextIO

from nixl_offload.cli.common import Commands, add_command, add_selection, report_nothing_found, stored_tiers
from nixl_offload.cli.gc.collection import STALE_DRAFT_S, Collection
from nixl_offload.cli.terminal import about_size, duration_argument, moment, plural, size_argument
from nixl_offload.config import load_config
from nixl_offload.errors import ConfigError
from nixl_offload.stores.base import Store
from nixl_offload.tiers.kinds import open_inspector
from nixl_offload.tiers.shared.sweep import GRACE_S, Plan, Totals, make_plan
from nixl_offload.units import format_duration

_DESCRIPTION = """\
Deletes the oldest chunks of the shared tier of CONFIG (a bucket or a shared directory) until at most --max-size is
left, and every chunk older than --older-than. Without --delete it only says what it would delete. Run it every hour or
so, from one machine:

    nixl-offload gc kv.yaml                              # look
    nixl-offload gc kv.yaml --delete                     # keep to the capacity and ttl of kv.yaml
    nixl-offload gc kv.yaml --tenant blue --max-size 2TiB --delete
    nixl-offload gc kv.yaml --namespace 0f3a... --older-than 0s --delete      # all of a model that is no longer served

Servers go on meanwhile: one whose chunk is deleted computes it anew. Nothing younger than ten minutes is deleted, and
nothing that is not named like a chunk of ours. A chunk is as old as its last write. In a bucket with a ttl servers
refresh what they use once it is older than half the ttl, so a smaller --older-than may delete what is in use.

Exit code 0: done. 1: the storage failed or not all could be deleted (run again), or the tenant has nothing. 2: CONFIG
or the options are wrong. 130: interrupted; run again to go on.
"""


def add_gc(commands: Commands) -> None:
    """Add ``gc`` to the command line."""
    parser = add_command(commands, "gc", run, description=_DESCRIPTION)
    add_selection(parser, tenant=True)
    size, age = "leave at most so much, such as 20TiB; default: the capacity", "delete what is older, such as 7d"
    parser.add_argument("--max-size", metavar="SIZE", type=size_argument, help=size)
    parser.add_argument("--older-than", metavar="DURATION", type=duration_argument, help=f"{age}; default: the ttl")
    parser.add_argument("--delete", action="store_true", help="do it, instead of saying what would be done")


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``. Raises ConfigError, StoreError, TierError (nothing was deleted yet), KeyboardInterrupt."""
    shared = [tier for tier in stored_tiers(load_config(arguments.file), arguments) if tier.is_shared]
    kinds = [tier.kind for tier in shared]
    if len(shared) > 1:
        raise ConfigError(
            f"{arguments.file}: tiers: {' and '.join(kinds)} are both shared, and gc looks after one at a time; say "
            f"--tier {' or --tier '.join(kinds)}"
        )
    if not shared:
        raise ConfigError(
            f"{arguments.file}: tiers: gc looks after a bucket or a shared directory; a slab keeps to its capacity by "
            "itself, and a namespace of it goes with its directory, while no engine runs"
        )
    (tier,) = shared
    max_bytes = tier.capacity_bytes if arguments.max_size is None else arguments.max_size
    older_than_s = tier.ttl_s if arguments.older_than is None else arguments.older_than
    if arguments.delete and max_bytes is None and older_than_s is None:
        raise ConfigError(
            f"--delete: down to what? Say --max-size or --older-than, or capacity or ttl in {arguments.file}"
        )
    with closing(open_inspector(tier)) as inspector:
        assert inspector.store is not None, "the tier is shared"
        return collect(arguments, inspector.store, out, max_bytes=max_bytes, older_than_s=older_than_s)


def collect(
    arguments: argparse.Namespace,
    store: Store,
    out: TextIO,
    *,
    max_bytes: int | None,
    older_than_s: float | None,
) -> int:
    """Look, plan and, where asked to, delete; print to ``out``. Raises StoreError (nothing was deleted yet)."""
    found = Collection(store, namespace=arguments.namespace, tenant=arguments.tenant)
    now_s, ages = time.time(), found.count()
    plan = make_plan(ages, now_s=now_s, max_bytes=max_bytes, older_than_s=older_than_s)
    plain = _plain(found, ages.total, plan, max_bytes, older_than_s)
    if any(found.selection.values()) and not found.namespaces:
        report_nothing_found(arguments)
    if not arguments.json:
        _print_shared(plain, out)
        out.flush()
    try:
        if arguments.delete:
            found.delete(plan, now_s)
    finally:
        outcome = {
            "deleted": _totals(found.deleted),
            "manifests": found.manifests,
            "drafts": found.drafts,
            "failed_objects": found.failed_objects,
            "failures": found.failures,
            "gave_up": found.gave_up,
        }
        if arguments.json:
            print(json.dumps({**plain, "outcome": outcome if arguments.delete else None}, indent=2), file=out)
        elif arguments.delete:
            _print_outcome(found, out)
        elif plan.estimate.chunks or found.sweeps_drafts:
            drafts = " (and what writers that died have left)" if found.sweeps_drafts else ""
            print(f"Nothing was deleted; --delete does it{drafts}.", file=out)
        for failure in found.failures:
            print(f"nixl-offload: {failure}", file=sys.stderr)
    if not found.failures:
        return 1 if arguments.tenant is not None and not found.namespaces else 0
    end = "gave up after several failures in a row" if found.gave_up else "the rest went on"
    count = f"up to {plural(found.failed_objects, 'object')} not deleted; " if found.failed_objects else ""
    print(f"nixl-offload: {count}{end}; run again", file=sys.stderr)
    return 1


def _plain(
    found: Collection, total: Totals, plan: Plan, max_bytes: int | None, older_than_s: float | None
) -> dict[str, Any]:
    """Return what was found and planned. Times are seconds since the epoch, sizes bytes."""
    namespaces = [
        {
            "name": entry.info.name,
            "tenant": entry.info.tenant,
            "model": entry.info.model,
            **_totals(entry.ages.total),
            "oldest_s": entry.ages.oldest_s if math.isfinite(entry.ages.oldest_s) else None,
            "newest_s": entry.ages.newest_s if math.isfinite(entry.ages.newest_s) else None,
        }
        for entry in found.namespaces
    ]
    return {
        "where": found.where,
        "selection": found.selection,
        "namespaces": namespaces,
        "other_objects": found.other_objects,
        "total": _totals(total),
        "limits": {"max_bytes": max_bytes, "older_than_s": older_than_s},
        "plan": {"delete": _totals(plan.estimate), "keep_bytes": plan.kept_bytes, "over_bytes": plan.over_bytes},
    }


def _print_shared(plain: Mapping[str, Any], out: TextIO) -> None:
    said = " and ".join(f"{name} {value}" for name, value in plain["selection"].items() if value)
    print(f"{plain['where']}{f', {said}' if said else ''}: {_counted(plain['total'])}", file=out)
    if plain["other_objects"]:
        print(f"{plural(plain['other_objects'], 'other object')} beside them, never touched", file=out)
    for each in plain["namespaces"]:
        ages = f"written {moment(each['oldest_s'])} to {moment(each['newest_s'])}"
        owner = f"tenant {each['tenant'] or '?'}, model {each['model'] or '?'}"
        print(f"  {each['name']}  {owner}: {_counted(each)}, {ages}", file=out)
    max_bytes, older_than_s = plain["limits"].values()
    limits = [] if max_bytes is None else [f"at most {about_size(max_bytes)}"]
    if older_than_s is not None:
        limits.append(f"nothing older than {format_duration(max(older_than_s, GRACE_S))}")
    none = "none; say --max-size or --older-than, or capacity or ttl in the config"
    print(f"Limits: {', '.join(limits) or none}.", file=out)
    goes, keeps, over = plain["plan"].values()
    if limits:
        words = f"{_counted(goes)} to delete" if goes["chunks"] else "nothing to delete"
        print(f"Plan: {words}; {about_size(keeps)} stay.", file=out)
    if over:
        print(
            f"That is {about_size(over)} too much, but what is left was written or refreshed within the last "
            f"{format_duration(GRACE_S)}; later runs will get to it.",
            file=out,
        )


def _print_outcome(found: Collection, out: TextIO) -> None:
    print(f"Deleted: {_counted(_totals(found.deleted))}.", file=out)
    if found.manifests:
        print(f"Deleted: {plural(found.manifests, 'manifest')} of namespaces that are empty.", file=out)
    if found.drafts:
        age = format_duration(STALE_DRAFT_S)
        print(f"Deleted: {plural(found.drafts, 'draft')} older than {age}, of writers that died.", file=out)


def _totals(totals: Totals) -> dict[str, int]:
    return {"chunks": totals.chunks, "objects": totals.objects, "bytes": totals.size_bytes}


def _counted(found: Mapping[str, Any]) -> str:
    chunks, objects = plural(found["chunks"], "chunk"), plural(found["objects"], "object")
    return f"{chunks} in {objects}, {about_size(found['bytes'])}"
