"""What ``nixl-offload`` does before a command runs: little is imported, a missing package is named; and the samples."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nixl_offload.cli.main import main
from nixl_offload.cli.show import SAMPLES
from nixl_offload.config import load_config

FOLDER = Path(__file__).resolve().parents[2] / "nixl_offload" / "configs"


def child(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_imports_nothing_that_is_slow(option: str) -> None:
    """Counted, not timed: no package of another project, and of ours only what names the commands."""
    found = child(
        "import sys\n"
        "before = set(sys.modules)\n"
        "from nixl_offload.cli.main import main\n"
        f"try:\n    main([{option!r}])\n"
        "except SystemExit:\n    pass\n"
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(roots - sys.stdlib_module_names), file=sys.stderr)\n"
        "print(*[name for name in sys.modules if name.startswith('nixl_offload')], file=sys.stderr)\n"
    )
    foreign, ours = found.stderr.splitlines()
    assert foreign == "nixl_offload"
    assert set(ours.split()) == {
        "nixl_offload",
        "nixl_offload.cli",
        "nixl_offload.cli.commands",
        "nixl_offload.cli.main",
        "nixl_offload.errors",
    }


@pytest.mark.parametrize(("module", "package"), [("numpy", "numpy"), ("yaml", "PyYAML")])
def test_a_missing_package_is_named(module: str, package: str) -> None:
    """In one line, with the command that installs it; as JSON where that was asked for."""
    found = child(
        f"import sys; sys.modules[{module!r}] = None\n"
        "from nixl_offload.cli.main import main; sys.exit(main(['ls', 'kv.yaml', '--json']))"
    )
    assert found.returncode == 1
    [line] = found.stderr.splitlines()
    assert line.endswith(f"has no module {module!r}; {sys.executable} -m pip install {package}")
    assert json.loads(found.stdout)["error"] in line


def test_samples_are_listed_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file of the folder; what is printed is a config."""
    files = {path.stem if path.suffix == ".yaml" else path.name for path in FOLDER.iterdir()}
    assert set(SAMPLES) == files
    assert main(["configs"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(SAMPLES)
    assert main(["configs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == SAMPLES
    for name in SAMPLES:
        assert main(["configs", name]) == 0
        text = capsys.readouterr().out
        copy = tmp_path / "kv.yaml"
        copy.write_text(text)
        if not name.endswith(".json"):
            assert load_config(copy) == load_config(FOLDER / f"{name}.yaml")
    assert main(["configs", "gds.yaml"]) == 0
    assert main(["configs", "no-such"]) == 2
    assert "allowed: local-nvme, gds" in capsys.readouterr().err


def test_the_wheel_brings_the_samples(tmp_path: Path) -> None:
    """Built as pip builds it, from what git knows; without a network."""
    root = FOLDER.parents[1]
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, tmp_path)
    shutil.copytree(FOLDER.parent, tmp_path / "nixl_offload", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "wheels", "."]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=240)
    [wheel] = (tmp_path / "wheels").iterdir()
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"nixl_offload/configs/{path.name}" for path in FOLDER.iterdir()} <= names
