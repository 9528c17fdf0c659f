"""The scheduler's half over a chain of tiers. A request loads only from where it may; a shutdown leaves hints only of
what may really be in files and can be verified.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from nixl_offload.catalog.catalog import NOWHERE
from nixl_offload.engine import TierStatus
from nixl_offload.hardware.machine import Mount
from nixl_offload.tiers import ownership
from nixl_offload.types import Outcome
from nixl_offload.vllm.messages import RankStatus
from tests.vllm.manager_rig import Rig, config_of, key, memory_tier, request, slab_tier, three_tiers, tree_tier

MEMORY, SLAB, TREE = 0, 1, 2
HIT, MISS = LookupResult.HIT, LookupResult.MISS
Keep = Callable[[Rig], Rig]


@pytest.fixture(autouse=True)
def on_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory stands for one that other machines have, too."""
    monkeypatch.setattr(ownership, "find_mount", lambda path, root: Mount("/", "nfs4", "server:/", (), "0:50"))


def tiers_of(spec: Any) -> list[int]:
    return [location.tier for location in spec.locations]


# Events.


def test_a_directory_on_a_drive_of_this_machine_is_local(
    tmp_path: Path, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several of its engines share it, and no other machine can."""
    monkeypatch.setattr(ownership, "find_mount", lambda path, root: Mount("/", "ext4", "/dev/nvme0n1", (), "259:0"))
    rig = keep(Rig(config_of(tree_tier(tmp_path))))
    rig.store(1)
    assert rig.events() == [("STORAGE", "LOCAL", False, [1])]
    assert rig.manager.get_load_source(key(1), request()) is CacheHitSource.DISK
    assert rig.manager.lookup(key(1), request("may", [{"locality": "LOCAL"}])) is HIT
    assert rig.manager.lookup(key(1), request("may not", [{"locality": "REMOTE"}])) is MISS


def test_no_events_where_nobody_listens(tmp_path: Path, keep: Keep) -> None:
    """They are drained only when events are on, and must not pile up."""
    rig = keep(Rig(three_tiers(tmp_path), events=False))
    rig.store(1, 2)
    rig.write_through()
    assert rig.events() == []


# Which tier serves.


@pytest.mark.parametrize(
    ("load_tiers", "tier"),
    [
        (None, MEMORY),
        ([{"medium": "CPU"}], MEMORY),
        ([{"medium": "STORAGE"}], SLAB),
        ([{"locality": "REMOTE"}, {"medium": "STORAGE"}], SLAB),
        ([{"medium": "STORAGE", "locality": "REMOTE"}], TREE),
        ([], None),
        ([{"medium": "TAPE"}], MEMORY),
    ],
)
def test_a_request_loads_from_where_it_may(load_tiers: Any, tier: int | None, tmp_path: Path, keep: Keep) -> None:
    """``kv_load_tiers`` as vLLM reads it: an empty list is none, words that it does not know are no filter."""
    rig = keep(Rig(three_tiers(tmp_path)))
    rig.store(1)
    rig.write_through()
    context = request(load_tiers=load_tiers)
    assert rig.manager.lookup(key(1), context) is (MISS if tier is None else HIT)
    spec = rig.load(1, context=context)
    assert spec.locations == (NOWHERE,) if tier is None else tiers_of(spec) == [tier]


# Shutdown.


@pytest.mark.parametrize(("verify", "answer"), [("checksum", HIT), ("always", HIT), ("header", MISS)])
def test_a_shutdown_leaves_hints_of_what_can_be_verified(
    verify: str, answer: LookupResult, tmp_path: Path, keep: Keep
) -> None:
    """A chunk on its way to files when the engine ends may be there whole; only its checksums can tell."""
    config = config_of(memory_tier(), slab_tier(tmp_path), verify=verify)
    rig = keep(Rig(config))
    rig.store(1)
    rig.write_through()
    rig.store(2)
    assert len(rig.moves()) == 1
    rig.store(3)
    assert tiers_of(rig.offer(4)) == [MEMORY]
    rig.close()
    after = keep(Rig(config))
    assert after.manager.lookup(key(1), request()) is HIT
    assert after.manager.lookup(key(2), request()) is answer
    assert after.manager.lookup(key(3), request()) is MISS, "its move had not begun"
    assert after.manager.lookup(key(4), request()) is MISS, "it was on its way to memory"
    if answer is HIT:
        spec = after.load(2)
        assert after.report(spec.ticket, {0: Outcome.CORRUPT}) == {key(2)}
        after.report(spec.promotion_ticket, {0: Outcome.CORRUPT})
        assert after.manager.lookup(key(2), request()) is MISS


def test_a_store_straight_to_files_is_hinted_too(tmp_path: Path, keep: Keep) -> None:
    """Without memory before it, what is in flight to a slab is a store."""
    config = config_of(slab_tier(tmp_path))
    rig = keep(Rig(config))
    failed = rig.offer(1)
    rig.report(failed.ticket, {0: Outcome.FAILED})
    rig.offer(2)
    rig.close()
    after = keep(Rig(config))
    assert after.manager.lookup(key(1), request()) is MISS
    assert after.manager.lookup(key(2), request()) is HIT


def test_stores_go_to_the_next_tier_while_any_rank_has_disabled_the_first(tmp_path: Path, keep: Keep) -> None:
    rig = keep(Rig(config_of(slab_tier(tmp_path / "slab"), tree_tier(tmp_path / "tree")), world_size=2))

    def tell(rank: int, status: TierStatus) -> None:
        rig.manager.take_ranks({rank: RankStatus(frozenset({0, 1}), tiers=(status, TierStatus()))})

    stored = []
    well, full = TierStatus(trouble="io", loads_fail=True), TierStatus(trouble="full", stores_fail=True)
    for number, (rank, status) in enumerate([(0, well), (0, full), (1, full), (0, well), (1, well)]):
        tell(rank, status)
        stored += tiers_of(rig.offer(number))
    assert stored == [0, 1, 1, 1, 0]
    for loads_fail in (True, False):
        status = TierStatus(loads_fail=loads_fail)
        rig.manager.take_ranks({1: RankStatus(frozenset({0, 1}), tiers=(TierStatus(), status))})
        assert rig.manager.catalog.tiers[1].in_use is not loads_fail
