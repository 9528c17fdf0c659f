"""A small part of ``make prove``'s attacks, in each run of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prove.security import try_forgeries
from tests.prove.security.manifests import try_manifests


@pytest.mark.parametrize("way", ["load", "promotion"])
@pytest.mark.parametrize("kind", ["shared_dir", "s3"])
def test_forged_shards_are_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, way: str) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = try_forgeries(kind, way, 1, ["two_groups", "direct_blocks"], 1)
    assert outcome.is_good(), outcome
    assert outcome.counts["forgeries"] == 50


def test_forged_manifests_are_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = try_manifests(2, 5)
    assert outcome.is_good(), outcome
