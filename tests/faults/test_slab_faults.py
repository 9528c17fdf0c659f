"""Real trouble under a slab: a full disk, a read-only one, a vanished directory, a second engine, a killed one."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nixl_offload.errors import LayoutError, TierError
from nixl_offload.index import DurableIndex
from nixl_offload.index.durable import IndexReader
from nixl_offload.stores.filesystem import Filesystem
from nixl_offload.tiers.ownership import DirectoryLock, is_held_by
from nixl_offload.tiers.slab import file as slab_file
from nixl_offload.tiers.slab.directory import TierDirectory
from nixl_offload.tiers.slab.file import SlabFile
from nixl_offload.types import Location
from tests.contexts import back, context_of, opened, slab_config, slab_of
from tests.hostile import HostileFilesystem
from tests.unit.catalog_rig import key
from tests.unit.stored_rig import namespace_of

if TYPE_CHECKING:
    from conftest import SmallFilesystem

KIB, MIB = 1 << 10, 1 << 20
WAIT_S = 20.0
EXTENT = 4 * MIB


@pytest.fixture
def slab(request: pytest.FixtureRequest) -> Iterator[SlabFile]:
    """A slab of 32 MiB, larger than what is left on a filled disk."""
    where = "small_filesystem" if "small_filesystem" in request.fixturenames else "tmp_path"
    place = request.getfixturevalue(where)
    with opened(getattr(place, "path", place) / "kv" / "ns" / "rank-00000.slab", 32 * MIB, EXTENT) as slab:
        yield slab


def refusal(slab: SlabFile, offset: int) -> str:
    with pytest.raises(TierError) as caught:
        back(slab, offset, 64 * KIB)
    return caught.value.cause


def trouble(slab: SlabFile) -> str:
    """What stands against storing now."""
    try:
        slab.check()
    except TierError as error:
        return error.cause
    return "none"


def test_a_full_disk_refuses_whole_extents_and_resumes(small_filesystem: SmallFilesystem, slab: SlabFile) -> None:
    """What is backed stays writable, what is refused takes nothing, and space that comes back is noticed."""
    back(slab, 0, 64 * KIB)
    small_filesystem.fill(leave_bytes=EXTENT // 2)
    free_bytes = small_filesystem.free_bytes
    assert 0 < free_bytes < EXTENT
    assert refusal(slab, EXTENT) == "full"
    assert trouble(slab) == "none", "what has space can be written"
    assert small_filesystem.free_bytes == free_bytes, "a refused extent leaves no space taken"
    assert slab.path.stat().st_size == EXTENT
    back(slab, EXTENT - 64 * KIB, 64 * KIB)
    write_direct(slab.path, 0, EXTENT)
    small_filesystem.fill()
    write_direct(slab.path, 0, EXTENT)
    small_filesystem.drain()
    back(slab, EXTENT, 64 * KIB)
    assert trouble(slab) == "none"


class Boundless(Filesystem):
    """Says that there is room; the last of it goes to another writer."""

    def space(self, target: str | int) -> os.statvfs_result:
        """See Filesystem."""
        return os.statvfs_result((4096, 4096, 1 << 40, 1 << 40, 1 << 40, 0, 0, 0, 0, 255))


def test_space_lost_in_the_middle_of_preallocation_is_given_back(small_filesystem: SmallFilesystem) -> None:
    """When another writer was quicker, the half-reserved extent is undone."""
    with opened(small_filesystem.path / "rank-00000.slab", 32 * MIB, EXTENT, filesystem=Boundless()) as slab:
        back(slab, 2 * EXTENT, 64 * KIB)
        small_filesystem.fill(leave_bytes=EXTENT // 2)
        free_bytes = small_filesystem.free_bytes
        assert refusal(slab, 3 * EXTENT) == "full"
        assert abs(small_filesystem.free_bytes - free_bytes) <= 8 * KIB
        assert slab.path.stat().st_size == 3 * EXTENT


def write_direct(path: Path, offset: int, length_bytes: int) -> None:
    """Write as a mover does: past the page cache, in place."""
    page = mmap.mmap(-1, length_bytes)
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    try:
        assert os.pwritev(fd, [page], offset) == length_bytes
    finally:
        os.close(fd)
        page.close()


@pytest.mark.parametrize("is_open", [False, True])
def test_a_rank_on_a_read_only_medium(small_filesystem: SmallFilesystem, is_open: bool) -> None:
    """The lock can be read there, so the error names the medium; storing resumes."""
    lock = DirectoryLock(small_filesystem.path / "lock")
    lock.acquire()
    slab = SlabFile(small_filesystem.path / "ns" / "rank-00000.slab", 32 * MIB, EXTENT, owner=lock.owner)
    slab.open()
    small_filesystem.make_read_only()
    assert trouble(slab) == "permission"
    if not is_open:
        with pytest.raises(TierError) as caught:
            slab.open()
        assert caught.value.cause == "permission"
    small_filesystem.make_writable()
    if not is_open:
        slab.open()
    back(slab, 0, 64 * KIB)
    other = SlabFile(slab.path, MIB, MIB, owner="another")
    small_filesystem.make_read_only()
    with pytest.raises(TierError, match="in use by another engine"):
        other.open()
    assert trouble(other) == "locked"
    small_filesystem.make_writable()
    slab.close()
    lock.release()


def test_a_lock_on_a_full_disk_says_nothing_wrong(tmp_path: Path) -> None:
    """What cannot be written does not leave the last holder's name: the engine's own ranks would keep off."""
    last = DirectoryLock(tmp_path / "lock")
    last.acquire()
    last.release()
    filesystem = HostileFilesystem()
    lock = DirectoryLock(tmp_path / "lock", filesystem)
    filesystem.refuse(errno.ENOSPC, "write")
    lock.acquire()
    assert (tmp_path / "lock").read_bytes() == b""
    assert is_held_by(tmp_path / "lock", lock.owner)
    filesystem.release()
    lock.acquire()
    with pytest.raises(TierError, match="in use by another engine"):
        is_held_by(tmp_path / "lock", "another")
    lock.release()


@pytest.mark.parametrize("how", ["unmounted", "deleted", "replaced"])
def test_a_file_that_is_gone_is_not_stored_in(small_filesystem: SmallFilesystem, slab: SlabFile, how: str) -> None:
    """Nobody would find what is stored there. A restored backup under the same name is another file, too. Once the
    drive is mounted again, it is used again.
    """
    back(slab, 0, 64 * KIB)
    small_filesystem.take_away(lazily=True) if how == "unmounted" else slab.path.unlink()
    if how == "replaced":
        slab.path.write_bytes(bytes(EXTENT))
    assert refusal(slab, EXTENT) == trouble(slab) == "missing"
    assert slab.path.exists() == (how == "replaced"), "it is not made anew"
    if how == "unmounted":
        assert list(small_filesystem.path.iterdir()) == []
        small_filesystem.bring_back()
        back(slab, EXTENT, 64 * KIB)


def test_reopening_keeps_every_byte_and_cuts_what_is_beyond(tmp_path: Path) -> None:
    """Regression: a file opened so that other offsets are truncated. A smaller capacity alone cuts, its tail only."""
    path = tmp_path / "rank-00000.slab"
    with opened(path, 32 * MIB, EXTENT) as slab:
        back(slab, 5 * EXTENT, EXTENT)
    marks = {extent * EXTENT: b"%d" % extent for extent in (0, 3, 5)}
    with path.open("r+b") as file:
        for at, mark in marks.items():
            file.seek(at)
            file.write(mark)
    with opened(path, 32 * MIB, EXTENT) as slab:
        back(slab, 0, 4 * EXTENT)
    assert all(path.read_bytes()[at : at + 1] == mark for at, mark in marks.items())
    with opened(path, 16 * MIB, EXTENT) as slab:
        assert path.stat().st_size == 16 * MIB
        assert path.read_bytes()[3 * EXTENT : 3 * EXTENT + 1] == b"3"
        with pytest.raises(LayoutError):
            back(slab, 16 * MIB - KIB, 2 * KIB)


class Slow(Filesystem):
    """Writes fail while ``is_full``, at once or where the file has ``room_bytes``."""

    def __init__(self) -> None:
        self.is_full, self.room_bytes = False, 0

    def write(self, fd: int, memory: memoryview | mmap.mmap, offset: int) -> int:
        """See Filesystem."""
        if self.is_full and os.fstat(fd).st_size >= self.room_bytes:
            raise OSError(errno.ENOSPC, "full")
        return super().write(fd, memory, offset)


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SlabFile, Slow]]:
    """A slab whose filesystem cannot preallocate."""

    def refuse(*arguments: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    filesystem = Slow()
    monkeypatch.setattr("nixl_offload.stores.filesystem.fallocate", refuse)
    path = tmp_path / "rank-00000.slab"
    with opened(path, 32 * MIB, EXTENT, direct_io=False, filesystem=filesystem) as slab:
        yield slab, filesystem


def test_a_filesystem_without_fallocate_is_used_without(
    slow: tuple[SlabFile, Slow], caplog: pytest.LogCaptureFixture
) -> None:
    """Space is real all the same, a full disk loses none, what is there stays, and the log says so once."""
    slab, filesystem = slow
    filesystem.is_full, filesystem.room_bytes = True, MIB
    assert refusal(slab, 0) == "full"
    assert slab.path.stat().st_size == 0
    filesystem.is_full = False
    back(slab, MIB, MIB)
    assert slab.path.stat().st_size == EXTENT
    slab.path.write_bytes(b"x" * EXTENT)
    back(slab, 30 * MIB, 2 * MIB)
    back(slab, 0, 4 * MIB)
    assert slab.path.stat().st_size == 32 * MIB
    assert slab.path.stat().st_blocks * 512 >= 32 * MIB
    assert slab.path.read_bytes()[:EXTENT] == b"x" * EXTENT
    assert len([record for record in caplog.records if "preallocate" in record.message]) == 1


def test_growing_by_zeros_lets_others_go_on(slow: tuple[SlabFile, Slow], monkeypatch: pytest.MonkeyPatch) -> None:
    """The pump goes on after each step. Of two chunks one grows the file at a time: where the first one fails, the file
    is cut to what it was, and the other one's space is not in it yet.
    """
    slab, filesystem = slow
    monkeypatch.setattr(slab_file, "ZEROS_STEP_BYTES", MIB)
    first, second = slab.ensure(0, KIB), slab.ensure(EXTENT, KIB)
    for size in (1 * MIB, 2 * MIB):
        next(first)
        next(second)
        assert slab.path.stat().st_size == size
    filesystem.is_full = True
    with pytest.raises(TierError):
        next(first)
    assert slab.path.stat().st_size == 0
    filesystem.is_full = False
    assert sum(1 for _ in second) == 8
    assert slab.path.stat().st_size == 2 * EXTENT


@pytest.mark.parametrize("refused", ["read", "write"])
def test_direct_io_is_tried_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture, refused: str) -> None:
    """A filesystem whose O_DIRECT open succeeds and whose I/O fails goes on buffered, says so once, leaves no file."""
    filesystem = HostileFilesystem()
    with opened(tmp_path / "rank-00000.slab", 32 * MIB, EXTENT, filesystem=filesystem) as slab:
        if not slab.direct_io:
            pytest.skip("the filesystem of the temporary directory has no direct I/O to lose")
        filesystem.refuse(errno.EINVAL, refused)
        for _ in range(2):
            slab.path.unlink()
            slab.open()
            assert not slab.direct_io
        assert len([record for record in caplog.records if "direct I/O" in record.message]) == 1
        assert [path.name for path in tmp_path.iterdir()] == ["rank-00000.slab"]


@pytest.mark.parametrize("plant", ["symlink", "hard link", "directory", "pipe"])
def test_what_is_no_file_of_its_own_is_neither_slab_nor_lock(tmp_path: Path, plant: str) -> None:
    """Who can make names in the directory, and no more, has us write to none of our other files."""
    target = tmp_path / "target"
    target.write_bytes(b"precious" * 1000)
    target.chmod(0o644)
    make: Callable[[Path], object] = {
        "symlink": lambda path: path.symlink_to(target),
        "hard link": lambda path: path.hardlink_to(target),
        "directory": Path.mkdir,
        "pipe": os.mkfifo,
    }[plant]
    for name in ("rank-00000.slab", "lock"):
        make(tmp_path / name)
    with pytest.raises(TierError):
        SlabFile(tmp_path / "rank-00000.slab", 4096, EXTENT).open()
    with pytest.raises(TierError):
        DirectoryLock(tmp_path / "lock").acquire()
    assert target.read_bytes() == b"precious" * 1000
    assert stat.S_IMODE(target.stat().st_mode) == 0o644


HOLDER = r"""
import os, sys, time
from pathlib import Path
from nixl_offload.stores.filesystem import Filesystem
from nixl_offload.tiers.ownership import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
lock.acquire()
if sys.argv[2] == "fork":
    if os.fork() == 0:
        os.write(1, b"child %d\n" % os.getpid())
        time.sleep(60)
        os._exit(0)
os.write(1, b"engine %d\n" % os.getpid())
time.sleep(60)
"""


@pytest.mark.parametrize("forks", ["alone", "fork"])
def test_a_killed_engine_leaves_no_lock(tmp_path: Path, forks: str) -> None:
    """A second process is refused, with the holder's pid; after kill -9 it may, though a forked child lives on."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "lock"), forks]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as holder:
        try:
            assert holder.stdout is not None
            said = {holder.stdout.readline().split()[0] for _ in range(2 if forks == "fork" else 1)}
            assert said == ({"engine", "child"} if forks == "fork" else {"engine"})
            lock = DirectoryLock(tmp_path / "lock")
            with pytest.raises(TierError, match=f"pid {holder.pid} on ") as caught:
                lock.acquire()
            assert caught.value.cause == "locked"
            holder.kill()
            holder.wait()
            lock.acquire()
            assert lock.is_held()
            lock.release()
        finally:
            os.killpg(holder.pid, signal.SIGKILL) if forks == "fork" else holder.kill()


def open_tier(
    path: Path, *, capacity_bytes: int = 32 * MIB, keep_free_percent: int = 0, model: str = "org/model"
) -> TierDirectory:
    config = slab_config(path, capacity_bytes, keep_free_percent=keep_free_percent)
    context = context_of(namespace_of(model=model), [64 * KIB])
    return TierDirectory.open(config, context)


def test_starting_on_a_full_disk_keeps_what_is_there(
    small_filesystem: SmallFilesystem, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that finds its disk full starts, serves the slab it has but for what its other files may need, and says
    how much room is missing.
    """
    tier = open_tier(small_filesystem.path / "kv")
    with opened(slab_of(tier), tier.rank_bytes, tier.extent_bytes) as slab:
        back(slab, 0, 16 * MIB)
    tier.close()
    small_filesystem.fill()
    caplog.set_level(logging.INFO)
    again = open_tier(small_filesystem.path / "kv")
    assert 15 * MIB <= again.rank_bytes <= 16 * MIB
    assert again.extent_bytes == tier.extent_bytes
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with opened(slab_of(again), again.rank_bytes, again.extent_bytes) as slab:
        back(slab, 0, again.rank_bytes)
    again.close()


def test_a_slab_leaves_a_share_of_the_drive_free(small_filesystem: SmallFilesystem) -> None:
    """Under any capacity it is sized by what the drive has, so that its chunks are evicted instead of new ones
    refused. Another model's slab makes room. What others write later stops its growth.
    """
    path = small_filesystem.path / "kv"
    for model in ("org/one", "org/other"):
        tier = open_tier(path, capacity_bytes=1 << 40, keep_free_percent=25, model=model)
        with opened(slab_of(tier), tier.rank_bytes, tier.extent_bytes, kept_free=0.25) as slab:
            back(slab, 0, tier.rank_bytes)
        tier.close()
        space = os.statvfs(path)
        assert 0.25 <= space.f_bavail / space.f_blocks < 0.3
    with opened(slab.path, 2 * slab.rank_bytes, EXTENT, kept_free=0.25) as larger:
        assert refusal(larger, slab.rank_bytes + EXTENT) == "full"


# The index on such a medium: rows wait, the process lives.


def index_at(path: Path) -> tuple[DurableIndex, list[int]]:
    """Return an index, and the offsets that it held."""
    index = DurableIndex(str(path), 4096, 1 << 16, {}, batch_delay_s=0.0, retry_interval_s=0.01)
    return index, [row.offset for row in index.rows()]


def put(index: DurableIndex, number: int, timeout_s: float = WAIT_S) -> bool:
    """Put a row; return whether it is on the medium."""
    index.put(key(number), Location(0, number * 4096, 4096))
    return index.flush(timeout_s)


@pytest.mark.parametrize("writable_again", [True, False])
def test_a_medium_that_refuses_writes_costs_rows_and_not_the_process(
    small_filesystem: SmallFilesystem, writable_again: bool
) -> None:
    """What was written before is read on."""
    path = small_filesystem.path / "index.table"
    index, _ = index_at(path)
    assert put(index, 1)
    os.sync()
    small_filesystem.make_read_only()
    assert not put(index, 2, timeout_s=0.5)
    assert [row.offset for row in IndexReader(path).rows()] == [4096]
    if writable_again:
        small_filesystem.make_writable()
        assert put(index, 3)
    assert index.close(WAIT_S) == writable_again
    small_filesystem.make_writable()
    index, offsets = index_at(path)
    assert offsets == ([4096, 2 * 4096, 3 * 4096] if writable_again else [4096])
    assert index.close(WAIT_S)


@pytest.mark.parametrize("small_filesystem", [8 << 20], indirect=True)
def test_a_full_medium_costs_rows_and_not_the_process(small_filesystem: SmallFilesystem) -> None:
    """No room for the next page of the table: its rows wait until there is."""
    path = small_filesystem.path / "index.table"
    index, _ = index_at(path)
    assert put(index, 1)
    small_filesystem.fill()
    number = 1
    while put(index, number := number + 32, timeout_s=0.5):
        assert number < 50_000, "it never was full"
    assert not index.flush(0.5)
    small_filesystem.drain()
    assert put(index, number + 1)
    assert index.close(WAIT_S)
    assert len(list(IndexReader(path).rows())) == number // 32 + 2
