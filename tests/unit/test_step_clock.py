"""The clock of prefill steps: which steps are told, with what time, whatever order schedule and end come in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from nixl_offload.vllm.step_clock import StepClock


class Rig:
    """A clock that is set by hand, and what it has told."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.told: list[tuple[int, int, float]] = []
        self.clock = StepClock(lambda tokens, context, seconds: self.told.append((tokens, context, seconds)), self.time)

    def time(self) -> float:
        return self.now_s

    def scheduled(self, *, new: dict[str, tuple[int, int]] | None = None, **cached: tuple[int, int]) -> None:
        """Schedule a step: request -> tokens before it, tokens in it; ``new``: of requests seen for the first time."""
        new = new or {}
        tokens = {name: each[1] for name, each in {**new, **cached}.items()}
        output: Any = SimpleNamespace(
            total_num_scheduled_tokens=sum(tokens.values()),
            num_scheduled_tokens=tokens,
            scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=new[name][0]) for name in new],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(cached), num_computed_tokens=[each[0] for each in cached.values()]
            ),
        )
        self.clock.scheduled(output)

    def ends(self, after_s: float) -> None:
        self.now_s += after_s
        self.clock.done()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_step_scheduled_ahead_lasts_from_the_end_of_the_one_before(rig: Rig) -> None:
    """Asynchronous scheduling: the second is scheduled while the first runs."""
    rig.scheduled(new={"a": (0, 512)})
    rig.now_s += 0.5
    rig.scheduled(a=(512, 512))
    rig.ends(1.5)
    rig.scheduled(a=(1024, 100))
    rig.ends(3.0)
    rig.ends(1.0)
    assert rig.told == [(512, 0, 2.0), (512, 512, 3.0), (100, 1024, 1.0)]


def test_steps_whose_ends_are_not_told_do_not_pile_up(rig: Rig) -> None:
    """After a while it begins anew, and what comes then is measured right."""
    for _ in range(1000):
        rig.scheduled(new={"a": (0, 512)})
        rig.now_s += 1.0
    for _ in range(20):
        rig.clock.done()
    rig.told.clear()
    rig.scheduled(new={"b": (0, 128)})
    rig.ends(3.0)
    assert rig.told == [(128, 0, 3.0)]


def test_prompt_tokens_cost_what_they_add_to_a_step(rig: Rig) -> None:
    """A step of 10 ms that takes 40 ms with a prompt of 300 tokens: those cost 30 ms."""
    for _ in range(3):
        rig.scheduled(a=(512, 1))
        rig.ends(0.010)
    rig.scheduled(a=(512, 1), b=(0, 300))
    rig.ends(0.040)
    assert rig.told == [(301, 1, pytest.approx(0.030))]


def test_prompt_tokens_cost_at_least_a_tenth_of_their_step(rig: Rig) -> None:
    """On a GPU a few tokens more may cost nothing."""
    rig.scheduled(a=(512, 1))
    rig.ends(0.010)
    rig.scheduled(a=(512, 100))
    rig.ends(0.010)
    assert rig.told == [(100, 512, pytest.approx(0.001))]
