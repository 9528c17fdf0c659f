"""The rig of tests of commands: chunks as engines store them, in a slab, a tree or a bucket; and a command line."""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.chunk.header import HEADER_BYTES, slot_bytes
from nixl_offload.cli.main import main
from nixl_offload.identity.namespace import Namespace, make_namespace, shard_digest
from nixl_offload.stores.base import Store
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.base import TierContext
from nixl_offload.tiers.shared.naming import manifest_name, shard_name
from nixl_offload.tiers.shared.tier import write_manifest
from nixl_offload.tiers.slab.file import rank_file_name
from nixl_offload.tiers.slab.tier import SlabTier
from nixl_offload.types import Key
from tests.contexts import slab_config
from tests.headers import Expected, make_page
from tests.unit import shared_rig

RANKS = 2
BLOCKS, BLOCK_BYTES = 4, 4608
SLOT_BYTES = slot_bytes(BLOCKS, BLOCK_BYTES)
"""24,576: header page, blocks, padding."""
_FIELDS = replace(
    shared_rig.namespace_of(RANKS, sizes=[(4096, 4096)]).fields,
    model="org/model",
    blocks_per_chunk=16,
    ranks=("ab", "cd"),
)


def namespace_of(tenant: str = "default", model: str = "org/model") -> Namespace:
    return make_namespace(replace(_FIELDS, tenant=tenant, model=model))


def key(number: int) -> Key:
    return Key(sha256(str(number).encode()).digest() + bytes(4))


def put(store: Store, name: str, size_bytes: int = 1000) -> None:
    store.write(name, memoryview(bytes(size_bytes)))


def put_chunk(store: Store, namespace: Namespace, number: int, size_bytes: int = 1000) -> list[str]:
    """Write all shards of a chunk; ``size_bytes`` each."""
    names = [shard_name(namespace.name, key(number), rank) for rank in range(RANKS)]
    for name in names:
        put(store, name, size_bytes)
    return names


def put_manifest(store: Store, namespace: Namespace) -> str:
    """Write a manifest as servers do."""
    write_manifest(namespace, time.time, store)
    return manifest_name(namespace.name)


def stored_namespace(tenant: str = "blue", model: str = "org/blue") -> Namespace:
    """A namespace whose manifest describes this rig's chunks."""
    fields = namespace_of(tenant, model).fields
    group = replace(fields.groups[0], slot_bytes=(SLOT_BYTES,) * RANKS)
    return make_namespace(replace(fields, blocks_per_chunk=BLOCKS, groups=(group,)))


def image(space: Namespace, number: int, rank: int, *, first_valid_block: int = 0, seed: int = 0) -> bytearray:
    """Return a shard as a server would have stored it; the padding holds noise."""
    content = bytearray(random.Random(1000 * number + rank + 10**6 * seed).randbytes(SLOT_BYTES))
    payload = np.frombuffer(content, dtype=np.uint8)[HEADER_BYTES:][: BLOCKS * BLOCK_BYTES]
    expected = Expected(shard_digest(space.digest, rank), key(number), 0, BLOCKS, BLOCK_BYTES)
    sums = block_checksums(payload.reshape(BLOCKS, BLOCK_BYTES)[first_valid_block:])
    page = make_page(expected, sums, first_valid_block=first_valid_block, created_s=int(time.time()))
    content[:HEADER_BYTES] = page.tobytes()
    return content


def put_image(store: Store, space: Namespace, number: int) -> list[str]:
    """Put all shards of a chunk in, some with fewer blocks, and return their names."""
    names = [shard_name(space.name, key(number), rank) for rank in range(RANKS)]
    for rank, name in enumerate(names):
        store.write(name, memoryview(image(space, number, rank, first_valid_block=number % 3)))
    return names


class StoredSlab:
    """A slab's directory with one namespace, and a config that names it. ``open`` acts as a running server."""

    def __init__(self, directory: Path) -> None:
        self.root, self.file = directory / "kv", directory / "kv.yaml"
        self.namespace = stored_namespace()
        tier = {"kind": "slab", "path": str(self.root), "capacity": "64MiB"}
        self.file.write_text(yaml.safe_dump({"tiers": [tier]}))
        config = slab_config(self.root, 64 << 20)
        self.tier: SlabTier | None = SlabTier.open(config, TierContext(0, self.namespace, world_size=RANKS))
        self.offsets: dict[Key, int] = {}

    def store(self, numbers: range) -> None:
        """Write chunks as the ranks do, in the tier's own slots, with rows of its own index."""
        tier = self.tier
        assert tier is not None
        for number in numbers:
            location = tier.reserve(key(number), SLOT_BYTES, [])
            assert location is not None
            self.offsets[key(number)] = location.offset
            for rank in range(RANKS):
                self.slab(rank).touch()
                self.damage(number, rank, 0, bytes(image(self.namespace, number, rank)))
            tier.commit((key(number),))
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


def flip(path: Path, at: int, data: bytes | None = None) -> None:
    """Overwrite bytes of a file, or flip a bit of one."""
    with path.open("r+b") as file:
        file.seek(at)
        data = data if data is not None else bytes([file.read(1)[0] ^ 0x10])
        file.seek(at)
        file.write(data)


class Tree:
    """The chunks of a slab in a shared directory, an hour old, and a config that names it alone."""

    def __init__(self, slab: StoredSlab, directory: Path, numbers: range) -> None:
        self.slab, self.root, self.file = slab, directory / "tree", directory / "tree.yaml"
        self.store = TreeStore(str(self.root))
        put_manifest(self.store, slab.namespace)
        for number in numbers:
            for rank in range(RANKS):
                self.store.write(self.name(number, rank), memoryview(slab.shard(number, rank)))
        tier = {"kind": "shared_dir", "path": str(self.root), "capacity": "1GiB"}
        self.file.write_text(yaml.safe_dump({"tiers": [tier]}))
        self.age(3600)

    def name(self, number: int, rank: int = 0) -> str:
        return shard_name(self.slab.namespace.name, key(number), rank)

    def path(self, number: int, rank: int = 0) -> Path:
        return self.root / self.name(number, rank)

    def age(self, age_s: float) -> None:
        for path in self.root.rglob("*.000?"):
            os.utime(path, (time.time() - age_s, time.time() - age_s))


def snapshot(root: Path) -> dict[str, tuple[int, int, int]]:
    """The metadata that reading must not change: names, sizes, times except of access, inodes."""
    found = {str(path.relative_to(root)): path.stat() for path in sorted(root.rglob("*"))}
    return {name: (status.st_size, status.st_mtime_ns, status.st_ino) for name, status in found.items()}


class Cli:
    """Runs commands and keeps their output."""

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
