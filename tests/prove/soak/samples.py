"""What the engine takes of the machine, sampled from outside, and whether it takes more at the end than at first.

Threading: one thread of its own samples; ``window`` may be called from any other.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from tests.prove.happenings import files

EVERY_S: Final = 1.0
MIB: Final = 1 << 20
LIMITS: Final = {"anonymous memory, MiB": 32.0, "shared memory, MiB": 1.0, "threads": 16.0, "descriptors": 16.0}
"""By how much the median at the end may exceed the median at first: pools of threads and connections, and what they
have freed and keep, grow when they are first needed whole, which may be in a fault. There are over a hundred of these
in half an hour."""


class Samples:
    """Samples a process and some directories until ``stop``."""

    def __init__(self, pid: int, directories: Mapping[str, Path]) -> None:
        """``directories``: whose files' space on disk is added up, by name."""
        self._pid = pid
        self._directories = dict(directories)
        self._rows: list[tuple[float, dict[str, float]]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samples")
        self._thread.start()

    def stop(self) -> None:
        """End the sampling, and print what was sampled, thinned: the log has it when something was found."""
        self._stopping.set()
        self._thread.join()
        for at_s, row in self._rows[:: max(1, len(self._rows) // 100)]:
            print(f"{at_s - self._rows[0][0]:7.1f} s", {name: round(value) for name, value in row.items()})

    def window(
        self, begin_s: float = 0.0, end_s: float = float("inf"), how: Callable[[list[float]], float] = statistics.median
    ) -> dict[str, float]:
        """Return the medians of what was sampled between two times of ``time.monotonic``, or what else ``how`` says."""
        rows = [row for at_s, row in self._rows if begin_s <= at_s <= end_s]
        return {name: how([row[name] for row in rows]) for name in rows[0]} if rows else {}

    def _run(self) -> None:
        while not self._stopping.wait(EVERY_S):
            with contextlib.suppress(OSError):  # the process has ended: the next request will fail
                self._rows.append((time.monotonic(), self._row()))

    def _row(self) -> dict[str, float]:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{self._pid}/status").read_text().splitlines())
        return {
            "anonymous memory, MiB": int(status["RssAnon"].split()[0]) / 1024,
            "shared memory, MiB": int(status["RssShmem"].split()[0]) / 1024,
            "threads": int(status["Threads"]),
            "descriptors": len(os.listdir(f"/proc/{self._pid}/fd")),
            **{f"{name} on disk, MiB": taken_bytes(path) / MIB for name, path in self._directories.items()},
        }


def grown(first: Mapping[str, float], last: Mapping[str, float]) -> list[str]:
    """Return a sentence for each thing of which there is more at the end than ``LIMITS`` allow."""
    return [
        f"{name}: {first[name]:.1f} before, {last[name]:.1f} at the end, which is more than {limit:g} above"
        for name, limit in LIMITS.items()
        if last[name] > first[name] + limit
    ]


def taken_bytes(directory: Path) -> int:
    """Return the space that files below ``directory`` take."""
    return sum(status.st_blocks * 512 for _, status in files(directory))
