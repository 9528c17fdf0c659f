"""cuFile's settings in force: cufile.json, and the environment that overrides it. What a setting is for: docs/gds.md.

Threading: pure functions that read files; safe anywhere. Nothing of NVIDIA's is loaded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from nixl_offload.hardware.mounts import beneath

PATH_VARIABLE: Final = "CUFILE_ENV_PATH_JSON"
DEFAULTS: Final[Mapping[str, Any]] = {
    "properties.allow_compat_mode": True,
    "properties.max_device_cache_size_kb": 131_072,
    "properties.max_device_pinned_mem_size_kb": 33_554_432,
}
"""What cuFile does where the file says nothing, of the settings that we look at; all others are off."""
VARIABLES: Final[Mapping[str, str]] = {
    "CUFILE_ALLOW_COMPAT_MODE": "properties.allow_compat_mode",
    "CUFILE_FORCE_COMPAT_MODE": "properties.force_compat_mode",
    "CUFILE_USE_PCIP2PDMA": "properties.use_pci_p2pdma",
}
"""Environment variables that override the file."""

_MAX_BYTES: Final = 1 << 20
_TOKEN: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


class CufileSettings(NamedTuple):
    """Settings by their dotted names, such as ``properties.allow_compat_mode``."""

    where: str
    """The file that cuFile reads, whether it exists or not."""
    error: str | None
    """Why the file cannot be read or understood; then ``said`` has only what the environment says."""
    said: Mapping[str, Any]
    """What the file or the environment says."""
    variables: tuple[str, ...]
    """Environment variables in force."""

    def flag(self, name: str) -> bool:
        """Return a setting that is yes or no. What is no boolean counts as the default."""
        value = self.said.get(name)
        return value if isinstance(value, bool) else bool(DEFAULTS.get(name))

    def number(self, name: str) -> int:
        """Return a setting that is a number. What is no whole number above zero counts as the default."""
        value = self.said.get(name)
        return value if type(value) is int and value > 0 else int(DEFAULTS[name])


def read_settings(root: str = "/") -> CufileSettings:
    """Return what cuFile would read in this process. Never raises; ``root`` stands for ``/`` in tests."""
    named = os.environ.get(PATH_VARIABLE)
    path = named or "/etc/cufile.json"
    said: dict[str, Any] = {}
    error = None
    try:
        with open(beneath(root, path), "rb") as file:
            # JSON with comments: a string stays, a comment becomes a blank.
            text = _TOKEN.sub(lambda at: at[0] if at[0][0] == '"' else " ", file.read(_MAX_BYTES).decode())
        said = _flat(dict(json.loads(text)))
    except FileNotFoundError:
        error = f"{PATH_VARIABLE} names {path}, which does not exist" if named else None
    except OSError as exc:
        error = f"{path} cannot be read: {exc.strerror or exc}"
    except (ValueError, TypeError, RecursionError) as exc:
        error = f"{path} cannot be understood: {exc}"
    variables = tuple(name for name in VARIABLES if os.environ.get(name))
    for name in variables:
        said[VARIABLES[name]] = os.environ[name].strip().lower() in {"1", "true", "yes", "on"}
    return CufileSettings(path, error, said, variables)


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, each in value.items():
        found |= _flat(each, f"{prefix}{name}.") if isinstance(each, dict) else {prefix + name: each}
    return found
