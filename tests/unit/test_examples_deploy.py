"""The examples for Kubernetes and Docker fit the schemas of both, and give vLLM the config that they mount."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import compose_spec
import kubernetes_validate
import pytest
import yaml

from nixl_offload import __version__
from nixl_offload.config import kv_transfer_config, load_config
from tests.unit.kustomize_rig import render

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "examples/docker"
OVERLAYS = sorted((ROOT / "examples/kubernetes/overlays").iterdir())
MOUNTED = "/etc/nixl-offload/kv.yaml"
KUBERNETES = ("1.31", "1.37")
"""The oldest release that vendors still serve and the newest."""


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
