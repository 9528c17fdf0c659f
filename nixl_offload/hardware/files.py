"""Reads of small files of the system, beneath a root that stands for ``/`` in tests. Nothing here raises.

Threading: pure functions; safe anywhere.
"""

from __future__ import annotations

import os
from pathlib import Path


def beneath(root: str, path: str) -> str:
    """Return where an absolute ``path`` lies when ``root`` stands for ``/``."""
    return path if root == "/" else os.path.join(root, path.lstrip("/"))


def read(root: str, path: str) -> str | None:
    """Return what a file says; "" when there is no such file; None when it is there but cannot be read."""
    try:
        return Path(beneath(root, path)).read_text("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError:
        return None


def names(root: str, path: str) -> list[str]:
    """Return what is in a directory, sorted; nothing when it cannot be read."""
    try:
        return sorted(os.listdir(beneath(root, path)))
    except OSError:
        return []
