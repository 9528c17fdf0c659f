"""The budget of lines: a room that grows fails the lint, and so does a budget that was not lowered with its room."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import budget

FILE = (
    '# why\n"nixl_offload/*.py" = { lines = 1, chars = 3 }\n"nixl_offload/cli" = { lines = 2, chars = 4, target = 1 }\n'
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {
        "nixl_offload/units.py": "a\n",
        "nixl_offload/cli/ls.py": "b\n",
        "nixl_offload/cli/gc/command.py": "c\n",
        "nixl_offload/cli/notes.txt": "no code\n",
        "tools/budget.toml": FILE,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def check(tree: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["budget", *arguments])
    return budget.main(tree)


def test_a_room_within_its_budget_passes(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(tree, monkeypatch) == 0


def test_more_lines_or_longer_lines_fail_and_say_by_how_much(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "nixl_offload/cli/ls.py").write_text("b\n\n\n")
    (tree / "nixl_offload/units.py").write_text("aaaa\n")
    assert check(tree, monkeypatch) == 1
    assert capsys.readouterr().err.splitlines() == [
        "nixl_offload/*.py: 5 chars, 2 above its budget of 3",
        "nixl_offload/cli: 4 lines, 2 above its budget of 2",
        "nixl_offload/cli: 6 chars, 2 above its budget of 4",
    ]


def test_a_new_room_needs_a_budget(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "benchmarks").mkdir()
    (tree / "benchmarks/file.py").write_text("\n")
    assert check(tree, monkeypatch) == 1
    assert capsys.readouterr().err == "benchmarks: has no budget\n"


def test_a_budget_falls_with_its_room(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new numbers are written; comments and targets stay."""
    file = tree / "tools/budget.toml"
    file.write_text(FILE.replace("lines = 2", "lines = 103"))
    assert check(tree, monkeypatch) == 1
    assert check(tree, monkeypatch, "--renew") == 0
    assert file.read_text() == FILE.replace("chars = 3", "chars = 2")
