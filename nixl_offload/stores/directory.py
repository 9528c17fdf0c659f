"""A shared directory as a store: a name is a relative path.

Threading: as ``base.Store``. A filesystem that hangs holds the calling thread: the kernel offers no deadline.
Files whose names begin with a dot are drafts, never listed and never read. A symlink in place of a file or of a listed
directory is not followed.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from nixl_offload.errors import StoreError
from nixl_offload.stores.base import ObjectInfo, Store
from nixl_offload.stores.filesystem import REAL, Filesystem
from nixl_offload.stores.tree_files import DRAFT, TreeFiles

_ABSENT: Final = (FileNotFoundError, NotADirectoryError)


class TreeStore(Store):
    """Files below one directory, which is made when missing, once: one that vanishes later is ``unreachable``."""

    name = "tree"

    def __init__(self, directory: str, filesystem: Filesystem = REAL) -> None:
        """``directory`` is absolute. Raises StoreError when it is not there and cannot be made."""
        self.files = TreeFiles(directory, filesystem=filesystem)
        self.where = self.files.root
        self._filesystem = filesystem
        self._closed = False
        with self.files.translating("make the directory"):
            os.makedirs(self.where, mode=0o700, exist_ok=True)

    def __repr__(self) -> str:
        return f"TreeStore({self.where})"

    def head(self, name: str) -> ObjectInfo | None:
        path = self._path(name)
        with self.files.translating(f"look at {name}"), suppress(*_ABSENT):
            found = self._filesystem.stat(path)
            return ObjectInfo(name, found.st_size, found.st_mtime) if stat.S_ISREG(found.st_mode) else None
        self.files.require_root(f"look at {name}")
        return None

    def read_into(self, name: str, offset: int, memory: memoryview) -> None:
        self._check_open()
        memory, done = memory.cast("B"), 0
        opened = self.files.open(name)
        there_bytes = opened.size_bytes - offset
        try:
            with self.files.translating(f"read {name}"):
                while done < memory.nbytes <= there_bytes:
                    got = self._filesystem.read(opened.fd, memory[done:], offset + done)
                    done += got
                    if not got:  # it was cut meanwhile
                        there_bytes = done
        finally:
            self._filesystem.close(opened.fd)
        if there_bytes < memory.nbytes:
            text = f"{memory.nbytes} bytes asked for at offset {offset}, there are {max(0, there_bytes)}"
            raise StoreError(f"{self.where}: read {name}: {text}", cause="short")

    def write(self, name: str, memory: memoryview) -> None:
        self._check_open()
        memory, done = memory.cast("B"), 0
        draft = self.files.create(name, memory.nbytes)
        try:
            with self.files.translating(f"write {name}"):
                while done < memory.nbytes:
                    done += self._filesystem.write(draft.fd, memory[done:], done)
        except BaseException:
            self.files.abandon(draft)
            raise
        self._filesystem.close(draft.fd)
        self.files.publish(draft)

    def delete(self, names: Sequence[str]) -> None:
        paths, first = [self._path(name) for name in names], None
        for path in paths:
            try:
                with self.files.translating(f"delete {os.path.relpath(path, self.where)}"), suppress(*_ABSENT):
                    self._filesystem.unlink(path)
            except StoreError as error:
                first = first or error
        self._prune({path.rpartition("/")[0] for path in paths})
        if first is not None:
            raise first
        self.files.require_root("delete")

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        self._check_open()
        self.files.require_root(f"list {prefix}")
        with self.files.translating(f"list {prefix}"):
            yield from self._walk("", os.fsencode(prefix), os.fsencode(start_after))

    def remove_stale_drafts(self, older_than_s: float, is_ours: Callable[[str], bool] = lambda name: True) -> int:
        """Remove drafts of dead writers, return how many. Take hours: a slow writer has drafts, too.

        ``is_ours`` is asked of the name that a draft was to get: other programs make files that look like drafts.
        Raises the first StoreError after all were tried.
        """
        self._check_open()
        self.files.require_root("remove stale drafts")
        removed, newest_s, first = 0, time.time() - older_than_s, None
        directories = [""]
        while directories:
            above = directories.pop()
            try:
                with self.files.translating("remove stale drafts"), suppress(*_ABSENT):  # gone meanwhile
                    entries = self._filesystem.list(os.path.join(self.where, above))
                    directories += [f"{above}{name}/" for name, is_directory in entries if is_directory]
                    for name, _ in entries:
                        draft, path = DRAFT.fullmatch(name), os.path.join(self.where, above, name)
                        if draft and is_ours(above + draft[1]):
                            with suppress(FileNotFoundError):
                                if self._filesystem.stat(path).st_mtime < newest_s:
                                    self._filesystem.unlink(path)
                                    removed += 1
            except StoreError as error:
                first = first or error
        if first is not None:
            raise first
        return removed

    def close(self) -> None:
        self._closed = True

    def _walk(self, above: str, prefix: bytes, start_after: bytes) -> Iterator[ObjectInfo]:
        """Yield what is in the directory ``above`` (empty, or ending in a slash), in the order of whole names.

        A directory sorts as its name and a slash, as its files' names go on so: "a-b" comes before "a/b".
        """
        hidden = "lost+found" if not above else ""  # of a mount point, and root's alone
        try:
            entries = self._filesystem.list(os.path.join(self.where, above))
        except _ABSENT:
            return  # pruned while we walk
        shown = (each for each in entries if not each[0].startswith(".") and each[0] != hidden)
        for name in sorted(os.fsencode(above + name + "/" * is_directory) for name, is_directory in shown):
            if name.endswith(b"/"):
                passed = name < start_after and not start_after.startswith(name)
                if not passed and (name.startswith(prefix) or prefix.startswith(name)):
                    yield from self._walk(os.fsdecode(name), prefix, start_after)
            elif name > start_after and name.startswith(prefix):
                with suppress(FileNotFoundError):
                    text = os.fsdecode(name)
                    found = self._filesystem.stat(os.path.join(self.where, text))
                    if stat.S_ISREG(found.st_mode):
                        yield ObjectInfo(text, found.st_size, found.st_mtime)

    def _prune(self, directories: set[str]) -> None:
        """Remove directories that are empty now, and those above that become so, up to the root."""
        for lowest in sorted(directories, reverse=True):
            directory = lowest
            with suppress(OSError):
                while len(directory) > len(self.where):
                    self._filesystem.remove_directory(directory)
                    directory = directory.rpartition("/")[0]

    def _path(self, name: str) -> str:
        self._check_open()
        return self.files.path(name)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self.where}: the store is closed", cause="io")
