"""Servers shared by the tests of this directory. Each test keeps to a ``prefix`` of its own.

Tests that stop a server or empty its bucket start their own; so do other directories' tests, from ``tests.s3.servers``.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from .servers import MotoServer, RcloneServer


@pytest.fixture(scope="session")
def rclone() -> Iterator[RcloneServer]:
    with RcloneServer() as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[MotoServer]:
    with MotoServer() as server:
        yield server


@pytest.fixture
def prefix() -> str:
    return f"test-{secrets.token_hex(4)}"


@pytest.fixture
def s3_environment(rclone: RcloneServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients of the AWS chain in this process find ``rclone``'s credentials."""
    for name, value in rclone.environment.items():
        monkeypatch.setenv(name, value)
