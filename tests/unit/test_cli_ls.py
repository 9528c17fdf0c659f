"""``nixl-offload ls``: slabs, trees and memory, beside a server and without one; looking changes nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from nixl_offload.cli.ls import about_age, differing
from nixl_offload.identity.namespace import make_namespace
from nixl_offload.index.database import Database
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.lock import DirectoryLock, holder_of
from nixl_offload.tiers.slab.index_reader import IndexReader
from tests.unit.gc_rig import key, put, put_chunk, put_manifest
from tests.unit.stored_rig import SLOT_BYTES, Cli, StoredSlab, snapshot, stored_namespace

CHUNKS = 6


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[StoredSlab]:
    slab = StoredSlab(tmp_path)
    slab.open()
    slab.store(range(CHUNKS))
    yield slab
    slab.close()


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


def test_a_slab_as_people_read_it(slab: StoredSlab, cli: Cli) -> None:
    before = snapshot(slab.root)
    assert cli("ls", slab.file) == 0
    assert snapshot(slab.root) == before
    lines = cli.out.splitlines()
    size = f"{2 * CHUNKS * SLOT_BYTES / 1024:.0f}KiB"
    share = r"[0-9.]+[KM]iB on disk; [0-9.]+% of the capacity, 64\.0MiB"
    assert re.fullmatch(rf"{slab.root} \(slab\): 6 chunks in 1 namespace, {size}; {share}", lines[0])
    assert lines[1:4] == [
        "",
        f"namespace {slab.namespace.name}: tenant blue, model org/blue",
        "    engine vllm 0.33.0, platform cpu, dtype bfloat16, kv_layout LBHNC, tp 2, world_size 2, "
        "blocks_per_chunk 4, tokens_per_block 16",
    ]
    assert re.fullmatch(rf"    6 chunks in 12 shards, {size}; written 20.*Z to 20.*Z", lines[4])
    assert re.fullmatch(r"    last opened 20.*Z; its directory is open now: pid \d+ on '.*' since 20.*", lines[5])
    slab.close()
    before = snapshot(slab.root)
    assert cli("ls", slab.file) == 0
    assert snapshot(slab.root) == before
    assert cli.out.splitlines()[5].endswith("; no engine has its directory open")


def test_a_slab_as_programs_read_it(slab: StoredSlab, cli: Cli) -> None:
    assert cli("ls", slab.file, "--json") == 0
    (tier,) = cli.json["tiers"]
    (namespace,) = tier.pop("namespaces")
    assert tier.pop("used_share") == tier["used_bytes"] / (64 << 20)
    assert tier.pop("used_bytes") > 12 * SLOT_BYTES
    assert tier == {
        "kind": "slab",
        "where": str(slab.root),
        "capacity_bytes": 64 << 20,
        "other_objects": 0,
    }
    now_s = time.time()
    for name in ("oldest_s", "newest_s", "last_opened_s"):
        assert now_s - 60 < namespace.pop(name) <= now_s + 1
    assert namespace.pop("made_for")["world_size"] == 2
    assert namespace == {
        "name": slab.namespace.name,
        "part": None,
        "tenant": "blue",
        "model": "org/blue",
        "chunk_tokens": 64,
        "chunks": CHUNKS,
        "shards": 2 * CHUNKS,
        "bytes": 2 * CHUNKS * SLOT_BYTES,
        "open_now": str(holder_of(slab.root / "lock")),
        "trouble": None,
    }


def test_keys_are_comments_and_columns_and_lines_of_json(slab: StoredSlab, cli: Cli) -> None:
    """A slot whose header is another chunk's has no age: the index is believed only as far as the header agrees."""
    slab.damage(5, 0, 0, slab.shard(4, 0))
    assert cli("ls", slab.file, "--keys") == 0
    heading, columns, *rows = cli.out.splitlines()
    assert heading == f"# {slab.root}, namespace {slab.namespace.name}: tenant blue, model org/blue"
    assert columns == "# key  group  rank  size  age  place"
    assert len(rows) == 2 * CHUNKS
    assert re.fullmatch(rf"{key(0).hex()}  0  1  24\.0KiB  \d+s  {re.escape(slab.place(0, 1))}", rows[1])
    assert rows[-1].split()[4:5] == ["?"]
    assert cli("ls", slab.file, "--keys", "--json") == 0
    assert [line["key"] for line in cli.lines] == [key(number).hex() for number in range(CHUNKS)]
    assert cli.lines[0]["shards"][1] == {"rank": 1, "bytes": SLOT_BYTES, "place": slab.place(0, 1)}
    assert cli.lines[5]["written_s"] is None


def test_tiers_in_their_order_memory_in_a_line(slab: StoredSlab, tmp_path: Path, cli: Cli) -> None:
    store = TreeStore(str(tmp_path / "tree"))
    slab.fill(store, range(3))
    red = stored_namespace("red", "org/red")
    put_manifest(store, red)
    put_chunk(store, red, 7, 5000)
    put(store, "notes.txt")
    tree = {"kind": "shared_dir", "path": str(tmp_path / "tree"), "capacity": "1MiB"}
    slab.file.write_text(yaml.safe_dump({"tiers": [{"kind": "memory", "capacity": "1GiB"}, tree]}))
    assert cli("ls", slab.file) == 0
    lines = cli.out.splitlines()
    assert lines[0].startswith("Memory tier: lives in the server's processes and cannot be looked at from outside")
    size = f"{(6 * SLOT_BYTES + 10_000) / 1024:.0f}KiB"
    assert lines[2] == (
        f"{tmp_path}/tree (shared_dir): 4 chunks in 2 namespaces, {size}; "
        f"{(6 * SLOT_BYTES + 10_000) / 2**20:.1%} of the capacity, 1.00MiB"
    )
    assert lines[3] == "1 other object beside them, never touched"
    assert "opened" not in cli.out, "a tree has no lock"
    assert cli("ls", slab.file, "--json", "--tenant", "red") == 0
    memory, found = cli.json["tiers"]
    assert memory["kind"] == "memory"
    assert memory["capacity_bytes"] == 1 << 30
    assert [entry["tenant"] for entry in found["namespaces"]] == ["red"]
    assert found["used_bytes"] is None, "what one tenant holds is not what fills the tier"
    assert cli("ls", slab.file, "--keys", "--namespace", red.name) == 0
    assert [line.split()[0] for line in cli.out.splitlines() if line[0] != "#"] == [key(7).hex()] * 2


def test_two_namespaces_data_parallel_parts_and_strangers(slab: StoredSlab, cli: Cli, tmp_path: Path) -> None:
    """What is in the way is counted and left; a namespace without manifest or index is listed without chunks."""
    slab.close()
    part = slab.root / "dp-1"
    part.mkdir()
    shutil.copytree(slab.root / slab.namespace.name, part / slab.namespace.name)
    unknown = slab.root / ("ab" * 16)
    unknown.mkdir()
    (unknown / "manifest.json").write_text('{"namespace": "\x1b[2Jab", "fields": {}}')
    shutil.copytree(slab.root / slab.namespace.name, slab.root / ("ef" * 16))
    (slab.root / "notes.txt").write_text("not ours")
    os.symlink(tmp_path, slab.root / ("cd" * 16))
    lock = DirectoryLock(part / "lock")
    lock.acquire()
    try:
        assert cli("ls", slab.file, "--json") == 0
    finally:
        lock.release()
    (tier,) = cli.json["tiers"]
    found = {(entry["part"], entry["name"]): entry for entry in tier["namespaces"]}
    assert {place: (entry["chunks"], bool(entry["open_now"])) for place, entry in found.items()} == {
        (None, slab.namespace.name): (CHUNKS, False),
        ("dp-1", slab.namespace.name): (CHUNKS, True),
        (None, "ab" * 16): (0, False),
        (None, "ef" * 16): (0, False),
    }
    assert found[None, "ef" * 16]["trouble"] == "no manifest that fits: nobody knows where its shards lie"
    assert found[None, "ab" * 16]["trouble"] == "no index: its chunks are not known"
    assert tier["other_objects"] == 2
    assert cli("ls", slab.file) == 0
    assert "no manifest that fits: its owner is unknown" in cli.out
    assert "\x1b" not in cli.out


def test_an_index_of_an_engine_killed_in_a_commit_is_read_as_it_was_before(tmp_path: Path) -> None:
    """Half of the transaction is in the file; the reader rolls it back, as the next engine would."""
    path = tmp_path / "index.sqlite"
    script = (
        "import os, sys\n"
        "from nixl_offload.index.database import Database\n"
        "database = Database(sys.argv[1], {'extent_bytes': '1'})\n"
        "database.connect()\n"
        "rows = lambda byte: [(byte * 31 + bytes([n]) + bytes(4), n * 4096, 4096) for n in range(100)]\n"
        "database.write(rows(b'k'))\n"
        # Pages that do not fit this cache are written within the transaction.
        "database._connection.execute('PRAGMA cache_spill=ON')\n"
        "database._connection.execute('PRAGMA cache_size=1')\n"
        "database._connection.execute('BEGIN IMMEDIATE')\n"
        "for row in rows(b'n'):\n"
        "    database._connection.execute('INSERT OR REPLACE INTO slot VALUES (NULL, ?, ?, ?)', row)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(path)], check=False).returncode == -9
    assert path.read_bytes().count(b"n" * 31) > 0, "nothing was half done"
    reader = IndexReader(path)
    assert [row.offset for row in reader.rows(90)] == [n * 4096 for n in range(90, 100)]
    assert len(reader.find(b"k".hex() * 8, 500)) == 100
    assert [row.offset for row in reader.find(b"k".hex() * 31 + "0", 500)] == [n * 4096 for n in range(16)]
    database = Database(str(path), {"extent_bytes": "1"})
    database.connect()
    assert database.newest() == 100
    database.disconnect()
    assert set(snapshot(tmp_path)) == {"index.sqlite"}


def test_what_separates_two_namespaces(slab: StoredSlab, cli: Cli, tmp_path: Path) -> None:
    """By how their names begin; fields that are equal are left out, and no manifest can control a terminal."""
    store = TreeStore(str(tmp_path / "tree"))
    fields = stored_namespace("blue", "org/m").fields
    one = make_namespace(replace(fields, settings={"model_config.max_model_len": 4}))
    settings = {"model_config.max_model_len": 8, "a\x1b": "\x1b"}
    other = make_namespace(replace(fields, dtype="float16", settings=settings))
    for each in (one, other):
        put_manifest(store, each)
    put(store, f"{'0' * 32}/ab/{'ab' * 36}.0000")
    slab.file.write_text(yaml.safe_dump({"tiers": [{"kind": "shared_dir", "path": store.where, "capacity": "1MiB"}]}))
    assert cli("ls", slab.file, "--diff", one.name[:6], other.name[:6]) == 0
    assert cli.out.splitlines() == [
        f"namespace {one.name}: tenant blue, model org/m",
        f"namespace {other.name}: tenant blue, model org/m",
        '    dtype: "bfloat16" | "float16"',
        "    model_config.max_model_len: 4 | 8",
        '    a?: (not there) | "\\u001b"',
    ]
    assert cli("ls", slab.file, "--json", "--diff", one.name, other.name) == 0
    assert cli.json["namespaces"] == [one.name, other.name]
    assert cli.json["differs"]["a\x1b"] == [None, "\x1b"]
    for prefix, code, words in (
        (one.name, 0, ""),
        ("xyz", 1, "nothing is there of namespace xyz"),
        ("", 2, "--diff: '' begins the names of 3 namespaces; say more of it"),
        ("0" * 32, 2, "has no manifest that fits its name"),
    ):
        assert cli("ls", slab.file, "--diff", one.name, prefix) == code
        assert words in cli.err


def test_types_count_when_fields_are_compared() -> None:
    """As they do in the fingerprint: 1, 1.0 and true make three namespaces."""
    first = {"a": 1, "b": True, "c": "x", "settings": {"d": None}}
    second = {"a": 1.0, "b": 1, "c": "x", "settings": {}}
    assert differing(first, second) == {"a": ("1", "1.0"), "b": ("true", "1"), "d": ("null", None)}


def test_a_tier_that_fails_hides_no_other(slab: StoredSlab, cli: Cli, tmp_path: Path) -> None:
    bucket = {"kind": "s3", "bucket": "kv-cache", "endpoint": "http://127.0.0.1:9", "request_timeout": "1s"}
    slab.file.write_text(
        yaml.safe_dump({"tiers": [{"kind": "slab", "path": str(slab.root), "capacity": "64MiB"}, bucket]})
    )
    assert cli("ls", slab.file) == 1
    assert cli.out.startswith(f"{slab.root} (slab): 6 chunks in 1 namespace")
    assert cli.err.startswith("nixl-offload: s3://kv-cache")
    assert cli("ls", slab.file, "--json") == 1
    good, failed = cli.json["tiers"]
    assert (good["namespaces"][0]["chunks"], failed["kind"], "failure" in failed) == (6, "s3", True)
    assert cli("ls", slab.file, "--keys", "--json") == 1
    assert (cli.lines[0]["tier"], cli.lines[-1]["tier"]) == ("slab", "s3")
    assert cli.lines[-1]["error"].startswith("s3://kv-cache")
    assert cli("stat", slab.file, "0" * 8, "--json") == 1
    assert cli.json["error"].startswith("s3://kv-cache")
    (tmp_path / "none").write_text("a file")
    slab.file.write_text(yaml.safe_dump({"tiers": [{"kind": "slab", "path": f"{tmp_path}/none", "capacity": "1MiB"}]}))
    assert cli("ls", slab.file) == 1
    assert cli.err == f"nixl-offload: {tmp_path}/none: is no directory; say another path in the config\n"


def test_a_namespace_or_tenant_that_is_not_there_is_no_success(slab: StoredSlab, cli: Cli) -> None:
    for option, name in (("--namespace", "0" * 32), ("--tenant", "green")):
        for form in ([], ["--keys"], ["--json"]):
            assert cli("ls", slab.file, option, name, *form) == 1
            assert cli.err == f"nixl-offload: nothing is there of {option[2:]} {name}\n"
    assert cli("verify", slab.file, "--namespace", "0" * 32) == 1
    assert cli.err == f"nixl-offload: nothing is there of namespace {'0' * 32}\n"


def test_a_damaged_index_is_named(slab: StoredSlab, cli: Cli) -> None:
    slab.close()
    (slab.root / slab.namespace.name / "index.sqlite").write_bytes(b"no database" * 1000)
    assert cli("ls", slab.file) == 0
    assert "is damaged: it has no rollback journal" in cli.out


def test_ages_for_people() -> None:
    seconds = (-5, 3, 119, 600, 7199, 7300, 200_000)
    assert [about_age(s) for s in seconds] == ["0s", "3s", "119s", "10m", "120m", "2h", "2d"]
