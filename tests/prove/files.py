"""Files below a directory in which others create and remove them, directories included."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def files(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield each file with its status, but for those that are removed meanwhile. Links are not followed."""
    for base, _, names in os.walk(directory):
        for name in names:
            path = Path(base, name)
            try:
                told = path.lstat()
            except OSError:
                continue
            yield path, told
