"""Config: what is accepted, what it becomes, and that every refusal says line, path, value and what is allowed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from nixl_offload.config import from_extra_config, kv_transfer_config, load_config, merge_extra_config, parse_config
from nixl_offload.errors import ConfigError
from nixl_offload.units import parse_duration, parse_size

SLAB_TIER: dict[str, Any] = {"kind": "slab", "path": "/mnt/nvme/kv", "capacity": "500GiB"}
SHARED_DIR_TIER: dict[str, Any] = {"kind": "shared_dir", "path": "/mnt/shared/kv", "capacity": "20TiB"}
S3_TIER: dict[str, Any] = {"kind": "s3", "bucket": "kv-cache"}
MEMORY_TIER: dict[str, Any] = {"kind": "memory", "capacity": "32GiB"}
KEY = "0f" * 32
MINIMAL: dict[str, Any] = {"tiers": [SLAB_TIER]}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kv.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(what: Any, source: str = "inline") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(what) if isinstance(what, Path) else parse_config(what, source)
    return str(caught.value)


def file_refusal(tmp_path: Path, text: str) -> str:
    path = write(tmp_path, text)
    return refusal(path).replace(str(path), "kv.yaml")


def test_a_chain_is_read_and_rendered_back() -> None:
    memory = {**MEMORY_TIER, "lazy": False}
    options = {"drain_timeout": "1500ms", "store_after": 255, "slow_hits": "take"}
    config = parse_config({**options, "tiers": [memory, SHARED_DIR_TIER, S3_TIER]})
    assert (config.drain_timeout_s, config.store_after, config.slow_hits) == (1.5, 255, "take")
    assert config.memory is not None
    assert (config.memory.capacity_bytes, config.memory.lazy) == (32 << 30, False)
    assert config.to_dict()["tiers"][0] == memory
    assert parse_config(config.to_dict()) == config
    chains = [MEMORY_TIER], [memory, SLAB_TIER], [SLAB_TIER, {**SHARED_DIR_TIER, "path": "/mnt/nvme/kv-shared"}]
    assert [parse_config({"tiers": tiers}).chunk_tokens for tiers in chains] == [1, 256, 256]


@pytest.mark.parametrize(
    ("field", "written", "kept"),
    [
        ("prefix", "/prod/a/", "prod/a"),
        ("prefix", "/", ""),
        ("endpoint", "http://MinIO.example:9000/", "http://minio.example:9000"),
        ("endpoint", "https://[fd00::1]:9000", "https://[fd00::1]:9000"),
        ("ca_bundle", "/etc//ssl/../ca.pem", "/etc/ca.pem"),
        ("capacity", "1536GiB", "1.5TiB"),
    ],
)
def test_values_are_normalised(field: str, written: str, kept: str) -> None:
    assert parse_config({"tiers": [{**S3_TIER, field: written}]}).to_dict()["tiers"][0][field] == kept


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    # a tier, where, what is said
    ({**MEMORY_TIER, "lasy": True}, "lasy", "unknown field (did you mean 'lazy'?); allowed: kind, capacity, "),
    ({**SLAB_TIER, "path": "kv"}, "path", "'kv' is refused; allowed: an absolute path, such as /mnt"),
    ({**SLAB_TIER, "capacity": True}, "capacity", "True is not a size; allowed: "),
    ({**SLAB_TIER, "threads": 1000}, "threads", "1000 is refused: input should be less than or equal to 256"),
    ({**SLAB_TIER, "lookup": {}}, "lookup", "unknown field; it belongs to kind shared_dir or s3; allowed: kind, path"),
    ({**SHARED_DIR_TIER, "lookup": {"timout": "1s"}}, "lookup.timout", "unknown field (did you mean 'timeout'?); "),
    ({**SLAB_TIER, "keep_free": "100%"}, "keep_free", "'100%' is not a share; allowed: whole percents from 1% to 99%"),
    ({"kind": "s3"}, "bucket", "is required"),
    ({**S3_TIER, "bucket": "s3://kv-cache"}, "bucket", "'s3://kv-cache' is refused; allowed: 3 to 63 of"),
    *(
        ({**S3_TIER, "prefix": prefix}, "prefix", " is refused; allowed: names of A-Z")
        for prefix in ("a//b", "a/../b", "a\nb", "a" * 513)
    ),
    *(
        ({**S3_TIER, "endpoint": endpoint}, "endpoint", " is refused; allowed: http(s)://host[:port]")
        for endpoint in ("minio:9000", "http://a/b", "http://a:b", "http://[a", "http://a?b=c")
    ),
    ({**S3_TIER, "ttl": "0s"}, "ttl", "'0s' is refused: input should be greater than 0"),
    ({**S3_TIER, "ca_bundle": "ca.pem"}, "ca_bundle", "'ca.pem' is refused; allowed: the absolute path of a file"),
    ({**S3_TIER, "lookup": None}, "lookup", "None is refused: input should be a mapping"),
    (
        {**S3_TIER, "endpoint": "http://minio:9000", "ca_bundle": "/etc/ca.pem"},
        "ca_bundle",
        "has no meaning with an endpoint without TLS",
    ),
    ({"path": "/a"}, "kind", "is required; allowed: memory, slab, shared_dir, s3"),
    ({**SLAB_TIER, "kind": "slap"}, "kind", "'slap' is unknown (did you mean 'slab'?); allowed:"),
]
CHANGED: list[tuple[dict[str, Any], str, str]] = [
    ({"tiers": []}, "tiers", "[] is refused: "),
    ({"tiers": [7]}, "tiers[0]", "7 is refused: input should be a mapping"),
    ({"tenent": "a"}, "tenent", "unknown field (did you mean 'tenant'?); allowed: tenant, chunk_tokens, "),
    ({"tenant": "a/../b"}, "tenant", "'a/../b' is refused; allowed: 1 to 64 of "),
    ({"chunk_tokens": "256"}, "chunk_tokens", "'256' is refused: input should be a valid integer"),
    ({"drain_timeout": 5}, "drain_timeout", "5 is not a duration; allowed: a number with a unit"),
    *(({"shards": shards}, "shards", f"{shards!r} is no number of") for shards in (0, 1000, None, True, "8", "auto")),
    ({"shards": {"heads": "no"}}, "shards.heads", "'no' is no number of shards; allowed: distinct, or a"),
    ({"shards": {"heads": 8, "layer": 2}}, "shards.layer", "unknown field (did you mean 'layers'?); allowed: heads,"),
    ({"vllm": {"block_size": 16}}, "vllm.block_size", "unknown field; allowed: offload_prompt"),
    ({"authenticate": {"key_file": "/k"}}, "authenticate", "has no meaning without a tier of kind shared_dir or s3"),
    ({"authenticate": {"key_file": "0f" * 32}}, "authenticate.key_file", "'***' is refused; allowed: the absolute"),
    (
        {"tiers": [SLAB_TIER, MEMORY_TIER]},
        "tiers[1]",
        "'memory' comes after 'slab'; allowed: any of memory, slab, shared_dir, s3, in this order",
    ),
    ({"tiers": [SHARED_DIR_TIER, SLAB_TIER]}, "tiers[1]", "'slab' comes after 'shared_dir'; allowed: "),
    ({"tiers": [MEMORY_TIER, SLAB_TIER, S3_TIER, S3_TIER]}, "tiers[3]", "'s3' is given twice; allowed: "),
    *(
        ({"tiers": [SLAB_TIER, {**SHARED_DIR_TIER, "path": path}]}, "tiers[1].path", "are the same or one in the other")
        for path in ("/mnt/nvme/kv/", "/mnt/nvme/kv/shared", "/")
    ),
]


@pytest.mark.parametrize(
    ("mapping", "where", "said"),
    [
        *(({"tiers": [tier]}, f"tiers[0].{where}", said) for tier, where, said in REFUSED),
        *(({**MINIMAL, **change}, where, said) for change, where, said in CHANGED),
    ],
    ids=str,
)
def test_refusals_name_path_value_and_what_is_allowed(mapping: dict[str, Any], where: str, said: str) -> None:
    message = refusal(mapping)
    assert message.startswith(f"inline: {where}: ")
    assert said in message
    assert "\n" not in message, "one fault, one line"


def test_every_problem_is_told_at_once_with_its_line(tmp_path: Path) -> None:
    message = file_refusal(
        tmp_path, "tenent: a\ntiers:\n  - kind: slab\n    path: /mnt/kv\n    capacity: 500 gigs\nchunk_tokens: x\n"
    )
    assert [line.split(": ")[:2] for line in message.splitlines()] == [
        ["kv.yaml:1", "tenent"],
        ["kv.yaml:5", "tiers[0].capacity"],
        ["kv.yaml:6", "chunk_tokens"],
    ]


@pytest.mark.parametrize(
    "tier",
    [
        {"kind": "s3", "bucket": "kv-cache", "aws_secret_access_key": "hunter2"},
        {"kind": "s3", "bucket": "kv-cache", "password": "hunter2"},
        {"kind": "s3", "bucket": "kv-cache", "credentials": {"a": "hunter2"}},
        {"kind": "s3", "bucket": "kv-cache", "endpoint": "https://me:hunter2@s3.example"},
        {"kind": "s3", "bucket": "kv-cache", "endpoint": "https://me:a/hunter2/b@s3.example"},
        {"kind": "s3", "bucket": "kv-cache", "prefix": "me:hunter2@s3.example"},
        {"kind": "s3", "bucket": "https://me:hunter2@s3.example/kv"},
    ],
)
def test_credentials_are_refused_and_never_repeated(tier: dict[str, Any]) -> None:
    message = refusal({"tiers": [tier]})
    assert "hunter2" not in message
    if len(tier) == 3 and not {"endpoint", "prefix"} & {*tier}:
        assert "AWS chain" in message


@pytest.mark.parametrize(
    "said", [KEY, {"key_file": KEY}, {"key": KEY}, {"key_file": [KEY]}, {"key_file": {KEY: 1}}, [KEY]], ids=repr
)
def test_a_key_in_the_place_of_its_file_is_not_repeated(said: object) -> None:
    message = refusal({"tiers": [SHARED_DIR_TIER], "authenticate": said})
    assert message.startswith("inline: authenticate")
    assert KEY not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "kv.yaml: tiers: is required"),
        ("- 1\n", "kv.yaml: [1] is not a mapping"),
        ("tenant: a\ntenant: b\n", "kv.yaml:2:1: not valid YAML: tenant is given twice, first in line 1; say it once"),
        ("tiers:\n  - {kind: slab, kind: s3}\n", "kv.yaml:2:18: not valid YAML: tiers[0].kind is given twice"),
        ("tiers: &a [*a]\n", "kv.yaml:1:12: not valid YAML: anchors and aliases are not supported here"),
        ("1: 2\n", "kv.yaml: [1]: 2 is refused: keys should be strings"),
        ("? [a]\n: b\n", "kv.yaml:1:3: not valid YAML: found unhashable key"),
        ("a: !!python/object/apply:os.getcwd []\n", "kv.yaml:1:4: not valid YAML: could not determine a constructor"),
        ("a: 2024-13-45\n", "kv.yaml: not valid YAML: a value does not fit its tag"),
        ("a: 1\nb: !!bool hunter2\n", "kv.yaml: not valid YAML: a value does not fit its tag"),
        ("[" * 5000, "kv.yaml: nested too deeply"),
        ("a: 1\nb: \x1b[1m\n", "kv.yaml: not valid YAML: unacceptable character #x001b: "),
    ],
)
def test_yaml_that_says_something_else_than_a_reader_sees(tmp_path: Path, text: str, expected: str) -> None:
    assert file_refusal(tmp_path, text).startswith(expected)


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"tenant: \xff\n")
    for path, words in (
        (tmp_path / "none.yaml", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "bytes.yaml", "'utf-8' codec can't decode byte 0xff"),
        ("kv\0.yaml", r"^'kv\\x00.yaml': cannot be read"),
        ("/dev/zero", "is larger than 1MiB"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_config(path)
    text = "tiers: [{kind: memory, capacity: 64GiB}]\n"
    comment = "#\n" * (1 << 19)
    assert load_config(write(tmp_path, text + comment[: -len(text)])).memory
    assert file_refusal(tmp_path, text + comment).startswith("kv.yaml: is larger than 1MiB")


def test_extra_config_names_a_file_or_holds_the_mapping(tmp_path: Path) -> None:
    path = write(tmp_path, "tiers: [{kind: slab, path: /mnt/nvme/kv, capacity: 500GiB}]\n")
    assert from_extra_config({"config": str(path)}) == from_extra_config({"config": MINIMAL}) == parse_config(MINIMAL)
    for extra in ({}, {"config": None}, {"config": 3}):
        with pytest.raises(ConfigError, match=r"^kv_connector_extra_config\.config: .*allowed: the path"):
            from_extra_config(extra)


def test_passthrough_reaches_vllm_once() -> None:
    config = parse_config({**MINIMAL, "vllm": {"offload_prompt_only": False}})
    extra = kv_transfer_config(config, "/etc/kv.yaml")["kv_connector_extra_config"]
    assert extra == {"config": "/etc/kv.yaml", "offload_prompt_only": False}
    assert merge_extra_config({"config": "x"}, config) == {"config": "x", "offload_prompt_only": False}
    with pytest.raises(ConfigError, match=r"vllm\.offload_prompt_only: .*say it in one place"):
        merge_extra_config({"config": "x", "offload_prompt_only": True}, config)


def test_sizes_and_durations() -> None:
    assert [parse_duration(text) for text in ("7d", "1.5h", "250ms")] == [7 * 86400, 5400, 0.25]
    for text in ("7", 7, "7 weeks", "", "-1s", None, "1d12h"):
        with pytest.raises(ValueError, match="allowed"):
            parse_duration(text)
    for text in ("", "GiB", "-1GiB", "1e9", "500", "1.5B", "1 2GiB", "9000PiB", None, True, 2.0, b"1B"):
        with pytest.raises(ValueError, match="allowed"):
            parse_size(text)
    for text, guess in (("500G", "500GiB"), ("500Gi", "500GiB"), ("2mib", "2MiB")):
        with pytest.raises(ValueError, match=rf"did you mean {guess}\?"):
            parse_size(text)


CONFIGS = sorted((Path(__file__).resolve().parents[2] / "nixl_offload/configs").glob("*.yaml"))
VARIANT = re.compile(r"^#   - kind: .*\n(?:^#     .*\n)*", re.MULTILINE)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_and_its_variants_are_loaded(path: Path) -> None:
    """A variant takes the place of the tier of its kind."""
    load_config(path)
    for text in VARIANT.findall(path.read_text()):
        whole = yaml.safe_load(path.read_text())
        (variant,) = yaml.safe_load(re.sub(r"^#   ", "", text, flags=re.MULTILINE))
        whole["tiers"] = [variant if tier["kind"] == variant["kind"] else tier for tier in whole["tiers"]]
        assert variant in whole["tiers"]
        parse_config(whole)
