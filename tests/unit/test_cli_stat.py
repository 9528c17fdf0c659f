"""``nixl-offload stat``: how a chunk is named, what its headers say, and how each wrong field is explained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nixl_offload.chunk.header import HEADER_BYTES, decode_header
from tests.unit.gc_rig import key
from tests.unit.stored_rig import BLOCK_BYTES, SLOT_BYTES, Cli, StoredSlab, Tree, flip, snapshot

CHUNKS = 4


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[StoredSlab]:
    slab = StoredSlab(tmp_path)
    slab.open()
    slab.store(range(CHUNKS))
    yield slab
    slab.close()


@pytest.fixture
def tree(slab: StoredSlab, tmp_path: Path) -> Iterator[Tree]:
    tree = Tree(slab, tmp_path, range(CHUNKS))
    yield tree
    tree.store.close()


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
    shown = {line[4:22].strip(): line[22:] for line in lines[1:]}
    created_s = decode_header(slab.shard(1, 0)[:HEADER_BYTES]).created_s
    assert shown.pop("created").startswith(f"{created_s}   (20")
    assert shown == {
        "tier": f"slab, {slab.root}",
        "namespace": f"{slab.namespace.name}: tenant blue, model org/blue",
        "rank": "0",
        "size": "24,576 bytes (24.0KiB)",
        "namespace digest": slab.namespace.rank_digest(0).hex(),
        "group": "0",
        "blocks": "4",
        "first valid block": "0",
        "block bytes": str(BLOCK_BYTES),
        "key": key(1).hex(),
        "payload": "every block verifies",
    }
    assert second.splitlines()[0] == slab.place(1, 1)


def test_a_chunk_is_named_by_its_key_or_by_how_that_begins(slab: StoredSlab, tree: Tree, cli: Cli) -> None:
    digits = key(2).hex()
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


def test_a_bad_block_is_found_where_the_payload_is_read(tree: Tree, cli: Cli) -> None:
    flip(tree.path(0), 4096 + 2 * BLOCK_BYTES)
    assert cli("stat", tree.file, key(0).hex()) == 0
    assert cli("stat", tree.file, key(0).hex(), "--verify", "--json") == 1
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
    ],
)
def test_what_is_wrong_with_a_header_is_named(at: int, data: bytes, words: str, tree: Tree, cli: Cli) -> None:
    flip(tree.path(0), at, data)
    assert cli("stat", tree.file, key(0).hex(), "--json") == 1
    bad, good = cli.json["shards"]
    assert bad["wrong"][0].startswith(words)
    assert good["wrong"] == []
    assert cli("stat", tree.file, key(0).hex()) == 1
    assert f"    WRONG  {words}" in cli.out
    assert "\x1b" not in cli.out


def test_swapped_ranks_and_short_files_and_missing_shards(tree: Tree, cli: Cli) -> None:
    tree.path(0).write_bytes(tree.path(0, 1).read_bytes())
    with tree.path(1).open("r+b") as file:
        file.truncate(8192)
    tree.path(2).write_bytes(b"short")
    for number, words in (
        (0, "WRONG  namespace: the shard belongs to namespace"),
        (1, f"WRONG  length: by its header the shard has {SLOT_BYTES} bytes, there are 8192"),
        (2, "4096 bytes asked for at offset 0, there are 5"),
    ):
        assert cli("stat", tree.file, key(number).hex()) == 1
        assert words in cli.out
    tree.path(3, 1).unlink()
    assert cli("stat", tree.file, key(3).hex()) == 0
    assert cli("stat", tree.file, key(3).hex(), "--verify") == 1
    assert cli.out.rstrip().endswith(": rank 1: missing")
