"""Namespace: every field counts, nothing else does, and no two different engines share a digest."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import fields, replace
from typing import Any

import pytest

from nixl_offload.chunk.shards import ONE_RANGE, GroupShards, LayerCut, ShardPlan
from nixl_offload.errors import NamespaceError
from nixl_offload.identity.namespace import (
    SHARD_ORDER,
    GroupFields,
    NamespaceFields,
    make_namespace,
    manifest_digest,
    manifest_fits,
    shard_digest,
)
from nixl_offload.tiers.inspect import NamespaceInfo

FULL = GroupFields(group_id=0, tokens_per_block=16, slot_bytes=(1 << 20, 3 << 19))
WINDOW = GroupFields(group_id=1, tokens_per_block=32, slot_bytes=(0, 1 << 19))
BASE = NamespaceFields(
    tenant="default",
    engine="vllm 0.33.0",
    platform="cuda:9.0",
    attention_backend="FLASH_ATTN",
    model="org/model",
    revision="main",
    weights="ab" * 32,
    dtype="bfloat16",
    tokens_per_block=32,
    blocks_per_chunk=16,
    tokens_per_hash=16,
    hash_algorithm="sha256",
    hash_seed="0",
    groups=(FULL, WINDOW),
    ranks=("ab", "cd"),
    shards=2,
    shard_order="BLHNC",
    settings={"model.max_model_len": 4096, "cache.sinks": True, "model.rope": None, "tp": 1, "pp": 2},
)
"""Of chunks that are not cut, on two pipeline stages."""


def changed(value: Any) -> Any:
    """Return another value of the same type, and of the same length if a length has a meaning of its own."""
    if isinstance(value, tuple):
        return (*value[:-1], changed(value[-1]))
    if isinstance(value, dict):
        return {**value, "model.max_model_len": 8192}
    return value + 1 if isinstance(value, int) else f"{value}x"


HEADS = GroupFields(group_id=0, tokens_per_block=16, slot_bytes=(1 << 20,) * 4)
LATENT = GroupFields(group_id=1, tokens_per_block=16, slot_bytes=(1 << 21, 0, 0, 0))
CUT = replace(BASE, groups=(HEADS, LATENT), ranks=("ab",), shards=4, shard_order=SHARD_ORDER, settings={"a": 1})

STAGED = replace(
    CUT,
    groups=(
        replace(HEADS, slot_bytes=(1 << 20,) * 4 + (2 << 20,) * 4),
        replace(LATENT, slot_bytes=(0,) * 4 + LATENT.slot_bytes),
    ),
    shards=8,
    layers=(0, 16),
)
"""Two ranges of layers: the first has no layer of the second group; the second has twice as many layers."""

NAMES = [field.name for field in fields(NamespaceFields)]
NOT_ALONE = ("groups", "shards", "layers")
"""Fields that must fit other fields."""


def digest(**changes: Any) -> str:
    return make_namespace(replace(BASE, **changes)).digest.hex()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_ALONE])
def test_every_field_changes_the_digest(name: str) -> None:
    assert digest(**{name: changed(getattr(BASE, name))}) != digest()


def test_every_setting_changes_the_digest_and_so_does_its_type() -> None:
    base = dict(BASE.settings)
    others: list[dict[str, Any]] = [
        {},
        {name: value for name, value in base.items() if name != "model.rope"},
        {**base, "cache.sinks": 1},
        {**base, "model.max_model_len": "4096"},
        {**base, "model.max_model_len": 4096.0},
        {**base, "model.new": 1},
    ]
    assert len({digest(settings=settings) for settings in [base, *others]}) == len(others) + 1


def test_only_the_order_of_ranks_matters() -> None:
    assert digest(settings=dict(reversed(BASE.settings.items()))) == digest(groups=(WINDOW, FULL)) == digest()
    assert digest(ranks=("cd", "ab")) != digest()


def test_every_field_of_every_group_changes_the_digest() -> None:
    others = [(FULL,)]
    for position, name in itertools.product((0, 1), (field.name for field in fields(GroupFields))):
        groups = [FULL, WINDOW]
        value = 7 if name == "group_id" else changed(getattr(groups[position], name))
        groups[position] = replace(groups[position], **{name: value})
        others.append((groups[0], groups[1]))
    assert len({digest(groups=groups) for groups in others} | {digest()}) == len(others) + 1


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"tenant": "a", "model": "bc"}, {"tenant": "ab", "model": "c"}),
        ({"tenant": 'a","model":"b', "model": "c"}, {"tenant": "a", "model": 'b","model":"c'}),
        ({"revision": "1"}, {"revision": "01"}),
        ({"tenant": "é"}, {"tenant": "e\u0301"}),
        ({"settings": {"tp": 1, "pp": 12}}, {"settings": {"tp": 11, "pp": 2}}),
        ({"revision": None}, {"revision": "null"}),
    ],
)
def test_no_field_can_pass_for_another(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert digest(**left) != digest(**right)


def test_the_manifest_is_plain_json_and_complete_and_the_name_holds_nothing_that_a_user_typed() -> None:
    manifest = json.loads(json.dumps(make_namespace(BASE).manifest()))
    assert manifest["namespace"] == make_namespace(BASE).digest.hex()
    assert set(manifest["fields"]) == {*NAMES} - {"layers"}, "which is left out if there is one range"
    assert manifest["fields"]["groups"][1] == {"group_id": 1, "tokens_per_block": 32, "slot_bytes": [0, 1 << 19]}
    assert manifest["fields"]["settings"] == dict(BASE.settings)
    name = make_namespace(replace(BASE, tenant="../../etc", model="a/b")).name
    assert len(name) == 32
    assert set(name) <= set("0123456789abcdef")


MAY_BE_NONE = ("attention_backend", "revision", "weights", "hash_seed")


@pytest.mark.parametrize("name", NAMES)
def test_what_says_nothing_is_refused(name: str) -> None:
    """A wrong field that went unnoticed would let foreign bytes in."""
    nothing = [] if name == "settings" else [type(getattr(BASE, name))()]
    for value in nothing if name in MAY_BE_NONE else [*nothing, None]:
        with pytest.raises(NamespaceError, match=rf"^namespace\.{name}"):
            digest(**{name: value})
    if name in MAY_BE_NONE:
        assert digest(**{name: None}) != digest()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shards": True}, "shards: Input should be a valid integer"),
        ({"settings": {"a": [1]}}, r"settings\.a"),
        ({"settings": {"a": float("nan")}}, r"settings\.a"),
        ({"settings": {"": 1}}, "settings"),
        ({"ranks": ("ab", "")}, r"ranks\.1"),
        ({"groups": (FULL, replace(WINDOW, group_id=0))}, r"groups repeats a group id: \[0, 0\]"),
        ({"groups": (FULL, replace(WINDOW, tokens_per_block=0))}, r"groups\.1\.tokens_per_block"),
        ({"groups": ({"group_id": 0},)}, r"groups\.0: Input should be an instance of GroupFields"),
        ({"groups": (FULL, replace(WINDOW, slot_bytes=(0, 0)))}, r"groups\[1\]\.slot_bytes is 0 for every shard"),
        ({"groups": (FULL, replace(WINDOW, slot_bytes=(1,)))}, r"groups\[1\]\.slot_bytes has 1 sizes for 2 shards"),
        ({"groups": (FULL, replace(WINDOW, slot_bytes=(-1, 1)))}, r"groups\.1\.slot_bytes\.0"),
        ({"groups": (FULL, replace(WINDOW, slot_bytes=(True, 1)))}, r"groups\.1\.slot_bytes\.0"),
        *(({"layers": layers}, "layers must be first layers") for layers in ((1,), (0, 0), (0, 2, 1))),
        ({"layers": (0, True)}, r"layers\.1"),
        ({"layers": (0, 1, 2)}, "shards is 2, no multiple of 3 ranges"),
    ],
)
def test_wrong_values_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(NamespaceError, match=rf"^namespace\.{words}"):
        digest(**changes)


def test_names_of_files_that_are_no_utf8_count() -> None:
    names = [os.fsdecode(name) for name in (b"model-\xff", b"model-\xfe")]
    assert digest(model=names[0]) != digest(model=names[1])
    assert digest(settings={"path": names[0]}) != digest(settings={"path": names[1]})
    manifest = json.loads(json.dumps(make_namespace(replace(BASE, model=names[0])).manifest()))
    assert manifest_digest(manifest) == make_namespace(replace(BASE, model=names[0])).digest


def test_a_manifest_fits_the_namespace_that_its_own_fields_make_and_no_other() -> None:
    """Anybody who can write to a bucket can write a manifest, so its name and its own claims count for nothing."""
    namespace, other = make_namespace(BASE), make_namespace(replace(BASE, tenant="other"))
    manifest = json.loads(json.dumps(namespace.manifest()))
    assert manifest_fits(manifest, namespace.name)
    assert manifest_digest(manifest) == namespace.digest
    assert not manifest_fits({**manifest, "namespace": other.digest.hex()}, other.name)
    assert not manifest_fits({**manifest, "fields": {**manifest["fields"], "tenant": "other"}}, namespace.name)
    nan = {"fields": {"tp": float("nan"), "ranks": []}}
    for nonsense in (None, [], "x", {}, {"fields": []}, {"fields": {"a": {1, 2}}}, nan):
        assert manifest_digest(nonsense) is None
        assert manifest_fits(nonsense, namespace.name) is False


def test_a_release_finds_what_an_earlier_one_has_stored() -> None:
    """Pinned: the digests of a namespace and of a shard are in names and headers that outlive any server. Raise
    format_version instead of changing them.
    """
    namespace = make_namespace(BASE)
    assert namespace.digest.hex() == "b37558c1d479d7213e634fa03279096443d45427d6f698325ff10974540ac151"
    assert shard_digest(namespace.digest, 1).hex() == "179ea0f5b7189afcf3bf28649f5c4409dbc71737efb8df4d20d9a0e267188310"


# Chunks that are cut


def plan_of(tp: int, layers: LayerCut = ONE_RANGE) -> ShardPlan:
    """The plan of an engine for the shards of ``CUT``, or of ``STAGED``."""
    latent = GroupShards(1, 1, tp, (len(layers.begins) - 1,))
    return ShardPlan((GroupShards(4, 4 // tp, 1, tuple(range(len(layers.begins)))), latent), layers)


ONE_STAGE, TWO_STAGES, LAST_EMPTY = (range(2),), (range(1), range(1, 2)), (range(2), range(2, 2))


@pytest.mark.parametrize(
    ("of", "plan", "held", "slots", "chunks"),
    [
        # A stage with fewer layers has smaller shards, a stage without layers none.
        (BASE, None, [[[0], [1]], [[], [1]]], (3 << 19, 1 << 19), (5 << 19, 1 << 19)),
        (CUT, plan_of(1), [[[0, 1, 2, 3]], [[0]]], (4 << 20, 1 << 21), (4 << 20, 1 << 21)),
        (CUT, plan_of(2), [[[0, 1], [2, 3]], [[0], [0]]], (2 << 20, 1 << 21), (4 << 20, 1 << 21)),
        *(
            (STAGED, plan_of(2, LayerCut((0, 16), stages)), held, slots, (12 << 20, 1 << 21))
            for stages, held, slots in (
                (ONE_STAGE, [[[0, 1, 4, 5], [2, 3, 6, 7]], [[4], [4]]], (3 << 21, 1 << 21)),
                (TWO_STAGES, [[[0, 1], [2, 3], [4, 5], [6, 7]], [[], [], [4], [4]]], (1 << 22, 1 << 21)),
                (LAST_EMPTY, [[[0, 1, 4, 5], [2, 3, 6, 7], [], []], [[4], [4], [], []]], (3 << 21, 1 << 21)),
            )
        ),
    ],
)
def test_a_slot_has_room_for_all_that_a_rank_holds(
    of: NamespaceFields, plan: ShardPlan | None, held: list[Any], slots: tuple[int, int], chunks: tuple[int, int]
) -> None:
    """Which ranks hold which shards is no part of the digest."""
    namespace = make_namespace(of, plan)
    assert (namespace, namespace.digest) == (make_namespace(of), make_namespace(of).digest)
    assert namespace.held() == held
    info = NamespaceInfo(namespace.name, json.loads(json.dumps(namespace.manifest())))
    for group in range(2):
        numbers = {number for shards in held[group] for number in shards}
        assert (namespace.slot_bytes(group), namespace.chunk_bytes(group)) == (slots[group], chunks[group])
        assert set(namespace.shards(group)) == set(info.shards_of(group)) == numbers
        assert sum(namespace.shard_bytes(group, number) for number in numbers) == chunks[group]
    assert info.shards == of.shards
    for ask in (namespace.slot_bytes, namespace.shards, namespace.chunk_bytes):
        with pytest.raises(LookupError):
            ask(7)


def test_commands_know_a_namespace_by_its_manifest() -> None:
    namespace = make_namespace(STAGED)
    info = NamespaceInfo(namespace.name, json.loads(json.dumps(namespace.manifest())))
    assert info.details()["layers"] == "0 16"
    assert info.shard_digest(3) == shard_digest(namespace.digest, 3)
    assert make_namespace(replace(STAGED, layers=(0, 15))).digest != namespace.digest
