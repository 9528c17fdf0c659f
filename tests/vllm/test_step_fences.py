"""Proves that a rank's half, called in the order of vLLM's model runner, lets loads wait for all earlier steps, but not
for their own. The KV cache plays device memory, and the test holds up the model's stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from nixl_offload.engine.records import Act
from nixl_offload.vllm import rank_tiers, worker
from nixl_offload.vllm.connector import NixlOffloadConnector
from nixl_offload.vllm.messages import StepMetadata
from nixl_offload.vllm.worker import NixlConnectorWorker
from tests.unit.device_rig import LIMIT_S, ThreadedDevice
from tests.vllm import manager_rig
from tests.vllm.test_rank_worker import Rig


class Runner:
    """Plays vLLM's model runner: puts one step after another on the model's stream."""

    def __init__(self, rig: Rig, device: ThreadedDevice) -> None:
        self.rig, self._device = rig, device
        spec = SimpleNamespace(
            replicated_layout=False, config=SimpleNamespace(canonical_layout=False, parallel=None, groups=(None,))
        )
        self.connector: Any = object.__new__(NixlOffloadConnector)
        self.connector.connector_worker = self.rank = NixlConnectorWorker(spec, None, manager_rig.kv_cache_config())  # type: ignore[arg-type]
        self.rank.worker = rig.worker
        self.received: set[str] = set()
        self._gates: list[threading.Event] = []

    def step(self, forward: Callable[[], None], loads: dict[int, list[int]] | None = None) -> threading.Event:
        """Do a step that loads the chunk in slot 0 to blocks, by job. The forward pass waits for the returned event."""
        blocks = {job: GPULoadStoreSpec(ids, group_sizes=[4], block_indices=[0]) for job, ids in (loads or {}).items()}
        jobs = {job: TransferJob(f"request {job}", self.rig.to_load(0), spec) for job, spec in blocks.items()}
        metadata = StepMetadata(jobs, {}, set(), [])
        gate = threading.Event()
        self._gates.append(gate)

        def held() -> None:
            assert gate.wait(LIMIT_S)
            forward()

        self.connector.handle_preemptions(metadata)
        self.connector.bind_connector_metadata(metadata)
        self._device.compute.run(held)
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        self.look()
        return gate

    def look(self) -> None:
        self.received |= self.rank.take_results().finished_recving

    def wait_for(self, request: str, seconds: float = LIMIT_S) -> bool:
        """Whether its load is finished by then."""
        until_s = time.monotonic() + seconds
        while request not in self.received and time.monotonic() < until_s:
            time.sleep(0.001)
            self.look()
        return request in self.received

    def close(self) -> None:
        for gate in self._gates:
            gate.set()
        self.rig.worker.shutdown()


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """The chunk in slot 0 holds blocks 0 to 3."""
    with ThreadedDevice() as device:
        for module in (worker, rank_tiers):
            monkeypatch.setattr(module, "device_of", lambda _: device)
        rig = Rig(tmp_path)
        for block in range(4):
            rig.fill(block, 1)
        rig.store([0, 1, 2, 3], 0)
        runner = Runner(rig, device)
        yield runner
        runner.close()


def nothing() -> None:
    """A forward pass that touches no block of a load."""


def test_a_load_does_not_wait_for_its_own_step(runner: Runner) -> None:
    forward = runner.step(nothing, {7: [8, 9, 10, 11]})
    assert runner.wait_for("request 7"), "fenced behind the forward pass of its step"
    assert not forward.is_set()
    assert runner.rig.block(8) == runner.rig.block(0)


def test_a_load_waits_for_every_earlier_step(runner: Runner) -> None:
    """An earlier step has a load of its own, and writes late to what is loaded now: its fence would be too early."""
    first = runner.step(lambda: runner.rig.fill(20, 9), {7: [8, 9, 10, 11]})
    assert runner.wait_for("request 7")
    second = runner.step(nothing, {8: [20, 21, 22, 23]})
    assert not runner.wait_for("request 8", 0.1)
    first.set()
    assert runner.wait_for("request 8")
    assert not second.is_set()
    assert runner.rig.block(20) == runner.rig.block(0), "written over by an earlier step"
    report = runner.rank.build_connector_worker_meta()
    assert report.work is not None
    assert report.work.payload_bytes[Act("load", 0)] == 2 * 4 * len(runner.rig.block(0)), "all looks since the last"
