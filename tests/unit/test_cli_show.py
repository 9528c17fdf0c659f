"""``nixl-offload show``: what it prints can be fed back, vLLM accepts it, and errors are messages with exit code 2."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nixl_offload.cli.main import main
from nixl_offload.config import load_config, parse_config

TEXT = "tiers: [{kind: slab, path: /mnt/nvme/kv, capacity: 1.5GB}]\nvllm: {offload_prompt_only: false}\n"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config in the current directory, so that ``kv.yaml`` alone names it."""
    path = tmp_path / "kv.yaml"
    path.write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return path


def test_what_is_printed_can_be_read_back(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "kv.yaml"]) == 0
    checked, _, option = capsys.readouterr().out.partition("# for vLLM:\n")
    assert parse_config(yaml.safe_load(checked)) == load_config(file)
    name, transfer = shlex.split(option)
    assert name == "--kv-transfer-config"
    assert json.loads(transfer)["kv_connector_extra_config"] == {"config": str(file), "offload_prompt_only": False}


def test_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--json", "kv.yaml"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"]["tiers"][0]["capacity"] == "1.5GB"
    assert main(["show", "--kv-transfer-config", "kv.yaml"]) == 0
    assert json.loads(capsys.readouterr().out) == shown["kv_transfer_config"]


def test_beside_another_connector(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours is last, asks for no KV cache layout of its own, and its policy for failed loads is the outermost one's."""
    assert main(["show", "--kv-transfer-config", "--with", "nixl", "--with", "nixl", "kv.yaml"]) == 0
    shown = json.loads(capsys.readouterr().out)
    first, ours = shown["kv_connector_extra_config"].pop("connectors")
    assert (shown["kv_connector"], shown["kv_load_failure_policy"]) == ("MultiConnector", "recompute")
    assert (first["kv_connector"], ours["kv_connector"]) == ("NixlConnector", "NixlOffloadConnector")
    assert "kv_load_failure_policy" not in ours
    assert ours["kv_connector_extra_config"] == {
        "config": str(file),
        "offload_prompt_only": False,
        "block_outermost": False,
    }
    assert main(["show", "--json", "--with", "nixl", "kv.yaml"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_transfer_config"]["kv_connector"] == "MultiConnector"
    with pytest.raises(SystemExit):
        main(["show", "--with", "nothing", "kv.yaml"])


def test_a_wrong_config_is_a_message_and_exit_code_2(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("tiers: [{kind: s3, bucket: kv-cache, mover: objj}]\nchunk: 3\n")
    assert main(["show", "kv.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "nixl-offload: kv.yaml:1: tiers[0].mover: 'objj' is unknown (did you mean 'obj'?); allowed: auto, obj, obstore",
        captured.err.splitlines()[1],
    ]
    assert captured.err.splitlines()[1].startswith("kv.yaml:2: chunk: unknown field")


@pytest.mark.parametrize("form", [[], ["--json"], ["--kv-transfer-config"]])
def test_a_bucket_is_shown_without_the_credentials_of_its_environment(
    form: list[str], file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://me:hunter2@s3.example")
    file.write_text("tiers: [{kind: s3, bucket: kv-cache, ttl: 7d}]\n")
    assert main(["show", *form, "kv.yaml"]) == 0
    captured = capsys.readouterr()
    assert captured.out
    assert "hunter2" not in captured.out + captured.err


@pytest.mark.parametrize("command", ["show", "check", "ls", "verify", "gc", "stat", "bucket init"])
def test_a_failure_is_an_error_object_with_json(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A config that cannot be read, an option that there is not, an interruption: stderr says it as without --json."""
    key = ["5f3a"] if command == "stat" else []
    assert main([*command.split(), "/nonexistent/kv.yaml", *key, "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"error": "/nonexistent/kv.yaml: cannot be read: No such file or directory"}
    assert captured.err == f"nixl-offload: {json.loads(captured.out)['error']}\n"
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--json", "--nonsense", "kv.yaml", *key])
    assert caught.value.code == 2
    assert json.loads(capsys.readouterr().out) == {"error": "unrecognized arguments: --nonsense"}


def test_an_interruption_is_an_error_object_too(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nixl_offload.cli.show.load_config", lambda path: _interrupt())
    assert main(["show", "--json", "kv.yaml"]) == 130
    assert json.loads(capsys.readouterr().out) == {"error": "interrupted"}


def _interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("output", "code", "words"),
    [
        ("> /dev/full", 1, "nixl-offload: the output cannot be written: No space left on device\n"),
        (">&-", 0, ""),
        ("2>&- > /dev/null", 0, ""),
        ("| true; exit ${PIPESTATUS[0]}", 0, ""),
    ],
)
def test_an_output_that_takes_nothing_is_no_traceback(file: Path, output: str, code: int, words: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m nixl_offload.cli.main show {shlex.quote(str(file))} {output}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (code, words)


def test_needs_neither_vllm_nor_torch(file: Path) -> None:
    """So that ``show`` is quick, and works on a machine that only holds the configs."""
    code = (
        "import sys; from nixl_offload.cli.main import main; code = main(['show', sys.argv[1]]); "
        "sys.exit(code or bool({'torch', 'vllm', 'nixl'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
