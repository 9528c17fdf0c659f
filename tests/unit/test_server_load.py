"""How many requests a prefill would delay: those that wait for the GPU, and those of the last step."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from nixl_offload.vllm.server_load import ServerLoad, ServerLoadCounter


def test_requests_wait_from_their_arrival_until_they_are_allocated_or_finished() -> None:
    load = ServerLoadCounter()
    for name in "abc":
        load.arrived(name)
    assert load.beside("a") == ServerLoad(2, 0)
    load.allocated("a")
    assert load.beside("a") == ServerLoad(2, 0)
    load.allocated("b")
    load.allocated("b")
    assert load.beside("c") == ServerLoad(0, 0)
    assert load.beside("d") == ServerLoad(1, 0), "one that is asked about again after it was preempted"


def test_those_of_the_last_step_run() -> None:
    load = ServerLoadCounter()
    load.running = 3
    assert load.beside("a").running == 3
    load.running = 0
    assert load.beside("a").running == 0
