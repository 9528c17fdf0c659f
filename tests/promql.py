"""What a PromQL expression asks for: parsed by the parser that Prometheus' own grammar was translated to.

Threading: pure functions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser

ROOT = Path(__file__).resolve().parents[1]
DASHBOARD = ROOT / "examples/monitoring/grafana/dashboards/nixl-offload.json"
PAGE = ROOT / "docs/metrics.md"


class Asked(NamedTuple):
    """The series of one expression."""

    metrics: frozenset[str]
    labels: frozenset[str]
    """Those that are matched, and those that are grouped by."""


def asked(expression: str) -> Asked:
    """Return what ``expression`` asks for. Raises ValueError when it is not PromQL."""
    metrics: set[str] = set()
    labels: set[str] = set()

    def look(node: Any) -> None:
        for name in ("lhs", "rhs", "expr", "vector_selector", "vs"):
            child = getattr(node, name, None)
            if child is not None and not isinstance(child, str):
                look(child)
        for child in getattr(node, "args", None) or ():
            look(child)
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            labels.update(node.modifier.labels)
        if isinstance(node, promql_parser.VectorSelector):
            metrics.add(node.name)
            labels.update(matcher.name for matcher in node.matchers.matchers)

    look(promql_parser.parse(expression))
    assert metrics, f"nothing is asked for: {expression}"
    return Asked(frozenset(metrics), frozenset(labels))


def without_variables(expression: str) -> str:
    """Return an expression of a dashboard as Prometheus gets it."""
    expression = re.sub(r"\$__(rate_interval|range|interval)", "5m", expression)
    return re.sub(r"\$(\w+)", ".+", expression)


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return content


def panels() -> list[dict[str, Any]]:
    """All panels that show something."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def dashboard_expressions() -> Iterator[tuple[str, str]]:
    """Where each expression of the dashboard stands, and the expression; the variables' too."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], without_variables(target["expr"])
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            yield f"variable {variable['name']}", without_variables(f"group by ({label}) ({metric})")


def documented_expressions() -> Iterator[tuple[str, str]]:
    """The expressions in ``docs/metrics.md``, one a line in blocks of promql."""
    for block in re.findall(r"```promql\n(.*?)```", PAGE.read_text(), re.DOTALL):
        for line in block.splitlines():
            yield "docs/metrics.md", line


def every_expression() -> list[tuple[str, str]]:
    return [*dashboard_expressions(), *documented_expressions()]
