"""Health: one warning per cause, one line when it is over, and pauses that grow."""

from __future__ import annotations

import logging

import pytest

from nixl_offload.tiers.health import Health


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records]


def test_one_warning_per_cause_and_one_line_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """However often it fails, the log holds a line per cause and one for the recovery."""
    caplog.set_level(logging.INFO)
    health = Health("Slab tier /kv")
    for second in range(200):
        if health.may_try(second):
            health.failed("full" if second < 100 else "readonly", "no space", second)
    assert levels(caplog) == ["WARNING", "WARNING"]
    assert "no space" in caplog.messages[0]
    assert health.cause == "readonly"
    health.succeeded(200)
    health.succeeded(201)
    assert levels(caplog) == ["WARNING", "WARNING", "INFO"]
    assert health.cause is None
    assert health.may_try(201)


def test_pauses_double_up_to_the_longest() -> None:
    """Probes come at 1, 2, 4, 8, 8, 8 seconds' distance; failures of what was under way already change nothing."""
    health = Health("t", first_pause_s=1, longest_pause_s=8)
    health.failed("io", "x", 0.0)
    for straggler in (0.1, 0.5, 0.9):
        health.failed("io", "x", straggler)
    now, pauses = 0.0, []
    for _ in range(6):
        due = health.next_try_s
        assert not health.may_try(due - 0.001)
        assert health.may_try(due)
        pauses.append(due - now)
        now = due
        health.failed("io", "x", now)
    assert pauses == [1, 2, 4, 8, 8, 8]


def test_a_flapping_tier_does_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Trouble that returns soon goes on with the grown pause; after a long calm it begins anew."""
    health = Health("t", first_pause_s=1, longest_pause_s=60)
    for second in range(3600):
        if health.cause is None:
            health.failed("io", "x", second)
        elif health.may_try(second):
            health.succeeded(second)
    assert len(caplog.records) < 150
    now = 10_000.0
    health.succeeded(now)
    health.failed("io", "x", now + 1000)
    assert health.next_try_s == now + 1001
