"""``nixl-offload bench`` on a real bucket: measured through the mover that a server would take, and nothing stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from nixl_offload.cli.main import main

from .servers import RcloneServer

MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}


@pytest.mark.usefixtures("s3_environment")
def test_a_bucket_is_measured_and_left_as_it_was(
    rclone: RcloneServer, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What lies under the prefix stays; an endpoint that is gone is told in the tier's own words, exit code 1."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    rclone.write(f"{prefix}/notes.txt", b"a person's")
    file = tmp_path / "kv.yaml"
    command = ["bench", str(file), "--model", str(tmp_path), "--seconds", "0.2", "--size", "2MiB", "--json"]
    file.write_text(yaml.safe_dump({"chunk_tokens": 64, "staging": "1MiB", "tiers": [rclone.tier(prefix)]}))
    assert main(command) == 0
    (tier,) = json.loads(capsys.readouterr().out)["tiers"]
    assert (tier["kind"], tier["store"]["failed_chunks"], tier["load"]["failed_chunks"]) == ("s3", 0, 0)
    assert tier["load"]["chunks"] > 0
    assert rclone.objects(prefix) == [f"{prefix}/notes.txt"]
    gone = {**rclone.tier(prefix), "endpoint": "http://127.0.0.1:9", "request_timeout": "300ms"}
    file.write_text(yaml.safe_dump({"chunk_tokens": 64, "staging": "1MiB", "tiers": [gone]}))
    assert main(command) == 1
    (tier,) = json.loads(capsys.readouterr().out)["tiers"]
    assert "127.0.0.1:9" in tier["trouble"]
