"""Digests that are remembered: what is not read again, what is, whose memory is believed, and who waits for whom."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from nixl_offload.config import parse_config
from nixl_offload.identity import weights_cache
from nixl_offload.identity.settings import text_setting
from nixl_offload.identity.weights import PIECE_BYTES, WeightsDigest, cache_directory_of
from nixl_offload.identity.weights_cache import CACHE_PREFIX, WeightsCache, keeps_change_time
from nixl_offload.identity.weights_files import ModelFile, list_files
from nixl_offload.tiers.slab import other_namespaces
from nixl_offload.tiers.slab.inspect import SlabInspector

PATIENCE_S = 60.0
SETTLE_S = 2.1
"""Files younger than two seconds are not remembered."""
WEIGHTS_BYTES = 8 << 20


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


def identify(model: Path, cache: Path | None) -> tuple[str, bool]:
    """Return the digest, and whether the process has read as many bytes for it as the weights are long."""
    before = bytes_read()
    digest = WeightsDigest(str(model), cache, threads=1)
    assert digest.wait(PATIENCE_S)
    return digest.result(), bytes_read() - before >= WEIGHTS_BYTES


def bytes_read() -> int:
    """Return what all threads of this process have asked the kernel for, as the kernel counts it."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_what_is_remembered_is_not_read_again(model: Path, tmp_path: Path) -> None:
    """The second time the digest comes without the bytes, also of a copy of the directory's name elsewhere. Nothing
    stays open, nor locked for those who wait.
    """
    files = os.listdir("/proc/self/fd")
    digest, read = identify(model, tmp_path)
    assert len(os.listdir("/proc/self/fd")) == len(files)
    assert read
    assert identify(model, tmp_path) == (digest, False)
    link = tmp_path / "link"
    link.symlink_to(model)
    assert identify(link, tmp_path) == (digest, False)
    assert identify(model, tmp_path / "other") == (digest, True)
    assert identify(model, None) == (digest, True)


def test_a_large_file_that_a_setting_names_is_remembered_likewise(place: Path, tmp_path: Path) -> None:
    """By its content alone, and with a model's weights: what is known of one as the other need not be read."""
    file, cache = place / "scales.tensors", tmp_path / "cache"
    with file.open("wb") as opened:
        opened.truncate(PIECE_BYTES + WEIGHTS_BYTES)  # a hole, but as many bytes to read
    (copy := place / "copy.tensors").write_bytes(file.read_bytes())
    time.sleep(SETTLE_S)

    def remembered(path: str, cache: Path | None) -> str:
        return WeightsDigest(path, cache, alone=True).wait_for_result()

    def count(path: Path, cache: Path | None) -> tuple[str, bool]:
        before = bytes_read()
        text = text_setting("scales", str(path), lambda path: remembered(path, cache))
        return text, bytes_read() - before >= PIECE_BYTES

    text, read = count(file, cache)
    assert read
    assert text.startswith("file sha256:")
    assert count(file, cache) == (text, False)
    assert count(copy, cache) == (text, True)
    assert count(file, None) == (text, True)
    before = bytes_read()
    digest = WeightsDigest(str(file), cache)
    assert digest.wait(PATIENCE_S)
    assert bytes_read() - before < PIECE_BYTES
    with copy.open("r+b") as opened:
        os.pwrite(opened.fileno(), b"1", PIECE_BYTES)
    assert count(copy, cache)[0] != text


def test_a_file_that_was_changed_is_read_again(place: Path, tmp_path: Path) -> None:
    """Though its size is the same and its time of modification was set back: nobody can set the change time. Nor is it
    remembered yet.
    """
    model = place / "edited"
    write_model(model)
    time.sleep(SETTLE_S)
    before, _ = identify(model, tmp_path)
    assert identify(model, tmp_path) == (before, False)
    path = model / "model.safetensors"
    times = path.stat()
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, 99)[0] ^ 1]), 99)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_mtime_ns == times.st_mtime_ns
    after, read = identify(model, tmp_path)
    assert read
    assert after != before
    assert known(model, tmp_path) is None


def test_a_file_that_has_just_been_changed_is_not_remembered(place: Path, tmp_path: Path) -> None:
    """It could change again within the same tick of the filesystem's clock."""
    model = place / "fresh"
    write_model(model)
    first = identify(model, tmp_path)
    assert first == identify(model, tmp_path)
    assert first[1]
    assert not list(tmp_path.iterdir())


def test_a_filesystem_that_is_not_known_to_keep_change_times_is_not_trusted(tmp_path: Path) -> None:
    """Nor is a path that is not there."""
    assert keeps_change_time("/dev/shm")
    assert not keeps_change_time("/proc")
    assert not keeps_change_time(str(tmp_path / "nothing"))


class Libc:
    """Every path lies on one filesystem."""

    def __init__(self, filesystem: int) -> None:
        self._filesystem = filesystem

    def statfs(self, _: bytes, buffer: ctypes.Array[ctypes.c_char]) -> int:
        ctypes.c_long.from_buffer(buffer).value = self._filesystem
        return 0


@pytest.mark.parametrize(
    ("filesystem", "is_trusted"),
    [
        *((number, True) for number in (0xEF53, 0x58465342, 0x9123683E, 0xCA451A4E, 0xF2F52010, 0x2FC12FC1)),  # disks
        *((number, True) for number in (0x6969, 0x00C36400, 0x0BD00BD0, 0x19830326, 0x47504653)),  # networks
        *((number, False) for number in (0x794C7630, 0x65735546, 0x73717368, 0xE0F5E1E2)),  # overlay, FUSE, images
        *((number, False) for number in (0xFF534D42, 0xFE534D42, 0x01021997, 0x4D44, 0x2011BAB0)),  # CIFS, 9p, FAT
    ],
)
def test_which_filesystems_are_trusted(monkeypatch: pytest.MonkeyPatch, filesystem: int, is_trusted: bool) -> None:
    """By the numbers of statfs(2) and linux/magic.h."""
    monkeypatch.setattr(weights_cache, "_libc", Libc(filesystem))
    assert keeps_change_time("/") is is_trusted


def known(model: Path, cache: Path, host: str | None = None) -> str | None:
    """Return what is remembered of the weights."""
    weights = WeightsCache(cache) if host is None else WeightsCache(cache, host)
    weights.refresh()
    return weights.get(weights_of(model))


def weights_of(model: Path) -> ModelFile:
    return next(file for file in list_files(str(model)) if file.holds_weights)


def test_every_part_of_what_a_file_is_known_by_counts(model: Path, tmp_path: Path) -> None:
    """Its name does not; the machine does, for devices and inodes are numbers of one machine."""
    identify(model, tmp_path)
    cache, file = WeightsCache(tmp_path), weights_of(model)
    cache.refresh()
    assert cache.get(replace(file, name="other", path="/other"))
    for part in ("device", "inode", "size_bytes", "mtime_ns", "ctime_ns"):
        assert cache.get(replace(file, **{part: getattr(file, part) + 1})) is None
    assert known(model, tmp_path)
    assert known(model, tmp_path, host="another machine") is None


LIE = "0" * 64


def lie(model: Path, cache: Path) -> Path:
    """Remember a wrong digest, in the way that is believed."""
    WeightsCache(cache).add({weights_of(model): LIE}, time.time())
    return cache / f"{CACHE_PREFIX}.json"


def test_a_machine_is_known_by_its_id_or_else_by_its_boot(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers have no id of their own, or an empty one. Else by its name: a home directory may serve many."""
    read_text = Path.read_text

    def known_as(number: int, machine: str | None, boot: str | None, host: str) -> str:
        names = {"/etc/machine-id": machine, "/proc/sys/kernel/random/boot_id": boot}

        def read(path: Path) -> str:
            if str(path) not in names:
                return read_text(path)
            if (name := names[str(path)]) is None:
                raise FileNotFoundError(path)
            return name

        monkeypatch.setattr(Path, "read_text", read)
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        (tmp_path / str(number)).mkdir()
        (key,) = json.loads(lie(model, tmp_path / str(number)).read_text())["files"]
        return str(key)

    machines = [("m", "b"), ("m", "c"), ("n", "b"), (None, "b"), ("\n", "b"), (None, "c"), (None, None)]
    keys = [known_as(number, *names, "host") for number, names in enumerate(machines)]
    assert keys[0] == keys[1]
    assert keys[3] == keys[4]
    assert len({*keys, known_as(len(keys), None, None, "another")}) == 6


def as_a_link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("moved")))


def with_fields(**fields: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def with_digest(digest: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(path.read_text().replace(LIE, digest))


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.chmod(0o620),
        lambda path: path.chmod(0o602),
        as_a_link,
        lambda path: os.truncate(path, path.stat().st_size - 1),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        with_digest("g" * 64),
        with_digest("0" * 62),
        lambda path: path.write_text(path.read_text().replace('"files": {', '"files": {"a": "0", ')),
        lambda path: path.write_bytes(os.urandom(1000)),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text("[]"),
        with_fields(version=2),
        with_fields(files=None),
        with_fields(files=[]),
        with_fields(files={"a": 1}),
    ],
)
def test_a_memory_that_is_damaged_or_open_to_others_counts_for_nothing(
    model: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """And it is replaced by one that is right."""
    path = lie(model, tmp_path)
    change(path)
    assert known(model, tmp_path) is None
    right, read = identify(model, tmp_path)
    assert read
    assert right == identify(model, None)[0]
    assert identify(model, tmp_path) == (right, False)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert path.is_file()
    assert not path.is_symlink()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_counts_for_nothing(model: Path, tmp_path: Path, make: Callable[[Path, int], None]) -> None:
    """A pipe of ours, to which somebody may write, or a directory; and nothing stays open."""
    path = tmp_path / f"{CACHE_PREFIX}.json"
    make(path, 0o700)
    files = os.listdir("/proc/self/fd")
    with contextlib.ExitStack() as undo:
        if make is os.mkfifo:
            undo.callback(os.close, os.open(path, os.O_RDWR))
        assert known(model, tmp_path) is None
    assert len(os.listdir("/proc/self/fd")) == len(files)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_memory_of_somebody_else_counts_for_nothing(model: Path, tmp_path: Path) -> None:
    """And it is replaced by ours."""
    path = lie(model, tmp_path)
    os.chown(path, 65534, 65534)
    assert known(model, tmp_path) is None
    right, read = identify(model, tmp_path)
    assert read
    assert path.stat().st_uid == os.geteuid()
    assert identify(model, tmp_path) == (right, False)


def test_a_directory_that_cannot_be_written_costs_reading_again(model: Path, tmp_path: Path) -> None:
    """Nothing is raised, nothing is made."""
    right, _ = identify(model, None)
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file" / "cache", Path("/proc/cache"), Path("/sys/kernel")):
        assert identify(model, directory) == (right, True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / f"{CACHE_PREFIX}.lock").mkdir()
    (tmp_path / "full" / f"{CACHE_PREFIX}.tmp").mkdir()
    assert identify(model, tmp_path / "full") == (right, True)
    assert not (tmp_path / "full" / f"{CACHE_PREFIX}.json").exists()


def test_what_is_made_is_private(model: Path, tmp_path: Path) -> None:
    """Missing directories 0700, files 0600, whatever the umask, and nothing else."""
    umask = os.umask(0)
    try:
        identify(model, tmp_path / "a" / "b")
    finally:
        os.umask(umask)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")} == {
        "a": 0o700,
        "b": 0o700,
        f"{CACHE_PREFIX}.json": 0o600,
        f"{CACHE_PREFIX}.lock": 0o600,
    }


WRITER = """
import sys, time
from dataclasses import replace
from pathlib import Path
from nixl_offload.identity.weights_cache import WeightsCache
from nixl_offload.identity.weights_files import list_files
model, cache, first = sys.argv[1], WeightsCache(Path(sys.argv[2])), int(sys.argv[3])
file = next(file for file in list_files(model) if file.holds_weights)
for number in range(first, first + 100):
    cache.add({replace(file, inode=number): f"{number:064x}"}, time.time())
"""


def test_many_may_write_at_once(model: Path, tmp_path: Path) -> None:
    """Whoever reads finds digests that somebody wrote, or none; in the end the file is whole and of use."""
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(model), str(tmp_path), str(first)])
        for first in (1000, 2000, 3000)
    ]
    file, cache, found = weights_of(model), WeightsCache(tmp_path), set()
    while any(writer.poll() is None for writer in writers):
        cache.refresh()
        for number in (*range(1000, 1100), *range(2000, 2100), *range(3000, 3100)):
            digest = cache.get(replace(file, inode=number))
            assert digest in (None, f"{number:064x}")
            found.add(digest)
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert len(found) > 1
    cache.refresh()
    assert any(cache.get(replace(file, inode=first + 99)) for first in (1000, 2000, 3000))
    right, _ = identify(model, tmp_path)
    assert identify(model, tmp_path) == (right, False)


HOLDER = """
import sys, threading, time
from pathlib import Path
from nixl_offload.identity.weights_cache import WeightsCache
from nixl_offload.identity.weights_files import list_files
with WeightsCache(Path(sys.argv[2])).alone(list_files(sys.argv[1]), time.time(), threading.Event()):
    print("held", flush=True)
    time.sleep(3600)
"""


def test_who_starts_beside_an_engine_that_reads_waits_for_it(model: Path, place: Path, tmp_path: Path) -> None:
    """Nobody reads a model that somebody else is reading; who dies is waited for no longer; other models are free."""
    other = place / "another"
    write_model(other)
    with subprocess.Popen([sys.executable, "-c", HOLDER, model, tmp_path], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            stopped = WeightsDigest(str(model), tmp_path)
            waiting = WeightsDigest(str(model), tmp_path)
            assert not waiting.wait(0.3)
            assert waiting.progress() == (0, 0)
            stopped.close()
            assert stopped.wait(1.0)
            time.sleep(SETTLE_S)
            assert identify(other, tmp_path)[1]
            for number in range(20):
                with WeightsCache(tmp_path).alone([replace(weights_of(model), inode=number)], time.time(), Event()):
                    pass
            assert not waiting.wait(0.0)
        finally:
            holder.kill()
    assert waiting.wait(PATIENCE_S)
    assert waiting.result() == identify(model, None)[0]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ESTALE])
def test_nobody_waits_where_there_are_no_locks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As on some network filesystems, or on one that fails: each reads for itself."""

    def lockf(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    digest = WeightsDigest(str(model), tmp_path)
    try:
        assert digest.wait(10.0)
    finally:
        digest.close()
    assert known(model, tmp_path)


def test_where_digests_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a slab, else in the user's cache, else nowhere."""
    memory = {"kind": "memory", "capacity": "1GiB"}
    slab = {"kind": "slab", "path": "/kv", "capacity": "1GiB"}
    tree = slab | {"kind": "shared_dir"}
    bucket = {"kind": "s3", "bucket": "our-kv-cache"}
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory_of(parse_config({"tiers": [memory, slab, bucket]})) == Path("/kv")
    for tiers in ([memory], [memory, tree], [bucket]):
        assert cache_directory_of(parse_config({"tiers": tiers})) == Path("/xdg/nixl-offload")
    for relative in ("", "cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert cache_directory_of(parse_config({"tiers": [bucket]})) == Path("/home/me/.cache/nixl-offload")
    monkeypatch.setenv("HOME", "relative")
    assert cache_directory_of(parse_config({"tiers": [bucket]})) is None


def test_a_slab_does_not_take_it_for_somebody_elses(model: Path, tmp_path: Path) -> None:
    """Else a second start would find less room, and ls would tell of other objects."""
    identify(model, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert other_namespaces.survey(tmp_path, ()) == other_namespaces.Survey((), 0)
    inspector = SlabInspector(str(tmp_path), capacity_bytes=None)
    assert not list(inspector.namespaces())
    assert inspector.other_objects == 0
