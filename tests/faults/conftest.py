"""Fixtures for faults: a real, small filesystem that can be filled, made read-only, and taken away."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def warnings_of(caplog: pytest.LogCaptureFixture, text: str) -> int:
    """How many warnings have this text."""
    return sum(text in record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


class SmallFilesystem:
    """A freshly made ext4 on a loop device, mounted at ``path``.

    ``fill``/``drain`` take and give back its free space, ``make_read_only``/``make_writable`` change how it can be used
    (also under a running engine that has files open), ``take_away``/``bring_back`` unmount and mount it.
    """

    def __init__(self, image: Path, path: Path, size_bytes: int) -> None:
        self.image = image
        self.path = path
        self._immutable: list[Path] = []
        with image.open("wb") as file:
            file.truncate(size_bytes)
        # No journal and nothing reserved for root: what is free is free, and all of it can be taken.
        command = ["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=0", str(image)]
        subprocess.run(command, check=True, capture_output=True)
        path.mkdir()
        self.bring_back()

    @property
    def free_bytes(self) -> int:
        """Space that is left."""
        space = os.statvfs(self.path)
        return space.f_bavail * space.f_frsize

    def fill(self, leave_bytes: int = 0) -> None:
        """Take all free space but about ``leave_bytes``, block by block at the end."""
        with (self.path / "filler").open("ab") as file:
            step = self.free_bytes - leave_bytes
            while step >= 4096:
                with contextlib.suppress(OSError):
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, step)
                step = min(step // 2, self.free_bytes - leave_bytes)

    def drain(self) -> None:
        """Give back what ``fill`` took."""
        (self.path / "filler").unlink(missing_ok=True)

    def make_read_only(self) -> None:
        """Refuse every write from now on.

        A remount where nothing is open for writing (EROFS). Else every file and directory becomes immutable, which
        binds open descriptors and root too (EPERM).
        """
        if subprocess.run(["mount", "-o", "remount,ro", str(self.path)], check=False, capture_output=True).returncode:
            level = [self.path]  # by levels, for nothing leaves a directory that is immutable
            while level:
                subprocess.run(["chattr", "+i", *map(str, level)], check=True, capture_output=True)
                self._immutable += level
                inside = [path for directory in level if directory.is_dir() for path in directory.iterdir()]
                level = [path for path in inside if path.is_file() or path.is_dir()]

    def make_writable(self) -> None:
        """Undo ``make_read_only``."""
        if self._immutable:
            subprocess.run(["chattr", "-i", *map(str, self._immutable)], check=True, capture_output=True)
            self._immutable = []
        else:
            subprocess.run(["mount", "-o", "remount,rw", str(self.path)], check=True, capture_output=True)

    def take_away(self, *, lazily: bool = False) -> None:
        """Unmount. ``lazily``: from under those who have files open."""
        command = ["umount", *(["-l"] if lazily else []), str(self.path)]
        deadline = time.monotonic() + 10
        while subprocess.run(command, check=False, capture_output=True).returncode:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.path} is still busy")
            time.sleep(0.05)

    def bring_back(self) -> None:
        """Mount again what ``take_away`` unmounted."""
        subprocess.run(["mount", "-o", "loop", str(self.image), str(self.path)], check=True, capture_output=True)

    def destroy(self) -> None:
        """Unmount in any state and remove the image; loop devices go with the last user."""
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            self.make_writable()
        while os.path.ismount(self.path):
            self.take_away(lazily=True)
        self.image.unlink()
        self.path.rmdir()


@pytest.fixture
def small_filesystem(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallFilesystem]:
    """Yield a mounted ext4 of 64 MiB (or ``request.param`` bytes); skip where mounting is not permitted."""
    size_bytes = getattr(request, "param", 64 << 20)
    if os.geteuid() != 0 or not all(map(shutil.which, ("mkfs.ext4", "mount", "umount", "chattr"))):
        pytest.skip("needs root, mkfs.ext4, mount and chattr to make a small filesystem")
    try:
        filesystem = SmallFilesystem(tmp_path / "disk.img", tmp_path / "disk", size_bytes)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"a loop mount is not permitted here: {error.stderr.decode(errors='replace').strip()}")
    try:
        yield filesystem
    finally:
        filesystem.destroy()
