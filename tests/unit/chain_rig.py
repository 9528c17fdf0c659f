"""A rank with a chain of tiers for tests: KV tensors, host memory, a real slab on disk with an engine of its own for
each farther tier, and images of chunks that are made without the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.engine import Chunk, Completion, LinkPaths, MemoryPaths, TierEngine, TierSetup, make_move
from nixl_offload.engine.host import HostSlab
from nixl_offload.movers.base import Mover
from nixl_offload.movers.threaded import CopyMover
from nixl_offload.tiers.slab.file import SlabFile, SlabLink
from nixl_offload.types import Location, Outcome, align_up
from tests.headers import Expected, make_page
from tests.unit.engine_rig import (
    CHUNK_BLOCKS,
    DEADLINE_S,
    NAMESPACE,
    Clock,
    Driven,
    Shape,
    opened,
    own_shards,
    rank_memory,
)
from tests.unit.link_rig import LinkMaker
from tests.unit.rank_rig import TestedRank

MEMORY, FILE, BUCKET = 0, 1, 2
"""Positions in the chain: host memory and two farther tiers, which are slabs here."""
SLOTS = 32


def make_host(
    slot_bytes: int, *, memory_slots: int = 16, relay_slots: int = 2, keys: ChunkKeys | None = None
) -> HostSlab:
    return HostSlab(memory_bytes=memory_slots * slot_bytes, relay_slots=relay_slots, slot_bytes=slot_bytes, keys=keys)


def blocks_of(number: int) -> range:
    """The blocks of chunk ``number``, one chunk after the other."""
    return range(CHUNK_BLOCKS * number, CHUNK_BLOCKS * (number + 1))


class Chained(Driven):
    """The base of rigs of a rank with several tiers."""

    chain: TestedRank
    host: HostSlab
    movers: list[Mover]
    slabs: list[SlabFile]
    settled: dict[int, Completion]

    @property
    def engine(self) -> TestedRank:  # type: ignore[override]
        return self.chain

    def poll(self) -> None:
        super().poll()
        for settled in self.chain.finished_tickets():
            assert settled.job_id not in self.settled, f"ticket {settled.job_id} was settled twice"
            self.settled[settled.job_id] = settled

    def settle(self, ticket: int, timeout_s: float = DEADLINE_S) -> Completion:
        self.until(lambda: ticket in self.settled, timeout_s)
        return self.settled[ticket]

    def close(self) -> None:
        self.chain.close()
        for mover in self.movers:
            mover.close()
        for slab in self.slabs:
            slab.close()
        self.host.close()


class ChainRig(Chained):
    """Memory and two slabs. ``engines`` by tier."""

    def __init__(
        self,
        directory: Path,
        *movers: Mover,
        shape: str | Shape = "per_layer",
        seed: int = 1,
        relay_slots: int = 2,
        staging_slots: int = 8,
        present: Sequence[bool] = (True, True),
        slab_class: type[SlabFile] = SlabFile,
        bucket: LinkMaker | None = None,
        keys: ChunkKeys | None = None,
        verify: str = "checksum",
        **options: Any,
    ) -> None:
        """``movers``: by farther tier, if not a plain one. ``present``: which farther tiers exist. ``bucket``: makes
        the last tier's link, if it is no slab; its chunks have MACs by ``keys``.
        """
        super().__init__(shape, seed)
        self.settled = {}
        self.clock, self.host = Clock(), make_host(self.slot_bytes, relay_slots=relay_slots, keys=keys)
        self.movers = [*movers, *(CopyMover() for _ in present[len(movers) :])]
        if self.shape.direct:
            options.setdefault("direct_min_extent_bytes", 4096)
        rank = {name: options.pop(name) for name in ("load_timeout_s",) if name in options}
        self.chain = TestedRank(3, relay_offsets=self.host.relay_offsets, clock=self.clock, **rank)
        memory, shards = rank_memory(self.tensors, self.layout, host=self.host), own_shards(self.layout)
        setups = [
            TierSetup(self.chain, memory, shards, tier, verify, keys if tier == BUCKET else None) for tier in range(3)
        ]
        self.slabs: list[SlabFile] = []
        self.engines: list[TierEngine | None] = [TierEngine(MemoryPaths(setups[MEMORY]))]
        for tier, (mover, wanted) in enumerate(zip(self.movers, present, strict=True), start=1):
            if not wanted:
                self.engines.append(None)
                continue
            if tier == BUCKET and bucket is not None:
                link = bucket(mover, self.clock)
            else:
                extent = align_up(self.slot_bytes * 4, 65536)
                slab = slab_class(directory / f"tier{tier}" / "rank.slab", extent * SLOTS // 4, extent, direct_io=True)
                slab.open()
                # Unwritten bytes read as zeros, not as the end of the file.
                deque(SlabFile.ensure(slab, 0, slab.rank_bytes), 0)
                self.slabs.append(slab)
                link = SlabLink(slab, mover, self.clock)
            staging_bytes = staging_slots * self.slot_bytes
            self.engines.append(TierEngine(LinkPaths(setups[tier], link, staging_bytes=staging_bytes, **options)))
        for tier, engine in enumerate(self.engines):
            if engine is not None:
                self.chain.join(tier, engine)

    def at(self, tier: int, slot: int) -> Location:
        """Slots of one size class, so that chunks of any group fit."""
        return Location(tier, slot * self.slot_bytes, self.slot_bytes)

    def chunk(  # type: ignore[override]
        self,
        number: int,
        tier: int,
        blocks: Iterable[int] = (),
        *,
        group: int = 0,
        first: int = 0,
        host: int | None = None,
    ) -> Chunk:
        """Chunk ``number`` rests in slot ``number`` of its tier; ``host`` is a slot of the memory tier."""
        offset = None if host is None else host * self.slot_bytes
        ids = np.array(list(blocks), dtype=np.int32)
        return Chunk(self.key(number, group), self.at(tier, number), group, ids, first, offset)

    def move(self, number: int, source: int, target: int, group: int = 0) -> Chunk:
        places = self.at(source, number), self.at(target, number)
        return make_move(self.key(number, group), group, *places, memory=MEMORY)

    def image(self, number: int, group: int = 0, first: int = 0) -> npt.NDArray[np.uint8]:
        """The image of a chunk of noise, seeded by ``number`` and made by the format alone. Blocks before ``first`` are
        absent.
        """
        block_bytes = self.layout.groups[group].block_bytes
        image = np.zeros(self.layout.slot_bytes(group), dtype=np.uint8)
        rows = image[HEADER_BYTES : HEADER_BYTES + CHUNK_BLOCKS * block_bytes].reshape(CHUNK_BLOCKS, block_bytes)
        rows[first:] = np.random.default_rng(number).integers(0, 256, rows[first:].shape, dtype=np.uint8)
        expect = Expected(NAMESPACE, self.key(number, group), group, CHUNK_BLOCKS, block_bytes)
        image[:HEADER_BYTES] = make_page(expect, block_checksums(rows[first:]), first_valid_block=first)
        return image

    def host_bytes(self, slot: int, group: int = 0) -> npt.NDArray[np.uint8]:
        """A view of a slot of the memory tier."""
        return self.host.slot(slot * self.slot_bytes, self.layout.slot_bytes(group)).memory

    def fill_host(self, number: int, group: int = 0, first: int = 0) -> None:
        """Put the image of chunk ``number`` into slot ``number`` of the memory tier."""
        self.host_bytes(number, group)[:] = self.image(number, group, first)

    def path(self, tier: int) -> Path:
        return self.slabs[tier - 1].path

    def stored(self, tier: int, number: int, group: int = 0) -> npt.NDArray[np.uint8]:
        """The bytes in slot ``number`` of a farther tier, read from its file."""
        raw = self.path(tier).read_bytes()[number * self.slot_bytes :][: self.layout.slot_bytes(group)]
        return np.frombuffer(raw, dtype=np.uint8)

    def put(self, tier: int, number: int, image: npt.NDArray[np.uint8] | None = None) -> None:
        """Write an image (by default the chunk's) to slot ``number`` of a farther tier, without the engine."""
        deque(SlabFile.ensure(self.slabs[tier - 1], number * self.slot_bytes, self.slot_bytes), 0)
        with self.path(tier).open("r+b") as file:
            file.seek(number * self.slot_bytes)
            file.write((self.image(number) if image is None else image).tobytes())

    def payload(self, number: int, group: int = 0) -> npt.NDArray[np.uint8]:
        """The blocks of ``image``."""
        block_bytes = self.layout.groups[group].block_bytes
        return self.image(number, group)[HEADER_BYTES:][: CHUNK_BLOCKS * block_bytes].reshape(CHUNK_BLOCKS, block_bytes)

    def load(self, job_id: int, chunks: Sequence[Chunk], ticket: int = 0) -> tuple[Outcome, ...]:
        self.chain.submit_load(job_id, chunks, promotion_ticket=ticket)
        return self.collect(job_id).outcomes

    def moves(self, ticket: int, moves: Sequence[Chunk]) -> tuple[Outcome, ...]:
        self.chain.submit_moves(ticket, moves)
        return self.settle(ticket).outcomes


def chain_rigs(tmp_path: Path) -> Iterator[Callable[..., ChainRig]]:
    """A fixture."""
    with opened(partial(ChainRig, tmp_path)) as make:
        yield make
