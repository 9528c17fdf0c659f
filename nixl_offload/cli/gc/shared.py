"""``nixl-offload gc`` over a shared tier: looks, plans, deletes where asked to, and prints.

Threading: one thread; the store is the caller's. ``collection`` says what holds after an interruption.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable
from typing import Any, Final, TextIO

from nixl_offload.cli.common import report_nothing_found
from nixl_offload.cli.gc.collection import STALE_DRAFT_S, Collection, NamespaceAges
from nixl_offload.cli.terminal import about_size, moment, plural, print_table
from nixl_offload.stores.base import Store
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.shared.sweep import GRACE_S, NOTHING, Plan, Totals, make_plan
from nixl_offload.units import format_duration

_HEADINGS: Final = ("namespace", "tenant", "model", "chunks", "objects", "size", "oldest", "newest")


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
    collection = Collection(store, namespace=arguments.namespace, tenant=arguments.tenant)
    plan = make_plan(collection.count(), now_s=now_s, max_bytes=max_bytes, older_than_s=older_than_s)
    if collection.is_selection and not collection.namespaces:
        report_nothing_found(arguments)
    if not arguments.json:
        print_findings(collection, plan, max_bytes, older_than_s, out)
        out.flush()
    try:
        if arguments.delete:
            collection.delete(plan, now_s)
    finally:
        if arguments.json:
            done = bool(arguments.delete)
            print(json.dumps(to_dict(collection, plan, max_bytes, older_than_s, done=done), indent=2), file=out)
        elif arguments.delete:
            print_outcome(collection, out)
        elif plan.estimate.chunks or (isinstance(store, TreeStore) and not collection.is_selection):
            all_drafts = isinstance(store, TreeStore) and not collection.is_selection
            drafts = " (and what writers that died have left)" if all_drafts else ""
            print(f"Nothing was deleted; --delete does it{drafts}.", file=out)
        for failure in collection.failures:
            print(f"nixl-offload: {failure}", file=sys.stderr)
    if not collection.failures:
        return 1 if arguments.tenant is not None and not collection.namespaces else 0
    end = "gave up after several failures in a row" if collection.gave_up else "the rest went on"
    failed = collection.failed_objects
    count = f"up to {plural(failed, 'object')} not deleted; " if failed else ""
    print(f"nixl-offload: {count}{end}; run again", file=sys.stderr)
    return 1


def to_dict(
    found: Collection, plan: Plan, max_bytes: int | None, older_than_s: float | None, *, done: bool
) -> dict[str, Any]:
    """Return what was found, planned and done as plain data. Times are seconds since the epoch, sizes bytes."""
    outcome = {
        "deleted": _totals_dict(found.deleted),
        "manifests": found.manifests,
        "drafts": found.drafts,
        "failed_objects": found.failed_objects,
        "failures": found.failures,
        "gave_up": found.gave_up,
    }
    return {
        "where": found.where,
        "selection": found.selection,
        "namespaces": [
            {
                "name": entry.info.name,
                "tenant": entry.info.tenant,
                "model": entry.info.model,
                **_totals_dict(entry.ages.total),
                "oldest_s": entry.ages.oldest_s if math.isfinite(entry.ages.oldest_s) else None,
                "newest_s": entry.ages.newest_s if math.isfinite(entry.ages.newest_s) else None,
            }
            for entry in found.namespaces
        ],
        "other_objects": found.other_objects,
        "total": _totals_dict(_total(found.namespaces)),
        "limits": {"max_bytes": max_bytes, "older_than_s": older_than_s},
        "plan": {
            "delete": _totals_dict(plan.estimate),
            "keep_bytes": plan.kept_bytes,
            "over_bytes": plan.over_bytes,
        },
        "outcome": outcome if done else None,
    }


def print_findings(
    found: Collection, plan: Plan, max_bytes: int | None, older_than_s: float | None, out: TextIO
) -> None:
    """Print what is there and what the plan is."""
    said = " and ".join(f"{name} {value}" for name, value in found.selection.items() if value)
    print(f"{found.where}{f', {said}' if said else ''}: {_counted(_total(found.namespaces))}", file=out)
    if found.other_objects:
        print(f"{plural(found.other_objects, 'other object')} beside them, never touched", file=out)
    if found.namespaces:
        print(file=out)
        table = [_HEADINGS, *map(_row, found.namespaces)]
        print_table(table, out, right=("chunks", "objects", "size"))
        print(file=out)
    limits = [] if max_bytes is None else [f"at most {about_size(max_bytes)}"]
    if older_than_s is not None:
        limits.append(f"nothing older than {format_duration(max(older_than_s, GRACE_S))}")
    none = "none; say --max-size or --older-than, or capacity or ttl in the config"
    print(f"Limits: {', '.join(limits) or none}.", file=out)
    if limits:
        goes = f"{_counted(plan.estimate)} to delete" if plan.estimate.chunks else "nothing to delete"
        print(f"Plan: {goes}; {about_size(plan.kept_bytes)} stay.", file=out)
    if plan.over_bytes:
        print(
            f"That is {about_size(plan.over_bytes)} too much, but what is left was written or refreshed within the "
            f"last {format_duration(GRACE_S)}; later runs will get to it.",
            file=out,
        )


def print_outcome(found: Collection, out: TextIO) -> None:
    """Print what was deleted."""
    print(f"Deleted: {_counted(found.deleted)}.", file=out)
    if found.manifests:
        print(f"Deleted: {plural(found.manifests, 'manifest')} of namespaces that are empty.", file=out)
    if found.drafts:
        age = format_duration(STALE_DRAFT_S)
        print(f"Deleted: {plural(found.drafts, 'draft')} older than {age}, of writers that died.", file=out)


def _total(namespaces: Iterable[NamespaceAges]) -> Totals:
    total = NOTHING
    for entry in namespaces:
        total = total.plus(*entry.ages.total)
    return total


def _counted(totals: Totals) -> str:
    return f"{plural(totals.chunks, 'chunk')} in {plural(totals.objects, 'object')}, {about_size(totals.size_bytes)}"


def _row(entry: NamespaceAges) -> tuple[str, ...]:
    total = entry.ages.total
    return (
        entry.info.name,
        entry.info.tenant or "?",
        entry.info.model or "?",
        f"{total.chunks:,}",
        f"{total.objects:,}",
        about_size(total.size_bytes),
        moment(entry.ages.oldest_s),
        moment(entry.ages.newest_s),
    )


def _totals_dict(totals: Totals) -> dict[str, int]:
    return {"chunks": totals.chunks, "objects": totals.objects, "bytes": totals.size_bytes}
