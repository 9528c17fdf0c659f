"""Targets: what people and other programs write. Config files, and hints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from nixl_offload.config import kv_transfer_config, load_config, parse_config
from nixl_offload.config.schema import TIER_KINDS, TIER_MODELS, Config
from nixl_offload.errors import ConfigError
from nixl_offload.vllm.hints import FIELD, BadHintError, hint_of
from tests.prove.cells import ROOT
from tests.prove.fuzz import One, Target, expect
from tests.prove.fuzz.trees import json_mutated, yaml_mutated

_CONFIGS = ROOT / "nixl_offload" / "configs"
_MESSAGE_MOST = 20_000
_LINES_MOST = 200


def config(scratch: Path) -> One:
    """Config files: a config that says the same when it is written out, or sentences that name the file."""
    file = scratch / "kv.yaml"

    def one(data: bytes) -> None:
        file.write_bytes(data)
        try:
            found = load_config(file)
        except ConfigError as error:
            _check_message(str(error), str(file))
            return
        expect(parse_config(found.to_dict()) == found, "a config that is written out is the same config")
        json.dumps(kv_transfer_config(found, str(file)))

    return one


def _check_message(message: str, named: str) -> None:
    expect(named in message, "an error names its file")
    expect(len(message) < _MESSAGE_MOST and message.count("\n") < _LINES_MOST, "an error is short")
    expect("Traceback" not in message and "pydantic" not in message, "an error is in our words")


def hints(scratch: Path) -> One:
    """A hint of a router: values in range, or an error that shows no value."""

    def one(data: bytes) -> None:
        try:
            params = json.loads(data)
        except (ValueError, RecursionError):
            return
        for given in (params, {FIELD: params}):
            try:
                hint = hint_of(given)
            except BadHintError as error:
                expect(len(str(error)) < 300, "an error is short")
                continue
            if hint is None:
                continue
            expect(isinstance(hint.prefetch, bool), "a hint is typed")
            expect(hint.retain_s is None or 0 <= hint.retain_s <= 86_400, "a time is in range")
            expect(hint.drop_from is None or hint.drop_from >= 0, "a token has a number")
            _ = hint.names

    return one


def targets() -> Iterator[Target]:
    """All texts."""
    names = sorted({name for model in (Config, *TIER_MODELS.values()) for name in _fields(model)})
    words = [f"{name}:".encode() for name in names] + [
        b"- ", b"&a ", b"*a", b"<<: ", b"!!bool ", b"!!int ", b"!!float ", b"!!timestamp ", b"!!binary ", b"!!set ",
        b"!!omap ", b"!!pairs ", b"!!null ", b"? ", b"| ", b"> ", b"---\n", b"%YAML", b"{", b"}", b"[", b"]", b"1GiB",
        b".inf", b".nan", b"2026-11-23", b"0o7", b"0b1", b"1:30", b"~", b"\xef\xbb\xbf", b"\\x85", b"\\u2028",
        *(kind.encode() for kind in TIER_KINDS),
    ]  # fmt: skip
    said = (*names, *TIER_KINDS)
    yield Target(
        "texts/config", config, 10_000, lambda: [*_json(), *_yaml()], words, partial(yaml_mutated, words=said),
        max_bytes=1500,
    )  # fmt: skip
    yield Target(
        "texts/hints", hints, 100_000,
        lambda: [b'{"token_ids":[1,2],"prefetch":true}', b'{"nixl_offload":{"drop_from":3}}', b'[{"retain_s":1.5}]'],
        [b'"token_ids"', b'"prefetch"', b'"retain_s"', b'"store"', b'"drop_from"', b"NaN", b"1e999", b"-0.0"],
        partial(json_mutated, words=("token_ids", "prefetch", "retain_s", "store", "drop_from", FIELD)), max_bytes=400,
    )  # fmt: skip


def _fields(model: type) -> Iterator[str]:
    for name, field in model.model_fields.items():  # type: ignore[attr-defined]
        yield field.alias or name


def _yaml() -> Iterator[bytes]:
    yield from (file.read_bytes() for file in sorted(_CONFIGS.glob("*.yaml")) if file.stat().st_size < 600)


def _json() -> Iterator[bytes]:
    yield b'{"tiers": [{"kind": "slab", "path": "/x", "capacity": "1GiB"}]}'
    yield b'{"tiers": [{"kind": "shared_dir", "path": "/x"}, {"kind": "s3", "bucket": "b-b", "ttl": "7d"}]}'
    yield b'{"tiers": [{"kind": "memory", "capacity": 1073741824}], "vllm": {"a": 1}, "lookup": {"timeout": "1s"}}'
