"""The tiers of a rank over openings that are given up, and a sleep that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nixl_offload.engine import TierEngine
from nixl_offload.engine.memory_engine import MemoryEngine
from nixl_offload.errors import TierError
from nixl_offload.vllm import rank_tiers
from nixl_offload.vllm.rank_tiers import RankTiers
from tests.unit.chain_rig import FILE, MEMORY, ChainRig
from tests.unit.engine_rig import NAMESPACE, until


def _memory_engine(rig: ChainRig) -> MemoryEngine:
    return MemoryEngine(
        table=rig.chain, tensors=rig.tensors, layout=rig.layout, host=rig.host, rank_namespace=NAMESPACE
    )


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChainRig]:
    """Nothing is open there, and what does not end is waited for only shortly, until ``monkeypatch.undo``."""
    monkeypatch.setattr(rank_tiers, "CLOSE_S", 0.05)
    rig = ChainRig.make(tmp_path, present=(False, False))
    rig.chain.part()[MEMORY].close(0.0)
    yield rig
    rig.close()


def _tiers(rig: ChainRig, open_tier: Callable[[int, object], TierEngine], *positions: int) -> RankTiers:
    """Begin to open tiers at ``positions``."""
    tiers = RankTiers(rig.chain, open_tier=open_tier, joined=lambda at, _, engine: None, name_of=str)
    tiers.open(dict.fromkeys(positions, object()), 0)  # type: ignore[arg-type]
    return tiers


def _is_open(rig: ChainRig, tiers: RankTiers, *positions: int) -> bool:
    tiers.take_opened()
    return rig.chain.open_tiers == frozenset(positions)


def test_a_sleep_that_fails_leaves_open_what_is_open(rig: ChainRig) -> None:
    """One tier hangs while it opens, so the rank cannot sleep; the other serves on, and the first is tried again."""
    answers = threading.Event()
    opened: list[int] = []

    def open_tier(position: int, place: object) -> TierEngine:
        if position == FILE:
            answers.wait(20)
        opened.append(position)
        return _memory_engine(rig)

    tiers = _tiers(rig, open_tier, MEMORY, FILE)
    until(lambda: _is_open(rig, tiers, MEMORY))
    with pytest.raises(TierError, match="cannot sleep"):
        tiers.sleep(1.0)
    assert _is_open(rig, tiers, MEMORY)
    answers.set()
    until(lambda: _is_open(rig, tiers, MEMORY, FILE))
    until(lambda: opened == [MEMORY, FILE, FILE])
    assert tiers.close()


def test_no_sleep_while_an_opening_that_was_replaced_has_not_ended(
    rig: ChainRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still register the KV memory that is to go away."""
    answers = threading.Event()

    def open_tier(position: int, place: object) -> TierEngine:
        answers.wait(20)
        return _memory_engine(rig)

    before = set(threading.enumerate())
    tiers = _tiers(rig, open_tier, MEMORY)
    tiers.open({}, 1)
    with pytest.raises(TierError, match="cannot sleep"):
        tiers.sleep(1.0)
    answers.set()
    monkeypatch.undo()
    tiers.sleep(10.0)
    assert not set(threading.enumerate()) - before
    assert tiers.close()


def test_no_sleep_while_an_engine_that_nothing_replaces_is_being_closed(
    rig: ChainRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still has registrations of the KV memory that is to go away."""
    may_close, engine = threading.Event(), _memory_engine(rig)
    close = engine.close

    def close_slowly(deadline_s: float) -> bool:
        may_close.wait(20)
        return close(deadline_s)

    monkeypatch.setattr(engine, "close", close_slowly)
    tiers = _tiers(rig, lambda *_: engine, MEMORY)
    until(lambda: _is_open(rig, tiers, MEMORY))
    tiers.open({}, 1)
    with pytest.raises(TierError, match="cannot sleep"):
        tiers.sleep(1.0)
    may_close.set()
    monkeypatch.undo()
    tiers.sleep(10.0)
    assert tiers.close()
