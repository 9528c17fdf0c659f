"""``nixl-offload check --vllm-args``: command lines are taken apart, servers compared, and vLLM may fail as it likes.

With a real vLLM: ``tests/vllm/test_cli_check_servers.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nixl_offload.cli.check import servers as check_servers
from nixl_offload.cli.check.report import Section
from nixl_offload.cli.check.servers import CommandLine, add_comparison, hashes_section, read_command_lines
from nixl_offload.cli.main import main
from nixl_offload.config import parse_config
from nixl_offload.errors import ConfigError
from nixl_offload.identity.compare import Argument, Server, compare, differing

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0


def server(values: dict[str, Any], arguments: dict[str, Argument] | None = None, **fields: Any) -> Server:
    """A server as vLLM would describe it, of which only what a test is about is filled in."""
    plain: dict[str, Any] = {
        "model": "m",
        "revision": None,
        "by_name_alone": True,
        "files": {},
        "incomparable": [],
        "off": None,
        **fields,
    }
    return Server(values=values, arguments=arguments or {}, **plain)


def told(first: Server, second: Server, *variables: dict[str, str]) -> list[str]:
    """What a person reads, state and words."""
    mine, theirs = variables or ({}, {})
    section = Section("servers", "")
    add_comparison(section, compare(first, second, mine, theirs))
    return [f"{found.state} {found.name}: {found.words}" for found in section.findings]


class TestCommandLines:
    """What stands in the quotes."""

    @pytest.mark.parametrize(
        ("text", "variables", "words"),
        [
            ("org/m --max-model-len 5", {}, ("org/m", "--max-model-len", "5")),
            ("vllm serve org/m", {}, ("org/m",)),
            ("/opt/venv/bin/vllm serve org/m -tp 2", {}, ("org/m", "-tp", "2")),
            ("serve --model=org/m", {}, ("--model=org/m",)),
            ("A=1 B='x y' vllm serve org/m C=2", {"A": "1", "B": "x y"}, ("org/m", "C=2")),
            ("--config server.yaml", {}, ("--config", "server.yaml")),
            ("env A=1 vllm serve org/m", {"A": "1"}, ("org/m",)),
            ("/usr/bin/env vllm serve org/m", {}, ("org/m",)),
        ],
    )
    def test_they_are_taken_apart(self, text: str, variables: dict[str, str], words: tuple[str, ...]) -> None:
        (line,) = read_command_lines([text])
        assert line == CommandLine(variables, words)
        assert line.names_model

    @pytest.mark.parametrize(
        "text",
        [
            "python -m vllm serve org/m",
            "python3 -m vllm.entrypoints.openai.api_server --model org/m",
            "sudo /opt/venv/bin/vllm serve org/m",
            "env -u A vllm serve org/m",
        ],
    )
    def test_another_command_in_front_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match="begin with the model, or with vllm serve"):
            read_command_lines([text])

    @pytest.mark.parametrize("text", ["", "--block-size 16", "-tp 1 --block-size 16", "VLLM_USE_V2=1", "vllm serve"])
    def test_without_a_model_vllm_is_not_asked(self, text: str) -> None:
        (line,) = read_command_lines([text])
        assert not line.names_model

    def test_two_are_compared_and_three_are_too_many(self) -> None:
        assert len(read_command_lines(["m", "m --seed 1"])) == 2
        with pytest.raises(ConfigError, match="the second names no model"):
            read_command_lines(["m", "--seed 1"])
        with pytest.raises(ConfigError, match="once, or twice"):
            read_command_lines(["m", "m", "m"])


class TestComparison:
    """What is said of two servers, by what vLLM has told of each."""

    def test_types_count_and_the_order_is_the_configurations(self) -> None:
        first = {"b": 1, "a": True, "c": "1", "same": None}
        second = {"a": 1, "b": 1.0, "c": "1", "same": None, "new": 0}
        assert [each.path for each in differing(first, second)] == ["b", "a", "new"]

    def test_users_words_come_first_and_name_the_cause(self) -> None:
        """An argument that changes what counts is a cause, whatever the setting is called; the others are harmless."""
        longer = {"cache.mamba_block_size": 8, "model.max_model_len": 8, "model.dtype": "x", "cache.cache_dtype": "fp8"}
        shorter = {**longer, "cache.mamba_block_size": 4, "model.max_model_len": 4, "cache.cache_dtype": "auto"}
        arguments = {
            "max_model_len": Argument(4, ["cache.mamba_block_size", "model.max_model_len"], None),
            "kv_cache_dtype": Argument("auto", ["cache.cache_dtype"], None),
            "max_num_seqs": Argument(None, [], "how requests are batched"),
            "dtype": Argument("auto", [], None),
        }
        others = {name: Argument(7, [], each.reason) for name, each in arguments.items()}
        assert told(server(shorter, arguments), server(longer, others)) == [
            "warning sharing: these two servers share nothing, because max_model_len and kv_cache_dtype differ",
            "warning differs: max_model_len: 4 | 8",
            "warning differs: cache.mamba_block_size: 4 | 8",
            "warning differs: cache.cache_dtype: auto | fp8",
            "ok harmless: max_num_seqs: not set | 7 (how requests are batched)",
            "ok harmless: dtype: auto | 7 (what counts comes out the same)",
        ]

    def test_an_argument_that_vllm_refuses_alone_is_a_cause_where_one_is_missing(self) -> None:
        first = server({"a": 1}, {"x": Argument(1, None, None), "port": Argument(None, [], "the API server's own")})
        second = server({"a": 2}, {"x": Argument(2, [], None), "port": Argument(None, [], "the API server's own")})
        assert told(first, second)[0].endswith("because x differs")
        assert told(first, second)[-1] == "ok harmless: port (the API server's own)"
        assert told(server({"a": 1}, {"x": Argument(1, None, None)}), server({"a": 1}, {"x": Argument(2, [], None)}))[
            0
        ].startswith("ok sharing")

    def test_variables_of_one_server(self) -> None:
        """One that counts is a cause; one that is excused, or unknown while all else is explained, is harmless."""
        first = server({"environment.VLLM_MLA_DISABLE": "1", "hash_seed": None})
        second = server({"hash_seed": "7"})
        mine, theirs = {"VLLM_MLA_DISABLE": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}, {"PYTHONHASHSEED": "7"}
        lines = told(first, second, mine, theirs)
        assert lines[0].endswith("because VLLM_MLA_DISABLE and PYTHONHASHSEED differ")
        assert "warning differs: VLLM_MLA_DISABLE: 1 | (not there)" in lines
        assert lines[-1] == "ok harmless: VLLM_LOGGING_LEVEL (what is logged, traced or told)"
        secret = told(server({}), server({}), {}, {"HUGGING_FACE_HUB_TOKEN": "hf_secret"})
        assert secret[-1] == "ok harmless: HUGGING_FACE_HUB_TOKEN (what counts comes out the same)"

    @pytest.mark.parametrize(
        ("values", "arguments", "variables", "because"),
        [
            ("a", {"x": ([], ["a"]), "y": (None, None)}, [], ["x"]),
            ("environment.VLLM_X", {"y": (None, None)}, ["VLLM_X", "HF_TOKEN"], ["VLLM_X"]),
            ("hash_seed", {"y": (None, None)}, ["PYTHONHASHSEED", "HF_TOKEN"], ["PYTHONHASHSEED"]),
            ("a", {"x": ([], None), "y": (None, []), "z": ([], [])}, [], ["x", "y"]),
            ("a", {"max_num_seqs": (None, None)}, [], []),
            ("a", {}, ["HF_TOKEN", "VLLM_LOGGING_LEVEL"], ["HF_TOKEN"]),
            ("", {"x": (None, None)}, ["HF_TOKEN"], []),
        ],
    )
    def test_who_is_to_blame(
        self,
        values: str,
        arguments: dict[str, tuple[list[str] | None, list[str] | None]],
        variables: list[str],
        because: list[str],
    ) -> None:
        """Arguments and variables that nothing is known of (None) come into question only where something else is left
        unexplained, and then never those that are known to be harmless. All else is told to be harmless.
        """
        servers = []
        for at in range(2):
            its_arguments = {
                name: Argument(at, changes[at], "how requests are batched" if name == "max_num_seqs" else None)
                for name, changes in arguments.items()
            }
            servers.append(server({values: at} if values else {}, its_arguments))
        found = compare(*servers, dict.fromkeys(variables, "1"), {})
        assert list(found.because) == because
        assert {*found.because, *(each.name for each in found.harmless)} == {*arguments, *variables}

    def test_what_is_known_of_a_server_goes_through_json(self) -> None:
        """It is found out in another process."""
        one = server({"a": None}, {"x": Argument(1, ["a"], None), "y": Argument(None, None, "a reason")})
        assert Server.from_dict(json.loads(json.dumps(dataclasses.asdict(one)))) == one

    def test_what_only_one_has_is_one_line(self) -> None:
        first = server({"lora": None, "x": 1})
        second = server({"lora.(type)": "LoRAConfig", "lora.rank": 16, "lora.deep.er": 1, "x": 1})
        assert told(first, second)[1:] == ["warning differs: lora: not set | LoRAConfig"]

    def test_of_a_mapping_that_one_has_it_is_told_that_it_is_set(self) -> None:
        first = server({"a": "(empty)", "b": None, "b.not": 1})
        second = server({**{f"a.k{number}": number for number in range(5)}, "b": None, "b.not": 1})
        assert told(first, second)[1:] == ["warning differs: a: (empty) | (set)"]
        assert told(second, first)[1:] == ["warning differs: a: (set) | (empty)"]

    def test_without_a_shared_tier_one_namespace_is_all_that_they_share(self) -> None:
        section = Section("servers", "")
        add_comparison(section, compare(server({}), server({}), {}, {}), shared_tier=False)
        (line,) = section.findings
        assert line.state == "warning"
        assert line.words.startswith("these two servers have one namespace")
        assert line.words.endswith("so servers that run side by side share nothing")

    def test_many_differences_are_cut_short(self) -> None:
        first, second = ({f"s{number}": value for number in range(30)} for value in (1, 2))
        lines = told(server(first), server(second))
        assert lines[0].endswith("because s0, s1 and s2 differ")
        assert lines[-1] == "warning differs: 18 more, which --json has"

    def test_what_cannot_be_compared_keeps_them_apart(self) -> None:
        """As it does in the namespace, where such a value differs in every process."""
        first, second = (server({"x": value}, incomparable=["x"]) for value in "ab")
        (line,) = told(first, second)
        assert line.startswith("warning sharing: these two servers share nothing, nor does one find its own")
        assert line.endswith(": x cannot be compared between processes")

    def test_local_weights_are_left_to_the_servers(self) -> None:
        """Directories of one name share if their content is equal; one directory does. Another name is a difference."""
        mine, theirs = ({"model_config": path} for path in ("/a/m", "/b/m"))
        mine["speculative_config.draft_model_config"] = "/a/draft"
        arguments = {"model": Argument("/a/m", [], None)}
        assert told(server({}, arguments, files=mine), server({}, arguments, files=theirs))[1:] == [
            "unknown weights: /a/m and /b/m are compared by their content when the servers start"
        ]
        assert len(told(server({}, files=mine), server({}, files=mine))) == 1


@pytest.mark.parametrize("arguments", ["m", "m --prefix-caching-hash-algo sha256_cbor"])
@pytest.mark.parametrize(("seed", "here"), [(None, "unset"), ("7", "7")])
def test_the_seed_of_block_hashes_counts_for_every_algorithm(arguments: str, seed: str | None, here: str) -> None:
    """Where PYTHONHASHSEED is set, vLLM derives the first hash from it, whatever the algorithm."""
    environment = {} if seed is None else {"PYTHONHASHSEED": seed}
    config = parse_config({"tiers": [{"kind": "slab", "path": "/kv", "capacity": "1GiB"}]})
    (line,) = hashes_section(config, arguments.split(), environment).findings
    assert line.state == "ok"
    assert line.words.endswith(f": found by every server with the same PYTHONHASHSEED (here: {here})")


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "kv.yaml"
    file.write_text("tiers: [{kind: memory, capacity: 1MiB}]\n")
    return str(file)


def stub(directory: Path, body: str) -> None:
    """Put a vLLM in ``directory`` whose import does ``body``."""
    (directory / "vllm").mkdir()
    (directory / "vllm/__init__.py").write_text(body)


def servers_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run the command; return the one line of its section, and see that the rest was checked all the same."""
    assert main(["check", "--json", *arguments]) == 0
    sections = {each["kind"]: each for each in json.loads(capsys.readouterr().out)["sections"]}
    assert list(sections) == ["environment", "hashes", "servers", "memory"]
    assert sections["servers"]["facts"]["share"] is None
    (line,) = sections["servers"]["findings"]
    assert isinstance(line, dict)
    return line


def test_no_vllm_is_one_unknown_line(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vLLM that misses a library is told in its own words; hashes and tiers are checked without it."""
    stub(tmp_path, "raise ImportError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    line = servers_line(capsys, config, "--vllm-args", "m", "--vllm-args", "m --seed 1")
    assert line["state"] == "unknown"
    said = "vLLM cannot be imported here: libcudart.so.13: cannot open shared object file"
    assert (line["words"], line["fix"]) == (f"the first: {said}", "run this check where the server runs")


def test_a_vllm_that_hangs_is_killed_at_the_deadline(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(tmp_path, "import time; time.sleep(600)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(check_servers, "LIMIT_S", 1.0)
    line = servers_line(capsys, config, "--vllm-args", "m")
    assert (line["state"], line["words"]) == ("unknown", "vLLM gave no answer: no answer within 1 s; it was killed")


def test_ctrl_c_ends_vllm_and_what_it_started(config: str, tmp_path: Path) -> None:
    """What vLLM starts must not outlive us either: it looks at a model's class in a process of its own."""
    pids = tmp_path / "pids"
    stub(
        tmp_path,
        "import os, pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(pids)!r}).write_text(f'{{os.getpid()}} {{child.pid}}\\n')\n"
        "time.sleep(600)\n",
    )
    command = [sys.executable, "-m", "nixl_offload.cli.main", "check", config, "--vllm-args", "m"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    checking = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        while not (pids.exists() and pids.read_text().endswith("\n")) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        checking.send_signal(signal.SIGINT)
        _, said = checking.communicate(timeout=DEADLINE_S)
    finally:
        checking.kill()
    assert (checking.returncode, said.splitlines()[-1]) == (130, "nixl-offload: interrupted")
    for pid in pids.read_text().split():
        while _runs(int(pid)) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert not _runs(int(pid)), f"process {pid} is left"


def _runs(pid: int) -> bool:
    """Whether there is such a process; one that init has not reaped yet does not run."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
