"""Proves of one engine: whole images go between host slots and storage unchanged and verified, KV blocks are served
from them, no staging slot is used, and each host slot to fill is told of exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.engine import Chunk
from nixl_offload.engine.states import WorkKind
from nixl_offload.errors import MoverError
from nixl_offload.movers.base import MemoryId, MemoryRegion, Mover, Op
from nixl_offload.movers.copy import CopyMover
from nixl_offload.types import Location, Outcome
from tests.contract.suites.faulty_mover import Fault, FaultKind, FaultyMover
from tests.unit.chain_rig import FILE, ChainRig, make_host
from tests.unit.engine_rig import NUM_BLOCKS, SHAPES, Rig, until
from tests.unit.link_rig import ObjectFiles, objects, tree

OK, FAILED, CORRUPT, DROPPED = Outcome.OK, Outcome.FAILED, Outcome.CORRUPT, Outcome.DROPPED
Make = Callable[..., ChainRig]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    rigs: list[ChainRig] = []

    def build(*movers: Mover, **options: Any) -> ChainRig:
        rigs.append(ChainRig.make(tmp_path, *movers, present=(True,), **options))
        return rigs[-1]

    yield build
    for rig in rigs:
        for mover in rig.movers:
            if isinstance(mover, FaultyMover):
                mover.release()
        rig.close()


class Direct:
    """A rank whose only tier but memory is a file, with what it has told."""

    def __init__(self, rig: ChainRig) -> None:
        self.engine, self.results = rig.chain, rig.results
        self.rig = rig

    def ended(self, job_id: int) -> tuple[Outcome, ...]:
        """The outcomes of a job."""
        return self.rig.collect(job_id).outcomes

    def store(self, ticket: int, chunks: list[Chunk]) -> tuple[Outcome, ...]:
        self.engine.submit_background(ticket, chunks, WorkKind.WRITE_THROUGH)
        return self.rig.settle(ticket).outcomes

    def fetch(self, ticket: int, chunks: list[Chunk]) -> tuple[Outcome, ...]:
        self.engine.submit_background(ticket, chunks, WorkKind.FETCH)
        return self.rig.settle(ticket).outcomes

    def load(self, job_id: int, chunks: list[Chunk]) -> tuple[tuple[Outcome, ...], tuple[Outcome, ...]]:
        """Outcomes and promotions."""
        self.engine.submit_load(job_id, chunks, promotion_ticket=job_id)
        return self.ended(job_id), self.rig.settle(job_id).outcomes


@pytest.mark.parametrize("shape", list(SHAPES))
def test_an_image_goes_out_and_comes_back_as_it_is(make: Make, shape: str) -> None:
    """Byte for byte, every layout and group, direct ones too: on storage, in another host slot, and in KV blocks."""
    rig = make(shape=shape)
    direct = Direct(rig)
    groups = range(len(rig.layout.groups))
    for group in groups:
        number = 3 + group
        rig.fill_host(number, group)
        assert direct.store(10 + group, [rig.chunk(number, FILE, group=group, host=number)]) == (OK,)
        assert np.array_equal(rig.stored(FILE, number, group), rig.image(number, group))
        assert direct.fetch(20 + group, [rig.chunk(number, FILE, group=group, host=8)]) == (OK,)
        assert np.array_equal(rig.host_bytes(8, group), rig.image(number, group))
        before = rig.blocks(range(NUM_BLOCKS), group)
        chunk = rig.chunk(number, FILE, [9, 4, 5, 30], group=group, host=9)
        assert direct.load(30 + group, [chunk]) == ((OK,), (OK,))
        assert np.array_equal(rig.host_bytes(9, group), rig.image(number, group))
        assert np.array_equal(rig.blocks([9, 4, 5, 30], group), rig.payload(number, group))
        others = [block for block in range(NUM_BLOCKS) if block not in {9, 4, 5, 30}]
        assert np.array_equal(rig.blocks(others, group), before[others])
    assert direct.engine.idle()


def test_a_shard_that_lacks_its_first_blocks_lands_without_them(make: Make) -> None:
    """What an earlier chunk left around the blocks, in the file or in the slot, is not carried on."""
    rig = make()
    direct = Direct(rig)
    image = rig.image(0, first=2)
    dirty = image.copy()
    block_bytes = rig.layout.groups[0].block_bytes
    dirty[HEADER_BYTES : HEADER_BYTES + 2 * block_bytes] = 0xAB
    dirty[HEADER_BYTES + 4 * block_bytes :] = 0xCD
    assert len(dirty) > HEADER_BYTES + 4 * block_bytes
    rig.put(FILE, 0, dirty)
    assert direct.load(1, [rig.chunk(0, FILE, [7, 8], first=2, host=5)]) == ((OK,), (OK,))
    assert np.array_equal(rig.host_bytes(5), image)
    assert direct.fetch(2, [rig.chunk(0, FILE, host=6)]) == (OK,)
    assert np.array_equal(rig.host_bytes(6), image)
    rig.kv[0][:] = 0xEE
    assert direct.load(3, [rig.chunk(0, FILE, [7, 8, 9], first=1, host=7)]) == ((CORRUPT,), (CORRUPT,))
    assert (rig.kv[0] == 0xEE).all()


@pytest.mark.parametrize("at", [0, 100, HEADER_BYTES, HEADER_BYTES + 4 * 4608 - 1])
def test_a_flipped_byte_lands_nowhere(make: Make, at: int) -> None:
    """Also one in a block that the load did not ask for: the image would be passed on."""
    rig = make()
    direct = Direct(rig)
    bad = rig.image(0)
    bad[at] ^= 0xFF
    rig.put(FILE, 0, bad)
    before = rig.blocks(range(NUM_BLOCKS))
    assert direct.load(1, [rig.chunk(0, FILE, [7, 8], first=1, host=5)]) == ((CORRUPT,), (CORRUPT,))
    assert direct.fetch(2, [rig.chunk(0, FILE, host=6)]) == (CORRUPT,)
    assert np.array_equal(rig.blocks(range(NUM_BLOCKS)), before)


def test_a_host_slot_that_holds_another_chunk_is_not_stored(make: Make) -> None:
    """And nothing is written: what lay there stays."""
    rig = make()
    direct = Direct(rig)
    rig.put(FILE, 2)
    rig.fill_host(1)
    assert direct.store(1, [rig.chunk(2, FILE, host=1)]) == (CORRUPT,)
    rig.host_bytes(2)[:] = 0
    assert direct.store(2, [rig.chunk(2, FILE, host=2)]) == (CORRUPT,)
    assert np.array_equal(rig.stored(FILE, 2), rig.image(2))


def test_numbers_that_do_not_fit_touch_nothing(make: Make) -> None:
    """Outside the slab, off the page, a group or location that is not there: FAILED, and told of as promotions too."""
    rig = make()
    direct = Direct(rig)
    rig.put(FILE, 0)
    before = rig.host.slot(0, rig.host.length_bytes).memory.copy()
    chunk = rig.chunk(0, FILE, host=0)
    bad = [
        replace(chunk, host_offset=-4096),
        replace(chunk, host_offset=8),
        replace(chunk, host_offset=rig.host.length_bytes - 4096),
        replace(chunk, group=7),
        replace(chunk, location=Location(9, 0, rig.slot_bytes)),
        replace(chunk, location=Location(FILE, 0, 4096)),
        replace(chunk, block_ids=np.array([NUM_BLOCKS], dtype=np.int32)),
    ]
    assert direct.fetch(1, bad) == (FAILED,) * 7
    assert direct.store(2, bad) == (FAILED,) * 7
    assert np.array_equal(rig.host.slot(0, rig.host.length_bytes).memory, before)
    assert direct.load(3, [replace(chunk, host_offset=None), chunk]) == ((FAILED, OK), (OK,))


class NoHostMemory(CopyMover):
    """Takes the engine's own memory, one region, and no more."""

    regions = 0

    def register_memory(self, region: MemoryRegion) -> MemoryId:
        self.regions += 1
        if self.regions > 1:
            raise MoverError("no more")
        return super().register_memory(region)


def test_a_mover_that_cannot_have_the_host_memory_serves_all_else(make: Make) -> None:
    rig = make(NoHostMemory())
    direct = Direct(rig)
    rig.put(FILE, 0)
    rig.fill_host(1)
    assert direct.fetch(1, [rig.chunk(0, FILE, host=0)]) == (FAILED,)
    assert direct.store(2, [rig.chunk(1, FILE, host=1)]) == (FAILED,)
    direct.engine.submit_load(3, [rig.chunk(0, FILE, [1, 2, 3, 4])])
    assert direct.ended(3) == (OK,)
    assert direct.load(4, [rig.chunk(0, FILE, [5, 6, 7, 8], host=0)]) == ((OK,), (FAILED,)), "served, and not kept"


def test_no_staging_is_needed_for_host_slots(make: Make) -> None:
    """All of it is held by loads that hang; images go out and come back, and KV blocks are served, all the same."""
    mover = FaultyMover(CopyMover(), [Fault(n, FaultKind.STUCK, op=Op.READ) for n in range(2)])
    rig = make(mover, staging_slots=2)
    direct = Direct(rig)
    rig.put(FILE, 0)
    rig.fill_host(1)
    direct.engine.submit_load(1, [rig.chunk(0, FILE, [1, 2, 3, 4])] * 3)
    until(lambda: mover.submitted.count(Op.READ) == 2)
    assert direct.store(2, [rig.chunk(1, FILE, host=1)]) == (OK,)
    assert direct.fetch(3, [rig.chunk(0, FILE, host=3)]) == (OK,)
    direct.engine.submit_store(5, [rig.chunk(4, FILE, [1, 2, 3, 4])])
    mover.release()
    assert direct.ended(1) == (OK,) * 3
    assert direct.ended(5) == (OK,)


@pytest.mark.parametrize("kind", ["tree", "objects"])
def test_files_and_objects_of_their_own(tmp_path: Path, kind: str) -> None:
    """Stored whole, fetched whole; one that is gone or cut short is no promotion, though the mover does not tell."""
    mover: Mover = ObjectFiles(tmp_path / "o") if kind == "objects" else CopyMover()
    link = objects() if kind == "objects" else tree(tmp_path / "t")
    root = tmp_path / ("o" if kind == "objects" else "t")
    host = make_host(1 << 16)
    rig = Rig.make(tmp_path, "per_layer", mover, link=link, host=host)
    try:
        assert rig.store(1, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)
        wanted = rig.bytes_of([1, 2, 3, 4])
        chunk = replace(rig.chunk(0, []), host_offset=0)
        engine = rig.engine

        def fetch(job_id: int) -> tuple[Outcome, ...]:
            engine.submit_background(job_id, [chunk], WorkKind.FETCH)
            return rig.collect(job_id).outcomes

        assert fetch(2) == (OK,)
        image = host.slot(0, rig.layout.slot_bytes(0)).memory
        assert image[HEADER_BYTES:][: len(wanted)].tobytes() == wanted
        (path,) = [path for path in root.rglob("*") if path.is_file()]
        raw = path.read_bytes()
        path.unlink()
        engine.submit_background(3, [chunk], WorkKind.WRITE_THROUGH)
        assert rig.collect(3).outcomes == (OK,)
        assert path.read_bytes() == raw
        path.write_bytes(raw[: len(raw) // 2])
        assert fetch(4)[0] in {FAILED, CORRUPT}
        path.unlink()
        assert fetch(5) == (FAILED,)
        rig.wipe(0xEE)
        path.write_bytes(raw)
        engine.submit_load(6, [replace(rig.chunk(0, [5, 6, 7, 8]), host_offset=0)])
        assert rig.collect(6).outcomes == (OK,)
        assert rig.bytes_of([5, 6, 7, 8]) == wanted
    finally:
        rig.close()
        host.close()


def test_an_engine_without_host_memory_says_so(tmp_path: Path) -> None:
    rig = Rig.make(tmp_path)
    try:
        chunk = replace(rig.chunk(0, [1, 2, 3, 4]), host_offset=0)
        rig.engine.submit_load(1, [chunk])
        assert rig.collect(1).outcomes == (FAILED,)
        assert rig.engine.promotions == {1: (FAILED,)}
        assert rig.store(2, [chunk]) == (FAILED,)
    finally:
        rig.close()
