"""The hands of ``nixl-offload gc``: counts what a shared tier holds, and deletes what a plan says.

Threading: one thread; the store is the caller's. Memory does not grow with the number of objects: see ``tiers.sweep``.
Nothing is locked, and no server need stop: one whose chunk goes computes it anew. After an interruption the next run
goes on; the worst left behind is a chunk without some of its shards, which costs whoever asks for it one failed load.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from nixl_offload.errors import StoreError
from nixl_offload.identity.namespace import manifest_fits
from nixl_offload.stores.base import ObjectInfo, Store
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.shared.naming import manifest_name, parse_manifest_name, parse_shard_name
from nixl_offload.tiers.shared.sweep import NOTHING, Ages, Chunk, Plan, Sweep, Tally, chunks_of, manifest_goes

STALE_DRAFT_S: Final = 3600.0
"""Drafts of a tree that are older belong to writers that died."""
_BATCH_NAMES: Final = 1000
"""What one bulk delete of S3 takes."""
_FAILURES_IN_A_ROW: Final = 3
"""After so many the store is taken to be down."""
_FAILURES_TOLD: Final = 5
_MANIFEST_MAX_BYTES: Final = 1 << 20
_SHOWN_CHARS: Final = 60
_REPORT_EVERY: Final = 500

Report = Callable[[str, int], None]
"""Is told now and then what is being done, and how many objects that was so far."""


@dataclass(slots=True)
class NamespaceCensus:
    """What one namespace holds."""

    name: str
    tenant: str | None
    """From the manifest; None where there is none that fits the namespace."""
    model: str | None
    ages: Ages = field(default_factory=Ages)
    manifest: ObjectInfo | None = None
    foreign_objects: int = 0

    def note(self, info: ObjectInfo) -> None:
        """Take note of an object that is no shard."""
        if parse_manifest_name(info.name) == self.name:
            self.manifest = info
        else:
            self.foreign_objects += 1


@dataclass(slots=True)
class Census:
    """What a tier holds, or a selection of its namespaces."""

    namespaces: list[NamespaceCensus]
    foreign_objects: int
    """What is not ours beside and within the namespaces: never touched."""

    def ages(self) -> Ages:
        """Return all chunks by age."""
        merged = Ages()
        for namespace in self.namespaces:
            merged.merge(namespace.ages)
        return merged


@dataclass(slots=True)
class Outcome:
    """What became of a plan."""

    deleted: Tally = NOTHING
    manifests: int = 0
    drafts: int = 0
    failed_objects: int = 0
    """Of batches in which something failed; some of them may be deleted all the same."""
    failures: list[str] = field(default_factory=list)
    """The first few, in words."""
    gave_up: bool = False

    def fail(self, error: StoreError, objects: int = 0) -> None:
        """Take note of a failure."""
        self.failed_objects += objects
        if len(self.failures) < _FAILURES_TOLD:
            self.failures.append(str(error))


def take_census(store: Store, *, namespace: str | None, tenant: str | None, report: Report) -> Census:
    """Count what ``store`` holds: all of it, or one namespace, or those of a tenant. Raises StoreError."""
    census = Census([], 0)
    listed = 0

    def counted(listing: Iterable[ObjectInfo]) -> Iterator[ObjectInfo]:
        nonlocal listed
        for info in listing:
            listed += 1
            if not listed % _REPORT_EVERY:
                report("counted", listed)
            yield info

    def foreign(info: ObjectInfo) -> None:
        census.foreign_objects += 1

    for name in [namespace] if namespace else list_namespaces(store, foreign):
        fields = (read_manifest(store, name) or {}).get("fields", {})
        of_tenant, model = shown(fields.get("tenant")), model_words(fields)
        if tenant is not None and of_tenant != tenant:
            continue
        entry = NamespaceCensus(name, of_tenant, model)
        for chunk in chunks_of(counted(store.list(f"{name}/")), entry.note):
            entry.ages.add(chunk)
        census.foreign_objects += entry.foreign_objects
        if entry.ages.total.objects or entry.manifest:
            census.namespaces.append(entry)
    return census


def collect(store: Store, census: Census, plan: Plan, outcome: Outcome, *, now_s: float, report: Report) -> None:
    """Delete by ``plan`` from a fresh listing, and write down in ``outcome`` as it goes. Raises nothing of the store's.

    Single failures are noted and the rest goes on; after three in a row it gives up.
    """
    sweep = Sweep(plan)
    batches = _Batches(store, outcome, report)
    for namespace in census.namespaces:
        empty = True
        try:
            for chunk in chunks_of(store.list(f"{namespace.name}/")):
                empty = False
                if sweep.takes(chunk):
                    batches.add(chunk)
                if outcome.gave_up:
                    return
        except StoreError as exc:
            outcome.fail(exc)
            empty = False
        batches.flush()
        manifest = namespace.manifest
        if manifest and empty and manifest_goes(namespace.ages, manifest.modified_s, now_s=now_s):
            batches.delete_manifest(manifest.name)


def remove_stale_drafts(store: Store, outcome: Outcome) -> None:
    """Remove what writers that died left in a tree; a bucket has its lifecycle rule for that."""
    if isinstance(store, TreeStore):
        try:
            outcome.drafts = store.remove_stale_drafts(STALE_DRAFT_S, _is_ours)
        except StoreError as exc:
            outcome.fail(exc)


def _is_ours(name: str) -> bool:
    return parse_shard_name(name) is not None or parse_manifest_name(name) is not None


class _Batches:
    """Gathers whole chunks and deletes them a thousand names at a time."""

    def __init__(self, store: Store, outcome: Outcome, report: Report) -> None:
        self._store = store
        self._outcome = outcome
        self._report = report
        self._names: list[str] = []
        self._tally = NOTHING
        self._failures_in_a_row = 0

    def add(self, chunk: Chunk) -> None:
        if self._names and len(self._names) + len(chunk.names) > _BATCH_NAMES:
            self.flush()
        self._names += chunk.names
        self._tally = self._tally.plus(1, len(chunk.names), chunk.size_bytes)

    def flush(self) -> None:
        names, self._names = self._names, []
        tally, self._tally = self._tally, Tally()
        if not names or self._outcome.gave_up:
            return
        try:
            self._store.delete(names)
        except StoreError as exc:
            self._outcome.fail(exc, len(names))
            self._failures_in_a_row += 1
            self._outcome.gave_up = self._failures_in_a_row >= _FAILURES_IN_A_ROW
            return
        self._failures_in_a_row = 0
        self._outcome.deleted = self._outcome.deleted.plus(*tally)
        self._report("deleted", self._outcome.deleted.objects)

    def delete_manifest(self, name: str) -> None:
        if not self._outcome.gave_up:
            try:
                self._store.delete([name])
                self._outcome.manifests += 1
            except StoreError as exc:
                self._outcome.fail(exc, 1)


def list_namespaces(store: Store, foreign: Callable[[ObjectInfo], None]) -> Iterator[str]:
    """Yield each namespace once, listing no more of it than a page; what lies beside them is told to ``foreign``."""
    after = ""
    while True:
        found = None
        for info in store.list("", start_after=after):
            found = _namespace_of(info.name)
            if found:
                break
            foreign(info)
        if not found:
            return
        yield found
        after = f"{found}0"  # 0 follows the slash: all of the namespace sorts before it, and no other one does


def _namespace_of(name: str) -> str | None:
    first, slash, _ = name.partition("/")
    return parse_manifest_name(manifest_name(first)) if slash else None


def read_manifest(store: Store, namespace: str) -> dict[str, Any] | None:
    """Return the manifest, None where there is none that fits the namespace. Anybody may have written what is read."""
    name = manifest_name(namespace)
    info = store.head(name)
    if info is None or info.size_bytes > _MANIFEST_MAX_BYTES:
        return None
    content = bytearray(info.size_bytes)
    try:
        store.read_into(name, 0, memoryview(content))
        manifest: Any = json.loads(content)
    except StoreError as exc:
        if exc.cause in ("missing", "short"):  # deleted or replaced this moment
            return None
        raise
    except (ValueError, RecursionError):
        return None
    return manifest if manifest_fits(manifest, namespace) else None


def model_words(fields: Mapping[str, Any]) -> str | None:
    """Return what to call a manifest's model, safe to print; local weights by their digest too."""
    model, weights = shown(fields.get("model")), shown(fields.get("weights"), 8)
    return f"{model} (local weights {weights})" if model and weights else model


def shown(value: object, limit: int = _SHOWN_CHARS) -> str | None:
    """Return text that is safe for a terminal, None for what is no text."""
    if not isinstance(value, str):
        return None
    return "".join(char if char.isprintable() else "?" for char in value[:limit])
