"""``nixl-offload gc`` over a bucket of rclone's, where objects can be given an age. ``test_cli_gc`` has the rest."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nixl_offload.cli.main import main
from nixl_offload.config import S3Config, parse_config
from nixl_offload.stores.base import Store
from nixl_offload.stores.s3 import open_store
from tests.unit.gc_rig import namespace_of, put, put_chunk, put_manifest

from .servers import RcloneServer

BLUE = namespace_of("blue", "org/blue")
RED = namespace_of("red", "org/red")
HOUR_S = 3600.0


class Rig:
    """A prefix in a bucket, a store that reaches it, a config that names it."""

    def __init__(self, server: RcloneServer, prefix: str, directory: Path) -> None:
        self.server = server
        self.prefix = prefix
        self.file = directory / "kv.yaml"
        self.config()
        (tier,) = parse_config(yaml.safe_load(self.file.read_text())).tiers
        assert isinstance(tier, S3Config)
        self.store: Store = open_store(tier)

    def config(self, **fields: Any) -> None:
        tier = {**self.server.tier(self.prefix), **fields}
        self.file.write_text(yaml.safe_dump({"tiers": [tier]}))

    def names(self) -> set[str]:
        return {info.name for info in self.store.list("")}

    def gc(self, *arguments: str) -> int:
        return main(["gc", str(self.file), *arguments])


@pytest.fixture
def bucket(
    rclone: RcloneServer, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Rig, RcloneServer]]:
    for name, value in rclone.environment.items():
        monkeypatch.setenv(name, value)
    rig = Rig(rclone, prefix, tmp_path)
    yield rig, rclone
    rig.store.close()


def aged(rig: Rig, server: RcloneServer, names: list[str], age_s: float) -> list[str]:
    modified_s = time.time() - age_s
    for name in names:
        os.utime(server.path(f"{rig.prefix}/{name}"), (modified_s, modified_s))
    server.forget()
    return names


def test_a_bucket_is_brought_down_to_its_capacity_and_ttl(
    bucket: tuple[Rig, RcloneServer], capsys: pytest.CaptureFixture[str]
) -> None:
    """The limits come from the config; what lies beside the prefix or is foreign within it stays; no secret shows."""
    rig, server = bucket
    put_manifest(rig.store, BLUE)
    chunks = [aged(rig, server, put_chunk(rig.store, BLUE, n), HOUR_S * (n + 1)) for n in range(8)]
    expired = aged(rig, server, put_chunk(rig.store, RED, 0), 30 * HOUR_S)
    put(rig.store, "notes.txt")
    beside = f"{rig.prefix}-other/{chunks[7][0]}"
    server.write(beside, b"a prefix that merely begins alike")
    rig.config(ttl="1d", capacity="10kB")

    before = rig.names()
    assert rig.gc() == 0
    assert rig.names() == before
    look = capsys.readouterr()
    assert f"s3://{server.bucket}/{rig.prefix} at {server.endpoint}: 9 chunks in 18 objects, 17.6KiB" in look.out
    assert "Limits: at most 9.77KiB, nothing older than 1d." in look.out
    assert "Plan: 4 chunks in 8 objects, 7.81KiB to delete; 9.77KiB stay." in look.out

    assert rig.gc("--delete", "--json") == 0
    done = capsys.readouterr()
    assert json.loads(done.out)["outcome"]["deleted"] == {"chunks": 4, "objects": 8, "bytes": 8000}
    gone = {name for names in [*chunks[5:], expired] for name in names}
    assert rig.names() == before - gone
    assert server.path(beside).exists()
    for text in (look.out, look.err, done.out, done.err):
        assert server.secret_access_key not in text
        assert server.access_key_id not in text


def test_more_objects_than_a_page_and_a_batch_hold(
    bucket: tuple[Rig, RcloneServer], capsys: pytest.CaptureFixture[str]
) -> None:
    """A page of a listing and a bulk delete end at a thousand names."""
    rig, server = bucket
    young = put_chunk(rig.store, BLUE, 0)
    (example,) = {name.rpartition(".")[0] for name in young}
    for number in range(2400):
        digits = f"{number:04x}" + example.rpartition("/")[2][4:]
        path = server.path(f"{rig.prefix}/{BLUE.name}/{digits[:2]}/{digits}.0000")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12345678")
        os.utime(path, (1e9, 1e9))
    server.forget()
    assert rig.gc("--older-than", "1d", "--delete", "--json") == 0
    assert json.loads(capsys.readouterr().out)["outcome"]["deleted"]["objects"] == 2400
    assert rig.names() == set(young)
