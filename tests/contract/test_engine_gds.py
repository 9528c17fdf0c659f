"""The engine over NIXL's real GDS_MT plugin, in a child whose loader finds an emulated cuFile."""

from __future__ import annotations

from pathlib import Path

from .test_movers import run_cases


def test_the_engine_over_the_emulation(cufile_emulation: Path, tmp_path: Path) -> None:
    """Round trips direct and packed on the device, and what is wrong with the medium: ``emulation/engine_cases.py``."""
    run_cases("engine_cases.py", [], [cufile_emulation], cufile_emulation / "control", tmp_path)
