"""The one table, and what machine it was measured on.

Threading: one thread. Reads files of the system and asks libraries for their versions; starts nvidia-smi at most.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.rounds import Row, reason

CASE, WAY, CELL = 18, 30, 18
"""Widths of columns."""
PACKAGES = ("torch", "triton", "nixl", "kvikio-cu13", "cupy-cuda13x", "numpy")


def machine(directory: Path) -> dict[str, str]:
    """What a reader must know of the machine, and of the filesystem under ``directory``."""
    found = {"gpu": "none: host memory plays the device", "driver": "", "cuda": str(torch.version.cuda or "")}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}"
        )
        found["driver"] = _driver()
    found["kernel"] = f"{platform.system()} {platform.release()}"
    found["cpus"] = f"{os.cpu_count()} ({_cpu()})"
    found["python"] = platform.python_version()
    found["packages"] = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    found["filesystem"] = _filesystem(directory)
    found["gds"] = _gds(directory)
    return found


def table(rows: Sequence[Row], about: dict[str, str]) -> str:
    """The machine, then for each part a line per case and way, and a column per size of pieces; notes at the end."""
    lines = [f"{name + ':':12}{words}" for name, words in about.items() if words]
    notes: dict[str, int] = {}
    for part in dict.fromkeys(row.part for row in rows):
        own = [row for row in rows if row.part == part]
        sizes = list(dict.fromkeys(row.size for row in own))
        lines += [
            "",
            f"{part:<{CASE}}{'GB/s (ratio)':<{WAY}}" + "".join(f"{size:>{CELL}}" for size in sizes) + "   ratio to",
        ]
        for case, way in dict.fromkeys((row.case, row.way) for row in own):
            found = {row.size: row for row in own if (row.case, row.way) == (case, way)}
            cells = "".join(f"{_cell(found.get(size), notes):>{CELL}}" for size in sizes)
            against = ", ".join(dict.fromkeys(row.against for row in found.values() if row.against))
            lines.append(f"{case:<{CASE}}{way:<{WAY}}{cells}   {against}".rstrip())
    lines += ["", *(f"[{number}] {note}" for note, number in notes.items())] if notes else []
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """The ratio of each way with the largest pieces, in one line."""
    last = {(row.case, row.way): row.ratio for row in rows if row.ratio is not None}
    return "; ".join(f"{case} by {way} {ratio:.2f}" for (case, way), ratio in last.items()) or f"{len(rows)} rows"


def _cell(row: Row | None, notes: dict[str, int]) -> str:
    """Speed and ratio, and the numbers of notes, which are the same for the same words."""
    if row is None:
        return ""
    words = "-" if row.gb_s is None else f"{row.gb_s:.1f}" if row.gb_s < 1000 else f"{row.gb_s:.0f}"
    if row.ratio is not None:
        words += f" ({row.ratio:.2f})"
    if row.note:
        words += f" [{notes.setdefault(row.note, len(notes) + 1)}]"
    return words


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError) as error:
        return reason(error)


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _filesystem(directory: Path) -> str:
    """Kind, source and mount point of what ``directory`` lies on."""
    place = str(directory.resolve())
    best = ("", "?", "?")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        source, point, kind = line.split()[:3]
        if (place == point or place.startswith(point.rstrip("/") + "/")) and len(point) >= len(best[0]):
            best = (point, kind, source)
    point, kind, source = best
    return f"{kind} ({source} on {point})"


def _gds(directory: Path) -> str:
    try:
        from nixl_offload.hardware.gds import gds_report
    except ImportError as error:
        return reason(error)
    return gds_report(str(directory)).verdict
