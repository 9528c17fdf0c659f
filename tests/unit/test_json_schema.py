"""JSON Schema: refuses and accepts what the loader does, as far as it can say it, and its copies are current."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from nixl_offload.cli.main import main
from nixl_offload.config import parse_config
from nixl_offload.config.json_schema import json_schema, render_json_schema
from nixl_offload.errors import ConfigError
from tools.config_docs import PAGE, SCHEMA_COPY, insert_tables

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json_schema()
VALIDATOR = Draft202012Validator(SCHEMA)
MEMORY: dict[str, Any] = {"kind": "memory", "capacity": "32GiB"}
SLAB: dict[str, Any] = {"kind": "slab", "path": "/mnt/nvme/kv", "capacity": "500GiB"}
SHARED_DIR: dict[str, Any] = {**SLAB, "kind": "shared_dir", "path": "/mnt/shared/kv"}
S3: dict[str, Any] = {"kind": "s3", "bucket": "kv-cache"}


def loads(mapping: Any) -> bool:
    try:
        parse_config(mapping)
    except ConfigError:
        return False
    return True


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_the_copies_are_current() -> None:
    """Otherwise: ``python -m tools.config_docs``"""
    assert (ROOT / SCHEMA_COPY).read_text() == render_json_schema()
    page = (ROOT / PAGE).read_text()
    assert insert_tables(page) == page


def test_writing_renews_the_copies(tmp_path: Path) -> None:
    for name in (SCHEMA_COPY, PAGE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / PAGE).write_text((ROOT / PAGE).read_text().replace("| `tenant` |", "| `stale` |"))
    command = [sys.executable, "-W", "error", "-m", "tools.config_docs", "--root", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    for name in (SCHEMA_COPY, PAGE):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA


def test_every_field_is_described() -> None:
    """What a field means is said where it is declared, and nowhere else."""
    for name, model in {"config": SCHEMA, **SCHEMA["$defs"]}.items():
        for field, schema in model.get("properties", {}).items():
            assert schema.get("description") or field == "kind", f"{name}.{field}"
            assert "``" not in schema.get("description", "")


def test_defaults_are_said_as_the_yaml_says_them() -> None:
    """A file that says every default of the schema means the same as one that says none."""
    for tier in (SLAB, S3, SHARED_DIR):
        said = _defaults(SCHEMA["$defs"][tier["kind"]])
        said = {name: value for name, value in said.items() if name != "lookup"}
        whole = {**_defaults(SCHEMA), "tiers": [{**said, **tier}]}
        assert parse_config(whole) == parse_config({"tiers": [tier]})
    chain = [
        {**_defaults(SCHEMA["$defs"]["memory"]), **MEMORY},
        {**SHARED_DIR, "lookup": _defaults(SCHEMA["$defs"]["LookupOptions"])},
    ]
    assert parse_config({"tiers": chain}) == parse_config({"tiers": [MEMORY, SHARED_DIR]})


def _defaults(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: field["default"] for name, field in schema["properties"].items() if "default" in field}


@pytest.mark.parametrize("path", sorted((ROOT / "nixl_offload" / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_are_valid(path: Path) -> None:
    assert [error.message for error in VALIDATOR.iter_errors(yaml.safe_load(path.read_text()))] == []


def test_what_show_prints_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text(yaml.safe_dump({"tiers": [MEMORY, SHARED_DIR, {**S3, "ttl": "90m"}]}))
    assert main(["show", "--json", str(file)]) == 0
    assert VALIDATOR.is_valid(json.loads(capsys.readouterr().out)["config"])


def _tiers_of(base: dict[str, Any], **choices: list[Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield ``base`` with every combination of what fields may say; ``...`` leaves a field out."""
    for values in itertools.product(*choices.values()):
        said = {field: value for field, value in zip(choices, values, strict=True) if value is not ...}
        yield [{**base, **said}]


def _chains() -> Iterator[list[dict[str, Any]]]:
    of_kind = {"memory": MEMORY, "slab": SLAB, "shared_dir": SHARED_DIR, "s3": S3}
    for length in range(5):
        for kinds in itertools.product(of_kind, repeat=length):
            yield [of_kind[kind] for kind in kinds]


def _memories() -> Iterator[list[dict[str, Any]]]:
    options: dict[str, list[Any]] = {
        "promote": [..., False, 1],
        "unsaved": [..., "pin", "drop", "keep"],
        "unsaved_limit": [..., None, "1GiB", 4096, -1, "1 gig"],
    }
    for tiers in _tiers_of(MEMORY, **options):
        yield tiers
        yield [*tiers, SLAB]


FAMILIES: dict[str, list[list[dict[str, Any]]]] = {
    "orders": list(_chains()),
    "memory": list(_memories()),
    "files": [
        tiers
        for base in (SLAB, SHARED_DIR)
        for tiers in _tiers_of(
            base,
            mover=[..., "auto", "gds_mt", "posix", "kvikio", "uring"],
            threads=[..., 1, 0, 257, "8"],
            lookup=[..., {}],
        )
    ],
    "buckets": list(
        _tiers_of(
            S3,
            mover=[..., "auto", "obj", "obstore", "posix"],
            endpoint=[..., None, "http://minio:9000", "https://minio:9000/", "minio:9000"],
            ca_bundle=[..., None, "/etc/ca.pem"],
        )
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_schema_and_loader_agree_on_every_combination(family: str) -> None:
    """Order of tiers, and every option that would be ignored beside another: said by the schema as by the loader."""
    accepted = 0
    for tiers in FAMILIES[family]:
        mapping = {"tiers": tiers}
        loaded = loads(mapping)
        assert VALIDATOR.is_valid(mapping) == loaded, mapping
        accepted += loaded
    assert 0 < accepted < len(FAMILIES[family])


@pytest.mark.parametrize(
    "change",
    [
        {"tiers": None},
        {"tiers": {"kind": "slab"}},
        {"tiers": [7]},
        {"tiers": [{"path": "/a"}]},
        {"tiers": [{**SLAB, "kind": "fle"}]},
        {"tiers": [{"kind": "slab", "path": "/a"}]},
        {"tiers": [{**SLAB, "path": "kv"}]},
        {"tiers": [{**SLAB, "capacity": True}]},
        {"tiers": [{**SLAB, "capacity": 1.5e9 + 0.5}]},
        {"tiers": [{**SLAB, "capacity": "500 gigs"}]},
        {"tiers": [{**SLAB, "capacity": 1024}]},
        {"tiers": [{**SLAB, "direct_io": "yes"}]},
        {"tiers": [{**SLAB, "polcy": "lru"}]},
        {"tiers": [{**SLAB, "lookup": {}}]},
        {"tiers": [{**SHARED_DIR, "lookup": None}]},
        {"tiers": [{**SHARED_DIR, "lookup": {"timeout": 1}}]},
        {"tiers": [{**SHARED_DIR, "lookup": {"timeout": "0s"}}]},
        {"tiers": [{**SHARED_DIR, "lookup": {"timout": "1s"}}]},
        {"tiers": [{**S3, "bucket": "s3://kv-cache"}]},
        {"tiers": [{**S3, "prefix": "a//b"}]},
        {"tiers": [{**S3, "prefix": "a/../b"}]},
        {"tiers": [{**S3, "prefix": "."}]},
        {"tiers": [{**S3, "endpoint": "http://a/b"}]},
        {"tiers": [{**S3, "endpoint": "https://me:hunter2@s3.example"}]},
        {"tiers": [{**S3, "region": "a b"}]},
        {"tiers": [{**S3, "ttl": 7}]},
        {"tiers": [{**S3, "ca_bundle": "ca.pem"}]},
        {"tiers": [{**S3, "ca_bundle": "/etc/ssl/"}]},
        {"tiers": [{**S3, "connections": 2000}]},
        {"tiers": [{**S3, "aws_secret_access_key": "hunter2"}]},
        {"tenent": "a"},
        {"tenant": "a/../b"},
        {"chunk_tokens": "256"},
        {"chunk_tokens": 0},
        {"verify": "none"},
        {"drain_timeout": 5},
        {"store_after": 256},
        {"staging": 1024},
        {"block_outermost": 1},
        {"vllm": {"block_size": 16}},
        {"vllm": {"spec_name": "x"}},
        {"vllm": {"offload_promt_only": False}},
        {"vllm": []},
    ],
    ids=str,
)
def test_both_refuse(change: dict[str, Any]) -> None:
    mapping = {"tiers": [SLAB], **change}
    assert not loads(mapping)
    assert not VALIDATOR.is_valid(mapping)


@pytest.mark.parametrize(
    "change",
    [
        {"tiers": [{**SLAB, "capacity": 1 << 40}]},
        {"tiers": [{**SLAB, "capacity": " 1.5 TB "}]},
        {"tiers": [{**S3, "prefix": "/prod/a/"}]},
        {"tiers": [{**S3, "prefix": "/"}]},
        {"tiers": [{**S3, "prefix": "..a/b.."}]},
        {"tiers": [{**S3, "endpoint": "HTTP://[::1]:9000/"}]},
        {"tiers": [{**S3, "ttl": "0.5d", "capacity": None}]},
        {"drain_timeout": "1500ms", "store_after": 255},
        {"vllm": {"offload_prompt_only": False, "canonical_layout": True}},
    ],
    ids=str,
)
def test_both_accept(change: dict[str, Any]) -> None:
    mapping = {"tiers": [SLAB], **change}
    assert loads(mapping)
    assert VALIDATOR.is_valid(mapping)
