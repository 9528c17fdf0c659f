"""Opening tiers in the background: libraries that fail again and again, openings that are given up, and a sleep that
fails.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_offload.engine import MemoryPaths, TierEngine, TierSetup
from nixl_offload.errors import MoverError, TierError
from nixl_offload.vllm import background, rank_tiers
from nixl_offload.vllm.background import BackgroundOpening
from nixl_offload.vllm.rank_tiers import RankTiers
from tests.unit.chain_rig import FILE, MEMORY, ChainRig
from tests.unit.engine_rig import own_shards, rank_memory, until

DEADLINE_S = 20.0


def opening_of(monkeypatch: pytest.MonkeyPatch, make: Callable[[], str]) -> BackgroundOpening[str]:
    monkeypatch.setattr(background, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(background, "LONGEST_PAUSE_S", 0.05)
    return BackgroundOpening(make, lambda _: None, what="A tier", thread_name="background-opening")


class Staging:
    """Stands for gigabytes."""


def test_a_failed_trial_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the frames of its error nor by those of the error's causes."""
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

    opening = opening_of(monkeypatch, make)
    assert opening.wait(DEADLINE_S)
    assert not background.join_all(opening.close(), DEADLINE_S)
    assert isinstance(opening.error, TierError)
    assert str(opening.error) == "cannot be registered"
    assert kept
    assert [staging() for staging in kept] == [None] * len(kept)


def test_each_kind_of_error_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Foreign errors with a trace. Trials follow until the tier is open, which is logged too."""
    caplog.set_level("INFO")
    errors = [RuntimeError("one"), ValueError("two"), RuntimeError("one again"), MoverError("ours"), ValueError("3")]

    def make() -> str:
        if errors:
            raise errors.pop(0)
        return "open"

    opening = opening_of(monkeypatch, make)
    until(lambda: opening.take() == "open")
    assert not background.join_all(opening.close(), DEADLINE_S)
    traced = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert [str(error) for error in traced] == ["one", "two"]
    assert caplog.text.count("one. Requests go on") == caplog.text.count("ours. Requests go on") == 1
    assert caplog.text.count("in use again") == 1


def _memory_engine(rig: ChainRig) -> TierEngine:
    memory = rank_memory(rig.tensors, rig.layout, host=rig.host)
    return TierEngine(MemoryPaths(TierSetup(rig.chain, memory, own_shards(rig.layout))))


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChainRig]:
    """A rank without open tiers. Its waits are short until ``monkeypatch.undo``."""
    monkeypatch.setattr(rank_tiers, "CLOSE_S", 0.05)
    rig = ChainRig(tmp_path, present=(False, False))
    rig.chain.detach_all()[MEMORY].close(0.0)
    yield rig
    rig.close()


def _tiers(
    rig: ChainRig, monkeypatch: pytest.MonkeyPatch, open_tier: Callable[[int], TierEngine], *positions: int
) -> RankTiers:
    """Begin to open tiers at ``positions`` with ``open_tier``."""
    monkeypatch.setattr(rank_tiers, "open_tier_engine", lambda config, position, *_: open_tier(position))
    named: Any = SimpleNamespace(tiers=[SimpleNamespace(kind="slab", where="/here")] * 2)
    tiers = RankTiers(rig.chain, named, SimpleNamespace(), 0, [None] * 2)  # type: ignore[arg-type]
    tiers.open(dict.fromkeys(positions, object()), 0)  # type: ignore[arg-type]
    return tiers


def _is_open(rig: ChainRig, tiers: RankTiers, *positions: int) -> bool:
    tiers.take_opened()
    return rig.chain.open_tiers == frozenset(positions)


def test_a_sleep_that_fails_leaves_open_what_is_open(rig: ChainRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tier hangs while it opens, so the rank cannot sleep; the other serves on, and the first is tried again."""
    answers = threading.Event()
    opened: list[int] = []

    def open_tier(position: int) -> TierEngine:
        if position == FILE:
            answers.wait(20)
        opened.append(position)
        return _memory_engine(rig)

    tiers = _tiers(rig, monkeypatch, open_tier, MEMORY, FILE)
    until(lambda: _is_open(rig, tiers, MEMORY))
    with pytest.raises(TierError, match="cannot sleep"):
        tiers.sleep(1.0)
    assert _is_open(rig, tiers, MEMORY)
    answers.set()
    until(lambda: _is_open(rig, tiers, MEMORY, FILE))
    until(lambda: opened == [MEMORY, FILE, FILE])
    assert tiers.close()


@pytest.mark.parametrize("hangs", ["opening", "closing"])
def test_no_sleep_while_what_was_replaced_has_not_ended(
    rig: ChainRig, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    """An opening may still register the KV memory that is to be freed, and a closing engine still uses it."""
    answers, engine = threading.Event(), _memory_engine(rig)
    close, before = engine.close, set(threading.enumerate())

    def open_tier(position: int) -> TierEngine:
        return engine if hangs == "closing" or answers.wait(20) else None  # type: ignore[return-value]

    monkeypatch.setattr(engine, "close", lambda deadline_s: answers.wait(20) and close(deadline_s))
    tiers = _tiers(rig, monkeypatch, open_tier, MEMORY)
    until(lambda: hangs == "opening" or _is_open(rig, tiers, MEMORY))
    tiers.open({}, 1)
    with pytest.raises(TierError, match="cannot sleep"):
        tiers.sleep(1.0)
    answers.set()
    monkeypatch.undo()
    tiers.sleep(10.0)
    assert not set(threading.enumerate()) - before
    assert tiers.close()
