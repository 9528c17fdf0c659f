"""``nixl-offload gc CONFIG``: brings a bucket or a shared directory down to a size and an age, oldest first.

A run lists everything twice: ``Collection.count``, then ``Collection.delete`` with a plan of ``tiers.shared.sweep``. A
large namespace is listed in 256 parts in parallel, because S3 lists only a thousand names per request. Names begin with
two digits of a hash, so the parts have about the same size.

Threading: the caller's thread; ``_THREADS`` more for a large namespace, which end with the call. Memory does not grow
with the number of objects. Nothing is locked and servers go on; they recompute deleted chunks. An interrupted run may
leave a chunk without some of its shards, which costs one failed load; the next run deletes the rest.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice, takewhile
from typing import Any, Final, NamedTuple

from nixl_offload.cli.common import (
    Progress,
    about_size,
    add_selection,
    argument,
    plural,
    read_size,
    report_nothing_found,
    selected,
    set_up,
    stored_tiers,
)
from nixl_offload.config import Config, SharedConfig, load_config
from nixl_offload.errors import ConfigError, StoreError
from nixl_offload.stores.base import ObjectInfo
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.inspect import ChunkInfo
from nixl_offload.tiers.kinds import open_inspector
from nixl_offload.tiers.shared.eviction import STALE_DRAFT_S
from nixl_offload.tiers.shared.inspect import SharedInspector, group_chunks
from nixl_offload.tiers.shared.naming import is_ours, manifest_name
from nixl_offload.tiers.shared.sweep import GRACE_S, NOTHING, Ages, Plan, Totals, make_plan, manifest_goes
from nixl_offload.units import format_duration, parse_duration

_SPLIT_OBJECTS: Final = 10_000
"""A smaller namespace is listed as a whole, because each part costs at least one request."""
_PARTS: Final = 256
_THREADS: Final = 16
_BATCH_NAMES: Final = 1000
"""S3's limit for one bulk delete."""
_FAILURES_IN_A_ROW: Final = 3
"""After this many, the store counts as down."""
_FAILURES_SHOWN: Final = 5
_DESCRIPTION = """\
Deletes chunks of the shared tier of CONFIG, a bucket or a shared directory: first every chunk older than --older-than,
then the oldest ones until at most --max-size is left. Without --delete it only prints what it would delete. Run it
about every hour, on one machine:

    nixl-offload gc kv.yaml                              # look
    nixl-offload gc kv.yaml --delete                     # keep to the capacity and ttl of kv.yaml
    nixl-offload gc kv.yaml --tenant blue --max-size 2TiB --delete
    nixl-offload gc kv.yaml --namespace 0f3a... --older-than 0s --delete      # all chunks of a retired model

Servers may run meanwhile. If a server needs a deleted chunk, it computes it again. gc never deletes objects younger
than ten minutes, or objects that are not named like our chunks. The age of a chunk counts from its last write, in a
shared directory from its last use.
"""


def add_gc(parser: ArgumentParser) -> None:
    """Add the arguments of ``gc`` to ``parser``."""
    set_up(parser, run, _DESCRIPTION)
    add_selection(parser)
    size, age = "leave at most so much, such as 20TiB; default: the capacity", "delete what is older, such as 7d"
    parser.add_argument("--max-size", metavar="SIZE", type=argument(read_size), help=size)
    parser.add_argument(
        "--older-than", metavar="DURATION", type=argument(parse_duration), help=f"{age}; default: the ttl"
    )
    parser.add_argument("--delete", action="store_true", help="do it, instead of saying what would be done")


def run(arguments: Namespace) -> int:
    """Print the plan and its outcome. Raises ConfigError, StoreError, TierError; then nothing was deleted."""
    tier = _shared_tier(load_config(arguments.file), arguments)
    max_bytes = tier.capacity_bytes if arguments.max_size is None else arguments.max_size
    older_than_s = tier.ttl_s if arguments.older_than is None else arguments.older_than
    if arguments.delete and max_bytes is None and older_than_s is None:
        said = f"--delete: down to what? Say --max-size or --older-than, or capacity or ttl in {arguments.file}"
        raise ConfigError(said)
    with closing(open_inspector(tier)) as inspector:
        assert isinstance(inspector, SharedInspector)
        found = Collection(inspector, arguments)
        ages = found.count()
        plan = make_plan(ages, max_bytes=max_bytes, older_than_s=older_than_s)
        shown = {
            "where": inspector.where,
            "selection": found.selection,
            "namespaces": len(found.namespaces),
            "other_objects": inspector.other_objects,
            "total": _plain(ages.total),
            "limits": {"max_bytes": max_bytes, "older_than_s": older_than_s},
            "plan": {"delete": _plain(plan.estimate), "keep_bytes": plan.kept_bytes, "over_bytes": plan.over_bytes},
            "outcome": None,
        }
        if not arguments.json:
            _print_plan(shown)
        try:
            if arguments.delete:
                found.delete(plan)
        finally:
            if arguments.delete:
                shown["outcome"] = found.outcome()
            if arguments.json:
                print(json.dumps(shown, indent=2))
            elif arguments.delete:
                _print_outcome(found.outcome())
            elif plan.estimate.chunks or found.sweeps_drafts:
                drafts = " (and what writers that died have left)" if found.sweeps_drafts else ""
                print(f"Nothing was deleted; --delete does it{drafts}.")
            for failure in found.failures:
                print(f"nixl-offload: {failure}", file=sys.stderr)
    if not found.failures:
        return 1 if report_nothing_found(arguments, found.namespaces) else 0
    end = "gave up after several failures in a row" if found.gave_up else "the rest went on"
    count = f"up to {plural(found.failed_objects, 'object')} not deleted; " if found.failed_objects else ""
    print(f"nixl-offload: {count}{end}; run again", file=sys.stderr)
    return 1


def _shared_tier(config: Config, arguments: Namespace) -> SharedConfig:
    """Return the tier to collect. Raises ConfigError unless exactly one of the selected tiers is shared."""
    tiers = stored_tiers(config, arguments)
    shared = [tier for tier in config.shared if tier in tiers]
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
    return shared[0]


def _print_plan(shown: Mapping[str, Any]) -> None:
    said = " and ".join(f"{name} {value}" for name, value in shown["selection"].items() if value)
    print(f"{shown['where']}{f', {said}' if said else ''}: {_counted(shown['total'])}")
    if shown["other_objects"]:
        print(f"{plural(shown['other_objects'], 'other object')} beside them, never touched")
    max_bytes, older_than_s = shown["limits"].values()
    limits = [] if max_bytes is None else [f"at most {about_size(max_bytes)}"]
    if older_than_s is not None:
        limits.append(f"nothing older than {format_duration(max(older_than_s, GRACE_S))}")
    none = "none; say --max-size or --older-than, or capacity or ttl in the config"
    print(f"Limits: {', '.join(limits) or none}.")
    goes, keeps, over = shown["plan"].values()
    if limits:
        words = f"{_counted(goes)} to delete" if goes["chunks"] else "nothing to delete"
        print(f"Plan: {words}; {about_size(keeps)} stay.")
    if over:
        young = (
            f"what is left was written or used within the last {format_duration(GRACE_S)}; later runs will get to it"
        )
        print(f"That is {about_size(over)} too much, but {young}.")
    sys.stdout.flush()


def _print_outcome(outcome: Mapping[str, Any]) -> None:
    print(f"Deleted: {_counted(outcome['deleted'])}.")
    if outcome["manifests"]:
        print(f"Deleted: {plural(outcome['manifests'], 'manifest')} of namespaces that are empty.")
    if outcome["drafts"]:
        age = format_duration(STALE_DRAFT_S)
        print(f"Deleted: {plural(outcome['drafts'], 'draft')} older than {age}, of writers that died.")


def _plain(totals: Totals) -> dict[str, int]:
    return {"chunks": totals.chunks, "objects": totals.objects, "bytes": totals.size_bytes}


def _counted(found: Mapping[str, Any]) -> str:
    chunks, objects = plural(found["chunks"], "chunk"), plural(found["objects"], "object")
    return f"{chunks} in {objects}, {about_size(found['bytes'])}"


class NamespaceAges(NamedTuple):
    """One namespace, and its chunks by age."""

    name: str
    manifest: ObjectInfo | None
    ages: Ages


class Collection:
    """One run over one tier. Usable once: ``count``, then ``delete``."""

    def __init__(self, inspector: SharedInspector, arguments: Namespace) -> None:
        """``arguments``: as for ``selected``."""
        self.selection = {"namespace": arguments.namespace, "tenant": arguments.tenant}
        self.namespaces: list[NamespaceAges] = []
        self.deleted = NOTHING
        self.failed_objects = 0
        """Objects of batches that failed; some of them may be deleted nevertheless."""
        self.failures: list[str] = []
        """The first few failures, in words."""
        self.gave_up = False
        self._inspector, self._arguments = inspector, arguments
        self._store = inspector.store
        self._manifests = self._drafts = self._failures_in_a_row = 0
        self._progress = Progress()
        self._lock = threading.Lock()
        """Guards all counts while threads run."""

    @property
    def sweeps_drafts(self) -> bool:
        """Whether drafts of dead writers are deleted too."""
        return isinstance(self._store, TreeStore) and not any(self.selection.values())

    def outcome(self) -> dict[str, Any]:
        """Return what ``delete`` has done so far, for JSON."""
        return {
            "deleted": _plain(self.deleted),
            "manifests": self._manifests,
            "drafts": self._drafts,
            "failed_objects": self.failed_objects,
            "failures": self.failures,
            "gave_up": self.gave_up,
        }

    def count(self) -> Ages:
        """List the selected namespaces, and return all their chunks by age. Raises StoreError."""
        total = Ages(time.time())
        for namespace in selected(self._inspector, self._arguments):
            name = namespace.name
            found = NamespaceAges(name, self._store.head(manifest_name(name)), Ages(total.now_s))

            def count(chunks: Iterator[ChunkInfo], found: NamespaceAges = found) -> None:
                ages = Ages(total.now_s)
                for chunk in chunks:
                    ages.add(chunk)
                with self._lock:
                    found.ages.merge(ages)
                    objects = total.total.objects + found.ages.total.objects
                    self._progress(f"{plural(objects, 'object')} counted so far")

            try:
                self._in_parts(name, count)
            finally:
                self._progress.clear()
            if found.ages.total.objects or found.manifest:
                self.namespaces.append(found)
                total.merge(found.ages)
        return total

    def delete(self, plan: Plan) -> None:
        """Delete by ``plan`` from a new listing. Does not raise StoreError.

        Failures are recorded and the rest goes on, until three in a row. An interruption waits for unfinished requests.
        """
        try:
            for found in self.namespaces:
                self._sweep(found, plan)
                if self.gave_up:
                    return
            if self.sweeps_drafts and isinstance(self._store, TreeStore):
                self._drafts = self._store.remove_stale_drafts(STALE_DRAFT_S, is_ours)
        except StoreError as error:
            self._fail(error)
        finally:
            self._progress.clear()

    def _sweep(self, found: NamespaceAges, plan: Plan) -> None:
        """Delete a namespace's chunks by the plan: whole chunks, about a thousand names at a time."""

        def takes(chunk: ChunkInfo) -> bool:
            with self._lock:
                return plan.takes(chunk)

        def delete(chunks: Iterator[ChunkInfo]) -> None:
            names, batch = list[str](), NOTHING
            for chunk in filter(takes, chunks):
                if names and len(names) + len(chunk.shards) > _BATCH_NAMES:
                    self._delete(names, batch)
                    names, batch = [], NOTHING
                if self.gave_up:
                    return
                names += [shard.place for shard in chunk.shards]
                batch = batch.plus(1, len(chunk.shards), chunk.size_bytes)
            if names and not self.gave_up:
                self._delete(names, batch)

        try:
            self._in_parts(found.name, delete)
        except StoreError as error:
            self._fail(error)
            return
        if not found.manifest or not manifest_goes(found.ages, found.manifest.modified_s):
            return
        try:
            if not any(group_chunks(self._store.list(f"{found.name}/"))):  # no server has stored there meanwhile
                self._store.delete([manifest_name(found.name)])
                self._manifests += 1
        except StoreError as error:
            self._fail(error, 1)

    def _in_parts(self, namespace: str, work: Callable[[Iterator[ChunkInfo]], None]) -> None:
        """Call ``work`` with all chunks of a namespace: once, or once for each part, on threads.

        Raises the StoreError of the first part that fails; then no other part begins.
        """
        first = list(islice(self._store.list(f"{namespace}/"), _SPLIT_OBJECTS + 1))
        if len(first) <= _SPLIT_OBJECTS:
            work(group_chunks(first))
            return
        stop = threading.Event()

        def part(number: int) -> None:
            listing = self._store.list(f"{namespace}/{number:02x}/")
            work(group_chunks(takewhile(lambda _: not stop.is_set(), listing)))

        with ThreadPoolExecutor(_THREADS, "nixl-offload-gc") as pool:
            try:
                for each in [pool.submit(part, number) for number in range(_PARTS)]:
                    each.result()
            finally:
                stop.set()
                pool.shutdown(cancel_futures=True)

    def _delete(self, names: list[str], batch: Totals) -> None:
        try:
            self._store.delete(names)
        except StoreError as error:
            self._fail(error, len(names))
            return
        with self._lock:
            self._failures_in_a_row = 0
            self.deleted = self.deleted.plus(*batch)
            self._progress(f"{plural(self.deleted.objects, 'object')} deleted so far")

    def _fail(self, error: StoreError, objects: int = 0) -> None:
        with self._lock:
            self.failed_objects += objects
            self._failures_in_a_row += bool(objects)
            self.gave_up = self.gave_up or self._failures_in_a_row >= _FAILURES_IN_A_ROW
            if len(self.failures) < _FAILURES_SHOWN:
                self.failures.append(str(error))
