"""Names of shards: made and parsed, no foreign name accepted, and a listing becomes chunks."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from nixl_offload.stores.base import ObjectInfo
from nixl_offload.tiers.shared.inspect import group_chunks
from nixl_offload.tiers.shared.naming import ShardName, manifest_name, parse_manifest_name, parse_shard_name, shard_name
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


def test_manifests() -> None:
    assert parse_manifest_name(manifest_name(NAMESPACE)) == NAMESPACE
    for name in ("", "manifest.json", f"{NAMESPACE}/manifest.json.bak", f"{NAMESPACE[:-1]}/manifest.json"):
        assert parse_manifest_name(name) is None


def test_a_listing_becomes_chunks_with_all_their_ranks() -> None:
    """A key that is a prefix of another key stays apart, and other objects go to ``others``."""
    short, long, other = Key(b"\xab" * 20), Key(b"\xab" * 36), Key(b"\xac" * 20)
    listing = [
        *(ObjectInfo(shard_name(NAMESPACE, short, rank), 10 + rank, 5.0 - rank) for rank in range(3)),
        *(ObjectInfo(shard_name(NAMESPACE, long, rank), 1, 1.0) for rank in range(2)),
        ObjectInfo(f"{NAMESPACE}/ab/notes.txt", 7, 0.0),
        ObjectInfo(shard_name(NAMESPACE, other, 0), 4, 9.0),
        ObjectInfo(manifest_name(NAMESPACE), 3, 2.0),
    ]
    assert sorted(info.name for info in listing) == [info.name for info in listing], "as a store would list it"
    others: list[str] = []
    chunks = list(group_chunks(listing, lambda info: others.append(info.name)))
    assert [(len(c.shards), c.size_bytes, c.modified_s) for c in chunks] == [(3, 33, 5.0), (2, 2, 1.0), (1, 4, 9.0)]
    assert others == [f"{NAMESPACE}/ab/notes.txt", manifest_name(NAMESPACE)]
