"""Proves that no text in a config file or a hint ends in anything but a right value or a documented error.

Inputs are what fuzzing kept, and drawn changes of right ones; ``tests/prove/fuzz.py`` tries many more.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from nixl_offload.config import kv_transfer_config, load_config, parse_config
from nixl_offload.config.schema import TIER_KINDS, TIER_MODELS, Config
from nixl_offload.errors import ConfigError
from nixl_offload.vllm.hints import FIELD, BadHintError, hint_of
from tests.prove.cells import ROOT
from tests.prove.fuzz import changed, fuzzed, trees

_MODELS = (Config, *TIER_MODELS.values())
_NAMES = [field.alias or name for model in _MODELS for name, field in model.model_fields.items()]
_YAML = [file.read_bytes() for file in sorted((ROOT / "nixl_offload" / "configs").glob("*.yaml"))]
_CONFIGS = [
    b'{"tiers": [{"kind": "slab", "path": "/x", "capacity": "1GiB"}]}',
    b'{"tiers": [{"kind": "shared_dir", "path": "/x"}, {"kind": "s3", "bucket": "b-b", "ttl": "7d"}]}',
    b'{"tiers": [{"kind": "memory", "capacity": 1073741824}], "vllm": {"a": 1}, "lookup": {"timeout": "1s"}}',
]
_CONFIG_WORDS = [f"{name}:".encode() for name in _NAMES] + [
    b"- ", b"&a ", b"*a", b"<<: ", b"!!bool ", b"!!int ", b"!!float ", b"!!timestamp ", b"!!binary ", b"!!set ",
    b"!!omap ", b"!!pairs ", b"!!null ", b"? ", b"| ", b"> ", b"---\n", b"%YAML", b"{", b"}", b"[", b"]", b"1GiB",
    b".inf", b".nan", b"2026-11-23", b"0o7", b"0b1", b"1:30", b"~", b"\xef\xbb\xbf", b"\\x85", b"\\u2028",
    *(kind.encode() for kind in TIER_KINDS),
]  # fmt: skip
_HINTS = [b'{"token_ids":[1,2],"prefetch":true}', b'{"nixl_offload":{"store":false}}', b'[{"store":1.5}]']
_HINT_WORDS = ("token_ids", "prefetch", "store", FIELD)


@fuzzed(
    "texts-config",
    [*_CONFIGS, *_YAML],
    trees(_CONFIGS, [*_NAMES, *TIER_KINDS], yaml=True)
    | changed([*_CONFIGS, *(text for text in _YAML if len(text) < 600)], _CONFIG_WORDS),
)
def test_config(data: bytes) -> None:
    """A config that says the same when it is written out, or short sentences of ours that name the file."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "kv.yaml")
        file.write_bytes(data)
        try:
            found = load_config(file)
        except ConfigError as error:
            _check(str(error), named=str(file))
            return
        assert parse_config(found.to_dict()) == found
        json.dumps(kv_transfer_config(found, str(file)))


@fuzzed("texts-hints", _HINTS, trees(_HINTS, _HINT_WORDS) | changed(_HINTS, [b"NaN", b"1e999", b"-0.0"]))
def test_hints(data: bytes) -> None:
    """Values in range, or an error that shows no value."""
    try:
        params = json.loads(data)
    except ValueError:
        return
    for given in (params, {FIELD: params}):
        try:
            hint = hint_of(given)
        except BadHintError as error:
            _check(str(error), most=300)
            continue
        if hint is not None:
            assert isinstance(hint.prefetch, bool)


def _check(message: str, named: str = "", most: int = 20_000) -> None:
    assert named in message
    assert len(message) < most
    assert message.count("\n") < 200
    assert "Traceback" not in message
    assert "pydantic" not in message
