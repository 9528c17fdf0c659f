"""``nixl-offload gc`` over a shared tier: looks, plans, deletes where asked to, and prints.

Threading: one thread; the store is the caller's. ``collection`` says what holds after an interruption.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from nixl_offload.cli.common import report_nothing_found
from nixl_offload.cli.gc.collection import STALE_DRAFT_S, Collection
from nixl_offload.cli.terminal import about_size, moment, plural, print_table
from nixl_offload.stores.base import Store
from nixl_offload.tiers.shared.sweep import GRACE_S, Plan, Totals, make_plan
from nixl_offload.units import format_duration


def collect(
    arguments: argparse.Namespace,
    store: Store,
    out: TextIO,
    *,
    max_bytes: int | None,
    older_than_s: float | None,
    now_s: float,
) -> int:
    """Look, plan and, where asked to, delete; print to ``out``. Raises StoreError (nothing was deleted yet)."""
    found = Collection(store, namespace=arguments.namespace, tenant=arguments.tenant)
    ages = found.count()
    plan = make_plan(ages, now_s=now_s, max_bytes=max_bytes, older_than_s=older_than_s)
    plain = _plain(found, ages.total, plan, max_bytes, older_than_s)
    if any(found.selection.values()) and not found.namespaces:
        report_nothing_found(arguments)
    if not arguments.json:
        _print_findings(plain, out)
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


def _print_findings(plain: Mapping[str, Any], out: TextIO) -> None:
    said = " and ".join(f"{name} {value}" for name, value in plain["selection"].items() if value)
    print(f"{plain['where']}{f', {said}' if said else ''}: {_counted(plain['total'])}", file=out)
    if plain["other_objects"]:
        print(f"{plural(plain['other_objects'], 'other object')} beside them, never touched", file=out)
    if plain["namespaces"]:
        table = [("namespace", "tenant", "model", "chunks", "objects", "size", "oldest", "newest")]
        for each in plain["namespaces"]:
            counts = f"{each['chunks']:,}", f"{each['objects']:,}", about_size(each["bytes"])
            ages = moment(each["oldest_s"]), moment(each["newest_s"])
            table.append((each["name"], each["tenant"] or "?", each["model"] or "?", *counts, *ages))
        print(file=out)
        print_table(table, out, right=("chunks", "objects", "size"))
        print(file=out)
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


def _counted(totals: Mapping[str, int]) -> str:
    chunks, objects, size_bytes = totals.values()
    return f"{plural(chunks, 'chunk')} in {plural(objects, 'object')}, {about_size(size_bytes)}"
