"""Namespace: every field counts, nothing else does, and no two different engines share a digest."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from nixl_offload.errors import NamespaceError
from nixl_offload.namespace import GroupFields, NamespaceFields, digest_names, make_namespace

FULL = GroupFields(
    group_id=0,
    layer_count=32,
    layers_digest=digest_names([f"layers.{n}" for n in range(32)]),
    tokens_per_block=16,
    slot_bytes=1 << 20,
    spec="FullAttentionSpec(num_kv_heads=8, head_size=128)",
)
WINDOW = GroupFields(
    group_id=1,
    layer_count=1,
    layers_digest=digest_names(["layers.32"]),
    tokens_per_block=32,
    slot_bytes=1 << 19,
    spec="SlidingWindowSpec(num_kv_heads=8, head_size=128, sliding_window=4096)",
)
BASE = NamespaceFields(
    tenant="default",
    engine="vllm 0.33",
    platform="cuda:9.0",
    attention_backend="FLASH_ATTN",
    model="org/model",
    revision="main",
    model_digest="ab" * 32,
    dtype="bfloat16",
    kv_layout="BLHNC",
    tokens_per_block=32,
    blocks_per_chunk=16,
    tokens_per_hash=16,
    hash_algorithm="sha256",
    hash_seed="0",
    groups=(FULL, WINDOW),
    tp=2,
    pp=1,
    pcp=1,
    dcp=1,
    world_size=2,
)


def changed(value: Any) -> Any:
    return value + 1 if isinstance(value, int) else f"{value}x"


@pytest.mark.parametrize("name", [field.name for field in fields(NamespaceFields) if field.name != "groups"])
def test_every_field_changes_the_digest(name: str) -> None:
    other = replace(BASE, **{name: changed(getattr(BASE, name))})
    assert make_namespace(other).digest != make_namespace(BASE).digest


@pytest.mark.parametrize("name", [field.name for field in fields(GroupFields)])
@pytest.mark.parametrize("position", [0, 1])
def test_every_field_of_every_group_changes_the_digest(name: str, position: int) -> None:
    groups = list(BASE.groups)
    value = 7 if name == "group_id" else changed(getattr(groups[position], name))
    groups[position] = replace(groups[position], **{name: value})
    other = replace(BASE, groups=tuple(groups))
    assert make_namespace(other).digest != make_namespace(BASE).digest


def test_number_of_groups_changes_the_digest() -> None:
    assert make_namespace(replace(BASE, groups=(FULL,))).digest != make_namespace(BASE).digest


def test_the_order_of_groups_does_not_matter() -> None:
    assert make_namespace(replace(BASE, groups=(WINDOW, FULL))).digest == make_namespace(BASE).digest


def test_the_digest_is_the_same_in_every_release() -> None:
    """A pinned value: whoever changes it orphans every chunk in the field, and must raise format_version instead."""
    assert make_namespace(BASE).digest.hex() == "a2e33b2cebb6702220b9e51aaa3208ade2210454329f1df6731ff581617359f4"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"tenant": "a", "model": "bc"}, {"tenant": "ab", "model": "c"}),
        ({"tenant": 'a","model":"b', "model": "c"}, {"tenant": "a", "model": 'b","model":"c'}),
        ({"revision": "1"}, {"revision": "01"}),
        ({"tenant": "é"}, {"tenant": "e\u0301"}),
        ({"tp": 1, "pp": 12}, {"tp": 11, "pp": 2}),
        ({"revision": None}, {"revision": "null"}),
    ],
)
def test_no_field_can_pass_for_another(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert make_namespace(replace(BASE, **left)).digest != make_namespace(replace(BASE, **right)).digest


def test_layer_names_count_with_their_order_and_borders() -> None:
    digests = {
        digest_names(names) for names in (["a", "b"], ["b", "a"], ["ab"], ["a", "", "b"], ["a,b"], ['a","b'], [])
    }
    assert len(digests) == 7


def test_ranks_share_the_digest_but_not_the_rank_digest() -> None:
    namespace = make_namespace(BASE)
    digests = {namespace.rank_digest(rank) for rank in range(2)} | {namespace.digest}
    assert len(digests) == 3
    assert all(len(digest) == 32 for digest in digests)
    for rank in (-1, 2):
        with pytest.raises(NamespaceError, match=f"rank {rank} is outside the world of 2"):
            namespace.rank_digest(rank)


def test_the_name_holds_nothing_that_a_user_typed() -> None:
    name = make_namespace(replace(BASE, tenant="../../etc", model="a/b")).name
    assert len(name) == 32
    assert set(name) <= set("0123456789abcdef")


def test_the_manifest_is_plain_json_and_complete() -> None:
    manifest = json.loads(json.dumps(make_namespace(BASE).manifest()))
    assert manifest["namespace"] == make_namespace(BASE).digest.hex()
    assert set(manifest["fields"]) == {field.name for field in fields(NamespaceFields)}
    assert manifest["fields"]["groups"][1]["spec"].startswith("SlidingWindowSpec")


@pytest.mark.parametrize("name", [field.name for field in fields(NamespaceFields)])
@pytest.mark.parametrize("value", [True, 1.0, b"x", ["x"]])
def test_wrong_types_are_refused(name: str, value: Any) -> None:
    with pytest.raises(NamespaceError, match=rf"^namespace\.{name} must be "):
        make_namespace(replace(BASE, **{name: value}))


@pytest.mark.parametrize("field", fields(NamespaceFields), ids=lambda field: field.name)
def test_absence_is_allowed_only_where_it_is_a_value(field: Any) -> None:
    absent = replace(BASE, **{field.name: None})
    if "None" in field.type:
        assert make_namespace(absent).digest != make_namespace(BASE).digest
        return
    with pytest.raises(NamespaceError, match=rf"^namespace\.{field.name} must be "):
        make_namespace(absent)


@pytest.mark.parametrize("field", fields(NamespaceFields), ids=lambda field: field.name)
def test_empty_and_zero_are_refused_where_they_say_nothing(field: Any) -> None:
    value: Any = 0 if field.type == "int" else "" if "str" in field.type else ()
    with pytest.raises(NamespaceError, match=rf"^namespace\.{field.name} is "):
        make_namespace(replace(BASE, **{field.name: value}))


def test_group_ids_are_unique_and_groups_are_groups() -> None:
    with pytest.raises(NamespaceError, match=r"repeats a group id: \[0, 0\]"):
        make_namespace(replace(BASE, groups=(FULL, replace(WINDOW, group_id=0))))
    with pytest.raises(NamespaceError, match=r"namespace\.groups\[1\]\.layer_count is 0; allowed: 1 or more"):
        make_namespace(replace(BASE, groups=(FULL, replace(WINDOW, layer_count=0))))
    wrong: Any = ({"group_id": 0},)
    with pytest.raises(NamespaceError, match=r"namespace\.groups\[0\] must be GroupFields, not dict"):
        make_namespace(replace(BASE, groups=wrong))
