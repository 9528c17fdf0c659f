"""Proves for a shared directory and any fault of its files or its filesystem: no KV block sees bytes that are not the
chunk's, storing stops with one warning and resumes by itself, and a directory that hangs delays nothing else.
"""

from __future__ import annotations

import contextlib
import os
import resource
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.movers.base import Op
from nixl_offload.movers.threaded import CopyMover
from nixl_offload.tiers.shared import links as tree_link
from nixl_offload.types import Outcome
from tests.contract.suites.faulty_mover import Fault, FaultKind, FaultyMover
from tests.faults.conftest import SmallFilesystem, warnings_of
from tests.hostile import HostileFilesystem
from tests.unit.engine_rig import NUM_BLOCKS, Clock, Rig, rigs, until
from tests.unit.link_rig import drafts, shards, tree

OK, FAILED, CORRUPT, DROPPED = Outcome.OK, Outcome.FAILED, Outcome.CORRUPT, Outcome.DROPPED
Make = Callable[..., Rig]
SOURCE, TARGET = [1, 2, 3, 4], [5, 6, 7, 8]


make = pytest.fixture(rigs)


@pytest.fixture
def hostile() -> Iterator[HostileFilesystem]:
    filesystem = HostileFilesystem()
    yield filesystem
    filesystem.release()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- the files ------------------------------------------------------------------------------------------------------


def _make_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # as /dev/zero
    except PermissionError:
        pytest.skip("may not make devices")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, HEADER_BYTES + 100),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 4096),
    "gone": Path.unlink,
    "symlink": lambda path: path.rename(path.with_name("elsewhere")) and path.symlink_to("elsewhere"),
    "directory": lambda path: (path.unlink(), path.mkdir()),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "socket": lambda path: (path.unlink(), os.mknod(path, stat.S_IFSOCK | 0o600)),
    "device": lambda path: (path.unlink(), _make_device(path)),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("shape", ["per_layer", "direct_blocks"])
def test_a_file_that_is_not_as_stored_fails_its_chunk_only(make: Make, tmp_path: Path, shape: str, damage: str) -> None:
    """No KV block is touched, the filesystem is not blamed for it however often, and storing anew heals what can be."""
    rig = make(shape, link=tree(tmp_path / "shared"))
    wanted = rig.bytes_of(SOURCE)
    assert rig.store(0, [rig.chunk(0, SOURCE), rig.chunk(1, SOURCE)]) == (OK, OK)
    path = shards(tmp_path / "shared")[0]
    DAMAGES[damage](path)
    rig.wipe(0xEE)
    for job in range(1, 20):
        assert rig.load(job, [rig.chunk(0, TARGET)]) == (FAILED,)
    assert set(rig.bytes_of(range(NUM_BLOCKS))) == {0xEE}
    assert rig.load(20, [rig.chunk(1, TARGET)]) == (OK,)
    assert rig.bytes_of(TARGET) == wanted
    assert rig.link.trouble == "none"
    if damage != "directory":
        assert rig.store(21, [rig.chunk(0, TARGET)]) == (OK,)
        rig.wipe()
        assert rig.load(22, [rig.chunk(0, TARGET)]) == (OK,)
        assert rig.bytes_of(TARGET) == wanted


@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.REFUSE])
@pytest.mark.parametrize("shape", ["per_layer", "direct_per_layer"])
def test_a_failed_write_leaves_nothing_and_pauses_storing(
    make: Make, tmp_path: Path, shape: str, kind: FaultKind, caplog: pytest.LogCaptureFixture
) -> None:
    """At each transfer of a store: no file, no draft, no descriptor; one warning; loads go on; storing resumes."""
    root, clock, mover = tmp_path / "shared", Clock(), FaultyMover(CopyMover())
    rig = make(shape, mover, link=tree(root), clock=clock)
    assert rig.store(0, [rig.chunk(0, SOURCE)]) == (OK,)
    job, before = 1, open_files()
    for nth in range(len(mover.submitted)):
        caplog.clear()
        mover.script = [Fault(mover.submitted.count(Op.WRITE) + nth, kind, op=Op.WRITE, amount=4096)]
        assert rig.store(job, [rig.chunk(1, SOURCE)]) == (FAILED,)
        assert rig.store(job + 1, [rig.chunk(1, SOURCE)] * 3) == (FAILED,) * 3
        assert rig.load(job + 2, [rig.chunk(0, TARGET)]) == (OK,)
        until(lambda: not drafts(root))
        assert len(shards(root)) == 1
        until(lambda: rig.link.may_load() and rig.link.trouble == "io")
        assert warnings_of(caplog, "nothing is stored until this is over") == 1
        clock.ahead_s += 61
        assert rig.store(job + 3, [rig.chunk(2, SOURCE)]) == (OK,)
        shards(root)[1].unlink()
        clock.ahead_s += 120
        job += 4
    until(lambda: open_files() == before)


@contextlib.contextmanager
def descriptors(left: int) -> Iterator[None]:
    """Leave this process only so many."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest, taken = max(map(int, os.listdir("/proc/self/fd"))), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/", os.O_PATH))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + left, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)


@pytest.mark.parametrize(("left", "outcome"), [(6, OK), (0, DROPPED)])
def test_few_descriptors_slow_a_tier_down_and_do_not_put_it_out_of_use(
    make: Make, tmp_path: Path, left: int, outcome: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    """No more chunks travel at once than there are descriptors for, and a line names the limit. Where none is left the
    chunks are not moved, and the directory is not blamed.
    """
    clock = Clock()
    rig = make("per_layer", link=tree(tmp_path / "shared"), clock=clock)
    assert rig.store(0, [rig.chunk(0, SOURCE)]) == (OK,)
    clock.ahead_s += 2
    with descriptors(left):
        assert set(rig.store(1, [rig.chunk(key, SOURCE) for key in range(1, 33)])) == {outcome}
        assert rig.load(2, [rig.chunk(0, TARGET)]) == (outcome,)
    assert rig.link.trouble == "none"
    assert "RLIMIT_NOFILE" in caplog.text
    clock.ahead_s += 2
    assert rig.store(3, [rig.chunk(33, SOURCE)]) == (OK,)


def test_a_slab_goes_on_where_no_descriptor_is_left(make: Make) -> None:
    """It needs none to store; only its look whether the file is still there does, before the file grows, too."""
    clock = Clock()
    rig = make("per_layer", clock=clock)
    assert rig.store(0, [rig.chunk(0, SOURCE)]) == (OK,)
    clock.ahead_s += 2
    with descriptors(0):
        assert rig.store(1, [rig.chunk(1, SOURCE)]) == (OK,)
        assert rig.store(2, [rig.chunk(20, SOURCE)]) == (DROPPED,)
    assert (rig.link.trouble, rig.link.may_store()) == ("none", True)


# -- the filesystem -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["full", "readonly", "permission"])
def test_storing_stops_with_one_warning_and_resumes(
    make: Make, small_filesystem: SmallFilesystem, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A real disk, full or read-only: no file is half there, loads go on, probing finds the end of it."""
    clock = Clock()
    rig = make("packed_blocks", link=tree(small_filesystem.path), clock=clock)
    wanted = rig.bytes_of(SOURCE)
    assert rig.store(0, [rig.chunk(0, SOURCE)]) == (OK,)
    # With a file open for writing a remount is refused, and the files are made immutable instead.
    hold = (small_filesystem.path / "held").open("wb") if trouble == "permission" else None
    small_filesystem.fill() if trouble == "full" else small_filesystem.make_read_only()
    for job in range(1, 15):
        assert rig.store(job, [rig.chunk(job, SOURCE)] * 2) == (FAILED,) * 2
        assert rig.load(100 + job, [rig.chunk(0, TARGET)]) == (OK,)
        clock.ahead_s += 0.5
    assert rig.bytes_of(TARGET) == wanted
    assert rig.link.trouble == trouble
    assert warnings_of(caplog, "nothing is stored until this is over") == 1
    if hold is not None:
        hold.close()
    small_filesystem.drain() if trouble == "full" else small_filesystem.make_writable()
    clock.ahead_s += 61
    assert rig.store(50, [rig.chunk(1, SOURCE)]) == (OK,)
    assert rig.load(51, [rig.chunk(1, TARGET)]) == (OK,)
    assert len(shards(small_filesystem.path)) == 2
    assert not drafts(small_filesystem.path)


def test_an_unmounted_directory_is_not_filled(
    make: Make, small_filesystem: SmallFilesystem, caplog: pytest.LogCaptureFixture
) -> None:
    """The mount goes away under a running engine: nothing is made on the disk below, storing resumes later."""
    clock = Clock()
    rig = make("packed_blocks", link=tree(small_filesystem.path), clock=clock)
    wanted = rig.bytes_of(SOURCE)
    assert rig.store(0, [rig.chunk(0, SOURCE)]) == (OK,)
    small_filesystem.take_away()
    for job in range(1, 10):
        assert rig.store(job, [rig.chunk(0, SOURCE)]) == (FAILED,)
        assert rig.load(100 + job, [rig.chunk(0, TARGET)]) == (FAILED,)
        clock.ahead_s += 1
    assert not list(small_filesystem.path.iterdir())
    assert warnings_of(caplog, "nothing is stored until this is over") == 1
    small_filesystem.bring_back()
    assert rig.load(20, [rig.chunk(0, TARGET)]) == (OK,)
    assert rig.bytes_of(TARGET) == wanted
    clock.ahead_s += 61
    assert rig.store(21, [rig.chunk(1, SOURCE)]) == (OK,)


def test_a_root_that_is_not_there_at_start_is_no_error(make: Make, tmp_path: Path) -> None:
    clock, root = Clock(), tmp_path / "shared"
    link = tree(root)
    root.rmdir()
    rig = make("per_layer", link=link, clock=clock)
    assert rig.link.trouble == "unreachable"
    assert rig.store(0, [rig.chunk(0, SOURCE)]) == (FAILED,)
    assert rig.load(1, [rig.chunk(0, TARGET)]) == (FAILED,)
    assert not root.exists()
    root.mkdir()
    clock.ahead_s += 2
    assert rig.store(2, [rig.chunk(0, SOURCE)]) == (OK,)
    assert rig.load(3, [rig.chunk(0, TARGET)]) == (OK,)


# -- it hangs -------------------------------------------------------------------------------------------------------


def test_a_filesystem_that_hangs_costs_each_chunk_five_seconds_once(
    make: Make, tmp_path: Path, hostile: HostileFilesystem
) -> None:
    """Opening and creating hang: chunks are FAILED after the limit, then at once; when the calls return at last, what
    they opened is closed, what they created removed, and the tier is used again.
    """
    root, clock = tmp_path / "shared", Clock()
    rig = make("per_layer", link=tree(root, filesystem=hostile), clock=clock, staging_slots=16)
    assert rig.store(0, [rig.chunk(0, SOURCE)]) == (OK,)
    before = open_files()
    hostile.hang("create", "open")
    rig.engine.submit_store(1, [rig.chunk(1, SOURCE)])
    rig.engine.submit_load(2, [rig.chunk(0, TARGET)] * 8)
    assert isinstance(rig.link, tree_link.TreeLink)
    until(lambda: rig.link._calls.pending == 9 and hostile.held == 8)
    assert rig.engine.finished() == []
    clock.ahead_s += tree_link.BEGIN_LIMIT_S
    assert rig.collect(1).outcomes == (FAILED,)
    assert rig.collect(2).outcomes == (FAILED,) * 8
    assert rig.store(3, [rig.chunk(1, SOURCE)]) == (FAILED,)
    assert rig.load(4, [rig.chunk(0, TARGET)] * 4) == (FAILED,) * 4
    assert rig.collect(4).errors == ("storage is out of use: io",)
    hostile.release()
    until(lambda: open_files() == before and not drafts(root))
    clock.ahead_s += 61
    assert rig.load(5, [rig.chunk(0, TARGET)]) == (OK,)
    assert rig.store(6, [rig.chunk(1, SOURCE)]) == (OK,)


def test_calls_that_never_return_are_bounded(
    make: Make, tmp_path: Path, hostile: HostileFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trial after trial is given up: from the bound on nothing is asked any more, and nothing piles up."""
    monkeypatch.setattr(tree_link, "MAX_PENDING", 12)
    root, clock = tmp_path / "shared", Clock()
    rig = make("per_layer", link=tree(root, filesystem=hostile), clock=clock)
    hostile.hang("create", "open")
    link = rig.link
    assert isinstance(link, tree_link.TreeLink)
    full_for = 0
    for job in range(300):
        rig.engine.submit_load(job, [rig.chunk(0, TARGET)])
        until(lambda: hostile.held or link.trouble != "none")
        time.sleep(0.002)
        clock.ahead_s += 31
        assert rig.collect(job).outcomes == (FAILED,)
        assert link._calls.pending <= 12
        full_for += link._calls.pending == 12
        if full_for == 10:
            break
    assert full_for == 10, "the bound is reached, and held"
    assert not rig.link.may_store()
    hostile.release()
    until(lambda: rig.link._calls.pending == 0)
    clock.ahead_s += 61
    assert rig.store(100, [rig.chunk(0, SOURCE)]) == (OK,)


def test_a_sync_that_hangs_fails_the_store_and_shows_nothing(
    make: Make, tmp_path: Path, hostile: HostileFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When too many hang, loads fail as well, and the status says so."""
    root, clock = tmp_path / "shared", Clock()
    rig = make("per_layer", link=tree(root, filesystem=hostile), clock=clock)
    before = open_files()
    hostile.hang("sync")
    rig.engine.submit_store(0, [rig.chunk(0, SOURCE)])
    until(lambda: hostile.held == 1)
    rig.engine.wait([0])  # its blocks are free long since
    clock.ahead_s += tree_link.END_LIMIT_S
    assert rig.collect(0).outcomes == (FAILED,)
    for most, loads_fail in ((2, False), (1, True)):
        monkeypatch.setattr(tree_link, "MAX_PENDING", most)
        assert rig.link.may_load() is not loads_fail
        (status,) = rig.engine.statuses()
        assert (status.loads_fail, status.stores_fail) == (loads_fail, True)
    monkeypatch.undo()
    hostile.release()
    until(lambda: not drafts(root))
    assert not shards(root)
    clock.ahead_s += 2
    assert rig.store(1, [rig.chunk(0, SOURCE)]) == (OK,)
    assert rig.link.may_store()
    assert open_files() == before


def test_loads_do_not_wait_behind_the_syncing_of_files(make: Make, tmp_path: Path, hostile: HostileFilesystem) -> None:
    """However many files a busy server has to write down, another is opened, and the next is created, at once."""
    root = tmp_path / "shared"
    rig = make("per_layer", link=tree(root, filesystem=hostile), staging_slots=24)
    assert rig.store(0, [rig.chunk(0, SOURCE)]) == (OK,)
    hostile.hang("sync")
    rig.engine.submit_store(1, [rig.chunk(n, SOURCE) for n in range(1, 13)])
    until(lambda: hostile.held == 8)
    assert rig.load(2, [rig.chunk(0, TARGET)]) == (OK,)
    rig.engine.submit_store(3, [rig.chunk(13, SOURCE)])
    until(lambda: len(drafts(root)) == 13)
    hostile.release()
    assert rig.collect(1).outcomes == (OK,) * 12
    assert rig.collect(3).outcomes == (OK,)


@pytest.mark.parametrize("shape", ["per_layer_pages", "direct_per_layer"])
def test_blocks_are_free_while_a_file_is_synced(
    make: Make, tmp_path: Path, hostile: HostileFilesystem, shape: str
) -> None:
    """A step waits for the reading of its blocks alone, and what is visible in the end has been stored."""
    rig = make(shape, link=tree(tmp_path / "shared", filesystem=hostile))
    hostile.hang("sync")
    rig.engine.submit_store(0, [rig.chunk(0, SOURCE)])
    until(lambda: hostile.held == 1)
    began_s = time.monotonic()
    rig.engine.wait([0], limit_s=50.0)
    assert time.monotonic() - began_s < 40
    assert rig.engine.finished() == []
    # One that is given up beside it does not spoil it.
    hostile.hang("sync", "create")
    rig.engine.submit_store(1, [rig.chunk(1, SOURCE)])
    until(lambda: hostile.held == 2)
    rig.engine.wait([0, 1])
    hostile.release()
    assert rig.collect(0).outcomes == (OK,)
    rig.collect(1)


def test_an_engine_starts_and_closes_beside_a_hanging_filesystem(
    make: Make, tmp_path: Path, hostile: HostileFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither waits for the call that hangs."""
    monkeypatch.setattr(tree_link, "BEGIN_LIMIT_S", 0.05)
    hostile.hang("stat", "create", "open")
    began_s = time.monotonic()
    rig = make("per_layer", link=tree(tmp_path / "shared", filesystem=hostile))
    assert rig.link.trouble == "io"
    assert rig.load(0, [rig.chunk(0, TARGET)]) == (FAILED,)
    rig.engine.close()
    assert time.monotonic() - began_s < 10
    hostile.release()
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("nixl-offload")])
