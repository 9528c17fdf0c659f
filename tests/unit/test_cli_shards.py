"""Commands over chunks that are cut by their KV heads, in a slab and in a directory: they list shard by shard, and name
the damaged shard.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Final

import pytest
import yaml

from nixl_offload.chunk.header import slot_bytes
from nixl_offload.chunk.shards import cut_layers, make_plan
from nixl_offload.identity.namespace import SHARD_ORDER, GroupFields, Namespace, make_namespace
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.base import TierContext
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.tiers.slab.file import SlabFile, rank_file_name
from nixl_offload.tiers.slab.tier import SlabTier
from tests.contexts import context_of, slab_config
from tests.unit.fleet_rig import CHUNK_BLOCKS, HEAD_BYTES, LAYERS, SLAB, TREE, RankRig, bounds, key, layers_in, ok
from tests.unit.stored_rig import Cli, flip, namespace_of, put_manifest

CHUNKS: Final = range(5)
HEADS: Final = 4
CUT: Final = (1, LAYERS - 1)


def space_of(heads: int, tp: int, ranges: Sequence[int], stages: Sequence[int]) -> Namespace:
    """Return the namespace of an engine with ``tp`` ranks per stage. ``stages`` and ranges are numbers of layers."""
    cut = cut_layers(bounds(ranges), bounds(stages))
    assert cut is not None
    plan = make_plan(heads, [[heads]], [[True] * len(cut.begins)], tp, cut)
    sizes = [slot_bytes(CHUNK_BLOCKS, len(layers_in(cut, n)) * HEAD_BYTES) for n in range(len(cut.begins))]
    group = GroupFields(0, 16, tuple(size for size in sizes for _ in range(heads)))
    fields = replace(namespace_of("blue").fields, groups=(group,), blocks_per_chunk=CHUNK_BLOCKS, ranks=("ab",))
    return make_namespace(replace(fields, shards=plan.shards, layers=cut.begins, shard_order=SHARD_ORDER), plan)


class Stored:
    """A slab and a directory with the same chunks, and a config of both."""

    def __init__(self, root: Path, space: Namespace, heads: int = HEADS) -> None:
        plan = space.plan
        self.tree, self.file = root / "tree", root / "kv.yaml"
        self.tree.mkdir()
        paths = {"slab": root / "slab", "shared_dir": self.tree}
        tiers = [{"kind": kind, "path": str(path), "capacity": "64MiB"} for kind, path in paths.items()]
        self.file.write_text(yaml.safe_dump({"tiers": tiers}))
        tier = SlabTier.open(slab_config(root / "slab", 64 << 20), TierContext(0, space, plan.ranks))
        places = {number: tier.reserve(key(number), space.slot_bytes(0), []) for number in CHUNKS}
        self.offsets = {number: place.offset for number, place in places.items() if place is not None}
        self.place, self.slabs = tier.place, Path(tier.place.directory)
        for rank in range(plan.ranks):
            slots = tier.place.slots
            file = SlabFile(self.slabs / rank_file_name(rank), slots.rank_bytes, slots.extent_bytes)
            rig = RankRig(self.tree, plan, heads, rank, namespace=space, slab=file)
            if space.slot_replicas:
                rig.chunks.take_places(SLAB, slots)
            rig.offsets = self.offsets
            for number in CHUNKS:
                rig.write(number)
            assert ok([rig.store(CHUNKS, SLAB), rig.store(CHUNKS, TREE)])
            rig.close()
        for number in CHUNKS:
            tier.commit((key(number),))
        tier.close()
        store = TreeStore(str(self.tree))
        put_manifest(store, space)
        store.close()

    def shards(self, cli: Cli) -> set[tuple[int, str]]:
        """Return number and place of a chunk's shards, after verifying all of them."""
        assert cli("stat", self.file, key(1).hex(), "--json") == 0
        return {(shard["shard"], shard["place"]) for shard in cli.json["shards"]}


@pytest.mark.parametrize("ranges", [(LAYERS,), CUT])
def test_one_copy_of_replicas_is_listed_where_it_is(tmp_path: Path, cli: Cli, ranges: Sequence[int]) -> None:
    """Of four ranks in two pairs, each chunk once in a slab of each pair. With two ranges of layers each pair has two
    shards of it, one after the other.
    """
    space = space_of(2, 4, ranges, (LAYERS,))
    size, sizes = space.slot_bytes(0), space.fields.groups[0].slot_bytes[::2]
    stored = Stored(tmp_path, replace(space, slot_replicas={size: 2}), heads=2)
    assert cli("ls", stored.file) == 0
    assert cli.out.count(f"5 chunks in {10 * len(ranges)} shards") == 2
    assert cli("verify", stored.file) == 0
    places = [stored.place.slots.find(rank, stored.offsets[1], size) for rank in (0, 2)]
    assert [rank for rank, _ in places] == [1, 3]
    in_slab = {
        (shard, f"{stored.slabs / rank_file_name(rank)}@{offset + begin}")
        for shard, (begin, (rank, offset)) in enumerate(product([0, *sizes[:-1]], places))
    }
    assert in_slab < stored.shards(cli)
    flip(stored.slabs / rank_file_name(3), places[1][1] + 5000)
    assert cli("verify", stored.file) == 1


def test_pipeline_stages_hold_shards_of_their_own_sizes(tmp_path: Path, cli: Cli) -> None:
    """Four ranks, two in each stage, of one layer and of two: eight shards a chunk, each where its rank has it."""
    space = space_of(HEADS, 2, CUT, CUT)
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
    assert stored.shards(cli) == in_slab | in_tree
    flip(stored.slabs / rank_file_name(2), stored.offsets[2] + sizes[-1] + 5000)
    flip(stored.tree / shard_name(space.name, key(3), 6), 5000)
    assert cli("verify", stored.file) == 1
    assert "shard 5: " in cli.out
    assert "shard 6: " in cli.out
    manifest = json.loads((stored.slabs / "manifest.json").read_text())
    for held in ([[[0, 1]]], [[[0, -1]]], [[[99]]], [[[True]]], [[0]], [0], [], "12", 2, None):
        manifest["slab"]["held"] = held
        (stored.slabs / "manifest.json").write_text(json.dumps(manifest))
        assert cli("ls", stored.file) == 0, "anybody may write there"
        assert cli("verify", stored.file) == 1


@pytest.mark.parametrize("stages", [(LAYERS,), CUT])
def test_a_slab_of_other_stages_is_not_taken_for_ones_own(tmp_path: Path, stages: tuple[int, ...]) -> None:
    """Same namespace and same number of ranks, but their slots hold other shards."""
    found, size_bytes = [], 1 << 20
    for of_stages, tp in (((LAYERS,), 4), (CUT, 2), (stages, 4 // len(stages))):
        space = replace(space_of(HEADS, 2, CUT, CUT), plan=space_of(HEADS, tp, CUT, of_stages).plan)
        tier = SlabTier.open(slab_config(tmp_path, 64 << 20), context_of(space, [size_bytes], world_size=4))
        found.append(len(tier))
        if not len(tier):
            assert tier.reserve(key(1), size_bytes, []) is not None
            tier.commit((key(1),))
        tier.close()
    assert found == [0, 0, 1 if len(stages) == 2 else 0]
