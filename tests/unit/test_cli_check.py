"""``nixl-offload check``: what it tells of real directories here, its exit codes, its JSON, plain and on a terminal."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nixl_offload.cli.check_report import CheckReport, Measured, TierReport
from nixl_offload.cli.main import main
from nixl_offload.movers.gds import Fact, GdsReport
from nixl_offload.movers.select import Probe

ROOT = Path(__file__).resolve().parents[2]
HAS_GPU = Path("/proc/driver/nvidia/version").exists()


def check_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["check", "--json", *arguments])
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return code, report


def config(directory: Path, tiers: str, more: str = "") -> str:
    file = directory / "kv.yaml"
    file.write_text(f"tiers: [{tiers}]\n{more}")
    return str(file)


def test_a_directory_on_this_machines_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = check_json(capsys, "--path", str(tmp_path))
    assert code == 0
    assert report["works"] is True
    (tier,) = report["tiers"]
    assert set(tier) == {"path", "mover", "works", "problems", "gds", "movers", "measured"}
    assert (tier["path"], tier["mover"], tier["problems"]) == (str(tmp_path), "auto", [])
    assert tier["measured"] == []
    facts = {fact["name"]: fact for fact in tier["gds"]["facts"]}
    assert all(set(fact) == {"name", "ok", "words", "mend"} for fact in facts.values())
    assert facts["O_DIRECT"]["ok"] in (True, False)
    movers = {mover["name"]: mover for mover in tier["movers"]}
    assert movers["copy"]["ok"]
    if not HAS_GPU:
        assert tier["gds"]["real"] is False
        assert "no NVIDIA driver here" in tier["gds"]["verdict"]
        assert (movers["gds_mt"]["ok"], movers["gds_mt"]["reason"]) == (False, "no NVIDIA driver here")
        assert movers["gds_mt"]["allowed"] is False
    assert not list(tmp_path.iterdir()), "scratch files are gone"


def test_a_directory_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Files work there, GPUDirect Storage never does."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm to write to")
    code, report = check_json(capsys, "--path", "/dev/shm")
    assert code == 0
    facts = {fact["name"]: fact for fact in report["tiers"][0]["gds"]["facts"]}
    assert facts["filesystem"]["ok"] is False
    assert facts["filesystem"]["words"].startswith("tmpfs at ")


def test_what_will_not_work_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "none"
    code, report = check_json(capsys, "--path", str(missing))
    assert (code, report["works"]) == (1, False)
    assert report["tiers"][0]["problems"] == [f"{missing} is not there"]
    assert report["tiers"][0]["movers"] == [], "nothing is tried where there is nothing"
    code, report = check_json(capsys, "--path", "/proc/self")
    assert code == 1
    assert report["tiers"][0]["problems"] == ["none of the movers that `mover: auto` allows starts here"]
    assert not missing.exists()


@pytest.mark.skipif(HAS_GPU, reason="it may well start here")
def test_a_mover_that_the_config_insists_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The movers that start are shown, but do not help: the config forbids them."""
    file = config(tmp_path, f"{{kind: file, path: {tmp_path}, capacity: 1GiB, mover: gds_mt}}")
    assert main(["check", file]) == 1
    out = capsys.readouterr().out
    assert "none of the movers that `mover: gds_mt` allows starts here" in out
    assert "(`mover: gds_mt` does not allow it)" in out


def test_all_file_tiers_of_a_config_and_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = config(
        tmp_path, f"{{kind: memory, capacity: 1GiB}}, {{kind: file, path: {tmp_path}, capacity: 1GiB, mover: posix}}"
    )
    code, report = check_json(capsys, file)
    assert (code, [tier["mover"] for tier in report["tiers"]]) == (0, ["posix"])
    assert main(["check", config(tmp_path, "{kind: memory, capacity: 1GiB}")]) == 0
    assert capsys.readouterr().out == "No tier with kind: file; nothing to check.\n"


def test_wrong_usage_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 2
    assert main(["check", "kv.yaml", "--path", "/tmp"]) == 2
    assert capsys.readouterr().err.splitlines() == 2 * ["nixl-offload: check: say a config file, or --path DIR"]
    assert main(["check", config(tmp_path, "{kind: file}")]) == 2
    assert main(["check", str(tmp_path / "none.yaml")]) == 2


def test_help_documents_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    told = capsys.readouterr().out
    for code in ("Exit code 0:", "1: a tier will not work", "2: FILE or the options are wrong"):
        assert code in told


@pytest.mark.skipif(HAS_GPU, reason="device memory comes from torch")
def test_torch_is_not_needed(tmp_path: Path) -> None:
    """Where neither torch nor NIXL can be imported facts are told, and the mover that needs nothing starts."""
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['nixl'] = None\n"
        "from nixl_offload.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "check", "--path", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    movers = {mover["name"]: mover for mover in json.loads(done.stdout)["tiers"][0]["movers"]}
    assert movers["copy"]["ok"]
    assert "NIXL cannot be imported" in movers["posix_aio"]["reason"]


def report_of(**changes: Any) -> CheckReport:
    facts = (
        Fact("GPU driver", True, "NVIDIA driver 570, open kernel modules"),
        Fact("udev", False, "/run/udev is missing", "-v /run/udev:/run/udev:ro"),
        Fact("PCI P2PDMA", None, "cannot be told [really]", "ask `gdscheck -p`"),
    )
    candidates = (
        ("gds_mt", "direct", True, "", 12e9, 8.5e9),
        ("kvikio", "device", False, "kvikio is not installed", 0.0, 0.0),
    )
    parts: dict[str, Any] = {
        "path": "/kv",
        "mover": "auto",
        "gds": GdsReport(False, "compatibility mode: ...", facts),
        "movers": (Probe("gds_mt", True, "round trip ok"), Probe("kvikio", False, "kvikio is not installed")),
        "allowed": ("gds_mt", "kvikio"),
        "measured": (Measured("/kv/x.json", "gds_mt", "direct", "fastest", 1_700_000_000.0, True, candidates),),
        "problems": (),
    }
    return CheckReport((TierReport(**{**parts, **changes}),))


def test_plain_text() -> None:
    out = io.StringIO()
    report_of().print_to(out)
    assert out.getvalue().splitlines() == [
        "/kv, mover: auto",
        "",
        "compatibility mode: ...",
        "  ok       GPU driver  NVIDIA driver 570, open kernel modules",
        "  not      udev        /run/udev is missing",
        "                       to mend: -v /run/udev:/run/udev:ro",
        "  unknown  PCI P2PDMA  cannot be told [really]",
        "                       to mend: ask `gdscheck -p`",
        "",
        "Movers:",
        "  ok       gds_mt  round trip ok",
        "  not      kvikio  kvikio is not installed",
        "",
        "Measured 2023-11-14 22:13:20Z; chosen: gds_mt (direct), fastest",
        "  ok       gds_mt direct  read 12,000 MB/s, write 8,500 MB/s",
        "  not      kvikio device  kvikio is not installed",
    ]
    stale = report_of(measured=(report_of().tiers[0].measured[0]._replace(current=False),), problems=("no room",))
    out = io.StringIO()
    stale.print_to(out)
    assert "Z, too old to be used; chosen" in out.getvalue()
    assert out.getvalue().endswith("  not      will not work  no room\n")
    assert not stale.works


def test_on_a_terminal_marks_are_coloured_and_words_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    report_of(problems=("/a/path/" + 60 * "x",)).print_to(out)
    told = out.getvalue()
    assert "\x1b[31m  not" in told
    assert "[really]" in told, "what looks like markup is none"
    assert "…" not in told
    assert sum(line.count("x") for line in told.splitlines() if "xx" in line) == 60


def test_json_of_what_was_measured() -> None:
    (tier,) = report_of().to_dict()["tiers"]
    (measured,) = tier["measured"]
    assert measured["mover"] == "gds_mt"
    assert measured["candidates"][0] == {
        "mover": "gds_mt",
        "way": "direct",
        "ok": True,
        "reason": "",
        "read_bytes_s": 12e9,
        "write_bytes_s": 8.5e9,
    }
    assert json.loads(json.dumps(tier)) == tier


def test_a_read_only_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root may write anywhere, so the refusal is the kernel's words from where the scratch file is made."""
    made = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT and str(path).startswith(str(tmp_path)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return made(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    code, report = check_json(capsys, "--path", str(tmp_path))
    assert code == 1
    (tier,) = report["tiers"]
    facts = {fact["name"]: fact for fact in tier["gds"]["facts"]}
    assert facts["O_DIRECT"]["words"] == f"{tmp_path} cannot be written (Read-only file system)"
    assert not any(mover["ok"] for mover in tier["movers"])
