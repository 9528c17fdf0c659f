"""Renders the kustomizations of examples/ without kustomize: only what they use; anything else is an error."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

Resource = dict[str, Any]

_KNOWN: Final = {"apiVersion", "kind", "resources", "components", "configMapGenerator", "patches", "images"}
_MERGE_KEYS: Final = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
"""Lists that a strategic merge takes as sets, and by what; all others are replaced."""


def render(directory: Path) -> list[Resource]:
    return _apply(directory, [])


def _apply(directory: Path, resources: list[Resource]) -> list[Resource]:
    kustomization = yaml.safe_load((directory / "kustomization.yaml").read_text())
    unknown = set(kustomization) - _KNOWN
    if unknown:
        raise ValueError(f"{directory}: {unknown} is not rendered here")
    for name in kustomization.get("resources", ()):
        path = directory / name
        if path.is_dir():
            resources += _apply(path, [])
        else:
            resources += list(yaml.safe_load_all(path.read_text()))
    for generator in kustomization.get("configMapGenerator", ()):
        data = {name: (directory / name).read_text() for name in generator["files"]}
        if generator.get("behavior") == "replace":
            _find(resources, "ConfigMap", generator["name"])["data"] = data
        else:
            metadata = {"name": generator["name"]}
            resources.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    for name in kustomization.get("components", ()):
        resources = _apply(directory / name, resources)
    for entry in kustomization.get("patches", ()):
        patch = yaml.safe_load((directory / entry["path"]).read_text())
        target = _find(resources, patch["kind"], patch["metadata"]["name"])
        merged = _merge(target, patch)
        merged["metadata"]["name"] = target["metadata"]["name"]
        resources[resources.index(target)] = merged
    for image in kustomization.get("images", ()):
        for resource in resources:
            _rename(resource, image)
    return resources


def _find(resources: list[Resource], kind: str, name: str) -> Resource:
    """Also by the end of its name: a base may have put a prefix before the name that its patches know it by."""
    found = [r for r in resources if r["kind"] == kind and r["metadata"]["name"].endswith(name)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} resources are {kind} {name}, which a patch or generator is for")
    return found[0]


def _merge(base: Any, patch: Any, field: str = "") -> Any:
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        merged = dict(base)
        for key, value in patch.items():
            merged[key] = _merge(base[key], value, key) if key in base else copy.deepcopy(value)
        return merged
    if isinstance(base, list) and isinstance(patch, list) and field in _MERGE_KEYS:
        key = _MERGE_KEYS[field]
        patches = {item[key]: item for item in patch}
        kept = [_merge(item, patches.pop(item[key])) if item[key] in patches else item for item in base]
        return [*kept, *patches.values()]
    return copy.deepcopy(patch)


def _rename(value: Any, image: Mapping[str, str]) -> None:
    if isinstance(value, list):
        for item in value:
            _rename(item, image)
    elif isinstance(value, dict):
        name = str(value.get("image", "")).partition(":")[0]
        if name == image["name"]:
            value["image"] = f"{image.get('newName', name)}:{image['newTag']}"
        for item in value.values():
            _rename(item, image)
