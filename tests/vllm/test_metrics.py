"""Our metrics: what the scheduler's half tells, and that it reaches a running vLLM's exporter.

Proves: every name is told with the labels that its definition has, which vLLM demands with an assertion; values are
those that what was done must give, by tier; on a real engine names show up, of a tier alone and of a chain.
"""

from __future__ import annotations

import functools
from collections import Counter as Tally
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_offload.base import LookupResult, OffloadingCounterMetadata, OffloadingHistogramMetadata

from examples.demo.model import TINY, write_model
from nixl_offload.catalog.catalog import Catalog
from nixl_offload.engine.records import Act, Failure, TierAccess, TierStatus, Waiting, Work
from nixl_offload.tiers.base import Tier
from nixl_offload.types import Outcome
from nixl_offload.vllm.connector import NixlOffloadConnector
from nixl_offload.vllm.load_decision import Hit, LoadNotes, Part
from nixl_offload.vllm.messages import RankStatus, WorkerReport
from nixl_offload.vllm.metrics import DEFINITIONS, MetricsReporter
from nixl_offload.vllm.plugin import register
from tests.vllm.damage import until
from tests.vllm.harness import CHUNK_TOKENS, several
from tests.vllm.manager_rig import Rig, config_of, key, memory_tier, request, three_tiers, tree_tier as rig_tree_tier

PREFIX = "vllm:nixl_offload_"
Keep = Callable[[Rig], Rig]

WORK = Work(
    Tally({Act("load", 0): 4096}), {Act("load", 0): [0.25, 0.5]}, Tally({Failure("load", 0, "corrupt", "checksum"): 2})
)
STATUS = TierStatus(Waiting(1, 2, 3), "readonly", TierAccess("posix", ("host",)))


class Exporter:
    """What the process with the exporter runs: vLLM's own classes, over a registry of this test's own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        types = {kind: functools.partial(kind, registry=self.registry) for kind in (Gauge, Counter, Histogram)}
        transfer = SimpleNamespace(kv_connector_extra_config={})
        config: Any = SimpleNamespace(kv_transfer_config=transfer)
        self._metrics = NixlOffloadConnector.build_prom_metrics(config, types, ["engine"], {0: ["0"]})  # type: ignore[arg-type]

    def take(self, stats: OffloadingConnectorStats) -> None:
        self._metrics.observe(stats.data, 0)

    def value(self, name: str, *labels: str) -> float | None:
        definition = DEFINITIONS[name]
        suffix = "_total" if isinstance(definition, OffloadingCounterMetadata) else ""
        if isinstance(definition, OffloadingHistogramMetadata):
            suffix = "_sum"
        return self.registry.get_sample_value(
            name + suffix, {"engine": "0", **dict(zip(definition.labelnames, labels, strict=True))}
        )


def test_counters_go_on_where_tiers_that_were_opened_anew_count_from_0() -> None:
    reporter, exporter = MetricsReporter(["slab"]), Exporter()
    nothing = Catalog([Tier()], world_size=1, slot_bytes=lambda _: 1, store_backlog_bytes=1)
    for counted, shown in ((3, 3), (1, 4)):
        reporter.look_soon()
        stats = reporter.take(nothing, {("hit_decisions", 0, "taken"): counted})
        assert stats is not None
        exporter.take(stats)
        assert exporter.value(PREFIX + "hit_decisions", "slab", "taken") == shown


def test_every_metric_is_told_by_something(tmp_path: Path, keep: Keep) -> None:
    """A name that nothing tells is a promise in the documentation; one that is not defined would stop the engine."""
    config = three_tiers(tmp_path, slots=4, store_after=2)
    rig, exporter = keep(Rig(config)), Exporter()
    seen: set[str] = set()

    def collect() -> set[str]:
        stats = rig.manager.get_stats()
        if stats is not None:
            exporter.take(stats)
            seen.update(name for name, values in stats.data["data"].items() if any(values.values()))
        return seen

    rig.offer(1, 2, 3, 4)
    rig.store(1, 2, 3, 4)
    collect()
    moves = rig.moves()
    rig.report(moves[0].ticket)
    rig.report(moves[1].ticket, {0: Outcome.DROPPED})
    rig.manager.metrics.add("hints", 1, "prefetch", "taken")
    rig.manager.decider.tokens_to_load(Hit((0,), 0, CHUNK_TOKENS, CHUNK_TOKENS, {}), LoadNotes(), 0.0)
    rig.manager.metrics.looked_up(CHUNK_TOKENS, [Part(0, CHUNK_TOKENS, 4096)], CHUNK_TOKENS)
    rig.offer(*range(10, 16))
    rig.offer(*range(10, 16))
    rig.manager.take_ranks({0: RankStatus(frozenset({0}), tiers=(STATUS,))})
    rig.manager.metrics.worked(WORK)
    (tmp_path / "tree").rename(tmp_path / "elsewhere")  # at once: the tier may be creating something in it

    def looked() -> bool:
        rig.manager.lookup(key(99), request("looks"))
        rig.moves()
        return PREFIX + "breaker_state" in collect()

    until(looked, "a shared directory that is gone is given up")
    assert set(DEFINITIONS) - seen == {PREFIX + "late_lookups", PREFIX + "retired_bytes"}
    assert rig.manager.lookup(key(99), request("looks")) is LookupResult.MISS


def test_ranks_are_added_up(tmp_path: Path, keep: Keep) -> None:
    """Two ranks: bytes, samples and failures are summed in the message, what waits and what is disabled by rank; a
    rank that says nothing new stands as it did; equipment that is no longer used is told as 0.
    """
    rig = keep(Rig(config_of(memory_tier(8), rig_tree_tier(tmp_path / "tree")), world_size=2))
    exporter = Exporter()
    direct, both = TierAccess("posix", ("direct",)), frozenset({0, 1})

    def tell(one: TierStatus | None, two: TierStatus | None) -> None:
        reports = [
            WorkerReport(
                work=WORK, ranks={} if status is None else {rank: RankStatus(both, tiers=(TierStatus(), status))}
            )
            for rank, status in enumerate((one, two))
        ]
        merged = reports[0].aggregate(reports[1])
        assert isinstance(merged, WorkerReport)
        rig.manager.take_ranks(merged.ranks)
        rig.manager.metrics.worked(merged.work)
        stats = rig.manager.get_stats()
        assert stats is not None
        exporter.take(stats)

    def value(name: str, *labels: str) -> float | None:
        return exporter.value(PREFIX + name, *labels)

    tell(STATUS, STATUS._replace(trouble="", access=direct))
    assert value("transfer_bytes", "load", "memory") == 2 * 4096
    assert value("transfer_seconds", "load", "memory") == 2 * 0.75
    assert value("shard_failures", "load", "corrupt", "checksum", "memory") == 4
    assert [value("queued_bytes", kind, "shared_dir") for kind in ("load", "store", "write_through")] == [2, 4, 6]
    assert value("queued_bytes", "load", "memory") == 0
    assert value("disabled_ranks", "shared_dir") == 1
    assert value("tier_info", "shared_dir", "posix", "host") == value("tier_info", "shared_dir", "posix", "direct") == 1
    tell(STATUS._replace(trouble="", access=direct), None)
    assert value("disabled_ranks", "shared_dir") == 0
    assert value("queued_bytes", "load", "shared_dir") == 2, "the second rank stands as it did"
    assert value("tier_info", "shared_dir", "posix", "host") == 0
    assert value("tier_info", "shared_dir", "posix", "direct") == 2


def test_a_rank_of_another_config_costs_metrics_not_the_engine(
    keep: Keep, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = keep(Rig(config_of(memory_tier(8))))
    for _ in range(2):
        rig.manager.metrics.worked(Work(Tally({Act("load", 7): 4096})))
    monkeypatch.setattr(rig.manager.catalog, "tiers", None)
    assert rig.manager.get_stats() is None
    assert caplog.text.count("do all ranks run the same config and version?") == 1


OURS, THEIRS = "NixlOffloadConnector", "OffloadingConnector"


@pytest.mark.parametrize("order", [[OURS, THEIRS], [THEIRS, OURS]])
def test_metrics_beside_the_connector_that_ours_descends_from(order: list[str], tmp_path: Path) -> None:
    """No start ends for names that both have, which count the other's alone; those of ours are ours."""
    register()
    transfer: Any = several(*({"kv_connector": name} for name in order))
    arguments = EngineArgs(
        model=str(write_model(tmp_path / "model", TINY)),
        kv_transfer_config=transfer,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=512,
    )
    registry = CollectorRegistry()
    types: Any = {kind: functools.partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    metrics = MultiConnector.build_prom_metrics(arguments.create_engine_config(), types, ["engine"], {0: ["0"]})
    for name, size_bytes in ((OURS, 100), (THEIRS, 7)):
        stats = OffloadingConnectorStats()
        stats.increase_counter("vllm:kv_offload_load_bytes", size_bytes)
        if name == OURS:
            stats.set_gauge(PREFIX + "capacity_bytes", 5, ("slab",))
        metrics.observe({name: stats.data})
    assert registry.get_sample_value("vllm:kv_offload_load_bytes_total", {"engine": "0"}) == 7
    assert registry.get_sample_value(PREFIX + "capacity_bytes", {"engine": "0", "tier": "slab"}) == 5
