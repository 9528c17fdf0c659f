"""Proves, with threads in the part of a device, what a step of the model costs loads and stores, and what they cost it:
a load ends while the step runs that it came with, but never before an earlier one; a store without a slot holds up
nobody.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nixl_offload.types import Outcome
from tests.unit.device_lab import Lab, open_lab
from tests.unit.kv_shapes import Way

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
