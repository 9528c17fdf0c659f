"""A server without vLLM: the real catalog over real tiers, and ranks with their real engines, links and movers.

It is driven as vLLM drives it: ``step`` after ``step``, stores and loads of chunks whose bytes a number decides.
Threading: the cell's thread. Ownership: ``close`` gives everything back; what is stored stays.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nixl_offload.catalog import Catalog, ChainOptions, LoadTicket, StoreTicket
from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.chunk.header import HEADER_BYTES, Expected, encode_header, make_header
from nixl_offload.config import Config, parse_config
from nixl_offload.engine import ChainEngine, ChunkIO, Completion, Engine, TierEngine
from nixl_offload.engine.chain import MoveIO
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.memory_tier import MemoryEngine
from nixl_offload.engine.opened_mover import open_planned
from nixl_offload.engine.streams import device_of
from nixl_offload.identity.namespace import Namespace, make_namespace
from nixl_offload.index import State
from nixl_offload.index.database import max_bytes
from nixl_offload.movers.base import Mover
from nixl_offload.movers.select_object import open_object_mover
from nixl_offload.stores.select import open_store
from nixl_offload.tiers import kinds
from nixl_offload.tiers.base import Tier, TierContext
from nixl_offload.tiers.memory.tier import rank_memory_bytes
from nixl_offload.tiers.os_errors import tier_error
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.tiers.shared.tier import SharedTier
from nixl_offload.tiers.slab.directory import _Budget
from nixl_offload.tiers.slab.file import make_private_directory, rank_file_name
from nixl_offload.tiers.slab.tier import SlabPlace, SlabTier
from nixl_offload.tiers.slot_tier import SlotTier
from nixl_offload.types import Key, Location, Lookup, LookupContext, Outcome, key_group
from nixl_offload.vllm.background import BackgroundOpening
from nixl_offload.vllm.closed_tier import ClosedTier
from nixl_offload.vllm.rank_tiers import RankTiers
from tests.prove.faults.clock import CLOCK, real_s
from tests.prove.faults.media import MEMORY_BYTES, Medium, Piece
from tests.unit.engine_rig import CHUNK_BLOCKS, NUM_BLOCKS, SHAPES, kv_cache
from tests.unit.shared_rig import key_of, namespace_of

REGIONS: Final = NUM_BLOCKS // CHUNK_BLOCKS
"""Chunks that the KV cache holds."""
PATIENCE_S: Final = 30.0
"""Real time after which something counts as dead."""
STUCK_S: Final = 0.4
"""Real time without progress after which the clock is set ahead, so that time-outs come."""
GARBAGE: Final = 0xA5


class DeadError(Exception):
    """What should have ended has not."""


@dataclass(slots=True)
class Guard:
    """KV blocks that were computed anew after a load had failed: nothing may write to them any more."""

    rank: int
    blocks: range
    group: int
    number: int
    value: int


@dataclass(slots=True)
class Job:
    """A job of vLLM's on all ranks."""

    ticket: StoreTicket | LoadTicket
    numbers: list[int]
    blocks: list[range]
    ranks_left: int
    outcomes: list[list[Outcome]] = field(default_factory=list)

    @property
    def is_load(self) -> bool:
        """Or a store."""
        return isinstance(self.ticket, LoadTicket)


class Rank:
    """One rank's half."""

    def __init__(self, server: Server, number: int, seed: int) -> None:
        self.number = number
        self._server = server
        self.tensors, self.kv, self.layout = kv_cache(server.shape, seed + number)
        config = server.config
        slot_bytes = max(self.layout.slot_bytes(group) for group in range(len(self.layout.groups)))
        self.slot_bytes = slot_bytes
        memory = config.memory
        memory_bytes = 0 if memory is None else rank_memory_bytes(memory.capacity_bytes, server.ranks_total, 1)
        self.host = None
        if memory_bytes:
            self.host = HostSlab(memory_bytes=memory_bytes, relay_slots=0, slot_bytes=slot_bytes,
                                 progress=lambda done, total: None)  # fmt: skip
        self.engines: dict[int, TierEngine] = {}
        self.chain = ChainEngine([None] * len(config.tiers), self.host, memory=None if memory is None else 0)
        self.tiers = RankTiers(
            self.chain,
            open_tier=self._open,
            joined=lambda position, _, engine: self.engines.__setitem__(position, engine),
            name_of=lambda position: f"tier {position} on rank {number}",
        )

    def _open(self, position: int, place: kinds.AnyPlace) -> TierEngine:
        """As ``rank_engine.open_tier_engine``, which needs vLLM."""
        server, config = self._server, self._server.config
        tier = config.tiers[position]
        common: dict[str, Any] = {
            "tensors": self.tensors,
            "layout": self.layout,
            "rank_namespace": place.rank_namespaces[self.number],
            "tier": position,
            "verify": config.verify,
        }
        if not tier.outlives_process:
            assert self.host is not None
            return MemoryEngine(host=self.host, **common)
        mover = self._open_mover(tier, place)
        link = None
        try:
            link = kinds.open_link(tier, place, self.number, mover)
            return Engine(
                link=link,
                staging_bytes=server.staging_slots * self.slot_bytes,
                load_timeout_s=config.load_timeout_s,
                direct_min_extent_bytes=4096,
                host=self.host,
                **common,
            )
        except BaseException:
            if link is not None:
                link.close()
            mover.close()
            raise

    def _open_mover(self, tier: Any, place: kinds.AnyPlace) -> Mover:
        device = device_of(self.tensors[0])
        if tier.kind == "s3":
            return open_object_mover(tier, device.kind, functools.partial(open_store, tier)).mover
        directory = place.directory if isinstance(place, SlabPlace) else tier.path
        try:
            make_private_directory(Path(directory))
        except OSError as error:
            raise tier_error(error, f"cannot use {directory}") from error
        mover = open_planned(tier, directory, device, None).mover
        assert mover is not None
        return mover

    def fill(self, blocks: range, group: int, rows: npt.NDArray[np.uint8] | int) -> None:
        """Let KV blocks hold a payload, or a value in every byte."""
        at = 0
        for ref in self._server.shape.groups[group].refs:
            part = self.kv[ref.tensor_index][blocks.start : blocks.stop, ref.page_offset : ref.page_offset + ref.length]
            part[:] = rows if isinstance(rows, int) else rows[:, at : at + ref.length]
            at += ref.length

    def read(self, blocks: range, group: int) -> npt.NDArray[np.uint8]:
        """Return what KV blocks hold, a row for each."""
        return np.concatenate(
            [
                self.kv[ref.tensor_index][blocks.start : blocks.stop, ref.page_offset : ref.page_offset + ref.length]
                for ref in self._server.shape.groups[group].refs
            ],
            axis=1,
        )


class Server:
    """Begins to open its tiers at once; ``step`` takes them over."""

    def __init__(
        self,
        tiers: Sequence[dict[str, Any]],
        medium: Medium | None,
        *,
        shape: str,
        ranks: int,
        seed: int,
        verify: str,
        staging_slots: int,
        wrong: Callable[[str], None],
    ) -> None:
        """``wrong`` is told of bytes that are not those that were asked for."""
        self.medium = medium
        self.shape = SHAPES[shape]
        self.staging_slots = staging_slots
        self.ranks_total = ranks
        self._wrong = wrong
        self._rng = random.Random(seed)
        self.config: Config = parse_config({"tiers": list(tiers), "verify": verify, "staging": "1MiB"})
        self.ranks: list[Rank] = []
        self.ranks = [Rank(self, number, seed) for number in range(ranks)]
        self.namespace = self._namespace()
        self.serving: list[Tier] = [ClosedTier() for _ in tiers]
        self.opened: dict[int, kinds.AnyTier] = {}
        memory = self.config.memory
        self.catalog = Catalog(
            self.serving,
            world_size=ranks,
            slot_bytes=lambda key: self.namespace.slot_bytes(key_group(key)),
            store_backlog_bytes=8 * self.ranks[0].slot_bytes,
            chain=ChainOptions(
                promote=memory is not None,
                pin_unsaved=memory is not None and memory.unsaved == "pin",
                unsaved_limit_bytes=0 if memory is None else memory.capacity_bytes // ranks // 4,
                write_through_backlog_bytes=8 * self.ranks[0].slot_bytes,
                memory=None if memory is None else 0,
            ),
        )
        self.jobs: dict[int, Job] = {}
        self.open_tickets: dict[int, int] = {}
        """Of promotions and write-throughs: how many ranks have not told."""
        self.failures = 0
        self.guards: list[Guard] = []
        self.requests = 0
        self._free_regions = list(range(REGIONS))
        self._moved = real_s()
        self._openings = {position: self._begin(position) for position in range(len(tiers))}
        self._is_closed = False

    # What chunks are.

    def key(self, number: int) -> Key:
        """Return the key of a chunk; its group goes by its number."""
        return key_of(number, number % len(self.shape.groups))

    def payload(self, number: int, rank: int) -> npt.NDArray[np.uint8]:
        """Return what a chunk's blocks hold on a rank."""
        return _payload(number, rank, self.ranks[0].layout.groups[number % len(self.shape.groups)].block_bytes)

    def foreign_image(self, number: int, rank: int) -> bytes:
        """Return a whole shard under the same key, of an engine with other weights."""
        group = number % len(self.shape.groups)
        block_bytes = self.ranks[rank].layout.groups[group].block_bytes
        rows = _payload(number + (1 << 20), rank, block_bytes)
        image = np.zeros(self.ranks[rank].layout.slot_bytes(group), dtype=np.uint8)
        image[HEADER_BYTES : HEADER_BYTES + rows.size] = rows.reshape(-1)
        digest = bytes(byte ^ 0xFF for byte in self.namespace.rank_digest(rank))
        expected = Expected(digest, self.key(number), group, CHUNK_BLOCKS, block_bytes)
        encode_header(make_header(expected, block_checksums(rows)), image[:HEADER_BYTES])
        return image.tobytes()

    def pieces(self, numbers: Iterable[int]) -> dict[Piece, tuple[int, int]]:
        """Return where shards lie in the tier under test, as far as it has them, and number and rank of each."""
        found: dict[Piece, tuple[int, int]] = {}
        position = len(self.serving) - 1
        tier, medium = self.opened.get(position), self.medium
        if medium is None:
            return found
        for number in numbers:
            key = self.key(number)
            for rank in range(self.ranks_total):
                if isinstance(tier, SlabTier) and tier.state(key) is State.READY:
                    place = tier._index.location(key)
                    path = Path(tier.place.directory, rank_file_name(rank))
                    piece = Piece(path, place.offset, place.slot_bytes)
                elif isinstance(tier, SharedTier):
                    path = medium.root / shard_name(self.namespace.name, key, rank)
                    piece = Piece(path, 0, self.namespace.shard_bytes(key_group(key), rank))
                else:
                    continue
                if piece.path.exists():
                    found[piece] = number, rank
        return found

    # What vLLM does.

    @property
    def is_open(self) -> bool:
        """Whether every tier serves."""
        return not any(isinstance(tier, ClosedTier) for tier in self.serving)

    def store(self, numbers: Sequence[int]) -> list[int]:
        """A prompt was computed. Returns the chunks that are taken."""
        self.requests += 1
        wanted = [self.key(number) for number in numbers[: self.room]]
        ticket = self.catalog.reserve(wanted, time.monotonic(), f"r{self.requests}")
        if ticket is None:
            return []
        taken = [numbers[wanted.index(key)] for key in ticket.keys]
        blocks = self._take(len(taken))
        job = self.jobs[ticket.ticket] = Job(ticket, taken, blocks, self.ranks_total)
        for rank in self.ranks:
            chunks = []
            for number, key, location, place in zip(taken, ticket.keys, ticket.locations, blocks, strict=True):
                rank.fill(place, key_group(key), self.payload(number, rank.number))
                chunks.append(ChunkIO(key, location, key_group(key), _ids(place), 0))
            rank.chain.submit_store(ticket.ticket, chunks)
        for rank in self.ranks:
            rank.chain.wait([ticket.ticket], 0.2)
            for number, place in zip(job.numbers, blocks, strict=True):
                # The model writes on: what is read from here after ``wait`` must never be taken for the chunk.
                rank.fill(place, number % len(self.shape.groups), GARBAGE)
        return taken

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

    def load(self, numbers: Sequence[int]) -> int:
        """Begin to load what was found; return its ticket."""
        keys = [self.key(number) for number in numbers]
        ticket = self.catalog.prepare_load(keys, time.monotonic())
        blocks = self._take(len(keys))
        self.jobs[ticket.ticket] = Job(ticket, list(numbers), blocks, self.ranks_total)
        slots = ticket.promotion_slots or (None,) * len(keys)
        if ticket.promotion_ticket:
            self.open_tickets[ticket.promotion_ticket] = self.ranks_total
        for rank in self.ranks:
            for place, key in zip(blocks, keys, strict=True):
                rank.fill(place, key_group(key), self._rng.randrange(256))
            chunks = [
                ChunkIO(key, location, key_group(key), _ids(place), 0, None if slot is None else slot.offset)
                for key, location, place, slot in zip(keys, ticket.locations, blocks, slots, strict=True)
            ]
            rank.chain.submit_load(ticket.ticket, chunks, promotion_ticket=ticket.promotion_ticket)
        return ticket.ticket

    def serve(self, numbers: Sequence[int]) -> list[int]:
        """Look a prompt up and load it; return what was loaded, all of it right."""
        found = self.look_up(numbers)
        loaded: list[int] = []
        for begin in range(0, len(found), REGIONS // 2):
            part = found[begin : begin + REGIONS // 2]
            if self.room < len(part):
                self.check_guards()
            ticket = self.load(part)
            job = self.jobs[ticket]
            self.until(lambda at=ticket: at not in self.jobs, "a load")
            ended = zip(part, zip(*job.outcomes, strict=True), strict=True)
            loaded += [number for number, outcomes in ended if set(outcomes) == {Outcome.OK}]
        return loaded

    def step(self) -> None:
        """The end of a step of vLLM's: everything that may go on does."""
        self._take_opened()
        now_s = time.monotonic()
        self.catalog.flush(now_s)
        for grant in self.catalog.begin_write_throughs(now_s):
            self.open_tickets[grant.ticket] = self.ranks_total
            moves = [
                MoveIO(key, key_group(key), source, target)
                for key, source, target in zip(grant.keys, grant.sources, grant.targets, strict=True)
            ]
            for rank in self.ranks:
                rank.chain.submit_moves(grant.ticket, moves)
        self.poll()
        troubled = {
            position
            for rank in self.ranks
            for position, status in enumerate(rank.chain.statuses())
            if status.trouble and status.trouble != "unavailable"
        }
        self.catalog.disable(troubled, time.monotonic())
        self.catalog.take_changes()

    def poll(self) -> None:
        """Take what ranks have to tell."""
        for rank in self.ranks:
            for done in rank.chain.finished():
                self._ended(rank, done)
            for settled in rank.chain.settled():
                self._report(settled.job_id, settled.outcomes)
                self.open_tickets[settled.job_id] -= 1
                if not self.open_tickets[settled.job_id]:
                    del self.open_tickets[settled.job_id]

    def until(self, is_over: Callable[[], bool], what: str) -> None:
        """Step until something is over; time-outs come early where nothing moves."""
        began_s = self._moved = real_s()
        jumps = 0
        while not is_over():
            self.step()
            if is_over():
                return
            time.sleep(0.0003)
            if real_s() > self._moved + STUCK_S:
                self._moved = real_s()
                CLOCK.ahead_s += 31.0
                jumps += 1
            if real_s() > began_s + PATIENCE_S:
                raise DeadError(f"{what} has not ended, {jumps} time-outs later: {self.state()}")

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is under way."""
        return (
            not self.jobs
            and not self.open_tickets
            and not self.catalog.has_pending_writes
            and not self.catalog.open_tickets
            and all(rank.chain.idle() for rank in self.ranks)
        )

    def state(self) -> str:
        """Say what is under way."""
        idle = [rank.chain.idle() for rank in self.ranks]
        jobs = {number: type(job.ticket).__name__ for number, job in self.jobs.items()}
        pending = self.catalog.counts().pending_writes
        return f"jobs {jobs}, tickets {self.open_tickets}, pending {pending}, ranks idle {idle}"

    # What must hold.

    def held(self) -> list[str]:
        """Return what is held although nothing is under way."""
        found = []
        for position, tier in self.opened.items():
            if isinstance(tier, SlotTier):
                tier._index.check()
                for size, taken in tier.occupancy().items():
                    if taken.writing or taken.pinned or taken.evicting:
                        found.append(f"tier {position}, slots of {size}: {taken}")
                used = sum(tier._allocator.used_slots(size) * size for size in tier.occupancy())
                indexed = sum(taken.bytes_total for taken in tier.occupancy().values())
                if used != indexed + tier.retired_bytes:
                    found.append(f"tier {position}: {used} bytes of slots are taken, {indexed} are of chunks")
            elif isinstance(tier, SharedTier) and tier._presence.held:
                found.append(f"tier {position}: {tier._presence.held} beliefs are held")
        counts = self.catalog.counts()
        for what in ("unsaved_bytes", "storing_bytes", "write_through_bytes"):
            value = getattr(counts, what)
            if any(value) if isinstance(value, tuple | list) else value:
                found.append(f"{what}: {value}")
        for rank in self.ranks:
            for position in rank.chain.open_tiers:
                engine = rank.engines[position]
                in_flight = engine._pump._in_flight
                if in_flight.batches or in_flight.chunks or in_flight.stores or in_flight.background:
                    found.append(f"rank {rank.number}, tier {position}: {in_flight}")
                if isinstance(engine, Engine):
                    memory = engine._pump._driven._context.memory  # type: ignore[attr-defined]
                    for pool in [*memory.packed, memory.pages]:
                        if pool.free != pool.usable:
                            out = pool.usable - pool.free
                            found.append(f"rank {rank.number}, tier {position}: {out} staging slots are out")
        return found

    def check_guards(self) -> None:
        """Nothing has written to blocks after their load had failed."""
        for guard in self.guards:
            if not (self.ranks[guard.rank].read(guard.blocks, guard.group) == guard.value).all():
                self._wrong(f"blocks {guard.blocks} of rank {guard.rank} were written to after the load of chunk "
                            f"{guard.number} had failed")  # fmt: skip
        for guard in self.guards:
            self._give_back([guard.blocks])
        self.guards.clear()

    # Its end.

    def close(self, drain_s: float = 3.0) -> bool:
        """As a shutdown. False: an opening did not end."""
        if self._is_closed:
            return True
        self._is_closed = True
        ended = True
        for opening in self._openings.values():
            opening.stop()
        for rank in self.ranks:
            ended &= rank.tiers.close()
            rank.chain.close(drain_s)
            if rank.host is not None and ended:
                rank.host.close()
        self.poll()
        for opening in self._openings.values():
            ended &= opening.close(2.0)
        in_flight = self.catalog.in_flight_stores()
        for position, tier in self.opened.items():
            tier.close([key for at, key in in_flight if at == position])
        return ended

    # Inside

    def _namespace(self) -> Namespace:
        sizes = [tuple(rank.layout.slot_bytes(group) for rank in self.ranks) for group in range(len(self.shape.groups))]
        fields = namespace_of(self.ranks_total, sizes=sizes).fields
        return make_namespace(replace(fields, blocks_per_chunk=CHUNK_BLOCKS))

    def _begin(self, position: int) -> BackgroundOpening[kinds.AnyTier]:
        context = TierContext(position, self.namespace, world_size=self.ranks_total)
        make = functools.partial(kinds.open_tier, self.config.tiers[position], context)
        return BackgroundOpening(
            make, lambda tier: tier.close(), what=f"tier {position}", thread_name=f"nixl-offload-open-{position}"
        )

    def _take_opened(self) -> None:
        if self.is_open:
            for rank in self.ranks:
                rank.tiers.take_opened()
            return
        for position, opening in self._openings.items():
            tier = opening.take()
            if tier is not None:
                self.opened[position] = tier
                for rank in self.ranks:
                    rank.tiers.open({position: tier.place}, 0)
        for rank in self.ranks:
            rank.tiers.take_opened()
        for position, tier in self.opened.items():
            if isinstance(self.serving[position], ClosedTier) and all(
                position in rank.chain.open_tiers for rank in self.ranks
            ):
                self.serving[position] = tier
                self.catalog.join(position, tier)

    def _ended(self, rank: Rank, done: Completion) -> None:
        self._moved = real_s()
        job = self.jobs[done.job_id]
        job.outcomes.append(list(done.outcomes))
        if job.is_load:
            self._check_load(rank, job, done.outcomes)
        job.ranks_left -= 1
        self._report(done.job_id, done.outcomes)
        if not job.ranks_left:
            del self.jobs[done.job_id]
            guarded = {(guard.blocks, guard.number) for guard in self.guards}
            self._give_back([at for at, number in zip(job.blocks, job.numbers, strict=True)
                             if (at, number) not in guarded])  # fmt: skip

    def _check_load(self, rank: Rank, job: Job, outcomes: Sequence[Outcome]) -> None:
        for number, place, outcome in zip(job.numbers, job.blocks, outcomes, strict=True):
            group = number % len(self.shape.groups)
            if outcome is Outcome.OK:
                if not np.array_equal(rank.read(place, group), self.payload(number, rank.number)):
                    self._wrong(f"chunk {number} was loaded on rank {rank.number} with other bytes")
            else:
                self.failures += 1
                rank.fill(place, group, 0x3C)
                self.guards.append(Guard(rank.number, place, group, number, 0x3C))

    def _report(self, ticket: int, outcomes: Sequence[Outcome]) -> None:
        self._moved = real_s()
        failed = {position: outcome for position, outcome in enumerate(outcomes) if outcome is not Outcome.OK}
        self.failures += len(failed)
        self.catalog.report(ticket, 1, failed, time.monotonic())

    def _take(self, count: int) -> list[range]:
        taken = [self._free_regions.pop(self._rng.randrange(len(self._free_regions))) for _ in range(count)]
        return [range(CHUNK_BLOCKS * region, CHUNK_BLOCKS * (region + 1)) for region in taken]

    def _give_back(self, places: Collection[range]) -> None:
        for place in places:
            region = place.start // CHUNK_BLOCKS
            if region not in self._free_regions:
                self._free_regions.append(region)

    @property
    def room(self) -> int:
        """Chunks for which the KV cache has room now."""
        return len(self._free_regions)


@functools.lru_cache(maxsize=512)
def _payload(number: int, rank: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    made = np.random.default_rng((number, rank)).integers(0, 256, (CHUNK_BLOCKS, block_bytes), dtype=np.uint8)
    made.flags.writeable = False
    return made


def _ids(blocks: range) -> npt.NDArray[np.int32]:
    return np.array(blocks, dtype=np.int32)


def least_slab_bytes(shape: str, ranks: int) -> int:
    """Return the least capacity of a slab, most of which is promised to its index: room for some ten chunks."""
    _, _, layout = kv_cache(SHAPES[shape], 0)
    classes = sorted({layout.slot_bytes(group) for group in range(len(layout.groups))})
    return _Budget(classes, ranks, max_bytes).least_bytes()


def memory_tier() -> dict[str, Any]:
    """Return what the config says of a small memory tier."""
    return {"kind": "memory", "capacity": MEMORY_BYTES}


__all__ = ["DeadError", "Location", "Server", "memory_tier"]
