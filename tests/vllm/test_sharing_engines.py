"""Which data-parallel engines divide a machine's memory and drive, by vLLM's own configuration of them: never fewer
than are there, else together they take more than a capacity.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import ParallelConfig

from nixl_offload.vllm.serving_tiers import sharing_engines


def engine(rank: int, local_rank: int, *, is_dense: bool = False, **fields: Any) -> ParallelConfig:
    """Return what ``EngineCoreProc.run_engine_core`` leaves in an engine's process of such a server."""
    parallel = ParallelConfig(**fields)
    parallel.data_parallel_index = rank
    parallel.data_parallel_rank_local = local_rank
    if is_dense:
        parallel.reconfigure_for_independent_dp_rank()
    else:
        parallel.data_parallel_rank = rank
    return parallel


@pytest.mark.parametrize("is_dense", [False, True])
def test_all_engines_on_one_machine(is_dense: bool) -> None:
    """Also where vLLM tells each of them that it is alone."""
    fields = {"data_parallel_size": 4, "data_parallel_size_local": 4}
    assert sharing_engines(engine(2, 2, is_dense=is_dense, **fields)) == range(4)


@pytest.mark.parametrize("load_balancing", [{}, {"data_parallel_hybrid_lb": True}])
def test_of_two_machines_each_divides_its_own(load_balancing: dict[str, bool]) -> None:
    fields = {"data_parallel_size": 16, "data_parallel_size_local": 8, **load_balancing}
    assert sharing_engines(engine(3, 3, **fields)) == range(8)
    assert sharing_engines(engine(11, 3, data_parallel_rank=8, **fields)) == range(8, 16)


def test_dense_engines_of_two_machines_take_less_than_they_might() -> None:
    """How many of them are on a machine is not to be found there."""
    fields = {"data_parallel_size": 16, "data_parallel_size_local": 8}
    assert sharing_engines(engine(11, 3, is_dense=True, data_parallel_rank=8, **fields)) == range(16)


def test_engines_that_were_started_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each believes that it is the only one on its machine: behind another load balancer, offline, by Ray."""
    fields = {"data_parallel_size": 4, "data_parallel_size_local": 1, "data_parallel_rank": 2}
    assert sharing_engines(engine(2, 0, data_parallel_external_lb=True, **fields)) == range(4)
    by_ray = engine(2, 0, **fields)
    by_ray.data_parallel_backend = "ray"
    assert sharing_engines(by_ray) == range(4)
    monkeypatch.setenv("VLLM_DP_SIZE", "4")
    monkeypatch.setenv("VLLM_DP_RANK", "2")
    assert sharing_engines(engine(2, 0)) == range(4)


def test_elastic_engines_are_those_that_there_are_now() -> None:
    parallel = engine(0, 0)
    parallel.enable_elastic_ep, parallel.elastic_ep_max_dp_size = True, 8
    assert sharing_engines(parallel) == range(1)
