"""Writes the table of metrics in ``docs/metrics.md`` from ``nixl_offload/vllm/metric_names.py``.

    python -m docs.metrics_table           # say whether the table is up to date; exit code 1 if it is not
    python -m docs.metrics_table --write   # bring it up to date

Threading: a command; nothing is shared.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nixl_offload.vllm.metric_names import METRICS

PAGE = Path(__file__).with_name("metrics.md")
BEGIN, END = "<!-- metrics: begin; written by `python -m docs.metrics_table --write` -->", "<!-- metrics: end -->"


def table() -> str:
    """Return the table as it has to be."""
    lines = ["| metric | kind | unit | meaning | hint |", "|---|---|---|---|---|"]
    for metric in METRICS:
        labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
        cells = [f"`{metric.exposed}{labels}`", metric.kind, metric.unit, metric.meaning, metric.look]
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """Return ``page`` with the table in its place."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Check or write; returns the exit code."""
    page = PAGE.read_text()
    if with_table(page) == page:
        return 0
    if "--write" in arguments:
        PAGE.write_text(with_table(page))
        return 0
    print("docs/metrics.md is out of date: run `python -m docs.metrics_table --write`")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
