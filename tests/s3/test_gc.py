"""``nixl-offload gc`` over a bucket of rclone's, where objects can be given an age. ``test_cli_gc`` has the rest."""

from __future__ import annotations

import json
import os
import time
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from nixl_offload.cli.main import main
from nixl_offload.config.schema import S3Config
from nixl_offload.stores.s3 import open_store
from tests.unit.stored_rig import namespace_of, put, put_chunk, put_manifest

from .servers import RcloneServer

BLUE = namespace_of("blue", "org/blue")
RED = namespace_of("red", "org/red")
HOUR_S = 3600.0


def test_a_bucket_is_brought_down_to_its_capacity_and_ttl(
    rclone: RcloneServer, prefix: str, s3_environment: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limits come from the config; what lies beside the prefix or is foreign within it stays; no secret shows."""
    file = tmp_path / "kv.yaml"
    file.write_text(yaml.safe_dump({"tiers": [rclone.tier(prefix, ttl="1d", capacity="10kB")]}))

    def aged(names: list[str], age_s: float) -> list[str]:
        modified_s = time.time() - age_s
        for name in names:
            os.utime(rclone.path(f"{prefix}/{name}"), (modified_s, modified_s))
        return names

    with closing(open_store(S3Config.model_validate(rclone.tier(prefix)))) as store:
        put_manifest(store, BLUE)
        chunks = [aged(put_chunk(store, BLUE, n), HOUR_S * (n + 1)) for n in range(8)]
        expired = aged(put_chunk(store, RED, 0), 30 * HOUR_S)
        put(store, "notes.txt")
        beside = f"{prefix}-other/{chunks[7][0]}"
        rclone.write(beside, b"a prefix that merely begins alike")
        before = {info.name for info in store.list("")}

        assert main(["gc", str(file)]) == 0
        assert {info.name for info in store.list("")} == before
        look = capsys.readouterr()
        assert f"s3://{rclone.bucket}/{prefix} at {rclone.endpoint}: 9 chunks in 18 objects, 17.6KiB" in look.out
        assert "Limits: at most 9.77KiB, nothing older than 1d." in look.out
        assert "Plan: 4 chunks in 8 objects, 7.81KiB to delete; 9.77KiB stay." in look.out

        assert main(["gc", str(file), "--delete", "--json"]) == 0
        done = capsys.readouterr()
        assert json.loads(done.out)["outcome"]["deleted"] == {"chunks": 4, "objects": 8, "bytes": 8000}
        gone = {name for names in [*chunks[5:], expired] for name in names}
        assert {info.name for info in store.list("")} == before - gone
        assert rclone.path(beside).exists()
    for text in (look.out, look.err, done.out, done.err):
        assert rclone.secret_access_key not in text
        assert rclone.access_key_id not in text
