"""Proves of every medium and every layout: chunks come back bit for bit, whole and in parts, and nothing else changes;
no byte that differs from what was stored reaches a KV block; and blocks may be overwritten as soon as ``wait`` returns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.engine.staging import host_pool
from nixl_offload.errors import MoverError
from nixl_offload.movers.base import Mover
from nixl_offload.movers.select import make_mover
from nixl_offload.types import Outcome
from tests.unit.engine_rig import CHUNK_BLOCKS, NUM_BLOCKS, SHAPES, MemoryRig, Rig, opened
from tests.unit.link_rig import shards, tree

OK, FAILED, CORRUPT, DROPPED = Outcome.OK, Outcome.FAILED, Outcome.CORRUPT, Outcome.DROPPED
KEYS = ChunkKeys([os.urandom(32)])
MEDIA = [
    *("memory", "memory, always", "signed tree, posix_aio"),
    *(f"{medium}, {mover}" for medium in ("slab", "tree") for mover in ("copy", "posix_aio", "posix_uring")),
]
AnyRig = Rig | MemoryRig
Make = Callable[..., AnyRig]


def real_mover(name: str) -> Mover:
    """Skips the test if this machine does not have the mover."""
    mover = make_mover(name)
    try:
        pool = host_pool(slot_bytes=4096, budget_bytes=8192)
        mover.unregister_memory(mover.register_memory(pool.region))
    except MoverError as error:
        mover.close()
        pytest.skip(str(error))
    return mover


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    def build(medium: str, shape: str, **options: Any) -> AnyRig:
        kind, _, how = medium.partition(", ")
        if kind == "memory":
            return MemoryRig(shape, **({"verify": "always"} if how else {}), **options)
        options |= {"link": tree(tmp_path / "tree")} if "tree" in kind else {}
        options |= {"keys": KEYS} if "signed" in kind else {}
        return Rig(tmp_path, shape, real_mover(how), **options)

    with opened(build) as make:
        yield make


def image(rig: AnyRig, number: int, directory: Path) -> npt.NDArray[np.uint8]:
    """A writable view of the bytes of a stored chunk."""
    if isinstance(rig, MemoryRig):
        return rig.memory(number)
    if rig.slab is not None:
        stored = np.memmap(rig.slab.path, dtype=np.uint8, mode="r+")
        return stored[rig.location(number).offset :][: rig.location(number).slot_bytes]
    (path,) = [path for path in shards(directory / "tree") if path.name.startswith(rig.key(number).hex())]
    return np.memmap(path, dtype=np.uint8, mode="r+")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("medium", MEDIA)
def test_chunks_come_back_into_other_blocks(make: Make, medium: str, shape: str) -> None:
    """All groups in one job, from scattered blocks into others, by an engine that did not store them."""
    rig = make(medium, shape)
    groups = range(len(rig.shape.groups))
    sources, targets = [[7, 8, 9, 10], [39, 0, 20, 3]], [[30, 12, 13, 5], [25, 26, 27, 28]]
    wanted = {(n, g): rig.bytes_of(sources[n], g) for n in range(2) for g in groups}
    stores = [rig.chunk(2 * g + n, sources[n], group=g) for n in range(2) for g in groups]
    assert set(rig.store(1, stores)) == {OK}
    assert rig.collect(1).bytes_moved == sum(map(len, wanted.values()))
    if isinstance(rig, Rig):
        rig.close()
        rig = make(medium, shape, seed=2)
    for group in groups:
        rig.wipe(0xEE)
        loads = [rig.chunk(2 * group + n, targets[n], group=group) for n in range(2)]
        assert rig.load(2 + group, loads) == (OK, OK)
        for n in range(2):
            assert rig.bytes_of(targets[n], group) == wanted[n, group]
        untouched = sorted(set(range(NUM_BLOCKS)) - set(targets[0]) - set(targets[1]))
        assert set(rig.bytes_of(untouched, group)) == {0xEE}
    assert rig.collect(2).errors == ()
    assert rig.engine.idle()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("medium", ["memory", "slab, copy", "signed tree, copy"])
def test_any_part_of_a_chunk_can_be_loaded(make: Make, medium: str, shape: str) -> None:
    """Loads that begin and end anywhere inside a chunk touch exactly their blocks."""
    rig = make(medium, shape)
    source = [3, 1, 4, 15]
    whole = rig.bytes_of(source)
    block_bytes = rig.layout.groups[0].block_bytes
    assert rig.store(0, [rig.chunk(5, source)]) == (OK,)
    parts = [(first, count) for first in range(CHUNK_BLOCKS) for count in range(1, CHUNK_BLOCKS - first + 1)]
    for job, (first, count) in enumerate(parts, start=1):
        rig.wipe(0xEE)
        blocks = list(range(20, 20 + 2 * count, 2))
        assert rig.load(job, [rig.chunk(5, blocks, first=first)]) == (OK,)
        assert rig.bytes_of(blocks) == whole[first * block_bytes : (first + count) * block_bytes]
        assert set(rig.bytes_of(sorted(set(range(NUM_BLOCKS)) - set(blocks)))) == {0xEE}


@pytest.mark.parametrize("shape", ["mla", "packed_blocks", "direct_blocks"])
@pytest.mark.parametrize("medium", ["memory", "slab, copy", "tree, copy", "signed tree, copy"])
def test_a_chunk_stored_from_its_middle_serves_its_tail_only(
    make: Make, tmp_path: Path, medium: str, shape: str
) -> None:
    """A sliding window stores a tail. Its head was never there: asking for it is CORRUPT and touches nothing. What an
    earlier chunk left there is not stored.
    """
    rig = make(medium, shape, **({} if medium == "memory" else {"staging_slots": 2}))
    for number in range(4):
        assert rig.store(number, [rig.chunk(number, [1, 2, 3, 4])]) == (OK,)
    wanted = rig.bytes_of([11, 12])
    if isinstance(rig, MemoryRig):
        rig.memory(0)[:] = 0xAB
    assert rig.store(4, [rig.chunk(0, [11, 12], first=2)]) == (OK,)
    block_bytes, stored = rig.layout.groups[0].block_bytes, image(rig, 0, tmp_path)
    if shape == "mla":  # otherwise whole pages of the head would not be written at all
        assert not stored[HEADER_BYTES : HEADER_BYTES + 2 * block_bytes].any()
        assert not stored[HEADER_BYTES + CHUNK_BLOCKS * block_bytes : rig.layout.slot_bytes(0)].any()
    rig.wipe(0xEE)
    assert rig.load(5, [rig.chunk(0, [20, 21], first=2)]) == (OK,)
    assert rig.bytes_of([20, 21]) == wanted
    rig.wipe(0xEE)
    assert rig.load(6, [rig.chunk(0, [20, 21, 22], first=1)]) == (CORRUPT,)
    if not rig.shape.direct or medium != "slab, copy":
        assert set(rig.bytes_of(range(NUM_BLOCKS))) <= {0xEE, 0}


@pytest.mark.parametrize("shape", ["per_layer", "two_groups", "direct_blocks"])
@pytest.mark.parametrize("medium", ["memory, always", "slab, copy", "signed tree, copy"])
def test_a_flipped_bit_anywhere_is_corrupt(make: Make, tmp_path: Path, medium: str, shape: str) -> None:
    """Header and payload: 60 positions from a fixed seed, and the edges. Packed blocks stay untouched."""
    rig = make(medium, shape)
    assert rig.store(0, [rig.chunk(2, [1, 2, 3, 4])]) == (OK,)
    stored = image(rig, 2, tmp_path)
    used = HEADER_BYTES + CHUNK_BLOCKS * rig.layout.groups[0].block_bytes
    places = {0, 7, 8, HEADER_BYTES - 1, HEADER_BYTES, used - 1}
    places |= {int(place) for place in np.random.default_rng(3).integers(0, used, 54)}
    rig.wipe(0xEE)
    for job, place in enumerate(sorted(places), start=1):
        stored[place] ^= 0x10
        assert rig.load(job, [rig.chunk(2, [5, 6, 7, 8])]) == (CORRUPT,), place
        stored[place] ^= 0x10
    is_direct = rig.shape.direct and medium == "slab, copy"
    assert set(rig.bytes_of(range(NUM_BLOCKS))) <= ({0xEE, 0} if is_direct else {0xEE})
    assert rig.load(999, [rig.chunk(2, [5, 6, 7, 8])]) == (OK,)


@pytest.mark.parametrize("medium", ["memory", "slab, copy"])
def test_swapped_slots_and_foreign_shards_are_corrupt(
    make: Make, medium: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The right bytes of the wrong key, and the right key of another namespace, group or geometry."""
    rig = make(medium, "shared_tensors")
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4]), rig.chunk(1, [5, 6, 7, 8])]) == (OK, OK)
    rig.wipe(0xEE)
    swapped = [rig.chunk(0, [10, 11, 12, 13], slot=1), rig.chunk(1, [14, 15, 16, 17], slot=0)]
    assert rig.load(1, swapped) == (CORRUPT, CORRUPT)
    assert "A stored chunk was refused and will be recomputed" in caplog.text
    assert rig.load(2, [rig.chunk(0, [10, 11, 12, 13], group=1)]) == (CORRUPT,)
    assert rig.load(3, [rig.chunk(7, [10, 11, 12, 13])])[0] in {CORRUPT, FAILED}
    assert set(rig.bytes_of(range(NUM_BLOCKS))) == {0xEE}
    options: dict[str, Any] = {"host": rig.host} if isinstance(rig, MemoryRig) else {}
    stranger = make(medium, "shared_tensors", namespace=bytes(32), **options)
    stranger.wipe(0xEE)
    assert stranger.load(0, [stranger.chunk(0, [1, 2, 3, 4])]) == (CORRUPT,)
    assert set(stranger.bytes_of(range(NUM_BLOCKS))) == {0xEE}


@pytest.mark.parametrize(
    ("medium", "shape"), [("memory", "per_layer"), ("slab, copy", "per_layer"), ("slab, copy", "direct_blocks")]
)
def test_blocks_overwritten_after_wait_do_not_change_what_was_stored(make: Make, medium: str, shape: str) -> None:
    """A block reused before its store had read it: wrong output after a few hundred requests. Chunks that ``wait`` gave
    up are DROPPED, never stored with later bytes.
    """
    rig = make(medium, shape, **({} if medium == "memory" else {"staging_slots": 4}))
    rng = np.random.default_rng(5)
    stored = 0
    for round_ in range(60):
        for rows in rig.kv:
            rows[:] = rng.integers(0, 256, rows.shape, dtype=np.uint8)
        wanted = [rig.bytes_of(range(4 * n, 4 * n + 4)) for n in range(6)]
        rig.engine.submit_store(2 * round_, [rig.chunk(n, range(4 * n, 4 * n + 4)) for n in range(6)])
        rig.engine.wait({2 * round_})
        rig.wipe(0xDD)
        outcomes = rig.collect(2 * round_).outcomes
        assert set(outcomes) <= {OK, DROPPED}
        good = [n for n in range(6) if outcomes[n] is OK]
        assert rig.load(2 * round_ + 1, [rig.chunk(n, range(4 * n, 4 * n + 4)) for n in good]) == (OK,) * len(good)
        for n in good:
            assert rig.bytes_of(range(4 * n, 4 * n + 4)) == wanted[n]
        stored += len(good)
    assert stored > 60


@pytest.mark.parametrize("medium", ["memory", "slab, copy", "slab direct"])
def test_numbers_that_do_not_fit_fail_their_chunk_only(make: Make, medium: str) -> None:
    """Block ids outside the cache must never become addresses, and locations outside the tier never be touched."""
    rig = make("slab, copy", "direct_blocks") if medium == "slab direct" else make(medium, "per_layer")
    good = rig.chunk(0, [1, 2, 3, 4])
    bad = [
        rig.chunk(1, [1, 2, 3, NUM_BLOCKS]),
        rig.chunk(1, [-1, 2, 3, 4]),
        rig.chunk(1, []),
        rig.chunk(1, [1, 2, 3, 4, 5]),
        rig.chunk(1, [1, 2], first=3),
        rig.chunk(10**6, [5, 6, 7, 8]),
        *(rig.chunk(1, [1, 2, 3, 4]) for _ in range(5)),
    ]
    place = good.location
    changes = [{"slot_bytes": 4096}, {"tier": 3}, {"offset": -4096}, {"offset": 100}]
    for chunk, change in zip(bad[-5:], changes, strict=False):
        chunk.location = place._replace(**change)
    bad[-1].group = 9
    if medium != "memory":
        bad = [chunk for chunk in bad if chunk.location.offset not in (-4096, 100)]  # a file has such locations
    assert rig.store(1, [good, *bad, good]) == (OK, *(FAILED,) * len(bad), OK)
    assert rig.load(2, [good, *bad, good]) == (OK, *(FAILED,) * len(bad), OK)
    assert rig.store(3, [rig.chunk(1, [1, 2])]) == (FAILED,), "a store has to fill its chunk to the end"
