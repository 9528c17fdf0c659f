"""Proves that no bytes in storage end in anything but a right value or a documented error: header pages, index files,
manifests. Inputs are drawn changes of right ones; ``tests/prove/fuzz.py`` tries many more.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import example, given, strategies as st

from nixl_offload.chunk.checksum import block_checksum
from nixl_offload.chunk.header import (
    HEADER_BYTES,
    OWN_CHECKSUM,
    OWN_CHECKSUM_AT,
    ExpectedRows,
    check_headers,
    decode_header,
    encode_headers,
)
from nixl_offload.errors import FormatError, TierError
from nixl_offload.identity.namespace import manifest_digest, manifest_fits
from nixl_offload.index.durable import DurableIndex, IndexReader
from nixl_offload.tiers.slab.directory import MANIFEST_NAME, last_use_s, read_manifest
from nixl_offload.types import Key, Location
from tests.headers import Expected, make_page
from tests.prove.fuzz import changed, fuzzed, trees
from tests.unit.shared_rig import namespace_of

EXPECT = Expected(bytes(range(32)), bytes(range(100, 120)) + b"\0\0\0\1", 1, 3, 64)
_PAGE = bytes(make_page(EXPECT, np.arange(1, 4, dtype=np.uint64), created_s=7))


def _mended(page: bytes) -> bytes:
    """Return a page whose own checksum is right, as somebody would make it who changes one on purpose."""
    mended = bytearray(page[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"))
    OWN_CHECKSUM.pack_into(mended, OWN_CHECKSUM_AT, block_checksum(memoryview(mended)[:OWN_CHECKSUM_AT]))
    return bytes(mended)


def _with(at: int, *values: int) -> bytes:
    return _mended(_PAGE[:at] + bytes(values) + _PAGE[at + len(values) :])


_CHANGED_PAGES = changed([_PAGE, _PAGE[:200]], most=HEADER_BYTES + 8)


@fuzzed(
    "stored-header",
    [b"", _PAGE, b"\xff" + _PAGE[1:], _with(0, 1), _with(11, 255, 9), _with(48, 28), _with(80, 0)],
    _CHANGED_PAGES | _CHANGED_PAGES.map(_mended),
)
def test_header(data: bytes) -> None:
    """A page read alone and among rows: both readers take the same pages, and read the same from them."""
    for may_lack in (False, True):
        try:
            found = decode_header(data, may_lack_checksums=may_lack)
        except FormatError as error:
            found, reason = None, error.reason
        else:
            names = (found.namespace, [found.key], found.group, found.blocks_per_chunk, found.block_bytes)
            sums = np.array([found.checksums], dtype=np.uint64)
            again = encode_headers(ExpectedRows(*names), sums, [found.first_valid_block], created_s=found.created_s)
            assert decode_header(bytes(again[0])) == found, "it is written again as it was read"
            assert 0 <= found.first_valid_block < found.blocks_per_chunk == len(found.checksums)
        if len(data) != HEADER_BYTES:
            continue
        rows = check_headers([np.frombuffer(data, dtype=np.uint8)], EXPECT.rows, may_lack_checksums=may_lack)
        if found is None:
            assert rows.errors[0].reason == reason
        elif names == (EXPECT.namespace, [EXPECT.key], EXPECT.group, EXPECT.blocks, EXPECT.block_bytes):
            assert not rows.errors
            assert tuple(rows.checksums[0].tolist()) == found.checksums
            assert rows.first_valid_block[0] == found.first_valid_block
        else:
            assert rows.errors, "only the expected identity is taken"


_GEOMETRY = {"extent_bytes": "32768"}
_KEY = Key(b"x" * 20 + b"\0\0\0\0")
_SLOTS = 1 << 10


@functools.cache
def _index_bases() -> list[bytes]:
    """Return indexes with few and many rows, one that was cleared, and nothing."""
    bases = [b""]
    with tempfile.TemporaryDirectory() as scratch:
        for rows in (0, 3, 200):
            path = Path(scratch, f"{rows}.table")
            index = DurableIndex(str(path), 8192, _SLOTS, _GEOMETRY, batch_delay_s=0.0)
            for row in range(rows):
                index.put(Key(bytes([row]) * 20 + b"\0\0\0\0"), Location(0, row * 8192, 8192))
            assert index.close(10.0)
            bases.append(path.read_bytes())
    return bases


_PLACES = st.integers(0, 64) | st.integers(4096, 4096 + 512) | st.integers(0, 1 << 16)
"""Most edits hit the header or the first rows."""


@given(
    base=st.integers(0, 3),
    edits=st.lists(st.tuples(_PLACES, st.none() | st.binary(min_size=1, max_size=8)), max_size=4),
)
@example(base=2, edits=[(0, b"\1")])
@example(base=2, edits=[(40, b"\1")])
@example(base=3, edits=[(4096 + 32, b"\xff\xff")])
@example(base=3, edits=[(5000, None)])
def test_index(base: int, edits: list[tuple[int, bytes | None]]) -> None:
    """Damaged, or cut off (an edit of None): fewer rows or TierError, and an index that goes on."""
    file = bytearray(_index_bases()[base])
    for at, put in edits:
        place = at % max(1, len(file))
        file[place : len(file) if put is None else place + len(put)] = (put or b"") if file else b""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "index.table")
        path.write_bytes(file)
        _look(IndexReader(path))
        _use(path)


def _look(looking: IndexReader) -> None:
    """Ask all that commands ask, as they ask it."""
    try:
        looking.check()
        assert len(list(looking.rows())) <= 200
        looking.find("010", 4)
        looking.find((bytes([1]) * 20).hex() + "00000000", 1)
    except TierError:
        return


def _use(path: Path) -> None:
    """Open it as an engine does, put a key, and find it again at the next start."""
    at = Location(0, 1000 * 8192, 8192)
    index = DurableIndex(str(path), 8192, _SLOTS, _GEOMETRY, batch_delay_s=0.0, retry_interval_s=0.01)
    assert all(type(row.key) is bytes and len(row.key) <= 64 for row in index.rows())
    index.put(_KEY, at)
    assert index.close(10.0), "the key is written over any file"
    index = DurableIndex(str(path), 8192, _SLOTS, _GEOMETRY, batch_delay_s=0.0)
    assert (_KEY, at.offset, at.slot_bytes) in [row[:3] for row in index.rows()]
    assert index.close(10.0)


_MANIFEST: dict[str, Any] = namespace_of().manifest()
_MANIFESTS = [json.dumps(_MANIFEST).encode(), b'{"namespace":"","slab":{}}']
_NAMES = [*_MANIFEST["fields"], "fields", "namespace", "slab", "shards"]


@fuzzed("stored-manifest", _MANIFESTS, trees(_MANIFESTS, _NAMES) | changed(_MANIFESTS, [b"\x82", b"{", b"}"], 4096))
def test_manifest(data: bytes) -> None:
    """None is believed that its own fields do not make."""
    name = _MANIFEST["namespace"][:32]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch, name)
        directory.mkdir()
        (directory / MANIFEST_NAME).write_bytes(data)
        last_use_s(directory)
        found = read_manifest(directory)
    if found is not None:
        digest = manifest_digest(found)
        assert digest is None or len(digest) == 32
        if manifest_fits(found, name):
            assert found["fields"] == _MANIFEST["fields"], "no other fields make this namespace"
