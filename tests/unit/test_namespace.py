"""Namespace: every field counts, nothing else does, and no two different engines share a digest."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from nixl_offload.errors import NamespaceError
from nixl_offload.identity.namespace import (
    GroupFields,
    NamespaceFields,
    make_namespace,
    manifest_digest,
    manifest_fits,
)

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
    kv_layout="BLHNC",
    tokens_per_block=32,
    blocks_per_chunk=16,
    tokens_per_hash=16,
    hash_algorithm="sha256",
    hash_seed="0",
    groups=(FULL, WINDOW),
    ranks=("ab", "cd"),
    settings={"model.max_model_len": 4096, "cache.sinks": True, "model.rope": None},
    tp=1,
    pp=2,
    pcp=1,
    dcp=1,
    world_size=2,
)


def changed(value: Any) -> Any:
    """Return another value of the same type, and of the same length where that says something else."""
    if isinstance(value, tuple):
        return (*value[:-1], changed(value[-1]))
    if isinstance(value, dict):
        return {**value, "model.max_model_len": 8192}
    return value + 1 if isinstance(value, int) else f"{value}x"


NAN = {"fields": {"tp": float("nan"), "ranks": []}}
SEPARATE = [field.name for field in fields(NamespaceFields) if field.name not in ("groups", "world_size")]


def digest(**changes: Any) -> str:
    return make_namespace(replace(BASE, **changes)).digest.hex()


@pytest.mark.parametrize("name", SEPARATE)
def test_every_field_changes_the_digest(name: str) -> None:
    assert digest(**{name: changed(getattr(BASE, name))}) != digest()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"model.max_model_len": 4096, "cache.sinks": True},
        {"model.max_model_len": 4096, "cache.sinks": 1, "model.rope": None},
        {"model.max_model_len": "4096", "cache.sinks": True, "model.rope": None},
        {"model.max_model_len": 4096.0, "cache.sinks": True, "model.rope": None},
        {"model.max_model_len": 4096, "cache.sinks": True, "model.rope": None, "model.new": 1},
    ],
)
def test_every_setting_changes_the_digest_and_so_does_its_type(settings: dict[str, Any]) -> None:
    assert digest(settings=settings) != digest()


def test_only_the_order_of_ranks_matters() -> None:
    assert digest(settings=dict(reversed(BASE.settings.items()))) == digest(groups=(WINDOW, FULL)) == digest()
    assert digest(ranks=("cd", "ab")) != digest()


def test_each_rank_has_its_own_size_and_slots_have_the_largest() -> None:
    """A stage of fewer layers writes smaller shards, one without any writes none; a group has at least one holder."""
    namespace = make_namespace(BASE)
    assert [namespace.shard_bytes(0, rank) for rank in range(2)] == [1 << 20, 3 << 19]
    assert [namespace.shard_bytes(1, rank) for rank in range(2)] == [0, 1 << 19]
    assert (namespace.slot_bytes(0), namespace.slot_bytes(1)) == (3 << 19, 1 << 19)
    assert (namespace.holders(0), namespace.holders(1)) == ((0, 1), (1,))
    for ask in (namespace.slot_bytes, namespace.holders, lambda group: namespace.shard_bytes(group, 0)):
        with pytest.raises(LookupError):
            ask(7)


@pytest.mark.parametrize("name", [field.name for field in fields(GroupFields)])
@pytest.mark.parametrize("position", [0, 1])
def test_every_field_of_every_group_changes_the_digest(name: str, position: int) -> None:
    groups = list(BASE.groups)
    value = 7 if name == "group_id" else changed(getattr(groups[position], name))
    groups[position] = replace(groups[position], **{name: value})
    assert digest(groups=tuple(groups)) != digest()
    assert digest(groups=(FULL,)) != digest()


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
    assert digest(**left) != digest(**right)


def test_the_name_holds_nothing_that_a_user_typed() -> None:
    name = make_namespace(replace(BASE, tenant="../../etc", model="a/b")).name
    assert len(name) == 32
    assert set(name) <= set("0123456789abcdef")


def test_the_manifest_is_plain_json_and_complete() -> None:
    manifest = json.loads(json.dumps(make_namespace(BASE).manifest()))
    assert manifest["namespace"] == make_namespace(BASE).digest.hex()
    assert set(manifest["fields"]) == {field.name for field in fields(NamespaceFields)}
    assert manifest["fields"]["groups"][1] == {"group_id": 1, "tokens_per_block": 32, "slot_bytes": [0, 1 << 19]}
    assert manifest["fields"]["settings"] == dict(BASE.settings)


MAY_BE_NONE = ("attention_backend", "revision", "weights", "hash_seed")


@pytest.mark.parametrize("name", [field.name for field in fields(NamespaceFields)])
def test_what_says_nothing_is_refused(name: str) -> None:
    """A field that is quietly wrong would let foreign bytes in."""
    nothing = [] if name == "settings" else [type(getattr(BASE, name))()]
    for value in nothing if name in MAY_BE_NONE else [*nothing, None]:
        with pytest.raises(NamespaceError, match=rf"^namespace\.{name}"):
            digest(**{name: value})
    if name in MAY_BE_NONE:
        assert digest(**{name: None}) != digest()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dcp": True}, "dcp: Input should be a valid integer"),
        ({"settings": {"a": [1]}}, r"settings\.a"),
        ({"settings": {"a": float("nan")}}, r"settings\.a"),
        ({"settings": {"": 1}}, "settings"),
        ({"ranks": ("ab",)}, "ranks has 1 digests for 2 ranks"),
        ({"ranks": ("ab", "")}, r"ranks\.1"),
        ({"groups": (FULL, replace(WINDOW, group_id=0))}, r"groups repeats a group id: \[0, 0\]"),
        ({"groups": (FULL, replace(WINDOW, tokens_per_block=0))}, r"groups\.1\.tokens_per_block"),
        ({"groups": ({"group_id": 0},)}, r"groups\.0: Input should be an instance of GroupFields"),
        ({"groups": (FULL, replace(WINDOW, slot_bytes=(0, 0)))}, r"groups\[1\]\.slot_bytes is 0 on every rank"),
        ({"groups": (FULL, replace(WINDOW, slot_bytes=(1,)))}, r"groups\[1\]\.slot_bytes has 1 sizes for 2 ranks"),
        ({"groups": (FULL, replace(WINDOW, slot_bytes=(-1, 1)))}, r"groups\.1\.slot_bytes\.0"),
        ({"groups": (FULL, replace(WINDOW, slot_bytes=(True, 1)))}, r"groups\.1\.slot_bytes\.0"),
    ],
)
def test_wrong_values_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(NamespaceError, match=rf"^namespace\.{words}"):
        digest(**changes)


def test_a_manifest_fits_the_namespace_that_its_own_fields_make_and_no_other() -> None:
    """Whoever may write to a bucket may write a manifest; what it is named, and says it is, counts for nothing."""
    namespace, other = make_namespace(BASE), make_namespace(replace(BASE, tenant="other"))
    manifest = json.loads(json.dumps(namespace.manifest()))
    assert manifest_fits(manifest, namespace.name)
    assert manifest_digest(manifest) == namespace.digest
    assert not manifest_fits({**manifest, "namespace": other.digest.hex()}, other.name)
    assert not manifest_fits({**manifest, "fields": {**manifest["fields"], "tenant": "other"}}, namespace.name)


@pytest.mark.parametrize("nonsense", [None, [], "x", {}, {"fields": []}, {"fields": {"a": {1, 2}}}, NAN])
def test_what_is_no_manifest_fits_nothing(nonsense: object) -> None:
    assert manifest_digest(nonsense) is None
    assert manifest_fits(nonsense, make_namespace(BASE).name) is False


def test_a_release_finds_what_an_earlier_one_has_stored() -> None:
    """Pinned: the digests of a namespace and of a rank are in names and headers that outlive any server. Raise
    format_version instead of changing them.
    """
    namespace = make_namespace(BASE)
    assert namespace.digest.hex() == "df1ecfe84b2b8f12b1426548ce181ee79efd58c035f4c985ae7fd83beffd3f52"
    assert namespace.rank_digest(1).hex() == "0f124d5996520a3f6efc5211dd9f50afa4ce803c73cd0d44ebbd07ca698905c2"
