"""``nixl-offload ls CONFIG --diff A B``: the fields in which two namespaces differ, from their manifests.

Threading: one thread. Changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, TextIO

from nixl_offload.errors import ConfigError
from nixl_offload.tiers.inspect import NamespaceInfo, printable

_SHOWN_CHARS: Final = 200


def find_namespace(namespaces: Iterable[NamespaceInfo], prefix: str) -> NamespaceInfo | None:
    """Return the one namespace whose name begins with ``prefix``; None if there is none.

    Several tiers may hold it; one with a manifest is preferred. Raises ConfigError if several names fit.
    """
    found: dict[str, NamespaceInfo] = {}
    for each in namespaces:
        if each.name.startswith(prefix) and (each.name not in found or found[each.name].manifest is None):
            found[each.name] = each
    if len(found) > 1:
        raise ConfigError(f"--diff: {prefix!r} begins the names of {len(found)} namespaces; say more of it")
    return next(iter(found.values()), None)


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[str | None, str | None]]:
    """Return the fields of two manifests that differ, as JSON; None: one lacks it. 1, 1.0 and true are not equal."""
    ours, theirs = _as_json(first), _as_json(second)
    pairs = {name: (ours.get(name), theirs.get(name)) for name in dict.fromkeys([*ours, *theirs])}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def print_diff(first: NamespaceInfo, second: NamespaceInfo, out: TextIO, *, as_json: bool) -> None:
    """Print what separates two namespaces. Raises ConfigError if one has no manifest that fits."""
    manifests = []
    for namespace in (first, second):
        if namespace.manifest is None:
            raise ConfigError(f"--diff: namespace {namespace.path} has no manifest that fits its name")
        manifests.append(namespace.manifest["fields"])
    found = differing(*manifests)
    if as_json:
        values = {name: [each and json.loads(each) for each in pair] for name, pair in found.items()}
        print(json.dumps({"namespaces": [first.path, second.path], "differs": values}, indent=2), file=out)
        return
    for namespace in (first, second):
        print(f"namespace {namespace.path}: {namespace.owner}", file=out)
    for name, pair in found.items():
        shown = (printable(each, _SHOWN_CHARS) or "(not there)" for each in pair)
        print(f"    {printable(name, _SHOWN_CHARS)}: {' | '.join(shown)}", file=out)


def _as_json(fields: Mapping[str, Any]) -> dict[str, str]:
    """Settings stand by their own names beside the other fields."""
    settings = fields.get("settings")
    flat = {**fields, **settings} if isinstance(settings, dict) else fields
    return {name: json.dumps(value, sort_keys=True) for name, value in flat.items() if name != "settings"}
