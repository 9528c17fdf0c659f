"""The server of a round: it opens its tiers in the background, as vLLM's half and each rank do, goes by the cell's
clock, and tells what it holds.

Threading: the cell's thread. Ownership: ``close`` gives everything back; what is stored stays.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from nixl_offload.engine import LinkEngine, TierEngine
from nixl_offload.index import State
from nixl_offload.tiers import kinds
from nixl_offload.tiers.base import Tier
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.tiers.shared.tier import SharedTier
from nixl_offload.tiers.slab.directory import least_bytes
from nixl_offload.tiers.slab.file import rank_file_name
from nixl_offload.tiers.slab.tier import SlabTier
from nixl_offload.tiers.slot_tier import SlotTier
from nixl_offload.types import Lookup, LookupContext
from nixl_offload.vllm.background import BackgroundOpening, join_all
from nixl_offload.vllm.rank_tiers import RankTiers
from tests.contexts import context_of
from tests.prove import server
from tests.prove.faults.clock import CLOCK, real_s
from tests.prove.faults.media import Medium
from tests.prove.happenings import Piece
from tests.prove.rank import Rank
from tests.prove.server import PATIENCE_S, REGIONS, DeadError, config_of
from tests.unit.engine_rig import SHAPES, kv_cache
from tests.unit.gc_rig import namespace_of

STUCK_S: Final = 0.4
"""Real time without progress after which the clock is set ahead, so that time-outs come."""
JUMP_S: Final = 31.0
"""More than any time-out and quarantine."""


class Server(server.Server):
    """Begins to open its tiers at once; ``step`` takes them over."""

    is_hasty = True

    def __init__(self, tiers: Sequence[dict[str, Any]], medium: Medium | None, *, verify: str, **options: Any) -> None:
        """``options`` as for ``tests.prove.server.Server``."""
        self.medium = medium
        self.rank_tiers: list[RankTiers] = []
        self.engines: list[dict[int, TierEngine]] = []
        """By rank, of those that are open."""
        self._openings: dict[int, BackgroundOpening[kinds.AnyTier]] = {}
        self._moved_s = real_s()
        self._is_closed = False
        super().__init__(config_of(*tiers, verify=verify), **options)

    def pieces(self, numbers: Iterable[int]) -> dict[Piece, tuple[int, int]]:
        """Return where shards lie in the tier under test, as far as it has them, and number and rank of each."""
        found: dict[Piece, tuple[int, int]] = {}
        tier, medium = self.opened.get(len(self.serving) - 1), self.medium
        if medium is None:
            return found
        for number in numbers:
            key = self.key(number)
            for rank in self.ranks:
                if isinstance(tier, SlabTier) and tier.state(key) is State.READY:
                    place = tier._index.location(key)
                    path = Path(tier.place.directory, rank_file_name(rank.number))
                    piece = Piece(path, place.offset, place.slot_bytes)
                elif isinstance(tier, SharedTier):
                    path = medium.root / shard_name(self.namespace.name, key, rank.number)
                    piece = Piece(path)
                else:
                    continue
                if piece.path.exists():
                    found[piece] = number, rank.number
        return found

    # What vLLM does.

    @property
    def is_open(self) -> bool:
        """Whether every tier serves, on every rank."""
        are_open = not any(type(tier) is Tier for tier in self.serving)
        return are_open and not any(tiers.is_opening for tiers in self.rank_tiers)

    def look_up(self, numbers: Sequence[int], *, limit_s: float = 0.3) -> list[int]:
        """Look a prompt up until it is known how much of it there is; return that."""
        self.requests += 1
        request, until_s, jumps = f"r{self.requests}", real_s() + limit_s, 0
        while True:
            answers = []
            for position, number in enumerate(numbers):
                context = LookupContext(request, 16 * (position + 1))
                answers.append(self.catalog.lookup(self.key(number), time.monotonic(), context))
                if answers[-1] is Lookup.MISS:
                    break
            if not {Lookup.RETRY, Lookup.PENDING}.intersection(answers):
                break
            if real_s() > until_s:
                CLOCK.ahead_s += 5.0
                until_s = real_s() + 0.1
                jumps += 1
            self.step()
            time.sleep(0.0005)
            if jumps > 50:
                raise DeadError(f"a lookup of {len(numbers)} chunks was not answered")
        self.catalog.forget_request(request)
        return [number for number, answer in zip(numbers, answers, strict=False) if answer is Lookup.HIT]

    def serve(self, numbers: Sequence[int]) -> list[int]:
        """Look a prompt up and load it; return what was loaded, all of it right."""
        found = self.look_up(numbers)
        served: list[int] = []
        for begin in range(0, len(found), REGIONS // 2):
            part = found[begin : begin + REGIONS // 2]
            if self.room < len(part):
                self.check_guards()
            served += [number for number, is_whole in self.loaded(part) if is_whole]
        return served

    def step(self) -> None:
        """See tests.prove.server.Server; tiers that have trouble on a rank are not used."""
        self._take_opened()
        super().step()
        troubled = {
            position
            for rank in self.ranks
            for position, status in enumerate(rank.chain.statuses())
            if status.trouble and status.trouble != "unavailable"
        }
        self.catalog.disable(troubled, time.monotonic())
        self.catalog.take_changes()

    def until(self, is_over: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
        """As of tests.prove.server.Server; time-outs come early where nothing moves."""
        began_s = self._moved_s = real_s()
        jumps = 0
        while not is_over():
            self.step()
            if is_over():
                return
            time.sleep(0.0003)
            if real_s() > self._moved_s + STUCK_S:
                self._moved_s = real_s()
                CLOCK.ahead_s += JUMP_S
                jumps += 1
            if real_s() > began_s + timeout_s:
                raise DeadError(f"{what} has not ended, {jumps} time-outs later: {self.state()}")

    # What must hold.

    def held(self) -> list[str]:
        """Return what is held although nothing is under way."""
        found = []
        for position, tier in self.opened.items():
            if isinstance(tier, SlotTier):
                tier.check()
                if tier._index.held:
                    found.append(f"tier {position}: {tier._index.held} chunks are held")
            elif isinstance(tier, SharedTier) and tier._presence.held:
                found.append(f"tier {position}: {tier._presence.held} beliefs are held")
        counts = self.catalog.counts()
        for what in ("unsaved_bytes", "storing_bytes", "write_through_bytes"):
            value = getattr(counts, what)
            if any(value) if isinstance(value, tuple | list) else value:
                found.append(f"{what}: {value}")
        for rank in self.ranks:
            for position in rank.chain.open_tiers:
                engine = self.engines[rank.number][position]
                in_flight = engine.in_flight
                if in_flight.batches or in_flight.chunks or in_flight.stores or in_flight.background:
                    found.append(f"rank {rank.number}, tier {position}: {in_flight}")
                if isinstance(engine, LinkEngine):
                    for pool in engine.paths.link_memory.pools.values():
                        if pool.free != pool.usable:
                            out = pool.usable - pool.free
                            found.append(f"rank {rank.number}, tier {position}: {out} staging slots are out")
        return found

    # Its end.

    def end(self, drain_s: float = 3.0) -> bool:
        """Close as a shutdown. False: an opening did not end."""
        if self._is_closed:
            return True
        self._is_closed = ended = True
        ending = [thread for opening in self._openings.values() for thread in opening.close()]
        for rank, tiers in zip(self.ranks, self.rank_tiers, strict=True):
            ended &= tiers.close()
            rank.close(drain_s, keeps_memory=not ended)
        self.poll()
        ended &= not join_all(ending, 2.0)
        self._close_tiers()
        return ended

    # Inside

    def _begin(self) -> None:
        for rank in self.ranks:
            self.engines.append({})
            self.rank_tiers.append(self._tiers_of(rank))
        for position in range(len(self.serving)):
            self._openings[position] = BackgroundOpening(
                functools.partial(self._open_tier, position),
                lambda tier: tier.close(),
                what=f"tier {position}",
                thread_name=f"nixl-offload-open-{position}",
            )

    def _tiers_of(self, rank: Rank) -> RankTiers:
        engines = self.engines[rank.number]
        return RankTiers(
            rank.chain,
            open_tier=rank.open,
            joined=lambda position, _, engine: engines.__setitem__(position, engine),
            name_of=lambda position: f"tier {position} on rank {rank.number}",
        )

    def _take_opened(self) -> None:
        for position, opening in self._openings.items() if not self.is_open else ():
            tier = opening.take()
            if tier is not None:
                self.opened[position] = tier
                for tiers in self.rank_tiers:
                    tiers.open({position: tier.place}, 0)
        for tiers in self.rank_tiers:
            tiers.take_opened()
        for position in self.opened:
            is_on_all = all(position in rank.chain.open_tiers for rank in self.ranks)
            if type(self.serving[position]) is Tier and is_on_all:
                self._join(position)

    def _report(self, done: Any) -> None:
        self._moved_s = real_s()
        super()._report(done)


def least_slab_bytes(shape: str, ranks: int) -> int:
    """Return the least capacity of a slab, most of which is promised to its index: room for some ten chunks."""
    _, _, layout = kv_cache(SHAPES[shape], 0)
    classes = [layout.slot_bytes(group) for group in range(len(layout.groups))]
    return least_bytes(context_of(namespace_of(), classes, world_size=ranks))
