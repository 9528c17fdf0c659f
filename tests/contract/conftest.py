"""Fixtures of the contract tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.s3.servers import MotoServer, RcloneServer

from .emulation.build import Control, build_driver, build_emulation
from .object_rigs import PREFIX


@pytest.fixture(scope="module")
def rclone() -> Iterator[RcloneServer]:
    with RcloneServer() as server:
        server.make_directories(f"{PREFIX}/suite")
        yield server


@pytest.fixture(scope="module")
def moto() -> Iterator[MotoServer]:
    with MotoServer() as server:
        yield server


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
