"""The scheduler's half of a file tier over a real directory: what outlives a reset, a restart and a lost directory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from nixl_offload.config import SlabConfig, parse_config
from nixl_offload.identity.namespace import GroupFields, NamespaceFields, make_namespace
from nixl_offload.index import State
from nixl_offload.tiers.slab.directory import TierDirectory
from nixl_offload.tiers.slab.tier import HEAL_EVERY_S, SlabTier
from nixl_offload.types import Key, Location

SLOT = 64 << 10
WAIT_S = 20.0
OpenTier = Callable[[], SlabTier]


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[OpenTier]:
    """Return a function that opens a tier on the same directory each time; closes what it opened."""
    plain: dict[str, Any] = {"str": "x", "str | None": None, "int": 1, "tuple[int, ...]": (SLOT,)}
    group = GroupFields(**{field.name: plain[str(field.type)] for field in fields(GroupFields)})
    plain["tuple[GroupFields, ...]"] = (group,)
    plain |= {"tuple[str, ...]": ("x",), "Mapping[str, Setting]": {}}
    values = {field.name: plain[str(field.type)] for field in fields(NamespaceFields)}
    namespace = make_namespace(NamespaceFields(**values))
    tier = {"kind": "slab", "path": str(tmp_path / "kv"), "capacity": "128MiB"}
    (config,) = parse_config({"tiers": [tier]}).tiers
    assert isinstance(config, SlabConfig)
    opened: list[SlabTier] = []

    def build() -> SlabTier:
        opened.append(SlabTier.open(config, position=0, namespace=namespace, slot_classes=[SLOT], world_size=1))
        return opened[-1]

    yield build
    for item in opened:
        item.close()
    assert [t.name for t in threading.enumerate() if t.name.startswith("nixl-offload")] == []


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big") + bytes(4))


def store(tier: SlabTier, number: int) -> Location:
    location = tier.reserve(key(number), SLOT, [])
    assert location is not None
    tier.commit(key(number))
    return location


def test_a_restart_finds_what_was_stored_and_a_reset_forgets_all_of_it(open_tier: OpenTier) -> None:
    """What was being read or written during the reset is not found after the restart either; what came later is."""
    tier = open_tier()
    places = [store(tier, number) for number in range(4)]
    tier.close()
    tier = open_tier()
    assert [tier.pin(key(number)) for number in range(4)] == places
    tier.unpin(key(0))
    tier.reserve(key(8), SLOT, [])
    tier.clear()
    assert tier.state(key(1)) is State.EVICTING
    after = store(tier, 9)
    assert after == places[0], "the one slot that nobody held is free at once, the held ones are not"
    for number in (1, 2, 3):
        tier.unpin(key(number))
    assert not tier.commit(key(8))
    assert len(tier) == 1
    tier.close()
    tier = open_tier()
    assert len(tier) == 1
    assert tier.state(key(9)) is State.READY


def test_what_was_being_written_at_shutdown_is_found_again(open_tier: OpenTier) -> None:
    """The ranks may have finished it; not what was given up meanwhile, nor what nobody knows of."""
    tier = open_tier()
    kept = tier.reserve(key(1), SLOT, [])
    tier.reserve(key(2), SLOT, [])
    tier.abort(key(2))
    tier.reserve(key(3), SLOT, [])
    tier.retire(key(3))
    tier.close([key(number) for number in range(1, 5)])
    tier.close([key(1)])
    tier = open_tier()
    assert [tier.state(key(number)) for number in range(1, 5)] == [State.READY, None, None, None]
    assert tier.pin(key(1)) == kept
    tier.unpin(key(1))
    tier.reserve(key(5), SLOT, [])
    tier.clear()
    tier.close([key(5)])
    assert len(open_tier()) == 0, "a reset counts for what is being written, too"


def test_a_retired_place_is_not_used_until_the_restart(open_tier: OpenTier) -> None:
    """The index that is durable never names it; the next engine may use it, for nothing of this one writes any more."""
    tier = open_tier()
    spoilt = tier.reserve(key(1), SLOT, [])
    tier.retire(key(1))
    assert tier.state(key(1)) is None
    after = store(tier, 1)
    assert after != spoilt
    tier.clear()
    assert store(tier, 2) != spoilt
    tier.close()
    tier = open_tier()
    assert tier.state(key(2)) is State.READY
    tier.clear()
    assert store(tier, 3) == spoilt


def test_a_directory_taken_by_another_engine_is_left_alone(open_tier: OpenTier, tmp_path: Path) -> None:
    """Nothing is stored there any more, nor written to the index, which is the other's; what is known is served."""
    tier = open_tier()
    store(tier, 1)
    (tmp_path / "kv").rename(tmp_path / "gone")
    other = open_tier()
    tier.heal(100.0)
    assert tier._healer is not None
    tier._healer.join(WAIT_S)
    assert tier.reserve(key(2), SLOT, []) is None
    assert tier.state(key(1)) is State.READY
    store(other, 3)
    other.close()
    tier.clear()
    tier.close()
    again = open_tier()
    assert [again.state(key(number)) for number in (1, 2, 3)] == [None, None, State.READY]


def test_a_directory_that_hangs_costs_one_thread(open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one look at it has not returned there is no second, and closing does not wait for it for ever."""
    tier = open_tier()
    entered, go_on = threading.Semaphore(0), threading.Event()

    def hang(self: TierDirectory) -> None:
        entered.release()
        go_on.wait(WAIT_S)

    monkeypatch.setattr(TierDirectory, "restore", hang)
    for attempt in range(1, 4):
        tier.heal(attempt * 2 * HEAL_EVERY_S)
    assert entered.acquire(timeout=WAIT_S)
    tier.close(timeout_s=0.01)
    assert not entered.acquire(blocking=False)
    go_on.set()
    assert tier._healer is not None
    tier._healer.join(WAIT_S)
