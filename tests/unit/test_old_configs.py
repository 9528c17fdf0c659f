"""Configs that users have today go on meaning what they mean. ``tests/fixtures/configs`` has copies of every config
that commit 35d74f4 shipped or showed in its pages, the variants in their comments, and some with every option and every
mover; ``configs.json`` has what that version made of each.

Recorded is what ``nixl-offload show --json`` says, by meaning: sizes in bytes, times in seconds, and of a tier the
medium, whatever the kind is called. A config in that folder is never changed. Where a release changes what an old
config means, ``CHANGED`` says so, and the changelog must say it too.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final

import pytest

from nixl_offload.cli.main import main

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "configs"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
RECORDED = FOLDER / "configs.json"

MEDIA: Final[dict[tuple[str, str | None], str]] = {
    ("memory", None): "memory",
    ("file", "slab"): "slab",
    ("file", "tree"): "shared directory",
    ("slab", None): "slab",
    ("shared_dir", None): "shared directory",
    ("s3", None): "bucket",
}
"""What ``show`` calls a tier, by kind and layout, and what that means. A new spelling gets a new row."""
CHANGED: Final[dict[tuple[str, object], object]] = {
    ("slab.mover", "gds"): "gds_mt",
    ("shared directory.mover", "gds"): "gds_mt",
    ("bucket.mover", "boto3"): "obstore",
}
"""``(setting, recorded value) -> value of today``; None: the setting is gone. A setting of a tier is called
``medium.setting``, such as ``slab.mover``."""

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([a-zA-Z]+)")
_UNITS: Final = {
    **{f"{prefix}iB": 1 << (10 * power) for power, prefix in enumerate("KMGTP", 1)},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGTP", 1)},
    **{"B": 1, "ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400},
}


def plain(value: object) -> Any:
    """Return a value without the way it is written: ``1GiB`` is a number of bytes, ``2m`` one of seconds."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in _UNITS:
        return value
    number = float(match[1]) * _UNITS[match[2]]
    return int(number) if number.is_integer() else number


def meaning_of(path: Path) -> dict[str, Any]:
    """Return what this version makes of a config."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["show", str(path), "--json"]) == 0
    shown = json.loads(out.getvalue())
    config, transfer = shown["config"], shown["kv_transfer_config"]
    tiers = []
    for tier in config.pop("tiers"):
        medium = MEDIA[tier.pop("kind"), tier.pop("layout", None)]
        tiers.append({"medium": medium, **plain(tier)})
    transfer["kv_connector_extra_config"].pop("config")
    return {**plain(config), "tiers": tiers, "kv_transfer_config": transfer}


def as_today(recorded: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return what was recorded, with ``CHANGED`` applied."""
    said = {}
    for name, value in recorded.items():
        if name == "tiers":
            said[name] = [as_today(tier, f"{tier['medium']}.") for tier in value]
        elif isinstance(value, (dict, list)):
            said[name] = value
        elif (now := CHANGED.get((prefix + name, value), value)) is not None or value is None:
            said[name] = now
    if not prefix:
        said.setdefault("shards", "distinct")  # what ranks have alike was stored by each
        said.setdefault("authenticate", None)
    if prefix and prefix != "memory.":
        said.setdefault("required", False)  # older configs cannot say it
    if prefix in ("memory.", "slab."):
        said.setdefault("share_per_salt", None)
    if prefix == "shared directory.":
        said.setdefault("evict", None)  # on a local filesystem that means yes now, and used to mean no
    if said.get("mover") == "gds_mt":
        said.setdefault("threads", 8)  # gds had none
    return said


def test_nothing_is_overlooked() -> None:
    assert {path.name for path in CONFIGS} == set(json.loads(RECORDED.read_text()))
    media = {tier["medium"] for config in json.loads(RECORDED.read_text()).values() for tier in config["tiers"]}
    assert media == set(MEDIA.values())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_an_old_config_means_what_it_meant(path: Path) -> None:
    recorded = json.loads(RECORDED.read_text())[path.name]
    assert meaning_of(path) == as_today(recorded)
