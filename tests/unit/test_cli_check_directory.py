"""``nixl-offload check`` on directories: what is wrong with each is told, the mend is applied, the line turns ok."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nixl_offload.cli.check import directory as check_directory
from nixl_offload.cli.check.child import Trials
from nixl_offload.cli.check.directory import (
    access_line,
    direct_io_line,
    filesystem_lines,
    find_place,
    lock_line,
    space_line,
    tree_lines,
)
from nixl_offload.cli.check.file import file_section, gds_lines, within
from nixl_offload.cli.check.lines import Line, Section
from nixl_offload.cli.check.report import Doing
from nixl_offload.config import DirectoryConfig, SharedDirConfig, SlabConfig
from nixl_offload.tiers.lock import DirectoryLock
from tests.unit.gds_rig import Machine

ROOT = Path(__file__).resolve().parents[2]
_DROP_FROM_BOUNDING_SET = 24
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2


def tier_of(path: Path, kind: str = "slab", **fields: Any) -> DirectoryConfig:
    config = {"slab": SlabConfig, "shared_dir": SharedDirConfig}[kind]
    return config(kind=kind, path=str(path), capacity=1 << 20, **fields)


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    """One process for the movers of all tests here."""
    with Trials() as process:
        process.run("plugin", name="posix_aio")
        yield process


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts filesystems and takes them off again. Skips where this user may not mount."""
    points: list[Path] = []

    def mount(kind: str, options: str = "") -> Path:
        point = tmp_path / f"mount-{len(points)}"
        point.mkdir()
        command = ["mount", "-t", kind, kind, *(["-o", options] if options else []), str(point)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount {kind} here: {done.stderr.strip()}")
        points.append(point)
        return point

    yield mount
    for point in reversed(points):
        subprocess.run(["umount", str(point)], check=True)


def section_of(path: Path, trials: Trials, **options: Any) -> Section:
    options = {"capacity_bytes": None, "io": False, **options}
    return file_section(tier_of(path), trials, Doing(io.StringIO()), **options)


def line_of(section: Section, name: str) -> Line:
    (found,) = [line for line in section.lines if line.name == name]
    return found


def test_tmpfs_is_warned_of_in_words_and_works_all_the_same(trials: Trials, mounted: Callable[..., Path]) -> None:
    """With capacity, speeds and all: the figures of a disk that small come from pieces that fit."""
    path = mounted("tmpfs", "size=8m")
    section = section_of(path, trials, io=True, capacity_bytes=4 << 20)
    line = line_of(section, "filesystem")
    assert line.state == "warning"
    assert line.words.startswith(f"tmpfs at {path}: this is memory")
    assert line.mend is not None
    assert "kind: memory" in line.mend
    assert section.worst() == "warning"
    assert section.facts["io"]["read_bytes_s"] > 0
    assert section.facts["io"]["piece_bytes"] <= (8 << 20) // 4 // 16
    assert not list(path.iterdir()), "nothing stays"


def test_overlayfs_is_warned_of_as_the_containers_own(
    trials: Trials, mounted: Callable[..., Path], tmp_path: Path
) -> None:
    for name in ("lower", "upper", "work"):
        (tmp_path / name).mkdir()
    path = mounted("overlay", ",".join(f"{name}dir={tmp_path / name}" for name in ("lower", "upper", "work")))
    section = section_of(path, trials)
    line = line_of(section, "filesystem")
    assert line.state == "warning"
    assert "gone with the container" in line.words
    assert line.mend is not None
    assert line.mend.startswith(f"docker run -v /mnt/nvme/kv:{path}")
    assert section.worst() == "warning"
    # The mend: a volume mounted there.
    with _mount_over(path, tmp_path / "volume"):
        volume = section_of(path, trials)
        assert line_of(volume, "filesystem").state == "ok"


def test_a_read_only_mount_is_wrong_and_its_mend_works(trials: Trials, mounted: Callable[..., Path]) -> None:
    path = mounted("tmpfs", "ro")
    section = section_of(path, trials)
    line = line_of(section, "directory")
    assert (line.state, line.words) == ("wrong", f"{path} is mounted read-only")
    assert line_of(section, "movers").state == "unknown"
    assert not section.has("space", "ok", "warning"), "nothing is told of where nothing can be written"
    assert line.mend is not None
    _do(line.mend.partition(";")[0])
    assert line_of(section_of(path, trials), "directory").state == "ok"


@pytest.mark.parametrize("there", [True, False])
def test_a_directory_without_permission_is_wrong_and_its_mend_works(tmp_path: Path, there: bool) -> None:
    """As a user whom permissions bind: root is made one by taking the capability away that passes them by."""
    above = tmp_path / "with space"
    above.mkdir()
    path = above if there else above / "kv"
    above.chmod(0o500)
    state, words, mend = _access_as_a_user(path)
    assert state == "wrong"
    assert "cannot write there" in words
    assert mend is not None
    if there:
        assert mend == f"chmod u+rwx {shlex.quote(str(above))}"
    else:
        assert mend.startswith("sudo install -d -m 700 -o ")
        if os.geteuid():
            above.chmod(0o700)
        mend = mend.removeprefix("sudo ")  # As root, or in a directory that this user may write in by now.
    _do(mend)
    assert _access_as_a_user(path)[0] == "ok"
    above.chmod(0o700)


def test_what_is_no_directory_is_wrong_and_its_mend_works(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    path.write_text("")
    line = access_line(find_place(str(path)))
    assert (line.state, line.words) == ("wrong", f"{path} is no directory")
    assert line.mend is not None
    _do(line.mend.partition(",")[0])
    assert access_line(find_place(str(path))).state == "ok"
    path.symlink_to(tmp_path / "nowhere")
    assert access_line(find_place(str(path))).state == "wrong", "a link that leads nowhere is no place yet to be made"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a file of another user's")
@pytest.mark.parametrize("name", ["lock", "0" * 32, "dp-0"])
def test_what_another_user_has_left_in_the_directory_is_wrong_and_its_mend_works(tmp_path: Path, name: str) -> None:
    path = tmp_path / "kv"
    path.mkdir(mode=0o700)
    left = path / name
    if name == "lock":
        left.touch(mode=0o600)
    else:
        left.mkdir(mode=0o700)
    assert _access_as_a_user(path)[0] == "ok"
    os.chown(left, 4711, 4711)
    state, words, mend = _access_as_a_user(path)
    assert (state, f"but not open {left}" in words) == ("wrong", True)
    assert mend is not None
    _do(mend.removeprefix("sudo "))
    assert _access_as_a_user(path)[0] == "ok"


def test_a_directory_that_others_may_write_is_warned_of(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    line = access_line(find_place(str(tmp_path)))
    assert line.state == "warning"
    assert line.mend is not None
    _do(line.mend)
    assert access_line(find_place(str(tmp_path))).state == "ok"


def test_a_capacity_beyond_the_disk_is_warned_of_with_one_that_fits(mounted: Callable[..., Path]) -> None:
    path = mounted("tmpfs", "size=64m")
    (path / "held").write_bytes(bytes(8 << 20))
    place = find_place(str(path))
    line = space_line(place, 1 << 30)
    assert line.state == "warning"
    assert "8.00MiB in use by what it holds" in line.words
    assert line.mend == "capacity: 64MiB", "what is there already counts"
    assert space_line(place, 64 << 20).state == "ok"
    (path / "full").write_bytes(bytes(56 << 20))
    (path / "held").unlink()
    assert space_line(find_place(str(path / "deeper" / "kv")), 1 << 30).state == "warning"
    (path / "held").write_bytes(bytes(8 << 20))
    full = space_line(find_place(str(path / "deeper" / "kv")), 1 << 30)
    assert (full.state, "disk is full" in full.words) == ("wrong", True)


def test_more_files_than_can_be_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_directory, "_MOST_FILES", 2)
    for number in range(3):
        (tmp_path / str(number)).touch()
    place = find_place(str(tmp_path))
    assert "too many files to count" in space_line(place, 1 << 20).words
    beyond = space_line(place, 1 << 60)
    assert beyond.state == "warning"
    assert beyond.mend is not None
    assert beyond.mend.startswith("capacity: ")


def test_who_holds_a_slab_is_told_and_the_lock_left_alone(tmp_path: Path) -> None:
    place = find_place(str(tmp_path))
    line = lock_line(place)
    assert line is not None
    assert (line.state, line.words) == ("ok", "no engine has used the directory yet")
    lock = DirectoryLock(tmp_path / "lock")
    lock.acquire()
    try:
        held = lock_line(place)
        assert held is not None
        assert held.state == "warning"
        assert f"held by the engine with pid {os.getpid()}, since 20" in held.words
        assert held.mend is not None
        assert f"kill {os.getpid()};" in held.mend
        assert lock.is_held()
    finally:
        lock.release()
    free = lock_line(place)
    assert free is not None
    assert (free.state, free.words) == ("ok", "free")
    (tmp_path / "lock").write_text('{"pid": 7, "host": "another", "since": "then"}')
    elsewhere = lock_line(place)
    assert elsewhere is not None
    assert elsewhere.state == "unknown"
    assert "pid 7 on 'another'" in elsewhere.words


def test_o_direct_is_tried(tmp_path: Path, mounted: Callable[..., Path]) -> None:
    """Ramfs knows no O_DIRECT; the mend, ``direct_io: false``, makes the line ok."""
    assert direct_io_line(find_place(str(tmp_path)), tier_of(tmp_path, direct_io=False)).state == "ok"
    path = mounted("ramfs")
    line = direct_io_line(find_place(str(path)), tier_of(path))
    if line.state == "ok":
        pytest.skip("this kernel's ramfs takes O_DIRECT")
    assert line.state == "warning"
    assert line.mend is not None
    assert "direct_io: false" in line.mend
    assert not list(path.iterdir())


def test_a_shared_directory_is_synced_renamed_and_its_clock_compared(tmp_path: Path) -> None:
    """A clock that is off by more than gc's grace is wrong: it would delete what was written just now."""
    place = find_place(str(tmp_path))
    assert [(line.name, line.state) for line in tree_lines(place)] == [("rename and sync", "ok"), ("clock", "ok")]
    for skew_s, state, words in ((-120, "warning", "ahead of"), (900, "wrong", "behind")):
        (_, clock) = tree_lines(place, clock=lambda skew_s=skew_s: time.time() + skew_s)
        assert clock.state == state
        assert words in clock.words
    assert not list(tmp_path.iterdir())


def test_filesystems_of_other_machines(tmp_path: Path) -> None:
    """As the kernel describes them: a slab on NFS is warned of, shared_dir there is right; a disk of platters."""
    machine = Machine(tmp_path)
    place = find_place(str(machine.directory))

    def line(**fields: Any) -> Line:
        (found,) = filesystem_lines(place, tier_of(machine.directory, **fields), str(machine.root))
        return found

    assert line().state == "ok"
    machine.mount("nfs4", "server:/kv", "0:44", "rw,proto=tcp")
    assert (line().state, str(line().mend).startswith("kind: shared_dir")) == ("warning", True)
    assert line(kind="shared_dir").state == "ok"
    disk = machine.drive("sda", "8:0")
    (disk / "queue").mkdir()
    (disk / "queue/rotational").write_text("1\n")
    machine.mount("ext4", "/dev/sda", "8:0", "rw")
    assert "spinning disk" in line().words
    (disk / "queue/rotational").write_text("0\n")
    assert line().state == "ok"
    machine.remove("proc/self/mountinfo")
    assert line().state == "unknown"


def test_with_a_gpu_each_condition_of_gds_is_a_line(tmp_path: Path) -> None:
    """On a machine made of files: GPUDirect real; then without udev, which is told with its mend, and fails nothing."""
    machine = Machine(tmp_path)

    def lines(**fields: Any) -> dict[str, Line]:
        return {line.name: line for line in gds_lines(tier_of(machine.directory, **fields), machine.report(), gpu=True)}

    real = lines()
    assert real["GPUDirect Storage"].words.startswith("real (nvidia-fs")
    assert real["GDS: PCI P2PDMA"].words.endswith("; not needed")
    assert {line.state for line in real.values()} <= {"ok", "unknown"}
    machine.remove("run/udev")
    without = lines()
    assert without["GPUDirect Storage"].state == "warning"
    assert without["GDS: udev"].state == "warning"
    assert without["GDS: udev"].mend == "in a container: -v /run/udev:/run/udev:ro"
    assert list(lines(mover="posix")) == ["GPUDirect Storage"]


def test_a_filesystem_that_hangs_is_given_up() -> None:
    """What is waited for goes on alone; what it raises in time is raised."""
    release = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.05, release.wait)
    release.set()
    assert within(5.0, lambda: 7) == 7
    with pytest.raises(ValueError, match="so"):
        within(5.0, lambda: _raise(ValueError("so")))


def _raise(error: Exception) -> None:
    raise error


def _do(command: str) -> None:
    """Do what a mend says."""
    subprocess.run(shlex.split(command), check=True, capture_output=True)


def _access_as_a_user(path: Path) -> tuple[str, str, str | None]:
    code = (
        "import json, sys; from nixl_offload.cli.check.directory import access_line, find_place; "
        "print(json.dumps(access_line(find_place(sys.argv[1]))))"
    )
    libc = ctypes.CDLL(None)

    def obey_permissions() -> None:
        for capability in (_DAC_OVERRIDE, _DAC_READ_SEARCH):
            libc.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)

    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        preexec_fn=obey_permissions if os.geteuid() == 0 else None,
    )
    _, state, words, mend = json.loads(done.stdout)
    return state, words, mend


@contextlib.contextmanager
def _mount_over(point: Path, volume: Path) -> Iterator[None]:
    volume.mkdir()
    subprocess.run(["mount", "--bind", str(volume), str(point)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(point)], check=True)
