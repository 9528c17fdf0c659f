"""The table of metrics is current; dashboard, alerts and docs ask in PromQL for metrics and labels that exist.

That the metrics exist in a running vLLM is shown by ``tests/vllm/test_serve_metrics.py``.
"""

from __future__ import annotations

import re

import pytest
import yaml

from docs.metrics_table import PAGE, main, with_table
from nixl_offload.vllm.metric_names import METRICS, PREFIX
from tests.promql import ROOT, asked, every_expression, panels

COMMON = {"instance", "job", "namespace", "engine", "model_name", "le"}
OF = {metric.exposed: set(metric.labels) for metric in METRICS}
OF |= {
    f"{metric.exposed}_{part}": set(metric.labels)
    for metric in METRICS
    if metric.kind == "histogram"
    for part in ("bucket", "sum", "count")
}
"""Labels by series name."""


def test_the_table_in_the_docs_is_what_the_code_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Else: python -m docs.metrics_table --write."""
    assert main([]) == 0, capsys.readouterr().out
    page = PAGE.read_text()
    assert with_table(page.replace(METRICS[0].unit, "eggs", 1)) == page, "a table that differs is seen"


def alerts() -> list[tuple[str, str]]:
    [group] = yaml.safe_load((ROOT / "examples/monitoring/alerts.yml").read_text())["groups"]
    return [(rule["alert"], rule["expr"]) for rule in group["rules"]]


@pytest.mark.parametrize(("where", "expression"), [*every_expression(), *alerts()])
def test_expressions_ask_for_labels_that_exist(where: str, expression: str) -> None:
    """A label that no series has makes a panel empty, and nobody notices."""
    found = asked(expression)
    ours = {name for name in found.metrics if name.startswith(PREFIX)}
    assert ours <= set(OF), where
    assert not ours or found.labels <= COMMON.union(*map(OF.__getitem__, ours)), where


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {
        re.sub("_(bucket|sum|count)$", "", name)
        for panel in panels()
        for target in panel["targets"]
        for name in re.findall(r"vllm:\w+", target["expr"])
    }
    assert {metric.exposed for metric in METRICS} <= shown
