"""Every config that is shipped is loaded, and so is every variant of a tier in its comments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from nixl_offload.config import load_config, parse_config

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
