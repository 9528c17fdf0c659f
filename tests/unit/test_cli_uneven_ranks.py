"""The commands over chunks whose shards differ from rank to rank, as those of uneven pipeline stages do: what is whole
is whole for them, too; and over namespaces of versions that knew one size for all ranks.
"""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import yaml

from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.chunk.header import HEADER_BYTES, Expected, slot_bytes
from nixl_offload.identity.namespace import GroupFields, Namespace, make_namespace, rank_digest
from nixl_offload.stores.base import Store
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.inspect import NamespaceInfo
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.types import Key
from tests.headers import encode_header, make_header
from tests.unit.gc_rig import namespace_of, put, put_manifest
from tests.unit.stored_rig import Cli

BLOCKS: Final = 4
LAYER_BYTES: Final = 3000
LAYERS: Final = ((4, 3, 3, 0), (0, 1, 0, 0))
"""By KV group and rank: the stages of a pipeline. The last has no layer of any group."""
SIZES: Final = [tuple(slot_bytes(BLOCKS, LAYER_BYTES * n) if n else 0 for n in ranks) for ranks in LAYERS]
CHUNKS: Final = 6
"""Of each group."""


def space() -> Namespace:
    fields = namespace_of().fields
    groups = tuple(GroupFields(number, 16, sizes) for number, sizes in enumerate(SIZES))
    return make_namespace(
        replace(fields, groups=groups, blocks_per_chunk=BLOCKS, tp=1, pp=4, world_size=4, ranks=("a", "b", "c", "d"))
    )


SPACE: Final = space()


def key(number: int, group: int) -> Key:
    return Key(random.Random(number).randbytes(32) + group.to_bytes(4, "big"))


KEYS: Final = [key(number, group) for group in range(2) for number in range(CHUNKS)]
SHARDS: Final = [(each, rank) for each in KEYS for rank in range(4) if LAYERS[each[-1]][rank]]


def image(of: Key, rank: int, digest: bytes = SPACE.digest, layers: int | None = None) -> bytes:
    """A shard as that rank would have stored it: of so many layers in the namespace with this digest."""
    block_bytes = LAYER_BYTES * (LAYERS[of[-1]][rank] if layers is None else layers)
    content = bytearray(random.Random(of + bytes([rank])).randbytes(slot_bytes(BLOCKS, block_bytes)))
    payload = np.frombuffer(content, dtype=np.uint8)[HEADER_BYTES:][: BLOCKS * block_bytes]
    expected = Expected(rank_digest(digest, rank), of, of[-1], BLOCKS, block_bytes)
    header = make_header(expected, block_checksums(payload.reshape(BLOCKS, block_bytes)))
    content[:HEADER_BYTES] = encode_header(header).tobytes()
    return bytes(content)


def fill(store: Store) -> None:
    put_manifest(store, SPACE)
    for each, rank in SHARDS:
        store.write(shard_name(SPACE.name, each, rank), memoryview(image(each, rank)))


class Tiers:
    """A tree that is full, and a config for it."""

    def __init__(self, directory: Path) -> None:
        self.shared = directory / "shared"
        self.store = TreeStore(str(self.shared))
        fill(self.store)
        self.tree = self.config(directory / "tree.yaml", self.shared, "shared_dir")

    @staticmethod
    def config(file: Path, path: Path, kind: str) -> Path:
        tier = {"kind": kind, "path": str(path), "capacity": "128MiB"}
        file.write_text(yaml.safe_dump({"tiers": [tier]}))
        return file


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    return Tiers(tmp_path)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


def test_what_is_not_a_ranks_own_is_reported(tiers: Tiers, cli: Cli) -> None:
    """A shard that is missing, one of another rank, and one of a rank that has no layer of the group."""
    old_s = time.time() - 86_400
    tiers.store.delete([shard_name(SPACE.name, KEYS[0], 1)])
    put(tiers.store, shard_name(SPACE.name, KEYS[CHUNKS], 0), SIZES[1][1])
    tiers.store.write(shard_name(SPACE.name, KEYS[1], 2), memoryview(image(KEYS[1], 0)))
    put(tiers.store, shard_name(SPACE.name, KEYS[2], 0xFFFF), 0)
    for path in tiers.shared.rglob("*"):
        os.utime(path, (old_s, old_s))
    assert cli("verify", tiers.tree, "--json") == 1
    problems = [(line["key"], each["rank"], each["reason"]) for line in cli.lines[:-1] for each in line["problems"]]
    assert sorted(problems) == sorted(
        [
            (KEYS[0].hex(), 1, "missing"),
            (KEYS[CHUNKS].hex(), 0, "rank"),
            (KEYS[1].hex(), 2, "namespace"),
            (KEYS[2].hex(), 0xFFFF, "rank"),
        ]
    )
    assert cli("stat", tiers.tree, KEYS[CHUNKS].hex()) == 1
    assert "rank 0 has no layer of KV group 1" in cli.out


def test_stat_tells_which_rank_has_no_shard(tiers: Tiers, cli: Cli) -> None:
    tiers.store.delete([shard_name(SPACE.name, KEYS[0], 1)])
    assert cli("stat", tiers.tree, KEYS[0].hex()) == 0
    assert cli("stat", tiers.tree, KEYS[0].hex(), "--verify") == 1
    assert cli.out.rstrip().endswith(": rank 1: missing")
    assert cli("stat", tiers.tree, KEYS[0].hex(), "--verify", "--json") == 1
    assert [each["rank"] for each in cli.json["missing"]] == [1]


@pytest.mark.parametrize(
    "sizes", [[0] * 4, [1], [-1, 1, 1, 1], [True, 1, 1, 1], ["1", 1, 1, 1], "1111", 0, True, None, [1, 1, 1, 1 << 62]]
)
def test_sizes_that_cannot_be_true_say_nothing(sizes: object) -> None:
    """Anybody may have written a manifest; then only the header counts."""
    manifest = json.loads(json.dumps(SPACE.manifest()))
    assert NamespaceInfo(SPACE.name, manifest).shard_bytes(0, 1) == SIZES[0][1]
    manifest["fields"]["groups"][0]["slot_bytes"] = sizes
    namespace = NamespaceInfo(SPACE.name, manifest)
    assert (namespace.ranks, namespace.shard_bytes(0, 1), [*namespace.holders(0)], [*namespace.groups]) == (
        *(None, None),
        *([], []),
    )
