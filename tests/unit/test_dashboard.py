"""The dashboard, the table of metrics and the monitoring example, as far as they can be judged without a server.

Proves: the table in the docs is what the code says; the dashboard has the structure that Grafana 10 and newer import,
no panel lies over another, each has unit and words; every expression is PromQL and asks for labels that its metrics
have; every metric of ours is on the dashboard; the compose file and what it mounts fit together. That the metrics exist
in a running vLLM is shown by ``tests/vllm/test_serve_metrics.py``.
"""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml

from docs.metrics_table import PAGE, main, with_table
from nixl_offload.vllm.metric_names import METRICS, PREFIX
from tests.promql import DASHBOARD, ROOT, asked, dashboard, every_expression, panels

MONITORING = ROOT / "examples/monitoring"
UNITS = {"short", "percentunit", "s", "bytes", "Bps"}
"""Of Grafana's unit ids, those that are used here."""
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


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_metrics_are_named_as_prometheus_wants(metric: Any) -> None:
    """A base unit at the end where there is one, no unit word elsewhere, counters without ``_total``: vLLM adds it."""
    name = metric.name.removeprefix(PREFIX)
    assert re.fullmatch(r"[a-z_]+", name)
    assert not name.endswith("_total")
    assert ("bytes" in metric.unit) == name.endswith("_bytes")
    assert (metric.unit == "seconds") == name.endswith("_seconds")
    assert (metric.buckets is not None) == (metric.kind == "histogram")
    if metric.buckets is not None:
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_the_dashboard_has_what_grafana_imports() -> None:
    board = dashboard()
    assert board["title"]
    assert board["uid"]
    assert "id" not in board or board["id"] is None, "an id belongs to one Grafana"
    assert 36 <= board["schemaVersion"] <= 41, "Grafana 10 to 12"
    assert board["time"] == {"from": "now-1h", "to": "now"}
    names = [variable["name"] for variable in board["templating"]["list"]]
    assert names == ["datasource", "namespace", "model", "instance", "tier"]
    assert board["templating"]["list"][0]["type"] == "datasource"
    assert "__inputs" not in board, "the variable is how a data source is chosen"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert rows == ["Is it working?", "Speed", "Capacity", "Health", "Decisions"]


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_each_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["type"] in {"timeseries", "stat", "table", "state-timeline"}, "part of Grafana itself, none retired"
    assert len(panel["description"]) > 40
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["targets"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"]
        for label, variable in (("namespace", "namespace"), ("model_name", "model"), ("instance", "instance")):
            said = target["expr"].count(f'{label}=~"${variable}"')
            assert said == target["expr"].count("{"), "the variables above count for every series of every panel"
        assert ('=~"$tier"' in target["expr"]) == ('tier=~"' in target["expr"])


def test_no_panel_lies_over_another() -> None:
    """Nor beyond Grafana's 24 columns; and nothing is left open between two lines."""
    places = [(panel["title"], panel["gridPos"]) for panel in dashboard()["panels"]]
    for title, at in places:
        assert 0 <= at["x"] < at["x"] + at["w"] <= 24, title
        assert at["h"] > 0, title
    for (one, a), (other, b) in combinations(places, 2):
        apart_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart_y = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart_x or apart_y, f"{one} lies over {other}"
    area = sum(at["w"] * at["h"] for _, at in places)
    assert area == 24 * max(at["y"] + at["h"] for _, at in places)


@pytest.mark.parametrize(("where", "expression"), every_expression())
def test_expressions_ask_for_labels_that_are_there(where: str, expression: str) -> None:
    """A label that no series has makes a panel empty, and nobody notices."""
    found = asked(expression)
    for name in found.metrics:
        if name.startswith(PREFIX):
            assert name in OF, where
            assert found.labels <= OF[name] | COMMON, where


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_legends_name_labels_that_survive(panel: dict[str, Any]) -> None:
    """What a legend shows must be grouped by."""
    for target in panel["targets"]:
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        kept = {label for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(", ")}
        assert shown <= kept


def test_namespaces_and_models_may_be_absent() -> None:
    """Prometheus adds a namespace in Kubernetes only: "All" must match series without the label."""
    variables = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
    assert variables["namespace"]["allValue"] == ".*"
    assert variables["model"]["allValue"] == ".*"


def test_a_skipped_hit_is_no_hit_and_ranks_are_no_tiers() -> None:
    expressions = dict(every_expression())
    for where, expression in every_expression():
        if "lookup_tokens_total" in expression and "/" in expression:
            assert 'result="hit"' in expression, where
    assert expressions["Disabled tiers"].startswith("count(max by (instance, tier) (")


def alerts() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_alerts_ask_for_what_is_there(rule: dict[str, Any]) -> None:
    """PromQL over our metrics and their labels; what the summary names survives the grouping."""
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in {"info", "warning"}, "no storage makes a server fail"
    found = asked(rule["expr"])
    assert found.labels <= COMMON.union(*(OF[name] for name in found.metrics))
    named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    kept = [set(group.split(", ")) for group in re.findall(r"by \(([^)]*)\)", rule["expr"])]
    assert all(named <= group for group in kept)
    assert len(rule["annotations"]["description"]) > 40


def test_prometheus_loads_the_alerts() -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    mounts = [volume.split(":") for volume in compose()["services"]["prometheus"]["volumes"]]
    assert config["rule_files"] == ["/etc/prometheus/alerts.yml"]
    assert ["./alerts.yml", *config["rule_files"], "ro"] in mounts


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {
        re.sub("_(bucket|sum|count)$", "", name)
        for panel in panels()
        for target in panel["targets"]
        for name in re.findall(r"vllm:\w+", target["expr"])
    }
    assert {metric.exposed for metric in METRICS} <= shown


def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((MONITORING / "compose.yaml").read_text())
    return content


def test_the_compose_file_is_one() -> None:
    """By a parser of the Compose specification, which refuses what it does not know: of hosts, all but addresses."""
    text = (MONITORING / "compose.yaml").read_text().replace("host-gateway", "127.0.0.1")
    compose_spec.PyCompose.from_yaml(text)
    with pytest.raises(ValueError, match="restrat"):
        compose_spec.PyCompose.from_yaml(text.replace("restart:", "restrat:", 1))


def test_what_is_mounted_is_there_and_where_it_is_looked_for() -> None:
    """Each path of this directory exists, each volume is declared, and what files name lies on a mount."""
    services = compose()["services"]
    mounts: dict[str, dict[str, Path]] = {}
    for name, service in services.items():
        for volume in service["volumes"]:
            source, target = volume.split(":")[:2]
            if source.startswith("./"):
                assert volume.endswith(":ro")
                assert (MONITORING / source).exists(), volume
                mounts.setdefault(name, {})[target] = MONITORING / source
            else:
                assert source in compose()["volumes"]
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"]), "a version, not whatever is latest"
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "open to this machine only"

    config = next(item for item in services["prometheus"]["command"] if item.startswith("--config.file="))
    assert config.split("=")[1] in mounts["prometheus"]
    grafana = mounts["grafana"]
    [provider] = yaml.safe_load((MONITORING / "grafana/provisioning/dashboards/nixl-offload.yaml").read_text())[
        "providers"
    ]
    assert (grafana[provider["options"]["path"]] / DASHBOARD.name) == DASHBOARD
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert grafana[str(Path(home).parent)] / Path(home).name == DASHBOARD
    assert {path.name for path in grafana["/etc/grafana/provisioning"].iterdir()} == {"datasources", "dashboards"}


def test_grafana_asks_the_prometheus_of_the_compose_file() -> None:
    [source] = yaml.safe_load((MONITORING / "grafana/provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    assert source["type"] == "prometheus"
    assert source["isDefault"]
    assert "127.0.0.1:9090:9090" in compose()["services"]["prometheus"]["ports"]


def test_prometheus_scrapes_where_vllm_tells() -> None:
    """The strict keys of its config; Prometheus refuses unknown ones."""
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    assert set(config) == {"global", "rule_files", "scrape_configs"}
    [job] = config["scrape_configs"]
    assert set(job) == {"job_name", "metrics_path", "static_configs"}
    assert job["metrics_path"] == "/metrics"
    [target] = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert port == "8000"
    assert [f"{host}:host-gateway"] == compose()["services"]["prometheus"]["extra_hosts"]
