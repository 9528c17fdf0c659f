"""What is a tree's own: modes, drafts, names that lead elsewhere, symlinks, directories that vanish."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nixl_offload.errors import StoreError
from nixl_offload.stores.directory import TreeStore
from tests.contract.suites.store_suite import cause_of, read, write
from tests.hostile import HostileFilesystem


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "kv"


@pytest.fixture
def store(root: Path) -> Iterator[TreeStore]:
    store = TreeStore(str(root))
    yield store
    store.close()


def test_modes(store: TreeStore, root: Path) -> None:
    """Only the owner may use files and directories, with any umask."""
    before = os.umask(0)
    try:
        write(store, "ns/ab/x.0000", b"1")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")]}
    assert modes == {"kv": 0o700, "ns": 0o700, "ab": 0o700, "x.0000": 0o600}


@pytest.mark.parametrize("name", ["", "/etc/x", "a/../../x", "..", "a//b", "a/", ".hidden", "a/.x.tmp", "a\0b"])
def test_names_that_lead_elsewhere_are_refused(store: TreeStore, root: Path, name: str) -> None:
    """By every method, before anything is touched."""
    assert cause_of(lambda: write(store, name, b"1")) == "io"
    assert cause_of(lambda: read(store, name, 0, 1)) == "io"
    assert cause_of(lambda: store.head(name)) == "io"
    assert cause_of(lambda: store.delete(["fine", name])) == "io"
    assert list(root.parent.rglob("*")) == [root]


def test_symlinks_are_not_followed(store: TreeStore, root: Path, tmp_path: Path) -> None:
    """In place of a file: neither there nor read, and replaced by a write. In place of a directory: not listed."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "y").write_bytes(b"1")
    write(store, "ns/real", b"1")
    (root / "ns" / "link").symlink_to(secret)
    (root / "ns" / "directory").symlink_to(tmp_path / "elsewhere")
    assert store.head("ns/link") is None
    with pytest.raises(StoreError):
        read(store, "ns/link", 0, 1)
    assert [info.name for info in store.list("")] == ["ns/real"]
    write(store, "ns/link", b"ours")
    assert (secret.read_bytes(), read(store, "ns/link", 0, 4)) == (b"secret", b"ours")
    store.delete(["ns/link"])
    assert secret.exists()


def test_what_is_not_a_file_is_not_there(store: TreeStore, root: Path) -> None:
    """A directory or a pipe under a shard's name is absent, and holds nobody up."""
    write(store, "ns/real", b"1")
    os.mkfifo(root / "ns" / "pipe")
    assert store.head("ns/pipe") is None
    assert store.head("ns") is None
    assert store.head("ns/real/below") is None
    for name in ("ns/pipe", "ns", "ns/real/below"):
        assert cause_of(lambda name=name: read(store, name, 0, 1)) == "missing"  # type: ignore[misc]
    assert [info.name for info in store.list("")] == ["ns/real"]


def test_drafts_are_not_listed_and_go_when_they_are_old(store: TreeStore, root: Path) -> None:
    """Old drafts of dead writers go. A young draft may have a writer, and other dot files are not ours."""
    write(store, "ns/ab/x", b"1")
    old, young, foreign = (root / "ns" / "ab" / name for name in (".x.9-aa.0.tmp", ".x.9-aa.1.tmp", ".nfs0001"))
    for path in (old, young, foreign):
        path.write_bytes(b"half")
    for path in (old, foreign):
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    assert [info.name for info in store.list("")] == ["ns/ab/x"]
    assert store.remove_stale_drafts(3600) == 1
    assert (old.exists(), young.exists(), foreign.exists()) == (False, True, True)


def test_drafts_in_a_directory_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    """The error is raised after all other drafts were tried."""
    filesystem = HostileFilesystem()
    store = TreeStore(str(tmp_path), filesystem)
    drafts = [tmp_path / "ns" / directory / ".x.9-aa.0.tmp" for directory in ("aa", "mm", "zz")]
    for draft in drafts:
        write(store, f"ns/{draft.parent.name}/x", b"1")
        draft.write_bytes(b"half")
        os.utime(draft, (time.time() - 7200, time.time() - 7200))
    filesystem.refuse(errno.EACCES, "list", str(tmp_path / "ns" / "mm"))
    assert cause_of(lambda: store.remove_stale_drafts(3600)) == "permission"
    assert [draft.exists() for draft in drafts] == [False, True, False]


def test_empty_directories_go_with_their_last_file(store: TreeStore, root: Path) -> None:
    """Up to the root, which stays."""
    write(store, "ns/ab/x", b"1")
    write(store, "ns/cd/y", b"1")
    store.delete(["ns/ab/x"])
    assert sorted(path.name for path in root.rglob("*")) == ["cd", "ns", "y"]
    store.delete(["ns/cd/y"])
    assert list(root.iterdir()) == []
    assert list(store.list("")) == []


def test_writers_and_pruners_do_not_trip_each_other(store: TreeStore) -> None:
    """A directory that goes between its making and its use is made again."""
    stop = threading.Event()

    def prune() -> None:
        while not stop.is_set():
            store.delete([f"ns/ab/{number}" for number in range(4)])

    def live(number: int) -> None:
        try:
            for _ in range(300):
                write(store, f"ns/ab/{number}", b"1")
        finally:
            stop.set()

    with ThreadPoolExecutor(5) as pool:
        for done in [*(pool.submit(prune) for _ in range(2)), *(pool.submit(live, number) for number in range(3))]:
            done.result()


def test_a_directory_that_vanishes_is_unreachable(store: TreeStore, root: Path) -> None:
    """It says nothing of what was in it, and is not made again: what would be written there is under a mount point."""
    write(store, "ns/ab/x", b"1")
    gone = root.with_name("gone")
    root.rename(gone)
    for call in (
        lambda: store.head("ns/ab/x"),
        lambda: read(store, "ns/ab/x", 0, 1),
        lambda: write(store, "ns/ab/x", b"2"),
        lambda: store.delete(["ns/ab/x"]),
        lambda: list(store.list("")),
        lambda: store.remove_stale_drafts(1),
    ):
        assert cause_of(call) == "unreachable"
    assert not root.exists()
    gone.rename(root)
    assert read(store, "ns/ab/x", 0, 1) == b"1"


def test_a_listing_survives_files_and_directories_that_go(store: TreeStore, root: Path) -> None:
    """A listing leaves out files that vanish meanwhile."""
    for directory in "abc":
        for number in range(3):
            write(store, f"{directory}/{number}", b"1")
    listing = store.list("")
    seen = [next(listing).name]
    store.delete(["a/1", "b/0", "b/1", "b/2"])
    seen += [info.name for info in listing]
    assert seen == ["a/0", "a/2", "c/0", "c/1", "c/2"]
