"""The configs that are shipped, and the variants in their comments: every one is loaded and means what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from nixl_offload.config import S3Config, load_config

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "nixl_offload" / "configs").glob("*.yaml"))
_VARIANT = re.compile(r"^#   - kind: .*\n(?:^#     .*\n)*", re.MULTILINE)


class Variant(NamedTuple):
    """A tier that stands in a comment."""

    file: Path
    text: str

    def write(self, directory: Path) -> Path:
        """Write the file with this tier in place of the one of its kind, as the comment tells readers to do."""
        (tier,) = yaml.safe_load(re.sub(r"^#   ", "", self.text, flags=re.MULTILINE))
        whole = yaml.safe_load(self.file.read_text())
        kinds = [other["kind"] for other in whole["tiers"]]
        whole["tiers"][kinds.index(tier["kind"])] = tier
        path = directory / self.file.name
        path.write_text(yaml.safe_dump(whole, sort_keys=False))
        return path


VARIANTS = [Variant(path, text) for path in CONFIGS for text in _VARIANT.findall(path.read_text())]


def _variant_id(variant: Variant) -> str:
    return f"{variant.file.stem}-{VARIANTS.index(variant)}"


@pytest.mark.parametrize("variant", VARIANTS, ids=_variant_id)
def test_every_variant_in_a_comment_is_loaded(variant: Variant, tmp_path: Path) -> None:
    load_config(variant.write(tmp_path))


def test_no_variant_is_overlooked(tmp_path: Path) -> None:
    """Each ``kind:`` in a comment begins a variant, and MinIO and Ceph are among those of the bucket."""
    commented = sum(len(re.findall(r"^#.*- \{?kind:", path.read_text(), re.MULTILINE)) for path in CONFIGS)
    assert commented == len(VARIANTS)
    tiers: list[Any] = []
    for variant in VARIANTS:
        tiers += [tier for tier in load_config(variant.write(tmp_path)).tiers if isinstance(tier, S3Config)]
    assert any(tier.endpoint is not None and "minio" in tier.endpoint for tier in tiers)
    assert any(tier.endpoint is not None and "rgw" in tier.endpoint for tier in tiers)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_commands_in_comments_name_the_file_itself(path: Path) -> None:
    """So that they can be copied from where they stand."""
    commands = re.findall(r"nixl-offload (?:check|bucket init|gc) (\S+)", path.read_text())
    assert set(commands) <= {path.name}
