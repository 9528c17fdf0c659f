"""A pytest plugin: the seed of the proof, a core for each of its workers, and a table of what was tried.

No conftest.py, for that would be loaded with all other tests, too.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--seed``."""
    parser.addoption("--seed", type=int, default=1, help="of the proof's cells")


def pytest_configure() -> None:
    """Give each worker cores of its own, so that cells disturb each other little."""
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    cores = sorted(os.sched_getaffinity(0))[int(worker.removeprefix("gw") or 0) :: workers]
    if worker and cores:
        os.sched_setaffinity(0, cores)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print, as Markdown, a line for each part and each cell, then notes."""
    cells = [
        (report.nodeid.partition("[")[2].removesuffix("]"), report.outcome, report.duration, properties)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call" and "counts" in (properties := dict(report.user_properties))
    ]
    lines = ["| cell | cells | found something | tried | seconds |", "|---|---:|---:|---|---:|"]
    for words in (1, 9):  # parts, then cells
        by_name = {"/".join(cell[0].split("/")[:words]): list[Any]() for cell in cells}
        for cell in cells:
            by_name["/".join(cell[0].split("/")[:words])].append(cell)
        for name, some in by_name.items():
            counts = sum((Counter(properties["counts"]) for *_, properties in some), Counter[str]())
            tried = ", ".join(f"{count:,} {what}" for what, count in counts.items())
            found, seconds = sum(cell[1] == "failed" for cell in some), sum(cell[2] for cell in some)
            lines.append(f"| {name} | {len(some)} | {found} | {tried} | {seconds:.0f} |")
    lines += [f"- {name}: {properties['note']}" for name, *_, properties in cells if properties["note"]]
    terminalreporter.write_line("\n".join(lines))
