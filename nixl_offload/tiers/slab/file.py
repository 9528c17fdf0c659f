"""One rank's slab: its file on disk, with real space under each slot before it is written, and the link to it.

Threading: the pump's thread, after ``connect`` at start. Calls do metadata I/O of a local disk (milliseconds; see
``SlabFile.ensure``), never payload.
Ownership: a ``SlabFile`` owns its descriptor; the link owns its files, and closes them. The scheduler holds the
directory's lock (``directory.py``). Ranks only check it, to leave a directory alone that another engine has taken.
The mover opens the same path by itself. A deleted file stays readable, but nothing more is stored in it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nixl_offload.config import SlabConfig
from nixl_offload.errors import LayoutError, MoverError, TierError
from nixl_offload.hardware.machine import machine_token
from nixl_offload.movers.base import FileId, Mover, close_if_idle, open_file
from nixl_offload.stores.filesystem import REAL, Filesystem, open_own, spare_bytes, tier_error
from nixl_offload.tiers.base import NOTHING_STORED, Link, Place, Target
from nixl_offload.tiers.breaker import Breaker
from nixl_offload.tiers.ownership import is_held_by, kept_free, make_private_directory, require_lock
from nixl_offload.tiers.slots import SlotPlaces
from nixl_offload.types import PAGE_BYTES, Key, Location

logger = logging.getLogger(__name__)

_ZEROS: Final = bytes(1 << 20)
ZEROS_STEP_BYTES: Final = 64 << 20
"""Bytes written at a time while the file grows by zeros; loads of the tier go on between these writes."""
PAUSE_S = 60.0
"""A slab that cannot be written to is tried again at least this often."""
CHECK_EVERY_S = 1.0
"""How often a store first checks a working slab. Without the check, stores into a deleted file would go unnoticed."""


@dataclass(frozen=True, slots=True)
class SlabPlace(Place):
    """All ranks have the same geometry."""

    directory: str
    slots: SlotPlaces
    owner: str = ""
    """The holder of the directory's lock. A rank stores nothing while another owner holds it. "": no check."""
    machine: str = ""
    """The owner's machine (``hardware.machine``); "": unknown."""

    def is_locked_here(self) -> bool:
        """Whether this process runs on the owner's machine. If so, nothing may be made without the owner's lock.

        Threading: any. Reads from /proc.
        """
        return bool(self.owner and self.machine) and self.machine == machine_token()


def rank_file_name(rank: int) -> str:
    """Return the name of a rank's slab within its namespace's directory."""
    return f"rank-{rank:05d}.slab"


class SlabFile:
    """The file that holds ``[0, rank_bytes)`` of one rank. Construct it, then call ``open``.

    ``direct_io`` asks for O_DIRECT. After ``open``, the attribute ``direct_io`` says whether the file supports it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rank_bytes: int,
        extent_bytes: int,
        *,
        direct_io: bool = True,
        owner: str = "",
        is_locked_here: bool = False,
        kept_free: float = 0.0,
        filesystem: Filesystem = REAL,
    ) -> None:
        """Take the allocator's geometry. No file is touched before ``open``.

        ``owner``: who may hold the lock in the parent of the file's directory (``SlabPlace.owner``); "": anybody.
        ``is_locked_here``: ``open`` fails unless the owner holds it (``SlabPlace.is_locked_here``). ``kept_free``: the
        file does not grow if less than this share of the filesystem would stay free.
        """
        self.path = Path(path)
        self.rank_bytes = rank_bytes
        self.extent_bytes = extent_bytes
        self.direct_io = False
        self._filesystem = filesystem
        self._kept_free = kept_free
        self._owner = owner
        self._wants_direct_io = direct_io
        self._is_known_buffered = self._is_known_slow = False
        """Whether it was logged that the filesystem cannot do direct I/O, and that it cannot preallocate."""
        self._fd = -1
        self._identity = (0, 0)
        self._is_locked_here = is_locked_here
        self._backed = bytearray(-(-rank_bytes // extent_bytes))
        """By extent: 1 if it is known to have real space."""
        self._is_growing = False

    def open(self) -> None:
        """Open or create the file (0600, directories 0700). Existing bytes stay, except beyond ``rank_bytes``.

        Raises TierError. ``locked``: the directory belongs to another engine, and no file is changed. ``missing``: the
        engine's lock is required but gone, and no file is made. After a failure the file is closed; ``open`` may be
        tried again.
        """
        self.close()
        try:
            if self._is_locked_here:
                require_lock(self.path.parent, self._owner)
            else:
                self._check_lock()
            make_private_directory(self.path.parent)
            self._fd, status = open_own(self._filesystem, self.path)
            self._check_lock()  # again: another engine may have replaced the directory meanwhile
            if status.st_size > self.rank_bytes:
                self._filesystem.truncate(self._fd, self.rank_bytes)
            self._backed = bytearray(len(self._backed))
            self.direct_io = self._wants_direct_io and self._direct_io_works(status.st_size)
        except OSError as error:
            self.close()
            raise tier_error(error, f"cannot open the slab {self.path}") from error
        except TierError:
            self.close()
            raise
        self._identity = (status.st_dev, status.st_ino)

    def close(self) -> None:
        """Close the descriptor. Idempotent; the bytes stay."""
        if self._fd >= 0:
            self._filesystem.close(self._fd)
            self._fd = -1

    def ensure(self, offset: int, length_bytes: int) -> Generator[None, None, None]:
        """Allocate disk space for ``[offset, offset + length_bytes)`` before it is written, whole extents at a time.

        Afterwards the file's size covers the range, and a write into it cannot meet a full disk, except on filesystems
        that copy on write. Costs one fallocate, or nothing if the extents are known to have space. If the filesystem
        has no fallocate, the file grows by zeros to the end of the extent, ``ZEROS_STEP_BYTES`` between two yields.
        Raises LayoutError (outside the slab) and TierError. After a TierError the file has its old size.
        """
        end = offset + length_bytes
        if offset < 0 or length_bytes <= 0 or end > self.rank_bytes:
            raise LayoutError(f"[{offset}, {end}) is outside the slab's {self.rank_bytes} bytes")
        first, last = offset // self.extent_bytes, (end - 1) // self.extent_bytes
        while (extent := self._backed.find(0, first, last + 1)) >= 0:
            if self._is_growing:  # for another chunk: if this one failed, its truncate would cut off that one's zeros
                yield
                continue
            self._is_growing = True
            try:
                yield from self._back(extent)
                self._backed[extent] = 1
            finally:
                self._is_growing = False

    def check(self) -> int:
        """Return the file's size. Raise TierError if storing cannot work now; a full drive is no reason.

        ``missing``: the path is gone, or leads to another file than the opened one. ``locked``: another engine has the
        directory.
        """
        self._check_lock()
        try:
            probe = self._filesystem.open(str(self.path), os.O_RDWR)
            try:
                status = self._filesystem.stat(probe)
            finally:
                self._filesystem.close(probe)
        except OSError as error:
            raise tier_error(error, f"cannot use {self.path}") from error
        if self._fd < 0 or (status.st_dev, status.st_ino) != self._identity:
            raise TierError(f"{self.path} is another file than the one that was opened", cause="missing")
        return status.st_size

    def _back(self, extent: int) -> Generator[None, None, None]:
        """Preallocate one extent. Raises TierError; then the file has its old size."""
        start = extent * self.extent_bytes
        end = min(start + self.extent_bytes, self.rank_bytes)
        size = self.check()
        needed_bytes = end - max(start, size)
        try:
            if needed_bytes > 0 and spare_bytes(self._filesystem.space(self._fd), self._kept_free) < needed_bytes:
                raise OSError(errno.ENOSPC, "")  # leave the drive's last blocks to others
            if not self._filesystem.allocate(self._fd, end - start, start):
                yield from self._write_zeros(size, end)
        except OSError as error:
            with contextlib.suppress(OSError):  # if the file cannot be changed, no space was taken either
                self._filesystem.truncate(self._fd, size)
            kept = f" and leave {self._kept_free:.0%} of the drive free" if self._kept_free else ""
            raise tier_error(error, f"cannot reserve {needed_bytes} bytes in {self.path}{kept}") from error

    def _write_zeros(self, size: int, end: int) -> Generator[None, None, None]:
        """Grow the file from ``size`` to ``end``. Raises OSError."""
        if not self._is_known_slow:
            self._is_known_slow = True
            logger.warning(
                "%s: this filesystem cannot preallocate; the file grows by zeros, which costs time", self.path
            )
        while size < end:
            step_end = min(size + ZEROS_STEP_BYTES, end)
            while size < step_end:
                size += self._filesystem.write(self._fd, memoryview(_ZEROS)[: step_end - size], size)
            yield

    def _check_lock(self) -> None:
        """Raise TierError if another engine has locked the directory."""
        is_held_by(self.path.parent.parent / "lock", self._owner)

    def _direct_io_works(self, size: int) -> bool:
        """Test O_DIRECT by reading a page, as an open alone proves nothing. In a new file, write the page first."""
        fd = -1
        try:
            fd = self._filesystem.open(str(self.path), os.O_RDWR | os.O_DIRECT)
            with mmap.mmap(-1, PAGE_BYTES) as page:
                if not size:
                    try:
                        self._filesystem.write(fd, page, 0)
                    except OSError as error:
                        if error.errno == errno.EINVAL:
                            raise
                        # Other errors, such as a full disk, say nothing about O_DIRECT; the read decides.
                self._filesystem.read(fd, page, 0)
        except OSError as error:
            if not self._is_known_buffered:
                self._is_known_buffered = True
                why = os.strerror(error.errno or 0)
                logger.warning(
                    "%s: the filesystem cannot do direct I/O (%s); going on through the page cache", self.path, why
                )
            return False
        finally:
            if fd >= 0:
                self._filesystem.close(fd)
        return True


def open_link(config: SlabConfig, place: SlabPlace, rank: int, mover: Mover) -> SlabLink:
    """Open a rank's slab and those of its ``neighbours``; the link closes them. Raises TierError."""
    with contextlib.ExitStack() as undo:
        slabs = []
        for each in [rank, *place.slots.neighbours(rank)]:
            slab = SlabFile(
                os.path.join(place.directory, rank_file_name(each)),
                rank_bytes=place.slots.rank_bytes,
                extent_bytes=place.slots.extent_bytes,
                direct_io=config.direct_io,
                owner=place.owner,
                is_locked_here=place.is_locked_here(),
                kept_free=kept_free(config),
            )
            slab.open()  # the first rank to open it creates it
            undo.callback(slab.close)
            slabs.append(slab)
        undo.pop_all()
    return SlabLink(slabs[0], mover, time.monotonic, neighbours=slabs[1:])


class SlabLink(Link):
    """A rank's slab, its file in the mover, and its health. A chunk lies at the offset of its location.

    After a failure, an open file stays readable, so loads go on while storing is paused.
    """

    shares_file = True

    def __init__(
        self, slab: SlabFile, mover: Mover, clock: Callable[[], float], *, neighbours: Sequence[SlabFile] = ()
    ) -> None:
        """Take over open slabs. ``neighbours``: slabs of other ranks, only to read (``SlotPlaces.seen_from``)."""
        self.name = f"slab tier {slab.path}"
        self.mover = mover
        self._slab = slab
        self._slabs = [slab, *neighbours]
        self._clock = clock
        self._stores = Breaker(
            f"Slab tier {slab.path}", threshold=1, longest_pause_s=PAUSE_S, flap_window_s=PAUSE_S, effect=NOTHING_STORED
        )
        self._files: list[FileId] = []
        """The mover's file of each slab; shorter until all are open."""
        self._check_s = clock()

    @property
    def trouble(self) -> str:
        return self._stores.cause or "none"

    def connect(self) -> None:
        """Open the files; if that fails, the tier starts disabled and is tried again later."""
        self._probe(self._clock())

    def may_store(self) -> bool:
        """Whether to store now. Checks a working slab every ``CHECK_EVERY_S``, and a failed one when a trial is due."""
        now_s = self._clock()
        if not self._stores.allows(now_s):
            return False
        if self._stores.closed and now_s < self._check_s:
            return True
        return self._probe(now_s)

    def may_load(self) -> bool:
        """Always: an open file can be read."""
        return True

    def begin_write(self, key: Key, location: Location, length_bytes: int, shard: int) -> Generator[None, None, Target]:
        """Allocate disk space for the slot, and return its target."""
        try:
            yield from self._slab.ensure(location.offset, length_bytes)
            return Target(self._opened(0), location.offset)
        except (TierError, OSError) as error:
            found = error if isinstance(error, TierError) else TierError(str(error), cause="io")
            if found.cause != "files":
                self._stores.failed(found.cause, str(found), self._clock())
            raise found from error

    def end_write(self, target: Target) -> Generator[None, None, None]:
        """Do nothing: the index makes a slot visible when all ranks have reported."""
        yield from ()

    def fail_write(self, target: Target, error: str | None) -> None:
        """Record the failure, with the cause from a check of the slab."""
        if error is None:
            return
        cause = "io"
        try:
            self._slab.check()
        except TierError as found:
            cause = found.cause
        self._stores.failed(cause, error, self._clock())

    def begin_read(self, key: Key, location: Location, length_bytes: int, shard: int) -> Generator[None, None, Target]:
        yield from ()
        which, offset = divmod(location.offset, self._slab.rank_bytes)
        return Target(self._opened(which), offset)

    def end_read(self, target: Target) -> None:
        """Do nothing: the file stays open for the next read."""

    def fail_read(self, target: Target, error: str | None) -> None:
        """Do nothing: a slab that cannot be read in one place may be sound in all others."""

    def close(self) -> None:
        for file in self._files:
            close_if_idle(self.mover, file)  # a file that late I/O may still touch stays open until the mover closes
        self._files = []
        for slab in self._slabs:
            slab.close()

    def _opened(self, which: int) -> FileId:
        if which >= len(self._files):
            raise TierError(f"{self._slab.path} is not open", cause="missing")
        return self._files[which]

    def _probe(self, now_s: float) -> bool:
        self._check_s = now_s + CHECK_EVERY_S
        try:
            self._slab.check()
            for slab in self._slabs[len(self._files) :]:
                file = open_file(self.mover, str(slab.path), slab.rank_bytes, direct_io=slab.direct_io)
                self._files.append(file)
        except (TierError, MoverError, OSError) as error:
            cause = error.cause if isinstance(error, TierError) else "io"
            if cause == "files" and self._stores.closed:
                return True  # out of descriptors, so it cannot be checked now; it worked at the last check
            self._stores.failed(cause, str(error), now_s)
            return False
        self._stores.succeeded(now_s)
        return True
