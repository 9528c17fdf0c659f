"""``nixl-offload warm`` from a real bucket: into slabs and trees, beside damage, with a server that goes away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nixl_offload.cli.main import main
from nixl_offload.config import S3Config, SlabConfig, parse_config
from nixl_offload.index import State
from nixl_offload.stores.base import Store
from nixl_offload.stores.select import open_store
from nixl_offload.tiers.slab.file import rank_file_name
from nixl_offload.tiers.slab.tier import SlabTier
from tests.unit.warm_rig import CHUNK_BYTES, RANKS, SLOT_BYTES, image, key, namespace, put_chunk, put_manifest

from .servers import RcloneServer

BLUE = namespace("blue")
CHUNKS = 12


class Rig:
    """A bucket that holds chunks, and a config with a directory before it."""

    def __init__(self, server: RcloneServer, prefix: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.server = server
        self.target = directory / "kv"
        self.file = directory / "kv.yaml"
        self._prefix = prefix
        self._capsys = capsys
        self.config("slab")
        tier = parse_config(yaml.safe_load(self.file.read_text())).tiers[1]
        assert isinstance(tier, S3Config)
        self.store: Store = open_store(tier)
        put_manifest(self.store, BLUE)
        self.names = [put_chunk(self.store, BLUE, number) for number in range(CHUNKS)]

    def config(self, kind: str, **fields: Any) -> None:
        near = {"kind": kind, "path": str(self.target), "capacity": "128MiB"}
        far = {**self.server.tier(self._prefix), **fields}
        self.file.write_text(yaml.safe_dump({"tiers": [near, far]}))

    def in_bucket(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def warm(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        code = main(["warm", str(self.file), "--json", *arguments])
        said = self._capsys.readouterr()
        return code, json.loads(said.out) if said.out else {}, said.err


@pytest.fixture
def rig(
    rclone: RcloneServer, prefix: str, tmp_path: Path, s3_environment: None, capsys: pytest.CaptureFixture[str]
) -> Iterator[Rig]:
    made = Rig(rclone, prefix, tmp_path, capsys)
    yield made
    made.store.close()


def test_a_bucket_into_the_slab_before_it(rig: Rig) -> None:
    """Every shard verified and in its slot; damaged ones never; no secret shows."""
    rig.server.flip(rig.in_bucket(rig.names[3][1]), 5000)
    rig.server.truncate(rig.in_bucket(rig.names[5][0]), 4096)
    code, report, errors = rig.warm()
    assert (code, report["copied"], report["damaged"]) == (1, CHUNKS - 2, 1)
    assert report["left_out"]["incomplete"] == 1
    assert report["from"].startswith("s3://")
    for secret in (rig.server.secret_access_key, rig.server.access_key_id):
        assert secret not in json.dumps(report) + errors
    config = parse_config(yaml.safe_load(rig.file.read_text())).tiers[0]
    assert isinstance(config, SlabConfig)
    tier = SlabTier.open(config, position=0, namespace=BLUE, slot_classes=[SLOT_BYTES], world_size=RANKS)
    try:
        for number in range(CHUNKS):
            assert (tier.state(key(number)) is State.READY) is (number not in (3, 5))
        location = tier.pin(key(7))
        for rank in range(RANKS):
            content = (rig.target / BLUE.name / rank_file_name(rank)).read_bytes()
            assert content[location.offset :][:SLOT_BYTES] == image(BLUE, 7, rank, first_valid_block=1)
        tier.unpin(key(7))
    finally:
        tier.close()


def test_a_bucket_into_the_tree_before_it_and_a_server_that_goes_away(rig: Rig) -> None:
    """What is past the ttl stays behind; with the server gone one line, exit code 1, and nothing half copied."""
    rig.config("shared_dir", ttl="1d")
    code, report, _ = rig.warm("--max-size", str(4 * CHUNK_BYTES))
    assert (code, report["copied"]) == (0, 4)
    arrived = {path.name for path in rig.target.rglob("*.000?")}
    whole = [names for names in rig.names if {name.rpartition("/")[2] for name in names} <= arrived]
    assert (len(whole), len(arrived)) == (4, 4 * RANKS)
    rig.config("shared_dir", ttl="1ms")
    code, report, _ = rig.warm()
    assert (code, report["copied"], report["left_out"]["expired"]) == (0, 0, CHUNKS)
    rig.config("shared_dir", endpoint="http://127.0.0.1:9", request_timeout="300ms")
    code, report, error = rig.warm()
    assert (code, list(report)) == (1, ["error"])
    assert error.startswith("nixl-offload: s3://")
    assert error.count("\n") == 1
    assert not list(rig.target.rglob(".*"))
