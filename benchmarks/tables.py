"""What all benchmarks print: the machine they ran on, and a table that a terminal and a document can show.

Threading: pure functions.
"""

from __future__ import annotations

import math
import os
import platform
import resource
from collections.abc import Iterable, Sequence
from pathlib import Path


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an aligned Markdown table. The first column is set to the left, the others to the right."""
    lines = [list(heading), *map(list, rows)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(heading))]
    rule = ["-" * widths[0], *(f"{'-' * (width - 1)}:" for width in widths[1:])]
    return "\n".join(
        f"| {line[0]:<{widths[0]}} | "
        + " | ".join(f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
        + " |"
        for line in (lines[0], rule, *lines[1:])
    )


def number(value: float | None, form: str) -> str:
    """Return ``value`` in a format; a dash for None and NaN, which mean that nothing was measured."""
    return "–" if value is None or math.isnan(value) else format(value, form)


def machine() -> str:
    """Return processor, memory, kernel and load average in words."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} × {names[0] if names else platform.machine()}, {gib:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f} before"
    )


def cpu_s() -> float:
    """Return the CPU seconds of this process so far: all threads, and the kernel's work for them."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
