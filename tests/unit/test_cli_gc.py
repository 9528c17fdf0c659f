"""``nixl-offload gc`` over a shared directory: what it prints, deletes and never touches, and how it fails. The plan:
the oldest go, nothing young does, limits are kept, and hardly more is deleted than they ask for.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from nixl_offload.cli import gc as collection
from nixl_offload.cli.common import about_size, moment, plural
from nixl_offload.errors import StoreError
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.inspect import ChunkInfo, ShardInfo
from nixl_offload.tiers.shared.inspect import SharedInspector
from nixl_offload.tiers.shared.naming import manifest_name, shard_name
from nixl_offload.tiers.shared.sweep import GRACE_S, Ages, make_plan
from nixl_offload.types import Key
from tests.unit.engine_rig import until
from tests.unit.shared_rig import MemoryStore
from tests.unit.stored_rig import RANKS, Cli, key, namespace_of, put, put_chunk, put_manifest

BLUE = namespace_of("blue", "org/blue")
RED = namespace_of("red", "org/red")
HOUR_S = 3600.0


class Tree:
    """A directory with chunks of chosen ages, and a config that names it."""

    def __init__(self, directory: Path, cli: Cli) -> None:
        self.root, self.file, self._cli = directory / "kv", directory / "kv.yaml", cli
        self.store = TreeStore(str(self.root))
        self.file.write_text(f"tiers: [{{kind: shared_dir, path: {self.root}, capacity: 1GiB}}]\n")

    def age(self, name: str, age_s: float) -> None:
        os.utime(self.root / name, (time.time() - age_s,) * 2)

    def chunk(self, namespace: Any, number: int, age_s: float, size_bytes: int = 1000) -> list[str]:
        names = put_chunk(self.store, namespace, number, size_bytes)
        for name in names:
            self.age(name, age_s)
        return names

    def files(self) -> set[str]:
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()}

    def gc(self, arguments: str = "") -> int:
        return self._cli("gc", self.file, *arguments.split())


@pytest.fixture
def tree(tmp_path: Path, cli: Cli) -> Iterator[Tree]:
    tree = Tree(tmp_path, cli)
    yield tree
    tree.store.close()


def test_a_look_tells_all_and_deletes_nothing(tree: Tree, cli: Cli) -> None:
    for number in range(3):
        tree.chunk(BLUE, number, HOUR_S)
    tree.chunk(RED, 0, 2 * HOUR_S, 5000)
    put(tree.store, "notes.txt")
    before = tree.files()
    assert tree.gc("--max-size 8kB") == 0
    assert tree.files() == before
    assert cli.out.splitlines()[1] == "1 other object beside them, never touched"
    assert cli.out.splitlines()[3] == "Plan: 1 chunk in 2 objects, 7.81KiB to delete; 7.81KiB stay."


def test_what_is_older_goes_and_nothing_of_the_last_ten_minutes(tree: Tree, cli: Cli) -> None:
    _, young, fresh = (tree.chunk(BLUE, number, age_s) for number, age_s in enumerate((7000.0, 700.0, 500.0)))
    assert tree.gc("--older-than 1h --delete") == 0
    assert tree.files() == {*young, *fresh}
    assert tree.gc("--older-than 0s --max-size 0 --delete") == 0
    assert tree.files() == {*fresh}
    assert "too much, but what is left was written or used within the last 10m" in cli.out


def test_a_tenants_quota_counts_for_the_tenant_alone(tree: Tree, cli: Cli) -> None:
    """Other tenants' chunks are older and larger, and stay."""
    manifests = {put_manifest(tree.store, BLUE), put_manifest(tree.store, RED)}
    red = tree.chunk(RED, 0, 90 * HOUR_S, 50_000)
    blue = [tree.chunk(BLUE, number, HOUR_S * (number + 1)) for number in range(4)]
    assert tree.gc("--tenant blue --max-size 5kB --delete --json") == 0
    assert (cli.json["namespaces"], cli.json["outcome"]["deleted"]["chunks"]) == (1, 2)
    assert tree.files() == {*red, *blue[0], *blue[1], *manifests}
    assert tree.gc(f"--namespace {RED.name} --older-than 0s --delete") == 0
    assert f"{tree.root}, namespace {RED.name}: 1 chunk in 2 objects" in cli.out
    assert tree.files() == {*blue[0], *blue[1], *manifests}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 100_000,
        b'{"fields": {"tenant": "blue"}}',
        json.dumps(namespace_of("blue", "other").manifest()).encode(),
    ],
)
def test_nobody_passes_a_namespace_off_as_another_tenants(content: bytes, tree: Tree, cli: Cli) -> None:
    """The manifest in RED's namespace claims to be blue's, or is nonsense."""
    tree.store.write(manifest_name(RED.name), memoryview(content))
    red = tree.chunk(RED, 0, 90 * HOUR_S)
    assert tree.gc("--tenant blue --older-than 1h --delete") == 1
    assert set(red) < tree.files()
    assert cli.err == "nixl-offload: nothing is there of tenant blue\n"


def test_what_is_not_ours_is_never_touched(tree: Tree, tmp_path: Path) -> None:
    ours = tree.chunk(BLUE, 0, 90 * HOUR_S)
    digits = key(1).hex()
    strangers = [
        "README",
        "backup/2024.tar",
        f"{BLUE.name}/notes.txt",
        f"{BLUE.name}/{digits[:2]}/{digits}.000g",
        f"{BLUE.name}/00/{digits}.0000",
        f"{BLUE.name}/{digits[:2]}/{digits}.0000.bak",
        f"{BLUE.name.upper()}/{digits[:2]}/{digits}.0000",
        f"{BLUE.name}0",
        f"{RED.name}0/manifest.json",
        "manifest.json",
    ]
    for name in strangers:
        put(tree.store, name)
        tree.age(name, 90 * HOUR_S)
    outside = tmp_path / "outside"
    outside.write_text("precious")
    os.symlink(outside, tree.root / shard_name(BLUE.name, key(2), 0).replace("/", "_"))
    assert tree.gc("--older-than 0s --max-size 0 --delete") == 0
    assert set(strangers) <= tree.files()
    assert not set(ours) & tree.files()
    assert outside.read_text() == "precious"


def test_an_empty_namespace_loses_its_manifest_after_a_day(tree: Tree, cli: Cli) -> None:
    old, young = put_manifest(tree.store, BLUE), put_manifest(tree.store, RED)
    tree.age(old, 25 * HOUR_S)
    tree.age(young, 23 * HOUR_S)
    assert tree.gc() == 0
    assert tree.files() == {old, young}
    assert tree.gc("--delete") == 0
    assert tree.files() == {young}
    assert "Deleted: 1 manifest of namespaces that are empty." in cli.out
    tree.age(young, 25 * HOUR_S)
    tree.chunk(RED, 0, 20 * HOUR_S)
    for left in ({young}, set()):  # the run that empties a namespace keeps its manifest; the next run deletes it
        assert tree.gc("--older-than 1h --delete") == 0
        assert tree.files() == left


def test_our_drafts_of_writers_that_died_go_after_an_hour(tree: Tree, cli: Cli) -> None:
    directory, _, base = shard_name(BLUE.name, key(1), 0).rpartition("/")
    old, young = (f"{directory}/.{base}.1-abcd.{number}.tmp" for number in range(2))
    theirs = {".theirs.tmp", "home/.document.17-abcd.0.tmp", f"{BLUE.name}/.x.1-abcd.0.tmp"}
    for draft in (old, young, *theirs):
        (tree.root / draft).parent.mkdir(parents=True, exist_ok=True)
        (tree.root / draft).write_bytes(b"half")
        tree.age(draft, 0.5 * HOUR_S if draft == young else 2 * HOUR_S)
    for arguments in ("", f"--namespace {BLUE.name} --older-than 0s --delete"):
        tree.gc(arguments)
        assert tree.files() == {old, young, *theirs}
    assert tree.gc("--delete") == 0
    assert tree.files() == {young, *theirs}
    assert "Deleted: 1 draft older than 1h, of writers that died." in cli.out


def failing_delete(monkeypatch: pytest.MonkeyPatch, errors: Iterator[BaseException | None]) -> None:
    """Make batches fail as in a store: after all names were tried."""
    real = TreeStore.delete

    def delete(store: TreeStore, names: Sequence[str]) -> None:
        error = next(errors)
        real(store, names[1:] if error else names)
        if error:
            raise error

    monkeypatch.setattr(TreeStore, "delete", delete)
    monkeypatch.setattr(collection, "_BATCH_NAMES", 2 * RANKS)


DENIED = StoreError("cannot delete: Permission denied", cause="denied")


def test_single_failures_do_not_stop_it(tree: Tree, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    for number in range(20):
        tree.chunk(BLUE, number, HOUR_S)
    with monkeypatch.context() as patch:
        failing_delete(patch, itertools.cycle([DENIED, DENIED, None]))
        assert tree.gc("--older-than 0s --delete") == 1
    assert len(tree.files()) == 7, "one file of each batch that failed"
    assert "Deleted: 6 chunks in 12 objects" in cli.out
    assert cli.err.splitlines() == [
        *["nixl-offload: cannot delete: Permission denied"] * 5,
        "nixl-offload: up to 28 objects not deleted; the rest went on; run again",
    ]
    assert tree.gc("--older-than 0s --delete") == 0
    assert tree.files() == set()


def test_an_interruption_tells_what_was_done(tree: Tree, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    for number in range(10):
        tree.chunk(BLUE, number, HOUR_S)
    failing_delete(monkeypatch, iter([None, None, KeyboardInterrupt()]))
    assert tree.gc("--older-than 0s --delete") == 130
    assert re.search("Deleted: 4 chunks in 8 objects", cli.out)
    assert cli.err == "nixl-offload: interrupted\n"


def test_sizes_and_times_for_people() -> None:
    assert [about_size(n) for n in (0, 1023, 1024, 3_371_549, 52 << 30, 999 << 30, 1 << 50)] == [
        *("0B", "1023B", "1.00KiB", "3.22MiB", "52.0GiB", "999GiB", "1.00PiB")
    ]
    assert moment(0) == "1970-01-01 00:00:00Z"
    assert moment(float("inf")) == moment(1e300) == "-"
    assert (plural(1, "chunk"), plural(2000, "chunk")) == ("1 chunk", "2,000 chunks")


# Large namespaces are listed and swept in parts, on several threads.

NAME, BATCH_NAMES = BLUE.name, 4


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """Return a store with 1,000 chunks."""
    monkeypatch.setattr(collection, "_SPLIT_OBJECTS", 100)
    monkeypatch.setattr(collection, "_BATCH_NAMES", BATCH_NAMES)
    store = MemoryStore()
    for number, rank in itertools.product(range(1000), range(RANKS)):
        store.put(shard_name(NAME, key(number), rank), age_s=HOUR_S)
    return store


def collect(store: MemoryStore, part: float) -> collection.Collection:
    """Delete this share of the chunks."""
    inspector = SharedInspector(store, kind="s3", capacity_bytes=None)
    run = collection.Collection(inspector, Namespace(namespace=None, tenant=None))
    ages = run.count()
    plan = make_plan(ages, max_bytes=round(ages.total.size_bytes * (1 - part)), older_than_s=None)
    run.delete(plan)
    return run


def no_thread_is_left() -> bool:
    return not any(thread.name.startswith("nixl-offload-gc") for thread in threading.enumerate())


def test_a_large_namespace_is_counted_whole_and_swept_in_whole_chunks(store: MemoryStore) -> None:
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
    until(no_thread_is_left)


def test_a_part_that_cannot_be_listed_ends_the_count(store: MemoryStore) -> None:
    def refuse(operation: str, name: str) -> None:
        if name.endswith("/80/"):
            raise StoreError("no", cause="server")

    store.before = refuse
    with pytest.raises(StoreError, match="no"):
        collect(store, 0.5)
    assert len(store.objects) == 2000
    until(no_thread_is_left)


def test_of_deletes_that_fail_every_object_is_counted(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
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


# What is planned


NOW_S = 1_800_000_000.0


def chunk_of(age_s: float, size_bytes: int = 100, objects: int = 1) -> ChunkInfo:
    shards = (ShardInfo(n, f"n{n}", 0 if n else size_bytes, 0, NOW_S - age_s) for n in range(objects))
    return ChunkInfo(Key(bytes(36)), tuple(shards))


_AGES = st.floats(min_value=-100, max_value=3e7) | st.integers(0, 2000).map(float)
_CHUNKS = st.lists(st.builds(chunk_of, _AGES, st.integers(0, 1000), st.integers(1, 4)), max_size=60)


def width_s(item: ChunkInfo) -> float:
    """Return the width of its age bucket."""
    return 0.001 * max(0.0, NOW_S - item.modified_s) + 1.0


@given(_CHUNKS, st.none() | st.integers(0, 20_000), st.none() | st.floats(0, 1e7))
def test_the_limits_are_kept_by_any_plan(
    chunks: list[ChunkInfo], max_bytes: int | None, older_than_s: float | None
) -> None:
    """Limits hold to within one age bucket."""
    ages = Ages(NOW_S)
    for item in chunks:
        ages.add(item)
    plan = make_plan(ages, max_bytes=max_bytes, older_than_s=older_than_s)
    taken = [(item, plan.takes(item)) for item in chunks]
    gone, kept = [item for item, goes in taken if goes], [item for item, goes in taken if not goes]
    assert all(item.modified_s < NOW_S - GRACE_S for item in gone)
    old_enough = [item for item in kept if item.modified_s < NOW_S - GRACE_S]
    if older_than_s is not None:
        assert all(item.modified_s >= NOW_S - older_than_s for item in old_enough)
    kept_bytes = sum(item.size_bytes for item in kept)
    if max_bytes is not None:
        left = [item for item in old_enough if item.size_bytes and item.modified_s < NOW_S - GRACE_S - width_s(item)]
        assert kept_bytes <= max_bytes or not left
    expired = [item for item in gone if older_than_s is not None and item.modified_s < NOW_S - older_than_s]
    by_size = [item for item in gone if item not in expired]
    if by_size:
        assert max_bytes is not None
        youngest = max(by_size, key=lambda item: item.modified_s)
        assert youngest.modified_s - width_s(youngest) <= min((item.modified_s for item in kept), default=math.inf)
        in_last = [item for item in gone if item.modified_s >= youngest.modified_s - 2 * width_s(youngest)]
        assert max_bytes - kept_bytes <= sum(item.size_bytes for item in in_last), "hardly more goes than must"
