"""How much memory this process has asked for.

Threading: a pure function.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

PROMISED_BYTES: Final = 2 << 30
"""What a forged header says that its blocks have: a machine has so much, so taking it would go well, and be noticed."""
MOST_BYTES: Final = PROMISED_BYTES // 2
"""That may be asked for, all in all, while such a shard is met: an engine's own memory may come to it."""


def peak_bytes() -> int:
    """Return the most address space that the process has ever had: what is asked for counts, touched or not."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmPeak:"))
    return int(line.split()[1]) << 10
