"""The durable index has after a restart what it was given before, and never delays the scheduler."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import multiprocessing
import os
import random
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from nixl_offload.errors import TierError
from nixl_offload.index.journal import BATCH_OPS, Database, DurableIndex, IndexReader, max_bytes
from nixl_offload.types import Key, Location
from tests.unit.catalog_rig import key
from tests.unit.engine_rig import until

GEOMETRY = {"namespace": "aa", "slot_classes": "4096"}
WAIT_S = 20.0
MIB = 1 << 20
AT_ONCE = {"batch_delay_s": 0.0, "retry_interval_s": 0.01}


def row(number: int, slot: int) -> tuple[Key, int, int]:
    return key(number), slot * 4096, 4096


def rows(*numbers: int) -> list[tuple[Key, int, int]]:
    return [row(number, number) for number in numbers]


class Journal:
    """An open index; ``found`` is what it held."""

    def __init__(self, path: str, geometry: Mapping[str, str] = GEOMETRY, **options: Any) -> None:
        self.index, self.pieces = DurableIndex.open(path, geometry, **options)

    @property
    def found(self) -> list[tuple[Key, int, int]]:
        return [found[:3] for piece in self.pieces for found in piece]

    def put(self, *numbers: int) -> None:
        """Put keys at their own places."""
        for number in numbers:
            self.index.put(key(number), Location(0, number * 4096, 4096))

    def write(self, *numbers: int) -> None:
        self.put(*numbers)
        assert self.index.flush(WAIT_S)

    def close(self) -> None:
        assert self.index.close(WAIT_S)


def write(path: str, *numbers: int, geometry: Mapping[str, str] = GEOMETRY) -> list[tuple[Key, int, int]]:
    """Open, put keys at their own places, close. Returns the rows that were there."""
    journal = Journal(path, geometry)
    found = journal.found
    journal.put(*numbers)
    journal.close()
    return found


def beside(path: str) -> list[str]:
    """Return what is in the index's directory."""
    return os.listdir(os.path.dirname(path))


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    """Give a path for a database in a directory of its own; afterwards no writer may be left."""
    (tmp_path / "d").mkdir()
    yield str(tmp_path / "d" / "index.sqlite")
    assert [t.name for t in threading.enumerate() if t.name == "nixl-offload-index"] == []


def test_a_restart_finds_what_was_put_in_its_order(path: str) -> None:
    """Puts come back oldest first, deletes do not come back, a key put again is young again."""
    journal = Journal(path)
    assert journal.found == []
    journal.put(5, 3, 9, 1)
    journal.index.delete(key(3))
    journal.index.delete(key(77))
    journal.write()
    journal.put(5)
    journal.close()
    assert write(path) == rows(9, 1, 5)


def test_a_key_of_any_length_takes_no_memory(path: str) -> None:
    """A foreign row with a key of 64 MiB is read neither by an engine nor by commands."""
    write(path, 1)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO slot (key, offset, slot_bytes) VALUES (zeroblob(?), 8192, 4096)", (64 * MIB,))
    tracemalloc.start()
    try:
        assert write(path) == rows(1)
        assert [found.key for found in IndexReader(path).find("00", 9)] == [key(1)]
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


def test_put_and_delete_do_not_wait_for_the_storage(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a write hangs, calls go on; afterwards all of them are there."""
    hangs, go_on, write_batch = threading.Event(), threading.Event(), Database.write

    def hanging(self: Database, batch: list[tuple[Key, int, int] | tuple[Key]]) -> None:
        hangs.set()
        assert go_on.wait(WAIT_S)
        write_batch(self, batch)

    journal = Journal(path, **AT_ONCE)
    monkeypatch.setattr(Database, "write", hanging)
    journal.put(0)
    assert hangs.wait(WAIT_S)
    journal.put(*range(1, 3000))
    assert not journal.index.flush(0.01)
    go_on.set()
    journal.close()
    assert len(write(path)) == 3000


def test_the_file_is_for_the_owner_alone(path: str) -> None:
    """Mode 0600 under any umask, even if the file existed before. SQLite's journal gets the same mode."""
    Path(path).touch(mode=0o644)
    old_umask = os.umask(0)
    try:
        assert write(path, 1) == []
    finally:
        os.umask(old_umask)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert beside(path) == ["index.sqlite"]


def test_odd_names_are_names(tmp_path: Path) -> None:
    """SQLite's URI syntax does not leak through."""
    path = str(tmp_path / "a b?mode=memory#c%20.sqlite")
    write(path, 1)
    assert beside(path) == [os.path.basename(path)]
    assert write(path) == rows(1)


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
    # No version of ours writes one.
    "a write-ahead log": lambda path: execute(path, "PRAGMA journal_mode=WAL"),
    "a write-ahead log beside it": lambda path: Path(path + "-wal").symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_an_unusable_database_is_deleted_with_one_warning(
    path: str, spoilt: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It starts empty, works, and keeps no junk beside it."""
    write(path, *range(20_000))
    SPOILT[spoilt](path)
    if "write-ahead" in spoilt:
        with pytest.raises(TierError, match="no rollback journal"):
            list(IndexReader(path).rows())
    caplog.set_level(logging.WARNING)
    assert write(path, 1) == []
    assert len(caplog.records) == 1
    assert "deleted, starting empty" in caplog.text
    assert beside(path) == ["index.sqlite"]
    assert write(path) == rows(1)
    assert len(caplog.records) == 1


def test_an_index_whose_rows_are_out_of_order_is_made_anew(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index too large for a full check. Reading its rows ends nevertheless."""
    monkeypatch.setattr("nixl_offload.index.journal._CHECKED_BYTES", 0)
    monkeypatch.setattr("nixl_offload.index.journal._ROWS_PER_READ", 4)
    write(path, *range(16))
    connection = sqlite3.connect(path)
    (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'slot'").fetchone()
    connection.close()
    content, page_at = bytearray(Path(path).read_bytes()), (root - 1) * 4096
    for place in range(8, 12):  # of the table's only page
        cell_at = page_at + int.from_bytes(content[page_at + 8 + 2 * place :][:2], "big")
        assert content[cell_at + 1] == place + 1
        content[cell_at + 1] = place - 6
    Path(path).write_bytes(content)
    with pytest.raises(TierError, match="is damaged: its rows are out of order"):
        list(itertools.islice(IndexReader(path).rows(), 100))
    journal = Journal(path)
    assert journal.found == rows(*range(8))
    journal.put(1)
    journal.close()
    assert write(path) == rows(1)


@pytest.mark.parametrize("plant", ["symlink", "dangling", "hardlink", "fifo"])
def test_an_index_that_leads_elsewhere_is_made_anew(path: str, tmp_path: Path, plant: str) -> None:
    """Nothing outside is created, written or given another mode."""
    target = tmp_path / "target"
    if plant != "dangling":
        target.write_bytes(b"precious")
        target.chmod(0o644)
    if plant == "fifo":
        os.mkfifo(path)
    else:
        (os.link if plant == "hardlink" else os.symlink)(target, path)
    assert write(path, 1) == []
    assert write(path) == rows(1)
    assert stat.S_ISREG(os.lstat(path).st_mode)
    assert target.exists() == (plant != "dangling")
    if target.exists():
        assert (target.read_bytes(), stat.S_IMODE(target.stat().st_mode)) == (b"precious", 0o644)


@pytest.mark.parametrize("other", [{**GEOMETRY, "slot_classes": "8192"}, {**GEOMETRY, "more": "1"}])
def test_another_geometry_starts_empty(path: str, other: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """Offsets of another geometry mean nothing here."""
    write(path, *range(10))
    assert write(path, geometry=other) == []
    assert "another geometry" in caplog.text
    assert write(path) == []


@pytest.mark.parametrize("away", ["moved", "deleted", "not yet there"])
def test_rows_wait_for_storage_that_is_away(path: str, caplog: pytest.LogCaptureFixture, away: str) -> None:
    """One warning. Meanwhile nothing is written elsewhere, nor to an open file that was deleted."""
    directory, elsewhere = Path(path).parent, Path(path).parent.with_name("elsewhere")
    if away == "not yet there":
        directory.rmdir()
    journal = Journal(path, **AT_ONCE)
    assert journal.found == []
    journal.put(1)
    if away != "not yet there":
        journal.write()
        Path(path).unlink() if away == "deleted" else directory.rename(elsewhere)
    journal.put(2)
    if away != "deleted":
        until(lambda: bool(caplog.records))
        assert not journal.index.flush(0.05)
        assert not directory.exists()
        elsewhere.rename(directory) if away == "moved" else directory.mkdir()
    journal.write()
    journal.close()
    assert len(caplog.records) == 1
    assert write(path) == (rows(2) if away == "deleted" else rows(1, 2))


def test_a_database_that_is_damaged_while_it_is_in_use_is_made_anew_at_once(path: str) -> None:
    journal = Journal(path, retry_interval_s=10 * WAIT_S)
    journal.write(1)
    overwrite(path, 0, b"nonsense" * 2048)
    journal.write(2)
    journal.close()
    assert write(path) == rows(2), "what was on its way when it was found is kept"


def test_closing_while_storage_fails_says_so_and_ends(tmp_path: Path) -> None:
    """One attempt, then the writer is gone: shutdown does not hang on a dead disk."""
    journal = Journal(str(tmp_path / "never" / "index.sqlite"), retry_interval_s=1000.0)
    journal.put(1)
    assert not journal.index.close(WAIT_S)
    assert not journal.index._writer.is_alive()


def test_the_queue_is_bounded_and_its_loss_leaves_no_stale_row(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """Storage is away for more calls than the queue holds. Afterwards the database holds the last ones, all correct."""
    journal, slots = Journal(path, max_queued_ops=100, **AT_ONCE), 500
    for number in range(0, slots, 50):
        journal.write(*range(number, number + 50))
    directory = os.path.dirname(path)
    os.rename(directory, directory + ".away")
    truth = {key(number): number for number in range(slots)}
    for number in range(slots, 5000):
        if number == slots + 20:  # from here on a batch has been taken out of the queue and refused
            until(lambda: bool(journal.index._batch))
        gone = key(number - slots)
        slot = truth[key(number)] = truth.pop(gone)
        journal.index.delete(gone)
        journal.index.put(key(number), Location(0, slot * 4096, 4096))
        assert len(journal.index._queue) <= 100
    os.rename(directory + ".away", directory)
    journal.write()
    journal.close()
    assert "made anew" in caplog.text
    found = write(path)
    assert 0 < len(found) <= 100
    assert all(each == (each[0], truth[each[0]] * 4096, 4096) for each in found)


TRANSACTION = """
    import os, sqlite3, sys
    connection = sqlite3.connect(sys.argv[1], isolation_level=None)
    connection.execute("PRAGMA cache_size=1")
    connection.execute("BEGIN")
    connection.execute("UPDATE slot SET slot_bytes = 0")
    insert = "INSERT INTO slot (key, offset, slot_bytes) VALUES (randomblob(36), ?, 0)"
    connection.executemany(insert, [(-n,) for n in range(1, 2000)])
    os.kill(os.getpid(), 9)
"""


def kill_in_transaction(path: str) -> None:
    """Make a process change all rows, write pages, and kill it. It leaves a journal."""
    write(path, *range(10))
    subprocess.run([sys.executable, "-c", textwrap.dedent(TRANSACTION), path], check=False)
    assert Path(path + "-journal").read_bytes()[0]


@pytest.mark.parametrize("by_command", [True, False])
def test_a_journal_that_a_kill_has_left_is_applied_and_gone(path: str, by_command: bool) -> None:
    """Without anything being written. A command that reads applies it as an engine does."""
    kill_in_transaction(path)
    if by_command:
        assert [(row.key, row.offset, row.slot_bytes) for row in IndexReader(path).rows()] == rows(*range(10))
    journal = Journal(path)
    assert journal.found == rows(*range(10))
    assert beside(path) == ["index.sqlite"]
    journal.close()


def test_a_journal_without_its_index_is_not_applied_to_the_next_one(path: str) -> None:
    """An interrupted removal may leave such a journal."""
    kill_in_transaction(path)
    os.unlink(path)
    assert write(path, 1) == []
    assert beside(path) == ["index.sqlite"]
    assert write(path) == rows(1)


def test_a_reader_that_stays_costs_a_warning_and_no_row(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """A reader's open transaction blocks commits; they are made when it ends."""
    write(path, *range(10))
    journal = Journal(path, **AT_ONCE)
    stays = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
    stays.execute("BEGIN")
    assert stays.execute("SELECT count(*) FROM slot").fetchone() == (10,)
    journal.put(10)
    until(lambda: bool(caplog.records))
    assert not journal.index.flush(0.05)
    stays.close()
    journal.write()
    journal.close()
    assert [record.message.count("locked") for record in caplog.records] == [1]
    assert len(write(path)) == 11


def test_max_bytes_holds_under_churn(path: str) -> None:
    """Filled, thinned out at random and filled again, several times, with the longest keys: never above the bound."""
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
            sizes = [os.path.getsize(path + end) for end in ("", "-journal") if os.path.exists(path + end)]
            highest_bytes = max(highest_bytes, sum(sizes))
    database.disconnect()
    bound_bytes = max_bytes(n_keys)
    fixed_bytes = max_bytes(0)
    assert highest_bytes <= bound_bytes
    assert os.path.getsize(path) <= bound_bytes - fixed_bytes
    assert bound_bytes - fixed_bytes < 1024 * n_keys, "a bound that one can live with"


def test_clearing_forgets_what_is_written_and_what_waits_and_nothing_after(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of keys that were not deleted one by one go too. It is no failure, so nothing is logged."""
    caplog.set_level(logging.INFO)
    journal = Journal(path, **AT_ONCE)
    journal.write(*range(3000))
    journal.put(5000)
    journal.index.clear()
    journal.put(1)
    journal.close()
    journal.index.clear()
    assert caplog.messages == []
    assert write(path) == rows(1)


def test_rows_cleared_while_the_directory_is_away_do_not_come_back_with_it(path: str) -> None:
    """While the directory is away there is nothing to delete; the clear is done when it is back."""
    journal, directory = Journal(path, **AT_ONCE), os.path.dirname(path)
    journal.write(1)
    os.rename(directory, directory + ".away")
    journal.index.clear()
    assert not journal.index.flush(0.1)
    os.rename(directory + ".away", directory)
    journal.write()
    journal.close()
    assert write(path) == []


def connections() -> int:
    gc.collect()
    return sum(type(each) is sqlite3.Connection for each in gc.get_objects())


def test_a_forked_child_does_not_close_the_index(path: str) -> None:
    """SQLite would wait for a lock that the writer had, or roll the parent's transaction back."""
    gc.freeze()  # the child collects what this test has made, not all that the tests before it have left
    try:
        held = [Database(path, {})]
        held[0].connect()
        before = connections()

        def ends() -> None:
            held.clear()
            sys.exit(before - connections())

        child = multiprocessing.get_context("fork").Process(target=ends)
        child.start()
        child.join(200.0)
        assert child.exitcode == 0
        held.clear()
        assert connections() == before - 1
    finally:
        gc.unfreeze()
