"""Large namespaces: ``gc`` lists and sweeps them in parts, on several threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from hashlib import sha256

import pytest

from nixl_offload.cli import gc as collection
from nixl_offload.errors import StoreError
from nixl_offload.tiers.shared.sweep import make_plan
from tests.unit.shared_rig import SLOT, MemoryStore, namespace_of

NAME = namespace_of(2).name
BATCH_NAMES = 4


def fill(store: MemoryStore, chunks: int) -> None:
    for number in range(chunks):
        digits = (sha256(str(number).encode()).digest() + bytes(4)).hex()
        for rank in range(2):
            store.put(f"{NAME}/{digits[:2]}/{digits}.{rank:04x}", SLOT, 3600.0)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    monkeypatch.setattr(collection, "_SPLIT_OBJECTS", 100)
    monkeypatch.setattr(collection, "_BATCH_NAMES", BATCH_NAMES)
    return MemoryStore()


def collect(store: MemoryStore, part: float) -> collection.Collection:
    """Delete this share of the chunks."""
    run = collection.Collection(store, namespace=None, tenant=None)
    ages = run.count()
    plan = make_plan(ages, max_bytes=round(ages.total.size_bytes * (1 - part)), older_than_s=None)
    run.delete(plan)
    return run


def no_thread_is_left() -> bool:
    deadline_s = time.monotonic() + 20.0
    while any(thread.name.startswith("nixl-offload-gc") for thread in threading.enumerate()):
        if time.monotonic() > deadline_s:
            return False
    return True


def test_a_large_namespace_is_counted_whole_and_swept_in_whole_chunks(store: MemoryStore) -> None:
    fill(store, 1000)
    foreign = [f"{NAME}/{name}" for name in ("manifest.json", "00", "000", "7f0", "7f/x", "ff/", "zz/y")]
    for name in foreign:
        store.put(name)
    run = collect(store, 0.5)
    (entry,) = run.namespaces
    assert entry.ages.total.chunks == 1000
    assert entry.manifest is not None
    assert run.deleted.chunks == pytest.approx(500, abs=2)
    assert run.deleted.objects == 2000 + len(foreign) - len(store.objects)
    assert set(foreign) < set(store.objects)
    left = set(store.objects) - set(foreign)
    assert all(f"{name[:-4]}{rank:04x}" in left for name in left for rank in range(2)), "whole chunks"
    assert no_thread_is_left()


def test_a_part_that_cannot_be_listed_ends_the_count(store: MemoryStore) -> None:
    fill(store, 1000)

    def refuse(operation: str, name: str) -> None:
        if name.endswith("/80/"):
            raise StoreError("no", cause="server")

    store.before = refuse
    with pytest.raises(StoreError, match="no"):
        collect(store, 0.5)
    assert len(store.objects) == 2000
    assert no_thread_is_left()


def test_of_deletes_that_fail_every_object_is_counted(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, 1000)
    calls = iter(range(10**6))
    remove = MemoryStore.delete

    def delete(into: MemoryStore, names: Sequence[str]) -> None:
        if next(calls) > 100:
            raise StoreError("HTTP 503", cause="throttled")
        remove(into, names)

    monkeypatch.setattr(MemoryStore, "delete", delete)
    run = collect(store, 1.0)
    assert run.gave_up
    assert run.deleted.objects == 2000 - len(store.objects)
    assert run.deleted.chunks > 100
    assert 3 * 2 <= run.failed_objects <= collection._THREADS * BATCH_NAMES
