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

from tests.prove.files import files

EVERY_S: Final = 1.0
MIB: Final = 1 << 20
LOOP: Final = "loop, µs"
"""The processor time of a loop that is always the same: how fast the core is. One of a virtual machine may be half of a
real one, and is the slower the more the other half has to do.
"""
_TICKS: Final = os.sysconf("SC_CLK_TCK")

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

    def window(self, begin_s: float, end_s: float) -> dict[str, float]:
        """Return the medians of what was sampled between two times of ``time.monotonic``."""
        return self._of(begin_s, end_s, statistics.median)

    def most(self) -> dict[str, float]:
        """Return the largest of all."""
        return self._of(0.0, float("inf"), max)

    def _of(self, begin_s: float, end_s: float, how: Callable[[list[float]], float]) -> dict[str, float]:
        rows = [row for at_s, row in self._rows if begin_s <= at_s <= end_s]
        return {name: how([row[name] for row in rows]) for name in rows[0]} if rows else {}

    def _run(self) -> None:
        while not self._stopping.wait(EVERY_S):
            with contextlib.suppress(OSError):  # the process has ended: whoever asks it will know
                self._rows.append((time.monotonic(), self._row()))

    def _row(self) -> dict[str, float]:
        status = Path(f"/proc/{self._pid}/status").read_text()
        return {
            "anonymous memory, MiB": _field(status, "RssAnon:") / 1024,
            "shared memory, MiB": _field(status, "RssShmem:") / 1024,
            "threads": _field(status, "Threads:"),
            "descriptors": len(os.listdir(f"/proc/{self._pid}/fd")),
            LOOP: _loop_us(),
            **{f"{name} on disk, MiB": taken_bytes(path) / MIB for name, path in self._directories.items()},
        }


def grown(first: Mapping[str, float], last: Mapping[str, float]) -> list[str]:
    """Return a sentence for each thing of which there is more at the end than ``LIMITS`` allow."""
    return [
        f"{name}: {first[name]:.1f} before, {last[name]:.1f} at the end, which is more than {limit:g} above"
        for name, limit in LIMITS.items()
        if last[name] > first[name] + limit
    ]


def grown_tables(first: Mapping[str, int], last: Mapping[str, int]) -> list[str]:
    """Return a sentence for each container that is much larger at the end. Both were counted with nothing under way."""
    return [
        f"{path} held {first.get(path, 0)} things at first and {size} at the end"
        for path, size in sorted(last.items())
        if size > 1.5 * first.get(path, 0) + 32
    ]


def taken_bytes(directory: Path) -> int:
    """Return the space that files below ``directory`` take."""
    return sum(told.st_blocks * 512 for _, told in files(directory))


def processor_s(pids: Mapping[str, int]) -> float:
    """Return the processor time of processes so far."""
    total = 0
    for pid in pids.values():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def busy_s() -> float:
    """Return for how long the cores that this process may use were not idle so far, by whomever."""
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    total = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *values = line.split()
        if name in cores:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, values[:8])
            total += user + nice + system + irq + softirq + steal
    return total / _TICKS / len(cores)


def _loop_us() -> float:
    began_ns = time.thread_time_ns()
    sum(range(50_000))
    return (time.thread_time_ns() - began_ns) / 1000


def _field(status: str, name: str) -> float:
    return float(status.split(name, 1)[1].split(None, 1)[0])
