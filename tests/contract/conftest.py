"""Fixtures of the contract tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from .emulation.build import Control, build_driver, build_emulation


@pytest.fixture(scope="session")
def cufile_emulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the emulated libcufile and libcudart, built by gcc, and their control file."""
    directory = tmp_path_factory.mktemp("cufile")
    build_emulation(directory)
    Control(directory / "control")
    return directory


@pytest.fixture(scope="session")
def driver_emulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the emulated libcuda, built by gcc."""
    directory = tmp_path_factory.mktemp("cuda")
    build_driver(directory)
    return directory
