"""One run of ``nixl-offload gc`` over a shared tier: counts what it holds, and deletes by a plan.

A large namespace is listed, and swept, in 256 parts at a time: S3 gives a thousand names per request, and names begin
with two digits of a hash, so parts are about equally long and lie in other places of the bucket.

Threading: the caller's thread; ``_THREADS`` more for a large namespace, which end with the call. The store is the
caller's. Memory does not grow with the number of objects: see ``tiers.shared.sweep``. Nothing is locked and no server
need stop: one whose chunk goes computes it anew. After an interruption the next run goes on; the worst that is left
behind is a chunk without some of its shards, which costs the server that asks for it one failed load.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Final

from nixl_offload.cli.terminal import Progress, plural
from nixl_offload.errors import StoreError
from nixl_offload.stores.base import ObjectInfo, Store
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.inspect import ChunkInfo, NamespaceInfo
from nixl_offload.tiers.shared.inspect import group_chunks, list_namespaces, read_manifest
from nixl_offload.tiers.shared.naming import manifest_name, parse_manifest_name, parse_shard_name
from nixl_offload.tiers.shared.sweep import NOTHING, Ages, Plan, Sweep, Totals, manifest_goes

STALE_DRAFT_S: Final = 3600.0
"""Drafts in a shared directory that are older belong to writers that died."""
_SPLIT_OBJECTS: Final = 10_000
"""A smaller namespace is listed once, front to back: each part costs a request at least."""
_PARTS: Final = 256
_THREADS: Final = 16
_BATCH_NAMES: Final = 1000
"""What one bulk delete of S3 takes."""
_FAILURES_IN_A_ROW: Final = 3
"""After so many the store counts as down."""
_FAILURES_SHOWN: Final = 5


@dataclass(slots=True)
class NamespaceAges:
    """What one namespace holds."""

    info: NamespaceInfo
    manifest: ObjectInfo | None
    ages: Ages = field(default_factory=Ages)


class Collection:
    """One run. Usable once: ``count``, then ``delete``."""

    def __init__(self, store: Store, *, namespace: str | None, tenant: str | None) -> None:
        self.where = store.where
        self.namespaces: list[NamespaceAges] = []
        self.other_objects = 0
        """What lies beside the namespaces and is not ours: never touched."""
        self.deleted = NOTHING
        self.manifests = self.drafts = 0
        self.failed_objects = 0
        """Objects of batches in which something failed; some of them may be deleted all the same."""
        self.failures: list[str] = []
        """The first few, in words."""
        self.gave_up = False
        self.selection = {"namespace": namespace, "tenant": tenant}
        self._store = store
        self._progress = Progress(sys.stderr)
        self._lock = threading.Lock()
        """Guards all counts, while there are threads."""
        self._failures_in_a_row = 0

    @property
    def sweeps_drafts(self) -> bool:
        """Whether what writers that died have left goes, too."""
        return isinstance(self._store, TreeStore) and not any(self.selection.values())

    def count(self) -> Ages:
        """List what was selected, and return all chunks by age. Raises StoreError."""
        wanted, tenant, total = self.selection["namespace"], self.selection["tenant"], Ages()
        for name in [wanted] if wanted else list_namespaces(self._store, self._count_other):
            entry = NamespaceAges(
                NamespaceInfo(name, read_manifest(self._store, name)), self._store.head(manifest_name(name))
            )
            if tenant not in (None, entry.info.tenant):
                continue

            def count(chunks: Iterator[ChunkInfo], entry: NamespaceAges = entry) -> None:
                ages = Ages()
                for chunk in chunks:
                    ages.add(chunk)
                with self._lock:
                    entry.ages.merge(ages)
                    objects = total.total.objects + entry.ages.total.objects
                    self._progress(f"{plural(objects, 'object')} counted so far")

            try:
                self._in_parts(name, count)
            finally:
                self._progress.clear()
            if entry.ages.total.objects or entry.manifest:
                self.namespaces.append(entry)
                total.merge(entry.ages)
        return total

    def delete(self, plan: Plan, now_s: float) -> None:
        """Delete by ``plan`` from a fresh listing. Raises nothing of the store's.

        Single failures are noted and the rest goes on; after three in a row it gives up. After an interruption it waits
        for what is out.
        """
        sweep = Sweep(plan)
        try:
            for entry in self.namespaces:
                self._sweep(entry, sweep, now_s)
                if self.gave_up:
                    return
            if self.sweeps_drafts and isinstance(self._store, TreeStore):
                self.drafts = self._store.remove_stale_drafts(STALE_DRAFT_S, _is_ours)
        except StoreError as error:
            self._fail(error)
        finally:
            self._progress.clear()

    def _sweep(self, entry: NamespaceAges, sweep: Sweep, now_s: float) -> None:
        """Delete what goes of a namespace, whole chunks, about a thousand names at a time."""

        def takes(chunk: ChunkInfo) -> bool:
            with self._lock:
                return sweep.takes(chunk)

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
            self._in_parts(entry.info.name, delete)
        except StoreError as error:
            self._fail(error)
            return
        if entry.manifest and manifest_goes(entry.ages, entry.manifest.modified_s, now_s=now_s):
            self._delete_manifest(entry.info.name)

    def _in_parts(self, namespace: str, work: Callable[[Iterator[ChunkInfo]], None]) -> None:
        """Call ``work`` with all chunks of a namespace: once, or once for each part, on threads.

        Raises StoreError of a part that fails; no other part begins then.
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

    def _delete_manifest(self, namespace: str) -> None:
        """Delete the manifest of a namespace that was empty, unless a server has begun to store there."""
        try:
            if not any(group_chunks(self._store.list(f"{namespace}/"))):
                self._store.delete([manifest_name(namespace)])
                self.manifests += 1
        except StoreError as error:
            self._fail(error, 1)

    def _fail(self, error: StoreError, objects: int = 0) -> None:
        with self._lock:
            self.failed_objects += objects
            self._failures_in_a_row += bool(objects)
            self.gave_up = self.gave_up or self._failures_in_a_row >= _FAILURES_IN_A_ROW
            if len(self.failures) < _FAILURES_SHOWN:
                self.failures.append(str(error))

    def _count_other(self, info: ObjectInfo) -> None:
        self.other_objects += 1


def _is_ours(name: str) -> bool:
    return parse_shard_name(name) is not None or parse_manifest_name(name) is not None
