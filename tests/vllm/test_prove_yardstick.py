"""A small part of the proof's yardstick and of its soak, so that both go on working."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.prove.soak import soak
from tests.prove.yardstick import try_side

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A path short enough for sockets, as in the proof's cells."""
    with tempfile.TemporaryDirectory(prefix="prove-") as scratch, contextlib.chdir(Path(scratch)):
        monkeypatch.setattr(tempfile, "tempdir", scratch)
        monkeypatch.setenv("TMPDIR", scratch)
        yield


def test_ours_is_exact_with_a_flipped_byte() -> None:
    outcome = try_side("shared_dir", 7, "flipped")
    assert outcome.findings == []
    assert outcome.counts["exact"] == 1


def test_a_short_soak() -> None:
    """Right answers through some faults. So short a window says nothing of throughput and memory."""
    outcome = soak(7, 20.0)
    assert not outcome.wrong, outcome
    assert not outcome.dead, outcome
    assert outcome.counts["faults"] > 0
    assert outcome.counts["answers"] > 100
