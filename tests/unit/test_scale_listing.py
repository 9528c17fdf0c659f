"""Large namespaces: ``gc`` lists them in ranges at once and deletes several batches at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256

import pytest

from nixl_offload.cli.gc import collection, listing
from nixl_offload.errors import StoreError
from nixl_offload.stores.base import ObjectInfo
from nixl_offload.tiers.shared.inspect import group_chunks
from nixl_offload.tiers.shared.sweep import make_plan
from tests.unit.shared_rig import SLOT, MemoryStore, namespace_of

NAMESPACE = namespace_of(2)
NAME = NAMESPACE.name


class SortedStore(MemoryStore):
    """Sorts once a listing, not once a name."""

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        self._enter("list", start_after)
        self._leave()
        for name in sorted(name for name in list(self.objects) if name.startswith(prefix) and name > start_after):
            if (found := self.objects.get(name)) is not None:
                yield ObjectInfo(name, *found)


def fill(store: MemoryStore, chunks: int, age_s: float = 3600.0) -> None:
    for number in range(chunks):
        digits = (sha256(str(number).encode()).digest() + bytes(4)).hex()
        for rank in range(2):
            store.put(f"{NAME}/{digits[:2]}/{digits}.{rank:04x}", SLOT, age_s)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> SortedStore:
    monkeypatch.setattr(listing, "SPLIT_OBJECTS", 100)
    monkeypatch.setattr(listing, "_BATCH_CHUNKS", 3)
    return SortedStore()


def test_a_large_namespace_is_listed_whole_by_several_threads(store: SortedStore) -> None:
    fill(store, 700)
    for foreign in ("manifest.json", "00", "000", "7f0", "7f/x", "ff/", "zz/y"):
        store.put(f"{NAME}/{foreign}")
    expected_others: list[ObjectInfo] = []
    expected = sorted(group_chunks(store.list(f"{NAME}/"), expected_others.append))
    others: list[ObjectInfo] = []
    assert sorted(listing.list_chunks(store, NAME, others.append)) == expected
    assert sorted(others) == sorted(expected_others)
    assert store.most_at_once <= listing.LISTS
    assert len(store.names("list")) == 1 + 1 + 256


def test_an_error_and_an_early_end_leave_no_thread(store: SortedStore) -> None:
    fill(store, 2000)
    chunks = listing.list_chunks(store, NAME, lambda info: None)
    next(chunks)
    chunks.close()

    def refuse(operation: str, name: str) -> None:
        if name.endswith("/800"):
            raise StoreError("no", cause="server")

    store.before = refuse
    with pytest.raises(StoreError, match="no"):
        list(listing.list_chunks(store, NAME, lambda info: None))
    deadline_s = time.monotonic() + 20.0
    while any(thread.name.startswith("nixl-offload-gc") for thread in threading.enumerate()):
        assert time.monotonic() < deadline_s, "a thread was left"


def collect(store: MemoryStore, part: float) -> collection.Collection:
    run = collection.Collection(store, namespace=None, tenant=None)
    ages = run.count()
    plan = make_plan(ages, now_s=time.time(), max_bytes=round(ages.total.size_bytes * (1 - part)), older_than_s=None)
    run.delete(plan, time.time())
    return run


def test_bulk_deletes_go_out_together_once_they_work(store: SortedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "_BATCH_NAMES", 4)
    fill(store, 1000)
    at_once, most = [0], [0]
    lock = threading.Lock()

    def delete(into: MemoryStore, names: Sequence[str]) -> None:
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        time.sleep(0.001)
        for name in names:
            del into.objects[name]
        with lock:
            at_once[0] -= 1

    monkeypatch.setattr(SortedStore, "delete", delete)
    run = collect(store, 0.5)
    assert run.deleted.objects == 2000 - len(store.objects)
    assert run.deleted.chunks == pytest.approx(500, abs=2)
    assert 1 < most[0] <= collection._DELETES
    assert all(f"{name[:-4]}{rank:04x}" in store.objects for name in store.objects for rank in range(2)), "whole chunks"


def test_of_deletes_that_fail_every_object_is_counted(store: SortedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "_BATCH_NAMES", 4)
    fill(store, 1000)
    calls = iter(range(10**6))
    remove = MemoryStore.delete

    def delete(into: MemoryStore, names: Sequence[str]) -> None:
        if next(calls) > 100:
            raise StoreError("HTTP 503", cause="throttled")
        remove(into, names)

    monkeypatch.setattr(SortedStore, "delete", delete)
    run = collect(store, 1.0)
    assert run.gave_up
    assert run.deleted.objects == 2000 - len(store.objects) == 404
    assert 3 * 4 <= run.failed_objects <= collection._DELETES * 4


def test_a_small_namespace_is_listed_once(store: SortedStore) -> None:
    fill(store, 50)
    assert len(list(listing.list_chunks(store, NAME, lambda info: None))) == 50
    assert len(store.names("list")) == 1
