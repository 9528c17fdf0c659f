"""The durable index has after a restart what it was given before, and never delays the scheduler."""

from __future__ import annotations

import logging
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from nixl_offload.errors import TierError
from nixl_offload.index.durable import DurableIndex, IndexReader, max_bytes
from nixl_offload.types import Key, Location
from tests.hostile import HostileFilesystem
from tests.unit.catalog_rig import key
from tests.unit.engine_rig import until

GEOMETRY = {"namespace": "aa", "extent_bytes": "4096"}
SLOTS = 30_000
HEADER_BYTES, ROW_BYTES = 4096, 128
WAIT_S = 20.0
AT_ONCE = {"batch_delay_s": 0.0, "retry_interval_s": 0.01}


def rows(*numbers: int) -> list[tuple[Key, int, int]]:
    """Return the rows of keys at their own places."""
    return [(key(number), number * 4096, 4096) for number in numbers]


class Durable:
    """An open index; ``found`` is what it held."""

    def __init__(self, path: str, geometry: Mapping[str, str] = GEOMETRY, slots: int = SLOTS, **options: Any) -> None:
        self.index = DurableIndex(path, 4096, slots, geometry, **options)
        self.found = [row[:3] for row in self.index.rows()]

    def put(self, *numbers: int) -> None:
        """Put keys at their own places."""
        for number in numbers:
            self.index.put(key(number), Location(0, number * 4096, 4096))

    def delete(self, number: int) -> None:
        self.index.delete(Location(0, number * 4096, 4096))

    def write(self, *numbers: int) -> None:
        self.put(*numbers)
        assert self.index.flush(WAIT_S)

    def close(self) -> None:
        assert self.index.close(WAIT_S)


def write(path: str, *numbers: int, **options: Any) -> list[tuple[Key, int, int]]:
    """Open, put keys at their own places, close. Returns the rows that were there."""
    durable = Durable(path, **options)
    durable.put(*numbers)
    durable.close()
    return durable.found


def beside(path: str) -> list[str]:
    """Return what is in the index's directory."""
    return os.listdir(os.path.dirname(path))


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    """Give a path for an index in a directory of its own; afterwards no writer may be left."""
    (tmp_path / "d").mkdir()
    yield str(tmp_path / "d" / "index.table")
    assert [t.name for t in threading.enumerate() if t.name == "nixl-offload-index"] == []


def test_a_restart_finds_what_was_put_in_its_order(path: str) -> None:
    """Puts come back oldest first, deletes do not come back, a key put again is young again."""
    durable = Durable(path)
    assert durable.found == []
    durable.put(5, 3, 9, 1)
    durable.delete(3)
    durable.delete(77)
    durable.write()
    durable.put(5)
    durable.close()
    assert write(path) == rows(9, 1, 5)


def test_any_number_of_rows_comes_back(path: str) -> None:
    """More than a read and more than a piece, in slots all over the file, with keys of all lengths."""
    choose, durable = random.Random(3), Durable(path)
    slots = choose.sample(range(SLOTS), 20_000)
    put = [(Key(choose.randbytes(choose.randrange(5, 65))), slot * 4096, 1 << 30) for slot in slots]
    for name, offset, slot_bytes in put:
        durable.index.put(name, Location(0, offset, slot_bytes))
    durable.close()
    assert write(path) == put
    assert os.path.getsize(path) <= max_bytes(SLOTS)
    digits = put[7][0].hex()
    assert IndexReader(path).find(digits, 9)[0][:3] == put[7]
    assert [row.key for row in IndexReader(path).find("0", 3)] == sorted(k for k, *_ in put if k.hex()[0] == "0")[:3]


def test_a_large_slab_of_few_chunks_takes_the_space_of_these(path: str) -> None:
    """A terabyte of the smallest slots, and two chunks: the rest of the file are holes, which are not read."""
    slots = 1 << 28
    put = [3, slots - 2]
    write(path, *put, slots=slots)
    assert os.stat(path).st_blocks * 512 <= 64 << 10
    assert write(path, slots=slots) == rows(*put)


def test_rows_beyond_a_smaller_capacity_are_cut_off(path: str) -> None:
    write(path, 1, 9, 2)
    assert write(path, 8, 7, slots=8) == rows(1, 2)
    assert os.path.getsize(path) <= max_bytes(8)
    assert write(path) == rows(1, 2, 7)


def test_put_and_delete_do_not_wait_for_the_storage(path: str) -> None:
    """While a write hangs, calls go on; afterwards all of them are there."""
    files = HostileFilesystem()
    durable = Durable(path, filesystem=files, **AT_ONCE)
    files.hang("write")
    durable.put(0)
    until(lambda: files.held > 0)
    durable.put(*range(1, 3000))
    assert not durable.index.flush(0.01)
    files.release()
    durable.close()
    assert len(write(path)) == 3000


def test_a_row_that_is_torn_or_damaged_is_skipped(path: str) -> None:
    """Half of it is of the key before, or a bit has changed. The others stay; nothing is made anew."""
    write(path, *range(6))
    content = bytearray(Path(path).read_bytes())
    at = [HEADER_BYTES + number * ROW_BYTES for number in range(6)]
    content[at[1] + 64 : at[2]] = content[at[5] + 64 : at[5] + ROW_BYTES]
    content[at[2] + 17] ^= 4
    content[at[4] : at[4] + ROW_BYTES] = bytes(ROW_BYTES)
    Path(path).write_bytes(content[:-1])
    assert write(path, 2) == rows(0, 3)
    assert write(path) == rows(0, 3, 2)


def test_the_file_is_for_the_owner_alone(path: str) -> None:
    """Mode 0600 under any umask, even if the file existed before."""
    Path(path).touch(mode=0o644)
    old_umask = os.umask(0)
    try:
        assert write(path, 1) == []
    finally:
        os.umask(old_umask)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert beside(path) == ["index.table"]


def overwrite(path: str, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


SPOILT: dict[str, Callable[[str], object]] = {
    "another version": lambda path: overwrite(path, 19, b"2"),
    "no index": lambda path: Path(path).write_bytes(b"this is no index " * 1000),
    "cut short": lambda path: os.truncate(path, 30),
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_an_unusable_index_is_made_anew_with_one_warning(
    path: str, spoilt: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It starts empty, works, and keeps no junk beside it."""
    write(path, *range(2000))
    SPOILT[spoilt](path)
    if spoilt != "cut short":
        with pytest.raises(TierError, match="is damaged"):
            list(IndexReader(path).rows())
    caplog.set_level(logging.WARNING)
    assert write(path, 1) == []
    assert len(caplog.records) == 1
    assert "is made anew" in caplog.text
    assert beside(path) == ["index.table"]
    assert write(path) == rows(1)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("plant", ["symlink", "dangling", "hardlink", "fifo"])
@pytest.mark.parametrize("name", ["index.table", "index.tmp"])
def test_an_index_that_leads_elsewhere_is_made_anew(path: str, tmp_path: Path, plant: str, name: str) -> None:
    """Nothing outside is created, written or given another mode. The draft of an index is planted, too."""
    target, planted = tmp_path / "target", Path(path).with_name(name)
    if plant != "dangling":
        target.write_bytes(b"precious")
        target.chmod(0o644)
    if plant == "fifo":
        os.mkfifo(planted)
    else:
        (os.link if plant == "hardlink" else os.symlink)(target, planted)
    assert write(path, 1) == []
    assert write(path) == rows(1)
    assert stat.S_ISREG(os.lstat(path).st_mode)
    assert target.exists() == (plant != "dangling")
    if target.exists():
        assert (target.read_bytes(), stat.S_IMODE(target.stat().st_mode)) == (b"precious", 0o644)


@pytest.mark.parametrize("other", [{**GEOMETRY, "extent_bytes": "8192"}, {**GEOMETRY, "more": "1"}])
def test_another_geometry_starts_empty(path: str, other: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """Offsets of another geometry mean nothing here."""
    write(path, *range(10))
    assert write(path, geometry=other) == []
    assert "another geometry" in caplog.text
    assert write(path) == []


@pytest.mark.parametrize("away", ["moved", "deleted", "not yet there"])
def test_rows_wait_for_storage_that_is_away(path: str, caplog: pytest.LogCaptureFixture, away: str) -> None:
    """One warning. Meanwhile nothing is written elsewhere."""
    directory, elsewhere = Path(path).parent, Path(path).parent.with_name("elsewhere")
    if away == "not yet there":
        directory.rmdir()
    durable = Durable(path, **AT_ONCE)
    assert durable.found == []
    durable.put(1)
    if away != "not yet there":
        durable.write()
        Path(path).unlink() if away == "deleted" else directory.rename(elsewhere)
    durable.put(2)
    if away != "deleted":
        until(lambda: bool(caplog.records))
        assert not durable.index.flush(0.05)
        assert not directory.exists()
        elsewhere.rename(directory) if away == "moved" else directory.mkdir()
    durable.write()
    durable.close()
    assert len(caplog.records) == 1
    assert write(path) == (rows(2) if away == "deleted" else rows(1, 2))


def test_an_index_that_is_damaged_while_it_is_in_use_is_made_anew_at_once(path: str) -> None:
    durable = Durable(path, retry_interval_s=10 * WAIT_S)
    durable.write(1)
    overwrite(path, 0, b"nonsense" * 2048)
    durable.write(2)
    durable.close()
    assert write(path) == rows(2), "what was on its way when it was found is kept"


def test_closing_while_storage_fails_says_so_and_ends(tmp_path: Path) -> None:
    """One attempt, then the writer is gone: shutdown does not hang on a dead disk."""
    durable = Durable(str(tmp_path / "never" / "index.table"), retry_interval_s=1000.0)
    durable.put(1)
    assert not durable.index.close(WAIT_S)
    assert not durable.index._writer.is_alive()


def test_calls_that_wait_take_a_row_for_each_slot(path: str) -> None:
    """Storage is away for more calls than there are slots. Afterwards the file has the last ones, all correct."""
    durable, slots, directory = Durable(path, slots=500, **AT_ONCE), 500, os.path.dirname(path)
    durable.write(*range(slots))
    os.rename(directory, directory + ".away")
    for number in range(slots, 5000):
        durable.delete(number % slots)
        durable.index.put(key(number), Location(0, number % slots * 4096, 4096))
    until(lambda: not durable.index._queue)
    assert len(durable.index._rows) <= slots
    os.rename(directory + ".away", directory)
    durable.write()
    durable.close()
    found = [row[0] for row in write(path, slots=slots)]
    assert found == [key(number) for number in range(4500, 5000)]


def test_clearing_forgets_what_is_written_and_what_waits_and_nothing_after(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that were not deleted one by one go too. It is no failure, so nothing is logged."""
    caplog.set_level(logging.INFO)
    durable = Durable(path, **AT_ONCE)
    durable.write(*range(3000))
    durable.put(5000)
    durable.index.clear()
    durable.put(1)
    durable.close()
    durable.index.clear()
    assert caplog.messages == []
    assert write(path) == rows(1)


def test_rows_cleared_while_the_directory_is_away_do_not_come_back_with_it(path: str) -> None:
    """It is emptied when it is back. What was put after the clearing stays."""
    durable, directory = Durable(path, **AT_ONCE), os.path.dirname(path)
    durable.write(1)
    os.rename(directory, directory + ".away")
    durable.index.clear()
    durable.put(2)
    assert not durable.index.flush(0.1)
    os.rename(directory + ".away", directory)
    durable.write()
    durable.close()
    assert write(path) == rows(2)
