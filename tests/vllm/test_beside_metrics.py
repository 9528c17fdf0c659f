"""Proves that users learn of what keeps our connector from being built, and that no start ends for another connector's
metrics beside ours. vLLM's own code makes configurations and exporters, without an engine.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.engine.arg_utils import EngineArgs

from examples.demo.model import TINY, write_model
from nixl_offload.vllm.metric_names import PREFIX
from nixl_offload.vllm.plugin import register

OURS = {"kv_connector": "NixlOffloadConnector", "kv_role": "kv_both"}
THEIRS = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    register()
    return write_model(tmp_path / "model", TINY)


def configured(model: Path, transfer: dict[str, Any], **arguments: Any) -> VllmConfig:
    """Return what ``vllm serve`` makes of these arguments."""
    options = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 512, **arguments}
    return EngineArgs(model=str(model), kv_transfer_config=transfer, **options).create_engine_config()  # type: ignore[arg-type]


def inside_multi(*children: dict[str, Any]) -> dict[str, Any]:
    extra = {"connectors": [dict(child) for child in children]}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.mark.parametrize("children", [[OURS, THEIRS], [THEIRS, OURS]], ids=["ours first", "ours last"])
def test_metrics_beside_the_connector_that_ours_descends_from(children: list[dict[str, Any]], model: Path) -> None:
    """Names that both have count the other's alone; those of ours are ours."""
    registry = CollectorRegistry()
    types: Any = {kind: functools.partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    metrics = MultiConnector.build_prom_metrics(
        configured(model, inside_multi(*children)), types, ["engine"], {0: ["0"]}
    )
    for name, size_bytes in (("NixlOffloadConnector", 100), ("OffloadingConnector", 7)):
        stats = OffloadingConnectorStats()
        stats.increase_counter("vllm:kv_offload_load_bytes", size_bytes)
        if name.startswith("Nixl"):
            stats.set_gauge(PREFIX + "capacity_bytes", 5, ("slab",))
        metrics.observe({name: stats.data})
    assert registry.get_sample_value("vllm:kv_offload_load_bytes_total", {"engine": "0"}) == 7
    assert registry.get_sample_value(PREFIX + "capacity_bytes", {"engine": "0", "tier": "slab"}) == 5
