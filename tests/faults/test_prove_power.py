"""A little of the proof's part ``power``, and that its checks can fail: see tests/prove/power."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.prove import power
from tests.prove.power.disk import PAGE, Crash, crash_times, small
from tests.prove.power.histories import STORIES
from tests.prove.power.pages import MIXTURES, run
from tests.prove.power.recording import NEVER, Call, History, Kind, build, record

WORK = """
import os, sys
root = sys.argv[1]
os.mkdir(f"{root}/a")
for name, content in (("draft", b"1" * 5000), ("other", b"2" * 100)):
    fd = os.open(f"{root}/a/{name}", os.O_RDWR | os.O_CREAT, 0o600)
    os.pwritev(fd, [content[:50], content[50:]], 0)
    if name == "draft":
        os.fsync(fd)
    os.close(fd)
os.rename(f"{root}/a/draft", f"{root}/a/whole")
os.truncate(f"{root}/a/other", 10)
os.symlink("nothing", f"{root}/link")
"""


@pytest.fixture
def history(tmp_path: Path) -> History:
    """What a few calls have left in the log."""
    (tmp_path / "module.py").write_text(WORK)
    root = tmp_path / "root"
    root.mkdir()
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        return record(build(tmp_path), root, "module")
    finally:
        os.chdir(here)


def test_what_a_process_does_is_recorded(history: History) -> None:
    """Each call once, with its data and the file that it is on, whatever that is called by then."""
    told = [(call.kind, call.path or call.file, call.other, len(call.data)) for call in history.calls]
    assert told == [
        (Kind.MKDIR, "a", "", 0),
        (Kind.CREATE, "a/draft", "", 0),
        (Kind.WRITE, 1, "", 5000),
        (Kind.SYNC, "a/draft", "", 0),
        (Kind.CREATE, "a/other", "", 0),
        (Kind.WRITE, 2, "", 100),
        (Kind.RENAME, "a/draft", "a/whole", 0),
        (Kind.RESIZE, "a/other", "", 0),
    ]


def test_what_was_synced_is_there_and_all_else_may_be(history: History) -> None:
    """By its name a file is whole or absent; one that was not synced may have any of what was done to it."""
    for naming in ("journal", "any"):
        disks = list(small(history, naming, 0))
        wholes = {disk.files.get("a/whole") for disk in disks}
        assert wholes == {None, b"1" * 5000}
        drafts = {disk.files.get("a/draft") for disk in disks}
        assert drafts == {None, b"", b"1" * 5000}
        assert {disk.files.get("a/other") for disk in disks} == {None, b"", b"2" * 100, b"2" * 10, bytes(10)}
        with_rename = [disk for disk in disks if "a/whole" in disk.files]
        assert all("a/other" in disk.files for disk in with_rename) == (naming == "journal")
    whole = Crash(history, crash_times(history)[-1], "any").whole()
    assert whole.files == {"a/whole": b"1" * 5000, "a/other": b"2" * 10}


def test_of_a_short_history_each_page_may_be_lost_and_each_length(history: History) -> None:
    """Of a file that was not synced any page may lack, with or without its length; what was synced is on all disks."""
    crash = Crash(history, crash_times(history)[0], "journal")
    disks = crash.every_disk(100)
    assert disks is not None
    drafts = {disk.files["a/draft"] for disk in disks if "a/draft" in disk.files}
    first, last = b"1" * PAGE, b"1" * (5000 - PAGE)
    kept = {b"", first, first + last}
    lost = {rest * begin + end for rest in (b"\0", b"\xff") for begin, end in ((5000, b""), (PAGE, last))}
    longer = {first + rest * (5000 - PAGE) for rest in (b"\0", b"\xff")}
    assert drafts == kept | lost | longer
    assert {disk.digest for disk in small(history, "journal", 0) if disk.crashed == crash.at} <= {
        disk.digest for disk in disks
    }
    assert crash.every_disk(3) is None
    assert crash.sure == frozenset()
    assert Crash(history, crash_times(history)[-1], "journal").sure == frozenset()


def test_a_file_whose_data_and_names_were_synced_is_sure() -> None:
    calls = (
        Call(Kind.CREATE, 0, 1, 1, "a", "", 0, 0, b"", 0),
        Call(Kind.WRITE, 2, 3, 1, "", "", 0, 0, b"x", 0),
        Call(Kind.SYNC, 4, 5, 1, "a", "", 0, 0, b"", 0),
    )
    synced = Call(Kind.SYNC, 6, 7, -1, "", "", 0, 0, b"", 0)
    assert Crash(History((*calls, synced), ()), 8, "any").sure == {"a"}
    assert Crash(History(calls, ()), 8, "any").sure == frozenset()
    for later in (
        Call(Kind.WRITE, 8, 9, 1, "", "", 0, 0, b"y", 0),
        Call(Kind.RENAME, 8, 9, 1, "a", "b", 0, 0, b"", 0),
    ):
        assert Crash(History((*calls, synced, later), ()), 10, "any").sure == frozenset()


def test_a_write_that_the_sync_did_not_wait_for_is_not_certain() -> None:
    file = Call(Kind.CREATE, 0, 1, 1, "f", "", 0, 0, b"", 0)
    write = Call(Kind.WRITE, 2, 4, 1, "", "", 0, 0, b"x", 0)
    sync = Call(Kind.SYNC, 3, 5, 1, "f", "", 0, 0, b"", 0)
    for ended, certain in ((4, False), (NEVER, False)):
        crash = Crash(History((file, replace(write, ended=ended), sync), ()), 6, "any")
        assert (not crash.loose_data) == certain
    later = replace(sync, began=5, ended=6)
    assert not Crash(History((file, write, later), ()), 7, "any").loose_data
    assert Crash(History((file, write, later), ()), 6, "any").loose_data


def test_each_mixture_of_two_images_is_whole_or_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And without checksums it is not, which this would notice."""
    monkeypatch.chdir(tmp_path)
    mixture = replace(MIXTURES["new over old"], most=200)
    outcome = run(mixture)
    assert outcome.is_good(), outcome
    assert outcome.counts["whole"] > 0
    (tmp_path / "again").mkdir()
    monkeypatch.chdir(tmp_path / "again")
    assert run(replace(mixture, verify="header")).wrong


@pytest.mark.parametrize("name", ["slab/first start", "tree/first start, aio"])
def test_a_server_opens_whatever_a_power_cut_leaves(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = power.try_story(name, replace(STORIES[name], torn=0), "any", "20", most=16)
    assert outcome.is_good(), outcome
    assert outcome.counts["disks"] > 16
    assert outcome.counts["whole"] > 0
