"""``nixl-offload ls``, ``stat`` and ``verify`` over a bucket, whose objects real engines' slabs have filled."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from nixl_offload.config import S3Config, parse_config
from nixl_offload.stores.s3 import open_store
from tests.unit.gc_rig import key
from tests.unit.stored_rig import BLOCK_BYTES, SLOT_BYTES, Cli, StoredSlab

from .servers import RcloneServer

CHUNKS = 8


class Bucket:
    """Chunks under a prefix, and a config that names it."""

    def __init__(self, server: RcloneServer, prefix: str, directory: Path) -> None:
        self.server = server
        self.prefix = prefix
        self.slab = StoredSlab(directory)
        self.slab.open()
        self.slab.store(range(CHUNKS))
        self.slab.close()
        self.file = directory / "bucket.yaml"
        tier = server.tier(prefix)
        self.file.write_text(yaml.safe_dump({"tiers": [tier]}))
        (config,) = parse_config({"tiers": [tier]}).tiers
        assert isinstance(config, S3Config)
        store = open_store(config)
        self.slab.fill(store, range(CHUNKS))
        store.close()

    def name(self, number: int, rank: int = 0) -> str:
        return f"{self.prefix}/{self.slab.name(number, rank)}"


@pytest.fixture
def bucket(rclone: RcloneServer, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in rclone.environment.items():
        monkeypatch.setenv(name, value)
    return Bucket(rclone, prefix, tmp_path)


def test_damage_in_a_bucket_is_reported(bucket: Bucket, cli: Cli) -> None:
    assert cli("verify", bucket.file) == 0
    assert f"{CHUNKS} chunks, {2 * CHUNKS * SLOT_BYTES / 1024:.0f}KiB checked" in cli.out
    server = bucket.server
    server.flip(bucket.name(0, 1), 4096 + BLOCK_BYTES)
    server.truncate(bucket.name(1), 4096)
    server.write(bucket.name(2), bucket.slab.shard(3, 0))
    assert cli("stat", bucket.file, key(0).hex()[:9]) == 1
    assert "WRONG  checksum: block 1 of 4: the checksum is not the header's" in cli.out
    assert cli("stat", bucket.file, key(2).hex()) == 1
    assert "WRONG  other: the shard holds key" in cli.out
    assert cli("verify", bucket.file, "--json") == 1
    found = {line["key"]: line["problems"][0]["reason"] for line in cli.lines[:-1]}
    assert found == {key(0).hex(): "checksum", key(1).hex(): "length", key(2).hex(): "other"}
    assert cli("ls", bucket.file, "--json") == 0
    (tier,) = cli.json["tiers"]
    (namespace,) = tier["namespaces"]
    assert (tier["kind"], tier["capacity_bytes"], namespace["open_now"]) == ("s3", None, None)
    assert (namespace["tenant"], namespace["chunks"], namespace["shards"]) == ("blue", CHUNKS, 2 * CHUNKS)
    assert cli("ls", bucket.file, "--keys") == 0
    assert bucket.slab.name(4, 1) in cli.out
