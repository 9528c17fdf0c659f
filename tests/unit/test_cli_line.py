"""The command line itself: errors are one line and an exit code, in JSON too; help is quick. Also the commands without
storage: ``show``, ``configs``, ``schema``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from packaging.requirements import Requirement

from nixl_offload import __version__
from nixl_offload.config import load_config, parse_config
from tests.unit.stored_rig import Cli
from tools.config_docs import PAGE, insert_tables

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "nixl_offload" / "configs"
SLAB = "{kind: slab, path: DIR/kv, capacity: 1GiB}"
MEMORY = "{kind: memory, capacity: 1GiB}"
SHARED = "{kind: shared_dir, path: DIR/kv, capacity: 1GiB}"
TYPO = SHARED.replace("DIR/kv", "DIR/typo")
S3 = "{kind: s3, bucket: kv-cache, endpoint: 'http://127.0.0.1:9'}"
LONG = f"{{kind: shared_dir, path: /{'x' * 300}/kv, capacity: 1GiB}}"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config in the current directory, so that ``kv.yaml`` alone names it."""
    path = tmp_path / "kv.yaml"
    path.write_text("tiers: [{kind: slab, path: /mnt/nvme/kv, capacity: 1.5GB}]\nvllm: {offload_prompt_only: false}\n")
    monkeypatch.chdir(tmp_path)
    return path


@pytest.mark.parametrize(
    ("command", "tiers", "code", "words"),
    [
        ("show", "none", 2, "kv.yaml: cannot be read: No such file or directory\n"),
        ("ls --tier s3", SLAB, 2, "--tier: 's3' is not among the tiers"),
        ("ls", TYPO, 1, "there is no such directory; is the filesystem mounted?"),
        ("ls", LONG, 1, "/kv: cannot be looked at: File name too long"),
        ("ls", LONG.replace("shared_dir", "slab"), 1, "/kv: cannot be looked at: File name too long"),
        ("verify", MEMORY, 2, "only memory, which cannot be looked at from outside the server"),
        ("verify --rate 5MB", SLAB, 2, "'5MB'"),
        ("verify --rate 0/s", SLAB, 2, "'0/s'"),
        ("gc", TYPO, 1, "there is no such directory; is the filesystem mounted?"),
        ("gc --namespace ../x", SHARED, 2, "'../x' is not one; allowed: 32 hex digits"),
        ("gc --max-size 20TB!", SHARED, 2, "'20TB!' is not a size; allowed: "),
        ("gc --older-than 7", SHARED, 2, "'7' is not a duration; allowed: "),
        ("gc --tier s3", SHARED, 2, "--tier: 's3' is not among the tiers of FILE; allowed: shared_dir\n"),
        ("gc --tier memory", SHARED, 2, "choose from"),
        ("gc --delete", S3, 2, "--delete: down to what? Say --max-size or --older-than, or capacity or ttl in"),
        ("gc --delete", f"{SLAB}, {S3}", 2, "--delete: down to what?"),
        ("gc --delete", SLAB, 2, "gc looks after a bucket or a shared directory; a slab keeps to its capacity by"),
        ("gc --delete", f"{SHARED}, {S3}", 2, "are both shared, and gc looks after one at a time; say --tier"),
    ],
)
def test_what_is_wrong_is_one_line(command: str, tiers: str, code: int, words: str, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "kv").mkdir()
    file = tmp_path / "kv.yaml"
    if tiers != "none":
        file.write_text(f"tiers: [{tiers.replace('DIR', str(tmp_path))}]\n")
    name, *options = command.split()
    assert cli(name, str(file), *options) == code
    assert words.replace("FILE", str(file)) in cli.err
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize("odd", ["a\0b", "\udcff", "\ud800x"])
def test_odd_bytes_in_an_argument_are_one_line(odd: str, file: Path, cli: Cli) -> None:
    """NUL, a byte that is not UTF-8, half a surrogate pair: in a path, a namespace, a key, a sample's name."""
    lines = [[*command.split(), odd] for command in ("show", "check", "ls", "verify", "gc", "bucket init", "configs")]
    lines += [[command, "kv.yaml", "--namespace", odd] for command in ("ls", "verify")]
    for arguments in (*lines, ["stat", odd, "5f3a"], ["stat", "kv.yaml", odd]):
        assert cli(*arguments) == 2, arguments
        assert re.fullmatch("nixl-offload: .+\n", cli.err), arguments


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("", 2, "usage: nixl-offload"),
        ("show --json --kv-transfer-config x", 2, "usage: nixl-offload"),
        ("configs no-such", 2, "allowed: cpu-dev, cufile.json, gds"),
        ("--version", 0, f"nixl-offload {__version__}\n"),
        ("--help", 0, "nixl-offload show kv.yaml"),
    ],
)
def test_usage_and_help(arguments: str, code: int, words: str, cli: Cli) -> None:
    assert cli(*arguments.split()) == code
    assert words in (cli.err if code else cli.out)


@pytest.mark.parametrize("command", ["show", "check", "ls", "verify", "gc", "stat", "bucket init"])
def test_a_failure_is_an_error_object_with_json(command: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreadable config; stderr is the same as without --json. Ctrl-C leaves JSON as far as it was printed."""
    key = ["5f3a"] if command == "stat" else []
    assert cli(*command.split(), "/nonexistent/kv.yaml", *key, "--json") == 2
    assert cli.json == {"error": "/nonexistent/kv.yaml: cannot be read: No such file or directory"}
    assert cli.err == f"nixl-offload: {cli.json['error']}\n"

    def interrupt(path: str) -> None:
        raise KeyboardInterrupt

    module = "check.command" if command == "check" else command.split(maxsplit=1)[0]
    monkeypatch.setattr(f"nixl_offload.cli.{module}.load_config", interrupt)
    assert cli(*command.split(), "kv.yaml", *key, "--json") == 130
    assert (cli.out, cli.err) == ("", "nixl-offload: interrupted\n")


@pytest.mark.parametrize(
    ("output", "code", "words"),
    [
        ("> /dev/full", 1, "nixl-offload: the output cannot be written: No space left on device\n"),
        (">&-", 0, ""),
        ("2>&- > /dev/null", 0, ""),
        ("| true", 0, ""),
    ],
)
def test_an_output_that_takes_nothing_is_no_traceback(file: Path, output: str, code: int, words: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m nixl_offload.cli.main show {shlex.quote(str(file))} {output}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (code, words)


# What is imported


def test_help_imports_no_package_of_another_project() -> None:
    """Of ours only what names the commands."""
    code = (
        "import sys\nbefore = set(sys.modules)\n"
        "from nixl_offload.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "new = set(sys.modules) - before\n"
        "print(*[name for name in new if name.partition('.')[0] not in sys.stdlib_module_names], file=sys.stderr)\n"
    )
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stderr.split()) == {f"nixl_offload{name}" for name in ("", ".cli", ".cli.main", ".errors")}


# show, configs and schema


def test_what_is_shown_can_be_read_back(file: Path, cli: Cli) -> None:
    assert cli("show", "kv.yaml") == 0
    checked, _, option = cli.out.partition("# for vLLM:\n")
    assert parse_config(yaml.safe_load(checked)) == load_config(file)
    name, transfer = shlex.split(option)
    assert name == "--kv-transfer-config"
    assert json.loads(transfer)["kv_connector_extra_config"] == {"config": str(file), "offload_prompt_only": False}
    assert cli("show", "--json", "kv.yaml") == 0
    shown = cli.json
    assert shown["config"]["tiers"][0]["capacity"] == "1.5GB"
    assert cli("show", "--kv-transfer-config", "kv.yaml") == 0
    assert cli.json == shown["kv_transfer_config"] == json.loads(transfer)


def test_beside_another_connector(file: Path, cli: Cli) -> None:
    """Ours is last, requests no KV cache layout, and has the outermost connector's policy for failed loads."""
    assert cli("show", "--kv-transfer-config", "--with", "nixl", "--with", "nixl", "kv.yaml") == 0
    shown = cli.json
    first, ours = shown["kv_connector_extra_config"].pop("connectors")
    assert (shown["kv_connector"], shown["kv_load_failure_policy"]) == ("MultiConnector", "recompute")
    assert (first["kv_connector"], ours["kv_connector"]) == ("NixlConnector", "NixlOffloadConnector")
    assert "kv_load_failure_policy" not in ours
    extra = {"config": str(file), "offload_prompt_only": False, "block_outermost": False}
    assert ours["kv_connector_extra_config"] == extra


@pytest.fixture
def schema(cli: Cli) -> Any:
    assert cli("schema") == 0
    Draft202012Validator.check_schema(cli.json)
    return cli.json


def test_every_field_of_the_schema_is_described_and_the_page_of_fields_is_current(schema: Any) -> None:
    """Otherwise: ``python -m tools.config_docs``"""
    for name, model in {"config": schema, **schema["$defs"]}.items():
        for field, said in model.get("properties", {}).items():
            assert said.get("description") or field == "kind" or name == "VllmOptions", f"{name}.{field}"
    page = (ROOT / PAGE).read_text()
    assert insert_tables(page) == page


def test_samples_are_listed_and_printed_and_fit_the_schema(schema: Any, tmp_path: Path, cli: Cli) -> None:
    """Each file of the folder prints as a valid config, and so does the output of ``show`` for it."""
    assert cli("configs") == 0
    assert "local-nvme         One engine, one local NVMe drive, with or without a GPU\n" in cli.out
    names = [line.split()[0] for line in cli.out.splitlines()]
    assert set(names) == {path.name.removesuffix(".yaml") for path in FOLDER.iterdir()}
    copy = tmp_path / "kv.yaml"
    for name in names:
        assert cli("configs", name) == 0
        if name.endswith(".json"):
            continue
        copy.write_text(cli.out)
        assert cli("show", "--json", copy) == 0
        for config in (cli.json["config"], yaml.safe_load(copy.read_text())):
            assert [error.message for error in Draft202012Validator(schema).iter_errors(config)] == []


def test_a_source_distribution_is_whole_and_runs_without_vllm(tmp_path: Path) -> None:
    """Built and installed as by pip, without a network. Beside it lies only what it asks for: no torch, vLLM, NIXL."""
    tree, site = tmp_path / "tree", tmp_path / "site"
    ignore = shutil.ignore_patterns(".*", "build", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=ignore)
    run = partial(subprocess.run, cwd=tree, capture_output=True, text=True, timeout=240)
    run([sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('..')"], check=True)
    [archive] = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    [unpacked] = (tmp_path / "unpacked").iterdir()
    assert [path for path in tree.rglob("*.*") if not (unpacked / path.relative_to(tree)).exists()] == []
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site)]
    run([*pip, str(unpacked)], check=True)
    [ours] = metadata.distributions(path=[str(site)])
    asked = [Requirement(text) for text in ours.requires or ()]
    for each in asked:
        if each.marker is None or each.marker.evaluate({"extra": ""}):
            asked += [Requirement(text) for text in metadata.requires(each.name) or ()]
            for path in metadata.files(each.name) or ():
                part = site / path.parts[0]
                if path.suffix == ".py" and not part.exists():
                    part.symlink_to(Path(sysconfig.get_path("purelib"), part.name))
    sample = (site / "nixl_offload/configs/local-nvme.yaml").read_text()
    (tmp_path / "kv.yaml").write_text(sample.replace("/mnt/nvme/kv", str(tmp_path)))
    command, environment = [sys.executable, "-S", "-m", "nixl_offload.cli.main"], {"PYTHONPATH": str(site)}
    assert run([*command, "ls", "../kv.yaml"], env=environment).stderr == ""
