"""Proves that no bytes in storage end in anything but a right value or a documented error: header pages, index files,
manifests. Inputs are drawn changes of right ones; ``tests/prove/fuzz.py`` tries many more.
"""

from __future__ import annotations

import functools
import json
import random
import sqlite3
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

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
from nixl_offload.identity.namespace import (
    manifest_digest,
    manifest_fits,
)
from nixl_offload.index import journal as journal_file
from nixl_offload.index.journal import Database, DurableIndex, IndexReader
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


_GEOMETRY = {"slot_classes": "8192", "extent_bytes": "32768"}
_KEY = Key(b"x" * 20 + b"\0\0\0\0")
_FOREIGN = (
    "CREATE TABLE slot (key TEXT, offset TEXT, slot_bytes TEXT, seq TEXT)",
    "CREATE VIEW slot AS SELECT 1 AS seq, x'0102030405' AS key, 0 AS offset, 4096 AS slot_bytes",
    "CREATE TABLE other (x)",
)


@functools.cache
def _index_bases() -> list[list[bytes]]:
    """Return files, journals and write-ahead logs of indexes: closed, killed, empty, and of others."""
    bases = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, (rows, left) in enumerate(((3, ""), (40, ""), (3, "killed"), (3, "log"), (0, ""))):
            bases.append(_index_files(Path(scratch, f"{number}.sqlite"), rows, left))
        for number, statement in enumerate(_FOREIGN):
            path = Path(scratch, f"foreign-{number}.sqlite")
            connection = sqlite3.connect(path)
            connection.execute(statement)
            connection.commit()
            connection.close()
            bases.append([path.read_bytes(), b"", b""])
    return bases


def _index_files(path: Path, rows: int, left: str) -> list[bytes]:
    """Write an index as the product does, as a kill in a transaction leaves it, or with a write-ahead log."""
    database, chance = Database(str(path), _GEOMETRY), random.Random(rows)
    database.write([(Key(bytes([row]) * 20 + b"\0\0\0\0"), row * 8192, 8192) for row in range(rows)])
    database.disconnect()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL" if left == "log" else "PRAGMA cache_size=1")
    if left:
        connection.execute("BEGIN")
        # In a transaction pages that do not fit the cache are written, their old content in the journal before.
        connection.execute("UPDATE slot SET slot_bytes = 4096")
        connection.executemany(
            "INSERT INTO slot (key, offset, slot_bytes) VALUES (?, ?, 8192)",
            [(chance.randbytes(36), number * 8192) for number in range(rows, 2000)],
        )
        if left == "log":
            connection.execute("COMMIT")
    files = [name.read_bytes() if name.exists() else b"" for name in _sides(path)]
    connection.close()
    assert [bool(files[1].strip(b"\0")), bool(files[2])] == [left == "killed", left == "log"]
    return files


def _sides(path: Path) -> list[Path]:
    return [path, path.with_name(path.name + "-journal"), path.with_name(path.name + "-wal")]


_PLACES = st.integers(0, 200) | st.integers(0, 1 << 16)
"""Pages are where SQLite looks: most edits hit a header."""


@given(
    base=st.integers(0, 7),
    edits=st.lists(st.tuples(st.integers(0, 2), _PLACES, st.none() | st.binary(min_size=1, max_size=8)), max_size=4),
)
@example(base=1, edits=[(0, 10855, b"\2")])
@example(base=1, edits=[(0, 104, b"\0")])
@example(base=2, edits=[(0, 1, b"\2")])
@example(base=2, edits=[(0, 18, b"\1")])
@example(base=3, edits=[(0, 130, None)])
@example(base=5, edits=[])
@example(base=6, edits=[])
@example(base=7, edits=[])
def test_index(base: int, edits: list[tuple[int, int, bytes | None]]) -> None:
    """Damaged, cut off (an edit of None), of another schema: fewer rows or TierError, and a journal that goes on."""
    files = [bytearray(part) for part in _index_bases()[base]]
    for number, at, put in edits:
        file = files[number]
        place = at % max(1, len(file))
        file[place : len(file) if put is None else place + len(put)] = (put or b"") if file else b""
    no_pause = mock.patch.multiple(journal_file, _PAUSE_S=0.0, _PATIENCE_S=0.0)  # for an engine that uses the file
    with no_pause, tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "index.sqlite")
        for name, content in zip(_sides(path), files, strict=True):
            if content:
                name.write_bytes(content)
        if path.exists():
            _look(IndexReader(path))
        _use(path)


def _look(looking: IndexReader) -> None:
    """Ask all that commands ask, as they ask it."""
    try:
        list(zip(range(1000), looking.rows(), strict=False))
        looking.find("010", 4)
        looking.find((bytes([1]) * 20).hex() + "00000000", 1)
    except TierError:
        return


def _use(path: Path) -> None:
    """Open it as an engine does, put a key, and find it again at the next start."""
    journal, found = DurableIndex.open(str(path), _GEOMETRY, batch_delay_s=0.0, retry_interval_s=0.01)
    assert all(type(key) is bytes and len(key) <= 64 for some in found for key, _, _, _ in some)
    journal.put(_KEY, Location(0, 1 << 20, 8192))
    assert journal.close(10.0), "the key is written over any file"
    journal, found = DurableIndex.open(str(path), _GEOMETRY, batch_delay_s=0.0)
    assert (_KEY, 1 << 20, 8192) in [row[:3] for some in found for row in some]
    assert journal.close(10.0)


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
