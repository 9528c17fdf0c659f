"""One run of ``nixl-offload gc`` over a shared tier: counts what it holds, and deletes by a plan.

Threading: one thread decides. Listings (``cli.gc.listing``) and bulk deletes have threads, which end with the run. The
store is the caller's. Memory does not grow with the number of objects: see ``tiers.shared.sweep``. Nothing is locked
and no server need stop: one whose chunk goes computes it anew. After an interruption the next run goes on; the worst
that is left behind is a chunk without some of its shards, which costs the server that asks for it one failed load.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from nixl_offload.cli.gc.listing import list_chunks
from nixl_offload.cli.terminal import Progress, plural
from nixl_offload.errors import StoreError
from nixl_offload.stores.base import ObjectInfo, Store
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.inspect import NamespaceInfo
from nixl_offload.tiers.shared.inspect import list_namespaces, read_manifest
from nixl_offload.tiers.shared.naming import parse_manifest_name, parse_shard_name
from nixl_offload.tiers.shared.sweep import NOTHING, Ages, Plan, Sweep, Totals, manifest_goes

STALE_DRAFT_S: Final = 3600.0
"""Drafts in a shared directory that are older belong to writers that died."""
_BATCH_NAMES: Final = 1000
"""What one bulk delete of S3 takes."""
_DELETES: Final = 16
"""Bulk deletes at a time, at most."""
_DELETES_PER_STEP: Final = 8
"""So many in a row must have worked before one more goes out at a time. After a failure they go one by one again."""
_FAILURES_IN_A_ROW: Final = 3
"""After so many the store counts as down."""
_FAILURES_TOLD: Final = 5


@dataclass(slots=True)
class NamespaceAges:
    """What one namespace holds."""

    info: NamespaceInfo
    ages: Ages = field(default_factory=Ages)
    manifest: ObjectInfo | None = None


class Collection:
    """One run. Usable once: ``count``, then ``delete``."""

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
        self.selection = {"namespace": namespace, "tenant": tenant}
        self._store = store
        self._progress = Progress(sys.stderr)
        self._names: list[str] = []
        self._batch = NOTHING
        self._deleting: deque[tuple[Future[None], int, Totals]] = deque()
        """Bulk deletes that are out, in order: how many names, and what is gone with them."""
        self._successes_in_a_row = self._failures_in_a_row = 0

    @property
    def sweeps_drafts(self) -> bool:
        """Whether what writers that died have left goes, too."""
        return isinstance(self._store, TreeStore) and not any(self.selection.values())

    def count(self) -> Ages:
        """List what was selected, and return all chunks by age. Raises StoreError."""
        wanted, tenant, merged, objects = self.selection["namespace"], self.selection["tenant"], Ages(), 0
        for name in [wanted] if wanted else list_namespaces(self._store, self._count_other):
            entry = NamespaceAges(NamespaceInfo(name, read_manifest(self._store, name)))
            if tenant not in (None, entry.info.tenant):
                continue

            def other(info: ObjectInfo, entry: NamespaceAges = entry) -> None:
                if parse_manifest_name(info.name) == entry.info.name:
                    entry.manifest = info
                else:
                    self._count_other(info)

            try:
                with contextlib.closing(list_chunks(self._store, name, other)) as chunks:
                    for chunk in chunks:
                        objects += len(chunk.shards)
                        self._progress(f"{plural(objects, 'object')} counted so far")
                        entry.ages.add(chunk)
            finally:
                self._progress.clear()
            if entry.ages.total.objects or entry.manifest:
                self.namespaces.append(entry)
                merged.merge(entry.ages)
        return merged

    def delete(self, plan: Plan, now_s: float) -> None:
        """Delete by ``plan`` from a fresh listing. Raises nothing of the store's.

        Single failures are noted and the rest goes on; after three in a row it gives up. After an interruption it waits
        for what is out.
        """
        sweep = Sweep(plan)
        with ThreadPoolExecutor(_DELETES, "nixl-offload-gc-delete") as deleter:
            try:
                for entry in self.namespaces:
                    self._sweep(entry, sweep, now_s, deleter)
                    if self.gave_up:
                        return
                if self.sweeps_drafts and isinstance(self._store, TreeStore):
                    self.drafts = self._store.remove_stale_drafts(STALE_DRAFT_S, _is_ours)
            except StoreError as error:
                self._fail(error)
            finally:
                with contextlib.suppress(BaseException):  # of an interruption, raised already
                    self._settle_down_to(0)
                self._progress.clear()

    def _count_other(self, info: ObjectInfo) -> None:
        self.other_objects += 1

    def _sweep(self, entry: NamespaceAges, sweep: Sweep, now_s: float, deleter: ThreadPoolExecutor) -> None:
        empty = True
        try:
            with contextlib.closing(list_chunks(self._store, entry.info.name, lambda info: None)) as chunks:
                for chunk in chunks:
                    empty = False
                    if sweep.takes(chunk):
                        if self._names and len(self._names) + len(chunk.shards) > _BATCH_NAMES:
                            self._flush(deleter)
                        self._names += [shard.place for shard in chunk.shards]
                        self._batch = self._batch.plus(1, len(chunk.shards), chunk.size_bytes)
                    if self.gave_up:
                        return
        except StoreError as error:
            self._fail(error)
            empty = False
        self._flush(deleter)
        self._settle_down_to(0)
        if entry.manifest and empty and manifest_goes(entry.ages, entry.manifest.modified_s, now_s=now_s):
            try:
                self._store.delete([entry.manifest.name])
                self.manifests += 1
            except StoreError as error:
                self._fail(error, 1)

    def _flush(self, deleter: ThreadPoolExecutor) -> None:
        """Delete whole chunks, about a thousand names at a time, and several times at a time while that works."""
        names, batch = self._names, self._batch
        self._names, self._batch = [], NOTHING
        self._settle_down_to(min(self._successes_in_a_row // _DELETES_PER_STEP, _DELETES - 1))
        if names and not self.gave_up:
            self._deleting.append((deleter.submit(self._store.delete, names), len(names), batch))

    def _settle_down_to(self, most: int) -> None:
        """Wait until at most so many bulk deletes are out. Raises what a store must not."""
        while len(self._deleting) > most:
            future, names, batch = self._deleting.popleft()
            try:
                future.result()
            except StoreError as error:
                self._fail(error, names)
                self._successes_in_a_row = most = 0
                self._failures_in_a_row += 1
                self.gave_up = self.gave_up or self._failures_in_a_row >= _FAILURES_IN_A_ROW
                continue
            self._successes_in_a_row += 1
            self._failures_in_a_row = 0
            self.deleted = self.deleted.plus(*batch)
            self._progress(f"{plural(self.deleted.objects, 'object')} deleted so far")

    def _fail(self, error: StoreError, objects: int = 0) -> None:
        self.failed_objects += objects
        if len(self.failures) < _FAILURES_TOLD:
            self.failures.append(str(error))


def _is_ours(name: str) -> bool:
    return parse_shard_name(name) is not None or parse_manifest_name(name) is not None
