"""``nixl-offload ls``, ``stat`` and ``verify`` over a slab that engines have written, and over the same chunks in a
shared directory: what they print, that looking changes nothing, and that all damage is found and nothing else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from nixl_offload.chunk.header import HEADER_BYTES, decode_header, slot_bytes
from nixl_offload.cli import verify
from nixl_offload.errors import StoreError
from nixl_offload.identity.namespace import GroupFields, make_namespace, shard_digest
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.inspect import NamespaceInfo
from nixl_offload.tiers.ownership import DirectoryLock, holder_of
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.tiers.slab.inspect import SlabInspector
from nixl_offload.types import Key
from tests.unit.engine_rig import until
from tests.unit.stored_rig import (
    BLOCK_BYTES,
    SLOT_BYTES,
    Cli,
    StoredSlab,
    Tree,
    flip,
    key,
    namespace_of,
    put,
    put_chunk,
    put_manifest,
    snapshot,
    stored_namespace,
)

CHUNKS = 12
ALL = f"{2 * CHUNKS * SLOT_BYTES / 1024:.0f}KiB"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_PAUSES_BESIDE_AN_ENGINE_S", (0.15, 0.05))


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[StoredSlab]:
    """A running server that has stored chunks."""
    slab = StoredSlab(tmp_path)
    slab.store(range(CHUNKS))
    yield slab
    slab.close()


@pytest.fixture
def tree(slab: StoredSlab, tmp_path: Path) -> Iterator[Tree]:
    tree = Tree(slab, tmp_path, range(CHUNKS))
    yield tree
    tree.store.close()


def write(slab: StoredSlab, *tiers: dict[str, Any]) -> None:
    """Write a config with these tiers."""
    slab.file.write_text(yaml.safe_dump({"tiers": list(tiers)}))


# What is printed


@pytest.mark.parametrize("is_running", [True, False])
def test_a_slab_as_people_and_programs_read_it_is_not_changed(slab: StoredSlab, cli: Cli, is_running: bool) -> None:
    if not is_running:
        slab.close()
    before, name = snapshot(slab.root), re.escape(slab.namespace.name)
    share = r"[0-9.]+[KM]iB on disk; [0-9.]+% of the capacity, 64\.0MiB"
    use = r"its directory is open now: pid \d+ on '.*' since 20.*" if is_running else "no engine has its directory open"
    listing = (
        rf"{slab.root} \(slab\): {CHUNKS} chunks in 1 namespace, {ALL}; {share}\n\n"
        rf"namespace {name}: tenant blue, model org/blue\n    engine vllm 0\.33\.0, .*, tp 2\n"
        rf"    {CHUNKS} chunks in {2 * CHUNKS} shards, {ALL}; written 20.*Z to 20.*Z\n    last opened 20.*Z; {use}\n"
    )
    assert cli("ls", slab.file) == 0
    assert re.fullmatch(listing, cli.out)
    assert cli("verify", slab.file) == 0
    assert cli.out.endswith(f"\n  {CHUNKS} good\n  0 bad\n")
    assert cli("stat", slab.file, key(1).hex()[:8]) == 0
    first, second = cli.out.strip().split("\n\n")
    assert [text.splitlines()[0] for text in (first, second)] == [slab.place(1), slab.place(1, 1)]
    for field, words in (
        ("size", "24,576 bytes (24.0KiB)"),
        ("namespace digest", shard_digest(slab.namespace.digest, 0).hex()),
        ("created", f"{decode_header(slab.shard(1, 0)[:HEADER_BYTES]).created_s}   (20"),
        ("payload", "every block verifies"),
    ):
        assert f"    {field:<18}{words}" in first
    assert cli("ls", slab.file, "--json") == 0
    (tier,) = cli.json["tiers"]
    (namespace,) = tier.pop("namespaces")
    assert tier.pop("used_share") == tier["used_bytes"] / (64 << 20)
    assert tier.pop("used_bytes") > 2 * CHUNKS * SLOT_BYTES
    assert tier == {"kind": "slab", "where": str(slab.root), "capacity_bytes": 64 << 20, "other_objects": 0}
    for at in ("oldest_s", "newest_s", "last_opened_s"):
        assert abs(time.time() - namespace.pop(at)) < 60
    assert namespace.pop("made_for")["shards"] == 2
    assert namespace == {
        "name": slab.namespace.name,
        "part": None,
        "tenant": "blue",
        "model": "org/blue",
        "chunk_tokens": 64,
        "chunks": CHUNKS,
        "shards": 2 * CHUNKS,
        "bytes": 2 * CHUNKS * SLOT_BYTES,
        "open_now": str(holder_of(slab.root / "lock")) if is_running else None,
        "trouble": None,
    }
    assert snapshot(slab.root) == before


def test_keys_are_comments_and_columns_and_lines_of_json(slab: StoredSlab, cli: Cli) -> None:
    """A slot whose header is another chunk's has no time: a row of the index is a hint."""
    slab.damage(CHUNKS - 1, 0, 0, slab.shard(4, 0))
    assert cli("ls", slab.file, "--keys") == 0
    heading, columns, *rows = cli.out.splitlines()
    assert heading == f"# {slab.root}, namespace {slab.namespace.name}: tenant blue, model org/blue"
    assert columns == "# key  group  shard  size  written  place"
    assert len(rows) == 2 * CHUNKS
    assert re.fullmatch(rf"{key(0).hex()}  0  1  24\.0KiB  20[-0-9]* [:0-9]*Z  {re.escape(slab.place(0, 1))}", rows[1])
    assert rows[-1].split()[4] == "-"
    assert cli("ls", slab.file, "--keys", "--json") == 0
    assert [line["key"] for line in cli.lines] == [key(number).hex() for number in range(CHUNKS)]
    assert cli.lines[0]["shards"][1] == {"shard": 1, "bytes": SLOT_BYTES, "place": slab.place(0, 1)}
    assert cli.lines[-1]["written_s"] is None


def test_tiers_in_their_order_memory_in_a_line(tree: Tree, cli: Cli) -> None:
    red, file = stored_namespace("red", "org/red"), tree.slab.file
    put_manifest(tree.store, red)
    put_chunk(tree.store, red, 7, 5000)
    put(tree.store, "notes.txt")
    shared = {"kind": "shared_dir", "path": str(tree.root), "capacity": "1MiB"}
    write(tree.slab, {"kind": "memory", "capacity": "1GiB"}, shared)
    assert cli("ls", file) == 0
    lines, size_bytes = cli.out.splitlines(), 2 * CHUNKS * SLOT_BYTES + 10_000
    assert lines[0].startswith("Memory tier: lives in the server's processes and cannot be looked at from outside")
    assert lines[2] == (
        f"{tree.root} (shared_dir): {CHUNKS + 1} chunks in 2 namespaces, {size_bytes / 1024:.0f}KiB; "
        f"{size_bytes / 2**20:.1%} of the capacity, 1.00MiB"
    )
    assert lines[3] == "1 other object beside them, never touched"
    assert "opened" not in cli.out, "a tree has no lock"
    assert cli("ls", file, "--json", "--tenant", "red") == 0
    memory, found = cli.json["tiers"]
    assert (memory["kind"], memory["capacity_bytes"]) == ("memory", 1 << 30)
    assert [entry["tenant"] for entry in found["namespaces"]] == ["red"]
    assert found["used_bytes"] is None, "what one tenant holds is not what fills the tier"
    assert cli("ls", file, "--keys", "--namespace", red.name) == 0
    assert [line.split()[0] for line in cli.out.splitlines() if line[0] != "#"] == [key(7).hex()] * 2


def test_data_parallel_parts_and_strangers(slab: StoredSlab, cli: Cli, tmp_path: Path) -> None:
    """Foreign files are counted and left alone. A namespace without manifest or index is listed without chunks."""
    slab.close()
    part, home = slab.root / "dp-1", slab.root / slab.namespace.name
    for copy in (part / slab.namespace.name, slab.root / ("ef" * 16), slab.root / ("ab" * 16)):
        shutil.copytree(home, copy)
    (slab.root / ("ab" * 16) / "index.table").unlink()
    (slab.root / ("ab" * 16) / "manifest.json").write_text('{"namespace": "\x1b[2Jab", "fields": {}}')
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
    assert cli("verify", slab.file) == 1
    assert "2 namespaces whose chunks cannot be listed; nixl-offload ls says why" in cli.out
    (home / "index.table").write_bytes(b"no index" * 1000)
    assert cli("ls", slab.file) == 0
    assert "is damaged: it does not begin as an index" in cli.out


def test_a_chunk_is_named_by_its_key_or_by_how_that_begins(tree: Tree, cli: Cli) -> None:
    digits, slab = key(2).hex(), tree.slab
    for file in (slab.file, tree.file):
        for text in (digits, digits[:7].upper(), f"0x{digits[:9]}"):
            assert cli("stat", file, text, "--json") == 0, text
            assert [shard["fields"]["key"] for shard in cli.json["shards"]] == [digits] * 2
        assert cli("stat", file, digits, "--namespace", "0" * 32) == 1
        assert cli("stat", file, "0000") == 1
        assert "no key that begins with 0000 is there" in cli.err
    for text in ("abc", "rank-0.slab", "\x1b[2J", ""):
        assert cli("stat", slab.file, text) == 2
        assert "KEY: allowed: a key in hex" in cli.err
    twin = digits[:10] + "00" * 31
    tree.path(2).with_name(f"{twin}.0000").write_bytes(slab.shard(2, 0))
    assert cli("stat", tree.file, digits[:6]) == 2
    assert f"several begin so: {min(twin, digits)}, {max(twin, digits)}" in cli.err
    assert cli("stat", tree.file, digits) == 0


def test_what_separates_two_namespaces(tmp_path: Path, cli: Cli) -> None:
    """Named by the start of their names. Equal fields are omitted, and no manifest can control a terminal."""
    store, file = TreeStore(str(tmp_path / "tree")), tmp_path / "kv.yaml"
    fields = stored_namespace("blue", "org/m").fields
    one = make_namespace(replace(fields, settings={"model_config.max_model_len": 4, "b": 1}))
    settings = {"model_config.max_model_len": 8, "a\x1b": "\x1b", "b": True}
    other = make_namespace(replace(fields, dtype="float16", settings=settings))
    for each in (one, other):
        put_manifest(store, each)
    put(store, f"{'0' * 32}/ab/{'ab' * 36}.0000")
    store.close()
    file.write_text(yaml.safe_dump({"tiers": [{"kind": "shared_dir", "path": store.where, "capacity": "1MiB"}]}))
    assert cli("ls", file, "--diff", one.name[:6], other.name[:6]) == 0
    assert cli.out.splitlines() == [
        f"namespace {one.name}: tenant blue, model org/m",
        f"namespace {other.name}: tenant blue, model org/m",
        '    dtype: "bfloat16" | "float16"',
        "    b: 1 | true",
        "    model_config.max_model_len: 4 | 8",
        '    a?: (not there) | "\\u001b"',
    ]
    assert cli("ls", file, "--json", "--diff", one.name, other.name) == 0
    assert (cli.json["namespaces"], cli.json["differs"]["a\x1b"]) == ([one.name, other.name], [None, "\x1b"])
    for prefix, code, words in (
        (one.name, 0, ""),
        ("xyz", 1, "nothing is there of namespace xyz"),
        ("", 2, "--diff: '' begins the names of 3 namespaces; say more of it"),
        ("0" * 32, 2, "has no manifest that fits its name"),
    ):
        assert cli("ls", file, "--diff", one.name, prefix) == code
        assert words in cli.err


# What is not there, or fails


def test_a_tier_that_fails_hides_no_other(slab: StoredSlab, cli: Cli, tmp_path: Path) -> None:
    bucket = {"kind": "s3", "bucket": "kv-cache", "endpoint": "http://127.0.0.1:9", "request_timeout": "1s"}
    write(slab, {"kind": "slab", "path": str(slab.root), "capacity": "64MiB"}, bucket)
    assert cli("ls", slab.file) == 1
    assert cli.out.startswith(f"{slab.root} (slab): {CHUNKS} chunks in 1 namespace")
    assert cli.err.startswith("nixl-offload: s3://kv-cache")
    assert cli("ls", slab.file, "--json") == 1
    good, failed = cli.json["tiers"]
    assert (good["namespaces"][0]["chunks"], failed["kind"], "failure" in failed) == (CHUNKS, "s3", True)
    assert cli("ls", slab.file, "--keys", "--json") == 1
    assert (cli.lines[0]["tier"], cli.lines[-1]["tier"]) == ("slab", "s3")
    assert cli.lines[-1]["error"].startswith("s3://kv-cache")
    assert cli("stat", slab.file, "0" * 8, "--json") == 1
    assert cli.json["error"].startswith("s3://kv-cache")
    assert cli("verify", slab.file, "--json") == 1
    assert [tier.get("finished") for tier in cli.lines[-1]["tiers"]] == [True, None]
    (tmp_path / "none").write_text("a file")
    write(slab, {"kind": "slab", "path": f"{tmp_path}/none", "capacity": "1MiB"})
    assert cli("ls", slab.file) == 1
    assert cli.err == f"nixl-offload: {tmp_path}/none: is no directory; say another path in the config\n"


def test_a_namespace_or_tenant_that_is_not_there_is_no_success(slab: StoredSlab, cli: Cli) -> None:
    for command, *form, option, name in (
        *(("ls", *form, "namespace", "0" * 32) for form in ((), ("--keys",), ("--json",))),
        ("ls", "tenant", "green"),
        ("verify", "namespace", "0" * 32),
        ("verify", "tenant", "green"),
    ):
        assert cli(command, slab.file, *form, f"--{option}", name) == 1
        assert cli.err == f"nixl-offload: nothing is there of {option} {name}\n"


# Damage


def bad(cli: Cli) -> dict[str, list[tuple[int, str]]]:
    """Key -> (shard, reason) of the chunks that verify has reported as bad."""
    return {
        line["key"]: [(problem["shard"], problem["reason"]) for problem in line["problems"]]
        for line in cli.lines[:-1]
        if line["verdict"] == "bad"
    }


def both_say(
    cli: Cli, file: Path, damage: list[tuple[Callable[[], object], int, str, str]], then: Callable[[], object] = bool
) -> None:
    """``verify`` reports only these chunks (shard, reason, words) as bad, and ``stat`` reports the same for each."""
    for do, *_ in damage:
        do()
    then()
    assert cli("verify", file, "--json") == 1
    expected = {key(number).hex(): [(shard, reason)] for number, (_, shard, reason, _) in enumerate(damage)}
    assert bad(cli) == expected
    assert cli("verify", file) == 1
    assert cli.out.endswith(f"\n  {len(damage)} bad\n")
    said = cli.out
    for number, (_, shard, reason, words) in enumerate(damage):
        assert re.search(
            rf"^BAD {key(number).hex()} in .*\n    shard {shard}: .*{re.escape(words)}", said, re.MULTILINE
        )
        assert cli("stat", file, key(number).hex()) == 1
        assert f"WRONG  {reason}: " in cli.out or cli.out.rstrip().endswith(f"shard {shard}: missing")
        assert "\x1b" not in cli.out


def test_every_kind_of_damage_to_a_slab_is_reported(slab: StoredSlab, cli: Cli) -> None:
    damage: list[tuple[Callable[[], object], int, str, str]] = [  # for chunk 0, 1 ...: the damage; shard, reason, words
        (lambda: slab.damage(0, 0, 4096 + 2 * BLOCK_BYTES + 7), 0, "checksum", f"{slab.place(0)}: block 2 of 4: the"),
        (lambda: slab.damage(1, 1, 60), 1, "header_checksum", "the header page states its own checksum as"),
        (lambda: slab.damage(2, 0, 0, bytes(SLOT_BYTES)), 0, "magic", "not a shard: it begins with 0000000000000000"),
        (lambda: slab.damage(3, 1, 8, b"\x07\x00"), 1, "version", "format version 7; this reader knows 1"),
        (lambda: slab.damage(4, 0, 0, slab.shard(4, 1)), 0, "namespace", "the shard belongs to namespace"),
        (lambda: slab.damage(5, 1, 0, slab.shard(6, 1)), 1, "other", f"the shard holds key {key(6).hex()}"),
    ]
    slab.damage(7, 0, 4096 + 4 * BLOCK_BYTES, b"padding, which is never read")
    both_say(cli, slab.file, damage)


def test_every_kind_of_damage_to_a_tree_is_reported(tree: Tree, cli: Cli) -> None:
    needed, swapped = f"by its header the shard has {SLOT_BYTES} bytes, there are", tree.path(3).read_bytes()
    gone = "shard 1 is not there: the chunk is incomplete, and cannot be loaded"
    stranger = tree.path(9).with_name(f"{key(9).hex()}.0007")
    damage: list[tuple[Callable[[], object], int, str, str]] = [
        (lambda: flip(tree.path(0), 4096 + 3 * BLOCK_BYTES), 0, "checksum", "block 3 of 4"),
        (lambda: os.truncate(tree.path(1, 1), 8192), 1, "length", f"{needed} 8192"),
        (lambda: os.truncate(tree.path(2), SLOT_BYTES + 4096), 0, "length", f"{needed} {SLOT_BYTES + 4096}"),
        (lambda: tree.path(3).write_bytes(tree.path(4).read_bytes()), 0, "other", f"holds key {key(4).hex()}"),
        (lambda: tree.path(4).write_bytes(swapped), 0, "other", f"the shard holds key {key(3).hex()}"),
        (lambda: tree.path(5).write_bytes(b"short"), 0, "length", "4096 bytes asked for at offset 0, there are 5"),
        (lambda: tree.path(6).write_bytes(bytes(SLOT_BYTES)), 0, "magic", "not a shard"),
        (lambda: tree.path(7, 1).unlink(), 1, "missing", gone),
        (lambda: tree.path(8).write_bytes(tree.path(8, 1).read_bytes()), 0, "namespace", "the shard belongs to name"),
        (lambda: stranger.write_bytes(tree.path(9).read_bytes()), 7, "number", "a chunk of KV group 0 has no shard 7"),
    ]
    (tree.root / "notes.txt").write_text("not ours")
    tree.path(10).with_suffix(".bak").write_text("not ours either")
    both_say(cli, tree.file, damage, then=lambda: tree.age(3600))
    (tree.root / tree.slab.namespace.name / "manifest.json").unlink()
    assert cli("verify", tree.file, "--json") == 1
    without = {key(number).hex() for number in range(7)}
    assert {*bad(cli)} == without, "without a manifest checksums are checked, and shards are not known"


def test_a_slab_that_is_cut_off_or_gone_or_sparse(slab: StoredSlab, cli: Cli) -> None:
    slab.close()
    early, late = key(CHUNKS - 4), key(CHUNKS - 1)
    with slab.slab(1).open("r+b") as file:
        file.truncate(slab.offsets[early] + 8192)
    assert cli("verify", slab.file, "--json") == 1
    assert bad(cli)[early.hex()] == [(1, "length")], "its header is whole, its payload is not there"
    assert bad(cli)[late.hex()] == [(1, "length")]
    with slab.slab(1).open("r+b") as file:
        file.truncate(slab.offsets[late] + SLOT_BYTES)
    assert cli("verify", slab.file, "--json") == 1
    assert bad(cli)[early.hex()] == [(1, "checksum")], "a hole reads as zeros"
    assert bad(cli)[late.hex()] == [(1, "magic")]
    slab.slab(1).unlink()
    assert cli("verify", slab.file, "--json") == 1
    assert bad(cli)[key(0).hex()] == [(1, "missing")]


LAYERS = ((4, 3, 3, 0), (0, 1, 0, 0))
"""By KV group and rank: the stages of a pipeline. The last has no layer of any group."""


def test_ranks_of_uneven_stages(tmp_path: Path, cli: Cli) -> None:
    """A rank without a layer of a group has no shard of it; all other ranks must have one."""
    sizes = [tuple(slot_bytes(4, 3000 * layers) if layers else 0 for layers in ranks) for ranks in LAYERS]
    groups = tuple(GroupFields(number, 16, each) for number, each in enumerate(sizes))
    fields = replace(namespace_of().fields, groups=groups, blocks_per_chunk=4, shards=4)
    space, store = make_namespace(replace(fields, ranks=("a", "b", "c", "d"))), TreeStore(str(tmp_path / "tree"))
    put_manifest(store, space)
    keys = [Key(bytes([group + 1]) * 32 + group.to_bytes(4, "big")) for group in range(2)]
    for each, rank in ((keys[0], 0), (keys[0], 2), (keys[0], 0xFFFF), (keys[1], 0), (keys[1], 1)):
        put(store, shard_name(space.name, each, rank), sizes[each[-1]][rank] if rank < 4 else 0)
    for path in (tmp_path / "tree").rglob("*"):
        os.utime(path, (time.time() - 86_400,) * 2)
    file = tmp_path / "kv.yaml"
    file.write_text(yaml.safe_dump({"tiers": [{"kind": "shared_dir", "path": store.where, "capacity": "1MiB"}]}))
    assert cli("verify", file, "--json") == 1
    assert bad(cli) == {
        keys[0].hex(): [(0, "magic"), (2, "magic"), (0xFFFF, "number"), (1, "missing")],
        keys[1].hex(): [(0, "number"), (1, "magic")],
    }
    assert cli("stat", file, keys[1].hex()) == 1
    assert "a chunk of KV group 1 has no shard 0" in cli.out
    assert cli("stat", file, keys[0].hex(), "--json") == 1
    assert [each["shard"] for each in cli.json["missing"]] == [1]


@pytest.mark.parametrize(
    "sizes", [[0] * 2, [1], [-1, 1], [True, 1], ["1", 1], "11", 0, True, None, [1, 1 << 62]], ids=repr
)
def test_sizes_that_cannot_be_true_say_nothing(sizes: object) -> None:
    """Anybody may have written a manifest. If its sizes cannot be true, only the header counts."""
    space = stored_namespace()
    manifest = json.loads(json.dumps(space.manifest()))
    assert NamespaceInfo(space.name, manifest).shard_bytes(0, 1) == SLOT_BYTES
    manifest["fields"]["groups"][0]["slot_bytes"] = sizes
    found = NamespaceInfo(space.name, manifest)
    assert (found.shards, found.shard_bytes(0, 1), [*found.shards_of(0)], [*found.groups]) == (None, None, [], [])


# Beside servers


def test_a_slot_that_a_server_gives_to_another_chunk_is_not_bad(
    slab: StoredSlab, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server evicts and overwrites after the index was read and before the slot is; its index follows later."""
    tier = slab.tier
    assert tier is not None
    real, done = SlabInspector.read_into, []

    def read_into(inspector: SlabInspector, shard: Any, offset: int, memory: memoryview) -> None:
        if shard.offset == slab.offsets[key(3)] and not done:
            done.append(True)
            slab.damage(3, 0, 0, slab.shard(9, 0))
            slab.damage(3, 0, 9000, b"half of something new")
            tier._durable.delete(tier._index.location(key(3)))
        real(inspector, shard, offset, memory)

    monkeypatch.setattr(SlabInspector, "read_into", read_into)
    assert cli("verify", slab.file, "--json") == 0
    (line,) = cli.lines[:-1]
    assert (line["verdict"], line["key"]) == ("changed", key(3).hex())


def test_what_servers_leave_for_a_moment_is_not_bad(tree: Tree, cli: Cli) -> None:
    """After a crash a row of the index may name a slot that holds another whole chunk: a load finds out. A rank may
    still be writing its shard.
    """
    tree.slab.close()
    for rank in (0, 1):
        tree.slab.damage(3, rank, 0, tree.slab.shard(9, rank))
    tree.path(7, 1).unlink()
    os.utime(tree.path(7, 0))
    for file, words in (
        (tree.slab.file, "  1 forgotten (the slot holds another chunk by now; harmless)"),
        (tree.file, "  1 not finished (still being written)"),
    ):
        assert cli("verify", file) == 0
        assert words in cli.out


def test_storage_that_fails_is_exit_code_1(tree: Tree, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk that cannot be read is reported; three in a row end the run."""
    real = TreeStore.read_into
    failing = {tree.name(5, 0)}

    def read_into(store: TreeStore, name: str, offset: int, memory: memoryview) -> None:
        if name in failing:
            raise StoreError(f"{store.where}: cannot read {name}: Input/output error", cause="io")
        real(store, name, offset, memory)

    monkeypatch.setattr(TreeStore, "read_into", read_into)
    assert cli("verify", tree.file) == 1
    assert f"NOT READABLE {key(5).hex()}" in cli.out
    assert cli("stat", tree.file, key(5).hex()) == 1
    assert "WRONG  unreadable: " in cli.out
    failing.update(tree.name(number, 1) for number in range(CHUNKS))
    assert cli("verify", tree.file) == 1
    assert "gave up after several in a row" in cli.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_in_another_process(slab: StoredSlab, number: signal.Signals) -> None:
    """Ctrl-C, or a service manager's stop, in the middle of a real command that was slowed down."""
    command = [sys.executable, "-m", "nixl_offload.cli.main", "verify", str(slab.file), "--rate", "50kB/s"]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    out = subprocess.PIPE
    with subprocess.Popen(command, stdout=out, stderr=out, text=True, env=environment) as child:
        try:
            # Readers are threads; before them the process has none.
            until(lambda: len(os.listdir(f"/proc/{child.pid}/task")) > verify.THREADS // 2)
            child.send_signal(number)
            printed, errors = child.communicate(timeout=20.0)
        finally:
            child.kill()
    assert child.returncode == 130, errors
    assert "Traceback" not in errors
    assert "; not finished" in printed


def test_a_limit_on_the_rate_is_kept(slab: StoredSlab, cli: Cli) -> None:
    began_s = time.monotonic()
    assert cli("verify", slab.file, "--rate", "500kB/s") == 0
    assert time.monotonic() - began_s >= 0.9 * (CHUNKS - verify.THREADS) * 2 * SLOT_BYTES / 500e3
