"""The durable index has after a restart what it was given before, and never delays the scheduler."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from nixl_offload.errors import TierError
from nixl_offload.index.database import BATCH_OPS, Database, Row, max_bytes
from nixl_offload.index.durable import DurableIndex
from nixl_offload.tiers.slab.index_reader import IndexReader
from nixl_offload.types import Key, Location

GEOMETRY = {"namespace": "aa", "slot_classes": "4096"}
WAIT_S = 20.0
MIB = 1 << 20


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big") + bytes(4))


def place(number: int) -> Location:
    return Location(0, number * 4096, 4096)


def row(number: int, slot: int) -> tuple[Key, int, int]:
    return key(number), slot * 4096, 4096


def flat(pieces: Iterable[list[Row]]) -> list[Row]:
    return [found for rows in pieces for found in rows]


def reread(path: str, geometry: dict[str, str] | None = None) -> list[tuple[Key, int, int]]:
    index, rows = DurableIndex.open(path, GEOMETRY if geometry is None else geometry)
    found = flat(rows)
    assert index.close(WAIT_S)
    return found


def write(path: str, *numbers: int) -> list[Row]:
    """Open, put keys at their own places, close. Returns the rows that were there."""
    index, rows = DurableIndex.open(path, GEOMETRY)
    found = flat(rows)
    for number in numbers:
        index.put(key(number), place(number))
    assert index.close(WAIT_S)
    return found


def wait_until(what: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.005)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    """Give a path for a database; afterwards no writer may be left."""
    yield str(tmp_path / "index.sqlite")
    assert [t.name for t in threading.enumerate() if t.name == "nixl-offload-index"] == []


def test_a_restart_finds_what_was_put_in_its_order(path: str) -> None:
    """Puts come back oldest first, deletes do not come back, a key put again is young again."""
    index, rows = DurableIndex.open(path, GEOMETRY)
    assert flat(rows) == []
    for number in (5, 3, 9, 1):
        index.put(key(number), place(number))
    index.delete(key(3))
    index.delete(key(77))
    assert index.flush(WAIT_S)
    index.put(key(5), place(5))
    assert index.close(WAIT_S)
    assert reread(path) == [row(9, 9), row(1, 1), row(5, 5)]


def test_a_key_of_any_length_takes_no_memory(path: str) -> None:
    """A row that nobody of us wrote, with a key of 64 MiB: not read, neither by an engine nor by the commands."""
    write(path, 1)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO slot (key, offset, slot_bytes) VALUES (zeroblob(?), 8192, 4096)", (64 * MIB,))
    tracemalloc.start()
    try:
        assert reread(path) == [row(1, 1)]
        reader = IndexReader(Path(path))
        assert [found.key for found in reader.rows(0)] == [key(1)]
        assert [found.key for found in reader.find("00", 9)] == [key(1)]
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


def test_put_and_delete_do_not_wait_for_the_storage(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a write hangs, calls go on; afterwards all of them are there."""
    hangs, go_on = threading.Event(), threading.Event()
    write = Database.write

    def hanging(self: Database, batch: list[tuple[Key, int, int] | tuple[Key]]) -> None:
        hangs.set()
        assert go_on.wait(WAIT_S)
        write(self, batch)

    monkeypatch.setattr(Database, "write", hanging)
    twin, _ = DurableIndex.open(path, GEOMETRY, batch_delay_s=0.0)
    twin.put(key(0), place(0))
    assert hangs.wait(WAIT_S)
    for number in range(1, 3000):
        twin.put(key(number), place(number))
    assert not twin.flush(0.01)
    go_on.set()
    assert twin.flush(WAIT_S)
    assert twin.close(WAIT_S)
    assert len(reread(path)) == 3000


def test_the_file_is_for_the_owner_alone(path: str) -> None:
    """Mode 0600 under any umask, also when the file was there before. SQLite gives that to its journal too."""
    Path(path).touch(mode=0o644)
    old_umask = os.umask(0)
    try:
        assert write(path, 1) == []
    finally:
        os.umask(old_umask)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.listdir(os.path.dirname(path)) == ["index.sqlite"]


def test_odd_names_are_names(tmp_path: Path) -> None:
    """SQLite's URI syntax does not leak through."""
    path = str(tmp_path / "a b?mode=memory#c%20.sqlite")
    write(path, 1)
    assert os.listdir(tmp_path) == [os.path.basename(path)]
    assert reread(path) == [row(1, 1)]


def fill(path: str, count: int = 20_000) -> None:
    write(path, *range(count))


def execute(path: str, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


def overwrite(path: str, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


SPOILT: dict[str, Callable[[str], object]] = {
    "another schema": lambda path: (os.unlink(path), execute(path, "CREATE TABLE slot (what TEXT)")),
    "another version": lambda path: execute(path, "PRAGMA user_version=99"),
    "cut short": lambda path: os.truncate(path, 5000),
    "no database": lambda path: Path(path).write_bytes(b"this is no database " * 1000),
    "a bad first page": lambda path: overwrite(path, 100, b"\xff" * 200),
    # The first page lists no tables; there are as many rows as before, which nothing names.
    "no tables": lambda path: overwrite(path, 103, bytes(2)),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_an_unusable_database_is_deleted_with_one_warning(
    path: str, spoil: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    """It starts empty, works, and keeps no junk beside it."""
    fill(path)
    spoil(path)
    caplog.set_level(logging.WARNING)
    index, rows = DurableIndex.open(path, GEOMETRY)
    assert flat(rows) == []
    assert len(caplog.records) == 1
    assert "deleted, starting empty" in caplog.text
    index.put(key(1), place(1))
    assert index.close(WAIT_S)
    assert os.listdir(os.path.dirname(path)) == ["index.sqlite"]
    assert reread(path) == [row(1, 1)]
    assert len(caplog.records) == 1


def renumber(path: str, seqs: Mapping[int, int]) -> None:
    """Give rows, by their place in the table's only page, other numbers of one byte."""
    connection = sqlite3.connect(path)
    (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'slot'").fetchone()
    connection.close()
    content = bytearray(Path(path).read_bytes())
    page_at = (root - 1) * 4096
    for place, seq in seqs.items():
        cell_at = page_at + int.from_bytes(content[page_at + 8 + 2 * place :][:2], "big")
        assert content[cell_at + 1] == place + 1
        content[cell_at + 1] = seq
    Path(path).write_bytes(content)


def test_an_index_whose_rows_are_out_of_order_is_made_anew(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is too large to be checked whole. They are not read round and round."""
    monkeypatch.setattr("nixl_offload.index.database._CHECKED_BYTES", 0)
    monkeypatch.setattr("nixl_offload.index.database._ROWS_PER_READ", 4)
    fill(path, 16)
    renumber(path, {8: 2, 9: 3, 10: 4, 11: 5})
    index, rows = DurableIndex.open(path, GEOMETRY)
    assert flat(itertools.islice(rows, 10)) == [row(n, n) for n in range(8)]
    index.put(key(1), place(1))
    assert index.close(WAIT_S)
    assert reread(path) == [row(1, 1)]


def test_commands_do_not_read_rows_out_of_order_round_and_round(path: str) -> None:
    fill(path, 10)
    renumber(path, {9: 2})
    with pytest.raises(TierError, match="is damaged: its rows are out of order"):
        list(itertools.islice(IndexReader(Path(path)).rows(), 100))


@pytest.mark.parametrize("plant", ["symlink", "dangling", "hardlink", "fifo"])
def test_an_index_that_leads_elsewhere_is_made_anew(path: str, tmp_path: Path, plant: str) -> None:
    """Nothing outside is created, written or given another mode."""
    target = tmp_path / "target"
    if plant != "dangling":
        target.write_bytes(b"precious")
        target.chmod(0o644)
    if plant == "fifo":
        os.mkfifo(path)
    elif plant == "hardlink":
        os.link(target, path)
    else:
        os.symlink(target, path)
    assert write(path, 1) == []
    assert reread(path) == [row(1, 1)]
    assert stat.S_ISREG(os.lstat(path).st_mode)
    if plant == "dangling":
        assert not target.exists()
    else:
        assert target.read_bytes() == b"precious"
        assert stat.S_IMODE(target.stat().st_mode) == 0o644


@pytest.mark.parametrize("other", [{**GEOMETRY, "slot_classes": "8192"}, {}, {**GEOMETRY, "more": "1"}])
def test_another_geometry_starts_empty(path: str, other: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """Offsets of another geometry mean nothing here."""
    fill(path, 10)
    assert len(reread(path)) == 10
    assert reread(path, other) == []
    assert "another geometry" in caplog.text
    assert reread(path) == []


@pytest.mark.parametrize("away", ["moved", "deleted", "not yet there"])
def test_rows_wait_for_storage_that_is_away(tmp_path: Path, caplog: pytest.LogCaptureFixture, away: str) -> None:
    """One warning; meanwhile nothing is written elsewhere, nor to an open file that has no name any more."""
    directory, elsewhere = tmp_path / "kv", tmp_path / "elsewhere"
    path = str(directory / "index.sqlite")
    if away != "not yet there":
        directory.mkdir()
    index, rows = DurableIndex.open(path, GEOMETRY, batch_delay_s=0.0, retry_interval_s=0.01)
    assert flat(rows) == []
    index.put(key(1), place(1))
    if away == "moved":
        assert index.flush(WAIT_S)
        directory.rename(elsewhere)
    elif away == "deleted":
        assert index.flush(WAIT_S)
        Path(path).unlink()
    index.put(key(2), place(2))
    if away != "deleted":
        wait_until(lambda: bool(caplog.records))
        assert not index.flush(0.05)
        assert not directory.exists()
        elsewhere.rename(directory) if away == "moved" else directory.mkdir()
    assert index.flush(WAIT_S)
    assert index.close(WAIT_S)
    assert len(caplog.records) == 1
    assert reread(path) == [row(2, 2)] if away == "deleted" else [row(1, 1), row(2, 2)]


def test_a_database_that_is_damaged_while_it_is_in_use_is_made_anew_at_once(path: str) -> None:
    index, _ = DurableIndex.open(path, GEOMETRY, retry_interval_s=10 * WAIT_S)
    index.put(key(1), place(1))
    assert index.flush(WAIT_S)
    with open(path, "r+b") as file:
        file.write(b"nonsense" * 2048)
    index.put(key(2), place(2))
    assert index.flush(WAIT_S)
    assert index.close(WAIT_S)
    assert reread(path) == [row(2, 2)], "what was on its way when it was found is kept"


def test_closing_while_storage_fails_says_so_and_ends(tmp_path: Path) -> None:
    """One attempt, then the writer is gone: shutdown does not hang on a dead disk."""
    index, _ = DurableIndex.open(str(tmp_path / "never" / "index.sqlite"), GEOMETRY, retry_interval_s=1000.0)
    index.put(key(1), place(1))
    assert not index.close(WAIT_S)
    assert not index._writer.is_alive()


def test_the_queue_is_bounded_and_its_loss_leaves_no_stale_row(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """Storage is away for more calls than may wait: afterwards the database holds what came last, all of it true."""
    index, _ = DurableIndex.open(path, GEOMETRY, batch_delay_s=0.0, retry_interval_s=0.01, max_queued_ops=100)
    slots = 500
    for number in range(slots):
        index.put(key(number), place(number))
        if number % 50 == 0:
            assert index.flush(WAIT_S)
    assert index.flush(WAIT_S)
    directory = os.path.dirname(path)
    os.rename(directory, directory + ".away")
    truth = {key(number): place(number) for number in range(slots)}
    for number in range(slots, 5000):
        if number == slots + 20:
            # From here on a batch has been taken out of the queue and refused.
            wait_until(lambda: bool(index._batch))
        gone = key(number - slots)
        location = truth.pop(gone)
        index.delete(gone)
        truth[key(number)] = location
        index.put(key(number), location)
        assert len(index._queue) <= 100
    os.rename(directory + ".away", directory)
    assert index.flush(WAIT_S)
    assert index.close(WAIT_S)
    assert "made anew" in caplog.text
    found = reread(path)
    assert 0 < len(found) <= 100
    for k, offset, slot_bytes in found:
        assert truth[k] == Location(0, offset, slot_bytes)


@pytest.mark.parametrize("kind", ["closed", "beside"])
def test_an_index_with_a_write_ahead_log_is_refused(path: str, kind: str) -> None:
    """No version of ours writes one. A command says so, and an engine begins with an empty index."""
    fill(path, 1)
    if kind == "closed":
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
    else:
        Path(path + "-wal").symlink_to("/dev/zero")
    with pytest.raises(TierError, match="no rollback journal"):
        list(IndexReader(Path(path)).rows())
    assert write(path) == []
    assert os.listdir(os.path.dirname(path)) == ["index.sqlite"]


TRANSACTION = """
    import os, sqlite3, sys
    connection = sqlite3.connect(sys.argv[1], isolation_level=None)
    connection.execute(f"PRAGMA cache_size={sys.argv[2]}")
    connection.execute("BEGIN")
    connection.execute("UPDATE slot SET slot_bytes = 0")
    insert = "INSERT INTO slot (key, offset, slot_bytes) VALUES (randomblob(36), ?, 0)"
    connection.executemany(insert, [(-n,) for n in range(1, 2000)])
    os.kill(os.getpid(), 9)
"""


def kill_in_transaction(path: str, *, pages_written: bool) -> bytes:
    """Have a process change all rows and be killed. Return the journal that it has left."""
    cached = "1" if pages_written else "10000"
    subprocess.run([sys.executable, "-c", textwrap.dedent(TRANSACTION), path, cached], check=False)
    return Path(path + "-journal").read_bytes()


@pytest.mark.parametrize("pages_written", [True, False])
def test_a_journal_that_a_kill_has_left_is_applied_and_gone(path: str, pages_written: bool) -> None:
    """Whether it counts, for pages were written, or not, for it was not yet synced; without anything being written."""
    fill(path, 10)
    journal = kill_in_transaction(path, pages_written=pages_written)
    assert bool(journal[0]) == pages_written
    index, rows = DurableIndex.open(path, GEOMETRY)
    assert flat(rows) == [row(n, n) for n in range(10)]
    assert os.listdir(os.path.dirname(path)) == ["index.sqlite"]
    assert index.close(WAIT_S)
    assert os.listdir(os.path.dirname(path)) == ["index.sqlite"]


def test_a_journal_without_its_index_is_not_applied_to_the_next_one(path: str) -> None:
    """As a removal that was cut short leaves it."""
    fill(path, 10)
    kill_in_transaction(path, pages_written=True)
    os.unlink(path)
    assert write(path, 1) == []
    assert os.listdir(os.path.dirname(path)) == ["index.sqlite"]
    assert reread(path) == [row(1, 1)]


def test_a_reader_that_stays_costs_a_warning_and_no_row(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody's open transaction keeps commits out; they come when it ends."""
    fill(path, 10)
    index, _ = DurableIndex.open(path, GEOMETRY, batch_delay_s=0.0, retry_interval_s=0.01)
    stays = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
    stays.execute("BEGIN")
    assert stays.execute("SELECT count(*) FROM slot").fetchone() == (10,)
    index.put(key(10), place(10))
    wait_until(lambda: bool(caplog.records))
    assert not index.flush(0.05)
    stays.close()
    assert index.flush(WAIT_S)
    assert index.close(WAIT_S)
    assert [record.message.count("locked") for record in caplog.records] == [1]
    assert len(reread(path)) == 11


def disk_bytes(path: str) -> int:
    return sum(os.path.getsize(path + end) for end in ("", "-journal") if os.path.exists(path + end))


def test_max_bytes_holds_under_churn(tmp_path: Path) -> None:
    """Filled, thinned out at random and filled again, several times, with the longest keys: never above the bound."""
    path = str(tmp_path / "index.sqlite")
    choose = random.Random(11)
    n_keys, highest_bytes = 6_000, 0
    alive: dict[int, Key] = {}
    free = list(range(n_keys))
    database = Database(path, GEOMETRY)
    for _ in range(5):
        batch: list[tuple[Key, int, int] | tuple[Key]] = []
        choose.shuffle(free)
        while free:
            slot = free.pop()
            alive[slot] = Key(choose.randbytes(64))
            batch.append((alive[slot], (1 << 45) + slot * 4096, 1 << 30))
        for slot in choose.sample(sorted(alive), int(0.66 * n_keys)):
            batch.append((alive.pop(slot),))
            free.append(slot)
        for start in range(0, len(batch), BATCH_OPS):
            database.write(batch[start : start + BATCH_OPS])
            highest_bytes = max(highest_bytes, disk_bytes(path))
    database.disconnect()
    bound_bytes = max_bytes(n_keys, 64)
    fixed_bytes = max_bytes(0, 64)
    assert highest_bytes <= bound_bytes
    assert os.path.getsize(path) <= bound_bytes - fixed_bytes
    # And it is a bound that one can live with: 1 KiB per key of some 100 KiB.
    assert bound_bytes - fixed_bytes < 1024 * n_keys


def test_clearing_forgets_what_is_written_and_what_waits_and_nothing_after(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of keys that nobody deletes one by one go too; it is no trouble, so nobody is warned."""
    caplog.set_level(logging.INFO)
    index, _ = DurableIndex.open(path, GEOMETRY, batch_delay_s=0.0)
    for number in range(3000):
        index.put(key(number), place(number))
    assert index.flush(WAIT_S)
    index.put(key(5000), place(5000))
    index.clear()
    index.put(key(1), place(7))
    assert index.close(WAIT_S)
    index.clear()
    assert caplog.messages == []
    assert reread(path) == [row(1, 7)]


def test_an_abandoned_index_leaves_the_file_to_its_new_owner(path: str) -> None:
    """Neither what waits nor a pending removal touches a file that another engine has put in its place."""
    index, _ = DurableIndex.open(path, GEOMETRY, batch_delay_s=WAIT_S)
    index.put(key(1), place(1))
    os.unlink(path)
    other, _ = DurableIndex.open(path, GEOMETRY)
    other.put(key(2), place(2))
    assert other.close(WAIT_S)
    index.abandon()
    index.clear()
    index.put(key(3), place(3))
    index._writer.join(WAIT_S / 2)
    assert not index._writer.is_alive(), "at once, although it was waiting"
    assert index.close(WAIT_S)
    assert reread(path) == [row(2, 2)]
    idle, _ = DurableIndex.open(path, GEOMETRY)
    idle.abandon()
    idle._writer.join(WAIT_S)
    assert not idle._writer.is_alive()


def test_rows_cleared_while_the_directory_is_away_do_not_come_back_with_it(tmp_path: Path) -> None:
    """There is nothing to delete while it is away, and that does not count as done."""
    (tmp_path / "d").mkdir()
    path = str(tmp_path / "d" / "index.sqlite")
    index, _ = DurableIndex.open(path, GEOMETRY, batch_delay_s=0.0, retry_interval_s=0.01)
    index.put(key(1), place(1))
    assert index.flush(WAIT_S)
    (tmp_path / "d").rename(tmp_path / "away")
    index.clear()
    assert not index.flush(0.1)
    (tmp_path / "away").rename(tmp_path / "d")
    assert index.flush(WAIT_S)
    assert index.close(WAIT_S)
    assert reread(path) == []
