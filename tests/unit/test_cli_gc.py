"""``nixl-offload gc`` over a shared directory: what it prints, deletes and never touches, and how it fails."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nixl_offload.cli import gc as collection
from nixl_offload.cli.common import about_size, moment, plural
from nixl_offload.cli.main import main
from nixl_offload.errors import StoreError
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.shared.naming import manifest_name, shard_name
from tests.unit.gc_rig import RANKS, key, namespace_of, put, put_chunk, put_manifest

BLUE = namespace_of("blue", "org/blue")
RED = namespace_of("red", "org/red")
HOUR_S = 3600.0


class Tree:
    """A directory with chunks of chosen ages, and a config that names it."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "kv"
        self.store = TreeStore(str(self.root))
        self.file = directory / "kv.yaml"
        self.capacity("1GiB")

    def capacity(self, text: str) -> None:
        tier = f"{{kind: shared_dir, path: {self.root}, capacity: {text}}}"
        self.file.write_text(f"tiers: [{tier}]\n")

    def age(self, name: str, age_s: float) -> None:
        modified_s = time.time() - age_s
        os.utime(self.root / name, (modified_s, modified_s))

    def chunk(self, namespace: Any, number: int, age_s: float, size_bytes: int = 1000) -> list[str]:
        names = put_chunk(self.store, namespace, number, size_bytes)
        for name in names:
            self.age(name, age_s)
        return names

    def files(self) -> set[str]:
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()}

    def gc(self, *arguments: str) -> int:
        return main(["gc", str(self.file), *arguments])


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    tree = Tree(tmp_path)
    yield tree
    tree.store.close()


def outcome(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_a_look_tells_all_and_deletes_nothing(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    for namespace in (BLUE, RED):
        put_manifest(tree.store, namespace)
    for number in range(3):
        tree.chunk(BLUE, number, HOUR_S)
    tree.chunk(RED, 0, 2 * HOUR_S, 5000)
    put(tree.store, "notes.txt")
    before = tree.files()
    assert tree.gc("--max-size", "8kB") == 0
    assert tree.files() == before
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tree.root}: 4 chunks in 8 objects, 15.6KiB"
    assert lines[1] == "1 other object beside them, never touched"
    red, blue = sorted(lines[2:4], key=lambda line: "tenant blue" in line)
    assert blue.startswith(f"  {BLUE.name}  tenant blue, model org/blue: 3 chunks in 6 objects, 5.86KiB, written 20")
    assert red.startswith(f"  {RED.name}  tenant red, model org/red: 1 chunk in 2 objects, 9.77KiB, written 20")
    assert lines[4] == "Limits: at most 7.81KiB."
    assert lines[5] == "Plan: 1 chunk in 2 objects, 7.81KiB to delete; 7.81KiB stay."
    assert lines[6] == "Nothing was deleted; --delete does it (and what writers that died have left)."


def test_what_is_older_goes_and_nothing_of_the_last_ten_minutes(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    old, young, fresh = (tree.chunk(BLUE, number, age_s) for number, age_s in enumerate((7000.0, 700.0, 500.0)))
    assert tree.gc("--older-than", "1h", "--delete") == 0
    assert tree.files() == {*young, *fresh}
    assert tree.gc("--older-than", "0s", "--max-size", "0", "--delete") == 0
    assert tree.files() == {*fresh}
    assert "too much, but what is left was written or used within the last 10m" in capsys.readouterr().out
    assert not set(old) & tree.files()


def test_a_tenants_quota_counts_for_the_tenant_alone(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    """Other tenants' chunks are older and larger, and stay."""
    put_manifest(tree.store, BLUE)
    put_manifest(tree.store, RED)
    red = tree.chunk(RED, 0, 90 * HOUR_S, 50_000)
    blue = [tree.chunk(BLUE, number, HOUR_S * (number + 1)) for number in range(4)]
    assert tree.gc("--tenant", "blue", "--max-size", "5kB", "--delete", "--json") == 0
    assert {*red, *blue[0], *blue[1]} == {name for name in tree.files() if "manifest" not in name}
    found = outcome(capsys)
    assert [entry["name"] for entry in found["namespaces"]] == [BLUE.name]
    assert found["outcome"]["deleted"]["chunks"] == 2
    assert tree.gc("--namespace", RED.name, "--older-than", "0s", "--delete") == 0
    assert {*blue[0], *blue[1]} == {name for name in tree.files() if "manifest" not in name}
    assert f"{tree.root}, namespace {RED.name}: 1 chunk in 2 objects" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 100_000,
        b'{"fields": {"tenant": "blue"}}',
        json.dumps(namespace_of("blue", "other").manifest()).encode(),
    ],
)
def test_nobody_passes_a_namespace_off_as_another_tenants(
    content: bytes, tree: Tree, capsys: pytest.CaptureFixture[str]
) -> None:
    """The manifest in RED's namespace says that it is blue's, or nothing that makes sense."""
    tree.store.write(manifest_name(RED.name), memoryview(content))
    red = tree.chunk(RED, 0, 90 * HOUR_S)
    assert tree.gc("--tenant", "blue", "--older-than", "1h", "--delete") == 1
    assert set(red) < tree.files()
    assert capsys.readouterr().err == "nixl-offload: nothing is there of tenant blue\n"
    assert tree.gc("--json") == 0
    (entry,) = outcome(capsys)["namespaces"]
    assert (entry["tenant"], entry["model"]) == (None, None)


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
    assert f"00/{digits}" not in shard_name(BLUE.name, key(1), 0)
    for name in strangers:
        put(tree.store, name)
        tree.age(name, 90 * HOUR_S)
    outside = tmp_path / "outside"
    outside.write_text("precious")
    os.symlink(outside, tree.root / shard_name(BLUE.name, key(2), 0).replace("/", "_"))
    assert tree.gc("--older-than", "0s", "--max-size", "0", "--delete") == 0
    assert set(strangers) <= tree.files()
    assert not set(ours) & tree.files()
    assert outside.read_text() == "precious"


def test_an_empty_namespace_loses_its_manifest_after_a_day(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    old, young = put_manifest(tree.store, BLUE), put_manifest(tree.store, RED)
    tree.age(old, 25 * HOUR_S)
    tree.age(young, 23 * HOUR_S)
    assert tree.gc() == 0
    assert tree.files() == {old, young}
    assert tree.gc("--delete") == 0
    assert tree.files() == {young}
    assert "Deleted: 1 manifest of namespaces that are empty." in capsys.readouterr().out
    tree.age(young, 25 * HOUR_S)
    tree.chunk(RED, 0, 20 * HOUR_S)
    assert tree.gc("--older-than", "1h", "--delete") == 0
    assert tree.files() == {young}, "the run that empties a namespace leaves the manifest to the next"
    assert tree.gc("--older-than", "1h", "--delete") == 0
    assert tree.files() == set()


def test_our_drafts_of_writers_that_died_go_after_an_hour(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    name = shard_name(BLUE.name, key(1), 0)
    directory, _, base = name.rpartition("/")
    drafts = [f"{directory}/.{base}.1-abcd.{number}.tmp" for number in range(2)]
    (tree.root / directory).mkdir(parents=True)
    for draft, age_s in zip(drafts, (2 * HOUR_S, 0.5 * HOUR_S), strict=True):
        (tree.root / draft).write_bytes(b"half")
        tree.age(draft, age_s)
    theirs = {".theirs.tmp", "home/.document.17-abcd.0.tmp", f"{BLUE.name}/.x.1-abcd.0.tmp"}
    for foreign in theirs:
        (tree.root / foreign).parent.mkdir(exist_ok=True)
        (tree.root / foreign).write_bytes(b"theirs")
        tree.age(foreign, 2 * HOUR_S)
    assert tree.gc() == 0
    assert tree.gc("--namespace", BLUE.name, "--delete") == 0
    assert tree.files() == {*drafts, *theirs}
    assert tree.gc("--delete") == 0
    assert tree.files() == {drafts[1], *theirs}
    assert "Deleted: 1 draft older than 1h, of writers that died." in capsys.readouterr().out


def failing_delete(monkeypatch: pytest.MonkeyPatch, failures: Iterator[bool]) -> None:
    """Let batches fail as a store's do: after all names were tried."""
    real = TreeStore.delete

    def delete(store: TreeStore, names: Sequence[str]) -> None:
        real(store, names[1:] if (fails := next(failures)) else names)
        if fails:
            raise StoreError(f"{store.where}: cannot delete {names[0]}: Permission denied", cause="denied")

    monkeypatch.setattr(TreeStore, "delete", delete)
    monkeypatch.setattr(collection, "_BATCH_NAMES", 2 * RANKS)


def test_single_failures_do_not_stop_it(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(20):
        tree.chunk(BLUE, number, HOUR_S)
    failing_delete(monkeypatch, itertools.cycle([True, True, False]))
    assert tree.gc("--older-than", "0s", "--delete") == 1
    captured = capsys.readouterr()
    assert len(tree.files()) == 7, "one file of each batch that failed"
    assert "Deleted: 6 chunks in 12 objects" in captured.out
    lines = captured.err.splitlines()
    assert len(lines) == 6, "the first five, and the sum"
    assert re.fullmatch(rf"nixl-offload: {tree.root}: cannot delete {BLUE.name}/.*: Permission denied", lines[0])
    assert lines[-1] == "nixl-offload: up to 28 objects not deleted; the rest went on; run again"
    monkeypatch.undo()
    assert tree.gc("--older-than", "0s", "--delete") == 0
    assert tree.files() == set()


def test_a_store_that_is_down_is_given_up(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(40):
        tree.chunk(BLUE, number, HOUR_S)
    calls = itertools.count()
    failing_delete(monkeypatch, (next(calls) >= 0 for _ in itertools.count()))
    assert tree.gc("--older-than", "0s", "--delete", "--json") == 1
    assert next(calls) == 3
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].endswith("not deleted; gave up after several failures in a row; run again")
    assert json.loads(captured.out)["outcome"]["gave_up"] is True


def test_an_interruption_tells_what_was_done(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(10):
        tree.chunk(BLUE, number, HOUR_S)
    real, calls = TreeStore.delete, itertools.count()

    def delete(store: TreeStore, names: Sequence[str]) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        real(store, names)

    monkeypatch.setattr(TreeStore, "delete", delete)
    monkeypatch.setattr(collection, "_BATCH_NAMES", 2 * RANKS)
    assert tree.gc("--older-than", "0s", "--delete") == 130
    captured = capsys.readouterr()
    assert "Deleted: 4 chunks in 8 objects" in captured.out
    assert captured.err == "nixl-offload: interrupted\n"
    assert len(tree.files()) == 12


def test_sizes_and_times_for_people() -> None:
    assert [about_size(n) for n in (0, 1023, 1024, 3_371_549, 52 << 30, 999 << 30, 1 << 50)] == [
        *("0B", "1023B", "1.00KiB", "3.22MiB", "52.0GiB", "999GiB", "1.00PiB")
    ]
    assert moment(0) == "1970-01-01 00:00:00Z"
    assert moment(float("inf")) == moment(1e300) == "-"
    assert (plural(1, "chunk"), plural(2000, "chunk")) == ("1 chunk", "2,000 chunks")
