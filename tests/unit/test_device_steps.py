"""Proves, with threads in the part of a device, what a step of the model costs loads and stores, and what they cost it:
a load ends while the step runs that it came with, but never before an earlier one; a store without a slot holds up
nobody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nixl_offload.engine.jobs import FENCE_POLL_S
from nixl_offload.engine.streams import READY, Fence
from nixl_offload.engine.waiting import STORE_GRACE_S
from nixl_offload.movers.base import Op
from nixl_offload.types import Outcome
from tests.contract.suites.faulty_mover import Fault, FaultKind
from tests.unit.device_lab import Lab, faulty, open_lab
from tests.unit.kv_shapes import Way, until

OK, DROPPED = Outcome.OK, Outcome.DROPPED
WAYS: tuple[Way, ...] = ("direct", "device", "host")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with open_lab(tmp_path) as lab:
        yield lab


@pytest.mark.parametrize("way", WAYS)
def test_a_load_ends_while_the_step_runs_that_it_came_with(lab: Lab, way: Way) -> None:
    """VLLM submits it behind the launch of the forward pass; its fence is from before."""
    rig = lab.make(None, "lbhnc", way)
    rig.write([0, 1, 2, 3])
    wanted = rig.rows([0, 1, 2, 3])
    assert rig.store(1, [rig.chunk(0, [0, 1, 2, 3])]) == (OK,)
    fence = rig.engine.compute_fence()
    with lab.streams.compute.held():
        rig.write([8, 9])  # what the step writes
        rig.engine.submit_load(2, [rig.chunk(0, [4, 5, 6, 7])], fence=fence)
        assert rig.collect(2).outcomes == (OK,)
    rig.expect([4, 5, 6, 7], wanted)
    rig.assert_as_expected()


@pytest.mark.parametrize("way", WAYS)
def test_a_load_waits_for_the_step_before_the_one_that_it_came_with(lab: Lab, way: Way) -> None:
    """That step still writes to the blocks, for the request that had them. Overtaken, it would write over the load."""
    rig = lab.make(None, "lbhnc", way)
    rig.write([0, 1, 2, 3])
    wanted = rig.rows([0, 1, 2, 3])
    assert rig.store(1, [rig.chunk(0, [0, 1, 2, 3])]) == (OK,)
    with lab.streams.compute.held():
        rig.write([4, 5, 6, 7])
        fence = rig.engine.compute_fence()
        rig.write([8, 9])
        rig.engine.submit_load(2, [rig.chunk(0, [4, 5, 6, 7])], fence=fence)
        time.sleep(0.1)
        assert rig.engine.finished() == []
    assert rig.collect(2).outcomes == (OK,)
    rig.expect([4, 5, 6, 7], wanted)
    rig.assert_as_expected()


class Asked:
    """An engine's clock: it goes on by what its caller asks to wait for."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return 1000.0 + self.ahead_s


class CountedCondition:
    """A table's condition: waits are short, and count for as long as they were asked for, unless there is progress."""

    def __init__(self, real: threading.Condition, clock: Asked) -> None:
        self._real, self._clock = real, clock
        self.fence: Fence = READY
        self.waits = 0
        self.held_s = 0.0
        """Asked for when ``fence`` was done."""

    def wait(self, timeout: float) -> None:
        is_over = self.fence.done()
        if not self._real.wait(min(timeout, 0.001)):
            self.waits += 1
            self._clock.ahead_s += timeout
            self.held_s += timeout if is_over else 0.0

    def wait_for(self, predicate: Callable[[], bool], timeout: float = 1e9) -> bool:
        ends_s = self._clock() + timeout
        while not predicate():
            if self._clock() >= ends_s:
                return False
            self.wait(0.001)
        return True

    def notify_all(self) -> None:
        self._real.notify_all()


@pytest.mark.parametrize("way", ["device", "host"])
def test_stores_without_a_slot_hold_no_step_up(lab: Lab, way: Way) -> None:
    """Storage is slow, and staging full. Blocks are needed back in each of ten steps: the next one is held up for what
    is left of it, and then for 5 ms at most, by the waits that were asked for. It was in grains of 20 ms.
    """
    clock = Asked()
    mover = faulty(Fault(0, FaultKind.STUCK, op=Op.WRITE, every=True))
    rig = lab.make(mover, "lbhnc", way, staging_slots=2, clock=clock)
    table = rig.engine.jobs
    counted = CountedCondition(table._progress, clock)
    table._progress = counted  # type: ignore[assignment]
    rig.engine.submit_store(1, [rig.chunk(n, [4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3]) for n in range(2)])
    until(lambda: mover.submitted.count(Op.WRITE) == 1)
    for job in range(2, 12):
        with lab.streams.compute.held():
            rig.write([0, 1, 2, 3])
            rig.engine.submit_store(job, [rig.chunk(n, [0, 1, 2, 3]) for n in range(8, 12)])
            counted.fence, counted.held_s, counted.waits = table._jobs[job].fence, 0.0, 0
            waiter = threading.Thread(target=rig.engine.wait, args=([job],))
            waiter.start()
            until(lambda: counted.waits > 3)
            assert waiter.is_alive()
        waiter.join(20)
        assert not waiter.is_alive()
        assert STORE_GRACE_S - 1e-9 <= counted.held_s <= STORE_GRACE_S + FENCE_POLL_S + 1e-9
        assert rig.collect(job).outcomes == (DROPPED,) * 4
    assert mover.submitted.count(Op.WRITE) == 1
    mover.release()
    rig.collect(1)
