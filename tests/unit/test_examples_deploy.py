"""Proves of examples/docker and examples/kubernetes that they agree with themselves, with the config that they carry,
with the image, and with the schemas of Kubernetes and Compose; as far as that can be proved without engine and cluster.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import compose_spec
import kubernetes_validate
import pytest
import yaml

from nixl_offload import __version__
from nixl_offload.config import Config, DirectoryConfig, MemoryConfig, S3Config, kv_transfer_config, load_config
from nixl_offload.units import parse_size
from tests.unit.kustomize_rig import Resource, render

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "examples" / "docker"
KUBERNETES = ROOT / "examples" / "kubernetes"
OVERLAYS = {path.name: path for path in sorted((KUBERNETES / "overlays").iterdir())} | {"llm-d": KUBERNETES / "llm-d"}
MOUNTED_CONFIG = "/etc/nixl-offload/kv.yaml"
RELEASES = ("1.31", "1.37")
"""Of Kubernetes: the schemas that manifests are checked against, the oldest that vendors still serve and the newest."""


# ---- Kubernetes


@pytest.fixture(scope="module")
def llm_d_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What llm-d's guide is known to have at the URL that our overlay names: names, ports and volumes, no more."""
    base = tmp_path_factory.mktemp("llm-d")
    container = {
        "name": "modelserver",
        "image": "vllm/vllm-openai:v0.23.0",
        "command": ["vllm", "serve"],
        "ports": [{"name": "modelserver", "containerPort": 8000}],
        "resources": {"limits": {"memory": "400Gi", "nvidia.com/gpu": 2}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    labels = {"llm-d.ai/role": "decode"}
    pod = {
        "serviceAccountName": "sa",
        "terminationGracePeriodSeconds": 130,
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "gpu-vllm-decode"},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    (base / "deployment.yaml").write_text(yaml.safe_dump(deployment))
    (base / "kustomization.yaml").write_text(yaml.safe_dump({"resources": ["deployment.yaml"]}))
    return base


@pytest.fixture(scope="module", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest, llm_d_base: Path) -> tuple[str, list[Resource]]:
    """The name of an overlay and what it renders to."""
    return request.param, render(OVERLAYS[request.param], lambda url: llm_d_base)


def of_kind(resources: list[Resource], *kinds: str) -> list[Resource]:
    return [resource for resource in resources if resource["kind"] in kinds]


def server(resources: list[Resource]) -> Resource:
    [found] = of_kind(resources, "StatefulSet", "Deployment")
    return found


def pods(resources: list[Resource]) -> Iterator[Mapping[str, Any]]:
    """The pod specs of all workloads; claims of a StatefulSet count as volumes."""
    for resource in resources:
        if resource["kind"] in {"StatefulSet", "Deployment"}:
            spec = resource["spec"]["template"]["spec"]
            claims = [
                {"name": c["metadata"]["name"], "claim": c} for c in resource["spec"].get("volumeClaimTemplates", ())
            ]
            yield {**spec, "volumes": [*spec["volumes"], *claims]}
        elif resource["kind"] == "CronJob":
            yield resource["spec"]["jobTemplate"]["spec"]["template"]["spec"]


def containers(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def config_of(resources: list[Resource], tmp_path: Path) -> Config:
    """The config that the overlay's ConfigMap carries, as our own reader understands it."""
    [config_map] = of_kind(resources, "ConfigMap")
    path = tmp_path / "kv.yaml"
    path.write_text(config_map["data"]["kv.yaml"])
    return load_config(path)


def option(arguments: list[str], name: str) -> str:
    """The value of a command-line option in a list of arguments."""
    return arguments[arguments.index(name) + 1]


@pytest.mark.parametrize("release", RELEASES)
def test_manifests_fit_the_schemas_of_kubernetes(overlay: tuple[str, list[Resource]], release: str) -> None:
    """Strictly: a field that Kubernetes does not know is an error. PodMonitor, a custom resource, has no schema."""
    for resource in overlay[1]:
        if resource["kind"] != "PodMonitor":
            kubernetes_validate.validate(resource, release, strict=True)
    worse = json.loads(json.dumps(server(overlay[1])))
    worse["spec"]["template"]["spec"]["containers"][0]["securitycontext"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(worse, release, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which has kustomize in it, is not installed")
def test_kustomize_renders_what_is_tested_here(
    overlay: tuple[str, list[Resource]], llm_d_base: Path, tmp_path: Path
) -> None:
    """Field by field, but for the hash in the ConfigMap's name, which must be there: so a changed config rolls pods."""
    copy = tmp_path / "kubernetes"
    shutil.copytree(KUBERNETES, copy)
    directory = copy / OVERLAYS[overlay[0]].relative_to(KUBERNETES)
    shutil.copytree(llm_d_base, copy / "llm-d-base")
    file = directory / "kustomization.yaml"
    file.write_text(re.sub(r"https://github.com/llm-d/\S+", "../llm-d-base", file.read_text()))
    if overlay[0] == "llm-d":  # there, names have a prefix that patches need not say
        base = copy / "llm-d-base"
        deployment = (base / "deployment.yaml").read_text().replace("name: gpu-vllm-decode", "name: decode")
        (base / "deployment.yaml").write_text(deployment)
        (base / "kustomization.yaml").write_text('{resources: [deployment.yaml], namePrefix: "gpu-vllm-"}')
    done = subprocess.run(
        ["kubectl", "kustomize", str(directory)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    text, hashes = re.subn(r"(name: nixl-offload)-[0-9a-z]{10}\b", r"\1", done.stdout)
    assert hashes == 1 + len(list(pods(overlay[1])))
    assert comparable(list(yaml.safe_load_all(text))) == comparable(overlay[1])


def comparable(value: Any) -> Any:
    """``value`` with lists of mappings in an order of their own; the order of sets is the renderer's affair."""
    if isinstance(value, list):
        items = [comparable(item) for item in value]
        return sorted(items, key=lambda item: json.dumps(item, sort_keys=True)) if any_mapping(items) else items
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    return value


def any_mapping(items: list[Any]) -> bool:
    return any(isinstance(item, dict) for item in items)


def test_the_server_is_told_of_the_config_that_is_mounted(overlay: tuple[str, list[Resource]], tmp_path: Path) -> None:
    """The JSON given to vLLM is what ``nixl-offload show`` prints for the ConfigMap's file at its place in the pod."""
    config = config_of(overlay[1], tmp_path)
    [container] = server(overlay[1])["spec"]["template"]["spec"]["containers"]
    told = json.loads(option(container["args"], "--kv-transfer-config"))
    assert told == kv_transfer_config(config, MOUNTED_CONFIG)
    for pod in pods(overlay[1]):
        for each in containers(pod):
            mounts = {mount["mountPath"]: mount["name"] for mount in each["volumeMounts"]}
            assert mounts["/etc/nixl-offload"] == "config", each["name"]
        [volume] = [volume for volume in pod["volumes"] if volume["name"] == "config"]
        assert volume["configMap"]["name"] == "nixl-offload"
    for word in re.findall(r"/etc/nixl-offload/\S+\.yaml", json.dumps([containers(pod) for pod in pods(overlay[1])])):
        assert word == MOUNTED_CONFIG


def test_directories_of_the_config_lie_on_volumes(overlay: tuple[str, list[Resource]], tmp_path: Path) -> None:
    """Below a mount, in every container of every pod, and never larger than the volume."""
    tiers = [tier for tier in config_of(overlay[1], tmp_path).tiers if isinstance(tier, DirectoryConfig)]
    for pod in pods(overlay[1]):
        for container in containers(pod):
            for tier in tiers:
                names = [
                    mount["name"]
                    for mount in container["volumeMounts"]
                    if tier.path.startswith(mount["mountPath"].rstrip("/") + "/")
                ]
                assert len(names) == 1, (container["name"], tier.path)
                [volume] = [volume for volume in pod["volumes"] if volume["name"] == names[0]]
                room = room_of(volume, overlay[1])
                assert room is None or tier.capacity_bytes < room


def room_of(volume: Mapping[str, Any], resources: list[Resource]) -> int | None:
    """What ``volume`` may hold; None where another (llm-d's guide) makes the claim."""
    if "emptyDir" in volume:
        return kubernetes_size(volume["emptyDir"]["sizeLimit"])
    claims = {claim["metadata"]["name"]: claim for claim in of_kind(resources, "PersistentVolumeClaim")}
    claim = volume["claim"] if "claim" in volume else claims.get(volume["persistentVolumeClaim"]["claimName"])
    return None if claim is None else kubernetes_size(claim["spec"]["resources"]["requests"]["storage"])


def kubernetes_size(text: str) -> int:
    return parse_size(f"{text}B")


def test_every_mount_has_its_volume_and_every_name_its_object(overlay: tuple[str, list[Resource]]) -> None:
    """Volumes, service accounts, claims, storage classes, services and selectors; what llm-d's guide makes is known."""
    resources = overlay[1]
    for pod in pods(resources):
        volumes = [volume["name"] for volume in pod["volumes"]]
        assert len(volumes) == len(set(volumes))
        mounted = {mount["name"] for container in containers(pod) for mount in container["volumeMounts"]}
        assert mounted == set(volumes)
        made = {"ServiceAccount": {"sa"} if overlay[0] == "llm-d" else set(), "PersistentVolumeClaim": set()}
        if overlay[0] == "llm-d":
            made["PersistentVolumeClaim"] = {"llm-d-kv-cache-storage"}
        for kind, names in made.items():
            names |= {resource["metadata"]["name"] for resource in of_kind(resources, kind)}
        assert pod.get("serviceAccountName", "default") in {*made["ServiceAccount"], "default"}
        for volume in pod["volumes"]:
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in made["PersistentVolumeClaim"]
    labels = server(resources)["spec"]["template"]["metadata"]["labels"]
    for selector in [
        server(resources)["spec"]["selector"]["matchLabels"],
        *(service["spec"]["selector"] for service in of_kind(resources, "Service")),
        *(monitor["spec"]["selector"]["matchLabels"] for monitor in of_kind(resources, "PodMonitor")),
    ]:
        assert selector.items() <= labels.items()
    ports = {port["name"] for port in server(resources)["spec"]["template"]["spec"]["containers"][0]["ports"]}
    for monitor in of_kind(resources, "PodMonitor"):
        assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports


def test_local_volumes_fit_the_claims_for_them() -> None:
    """Class, size and access of the PersistentVolume are those that the StatefulSet asks for."""
    resources = render(OVERLAYS["local-nvme"])
    [volume], [storage_class] = of_kind(resources, "PersistentVolume"), of_kind(resources, "StorageClass")
    [claim] = server(resources)["spec"]["volumeClaimTemplates"]
    name = storage_class["metadata"]["name"]
    assert volume["spec"]["storageClassName"] == claim["spec"]["storageClassName"] == name
    assert volume["spec"]["accessModes"] == claim["spec"]["accessModes"]
    assert volume["spec"]["capacity"]["storage"] == claim["spec"]["resources"]["requests"]["storage"]
    assert storage_class["volumeBindingMode"] == "WaitForFirstConsumer", (
        "else the drive is bound before the GPU is known"
    )


def test_a_server_has_time_to_drain(overlay: tuple[str, list[Resource]], tmp_path: Path) -> None:
    """drain_timeout < --shutdown-timeout, and that with the preStop hook and 15 s to end < the grace of the pod."""
    pod = server(overlay[1])["spec"]["template"]["spec"]
    [container] = pod["containers"]
    shutdown_s = int(option(container["args"], "--shutdown-timeout"))
    waits_s = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert config_of(overlay[1], tmp_path).drain_timeout_s < shutdown_s
    assert waits_s + shutdown_s + 15 <= pod["terminationGracePeriodSeconds"]


def test_memory_of_the_pod_holds_the_memory_tier(overlay: tuple[str, list[Resource]], tmp_path: Path) -> None:
    """And leaves half of the limit to vLLM; requested in full, for it is taken whole at start."""
    tiers = [tier for tier in config_of(overlay[1], tmp_path).tiers if isinstance(tier, MemoryConfig)]
    [container] = server(overlay[1])["spec"]["template"]["spec"]["containers"]
    limit = kubernetes_size(container["resources"]["limits"]["memory"])
    assert sum(tier.capacity_bytes for tier in tiers) <= limit // 2
    if overlay[0] != "llm-d":
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]


def test_nothing_runs_as_root_or_with_privileges(overlay: tuple[str, list[Resource]]) -> None:
    """In every pod, CronJobs included; and as the user that the image is made for."""
    for pod in pods(overlay[1]):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" == "2000:0"
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
            assert re.fullmatch(
                rf"registry\.example\.com/vllm-nixl-offload:{re.escape(__version__)}", container["image"]
            )


def test_gpudirect_storage_or_no_server(tmp_path: Path) -> None:
    """As the overlay promises: no other mover, no copies through host memory, no server without the tier."""
    resources = render(OVERLAYS["gds"])
    [tier] = config_of(resources, tmp_path).directories
    assert (tier.mover, tier.required) == ("gds_mt", True)
    [container] = server(resources)["spec"]["template"]["spec"]["containers"]
    assert {"name": "CUFILE_ALLOW_COMPAT_MODE", "value": "false"} in container["env"]


def test_servers_are_scheduled_probed_and_scraped() -> None:
    """On tainted GPU nodes; by probes that a busy API process may take a moment to answer; by a Prometheus that selects
    monitors by the label of its release.
    """
    resources = render(OVERLAYS["local-nvme"])
    spec = server(resources)["spec"]["template"]["spec"]
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]
    [container] = spec["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["timeoutSeconds"] >= 5
    [monitor] = of_kind(resources, "PodMonitor")
    assert "release" in monitor["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= server(resources)["metadata"]["labels"].items()


def test_shared_tiers_are_kept_to_their_size(llm_d_base: Path) -> None:
    """Who shares a bucket or directory has the CronJob, with config, claim and user of the servers; nobody else has.

    Its account is one that the manifests make, or none.
    """
    for name in OVERLAYS:
        resources = render(OVERLAYS[name], lambda url: llm_d_base)
        jobs = of_kind(resources, "CronJob")
        assert len(jobs) == (1 if name in {"s3", "shared-filesystem", "llm-d"} else 0)
        claims = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in server(resources)["spec"]["template"]["spec"]["volumes"]
            if "persistentVolumeClaim" in volume
        }
        accounts = {account["metadata"]["name"] for account in of_kind(resources, "ServiceAccount")}
        for job in jobs:
            assert job["spec"]["concurrencyPolicy"] == "Forbid"
            spec = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
            assert (
                spec["securityContext"].items()
                <= {**server(resources)["spec"]["template"]["spec"]["securityContext"]}.items()
            )
            assert "serviceAccountName" not in spec or spec["serviceAccountName"] in accounts
            mounted = {volume.get("persistentVolumeClaim", {}).get("claimName") for volume in spec["volumes"]}
            assert mounted - {None} == claims
            [container] = spec["containers"]
            assert container["command"] == ["nixl-offload", "gc", MOUNTED_CONFIG, "--delete"]


def test_the_iam_policy_is_for_the_bucket_of_the_config(tmp_path: Path) -> None:
    """Bucket and prefix agree, listing is allowed, and nothing beyond what servers and gc do."""
    [tier] = config_of(render(OVERLAYS["s3"]), tmp_path).tiers
    assert isinstance(tier, S3Config)
    policy = json.loads((OVERLAYS["s3"] / "iam-policy.json").read_text())
    chunks, listing = policy["Statement"]
    assert chunks["Resource"] == f"arn:aws:s3:::{tier.bucket}/{tier.prefix}/*"
    assert sorted(chunks["Action"]) == ["s3:DeleteObject", "s3:GetObject", "s3:PutObject"]
    assert (listing["Action"], listing["Resource"]) == ("s3:ListBucket", f"arn:aws:s3:::{tier.bucket}")


@pytest.mark.parametrize(("check_code", "show_code", "expected"), [(0, 0, 0), (1, 0, 0), (0, 2, 2)])
def test_the_check_before_the_server_warns_and_lets_it_start(
    tmp_path: Path, check_code: int, show_code: int, expected: int
) -> None:
    """The init container's script, run: storage that does not work is told and no more; a wrong config ends the pod."""
    [init] = server(render(OVERLAYS["local-nvme"]))["spec"]["template"]["spec"]["initContainers"]
    command = tmp_path / "nixl-offload"
    command.write_text(f"#!/bin/sh\ncase $1 in show) exit {show_code};; *) echo findings; exit {check_code};; esac\n")
    command.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*init["command"], *init["args"]], env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == expected
    assert ("findings" in done.stdout) == (show_code == 0)
    assert ("exit code 1; vLLM is started" in done.stdout) == (check_code == 1)


# ---- what is said of them


@pytest.mark.parametrize("readme", sorted((ROOT / "examples").rglob("README.md")), ids=lambda p: p.parent.name)
def test_readmes_name_what_is_there(readme: Path) -> None:
    """Links and paths of files and overlays; and each file of examples/docker and each overlay is told of."""
    text = readme.read_text()
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (readme.parent / link).exists(), link
    for path in re.findall(r"(?:examples|docs|configs)/[\w./-]*\w", text):
        assert any((base / path).exists() for base in (ROOT, readme.parent)), path
    if readme.parent == DOCKER:
        for file in DOCKER.iterdir():
            assert f"`{file.name}`" in text or file == readme, file
    if readme.parent == KUBERNETES:
        for name, path in OVERLAYS.items():
            assert f"| `{path.relative_to(KUBERNETES)}` |" in text, name


# ---- Docker


def compose(*names: str, **environment: str) -> dict[str, Any]:
    """Compose files laid over each other, variables filled in as Compose does: ``${A:-default}`` and ``${A:?message}``.

    Each file is first held against Compose's schema: an unknown key or a malformed port or mount is an error.
    """
    merged: dict[str, Any] = {}
    for name in names:
        text = (DOCKER / name).read_text()

        def fill(match: re.Match[str]) -> str:
            variable, kind, word = match.groups()
            if kind == "?" and variable not in environment:
                raise ValueError(word)
            return environment.get(variable, word)

        data = yaml.safe_load(re.sub(r"\$\{(\w+):([-?])([^}]*)\}", fill, text))
        compose_spec.PyCompose.from_yaml(yaml.safe_dump(data))
        for service, fields in data["services"].items():
            merged.setdefault("services", {}).setdefault(service, {}).update(fields)
        merged["volumes"] = {**merged.get("volumes", {}), **data.get("volumes", {})}
    return merged


def test_compose_files_say_what_they_need() -> None:
    """A model; and a key that Compose does not know is found."""
    with pytest.raises(ValueError, match="say MODEL="):
        compose("compose.yaml")
    with pytest.raises(ValueError, match="extension key"):
        compose_spec.PyCompose.from_yaml("services: {vllm: {image: a, device: [b]}}")


@pytest.mark.parametrize(
    ("files", "config"),
    [
        (["compose.yaml"], "kv-nvme.yaml"),
        (["compose.yaml", "compose.nvidia-fs.yaml"], "kv-nvme.yaml"),
        (["compose.s3.yaml"], "kv-s3.yaml"),
    ],
)
def test_compose_runs_the_server_with_the_config_that_it_mounts(files: list[str], config: str) -> None:
    """Config, drive and devices agree; the container has time to drain, and no privilege."""
    services = compose(*files, MODEL="some/model")["services"]
    vllm = services["vllm"]
    loaded = load_config(DOCKER / config)
    assert f"./{config}:{MOUNTED_CONFIG}:ro" in vllm["volumes"]
    assert json.loads(option(vllm["command"], "--kv-transfer-config")) == kv_transfer_config(loaded, MOUNTED_CONFIG)
    mounts = [volume.split(":")[1] for volume in vllm["volumes"]]
    [tier] = loaded.tiers
    if isinstance(tier, DirectoryConfig):
        assert tier.path in mounts
        assert "/run/udev:/run/udev:ro" in vllm["volumes"]
    shutdown_s = int(option(vllm["command"], "--shutdown-timeout"))
    assert loaded.drain_timeout_s < shutdown_s <= int(vllm["stop_grace_period"].removesuffix("s")) - 15
    assert vllm["build"] == "../.."
    devices = [f"/dev/nvidia-fs{number}:/dev/nvidia-fs{number}" for number in range(16)]
    assert vllm.get("devices", []) == (devices if "compose.nvidia-fs.yaml" in files else [])
    for service in services.values():
        assert "privileged" not in service
        assert service["cap_drop"] == ["ALL"]
        assert not any(value for name, value in service["environment"].items() if name.startswith("AWS_"))


def test_only_one_service_collects_and_only_when_asked() -> None:
    """The bucket's gc has a profile of its own, and the same config."""
    gc = compose("compose.s3.yaml", MODEL="some/model")["services"]["gc"]
    assert gc["profiles"] == ["gc"]
    assert f"gc {MOUNTED_CONFIG} --delete" in gc["command"][0]


def run_script(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run run.sh so that it prints the command that it would run."""
    settings = {"PATH": os.environ["PATH"], "DRY_RUN": "1", "DRIVE": str(tmp_path / "no-drive"), **environment}
    return subprocess.run(
        [str(DOCKER / "run.sh"), *arguments], env=settings, capture_output=True, text=True, timeout=30, check=False
    )


def words_of(tmp_path: Path, *arguments: str, **environment: str) -> list[str]:
    """The words of the command that run.sh would run, as a shell reads what it printed."""
    done = run_script(tmp_path, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    shell = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {done.stdout}"], capture_output=True, text=True, check=True, timeout=30
    )
    return shell.stdout.split("\0")[:-1]


def test_the_script_gives_the_container_the_devices_that_are_there(tmp_path: Path) -> None:
    """nvidia-fs nodes one by one, the drive and udev where there is a drive, and vLLM's options at the end."""
    drive, devices = tmp_path / "drive", tmp_path / "dev"
    drive.mkdir()
    devices.mkdir()
    for number in (0, 1):
        (devices / f"nvidia-fs{number}").touch()
    words = words_of(tmp_path, "a/model", "--max-model-len", "4096", DRIVE=str(drive), DEVICES=str(devices))
    assert [words[index + 1] for index, word in enumerate(words) if word == "--device"] == [
        str(devices / "nvidia-fs0"),
        str(devices / "nvidia-fs1"),
    ]
    volumes = [words[index + 1] for index, word in enumerate(words) if word == "--volume"]
    assert f"{drive}:{drive}" in volumes
    assert "/run/udev:/run/udev:ro" in volumes
    assert f"{DOCKER / 'kv-nvme.yaml'}:{MOUNTED_CONFIG}:ro" in volumes
    assert words[words.index("vllm-nixl-offload") + 1] == "a/model"
    assert words[-2:] == ["--max-model-len", "4096"]
    loaded = load_config(DOCKER / "kv-nvme.yaml")
    assert json.loads(option(words, "--kv-transfer-config")) == kv_transfer_config(loaded, MOUNTED_CONFIG)
    assert int(option(words, "--stop-timeout")) >= int(option(words, "--shutdown-timeout")) + 15
    assert "--privileged" not in words


def test_the_script_passes_credentials_by_name_only(tmp_path: Path) -> None:
    """Their values must not stand on a command line, where every user of the machine can read them."""
    words = words_of(tmp_path, "a/model", CONFIG=str(DOCKER / "kv-s3.yaml"), AWS_SECRET_ACCESS_KEY="do-not-show")
    assert "AWS_SECRET_ACCESS_KEY" in words
    assert "AWS_PROFILE" not in words
    assert "do-not-show" not in " ".join(words)
    assert not any("udev" in word or word == "--device" for word in words)


def test_a_profile_is_not_passed_into_a_container_without_its_file(tmp_path: Path) -> None:
    """There it would keep good keys from being used. The script says how a profile becomes keys."""
    done = run_script(tmp_path, "a/model", AWS_PROFILE="ours")
    assert "AWS_PROFILE" not in done.stdout
    assert "aws configure export-credentials" in done.stderr
    with_keys = run_script(tmp_path, "a/model", AWS_PROFILE="ours", AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b")
    assert "export-credentials" not in with_keys.stderr
    for service in compose("compose.s3.yaml", MODEL="some/model")["services"].values():
        assert "AWS_PROFILE" not in service["environment"]


def test_the_script_says_how_to_use_it(tmp_path: Path) -> None:
    """Without a model, and with a config that is not there: exit code 2 and what to say."""
    done = run_script(tmp_path)
    assert (done.returncode, "run.sh MODEL" in done.stderr) == (2, True)
    done = run_script(tmp_path, "a/model", CONFIG="/no/such.yaml")
    assert done.returncode == 2
    assert "say CONFIG=" in done.stderr
