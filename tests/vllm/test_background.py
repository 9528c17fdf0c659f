"""Opening in the background: what a library that fails again and again must not do."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import pytest

from nixl_offload.errors import MoverError, TierError
from nixl_offload.vllm import background
from nixl_offload.vllm.background import BackgroundOpening

DEADLINE_S = 20.0

Log = pytest.LogCaptureFixture


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(background, "LONGEST_PAUSE_S", 0.05)


def opening_of(make: Callable[[], str]) -> BackgroundOpening[str]:
    return BackgroundOpening(make, lambda _: None, what="A tier", thread_name="background-opening")


def close(opening: BackgroundOpening[str]) -> None:
    assert not background.join_all(opening.close(), DEADLINE_S)


def taken(opening: BackgroundOpening[str]) -> str:
    """Ask as the steps of an engine do, until it is open."""
    deadline = time.monotonic() + DEADLINE_S
    while (opened := opening.take()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return opened


class Staging:
    """Stands for gigabytes."""


def test_a_failed_trial_keeps_nothing_alive() -> None:
    """Not by the frames of its error, nor of the errors that led to it."""
    kept: list[weakref.ref[Staging]] = []

    def register() -> None:
        staging = Staging()
        kept.append(weakref.ref(staging))
        raise RuntimeError("a library refuses")

    def make() -> str:
        staging = Staging()
        kept.append(weakref.ref(staging))
        try:
            register()
        except RuntimeError as error:
            try:
                register()
            except RuntimeError:
                raise MoverError("cannot be registered") from error
        return "open"

    opening = opening_of(make)
    assert opening.wait(DEADLINE_S)
    close(opening)
    assert isinstance(opening.error, TierError)
    assert str(opening.error) == "cannot be registered"
    assert kept
    assert [staging() for staging in kept] == [None] * len(kept)


def test_each_kind_of_unexpected_error_is_traced_once(caplog: Log) -> None:
    errors = [RuntimeError("one"), ValueError("two"), RuntimeError("one again"), MoverError("ours"), ValueError("3")]

    def make() -> str:
        if errors:
            raise errors.pop(0)
        return "open"

    opening = opening_of(make)
    assert taken(opening) == "open"
    close(opening)
    traced = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert [str(error) for error in traced] == ["one", "two"]
