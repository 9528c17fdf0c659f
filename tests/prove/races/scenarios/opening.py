"""What is opened on threads of its own: one thing, a rank's tiers over sleep and reconfiguration, weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nixl_offload.engine.memory_tier import MemoryEngine
from nixl_offload.engine.pump import LEAKED
from nixl_offload.engine.tier_engine import TierEngine
from nixl_offload.errors import NamespaceError, TierError
from nixl_offload.identity import weights
from nixl_offload.identity.weights import WeightsDigest
from nixl_offload.vllm.background import CLOSE_S, BackgroundOpening, join_all
from nixl_offload.vllm.rank_tiers import RankTiers
from tests.prove.races import primitives
from tests.prove.races.exploring import Run, Scenario
from tests.unit.chain_rig import FILE, MEMORY, ChainRig
from tests.unit.engine_rig import NAMESPACE


def background(run: Run) -> None:
    """What is opened is taken once or discarded once, however often it fails before and whenever it is given up."""
    chance = run.random
    opened: list[int] = []
    ended: list[int] = []
    failures = [chance.choice((0, 0, 1))]

    def make() -> int:
        time.sleep(0.001)
        if failures[0]:
            failures[0] -= 1
            raise TierError("not yet", cause="io")
        opened.append(len(opened))
        return opened[-1]

    primitives.no_threads[0] = chance.choice((0, 0, 1))
    opening = BackgroundOpening(make, ended.append, what="it", thread_name="opening")
    for _ in range(chance.randint(0, 3)):
        act = chance.randrange(4)
        if act == 0:
            opening.wait(chance.choice((0.0, 0.002, 20.0)))
        elif act == 1 and (taken := opening.take()) is not None:
            ended.append(taken)
        elif act == 2:
            time.sleep(chance.choice((0.001, 11.0)))
        elif act == 3:
            assert opening.error is None or not ended
    if (taken := opening.take()) is not None:
        ended.append(taken)
    assert not join_all(opening.close(), 5.0), "it does not end, and nothing hangs"
    assert opening.take() is None
    assert ended == opened, f"{opened} were opened, {ended} were taken or discarded"
    assert len(opened) <= 1


def ranks(run: Run) -> None:
    """A rank opens two tiers, sleeps, wakes up, is told of other places, and ends, at any moment of the openings, one
    of which may take longer than a sleep or an end waits for.
    """
    LEAKED.clear()
    chance = run.random
    rig = ChainRig.make(run.path, present=(False, False))
    before = rig.chain.part()
    for engine in before.values():
        engine.close(0.0)
    made: list[TierEngine] = []
    failures = [chance.choice((0, 0, 1))]
    busy: list[int] = []
    slow = [chance.choice((None, None, MEMORY, FILE))]
    waits_s = 1.5 * CLOSE_S

    def open_tier(position: int, place: object) -> TierEngine:
        busy.append(position)
        if position == slow[0]:
            slow[0] = None
            time.sleep(waits_s)
        time.sleep(0.001)
        busy.remove(position)
        if failures[0]:
            failures[0] -= 1
            raise TierError("not yet", cause="io")
        made.append(
            MemoryEngine(
                table=rig.chain.table,
                tensors=rig.tensors,
                layout=rig.layout,
                host=rig.host,
                rank_namespace=NAMESPACE,
                tier=position,
            )
        )
        return made[-1]

    joined: list[int] = []
    tiers = RankTiers(rig.chain, open_tier=open_tier, joined=lambda at, _, engine: joined.append(at), name_of=str)
    places: dict[int, Any] = {MEMORY: object(), FILE: object()}
    tiers.open(places, 0)
    number, jobs, asleep = 0, 0, False
    for _ in range(chance.randint(2, 7)):
        act = chance.randrange(6)
        if act == 0:
            tiers.take_opened()
        elif act == 1:
            jobs += 1
            tiers.take_opened()
            rig.chain.submit_store(jobs, [rig.chunk(jobs, MEMORY, range(4))])
        elif act == 2:
            try:
                tiers.sleep(5.0)
            except TierError:
                continue
            asleep = True
            is_open = rig.chain.open_tiers or busy or not all(engine._closed for engine in made)
            assert not is_open, "a tier is open, or being opened, although KV memory goes away"
            rig.poll()
            assert len(rig.results) == jobs, "a job has not ended, and KV memory goes away"
        elif act == 3:
            tiers.wake_up()
            asleep = False
        elif act == 4:
            while len(rig.results) < jobs:
                rig.poll()
                time.sleep(0.001)
            number += 1
            tiers.open(places, number)
        else:
            time.sleep(chance.choice((0.0005, 0.002, 11.0)))
    if asleep:
        tiers.wake_up()
    end_s = time.monotonic() + 100.0
    while tiers.is_opening and chance.random() < 0.9:
        assert time.monotonic() < end_s, f"it is never open: {tiers.failed}"
        tiers.take_opened()
        time.sleep(1.0)
    began_s = time.monotonic()
    assert tiers.close() or time.monotonic() >= began_s + CLOSE_S, "it does not wait for openings"
    rig.chain.close()
    rig.poll()
    assert len(rig.results) == jobs, "a job has not ended"
    time.sleep(waits_s)
    assert all(engine._closed for engine in made), "a tier was opened, and is nobody's"
    rig.host.close()


def digest(run: Run) -> None:
    """Weights are read by several threads, and the reading is stopped at any moment, or not."""
    chance = run.random
    weights.PIECE_BYTES = 64
    for number in range(2):
        (run.path / f"{number}.safetensors").write_bytes(bytes([number + 1]) * 200)
    primitives.no_threads[0] = 0
    reading = WeightsDigest(str(run.path), None, threads=2)
    stops = chance.random() < 0.7
    if stops:
        time.sleep(chance.choice((0.0, 0.0001, 0.001)))
        reading.close()
    assert reading.wait(30.0), "it does not end, and nothing hangs"
    try:
        found = reading.result()
    except NamespaceError:
        if not stops:
            raise
        return
    assert found == EXPECTED.setdefault("digest", found), "other threads, another digest"
    assert reading.progress() == (400, 400)


EXPECTED: dict[str, str] = {}


def _scenario(play: Callable[[Run], None]) -> Scenario:
    return Scenario(
        play,
        early_s=0.002,
        seeds=1000,
        watched=(BackgroundOpening, RankTiers, WeightsDigest),
        allowed={
            "BackgroundOpening._breaker": "the thread's own, once there is one",
            "WeightsDigest._error": "read once _done is set",
            "WeightsDigest._digest": "read once _done is set",
            "WeightsDigest._total_bytes": "for people: progress",
            "WeightsDigest.weight_files": "read once _done is set",
        },
    )


SCENARIOS = {
    "in the background": _scenario(background),
    "ranks": _scenario(ranks),
    "weights": _scenario(digest),
}
