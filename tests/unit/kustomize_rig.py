"""Renders the kustomizations of examples/ without kustomize, as far as they use it; names of images stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

Resource = dict[str, Any]
_KEYS: Final = ("mountPath", "containerPort", "name")
"""A strategic merge takes lists of such items as sets by the first of these; it replaces all others."""


def render(directory: Path, resources: list[Resource] | None = None) -> list[Resource]:
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
