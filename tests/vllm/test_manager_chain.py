"""The scheduler's half over a chain of tiers. A request loads only from where it may; a shutdown leaves hints only of
what may really be in files and can be verified; load or recompute is decided once for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from nixl_offload.catalog import NOWHERE
from nixl_offload.catalog.estimate import WAIT_S
from nixl_offload.config import Config
from nixl_offload.engine import TierStatus
from nixl_offload.hardware.mounts import Mount
from nixl_offload.tiers import ownership
from nixl_offload.types import Key, Outcome
from nixl_offload.vllm.load_decision import Hit, LoadDecider
from nixl_offload.vllm.messages import LoadSample, RankStatus
from tests.vllm.manager_rig import (
    CHUNK_TOKENS,
    SLOT,
    Rig,
    config_of,
    key,
    keys,
    memory_tier,
    request,
    slab_tier,
    three_tiers,
    tree_tier,
)

MEMORY, SLAB, TREE = 0, 1, 2
HIT, MISS = LookupResult.HIT, LookupResult.MISS
Open = Callable[..., Rig]


@pytest.fixture
def open_rig() -> Iterator[Open]:
    """Makes managers; shuts them down afterwards."""
    made: list[Rig] = []

    def make(config: Config, world_size: int = 1, **options: Any) -> Rig:
        made.append(Rig(config, world_size, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture(autouse=True)
def on_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory stands for one that other machines have, too."""
    monkeypatch.setattr(ownership, "find_mount", lambda path, root: Mount("/", "nfs4", "server:/", (), "0:50"))


def tiers_of(spec: Any) -> list[int]:
    return [location.tier for location in spec.locations]


# Events.


def test_a_directory_on_a_drive_of_this_machine_is_local(
    tmp_path: Path, open_rig: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several of its engines share it, and no other machine can."""
    monkeypatch.setattr(ownership, "find_mount", lambda path, root: Mount("/", "ext4", "/dev/nvme0n1", (), "259:0"))
    rig = open_rig(config_of(tree_tier(tmp_path)))
    rig.store(1)
    assert rig.events() == [("STORAGE", "LOCAL", False, [1])]
    assert rig.manager.get_load_source(key(1), request()) is CacheHitSource.DISK
    assert rig.manager.lookup(key(1), request("may", [{"locality": "LOCAL"}])) is HIT
    assert rig.manager.lookup(key(1), request("may not", [{"locality": "REMOTE"}])) is MISS


def test_no_events_where_nobody_listens(tmp_path: Path, open_rig: Open) -> None:
    """They are drained only when events are on, and must not pile up."""
    rig = open_rig(three_tiers(tmp_path), events=False)
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
def test_a_request_loads_from_where_it_may(load_tiers: Any, tier: int | None, tmp_path: Path, open_rig: Open) -> None:
    """``kv_load_tiers`` as vLLM reads it: an empty list is none, words that it does not know are no filter."""
    rig = open_rig(three_tiers(tmp_path))
    rig.store(1)
    rig.write_through()
    context = request(load_tiers=load_tiers)
    assert rig.manager.lookup(key(1), context) is (MISS if tier is None else HIT)
    spec = rig.load(1, context=context)
    assert spec.locations == (NOWHERE,) if tier is None else tiers_of(spec) == [tier]


# Shutdown.


@pytest.mark.parametrize(("verify", "answer"), [("checksum", HIT), ("always", HIT), ("header", MISS)])
def test_a_shutdown_leaves_hints_of_what_can_be_verified(
    verify: str, answer: LookupResult, tmp_path: Path, open_rig: Open
) -> None:
    """A chunk on its way to files when the engine ends may be there whole; only its checksums can tell."""
    config = config_of(memory_tier(), slab_tier(tmp_path), verify=verify)
    rig = open_rig(config)
    rig.store(1)
    rig.write_through()
    rig.store(2)
    assert len(rig.moves()) == 1
    rig.store(3)
    assert tiers_of(rig.offer(4)) == [MEMORY]
    rig.close()
    after = open_rig(config)
    assert after.manager.lookup(key(1), request()) is HIT
    assert after.manager.lookup(key(2), request()) is answer
    assert after.manager.lookup(key(3), request()) is MISS, "its move had not begun"
    assert after.manager.lookup(key(4), request()) is MISS, "it was on its way to memory"
    if answer is HIT:
        spec = after.load(2)
        assert after.report(spec.ticket, {0: Outcome.CORRUPT}) == {key(2)}
        after.report(spec.promotion_ticket, {0: Outcome.CORRUPT})
        assert after.manager.lookup(key(2), request()) is MISS


def test_a_store_straight_to_files_is_hinted_too(tmp_path: Path, open_rig: Open) -> None:
    """Without memory before it, what is in flight to a slab is a store."""
    config = config_of(slab_tier(tmp_path))
    rig = open_rig(config)
    failed = rig.offer(1)
    rig.report(failed.ticket, {0: Outcome.FAILED})
    rig.offer(2)
    rig.close()
    after = open_rig(config)
    assert after.manager.lookup(key(1), request()) is MISS
    assert after.manager.lookup(key(2), request()) is HIT


# Load or recompute.


def decisions(rig: Rig) -> Mapping[tuple[int, str], int]:
    return rig.manager.decider.counts()


def on_disk(rig: Rig, *found: int) -> None:
    """Bring chunks to files, and out of memory."""
    rig.store(*found)
    rig.write_through()
    for number in found:
        spec = rig.load(number, context=request("loses", [{"medium": "CPU"}]))
        rig.report(spec.ticket, {0: Outcome.FAILED})


def test_a_slow_tier_is_skipped_and_the_decision_is_counted_once(tmp_path: Path, open_rig: Open) -> None:
    """It is asked in every step in which the request waits; the same words get the same answer, counted once."""
    rig = open_rig(config_of(memory_tier(), slab_tier(tmp_path)))
    on_disk(rig, 1, 2)
    rig.store(3)
    rig.observe_loads(SLAB, 10.0)
    rig.observe_prefill(0.01)
    context = request()
    ask = (keys(1, 2), context, 0, 2 * CHUNK_TOKENS)
    assert [rig.wanted(*ask) for _ in range(3)] == [0, 0, 0]
    assert decisions(rig) == {(SLAB, "skipped"): 1}
    assert rig.wanted(keys(3), request("memory"), 0, CHUNK_TOKENS) == CHUNK_TOKENS
    assert rig.wanted(keys(1), context, 0, CHUNK_TOKENS) == 0, "asked in other words"
    assert decisions(rig) == {(SLAB, "skipped"): 2, (MEMORY, "taken"): 1}


def test_stores_go_to_the_next_tier_while_any_rank_has_disabled_the_first(tmp_path: Path, open_rig: Open) -> None:
    rig = open_rig(config_of(slab_tier(tmp_path / "slab"), tree_tier(tmp_path / "tree")), world_size=2)

    def tell(rank: int, trouble: str) -> None:
        rig.manager.take_ranks({rank: RankStatus(frozenset({0, 1}), tiers=(TierStatus(trouble=trouble), TierStatus()))})

    stored = []
    for number, (rank, trouble) in enumerate([(0, ""), (0, "full"), (1, "full"), (0, ""), (1, "")]):
        tell(rank, trouble)
        stored += tiers_of(rig.offer(number))
    assert stored == [0, 1, 1, 1, 0]


class Decider:
    """Decides about hits of chunk 1 in memory, at times that a test says."""

    def __init__(self, rig: Rig) -> None:
        rig.store(1)
        self.now_s = 0.0
        self.load = LoadDecider(
            lambda *_: MEMORY,
            {0: SLOT / CHUNK_TOKENS},
            tiers=1,
            ranks=1,
            skips_slow=True,
            clock=lambda: self.now_s,
        )
        self._catalog = rig.manager.catalog

    def begin(self, asks: ReqContext) -> int:
        ticket = self._catalog.prepare_load([Key(key(1))], self.now_s)
        self.load.begin_load(ticket, asks)
        return ticket.ticket

    def wanted(self, asks: ReqContext, now_s: float) -> int | None:
        self.now_s = now_s
        return self.load.tokens_to_load(Hit(keys(1), 0, CHUNK_TOKENS, CHUNK_TOKENS, {}), asks)


def test_a_hit_waits_once_however_many_loads_end_meanwhile(open_rig: Open) -> None:
    """Where nothing is ever computed, as on a server that only decodes, four at a time would be all for ever."""
    decider, asks = Decider(open_rig(config_of(memory_tier()))), request()
    loads = [decider.begin(request()) for _ in range(4)]
    answers = []
    for number, now_s in enumerate((0.0, 0.4 * WAIT_S, 0.8 * WAIT_S, 1.2 * WAIT_S)):
        answers.append(decider.wanted(asks, now_s))
        decider.load.end_load(loads[number])
        loads.append(decider.begin(request()))
    assert answers == [None, None, None, 0]


def test_a_trial_is_used_up_by_its_load_alone(open_rig: Open) -> None:
    """Not by a request that is given up before it loads, nor again by one that is preempted and loads once more."""
    decider, loads = Decider(open_rig(config_of(memory_tier()))), request("loads")
    for _ in range(5):
        decider.load.observe_prefill(CHUNK_TOKENS, 0, 0.001)
        decider.load.observe_loads([LoadSample(MEMORY, SLOT, 10.0, False)])
    assert decider.wanted(request("early"), 1.0) == 0
    assert decider.wanted(request("given up"), 700.0) == CHUNK_TOKENS
    assert decider.wanted(loads, 701.0) == CHUNK_TOKENS
    decider.load.end_load(decider.begin(loads))
    assert decider.wanted(request("soon"), 750.0) == 0
    decider.now_s = 760.0
    decider.load.end_load(decider.begin(loads))
    assert decider.wanted(request("later"), 830.0) == CHUNK_TOKENS


def test_of_a_window_only_what_is_loaded_counts(tmp_path: Path, open_rig: Open) -> None:
    """Else a model that mostly looks back a little would never load: its hits would seem many times their size."""
    rig = open_rig(config_of(memory_tier(), slab_tier(tmp_path)))
    rig.store(*range(4))
    for slots in (1, 2, 3, 4, 1):
        rig.observe_loads(MEMORY, 0.01 * slots, 1, size_bytes=slots * SLOT)
    rig.observe_prefill(0.005)
    found, tokens = keys(*range(4)), 4 * CHUNK_TOKENS
    assert rig.wanted(found, request(), 0, tokens) == 0, "four slots: 40 ms, computing 20"
    windows = {0: CHUNK_TOKENS}
    assert rig.wanted(found, request(), 0, tokens, windows) == tokens, "one takes 10"


def test_slow_hits_are_taken_where_the_config_says_so(tmp_path: Path, open_rig: Open) -> None:
    rig = open_rig(config_of(memory_tier(), slab_tier(tmp_path), slow_hits="take"))
    on_disk(rig, 1)
    rig.observe_loads(SLAB, 10.0)
    rig.observe_prefill(0.01)
    assert rig.wanted(keys(1), request(), 0, CHUNK_TOKENS) == CHUNK_TOKENS
    assert decisions(rig) == {}
