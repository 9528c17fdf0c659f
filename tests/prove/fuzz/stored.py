"""Targets: bytes of storage. Header pages, payloads, index files, manifests and other JSON beside them, names."""

from __future__ import annotations

import json
import logging
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

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
from nixl_offload.identity.namespace import make_namespace, manifest_digest, manifest_fits
from nixl_offload.index import journal as journal_file
from nixl_offload.index.journal import DurableIndex, IndexReader
from nixl_offload.tiers.slab.directory import MANIFEST_NAME, last_use_s, read_manifest
from nixl_offload.types import Key
from tests.headers import Expected, make_page
from tests.prove.fuzz import One, Reader, Target, expect
from tests.prove.fuzz.trees import json_mutated

EXPECT = Expected(bytes(range(32)), bytes(range(100, 120)) + b"\0\0\0\1", 1, 3, 64)
_GEOMETRY = {"slot_classes": "8192", "extent_bytes": "32768"}


def _page() -> bytes:
    """A page as the product writes it."""
    sums = np.arange(1, 4, dtype=np.uint64)
    return bytes(make_page(EXPECT, sums, created_s=7))


def _changed_page(data: bytes) -> bytes:
    """Read an input as edits of a page: offset, length, bytes. An odd first byte has its own checksum made right."""
    reader = Reader(data)
    mends, page = reader.number() & 1, bytearray(_page())
    while reader.left:
        at, count = reader.number(2) % HEADER_BYTES, 1 + reader.number() % 8
        put = reader.bytes(count)
        page[at : at + len(put)] = put
    del page[HEADER_BYTES:]
    if mends:
        OWN_CHECKSUM.pack_into(page, OWN_CHECKSUM_AT, block_checksum(memoryview(page)[:OWN_CHECKSUM_AT]))
    return bytes(page)


def header(scratch: Path) -> One:
    """A page read alone, against what is expected, and among rows: three readers of one mind."""

    def one(data: bytes) -> None:
        page = data if data[:1] == b"\xff" else _changed_page(data)
        may_lack = bool(len(data) & 1)
        try:
            found = decode_header(page, may_lack_checksums=may_lack)
        except FormatError as error:
            found, reason = None, error.reason
        else:
            names = (found.namespace, [found.key], found.group, found.blocks_per_chunk, found.block_bytes)
            sums = np.array([found.checksums], dtype=np.uint64)
            again = encode_headers(ExpectedRows(*names), sums, [found.first_valid_block], created_s=found.created_s)
            expect(decode_header(bytes(again[0])) == found, "a header that is read is written the same")
            expect(0 <= found.first_valid_block < found.blocks_per_chunk == len(found.checksums), "blocks fit")
        if len(page) != HEADER_BYTES:
            return
        rows = check_headers([np.frombuffer(page, dtype=np.uint8)], EXPECT.rows, may_lack_checksums=may_lack)
        if found is None:
            expect(rows.errors[0].reason == reason, "rows refuse a page that is not whole, for the same reason")
        elif names == (EXPECT.namespace, [EXPECT.key], EXPECT.group, EXPECT.blocks, EXPECT.block_bytes):
            expect(not rows.errors, "rows take a page that is the expected one")
            expect(tuple(rows.checksums[0].tolist()) == found.checksums, "rows read the same checksums")
            expect(rows.first_valid_block[0] == found.first_valid_block, "rows read the same first block")
        else:
            expect(bool(rows.errors), "only the expected identity")

    return one


def _index_bases() -> list[tuple[bytes, bytes, bytes]]:
    """Index files: file, journal, write-ahead log. Closed, left behind by a kill, empty, and of others."""
    bases = ((3, "closed"), (40, "closed"), (3, "killed"), (3, "log"), (0, "closed"))
    return [_index_files(rows, left) for rows, left in bases] + [
        (_foreign(statement), b"", b"")
        for statement in (
            "CREATE TABLE slot (key TEXT, offset TEXT, slot_bytes TEXT, seq TEXT)",
            "CREATE VIEW slot AS SELECT 1 AS seq, x'0102030405' AS key, 0 AS offset, 4096 AS slot_bytes",
            "CREATE TABLE other (x)",
        )
    ]


def _index_files(rows: int, left: str) -> tuple[bytes, bytes, bytes]:
    """Write an index as the product does, as a kill in a transaction leaves it, or with a write-ahead log."""
    from nixl_offload.index.journal import Database

    path, chance = Path("base.sqlite").absolute(), random.Random(rows)
    for name in _sides(path):
        name.unlink(missing_ok=True)
    database = Database(str(path), _GEOMETRY)
    database.write([(Key(bytes([row]) * 20 + b"\0\0\0\0"), row * 8192, 8192) for row in range(rows)])
    database.disconnect()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL" if left == "log" else "PRAGMA cache_size=1")
    if left != "closed":
        connection.execute("BEGIN")
        # In a transaction pages that do not fit the cache are written, their old content in the journal before.
        connection.execute("UPDATE slot SET slot_bytes = 4096")
        connection.executemany(
            "INSERT INTO slot (key, offset, slot_bytes) VALUES (?, ?, 8192)",
            [(chance.randbytes(36), number * 8192) for number in range(rows, 2000)],
        )
        if left == "log":
            connection.execute("COMMIT")
    file, journal, log = (name.read_bytes() if name.exists() else b"" for name in _sides(path))
    connection.close()
    assert [bool(journal.strip(b"\0")), bool(log)] == [left == "killed", left == "log"]
    return file, journal, log


def _foreign(statement: str) -> bytes:
    path = Path("foreign.sqlite").absolute()
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()
    return path.read_bytes()


def _sides(path: Path) -> tuple[Path, Path, Path]:
    return path, path.with_name(path.name + "-journal"), path.with_name(path.name + "-wal")


def index(scratch: Path) -> One:
    """Index files that are damaged, cut off, of another schema: fewer rows, TierError, and a journal that goes on."""
    logging.getLogger("nixl_offload").setLevel(logging.CRITICAL)
    journal_file._PAUSE_S = journal_file._PATIENCE_S = 0.0  # type: ignore[misc]  # for an engine that uses the file
    bases, path = _index_bases(), scratch / "index.sqlite"
    path.parent.mkdir(exist_ok=True)

    def one(data: bytes) -> None:
        reader = Reader(data)
        files = [bytearray(part) for part in reader.choice(bases)]
        _edit(files, reader)
        for name, content in zip(_sides(path), files, strict=True):
            name.unlink(missing_ok=True)
            if content:
                name.write_bytes(content)
        if path.exists():
            _look(IndexReader(path))
        _use(path)

    return one


def _edit(files: list[bytearray], reader: Reader) -> None:
    """Apply edits: which file, what to do, where, with what. Pages are where SQLite looks: most edits hit a header."""
    while reader.left:
        file, how, at = reader.choice(files), reader.number() % 4, reader.number(2)
        if not file:
            continue
        at = at % len(file) if how else at % 200 % len(file)
        if how == 3:
            del file[at:]
        else:
            put = reader.bytes(1 + reader.number() % 8)
            file[at : at + len(put)] = put


def _look(looking: IndexReader) -> None:
    """All that commands ask, as they ask it."""
    asked: list[Any] = [
        lambda: list(zip(range(1000), looking.rows(), strict=False)),
        lambda: looking.find("010", 4),
        lambda: looking.find((bytes([1]) * 20).hex() + "00000000", 1),
    ]
    for ask in asked:
        try:
            ask()
        except TierError:
            return


def _use(path: Path) -> None:
    """Open it as an engine does, put a key, and find it again at the next start."""
    key = Key(b"x" * 20 + b"\0\0\0\0")
    journal, found = DurableIndex.open(str(path), _GEOMETRY, batch_delay_s=0.0, retry_interval_s=0.01)
    rows = [row for some in found for row in some]
    expect(all(type(key) is bytes and len(key) <= 64 for key, _, _, _ in rows), "keys are short bytes")
    from nixl_offload.types import Location

    journal.put(key, Location(0, 1 << 20, 8192))
    expect(journal.close(10.0), "what is put is written over any file")
    journal, found = DurableIndex.open(str(path), _GEOMETRY, batch_delay_s=0.0)
    rows = [row[:3] for some in found for row in some]
    expect(journal.close(10.0), "it can be closed")
    expect((key, 1 << 20, 8192) in rows, "what was put is found again")


def _manifest() -> dict[str, Any]:
    from nixl_offload.identity.namespace import GroupFields, NamespaceFields

    fields = NamespaceFields(
        tenant="t", engine="vllm 0.33.0", platform="cpu", attention_backend=None, model="m", revision=None,
        weights=None, dtype="bfloat16", tokens_per_block=16, blocks_per_chunk=2, tokens_per_hash=16,
        hash_algorithm="sha256",
        hash_seed="0", groups=(GroupFields(0, 16, (8192,)),), settings={"a.b": 1}, kv_layout="LBHNC", ranks=("x",),
        tp=1, pp=1, pcp=1, dcp=1, world_size=1,
    )  # fmt: skip
    return make_namespace(fields).manifest()


def manifest(scratch: Path) -> One:
    """Manifests that anybody may have written: none is believed that its own fields do not make."""
    true = _manifest()
    name = true["namespace"][:32]
    directory = scratch / name
    directory.mkdir(exist_ok=True)

    def one(data: bytes) -> None:
        (directory / MANIFEST_NAME).write_bytes(data)
        last_use_s(directory)
        found = read_manifest(directory)
        if found is None:
            return
        digest = manifest_digest(found)
        expect(digest is None or len(digest) == 32, "a digest or none")
        if manifest_fits(found, name):
            expect(found["fields"] == true["fields"], "no other fields make this namespace")

    return one


def targets() -> Iterator[Target]:
    """All of storage."""
    yield Target("stored/header", header, 100_000, lambda: [b"\0", b"\1\x0a\0\1\1", b"\xff" + _page()[1:]])
    yield Target(
        "stored/index", index, 1_500, lambda: [bytes([base, 0, 0, 18, 0, 1, 2]) for base in range(7)], max_bytes=256,
        input_s=60,
    )  # fmt: skip
    words = [f'"{name}"'.encode() for name in (*_manifest()["fields"], "fields", "namespace", "slab", "shards")]
    yield Target(
        "stored/manifest", manifest, 15_000, lambda: [json.dumps(_manifest()).encode(), b'{"namespace":"","slab":{}}'],
        words, json_mutated,
    )  # fmt: skip
