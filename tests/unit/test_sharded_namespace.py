"""The namespace of chunks that are cut by their KV heads: parallel sizes are no part of it, all else is."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from nixl_offload.chunk.shards import ONE_RANGE, GroupShards, LayerCut, ShardPlan
from nixl_offload.errors import NamespaceError
from nixl_offload.identity.namespace import (
    CommonFields,
    GroupFields,
    ShardedFields,
    make_namespace,
    manifest_fits,
)
from nixl_offload.tiers.inspect import NamespaceInfo
from tests.unit.shared_rig import key_of
from tests.unit.test_namespace import BASE, changed

FULL = GroupFields(group_id=0, tokens_per_block=16, slot_bytes=(1 << 20,) * 4)
LATENT = GroupFields(group_id=1, tokens_per_block=16, slot_bytes=(1 << 21, 0, 0, 0))
_COMMON: dict[str, Any] = {item.name: getattr(BASE, item.name) for item in fields(CommonFields)}
CUT = ShardedFields(**{**_COMMON, "groups": (FULL, LATENT)}, ranks=("ab",), shards=4)
SEPARATE = [field.name for field in fields(ShardedFields) if field.name not in ("groups", "shards", "layers")]


STAGED = replace(
    CUT,
    groups=(
        replace(FULL, slot_bytes=(1 << 20,) * 4 + (2 << 20,) * 4),
        replace(LATENT, slot_bytes=(0,) * 4 + LATENT.slot_bytes),
    ),
    shards=8,
    layers=(0, 16),
)
"""In the first of two ranges of layers there is none of the second group; the second has twice as many layers."""


def plan_of(tp: int, layers: LayerCut = ONE_RANGE) -> ShardPlan:
    """How an engine holds the shards of ``CUT``, or of ``STAGED``."""
    latent = GroupShards(1, 1, tp, (len(layers.begins) - 1,))
    return ShardPlan((GroupShards(4, 4 // tp, 1, tuple(range(len(layers.begins)))), latent), layers)


@pytest.mark.parametrize("name", SEPARATE)
def test_every_field_changes_the_digest(name: str) -> None:
    assert make_namespace(replace(CUT, **{name: changed(getattr(CUT, name))})).digest != make_namespace(CUT).digest


def test_the_digest_is_the_same_in_every_release_and_for_every_size() -> None:
    """A pinned value, as that of namespaces of ranks; what a rank holds of a chunk is no part of it."""
    pinned = "1532f25223ac2287a7ac2c964354b98c32a4feafecea4019e8eb20e51dbea138"
    for plan in (None, plan_of(1), plan_of(2)):
        assert make_namespace(CUT, plan).digest.hex() == pinned
        assert make_namespace(CUT, plan) == make_namespace(CUT)
    assert make_namespace(BASE).digest.hex() != pinned


def test_a_slot_has_room_for_all_that_a_rank_holds() -> None:
    namespace = make_namespace(CUT, plan_of(2))
    assert (namespace.slot_bytes(0), namespace.slot_bytes(1)) == (2 << 20, 1 << 21)
    assert (namespace.chunk_bytes(0), namespace.chunk_bytes(1)) == (4 << 20, 1 << 21)
    assert (namespace.holders(0), namespace.holders(1)) == ((0, 1, 2, 3), (0,))
    assert len(set(namespace.rank_digests)) == 4
    with pytest.raises(NamespaceError):
        namespace.rank_digest(4)


@pytest.mark.parametrize(
    ("stages", "held", "slots"),
    [
        ((range(2),), [], (3 << 21, 1 << 21)),
        ((range(1), range(1, 2)), [1, 1], (1 << 22, 1 << 21)),
        ((range(2), range(2, 2)), [2, 0], (3 << 21, 1 << 21)),
    ],
)
def test_ranges_of_layers_have_shards_of_their_own(
    stages: tuple[range, ...], held: list[int], slots: tuple[int, int]
) -> None:
    """Whoever holds how many of them; and a slot has room for what the fullest stage holds."""
    namespace = make_namespace(STAGED, plan_of(2, LayerCut((0, 16), stages)))
    assert namespace.stages == held
    assert make_namespace(STAGED).stages == []
    assert namespace.digest == make_namespace(STAGED).digest
    assert (namespace.slot_bytes(0), namespace.slot_bytes(1)) == slots
    assert (namespace.holders(0), namespace.holders(1)) == (tuple(range(8)), (4,))
    assert (namespace.chunk_bytes(0), namespace.chunk_bytes(1)) == (12 << 20, 1 << 21)
    manifest = json.loads(json.dumps(namespace.manifest()))
    info = NamespaceInfo(namespace.name, manifest)
    assert (info.ranks, info.details()["layers"]) == (8, "0 16")
    assert make_namespace(replace(STAGED, layers=(0, 15))).digest != namespace.digest


def test_the_manifest_says_what_the_namespace_is() -> None:
    manifest = json.loads(json.dumps(make_namespace(CUT).manifest()))
    assert not {"tp", "pp", "pcp", "dcp", "world_size", "kv_layout"} & set(manifest["fields"])
    assert manifest_fits(manifest, make_namespace(CUT).name)
    info = NamespaceInfo(make_namespace(CUT).name, manifest)
    assert (info.is_cut, info.ranks, info.holders(0), info.holders(1)) == (True, 4, [0, 1, 2, 3], [0])
    assert info.rank_digest(3) == make_namespace(CUT).rank_digest(3)
    assert info.why_no_shard(key_of(1, 1), 2) == "a chunk of KV group 1 has no shard 2"
    by_rank = make_namespace(BASE)
    assert not NamespaceInfo(by_rank.name, by_rank.manifest()).is_cut


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": ()},
        {"shards": 3},
        {"shards": 0},
        {"shards": True},
        {"shard_order": ""},
        {"layers": ()},
        {"layers": (1,)},
        {"layers": (0, 0)},
        {"layers": (0, 2, 1)},
        {"layers": (0, True)},
        {"layers": (0, 1, 2)},
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(NamespaceError):
        make_namespace(replace(CUT, **change))
