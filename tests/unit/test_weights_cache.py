"""Remembered digests: unchanged files are not read again, changed files are. A cache of others is not believed."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nixl_offload.config import parse_config
from nixl_offload.identity import weights_cache
from nixl_offload.identity.settings import text_setting
from nixl_offload.identity.weights import PIECE_BYTES, WeightsDigest, cache_directory_of
from nixl_offload.identity.weights_cache import CACHE_PREFIX, WeightsCache, keeps_change_time
from nixl_offload.identity.weights_files import ModelFile, list_files
from nixl_offload.tiers.slab import other_namespaces
from nixl_offload.tiers.slab.inspect import SlabInspector
from tests.contexts import slab_config

PATIENCE_S = 60.0
SETTLE_S = 2.1
"""Files younger than two seconds are not remembered."""
WEIGHTS_BYTES = 8 << 20
LIE = "0" * 64


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Return a directory on a filesystem that keeps change times, which not every temporary directory does."""
    parent = None if keeps_change_time(tempfile.gettempdir()) else "/dev/shm"
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def model(place: Path) -> Path:
    """Return a model whose files have settled; tests only read it."""
    directory = place / "model"
    write_model(directory)
    time.sleep(SETTLE_S)
    return directory


def write_model(directory: Path) -> None:
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(os.urandom(WEIGHTS_BYTES))
    (directory / "config.json").write_text("{}")


def weights_of(model: Path) -> ModelFile:
    return next(file for file in list_files(str(model)) if file.holds_weights)


def known(model: Path, cache: Path, host: str | None = None) -> str | None:
    """Return the remembered digest of the weights."""
    remembered = WeightsCache(cache, host)
    remembered.refresh()
    return remembered.get(weights_of(model))


def bytes_read() -> int:
    """Return how many bytes this process has asked the kernel for."""
    return int(Path("/proc/self/io").read_text().split()[1])


def identify(model: Path, cache: Path | None) -> tuple[str, bool]:
    """Return the digest, and whether the process has read the weights for it."""
    before = bytes_read()
    digest = WeightsDigest(str(model), cache, threads=1)
    assert digest.wait(PATIENCE_S)
    return digest.result(), bytes_read() - before >= WEIGHTS_BYTES


def test_what_is_remembered_is_not_read_again(model: Path, tmp_path: Path) -> None:
    """Also by another path. Directories and files that are made are private; nothing stays open."""
    files, cache = os.listdir("/proc/self/fd"), tmp_path / "a" / "b"
    umask = os.umask(0)
    try:
        digest, read = identify(model, cache)
    finally:
        os.umask(umask)
    assert read
    assert len(os.listdir("/proc/self/fd")) == len(files)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")} == {
        "a": 0o700,
        "b": 0o700,
        f"{CACHE_PREFIX}.json": 0o600,
    }
    link = tmp_path / "link"
    link.symlink_to(model)
    assert identify(model, cache) == identify(link, cache) == (digest, False)
    assert identify(model, tmp_path / "other") == identify(model, None) == (digest, True)


def test_a_large_file_that_a_setting_names_is_remembered(place: Path, tmp_path: Path) -> None:
    file = place / "scales.tensors"
    with file.open("wb") as opened:
        opened.truncate(PIECE_BYTES + WEIGHTS_BYTES)
    time.sleep(SETTLE_S)
    found = []
    for _ in range(2):
        before = bytes_read()
        text = text_setting(
            "scales", str(file), lambda path: WeightsDigest(path, tmp_path, alone=True).wait_for_result()
        )
        found.append((text, bytes_read() - before >= PIECE_BYTES))
    assert found == [(text, True), (text, False)]
    assert text.startswith("file sha256:")


def test_a_file_that_was_changed_is_read_again(place: Path, tmp_path: Path) -> None:
    """Even if its size is the same and its time of modification was set back. A fresh file is not remembered: it could
    change again within one tick of the filesystem's clock.
    """
    model = place / "edited"
    write_model(model)
    before, _ = identify(model, tmp_path)
    assert not list(tmp_path.iterdir())
    time.sleep(SETTLE_S)
    assert identify(model, tmp_path)[1]
    assert identify(model, tmp_path) == (before, False)
    path = model / "model.safetensors"
    times = path.stat()
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, 99)[0] ^ 1]), 99)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    after, read = identify(model, tmp_path)
    assert read
    assert after != before
    assert known(model, tmp_path) is None


class Libc:
    """Every path lies on one filesystem."""

    def __init__(self, filesystem: int) -> None:
        self._filesystem = filesystem

    def statfs(self, _: bytes, buffer: ctypes.Array[ctypes.c_char]) -> int:
        ctypes.c_long.from_buffer(buffer).value = self._filesystem
        return 0


def test_only_filesystems_that_keep_change_times_are_trusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the numbers of statfs(2). Overlay, FUSE, images, CIFS, 9p and FAT are not among them."""
    assert keeps_change_time("/dev/shm")
    assert not keeps_change_time("/proc")
    assert not keeps_change_time(str(tmp_path / "nothing"))
    disks = (0xEF53, 0x58465342, 0x9123683E, 0xCA451A4E, 0xF2F52010, 0x2FC12FC1)
    networks = (0x6969, 0x00C36400, 0x0BD00BD0, 0x19830326, 0x47504653)
    others = (0x794C7630, 0x65735546, 0x73717368, 0xE0F5E1E2, 0xFF534D42, 0xFE534D42, 0x01021997, 0x4D44)
    for number in (*disks, *networks, *others):
        monkeypatch.setattr(weights_cache, "_libc", Libc(number))
        assert keeps_change_time("/") is (number not in others)


def test_every_part_of_what_a_file_is_known_by_counts(model: Path, tmp_path: Path) -> None:
    """Its name does not count; the machine does, for devices and inodes are numbers of one machine."""
    identify(model, tmp_path)
    cache, file = WeightsCache(tmp_path), weights_of(model)
    cache.refresh()
    assert cache.get(replace(file, name="other", path="/other"))
    for part in ("device", "inode", "size_bytes", "mtime_ns", "ctime_ns"):
        assert cache.get(replace(file, **{part: getattr(file, part) + 1})) is None
    assert known(model, tmp_path)
    assert known(model, tmp_path, host="another machine") is None


def with_fields(**fields: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def as_a_link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("moved")))


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.chmod(0o620),
        lambda path: path.chmod(0o602),
        as_a_link,
        lambda path: os.truncate(path, path.stat().st_size - 1),
        lambda path: path.write_text(path.read_text().replace(LIE, "g" * 64)),
        lambda path: path.write_bytes(os.urandom(1000)),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text("[]"),
        with_fields(version=2),
        with_fields(files=[]),
        with_fields(files={"a": 1}),
        pytest.param(
            lambda path: os.chown(path, 65534, 65534),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
    ],
)
def test_a_cache_that_is_damaged_or_open_to_others_is_ignored_and_replaced(
    model: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    WeightsCache(tmp_path).add({weights_of(model): LIE}, time.time())
    assert known(model, tmp_path) == LIE
    path = tmp_path / f"{CACHE_PREFIX}.json"
    change(path)
    assert known(model, tmp_path) is None
    right, read = identify(model, tmp_path)
    assert read
    assert right == identify(model, None)[0]
    assert identify(model, tmp_path) == (right, False)
    assert stat.S_ISREG(path.lstat().st_mode)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert path.stat().st_uid == os.geteuid()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_cache_that_is_no_file_is_ignored(model: Path, tmp_path: Path, make: Callable[[Path, int], None]) -> None:
    """A pipe that somebody may write to, or a directory. Nothing stays open."""
    path = tmp_path / f"{CACHE_PREFIX}.json"
    make(path, 0o700)
    files = os.listdir("/proc/self/fd")
    with contextlib.ExitStack() as undo:
        if make is os.mkfifo:
            undo.callback(os.close, os.open(path, os.O_RDWR))
        assert known(model, tmp_path) is None
    assert len(os.listdir("/proc/self/fd")) == len(files)


def test_a_directory_that_cannot_be_written_costs_reading_again(model: Path, tmp_path: Path) -> None:
    right, _ = identify(model, None)
    (tmp_path / "file").touch()
    (tmp_path / "full" / f"{CACHE_PREFIX}.tmp").mkdir(parents=True)
    for directory in (tmp_path / "file" / "cache", Path("/proc/cache"), Path("/sys/kernel"), tmp_path / "full"):
        assert identify(model, directory) == (right, True)
    assert not (tmp_path / "full" / f"{CACHE_PREFIX}.json").exists()


def test_where_digests_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a slab, else in the user's cache, else nowhere."""
    memory = {"kind": "memory", "capacity": "1GiB"}
    slab = {"kind": "slab", "path": "/kv", "capacity": "1GiB"}
    tree = slab | {"kind": "shared_dir"}
    bucket = {"kind": "s3", "bucket": "our-kv-cache"}
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory_of(parse_config({"tiers": [memory, slab, bucket]})) == Path("/kv")
    for tiers in ([memory], [memory, tree], [bucket]):
        assert cache_directory_of(parse_config({"tiers": tiers})) == Path("/xdg/nixl-offload")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory_of(parse_config({"tiers": [bucket]})) == Path("/home/me/.cache/nixl-offload")
    monkeypatch.setenv("HOME", "relative")
    assert cache_directory_of(parse_config({"tiers": [bucket]})) is None


def test_a_slab_does_not_count_the_cache_as_foreign(model: Path, tmp_path: Path) -> None:
    """Else a second start would find less room, and ls would list other objects."""
    identify(model, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert other_namespaces.survey(tmp_path, ()) == other_namespaces.Survey([], 0)
    inspector = SlabInspector(slab_config(tmp_path, 1 << 30))
    assert not list(inspector.namespaces())
    assert inspector.other_objects == 0
