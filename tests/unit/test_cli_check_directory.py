"""``nixl-offload check`` on directories: it says what is wrong with each; the fix is applied; the line turns ok."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from io import StringIO
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from nixl_offload.cli.check import directory
from nixl_offload.cli.check.child import ChildProcess
from nixl_offload.cli.check.directory import directory_findings, gds_finding, look_at_directory
from nixl_offload.cli.check.findings import Finding
from nixl_offload.config import DirectoryConfig, SharedDirConfig, SlabConfig
from nixl_offload.tiers.ownership import warn_of_others
from tests import mounts
from tests.unit.test_gds_report import Machine

_FS_GROUP = 2000


def tier_of(path: Path, kind: str = "slab", **fields: Any) -> DirectoryConfig:
    config = {"slab": SlabConfig, "shared_dir": SharedDirConfig}[kind]
    return config(**{"kind": kind, "path": str(path), "capacity": 1 << 20, **fields})


def look(name: str, tier: DirectoryConfig, **context: Any) -> Finding:
    """Run the probes up to one of that name."""
    return next(found for found in directory_findings(tier, **context) if found.name == name)


@pytest.fixture(scope="module")
def child() -> Iterator[ChildProcess]:
    """One process for the movers of all tests here."""
    with closing(ChildProcess()) as process:
        process.run(os.getpid)
        yield process


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts filesystems and unmounts them at the end. Skips the test if this user may not mount."""
    with ExitStack() as stack:
        points = count()
        yield lambda kind, options="": stack.enter_context(
            mounts.mounted(tmp_path / f"mount-{next(points)}", options, kind)
        )


def section_of(path: Path, child: ChildProcess, **fields: Any) -> dict[str, Finding]:
    found = list(look_at_directory(tier_of(path, **fields), child, gpu=False))
    assert all(each.fix for each in found if each.state == "wrong")
    return {each.name: each for each in found}


def test_tmpfs_is_warned_of_and_works_all_the_same(child: ChildProcess, mounted: Callable[..., Path]) -> None:
    """All findings come, speeds too: pieces are small enough for such a small disk."""
    path = mounted("tmpfs", "size=8m")
    section = section_of(path, child, capacity=4 << 20)
    line = section["filesystem"]
    assert (line.state, "kind: memory" in str(line.fix)) == ("warning", True)
    assert line.words.startswith(f"tmpfs at {path}: this is memory")
    assert "MB/s" in section["speed"].words
    assert not list(path.iterdir()), "nothing stays"


def test_a_read_only_mount_is_wrong_and_its_fix_works(child: ChildProcess, mounted: Callable[..., Path]) -> None:
    path = mounted("tmpfs", "ro")
    section = section_of(path, child)
    line = section["directory"]
    assert (line.state, "Read-only file system" in line.words) == ("wrong", True)
    assert section["movers"].state == "unknown"
    assert "space" not in section, "nothing can be written there"
    _do(str(line.fix).partition(";")[0])
    assert section_of(path, child)["directory"].state == "ok"


@pytest.fixture
def pod() -> Iterator[ProcessPoolExecutor]:
    """A process of another user. Skips the test if this user cannot change to another."""
    if os.geteuid():
        pytest.skip("only root becomes another user")
    with ProcessPoolExecutor(1, get_context("fork"), _be_a_pod) as pool:
        yield pool


@pytest.mark.parametrize("below", ["", "/kv"])
def test_a_directory_without_permission_is_wrong_and_its_fix_works(pod: ProcessPoolExecutor, below: str) -> None:
    with tempfile.TemporaryDirectory(prefix="a b") as above:
        Path(above).chmod(0o755)
        state, fix, _ = pod.submit(_seen, above + below).result()
        assert (state, str(fix).partition(" -o ")[0]) == ("wrong", "sudo install -d -m 700")
        _do(str(fix).removeprefix("sudo "))
        assert pod.submit(_seen, above + below).result()[0] == "ok"


def test_what_is_no_directory_is_wrong_and_nobody_is_told_to_move_it(tmp_path: Path) -> None:
    """The path may be any file, such as ``/etc/passwd``, so the fix is another path."""
    path = tmp_path / "kv"
    path.write_text("")
    line = look("directory", tier_of(path))
    assert (line.state, line.words) == ("wrong", f"{path}: Not a directory")
    assert str(line.fix).startswith("path: a directory")
    assert look("directory", tier_of(tmp_path / "another")).state == "ok"
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    assert look("directory", tier_of(path)).state == "wrong", "a link that leads nowhere is no place yet to be made"


def test_nobody_is_asked_to_change_the_mode_of_anothers_directory(pod: ProcessPoolExecutor) -> None:
    """A volume with an fsGroup belongs to root and the group. A pod can only make a private directory below it."""
    with tempfile.TemporaryDirectory() as volume:
        os.chown(volume, 0, _FS_GROUP)
        Path(volume).chmod(0o2775)
        state, fix, log = pod.submit(_seen, volume).result()
        assert (state, fix) == ("warning", f"path: {volume}/kv, in the config, which the server makes with mode 0700")
        assert "set path to a directory below" in log
        assert pod.submit(_seen, f"{volume}/kv").result() == ("ok", None, "")


def test_a_capacity_beyond_the_disk_is_warned_of_with_one_that_fits(mounted: Callable[..., Path]) -> None:
    path = mounted("tmpfs", "size=64m")
    (path / "held").write_bytes(bytes(8 << 20))
    line = look("space", tier_of(path, capacity=1 << 30))
    assert (line.state, "8.00MiB in use by what the directory holds" in line.words) == ("warning", True)
    assert line.fix == "capacity: 57MiB", "nine tenths of 64 MiB: what is there already counts, and some room stays"
    assert look("space", tier_of(path, capacity=64 << 20)).state == "ok"
    (path / "full").write_bytes(bytes(56 << 20))
    full = look("space", tier_of(path / "deeper" / "kv", capacity=1 << 30))
    assert (full.state, "disk is full" in full.words) == ("wrong", True)


def test_what_a_directory_holds_is_counted_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting millions of files would take so long that the filesystem would seem to hang."""
    (tmp_path / "below").mkdir()
    for number in range(3):
        (tmp_path / "below" / f"{number}").touch()
    for limit, is_counted in ((4, True), (3, False)):
        monkeypatch.setattr(directory, "_FILES_MAX", limit)
        line = look("space", tier_of(tmp_path))
        assert (line.state, "in use by what the directory holds" in line.words) == ("ok", is_counted)


def test_a_shared_directory_is_synced_renamed_and_its_clock_compared(tmp_path: Path) -> None:
    """A clock that is off by more than gc's grace is wrong: gc could delete chunks that were just written."""
    shared = tier_of(tmp_path, kind="shared_dir")
    assert look("sync and clock", shared).state == "ok"
    assert "; servers evict" in look("space", shared).words
    for skew_s, state, words in ((-120, "warning", "ahead of"), (900, "wrong", "behind")):
        clock = look("sync and clock", shared, clock=lambda skew_s=skew_s: time.time() + skew_s)
        assert clock.state == state
        assert words in clock.words
    assert not list(tmp_path.iterdir())


def test_filesystems_as_the_kernel_describes_them(tmp_path: Path) -> None:
    """A slab on NFS gets a warning, a shared directory there does not. The root filesystem gets a warning."""
    machine = Machine(tmp_path)

    def line(**fields: Any) -> Finding:
        return look("filesystem", tier_of(machine.directory, **fields), root=str(machine.root))

    assert line().state == "ok"
    machine.mount("nfs4", "server:/kv", "0:44", "rw,proto=tcp")
    assert (line().state, str(line().fix).startswith("kind: shared_dir")) == ("warning", True)
    assert line(kind="shared_dir").state == "ok"
    machine.write("proc/self/mountinfo", "22 1 254:1 / / rw,relatime - ext4 /dev/vda1 rw\n")
    assert (line().state, line().words.partition(":")[0]) == ("warning", "ext4 at / (/dev/vda1)")
    machine.remove("proc/self/mountinfo")
    assert line().state == "unknown"


def test_with_a_gpu_the_verdict_on_gds_is_a_finding(tmp_path: Path) -> None:
    """On a machine made of files, GPUDirect is real. Without udev it is a warning with a fix, and nothing is wrong."""
    machine = Machine(tmp_path)

    def found(**fields: Any) -> Finding:
        return gds_finding(tier_of(machine.directory, **fields), machine.report(), gpu=True)

    assert (found().state, found().words[:34]) == ("ok", "GPUDirect Storage: real (nvidia-fs")
    machine.remove("run/udev")
    assert found().state == "warning"
    assert "fix: in a container: -v /run/udev:/run/udev:ro" in found().words
    assert found(mover="posix").state == "ok"


def test_a_filesystem_that_hangs_is_given_up(
    tmp_path: Path, child: ChildProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(directory, "nearest", lambda path: release.wait() and path)
    monkeypatch.setattr(directory, "HANG_S", 0.05)
    found = section_of(tmp_path, child)
    release.set()
    assert [(name, line.state) for name, line in found.items()] == [("directory", "wrong")]


def _do(command: str) -> None:
    """Apply a fix."""
    subprocess.run(shlex.split(command), check=True, capture_output=True)


def _be_a_pod() -> None:
    """Become a user without a name, in the volume's group."""
    os.setgroups([_FS_GROUP])
    os.setgid(0)
    os.setuid(1_000_680_000)


def _seen(path: str) -> tuple[str, str | None, str]:
    """Return the check's state and fix, and the log of a start."""
    log = StringIO()
    logging.getLogger("nixl_offload").addHandler(logging.StreamHandler(log))
    warn_of_others(path)
    found = look("directory", tier_of(Path(path)))
    return found.state, found.fix, log.getvalue()
