"""Movers and transfer paths are compared over the emulated cuFile, in a child whose loader finds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.test_movers import run_cases


def test_autotune_over_the_emulation(cufile_emulation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower one loses, of direct, device and host."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torch's threads wait for each other where cores are few
    run_cases("autotune_cases.py", [], [cufile_emulation], cufile_emulation / "control", tmp_path)
