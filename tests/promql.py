"""What a PromQL expression asks for: parsed by the parser that Prometheus' own grammar was translated to.

Threading: pure functions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import yaml

ROOT = Path(__file__).resolve().parents[1]
DASHBOARD = ROOT / "examples/monitoring/grafana/dashboards/nixl-offload.json"
ALERTS = ROOT / "examples/monitoring/alerts.yml"
PAGE = ROOT / "docs/metrics.md"


def asked(expression: str) -> dict[str, set[str]]:
    """Return the metrics that ``expression`` asks for, and the labels by which it matches or groups each. Raises
    ValueError when it is not PromQL.
    """
    found: dict[str, set[str]] = {}

    def look(node: Any, grouped: frozenset[str] = frozenset()) -> None:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            grouped = grouped.union(node.modifier.labels)
        for name in ("lhs", "rhs", "expr", "vector_selector", "vs"):
            child = getattr(node, name, None)
            if child is not None and not isinstance(child, str):
                look(child, grouped)
        for child in getattr(node, "args", None) or ():
            look(child, grouped)
        if isinstance(node, promql_parser.VectorSelector):
            matched = {matcher.name for matcher in node.matchers.matchers}
            found.setdefault(node.name, set()).update(grouped | matched)

    look(promql_parser.parse(expression))
    assert found, f"nothing is asked for: {expression}"
    return found


def without_variables(expression: str) -> str:
    """Return an expression of a dashboard as Prometheus gets it."""
    expression = re.sub(r"\$__(rate_interval|range|interval)", "5m", expression)
    return re.sub(r"\$(\w+)", ".+", expression)


def panels() -> list[dict[str, Any]]:
    """All panels of the dashboard that show something."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def every_expression() -> Iterator[tuple[str, str]]:
    """Return each expression of the dashboard, its variables, alerts and docs, after the place where it stands."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], without_variables(target["expr"])
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            yield f"variable {variable['name']}", without_variables(f"group by ({label}) ({metric})")
    for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]:
        yield f"alert {rule['alert']}", rule["expr"]
    for block in re.findall(r"```promql\n(.*?)```", PAGE.read_text(), re.DOTALL):
        for line in block.splitlines():
            yield "docs/metrics.md", line
