"""CONTRIBUTING.md, CHANGELOG.md, the Makefile, the hooks for pre-commit and the pins agree with each other."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nixl_offload import __version__

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
FOLDERS = sorted({path.parent.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/test_*.py")})


def _variable(name: str) -> list[str]:
    match = re.search(rf"^{name} := (.*)$", MAKEFILE, re.MULTILINE)
    assert match, name
    return match[1].split()


def test_every_folder_of_tests_has_a_target_and_a_row() -> None:
    targets = [f"test-{name}" for name in FOLDERS]
    assert sorted(_variable("TESTS")) == targets
    documented = re.findall(r"^(test-[a-z0-9]+):.* ## ", MAKEFILE, re.MULTILINE)
    beside = ["test-long"]  # of no folder
    assert sorted(documented) == sorted(targets + beside), "`make help` shows what has a `## ...`"
    rows = re.findall(r"^\| `make (test-[a-z0-9]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(targets + beside)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_target_runs_its_folder(folder: str) -> None:
    """What `make` would run; `-o` keeps it from making an environment."""
    command = ["make", "-n", "-o", ".venv/.installed", f"test-{folder}", "ARGS=-k this"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "-m pytest -n " in shown
    assert f" tests/{folder} -k this" in shown


def test_the_hooks_run_the_lint_of_ci() -> None:
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in repos] == ["local"], "a hook from elsewhere has a version of its own"
    hooks = repos[0]["hooks"]
    assert [hook["entry"] for hook in hooks] == [f"make {target}" for target in _variable("LINTS")]
    assert all(hook["language"] == "system" and hook["pass_filenames"] is False for hook in hooks)
    assert re.search(r"^lint: \$\(LINTS\) ", MAKEFILE, re.MULTILINE)
    assert re.search(r"^test: .*\n\t@\$\(MAKE\) .*\blint\b", MAKEFILE, re.MULTILINE)
    assert re.search(r"^make test\b", (ROOT / ".ci/run").read_text(), re.MULTILINE)


def test_every_tool_is_pinned_within_its_bound() -> None:
    """A lower bound in the extra ``dev``, an exact pin in constraints.txt that it admits."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pins = dict(re.findall(r"^([A-Za-z][\w.-]*)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    for line in [*extras["dev"], *extras["s3"]]:
        requirement = Requirement(line)
        if requirement.name == "nixl-offload":
            continue
        assert str(requirement.specifier).startswith(">="), line
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)], prereleases=True), line


def test_the_changelog_keeps_its_format() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert releases[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", release) for release in releases[1:])
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert __version__ in text
    decisions = {path.name[:4] for path in (ROOT / "docs/decisions").glob("[0-9]*.md")}
    assert set(re.findall(r"\b(0\d{3})\b", text)) <= decisions
