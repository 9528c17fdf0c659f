"""The breaker: opens after failures in a row, one trial at a time, closes when one succeeds, and never stays open."""

from __future__ import annotations

import logging

import pytest

from nixl_offload.tiers.breaker import Breaker, BreakerState


def _opened(**arguments: float) -> Breaker:
    breaker = Breaker("tier", **arguments)  # type: ignore[arg-type]
    for _ in range(3):
        breaker.failed("timeout", "no answer", 0.0)
    return breaker


def test_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker("tier")
    for _ in range(5):
        breaker.failed("timeout", "", 0.0)
        breaker.failed("timeout", "", 0.0)
        breaker.succeeded(0.0)
    assert breaker.closed
    breaker.failed("timeout", "", 0.0)
    breaker.failed("timeout", "", 0.0)
    assert breaker.allows(0.0)
    breaker.failed("server", "", 0.0)
    assert not breaker.closed
    assert breaker.cause == "server"
    assert not breaker.allows(0.5)
    assert breaker.openings == 1


def test_one_trial_and_its_success_closes() -> None:
    breaker = _opened()
    assert breaker.allows(1.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.allows(1.0), "one trial at a time"
    breaker.succeeded(1.1)
    assert breaker.closed
    assert breaker.cause == ""
    assert breaker.allows(1.1)


def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_recovery() -> None:
    breaker = _opened(longest_pause_s=8.0)
    now_s, pauses = 0.0, []
    for _ in range(6):
        began_s = now_s
        while not breaker.allows(now_s):
            now_s += 0.5
        pauses.append(now_s - began_s)
        breaker.failed("timeout", "", now_s)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    while not breaker.allows(now_s):
        now_s += 0.5
    breaker.succeeded(now_s)
    for _ in range(3):
        breaker.failed("timeout", "", now_s)
    assert not breaker.allows(now_s + 0.9)
    assert breaker.allows(now_s + 1.0)


def test_a_straggler_neither_closes_nor_prolongs() -> None:
    breaker = _opened()
    breaker.succeeded(0.5)
    assert not breaker.closed
    breaker.failed("timeout", "", 0.9)
    assert breaker.allows(1.0)


def test_a_trial_that_is_not_heard_of_is_lost_and_the_next_is_let_through() -> None:
    breaker = _opened(trial_limit_s=5.0)
    assert breaker.allows(1.0)
    assert not breaker.allows(5.9)
    assert breaker.allows(6.0)


def test_one_warning_when_it_opens_and_one_line_when_it_closes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    breaker = _opened()
    for now_s in (1.0, 3.0, 7.0):
        assert breaker.allows(now_s)
        breaker.failed("timeout", "", now_s)
    assert breaker.allows(15.0)
    breaker.succeeded(15.0)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "disabled (timeout): no answer" in caplog.text
    assert "in use again after 15 s" in caplog.text


def test_each_cause_of_an_outage_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """However often it fails, the log holds a line per cause and one for the recovery."""
    caplog.set_level(logging.INFO)
    breaker = Breaker("Slab tier /kv", threshold=1, longest_pause_s=60.0)
    for second in range(200):
        if breaker.allows(second):
            breaker.failed("full" if second < 100 else "readonly", "no space", second)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "no space" in caplog.messages[0]
    assert breaker.cause == "readonly"
    assert breaker.allows(300)
    breaker.succeeded(300)
    breaker.succeeded(301)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]
    assert breaker.closed


def test_a_flapping_tier_does_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Trouble that returns soon goes on with the grown pause, and in silence; after a long calm it begins anew."""
    caplog.set_level(logging.INFO)
    breaker = Breaker("t", threshold=1, longest_pause_s=60.0, flap_window_s=60.0)
    for second in range(3600):
        if breaker.closed:
            breaker.failed("io", "x", second)
        elif breaker.allows(second):
            breaker.succeeded(second)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    now_s = 10_000.0
    assert breaker.closed or breaker.allows(now_s)
    breaker.succeeded(now_s)
    breaker.failed("io", "x", now_s + 1000)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]
    assert not breaker.allows(now_s + 1000.9)
    assert breaker.allows(now_s + 1001)
