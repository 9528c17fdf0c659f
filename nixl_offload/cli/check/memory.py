"""What ``nixl-offload check`` says of a memory tier: is the memory there, can it be page-locked, in huge pages.

Threading: one thread. Nothing is allocated: the server takes its memory at start and says so if it cannot.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from nixl_offload.cli.check.child import Answer
from nixl_offload.cli.check.lines import Line, ok, unknown, warning, wrong
from nixl_offload.cli.terminal import about_size
from nixl_offload.config import MemoryConfig
from nixl_offload.units import format_size

_MIB = 1 << 20


def memory_lines(
    tier: MemoryConfig, room: Answer, *, gpu: bool, staging_bytes: int, root: Path = Path("/")
) -> Iterator[Line]:
    """Yield lines for a tier. ``room`` is the answer to the child's task ``memory``; ``root`` stands for ``/``."""
    yield _room_line(tier, room, staging_bytes)
    if gpu:
        yield _lock_line(tier.capacity_bytes + staging_bytes)
    huge = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if "[never]" in huge:
        mend = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        yield warning("huge pages", "transparent huge pages are off: taking the memory at start takes longer", mend)
    elif huge:
        yield ok("huge pages", "transparent huge pages are on")


def _room_line(tier: MemoryConfig, room: Answer, staging_bytes: int) -> Line:
    name = "room"
    if "failed" in room:
        return unknown(name, f"cannot be told here: {room['failed']}", "free -g")
    usable, wanted = int(room["usable_bytes"]), tier.capacity_bytes
    available = f"{about_size(int(room['available_bytes']))} can be had, limited by {room['by']}"
    if wanted <= usable:
        left = usable - wanted
        words = f"capacity {format_size(wanted)}: {available}"
        if left < staging_bytes:
            less = max(_MIB, (wanted - staging_bytes) // _MIB * _MIB)
            return warning(name, f"{words}; that leaves too little for staging", f"capacity: {format_size(less)}")
        return ok(name, words)
    fits = (usable - staging_bytes) // _MIB * _MIB
    words = f"capacity {format_size(wanted)}, but {available}; what runs now counts, a running server too"
    if fits < _MIB:
        return wrong(name, words, "free memory, or take the memory tier out of the config")
    return wrong(name, words, f"capacity: {format_size(fits)}")


def _lock_line(wanted_bytes: int) -> Line:
    name = "page-locking"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= wanted_bytes:
        return ok(name, "no limit in the way (ulimit -l)")
    words = f"ulimit -l is {about_size(soft)}; NVIDIA's driver mostly passes it by, not everywhere"
    return warning(name, words, "ulimit -l unlimited; of a container: docker run --ulimit memlock=-1")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
