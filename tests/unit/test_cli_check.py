"""``nixl-offload check``: the whole command on this machine's files, its exit codes, JSON, terminal.

Its sections in detail: ``test_cli_check_directory``, ``test_cli_check_sections``; buckets: ``tests/s3``.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from nixl_offload.cli.check.report import CheckProgress, CheckReport, Section, ok, unknown, warning, wrong
from nixl_offload.cli.main import main
from nixl_offload.config import parse_config

ROOT = Path(__file__).resolve().parents[2]
HAS_GPU = Path("/proc/driver/nvidia/version").exists()


def check_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["check", "--json", *arguments])
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    for section in report["sections"]:
        for line in section["findings"]:
            assert line["state"] != "wrong" or line["fix"], f"no fix: {line}"
    return code, report


def section(report: dict[str, Any], kind: str) -> dict[str, Any]:
    (found,) = [each for each in report["sections"] if each["kind"] == kind]
    assert isinstance(found, dict)
    return found


def lines(section: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in section["findings"]}


def config(directory: Path, *tiers: str, more: str = "") -> str:
    file = directory / "kv.yaml"
    file.write_text(f"tiers: [{', '.join(tiers)}]\n{more}")
    return str(file)


def test_files_on_this_machine_before_any_server_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory and files: all sections, speeds, nothing wrong, and nothing stays, no directory either."""
    path = tmp_path / "made" / "later"
    file = config(
        tmp_path,
        "{kind: memory, capacity: 128MiB}",
        f"{{kind: slab, path: {path}, capacity: 1GiB}}",
        more="staging: 32MiB",
    )
    code, report = check_json(capsys, file)
    assert code == 0, report
    assert report["works"] is True
    assert set(report) == {"works", "counts", "sections"}
    assert [each["kind"] for each in report["sections"]] == ["environment", "memory", "slab"]
    assert all(set(each) == {"kind", "title", "state", "findings", "facts"} for each in report["sections"])

    environment = lines(section(report, "environment"))
    assert environment["nixl"]["words"].startswith("1.")
    assert "loads (memory: dram)" in environment["NIXL POSIX, aio"]["words"]
    if not HAS_GPU:
        assert environment["gpu"]["state"] == "unknown"
        gds_mt = environment["NIXL GDS_MT"]
        assert gds_mt["state"] == "ok"
        assert "libcudart.so.12: cannot open shared object file" in gds_mt["words"]
        assert gds_mt["words"].endswith("nothing here needs it")
    assert lines(section(report, "memory"))["room"]["state"] == "ok"

    found = section(report, "slab")
    assert f"nor is {path.parent}: is the drive mounted?" in lines(found)["directory"]["words"]
    facts = found["facts"]
    assert facts["path"] == str(path)
    movers = {mover["name"]: mover for mover in facts["movers"]}
    assert movers["copy"]["ok"]
    assert facts["taken"] in movers
    assert {fact["name"] for fact in facts["gds"]["facts"]} >= {"GPU driver", "libcufile", "filesystem"}
    assert facts["io"]["read_bytes_s"] > 0
    assert facts["io"]["write_bytes_s"] > 0
    fastest = lines(found)["fastest mover"]
    assert fastest["words"] == facts["io"]["mover"] == facts["fastest"]
    assert lines(found)[f"speed of {fastest['words']}"]["state"] == "ok"
    (tier,) = yaml.safe_load(f"tiers: [{{kind: slab, path: {path}, capacity: 1GiB}}]")["tiers"]
    parse_config({"tiers": [{**tier, **yaml.safe_load(fastest["fix"])}]})

    assert [each.name for each in tmp_path.iterdir()] == ["kv.yaml"], "nothing stays"


def test_plugins_that_nixl_does_not_find_and_a_mover_that_needs_them(tmp_path: Path) -> None:
    """NIXL_PLUGIN_DIR names a directory without plugins: each is reported with the reason, ``mover: posix`` is wrong.
    The fix, ``unset NIXL_PLUGIN_DIR``, is applied, and the findings turn ok.
    """
    file = config(tmp_path, f"{{kind: slab, path: {tmp_path}, capacity: 1GiB, mover: posix}}")
    command = [sys.executable, "-m", "nixl_offload.cli.main", "check", "--json", "--no-io", file]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    report = json.loads(_run(command, {**environment, "NIXL_PLUGIN_DIR": str(tmp_path)}, 1))
    plugin = lines(section(report, "environment"))["NIXL POSIX, aio"]
    assert (plugin["state"], plugin["fix"]) == ("warning", "unset NIXL_PLUGIN_DIR")
    assert plugin["words"] == f"does not load: NIXL_PLUGIN_DIR={tmp_path} does not hold it"
    movers = lines(section(report, "slab"))["movers"]
    assert (movers["state"], movers["fix"]) == ("wrong", "mover: auto")
    assert section(report, "slab")["facts"]["taken"] is None

    report = json.loads(_run(command, environment, 0))
    assert lines(section(report, "environment"))["NIXL POSIX, aio"]["state"] == "ok"
    assert section(report, "slab")["facts"]["taken"] in ("posix_uring", "posix_aio")
    assert section(report, "slab")["facts"]["io"] is None, "--no-io"


def test_memory_alone_is_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More memory than there is: wrong, and the capacity that the fix names is right."""
    file = config(tmp_path, "{kind: memory, capacity: 500TiB}")
    code, report = check_json(capsys, file)
    assert code == 1
    room = lines(section(report, "memory"))["room"]
    assert room["state"] == "wrong"
    assert room["fix"].startswith("capacity: ")
    assert not [name for name in lines(section(report, "environment")) if name.startswith("NIXL ")], "not needed"
    usable = section(report, "memory")["facts"]["room"]["usable_bytes"]
    # Memory comes and goes on a machine that is shared; so much of what the fix says is there a moment later.
    file = config(tmp_path, f"{{kind: memory, capacity: {usable // 4}}}")
    code, report = check_json(capsys, file)
    assert (code, lines(section(report, "memory"))["room"]["state"]) == (0, "ok")


def test_wrong_usage_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 2
    assert main(["check", "kv.yaml", "--path", "/tmp"]) == 2
    said = "nixl-offload: check: say a config file, or --path DIR"
    assert capsys.readouterr().err.splitlines() == [said, f"{said}, not both"]
    assert main(["check", "--path", "/k\0v"]) == 2
    assert capsys.readouterr().err == "nixl-offload: --path: tiers[0].path: '/k\\x00v' contains a NUL byte\n"
    assert main(["check", config(tmp_path, "{kind: slab}")]) == 2
    assert main(["check", str(tmp_path / "none.yaml")]) == 2


def test_help_documents_states_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    told = capsys.readouterr().out
    for words in (
        "Exit code 0: nothing is wrong",
        "1: something is wrong",
        "2: CONFIG",
        "    unknown   cannot be told",
    ):
        assert words in told


def report_of() -> CheckReport:
    first = Section("environment", "Environment")
    first.add("python", ok("3.11"), None)
    first.add("gpu", unknown("no [really]", "--gpus all"))
    second = Section("slab", "File tier /a\x1b[2J")
    second.add("space", warning("little", "capacity: 1GiB"))
    second.add("directory", wrong("\x1b]0;x", "chmod 700 /a"))
    second.add("fastest", ok("posix_aio", "mover: posix"))
    return CheckReport((first, second))


def test_plain_text() -> None:
    """What is wrong stands once more at the end; what a user or a server wrote moves no cursor."""
    out = io.StringIO()
    report_of().print_to(out)
    assert out.getvalue().splitlines() == [
        "Environment",
        "  ok       python  3.11",
        "  unknown  gpu     no [really]",
        "                   fix: --gpus all",
        "",
        "File tier /a\\x1b[2J",
        "  warning  space      little",
        "                      fix: capacity: 1GiB",
        "  wrong    directory  \\x1b]0;x",
        "                      fix: chmod 700 /a",
        "  ok       fastest    posix_aio",
        "                      config: mover: posix",
        "",
        "One thing is wrong: 2 ok, 1 warning, 1 wrong, 1 unknown.",
        "  File tier /a\\x1b[2J: directory: \\x1b]0;x",
        "    fix: chmod 700 /a",
    ]
    assert not report_of().works
    fine = CheckReport((report_of().sections[0],))
    out = io.StringIO()
    fine.print_to(out)
    assert out.getvalue().endswith("Nothing is wrong: 1 ok, 1 unknown.\n")
    assert fine.works


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_states_are_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    report_of().print_to(out)
    told = out.getvalue()
    assert "\x1b[31m  wrong" in told
    assert "\x1b[2J" not in told
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    report_of().print_to(plain)
    assert "\x1b" not in plain.getvalue()


def test_progress_is_one_line_on_a_terminal_and_in_a_log_what_takes_long() -> None:
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        progress = CheckProgress(stream)
        progress("looking")
        progress("trying movers", why_long="torch")
        progress.clear()
    assert terminal.getvalue() == "\r\x1b[Klooking ...\r\x1b[Ktrying movers (torch) ...\r\x1b[K"
    assert log.getvalue() == "nixl-offload: trying movers (torch)\n"


def _run(command: list[str], environment: dict[str, str], code: int) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, cwd=ROOT, check=False)
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout
