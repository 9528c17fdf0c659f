"""Filesystems that tests mount and unmount."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(point: Path, options: str = "size=1m", kind: str = "tmpfs") -> Iterator[Path]:
    """Mount a new filesystem at ``point``, and yield ``point``. Skips the test if this user may not mount."""
    point.mkdir(exist_ok=True)
    command = ["mount", "-t", kind, *(["-o", options] if options else []), kind, str(point)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount {kind} here: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)
