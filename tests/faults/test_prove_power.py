"""A little of the proof's part ``power``: see tests/prove/power."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prove import power
from tests.prove.power.histories import STORIES


@pytest.mark.parametrize("name", ["slab/first start", "tree/first start, aio"])
def test_a_server_opens_whatever_a_power_cut_leaves(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = power.try_story(name, STORIES[name], "any", "20", most=16)
    assert outcome.is_good(), outcome
    assert outcome.counts["disks"] > 16
    assert outcome.counts["whole"] > 0
