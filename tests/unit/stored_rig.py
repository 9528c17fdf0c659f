"""What tests of ``ls``, ``stat`` and ``verify`` share: slabs that real engines have written on two ranks, and the same
shards in a tree or a bucket.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from nixl_offload.cli.main import main
from nixl_offload.config import SlabConfig, parse_config
from nixl_offload.engine import Chunk
from nixl_offload.identity.namespace import Namespace, make_namespace
from nixl_offload.stores.base import Store
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.base import TierContext
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.tiers.slab.file import SlabFile, rank_file_name
from nixl_offload.tiers.slab.tier import SlabTier
from nixl_offload.types import Key, Outcome
from tests.unit.engine_rig import CHUNK_BLOCKS, NUM_BLOCKS, Rig
from tests.unit.gc_rig import RANKS, key, namespace_of, put_manifest

SLOT_BYTES = 24576
"""Header page, four blocks of 4,608 bytes, padding."""
BLOCK_BYTES = 4608


def stored_namespace(tenant: str = "blue", model: str = "org/blue") -> Namespace:
    """A namespace whose manifest says the truth about the chunks of this rig."""
    fields = namespace_of(tenant, model).fields
    group = replace(fields.groups[0], slot_bytes=(SLOT_BYTES,) * RANKS)
    return make_namespace(replace(fields, blocks_per_chunk=CHUNK_BLOCKS, groups=(group,)))


class StoredSlab:
    """A slab's directory with one namespace, and a config that names it. ``open`` is a server that runs."""

    def __init__(self, directory: Path, namespace: Namespace | None = None) -> None:
        self.root = directory / "kv"
        self.namespace = namespace or stored_namespace()
        tier = {"kind": "slab", "path": str(self.root), "capacity": "64MiB"}
        self.file = directory / "kv.yaml"
        self.file.write_text(yaml.safe_dump({"tiers": [tier]}))
        (config,) = parse_config({"tiers": [tier]}).tiers
        assert isinstance(config, SlabConfig)
        self.config = config
        self.tier: SlabTier | None = None
        self.offsets: dict[Key, int] = {}

    def open(self) -> SlabTier:
        self.tier = SlabTier.open(self.config, TierContext(0, self.namespace, world_size=RANKS))
        return self.tier

    def store(self, numbers: range) -> None:
        """Let the engines of both ranks write chunks, the tier's own slots, rows of its own index."""
        tier = self.tier
        assert tier is not None
        jobs: list[tuple[Key, Any]] = []
        for number in numbers:
            location = tier.reserve(key(number), SLOT_BYTES, [])
            assert location is not None
            self.offsets[key(number)] = location.offset
            jobs.append((key(number), location))
        for rank in range(RANKS):
            path = Path(tier.place.directory) / rank_file_name(rank)
            slab = SlabFile(path, tier.place.rank_bytes, tier.place.extent_bytes)
            slab.open()
            rig = Rig.make(path.parent, slab=slab, namespace=self.namespace.rank_digest(rank), seed=rank)
            try:
                first = range(NUM_BLOCKS - CHUNK_BLOCKS)
                chunks = [
                    Chunk(k, location, 0, _blocks(first[number % len(first)]), 0)
                    for number, (k, location) in enumerate(jobs)
                ]
                assert set(rig.store(0, chunks)) == {Outcome.OK}
            finally:
                rig.close()
        for k, _ in jobs:
            tier.commit(k)
        assert tier._durable.flush(20.0)

    def close(self) -> None:
        if self.tier is not None:
            self.tier.close()
            self.tier = None

    def slab(self, rank: int = 0) -> Path:
        return self.root / self.namespace.name / rank_file_name(rank)

    def place(self, number: int, rank: int = 0) -> str:
        return f"{self.slab(rank)}@{self.offsets[key(number)]}"

    def shard(self, number: int, rank: int) -> bytes:
        with self.slab(rank).open("rb") as file:
            return os.pread(file.fileno(), SLOT_BYTES, self.offsets[key(number)])

    def damage(self, number: int, rank: int, at: int, data: bytes | None = None) -> None:
        """Overwrite bytes of a shard, or flip one."""
        flip(self.slab(rank), self.offsets[key(number)] + at, data)

    def fill(self, store: Store, numbers: range) -> None:
        """Put the same shards, and the manifest, into a tree or a bucket."""
        put_manifest(store, self.namespace)
        for number in numbers:
            for rank in range(RANKS):
                store.write(self.name(number, rank), memoryview(self.shard(number, rank)))

    def name(self, number: int, rank: int = 0) -> str:
        return shard_name(self.namespace.name, key(number), rank)


def _blocks(first: int) -> Any:
    import numpy as np

    return np.arange(first, first + CHUNK_BLOCKS, dtype=np.int32)


def flip(path: Path, at: int, data: bytes | None = None) -> None:
    """Overwrite bytes of a file, or flip a bit of one."""
    with path.open("r+b") as file:
        file.seek(at)
        data = data if data is not None else bytes([file.read(1)[0] ^ 0x10])
        file.seek(at)
        file.write(data)


class Cli:
    """Runs commands; keeps what they printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: object) -> int:
        self._capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as ended:  # usage and help, by argparse
            code = int(str(ended.code))
        self.out, self.err = self._capsys.readouterr()
        return code

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


class Tree:
    """The chunks of a slab in a shared directory, an hour old, and a config that names it alone."""

    def __init__(self, slab: StoredSlab, directory: Path, numbers: range) -> None:
        self.slab = slab
        self.root = directory / "tree"
        self.store = TreeStore(str(self.root))
        slab.fill(self.store, numbers)
        self.file = directory / "tree.yaml"
        tier = {"kind": "shared_dir", "path": str(self.root), "capacity": "1GiB"}
        self.file.write_text(yaml.safe_dump({"tiers": [tier]}))
        self.age(3600)

    def path(self, number: int, rank: int = 0) -> Path:
        return self.root / self.slab.name(number, rank)

    def age(self, age_s: float) -> None:
        for path in self.root.rglob("*.000?"):
            os.utime(path, (time.time() - age_s, time.time() - age_s))


def snapshot(root: Path) -> dict[str, tuple[int, int, int]]:
    """What must not change by looking: names, sizes, times, inodes; times of reading left out."""
    found = {str(path.relative_to(root)): path.stat() for path in sorted(root.rglob("*"))}
    return {name: (status.st_size, status.st_mtime_ns, status.st_ino) for name, status in found.items()}
