"""``nixl-offload stat``: how a chunk is named, what its headers say, and how each wrong field is explained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from nixl_offload.chunk.header import HEADER_BYTES, decode_header
from nixl_offload.stores.directory import TreeStore
from tests.unit.gc_rig import key
from tests.unit.stored_rig import BLOCK_BYTES, SLOT_BYTES, Cli, StoredSlab, flip, snapshot

CHUNKS = 4


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[StoredSlab]:
    slab = StoredSlab(tmp_path)
    slab.open()
    slab.store(range(CHUNKS))
    yield slab
    slab.close()


@pytest.fixture
def tree(slab: StoredSlab, tmp_path: Path) -> Path:
    """A shared directory with the same chunks; the config names it alone."""
    root = tmp_path / "tree"
    slab.fill(TreeStore(str(root)), range(CHUNKS))
    tier = {"kind": "shared_dir", "path": str(root), "capacity": "1GiB"}
    slab.file.write_text(yaml.safe_dump({"tiers": [tier]}))
    return root


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


def test_a_chunk_of_a_slab_as_people_read_it(slab: StoredSlab, cli: Cli) -> None:
    before = snapshot(slab.root)
    assert cli("stat", slab.file, key(1).hex()[:8], "--verify") == 0
    assert snapshot(slab.root) == before
    first, second = cli.out.strip().split("\n\n")
    lines = first.splitlines()
    assert lines[0] == slab.place(1)
    told = {line[4:22].strip(): line[22:] for line in lines[1:]}
    header = decode_header(slab.shard(1, 0)[:HEADER_BYTES])
    assert told.pop("created").startswith(f"{header.created_s}   (20")
    assert told.pop("header checksum") == slab.shard(1, 0)[4088:4096][::-1].hex()
    assert told == {
        "tier": f"slab, {slab.root}",
        "namespace": f"{slab.namespace.name}: tenant blue, model org/blue",
        "rank": "0",
        "size": "24,576 bytes (24.0KiB)",
        "magic": "NIXLOFF1",
        "version": "1",
        "header bytes": "4096",
        "algorithm": "1",
        "flags": "0",
        "namespace digest": slab.namespace.rank_digest(0).hex(),
        "group": "0",
        "blocks": "4",
        "first valid block": "0",
        "block bytes": str(BLOCK_BYTES),
        "payload bytes": str(4 * BLOCK_BYTES),
        "key": key(1).hex(),
        "block checksums": "4; --blocks lists them",
        "payload": "every block verifies",
    }
    assert second.splitlines()[0] == slab.place(1, 1)


def test_ways_to_name_a_chunk(slab: StoredSlab, tree: Path, cli: Cli, tmp_path: Path) -> None:
    name = slab.name(2, 1)
    slab_file = tmp_path / "slab.yaml"
    slab_file.write_text(yaml.safe_dump({"tiers": [{"kind": "slab", "path": str(slab.root), "capacity": "64MiB"}]}))
    for file, text, shards in (
        (slab.file, key(2).hex(), 2),
        (slab.file, key(2).hex()[:7].upper(), 2),
        (slab.file, name, 1),
        (slab.file, f"{tree}/{name}", 1),
        (slab_file, slab.place(2, 1), 1),
        (slab_file, f"0x{key(2).hex()[:9]}", 2),
    ):
        assert cli("stat", file, text, "--json") == 0, text
        found = cli.json["shards"]
        assert len(found) == shards
        assert {shard["fields"]["key"] for shard in found} == {key(2).hex()}
    for file, text in ((slab.file, f"/elsewhere/{name}"), (slab_file, name), (slab_file, f"{slab.slab()}@4096")):
        assert cli("stat", file, text) == 1
        assert "is not in" in cli.err
    for text in ("abc", "rank-0.slab", "\x1b[2J", ""):
        assert cli("stat", slab.file, text) == 2
        assert "KEY: allowed: a key in hex" in cli.err
    assert cli("stat", slab.file, key(2).hex(), "--namespace", "0" * 32) == 1


def test_a_beginning_of_several_keys_is_refused(slab: StoredSlab, tree: Path, cli: Cli) -> None:
    twin = key(2).hex()[:10] + "00" * 31
    directory = (tree / slab.name(2)).parent
    (directory / f"{twin}.0000").write_bytes(slab.shard(2, 0))
    assert cli("stat", slab.file, key(2).hex()[:6]) == 2
    assert f"several begin so: {min(twin, key(2).hex())}, {max(twin, key(2).hex())}" in cli.err
    assert cli("stat", slab.file, key(2).hex()) == 0


def test_blocks_are_listed_and_the_bad_one_is_found(slab: StoredSlab, tree: Path, cli: Cli) -> None:
    flip(tree / slab.name(0), 4096 + 2 * BLOCK_BYTES)
    assert cli("stat", slab.file, slab.name(0), "--blocks") == 0, "the payload was not looked at"
    header = decode_header(slab.shard(0, 0)[:HEADER_BYTES])
    assert f"    block 3           {header.checksums[3]:016x}\n" in cli.out
    assert cli("stat", slab.file, key(0).hex(), "--verify", "--json") == 1
    first, second = cli.json["shards"]
    assert (first["verified"], second["verified"]) == (False, True)
    assert first["wrong"] == ["checksum: block 2 of 4: the checksum is not the header's"]


@pytest.mark.parametrize(
    ("at", "data", "words"),
    [
        (0, b"#!/bin/sh", "magic: not a shard: it begins with 23212f62696e2f73"),
        (0, bytes(4096), "magic: not a shard: it begins with 0000000000000000"),
        (8, b"\x09\x00", "version: format version 9; this reader knows 1"),
        (56, bytes(8), "header_checksum: the header page states its own checksum as"),
        (90, b"other", "header_checksum: the header page states its own checksum as"),
    ],
)
def test_what_is_wrong_with_a_header_is_named(
    at: int, data: bytes, words: str, slab: StoredSlab, tree: Path, cli: Cli
) -> None:
    flip(tree / slab.name(0), at, data)
    assert cli("stat", slab.file, slab.name(0), "--json") == 1
    (shard,) = cli.json["shards"]
    assert shard["wrong"][0].startswith(words)
    assert cli("stat", slab.file, slab.name(0)) == 1
    assert f"    WRONG  {words}" in cli.out
    assert "\x1b" not in cli.out


def test_swapped_ranks_and_short_files(slab: StoredSlab, tree: Path, cli: Cli) -> None:
    (tree / slab.name(0)).write_bytes((tree / slab.name(0, 1)).read_bytes())
    assert cli("stat", slab.file, slab.name(0)) == 1
    assert "WRONG  namespace: the shard belongs to namespace" in cli.out
    with (tree / slab.name(1)).open("r+b") as file:
        file.truncate(8192)
    assert cli("stat", slab.file, slab.name(1)) == 1
    assert f"WRONG  length: by its header the shard has {SLOT_BYTES} bytes, there are 8192" in cli.out
    (tree / slab.name(2)).write_bytes(b"short")
    assert cli("stat", slab.file, slab.name(2)) == 1
    assert "4096 bytes asked for at offset 0, there are 5" in cli.out
