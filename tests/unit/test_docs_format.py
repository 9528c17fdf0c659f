"""A reader written from docs/format.md alone, without any of the package's code, reads what the package writes."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from nixl_offload.identity.namespace import SHARD_ORDER, make_namespace
from nixl_offload.stores.directory import TreeStore
from tests.unit.stored_rig import put_image, put_manifest, stored_namespace

CHUNKS = 3


@pytest.fixture(params=[{}, {"ranks": ("ab",), "shard_order": SHARD_ORDER, "settings": {}}], ids=["uncut", "by heads"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    store, space = TreeStore(str(tmp_path)), make_namespace(replace(stored_namespace().fields, **request.param))
    for number in range(CHUNKS):
        put_image(store, space, number)
    put_manifest(store, space)
    store.close()
    return tmp_path


def test_the_page_is_enough_to_read_a_shared_directory(tree: Path) -> None:
    (manifest,) = tree.glob("*/manifest.json")
    fields = json.loads(manifest.read_text())["fields"]
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(b"nixl-offload namespace 2\0" + text.encode("ascii")).digest()
    assert manifest.parent.name == digest[:16].hex()
    keys = set()
    for path in manifest.parent.glob("??/*"):
        key, _, digits = path.name.partition(".")
        assert path.parent.name == key[:2]
        check_shard(path.read_bytes(), bytes.fromhex(key), int(digits, 16), digest, fields)
        keys.add(key)
    assert len(keys) == CHUNKS


def check_shard(shard: bytes, key: bytes, number: int, digest: bytes, fields: dict[str, object]) -> None:
    """In the order of the page's "Verifying"."""
    assert struct.unpack_from("<8sHH", shard) == (b"NIXLOFF1", 1, 4096)
    assert struct.unpack_from("<Q", shard, 4088)[0] == xxhash.xxh3_64_intdigest(shard[:4088])
    assert struct.unpack_from("<HH", shard, 12) == (1, 0)
    group, blocks, first_valid = struct.unpack_from("<IHH", shard, 48)
    block_bytes, payload_bytes = struct.unpack_from("<QQ", shard, 56)
    (key_bytes,) = struct.unpack_from("<H", shard, 80)
    assert payload_bytes == blocks * block_bytes
    assert not any(shard[82:88] + shard[88 + key_bytes : 152] + shard[152:192] + shard[192 + 8 * blocks : 4088])
    assert first_valid < blocks
    assert shard[16:48] == hashlib.sha256(b"nixl-offload shard 1\0" + digest + number.to_bytes(4, "big")).digest()
    assert shard[88 : 88 + key_bytes] == key
    assert group == int.from_bytes(key[-4:], "big")
    groups = fields["groups"]
    assert isinstance(groups, list)
    (sizes,) = (each["slot_bytes"] for each in groups if each["group_id"] == group)
    assert len(shard) == sizes[number] == 4096 + -(-payload_bytes // 4096) * 4096
    for block in range(first_valid, blocks):
        begin = 4096 + block * block_bytes
        checksum = xxhash.xxh3_64_intdigest(shard[begin : begin + block_bytes])
        assert struct.unpack_from("<Q", shard, 192 + 8 * block)[0] == checksum
