"""Proves that engines of any parallel size read chunks of an engine of another size, shard by shard, on every tier and
in moves between tiers; that replicas store once; and that the rank that holds a damaged shard finds the damage.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, reject, settings, strategies as st

from nixl_offload.catalog.catalog import MoveTicket
from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.chunk.shards import make_plan
from nixl_offload.engine.records import Act
from nixl_offload.errors import NotSupportedError
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.types import Key, Outcome
from tests.unit.fleet_rig import CHUNK_BLOCKS, MEMORY, SLAB, TREE, EngineRig, RankRig, key, ok
from tests.unit.link_rig import NAMESPACE_NAME, shards

CHUNKS = range(5)
Make = Callable[..., EngineRig]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    engines: list[EngineRig] = []

    def build(tp: int, **options: object) -> EngineRig:
        engines.append(EngineRig(tmp_path / "kv", tp, **options))  # type: ignore[arg-type]
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def moved(rank: RankRig, act: Act) -> int:
    """Payload bytes moved since the last call."""
    work = rank.chain.take_work()
    return 0 if work is None else work.payload_bytes[act]


def stored(engine: EngineRig, tier: int = TREE) -> EngineRig:
    engine.write(CHUNKS)
    assert ok([rank.store(CHUNKS, tier) for rank in engine.ranks])
    engine.wipe()
    return engine


@pytest.mark.parametrize("source", [None, MEMORY, SLAB])
def test_replicas_write_a_chunk_once_and_each_reads_it(make: Make, tmp_path: Path, source: int | None) -> None:
    """Four ranks with one head: one file a chunk in the directory, a slot each elsewhere."""
    engine = make(4, heads=1, wanted=1)
    if source is None:
        stored(engine)
    else:
        stored(engine, source)
        assert ok([rank.move(CHUNKS, source, TREE) for rank in engine.ranks])
    assert len(shards(tmp_path / "kv")) == len(CHUNKS)
    act = Act("store" if source is None else "write_through", TREE)
    writers = Counter(rank for n in CHUNKS for rank in range(4) if engine.plan.groups[0].writes(rank, key(n)))
    chunk_bytes = CHUNK_BLOCKS * engine.ranks[0].layout.groups[0].block_bytes
    assert [moved(rank, act) for rank in engine.ranks] == [writers[rank] * chunk_bytes for rank in range(4)]
    engine.wipe()
    assert ok([rank.load(CHUNKS, TREE) for rank in engine.ranks])
    assert engine.holds(CHUNKS)


STAGES = [(1, 2), (2, 1), (1, 1, 1), (3,)]


@settings(max_examples=12, deadline=None)
@given(
    heads=st.sampled_from([1, 2, 3, 4]),
    wanted=st.integers(1, 4),
    tps=st.tuples(*[st.integers(1, 4)] * 2),
    stages=st.tuples(*[st.sampled_from(STAGES)] * 2),
    source=st.sampled_from([None, MEMORY, SLAB]),
)
def test_stages_and_sizes_read_what_others_have_stored(
    heads: int, wanted: int, tps: tuple[int, int], stages: tuple[tuple[int, ...], ...], source: int | None
) -> None:
    """Layers are cut for three stages: so engines of every number of stages find the same shards, one for each range of
    heads in each range of layers, whoever wrote them, directly or by write-through.
    """
    try:
        _ = [make_plan(wanted, [[heads]], [[True]], tp) for tp in tps]
    except NotSupportedError:
        reject()
    with tempfile.TemporaryDirectory() as directory:
        for number, (tp, of_stages) in enumerate(zip(tps, stages, strict=True)):
            engine = EngineRig(Path(directory), tp, heads=heads, wanted=wanted, stages=of_stages, cut_for=(1, 1, 1))
            try:
                if number == 0:
                    stored(engine, TREE if source is None else source)
                    if source is not None:
                        assert ok([rank.move(CHUNKS, source, TREE) for rank in engine.ranks])
                    assert len(shards(Path(directory))) == 3 * engine.plan.groups[0].head_ranges * len(CHUNKS)
                else:
                    engine.wipe()
                    assert ok([rank.load(CHUNKS, TREE, promote=True) for rank in engine.ranks])
                    assert engine.holds(CHUNKS)
                    engine.wipe()
                    assert ok([rank.load(CHUNKS, TREE, first=2) for rank in engine.ranks])
                    assert engine.holds(CHUNKS, first=2)
                    engine.wipe()
                    assert ok([rank.load(CHUNKS, MEMORY) for rank in engine.ranks])
                    assert engine.holds(CHUNKS)
            finally:
                engine.close()


@pytest.mark.parametrize("tier", [MEMORY, SLAB])
def test_shards_of_other_sizes_lie_in_a_slot_one_after_the_other(make: Make, tier: int) -> None:
    """A rank with ranges of one and of two layers."""
    engine = stored(make(2, cut_for=(1, 2)), tier)
    assert len({rank.layout.slot_bytes(at) for rank in engine.ranks for at in range(4)}) == 2
    assert ok([rank.load(CHUNKS, tier) for rank in engine.ranks])
    assert engine.holds(CHUNKS)


def test_a_move_of_a_group_that_there_is_not_fails_alone(make: Make) -> None:
    rank = stored(make(1)).ranks[0]
    keys = key(0), Key(key(1)[:-4] + (7).to_bytes(4, "big"))
    places = tuple(tuple(rank.at(tier, n) for n in range(2)) for tier in (TREE, MEMORY))
    rank.chain.submit_moves(1 << 20, rank.chunks.of_moves(MoveTicket(1, keys, *places)), 2)
    assert rank.settle(1 << 20).outcomes == (Outcome.OK, Outcome.FAILED)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_damage_to_a_shard_is_found_by_the_rank_that_holds_it(make: Make, tmp_path: Path, tp: int) -> None:
    """A flipped byte, or a shard in place of another: CORRUPT on its rank; all other shards are loaded."""
    stored(make(1))
    root = tmp_path / "kv"
    flipped = root / shard_name(NAMESPACE_NAME, key(1), 2)
    content = bytearray(flipped.read_bytes())
    content[HEADER_BYTES + 100] ^= 1
    flipped.write_bytes(content)
    (root / shard_name(NAMESPACE_NAME, key(3), 0)).write_bytes(
        (root / shard_name(NAMESPACE_NAME, key(3), 1)).read_bytes()
    )
    (root / shard_name(NAMESPACE_NAME, key(4), 3)).unlink()
    engine = make(tp)
    bad = {1: (2, Outcome.CORRUPT), 3: (0, Outcome.CORRUPT), 4: (3, Outcome.FAILED)}
    for number, rank in enumerate(engine.ranks):
        rank.wipe()
        held = engine.plan.groups[0].held_by(number)
        wanted = [bad[n][1] if n in bad and bad[n][0] in held else Outcome.OK for n in CHUNKS]
        assert list(rank.load(CHUNKS, TREE)) == wanted
        assert all(rank.holds(n) for n in CHUNKS if wanted[n] is Outcome.OK)


@pytest.mark.parametrize("tp", [2, 4])
def test_replicas_have_one_copy_in_their_slabs(make: Make, tmp_path: Path, tp: int) -> None:
    """Each chunk is in one slab, in turn. Reads from another rank's slab are verified too."""
    engine = make(tp, heads=1, wanted=1, together=tp)
    engine.write(CHUNKS)
    assert ok([rank.store(CHUNKS, SLAB) for rank in engine.ranks[1:]]), "done with what others write"
    engine.wipe()
    assert engine.ranks[1].load([0], SLAB) == (Outcome.FAILED,), "the first rank has not written it"
    engine.write(CHUNKS)
    assert ok([engine.ranks[0].store(CHUNKS, SLAB)])
    slot_bytes, payload_bytes = engine.ranks[0].slot_bytes, CHUNK_BLOCKS * engine.ranks[0].layout.groups[0].block_bytes
    written = [len([n for n in CHUNKS if n % tp == rank]) for rank in range(tp)]
    assert [max(done.bytes_moved for done in rank.results.values()) for rank in engine.ranks] == [
        count * payload_bytes for count in written
    ]
    contents = [rank.slab.path.read_bytes() for rank in engine.ranks]
    assert [content.count(b"NIXLOFF1") for content in contents] == written
    engine.wipe()
    assert ok([rank.load(CHUNKS, SLAB) for rank in engine.ranks])
    assert engine.holds(CHUNKS)
    with engine.ranks[1].slab.path.open("r+b") as file:
        file.seek(HEADER_BYTES + 100)
        file.write(bytes([contents[1][HEADER_BYTES + 100] ^ 1]))
    for rank in engine.ranks:
        assert rank.load(CHUNKS, SLAB) == tuple(Outcome.CORRUPT if n == 1 else Outcome.OK for n in CHUNKS)
    assert slot_bytes * len(CHUNKS) > payload_bytes


@pytest.mark.parametrize("way", [(SLAB, TREE), (MEMORY, SLAB), (TREE, SLAB)])
def test_replicas_move_what_they_have_one_copy_of(make: Make, tmp_path: Path, way: tuple[int, int]) -> None:
    """From the slab that has the copy to the directory, and into slabs from memory or from the directory."""
    source, target = way
    engine = stored(make(4, heads=1, wanted=1, together=4), source)
    assert ok([rank.move(CHUNKS, source, target) for rank in engine.ranks])
    chunk_bytes = CHUNK_BLOCKS * engine.ranks[0].layout.groups[0].block_bytes
    assert sum(moved(rank, Act("write_through", target)) for rank in engine.ranks) == len(CHUNKS) * chunk_bytes
    assert ok([rank.load(CHUNKS, target) for rank in engine.ranks])
    assert engine.holds(CHUNKS)
    engine.wipe()
    if source != MEMORY:
        assert ok([rank.load(CHUNKS, SLAB, promote=True) for rank in engine.ranks])
        assert ok([rank.load(CHUNKS, MEMORY) for rank in engine.ranks])
        assert engine.holds(CHUNKS)
