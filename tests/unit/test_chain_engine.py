"""Proves of the chain: a job is served by the tiers of its locations and put together again, and whole images go
between host slots and storage unchanged and verified. KV blocks are served from them, and each host slot to fill is
reported exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.engine.records import WorkKind
from nixl_offload.errors import MoverError
from nixl_offload.movers.base import MemoryId, MemoryRegion, Mover, Op
from nixl_offload.movers.threaded import CopyMover
from nixl_offload.types import Location, Outcome
from tests.contract.suites.faulty_mover import Fault, FaultKind, FaultyMover
from tests.unit.chain_rig import BUCKET, FILE, MEMORY, ChainRig, blocks_of, chain_rigs, make_host
from tests.unit.engine_rig import NUM_BLOCKS, SHAPES, Rig, until
from tests.unit.link_rig import object_files, objects, tree

OK, FAILED, CORRUPT, DROPPED = Outcome.OK, Outcome.FAILED, Outcome.CORRUPT, Outcome.DROPPED
Make = Callable[..., ChainRig]

make = pytest.fixture(chain_rigs)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_stored_once_is_served_by_every_tier_and_its_image_unchanged(make: Make, shape: str) -> None:
    """KV to memory, by write-through to the file, by relay to the bucket and back, by prefetch to memory, by promotion
    to memory and KV: byte for byte, in every layout and group, and nothing else is written.
    """
    rig = make(shape=shape)
    groups = range(len(rig.layout.groups))
    wanted = [rig.blocks(blocks_of(1 + group), group) for group in groups]

    def chunks(tier: int) -> list[Any]:
        return [rig.chunk(1 + group, tier, blocks_of(1 + group), group=group) for group in groups]

    assert set(rig.store(1, chunks(MEMORY))) == {OK}
    ways = [(MEMORY, FILE), (FILE, BUCKET), (BUCKET, MEMORY), (MEMORY, BUCKET), (BUCKET, FILE)]
    images: list[Any] = []
    for ticket, (source, target) in enumerate(ways, start=1):
        for group in groups:
            if target == MEMORY:
                rig.host_bytes(1 + group, group)[:] = 0xEE
            elif ticket > 1:
                rig.put(target, 1 + group, np.full(rig.slot_bytes, 0xEE, dtype=np.uint8))
        assert set(rig.moves(ticket, [rig.move(1 + group, source, target, group) for group in groups])) == {OK}
        for group in groups:
            there = rig.host_bytes(1 + group, group) if target == MEMORY else rig.stored(target, 1 + group, group)
            images.append(there.copy()) if ticket == 1 else None
            assert np.array_equal(there, images[group])
        rig.wipe()
        assert set(rig.load(10 + ticket, chunks(target))) == {OK}
        assert all(np.array_equal(rig.blocks(blocks_of(1 + group), group), wanted[group]) for group in groups)
    for group in groups:
        before, ids = rig.blocks(range(NUM_BLOCKS), group), [9, 4, 5, 30]
        promotion = rig.chunk(1 + group, BUCKET, ids, group=group, host=10 + group)
        assert rig.load(20 + group, [promotion], ticket=20 + group) == (OK,)
        assert rig.settle(20 + group).outcomes == (OK,)
        assert np.array_equal(rig.host_bytes(10 + group, group), images[group])
        assert np.array_equal(rig.blocks(ids, group), wanted[group])
        others = [block for block in range(NUM_BLOCKS) if block not in ids]
        assert np.array_equal(rig.blocks(others, group), before[others])
    assert rig.chain.idle()


def test_close_drains_moves_and_stores(make: Make) -> None:
    """Relays too, which need a step of this rank in between. Every outcome is reported."""
    rig = make(relay_slots=1)
    for number in range(6):
        rig.put(FILE, number)
        rig.fill_host(10 + number)
    rig.chain.submit_moves(1, [rig.move(number, FILE, BUCKET) for number in range(6)])
    rig.chain.submit_moves(2, [rig.move(10 + number, MEMORY, FILE) for number in range(6)])
    rig.chain.submit_store(3, [rig.chunk(20, FILE, blocks_of(0)), rig.chunk(21, BUCKET, blocks_of(1))])
    rig.chain.close(20.0)
    rig.poll()
    assert rig.settled[1].outcomes == rig.settled[2].outcomes == (OK,) * 6
    assert rig.results[3].outcomes == (OK, OK)
    assert rig.chain.idle()
    assert rig.load(4, [rig.chunk(0, FILE, blocks_of(0), host=0)], ticket=4) == (FAILED,), "what comes later fails"
    assert rig.settle(4).outcomes == (FAILED,)
    assert rig.moves(5, [rig.move(0, FILE, BUCKET), rig.move(10, MEMORY, FILE)]) == (FAILED, FAILED)


# -- never a wrong token --------------------------------------------------------------------------------------------


def test_a_shard_that_lacks_its_first_blocks_lands_without_them(make: Make) -> None:
    """Bytes of an earlier chunk around the blocks, in the file or in the slot, are not passed on."""
    rig = make()
    image = rig.image(0, first=2)
    dirty = image.copy()
    block_bytes = rig.layout.groups[0].block_bytes
    dirty[HEADER_BYTES : HEADER_BYTES + 2 * block_bytes] = 0xAB
    dirty[HEADER_BYTES + 4 * block_bytes :] = 0xCD
    rig.put(FILE, 0, dirty)
    assert rig.load(1, [rig.chunk(0, FILE, [7, 8], first=2, host=5)], ticket=1) == (OK,)
    assert rig.settle(1).outcomes == (OK,)
    assert np.array_equal(rig.host_bytes(5), image)
    assert rig.moves(2, [rig.move(0, FILE, MEMORY)]) == (OK,)
    assert np.array_equal(rig.host_bytes(0), image)
    rig.wipe(0xEE)
    assert rig.load(3, [rig.chunk(0, FILE, [7, 8, 9], first=1, host=7)], ticket=3) == (CORRUPT,)
    assert rig.settle(3).outcomes == (CORRUPT,)
    assert all((rows == 0xEE).all() for rows in rig.kv)


@pytest.mark.parametrize("at", [0, 100, HEADER_BYTES, HEADER_BYTES + 4 * 4608 - 1])
def test_a_flipped_byte_lands_nowhere(make: Make, at: int) -> None:
    """Also one in a block that the load did not ask for: the image would be passed on."""
    rig = make()
    bad = rig.image(0)
    bad[at] ^= 0xFF
    rig.put(FILE, 0, bad)
    before = rig.blocks(range(NUM_BLOCKS))
    assert rig.load(1, [rig.chunk(0, FILE, [7, 8], first=1, host=5)], ticket=1) == (CORRUPT,)
    assert rig.settle(1).outcomes == (CORRUPT,)
    assert rig.moves(2, [rig.move(0, FILE, MEMORY)]) == (CORRUPT,)
    assert rig.moves(3, [rig.move(0, FILE, BUCKET)]) == (CORRUPT,)
    assert np.array_equal(rig.blocks(range(NUM_BLOCKS)), before)


def test_a_host_slot_that_holds_another_chunk_is_not_stored(make: Make) -> None:
    """And nothing is written: the bytes there stay."""
    rig = make()
    rig.put(FILE, 2)
    rig.host_bytes(2)[:] = rig.image(1)
    assert rig.moves(1, [rig.move(2, MEMORY, FILE)]) == (CORRUPT,)
    rig.host_bytes(2)[:] = 0
    assert rig.moves(2, [rig.move(2, MEMORY, FILE)]) == (CORRUPT,)
    assert np.array_equal(rig.stored(FILE, 2), rig.image(2))


def test_numbers_that_do_not_fit_touch_nothing(make: Make) -> None:
    """Outside the slab, unaligned, an unknown group or location: FAILED, and reported for promotions too."""
    rig = make()
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
    for ticket, kind in enumerate((WorkKind.FETCH, WorkKind.WRITE_THROUGH), start=1):
        rig.chain.submit_background(ticket, bad, kind)
        assert rig.settle(ticket).outcomes == (FAILED,) * 7
    assert np.array_equal(rig.host.slot(0, rig.host.length_bytes).memory, before)
    assert rig.load(3, [replace(chunk, host_offset=None), chunk], ticket=3) == (FAILED, OK)
    assert rig.settle(3).outcomes == (OK,)


# -- movers and links -----------------------------------------------------------------------------------------------


class NoHostMemory(CopyMover):
    """Accepts one region, the engine's own memory."""

    regions = 0

    def register_memory(self, region: MemoryRegion) -> MemoryId:
        self.regions += 1
        if self.regions > 1:
            raise MoverError("no more")
        return super().register_memory(region)


def test_a_mover_that_cannot_have_the_host_memory_serves_all_else(make: Make) -> None:
    rig = make(NoHostMemory())
    rig.put(FILE, 0)
    rig.fill_host(1)
    assert rig.moves(1, [rig.move(0, FILE, MEMORY), rig.move(1, MEMORY, FILE)]) == (FAILED, FAILED)
    assert rig.load(3, [rig.chunk(0, FILE, [1, 2, 3, 4])]) == (OK,)
    assert rig.load(4, [rig.chunk(0, FILE, [5, 6, 7, 8], host=0)], ticket=4) == (OK,)
    assert rig.settle(4).outcomes == (FAILED,), "served, and not kept"


def test_no_staging_is_needed_for_host_slots(make: Make) -> None:
    """While hanging loads hold all staging, images still go out and come back, and KV blocks are served."""
    mover = FaultyMover(CopyMover(), [Fault(n, FaultKind.STUCK, op=Op.READ) for n in range(2)])
    rig = make(mover, staging_slots=2)
    rig.put(FILE, 0)
    rig.fill_host(1)
    rig.chain.submit_load(1, [rig.chunk(0, FILE, [1, 2, 3, 4])] * 3)
    until(lambda: mover.submitted.count(Op.READ) == 2)
    assert rig.moves(2, [rig.move(1, MEMORY, FILE), rig.move(0, FILE, MEMORY)]) == (OK, OK)
    rig.chain.submit_store(5, [rig.chunk(4, FILE, [1, 2, 3, 4])])
    mover.release()
    assert rig.collect(1).outcomes == (OK,) * 3
    assert rig.collect(5).outcomes == (OK,)


@pytest.mark.parametrize("kind", ["tree", "objects"])
def test_files_and_objects_of_their_own(tmp_path: Path, kind: str) -> None:
    """Stored whole, fetched whole. A missing or short one is not promoted, even if the mover does not notice."""
    mover: Mover = object_files(tmp_path / "o") if kind == "objects" else CopyMover()
    link = objects() if kind == "objects" else tree(tmp_path / "t")
    root = tmp_path / ("o" if kind == "objects" else "t")
    host = make_host(1 << 16)
    rig = Rig(tmp_path, "per_layer", mover, link=link, host=host)
    try:
        assert rig.store(1, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)
        wanted = rig.bytes_of([1, 2, 3, 4])
        chunk = replace(rig.chunk(0, []), host_offset=0)

        def move(number: int, kind: WorkKind) -> tuple[Outcome, ...]:
            rig.engine.submit_background(number, [chunk], kind)
            return rig.collect(number).outcomes

        assert move(2, WorkKind.FETCH) == (OK,)
        image = host.slot(0, rig.layout.slot_bytes(0)).memory
        assert image[HEADER_BYTES:][: len(wanted)].tobytes() == wanted
        (path,) = [path for path in root.rglob("*") if path.is_file()]
        raw = path.read_bytes()
        path.unlink()
        assert move(3, WorkKind.WRITE_THROUGH) == (OK,)
        assert path.read_bytes() == raw
        path.write_bytes(raw[: len(raw) // 2])
        assert move(4, WorkKind.FETCH)[0] in {FAILED, CORRUPT}
        path.unlink()
        assert move(5, WorkKind.FETCH) == (FAILED,)
        rig.wipe(0xEE)
        path.write_bytes(raw)
        assert rig.load(6, [replace(rig.chunk(0, [5, 6, 7, 8]), host_offset=0)]) == (OK,)
        assert rig.bytes_of([5, 6, 7, 8]) == wanted
    finally:
        rig.close()
        host.close()
