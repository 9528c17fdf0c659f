"""Names of shards: there and back, and nothing foreign taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_offload.tiers.shared.naming import (
    ShardName,
    manifest_name,
    parse_manifest_name,
    parse_shard_name,
    shard_name,
)
from nixl_offload.types import Key

NAMESPACE = "0123456789abcdef" * 2


@given(st.binary(min_size=20, max_size=64), st.integers(0, 0xFFFF))
def test_there_and_back(key: bytes, rank: int) -> None:
    name = shard_name(NAMESPACE, Key(key), rank)
    assert parse_shard_name(name) == ShardName(NAMESPACE, Key(key), rank)
    assert name.split("/")[1] == key.hex()[:2]


@pytest.mark.parametrize(
    "name",
    [
        "",
        manifest_name(NAMESPACE),
        f"{NAMESPACE}/ab/cdef.0000",
        f"{NAMESPACE}/ab/abc.0000",
        f"{NAMESPACE}/ab/ABcd.0000",
        f"{NAMESPACE}/ab/abcd.000",
        f"{NAMESPACE}/ab/abcd.0000.tmp",
        f"{NAMESPACE}/ab/abcd.0000\n",
        f"x{NAMESPACE}/ab/abcd.0000",
        f"{NAMESPACE}/../abcd.0000",
    ],
)
def test_what_is_not_a_shard(name: str) -> None:
    assert parse_shard_name(name) is None


@given(st.from_regex(r"[0-9a-f]{31,33}/[0-9a-fA-F]{2}/[0-9a-fA-F]{2,80}\.[0-9a-f]{3,5}\n?", fullmatch=True))
def test_what_is_taken_apart_is_put_together_the_same(name: str) -> None:
    found = parse_shard_name(name)
    assert found is None or shard_name(*found) == name


def test_manifests() -> None:
    assert parse_manifest_name(manifest_name(NAMESPACE)) == NAMESPACE
    for name in ("", "manifest.json", f"{NAMESPACE}/manifest.json.bak", f"{NAMESPACE[:-1]}/manifest.json"):
        assert parse_manifest_name(name) is None
