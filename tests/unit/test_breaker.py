"""The breaker: opens after failures in a row, one trial at a time, closes when one succeeds, and never stays open."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from nixl_offload.tiers.breaker import Breaker, BreakerState

FAILED, SUCCEEDED = "failed", "succeeded"
OPENED: list[tuple[float, object]] = [(0.0, FAILED)] * 3


@pytest.mark.parametrize(
    ("options", "events", "is_closed"),
    [
        # Only failures in a row count.
        ({}, [(0, FAILED), (0, FAILED), (0, SUCCEEDED)] * 5, True),
        ({}, [*OPENED, (0.5, False)], False),
        # One trial at a time; its success closes.
        ({}, [*OPENED, (1, True), (1, False), (1.1, SUCCEEDED), (1.1, True)], True),
        # Stragglers neither close nor prolong.
        ({}, [*OPENED, (0.5, SUCCEEDED), (0.9, False), (0.9, FAILED), (1, True)], False),
        # A trial that reports nothing is lost: the next caller is let through.
        ({"trial_limit_s": 5.0}, [*OPENED, (1, True), (5.9, False), (6, True)], False),
        # Pauses double up to the longest,
        (
            {"longest_pause_s": 4.0},
            [
                *(*OPENED, (1, True), (1, FAILED), (2.9, False), (3, True), (3, FAILED)),
                *((6.9, False), (7, True), (7, FAILED), (10.9, False), (11, True)),
            ],
            False,
        ),
        # and start again from the first after a recovery.
        ({}, [*OPENED, (1, True), (1, FAILED), (3, True), (3, SUCCEEDED)] + [(90, FAILED)] * 3 + [(91, True)], False),
    ],
)
def test_what_is_let_through(
    options: dict[str, float], events: Sequence[tuple[float, object]], is_closed: bool
) -> None:
    """Events at their seconds: what is reported, or what ``allows`` says."""
    breaker = Breaker("tier", **options)  # type: ignore[arg-type]
    for now_s, event in events:
        if event == FAILED:
            breaker.failed("timeout", "no answer", now_s)
        elif event == SUCCEEDED:
            breaker.succeeded(now_s)
        else:
            assert breaker.allows(now_s) is event, now_s
    assert breaker.closed is is_closed
    assert (breaker.cause == "") is is_closed


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records]


def test_each_cause_of_an_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """However often it fails, the log holds a line per cause and one for the recovery."""
    caplog.set_level(logging.INFO)
    breaker = Breaker("Slab tier /kv", threshold=1, longest_pause_s=60.0)
    for second in range(200):
        if breaker.allows(second):
            breaker.failed("full" if second < 100 else "readonly", "no space", second)
    assert (levels(caplog), breaker.cause) == (["WARNING"] * 2, "readonly")
    assert "disabled (full): no space" in caplog.messages[0]
    assert breaker.allows(300)
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.succeeded(300)
    breaker.succeeded(301)
    assert levels(caplog) == ["WARNING", "WARNING", "INFO"]
    assert "in use again after 300 s" in caplog.text


def test_a_flapping_tier_does_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Failures that return soon keep the longer pause and are not logged; after a long calm all starts again."""
    caplog.set_level(logging.INFO)
    flaps: dict[str, Any] = {"threshold": 1, "longest_pause_s": 60.0, "flap_window_s": 60.0}
    breaker = Breaker("t", **flaps)
    for second in range(3600):
        if breaker.closed:
            breaker.failed("io", "x", second)
        elif breaker.allows(second):
            breaker.succeeded(second)
    assert levels(caplog) == ["WARNING", "INFO"]
    assert breaker.closed or breaker.allows(10_000.0)
    breaker.succeeded(10_000.0)
    breaker.failed("io", "x", 11_000.0)
    assert levels(caplog) == ["WARNING", "INFO", "WARNING"]
    assert not breaker.allows(11_000.9)
    assert breaker.allows(11_001.0)
