"""The commands over chunks that are cut by their KV heads, in a slab of two ranks with two shards each and in a
directory: what is there is listed shard by shard, and damage is found where it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Final

import pytest
import yaml

from nixl_offload.chunk.header import slot_bytes
from nixl_offload.chunk.shards import ShardPlan, cut_layers, make_plan
from nixl_offload.config import SlabConfig, parse_config
from nixl_offload.identity.namespace import CommonFields, GroupFields, Namespace, ShardedFields, make_namespace
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.base import TierContext
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.tiers.slab.file import SlabFile, rank_file_name
from nixl_offload.tiers.slab.tier import SlabTier
from tests.contexts import context_of
from tests.unit.fleet_rig import CHUNK_BLOCKS, HEAD_BYTES, LAYERS, SLAB, TREE, RankRig, bounds, key, layers_in, ok
from tests.unit.gc_rig import namespace_of, put_manifest
from tests.unit.stored_rig import Cli, flip

CHUNKS: Final = range(5)
HEADS: Final = 4
SHARD_BYTES: Final = slot_bytes(CHUNK_BLOCKS, LAYERS * HEAD_BYTES)
_COMMON: Final = {item.name: getattr(namespace_of("blue").fields, item.name) for item in fields(CommonFields)}


def space_of(stages: Sequence[int] = (LAYERS,)) -> Namespace:
    """Of an engine with two ranks in each stage of so many layers."""
    cut = cut_layers([(0, LAYERS)] if len(stages) == 1 else bounds((1, LAYERS - 1)), bounds(stages))
    assert cut is not None
    plan = make_plan(HEADS, [[HEADS]], [[True] * len(cut.begins)], 2, cut)
    assert isinstance(plan, ShardPlan)
    sizes = [slot_bytes(CHUNK_BLOCKS, len(layers_in(cut, n)) * HEAD_BYTES) for n in range(len(cut.begins))]
    group = GroupFields(0, 16, tuple(size for size in sizes for _ in range(HEADS)))
    common = {**_COMMON, "groups": (group,), "blocks_per_chunk": CHUNK_BLOCKS}
    return make_namespace(ShardedFields(**common, ranks=("ab",), shards=plan.shards, layers=cut.begins), plan)


SPACE: Final = space_of()


class Stored:
    """A slab and a directory with the same chunks, and a config of both."""

    def __init__(self, root: Path, space: Namespace = SPACE) -> None:
        plan = space.plan
        assert plan is not None
        slab = {"kind": "slab", "path": str(root / "slab"), "capacity": "64MiB"}
        tree = {"kind": "shared_dir", "path": str(root / "tree"), "capacity": "64MiB"}
        self.tree = root / "tree"
        self.tree.mkdir()
        self.file = root / "kv.yaml"
        self.file.write_text(yaml.safe_dump({"tiers": [slab, tree]}))
        config = parse_config({"tiers": [slab, tree]}).tiers[0]
        assert isinstance(config, SlabConfig)
        tier = SlabTier.open(config, TierContext(0, space, plan.ranks))
        places = {number: tier.reserve(key(number), space.slot_bytes(0), []) for number in CHUNKS}
        self.offsets = {number: place.offset for number, place in places.items() if place is not None}
        for rank in range(plan.ranks):
            path = Path(tier.place.directory) / rank_file_name(rank)
            file = SlabFile(path, tier.place.rank_bytes, tier.place.extent_bytes)
            rig = RankRig(self.tree, plan, HEADS, rank, namespace=space, slab=file)
            rig.offsets = self.offsets
            for number in CHUNKS:
                rig.write(number)
            assert ok([rig.store(CHUNKS, SLAB), rig.store(CHUNKS, TREE)])
            rig.close()
        for number in CHUNKS:
            tier.commit(key(number))
        tier.close()
        self.slabs = Path(tier.place.directory)
        store = TreeStore(str(self.tree))
        put_manifest(store, space)
        store.close()


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    return Stored(tmp_path)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


def shards_of(cli: Cli, file: Path) -> set[tuple[int, str]]:
    """Number and place of the shards of a chunk, all of which verify."""
    assert cli("stat", file, key(1).hex(), "--json", "--verify") == 0
    return {(shard["rank"], shard["place"]) for shard in cli.json["shards"] if shard["verified"]}


@pytest.mark.parametrize("ranges", [1, 2])
def test_one_copy_of_replicas_is_listed_where_it_is(tmp_path: Path, cli: Cli, ranges: int) -> None:
    """Of four ranks in two pairs, each chunk once in a slab of each pair: listed, verified.
    With two ranges of layers each pair has two shards of it, one after the other.
    """
    config, file = (
        parse_config({"tiers": [{"kind": "slab", "path": str(tmp_path / "slab"), "capacity": "64MiB"}]}),
        tmp_path / "kv.yaml",
    )
    file.write_text(yaml.safe_dump({"tiers": [{"kind": "slab", "path": str(tmp_path / "slab"), "capacity": "64MiB"}]}))
    cut = cut_layers([(0, LAYERS)] if ranges == 1 else bounds((1, LAYERS - 1)), [(0, LAYERS)])
    assert cut is not None
    plan = make_plan(2, [[2]], [[True] * ranges], 4, cut)
    assert isinstance(plan, ShardPlan)
    sizes = [slot_bytes(CHUNK_BLOCKS, len(layers_in(cut, n)) * HEAD_BYTES) for n in range(ranges)]
    group = GroupFields(0, 16, tuple(size for size in sizes for _ in range(2)))
    fields_of_two = replace(SPACE.fields, groups=(group,), shards=plan.shards, layers=cut.begins)
    space = make_namespace(fields_of_two, plan)
    space = replace(space, slot_replicas={space.slot_bytes(0): 2})
    assert isinstance(config.tiers[0], SlabConfig)
    size = space.slot_bytes(0)
    tier = SlabTier.open(config.tiers[0], TierContext(0, space, world_size=4))
    offsets = {}
    for number in CHUNKS:
        place = tier.reserve(key(number), size, [])
        assert place is not None
        offsets[number] = place.offset
        tier.commit(key(number))
    (tmp_path / "tree").mkdir()
    for rank in range(4):
        slab = SlabFile(
            Path(tier.place.directory) / rank_file_name(rank), tier.place.rank_bytes, tier.place.extent_bytes
        )
        rig = RankRig(tmp_path / "tree", plan, 2, rank, namespace=space, slab=slab)
        rig.chunks.take_places(SLAB, tier.place.slots)
        rig.offsets = offsets
        for number in CHUNKS:
            rig.write(number)
        assert ok([rig.store(CHUNKS, SLAB)])
        rig.close()
    assert tier.statistics().slots is not None
    tier.close()
    assert cli("ls", file) == 0
    assert f"5 chunks in {10 * ranges} shards" in cli.out
    assert cli("verify", file) == 0
    places = [tier.place.slots.find(rank, offsets[1], size) for rank in (0, 2)]
    assert [rank for rank, _ in places] == [1, 3]
    expected = {
        (shard, f"{Path(tier.place.directory) / rank_file_name(rank)}@{offset + begin}")
        for shard, (begin, (rank, offset)) in enumerate(product([0, *sizes[:-1]], places))
    }
    assert shards_of(cli, file) == expected
    flip(Path(tier.place.directory) / rank_file_name(3), places[1][1] + 5000)
    assert cli("verify", file) == 1


def test_pipeline_stages_hold_shards_of_their_own_sizes(tmp_path: Path, cli: Cli) -> None:
    """Four ranks, two in each stage, of one layer and of two: eight shards a chunk, each where its rank has it."""
    space = space_of((1, LAYERS - 1))
    stored, sizes = Stored(tmp_path, space), space.fields.groups[0].slot_bytes
    assert len({*sizes}) == 2
    assert cli("ls", stored.file) == 0
    assert cli.out.count(", shards 8, ") == 2
    assert cli.out.count("5 chunks in 40 shards") == 2
    assert cli("verify", stored.file) == 0
    in_slab = {
        (shard, f"{stored.slabs / rank_file_name(rank)}@{stored.offsets[1] + shard % 2 * sizes[shard]}")
        for shard, rank in enumerate((0, 0, 1, 1, 2, 2, 3, 3))
    }
    in_tree = {(shard, shard_name(space.name, key(1), shard)) for shard in range(8)}
    assert shards_of(cli, stored.file) == in_slab | in_tree
    flip(stored.slabs / rank_file_name(2), stored.offsets[2] + sizes[-1] + 5000)
    flip(stored.tree / shard_name(space.name, key(3), 6), 5000)
    assert cli("verify", stored.file) == 1
    assert "rank 5: " in cli.out
    assert "rank 6: " in cli.out
    manifest = json.loads((stored.slabs / "manifest.json").read_text())
    for held in ([[[0, 1]]], [[[0, -1]]], [[[99]]], [[[True]]], [[0]], [0], [], "12", 2, None):
        manifest["slab"]["held"] = held
        (stored.slabs / "manifest.json").write_text(json.dumps(manifest))
        assert cli("ls", stored.file) == 0, "whatever anybody writes there"
        assert cli("verify", stored.file) == 1


@pytest.mark.parametrize("stages", [(LAYERS,), (1, LAYERS - 1)])
def test_a_slab_of_other_stages_is_not_taken_for_ones_own(tmp_path: Path, stages: tuple[int, ...]) -> None:
    """Of the same namespace, and the same number of ranks: their slots hold other shards."""
    cut, config = bounds((1, LAYERS - 1)), {"kind": "slab", "path": str(tmp_path), "capacity": "64MiB"}
    (tier_config,) = parse_config({"tiers": [config]}).tiers
    assert isinstance(tier_config, SlabConfig)
    found = []
    for of_stages, tp in (((LAYERS,), 4), ((1, LAYERS - 1), 2), (stages, 4 // len(stages))):
        layers = cut_layers(cut, bounds(of_stages))
        assert layers is not None
        plan = make_plan(HEADS, [[HEADS]], [[True] * 2], tp, layers)
        assert isinstance(plan, ShardPlan)
        space = replace(space_of((1, LAYERS - 1)), plan=plan)
        size_bytes = 1 << 20
        tier = SlabTier.open(tier_config, context_of(space, [size_bytes], world_size=4))
        found.append(len(tier))
        if not len(tier):
            assert tier.reserve(key(1), size_bytes, []) is not None
            tier.commit(key(1))
        tier.close()
    assert found == [0, 0, 1 if len(stages) == 2 else 0]
