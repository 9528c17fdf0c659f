"""How much host memory can still be had: the machine's and every control group's around this process, v1 and v2.

Threading: pure functions that read ``/proc`` and ``/sys``; safe anywhere. What they cannot read limits nothing.
"""

from __future__ import annotations

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
    fields = _fields(root / "proc/meminfo")
    kib = fields.get("MemAvailable:", fields.get("MemFree:", _NO_LIMIT_BYTES >> 10))
    found = [Room(kib << 10, "the machine (MemAvailable)"), *_of_groups(root)]
    return min(found, key=lambda each: each.available_bytes)


def _of_groups(root: Path) -> list[Room]:
    found: list[Room] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    groups = root / "sys/fs/cgroup"
    for number, controllers, path in (line.split(":", 2) for line in lines if line.count(":") > 1):
        if number == "0" and not controllers:
            for mount in (groups, groups / "unified"):
                found += _upwards(mount, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            found += _upwards(groups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    return found


def _upwards(mount: Path, path: str, limit: str, usage: str, total: str) -> list[Room]:
    """What the group ``path`` leaves, and each above it; in a container the mount itself may be the group."""
    found, inner = [], mount / path.strip("/")
    for group in (inner, *inner.parents):
        if not group.is_relative_to(mount):
            break
        limit_bytes, used_bytes = _number(group / limit), _number(group / usage)
        if limit_bytes is None or used_bytes is None or limit_bytes >= _NO_LIMIT_BYTES:
            continue
        statistics = _fields(group / "memory.stat")
        used_bytes -= sum(statistics.get(f"{total}{kind}", 0) for kind in ("inactive_file", "active_file"))
        found.append(Room(max(0, limit_bytes - max(0, used_bytes)), f"the control group ({group / limit})"))
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, not ours to read, or "max"
        return None


def _fields(path: Path) -> dict[str, int]:
    """The first two words of each line, where the second is a number."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}
