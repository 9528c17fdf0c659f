"""The budget of lines: a room that grows fails the lint, and so does a budget that was not lowered with its room."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import budget

FILE = '# why\n"nixl_offload/cli" = { lines = 2, chars = 4, target = 1 }\n'


def test_a_room_fails_above_its_budget_and_the_budget_falls_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The new numbers are written; comments and targets stay. A room without a budget fails."""
    file, room = tmp_path / "tools/budget.toml", tmp_path / "nixl_offload/cli"
    for parent in (file.parent, room, tmp_path / "benchmarks"):
        parent.mkdir(parents=True)
    file.write_text(FILE)

    def check(text: str, *arguments: str) -> tuple[int, list[str]]:
        (room / "ls.py").write_text(text)
        monkeypatch.setattr(sys, "argv", ["budget", *arguments])
        return budget.main(tmp_path), capsys.readouterr().err.splitlines()

    assert check("a\nb\n") == (0, [])
    assert check("a\nb\n\n") == (
        1,
        [f"nixl_offload/cli: {have}, 1 above its budget of {most}" for have, most in (("3 lines", 2), ("5 chars", 4))],
    )
    file.write_text(FILE.replace("lines = 2", "lines = 103"))
    assert check("a\n")[0] == 1
    assert check("a\n", "--renew")[0] == 0
    assert file.read_text() == FILE.replace("lines = 2, chars = 4", "lines = 1, chars = 2")
    (tmp_path / "benchmarks/file.py").write_text("\n")
    assert check("a\n") == (1, ["benchmarks: has no budget"])
