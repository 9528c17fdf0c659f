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
    found = [_of_machine(root), *_of_groups(root)]
    return min(found, key=lambda each: each.available_bytes)


def _of_machine(root: Path) -> Room:
    fields = _fields(root / "proc/meminfo")
    kib = fields.get("MemAvailable:", fields.get("MemFree:"))
    return Room(_NO_LIMIT_BYTES if kib is None else kib << 10, "the machine (MemAvailable)")


def _of_groups(root: Path) -> list[Room]:
    found: list[Room] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            for mount in (root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"):
                found += _upwards(mount, path, "memory.max", "memory.current", ("inactive_file", "active_file"))
        elif "memory" in controllers.split(","):
            cache = ("total_inactive_file", "total_active_file")
            mount = root / "sys/fs/cgroup/memory"
            found += _upwards(mount, path, "memory.limit_in_bytes", "memory.usage_in_bytes", cache)
    return found


def _upwards(mount: Path, path: str, limit: str, usage: str, cache: tuple[str, ...]) -> list[Room]:
    """What the group ``path`` leaves, and each above it; in a container the mount itself may be the group."""
    found = []
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):
        group = mount.joinpath(*parts[:depth])
        limit_bytes, used_bytes = _number(group / limit), _number(group / usage)
        if limit_bytes is None or used_bytes is None or limit_bytes >= _NO_LIMIT_BYTES:
            continue
        statistics = _fields(group / "memory.stat")
        used_bytes -= sum(statistics.get(name, 0) for name in cache)
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
