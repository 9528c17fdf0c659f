"""``nixl-offload gc`` over a shared tier: counts what it holds, plans, deletes, reports.

Threading: one thread; the store is the caller's. Memory does not grow with the number of objects: see
``tiers.shared.sweep``. Nothing is locked and no server need stop: one whose chunk goes computes it anew. After an
interruption the next run goes on; the worst that is left behind is a chunk without some of its shards, which costs the
server that asks for it one failed load.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

from nixl_offload.cli.common import tell_of_nothing
from nixl_offload.cli.terminal import Progress, about_size, moment, plural, print_table
from nixl_offload.errors import StoreError
from nixl_offload.stores.base import ObjectInfo, Store
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.inspect import NamespaceInfo
from nixl_offload.tiers.shared.inspect import group_chunks, list_namespaces, read_manifest
from nixl_offload.tiers.shared.naming import parse_manifest_name, parse_shard_name
from nixl_offload.tiers.shared.sweep import GRACE_S, NOTHING, Ages, Plan, Sweep, Totals, make_plan, manifest_goes
from nixl_offload.units import format_duration

STALE_DRAFT_S: Final = 3600.0
"""Drafts in a shared directory that are older belong to writers that died."""
_BATCH_NAMES: Final = 1000
"""What one bulk delete of S3 takes."""
_FAILURES_IN_A_ROW: Final = 3
"""After so many the store counts as down."""
_FAILURES_TOLD: Final = 5
_HEADINGS: Final = ("namespace", "tenant", "model", "chunks", "objects", "size", "oldest", "newest")


@dataclass(slots=True)
class NamespaceAges:
    """What one namespace holds."""

    info: NamespaceInfo
    ages: Ages = field(default_factory=Ages)
    manifest: ObjectInfo | None = None


class Collection:
    """One run. Usable once: ``count``, ``plan``, then ``delete``."""

    def __init__(self, store: Store, *, namespace: str | None, tenant: str | None) -> None:
        self.where = store.where
        self.namespaces: list[NamespaceAges] = []
        self.other_objects = 0
        """What is not ours, beside and in the namespaces: never touched."""
        self.deleted = NOTHING
        self.manifests = self.drafts = 0
        self.failed_objects = 0
        """Objects of batches in which something failed; some of them may be deleted all the same."""
        self.failures: list[str] = []
        """The first few, in words."""
        self.gave_up = False
        self._store = store
        self._selection = {"namespace": namespace, "tenant": tenant}
        self._progress = Progress(sys.stderr)
        self._names: list[str] = []
        self._batch = NOTHING
        self._failures_in_a_row = 0

    @property
    def is_selection(self) -> bool:
        """Whether only some namespaces were asked for."""
        return any(self._selection.values())

    def count(self) -> Ages:
        """List what was selected, and return all chunks by age. Raises StoreError."""
        wanted, tenant = self._selection["namespace"], self._selection["tenant"]
        for name in [wanted] if wanted else list_namespaces(self._store, self._count_other):
            entry = NamespaceAges(NamespaceInfo(name, read_manifest(self._store, name)))
            if tenant not in (None, entry.info.tenant):
                continue
            self._list(entry)
            if entry.ages.total.objects or entry.manifest:
                self.namespaces.append(entry)
        merged = Ages()
        for entry in self.namespaces:
            merged.merge(entry.ages)
        return merged

    def delete(self, plan: Plan, now_s: float) -> None:
        """Delete by ``plan`` from a fresh listing. Raises nothing of the store's.

        Single failures are noted and the rest goes on; after three in a row it gives up.
        """
        sweep = Sweep(plan)
        try:
            for entry in self.namespaces:
                self._sweep(entry, sweep, now_s)
                if self.gave_up:
                    return
            if not self.is_selection and isinstance(self._store, TreeStore):
                self.drafts = self._store.remove_stale_drafts(STALE_DRAFT_S, _is_ours)
        except StoreError as error:
            self._fail(error)
        finally:
            self._progress.clear()

    def _list(self, entry: NamespaceAges) -> None:
        def other(info: ObjectInfo) -> None:
            if parse_manifest_name(info.name) == entry.info.name:
                entry.manifest = info
            else:
                self._count_other(info)

        try:
            for chunk in group_chunks(self._counted(self._store.list(f"{entry.info.name}/")), other):
                entry.ages.add(chunk)
        finally:
            self._progress.clear()

    def _counted(self, listing: Iterable[ObjectInfo]) -> Iterator[ObjectInfo]:
        before = sum(entry.ages.total.objects for entry in self.namespaces)
        for number, info in enumerate(listing, before + 1):
            if not number % 500:
                self._progress(f"{plural(number, 'object')} counted so far")
            yield info

    def _count_other(self, info: ObjectInfo) -> None:
        self.other_objects += 1

    def _sweep(self, entry: NamespaceAges, sweep: Sweep, now_s: float) -> None:
        empty = True
        try:
            for chunk in group_chunks(self._store.list(f"{entry.info.name}/")):
                empty = False
                if sweep.takes(chunk):
                    if self._names and len(self._names) + len(chunk.shards) > _BATCH_NAMES:
                        self._flush()
                    self._names += [shard.place for shard in chunk.shards]
                    self._batch = self._batch.plus(1, len(chunk.shards), chunk.size_bytes)
                if self.gave_up:
                    return
        except StoreError as error:
            self._fail(error)
            empty = False
        self._flush()
        if entry.manifest and empty and manifest_goes(entry.ages, entry.manifest.modified_s, now_s=now_s):
            try:
                self._store.delete([entry.manifest.name])
                self.manifests += 1
            except StoreError as error:
                self._fail(error, 1)

    def _flush(self) -> None:
        """Delete whole chunks, about a thousand names at a time."""
        names, batch = self._names, self._batch
        self._names, self._batch = [], NOTHING
        if not names or self.gave_up:
            return
        try:
            self._store.delete(names)
        except StoreError as error:
            self._fail(error, len(names))
            self._failures_in_a_row += 1
            self.gave_up = self._failures_in_a_row >= _FAILURES_IN_A_ROW
            return
        self._failures_in_a_row = 0
        self.deleted = self.deleted.plus(*batch)
        self._progress(f"{plural(self.deleted.objects, 'object')} deleted so far")

    def _fail(self, error: StoreError, objects: int = 0) -> None:
        self.failed_objects += objects
        if len(self.failures) < _FAILURES_TOLD:
            self.failures.append(str(error))

    def to_dict(self, plan: Plan, max_bytes: int | None, older_than_s: float | None, *, done: bool) -> dict[str, Any]:
        """Return what was found, planned and done as plain data. Times are seconds since the epoch, sizes bytes."""
        outcome = {
            "deleted": _totals_dict(self.deleted),
            "manifests": self.manifests,
            "drafts": self.drafts,
            "failed_objects": self.failed_objects,
            "failures": self.failures,
            "gave_up": self.gave_up,
        }
        return {
            "where": self.where,
            "selection": self._selection,
            "namespaces": [
                {
                    "name": entry.info.name,
                    "tenant": entry.info.tenant,
                    "model": entry.info.model,
                    **_totals_dict(entry.ages.total),
                    "oldest_s": entry.ages.oldest_s if math.isfinite(entry.ages.oldest_s) else None,
                    "newest_s": entry.ages.newest_s if math.isfinite(entry.ages.newest_s) else None,
                }
                for entry in self.namespaces
            ],
            "other_objects": self.other_objects,
            "total": _totals_dict(_total(self.namespaces)),
            "limits": {"max_bytes": max_bytes, "older_than_s": older_than_s},
            "plan": {
                "delete": _totals_dict(plan.estimate),
                "keep_bytes": plan.kept_bytes,
                "over_bytes": plan.over_bytes,
            },
            "outcome": outcome if done else None,
        }

    def print_findings(self, plan: Plan, max_bytes: int | None, older_than_s: float | None, out: TextIO) -> None:
        """Print what is there and what the plan is."""
        said = " and ".join(f"{name} {value}" for name, value in self._selection.items() if value)
        print(f"{self.where}{f', {said}' if said else ''}: {_counted(_total(self.namespaces))}", file=out)
        if self.other_objects:
            print(f"{plural(self.other_objects, 'other object')} beside them, never touched", file=out)
        if self.namespaces:
            print(file=out)
            table = [_HEADINGS, *map(_row, self.namespaces)]
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

    def print_outcome(self, out: TextIO) -> None:
        """Print what was deleted."""
        print(f"Deleted: {_counted(self.deleted)}.", file=out)
        if self.manifests:
            print(f"Deleted: {plural(self.manifests, 'manifest')} of namespaces that are empty.", file=out)
        if self.drafts:
            age = format_duration(STALE_DRAFT_S)
            print(f"Deleted: {plural(self.drafts, 'draft')} older than {age}, of writers that died.", file=out)


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
        tell_of_nothing(arguments)
    if not arguments.json:
        collection.print_findings(plan, max_bytes, older_than_s, out)
        out.flush()
    try:
        if arguments.delete:
            collection.delete(plan, now_s)
    finally:
        if arguments.json:
            done = bool(arguments.delete)
            print(json.dumps(collection.to_dict(plan, max_bytes, older_than_s, done=done), indent=2), file=out)
        elif arguments.delete:
            collection.print_outcome(out)
        elif plan.estimate.chunks or (isinstance(store, TreeStore) and not collection.is_selection):
            drafts = "" if collection.is_selection or not isinstance(store, TreeStore) else _DRAFTS
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


_DRAFTS: Final = " (and what writers that died have left)"


def _is_ours(name: str) -> bool:
    return parse_shard_name(name) is not None or parse_manifest_name(name) is not None


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
