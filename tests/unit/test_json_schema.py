"""The config's JSON Schema: valid, explains every field, takes what the loader takes. The page of fields is current."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from nixl_offload.cli.main import main
from tools.config_docs import PAGE, insert_tables

ROOT = Path(__file__).resolve().parents[2]
SLAB: dict[str, Any] = {"kind": "slab", "path": "/mnt/nvme/kv", "capacity": "500GiB"}


@pytest.fixture
def schema(capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["schema"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_field_is_described(schema: Any) -> None:
    Draft202012Validator.check_schema(schema)
    for name, model in {"config": schema, **schema["$defs"]}.items():
        for field, said in model.get("properties", {}).items():
            assert said.get("description") or field == "kind" or name == "VllmOptions", f"{name}.{field}"


def test_the_page_of_fields_is_current() -> None:
    """Otherwise: ``python -m tools.config_docs``"""
    page = (ROOT / PAGE).read_text()
    assert insert_tables(page) == page


def test_samples_and_what_show_prints_are_valid(
    schema: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kv.yaml"
    memory, shared = {"kind": "memory", "capacity": "32GiB"}, {**SLAB, "kind": "shared_dir"}
    file.write_text(yaml.safe_dump({"tiers": [memory, shared, {"kind": "s3", "bucket": "kv-cache", "ttl": "90m"}]}))
    assert main(["show", "--json", str(file)]) == 0
    shown = json.loads(capsys.readouterr().out)["config"]
    for config in (
        shown,
        *(yaml.safe_load(path.read_text()) for path in (ROOT / "nixl_offload/configs").glob("*.yaml")),
    ):
        assert [error.message for error in Draft202012Validator(schema).iter_errors(config)] == []
