"""Every folder of tests has a target of make; the changelog names only kinds of changes and decisions that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_folder_of_tests_has_a_target_and_a_row() -> None:
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    wanted = sorted(f"test-{name}" for name in folders | {"long"})
    for file, pattern in (
        ("Makefile", r"^(test-[a-z0-9]+):.* ## "),
        ("CONTRIBUTING.md", r"^\| `make (test-[a-z0-9]+)` \|"),
    ):
        assert sorted(re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE)) == wanted, file


def test_the_changelog_keeps_its_format() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= {"Added", "Changed", "Removed", "Fixed", "Security"}
    decisions = {path.name[:4] for path in (ROOT / "docs/decisions").glob("[0-9]*.md")}
    assert set(re.findall(r"\b(0\d{3})\b", text)) <= decisions
