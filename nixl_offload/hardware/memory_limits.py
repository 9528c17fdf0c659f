"""How much host memory can still be had: the machine's and every control group's around this process, v1 and v2.

Threading: pure functions that read ``/proc`` and ``/sys``; safe anywhere. What they cannot read limits nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
_NO_LIMIT_BYTES = 1 << 60
"""Version 1 says "no limit" by a number about as large as an address space."""


class Room(NamedTuple):
    """``available_bytes`` may be allocated before something is killed; ``limited_by`` says in words by what."""

    available_bytes: int
    limited_by: str


def room(root: Path = ROOT) -> Room:
    """Return the tightest limit. ``root`` stands for ``/`` in tests.

    Page cache counts as available, in a control group as in ``MemAvailable``: the kernel gives it up first.
    """
    fields, groups = _fields(root / "proc/meminfo"), root / "sys/fs/cgroup"
    kib = fields.get("MemAvailable:", fields.get("MemFree:", _NO_LIMIT_BYTES >> 10))
    found = [Room(kib << 10, "the machine (MemAvailable)")]
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            found += _left(groups, path, "memory.max", "memory.current", "")
            found += _left(groups / "unified", path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            found += _left(groups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    return min(found, key=lambda each: each.available_bytes)


def _left(mount: Path, path: str, limit: str, usage: str, total: str) -> Iterator[Room]:
    """Yield what the group ``path`` leaves, and each above it; in a container the mount itself may be the group."""
    inner = mount / path.strip("/")
    for group in (each for each in (inner, *inner.parents) if each.is_relative_to(mount)):
        limit_bytes, used_bytes = _number(group / limit), _number(group / usage)
        if limit_bytes is not None and used_bytes is not None and limit_bytes < _NO_LIMIT_BYTES:
            statistics = _fields(group / "memory.stat")
            used_bytes -= sum(statistics.get(f"{total}{kind}", 0) for kind in ("inactive_file", "active_file"))
            yield Room(max(0, limit_bytes - max(0, used_bytes)), f"the control group ({group / limit})")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, not ours to read, or "max"
        return None


def _fields(path: Path) -> dict[str, int]:
    """Return the first two words of each line, where the second is a number."""
    words = [line.split() for line in _lines(path)]
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
