"""On which machine, for which files and settings a choice holds: everything that could make another one the faster.

Threading: functions without state. They read small files of the system, nothing of the tier's, and raise nothing of it.
"""

from __future__ import annotations

import hashlib
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import torch

from nixl_offload.config import DirectoryConfig
from nixl_offload.engine.choice.base import Shape
from nixl_offload.engine.streams import Device

_PACKAGES: Final = (
    "torch",
    "nixl",
    "nixl-cu12",
    "nixl-cu13",
    "kvikio-cu12",
    "kvikio-cu13",
    "libkvikio-cu12",
    "libkvikio-cu13",
    "nvidia-cufile",
    "nvidia-cufile-cu12",
)
_CUFILE_FOLDERS: Final = ("/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib", "/usr/lib64")
_PREFIXES: Final = ("CUFILE_", "KVIKIO_")
"""Variables that cuFile and kvikio listen to."""

Fingerprint = dict[str, str]


def fingerprint(
    tier: DirectoryConfig, directory: str, device: Device, shape: Shape, root: Path = Path("/")
) -> Fingerprint:
    """Return it, for people to read; ``root`` is where /proc and /etc are found."""
    return {
        "device": _device(device),
        "driver": _first_line(root / "proc/driver/nvidia/version"),
        "nvidia_fs": _first_line(root / "proc/driver/nvidia-fs/version"),
        "kernel": os.uname().release,
        "packages": ", ".join(f"{name} {found}" for name in _PACKAGES if (found := _version(name))),
        "libcufile": _libcufile(),
        "cufile_json": _digest(Path(os.environ.get("CUFILE_ENV_PATH_JSON") or root / "etc/cufile.json")),
        "environment": ", ".join(
            f"{name}={value}"
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES) and "LOG" not in name
        ),
        "filesystem": _filesystem(directory, root),
        "mover": tier.mover,
        "posix_api": tier.posix_api,
        "threads": str(tier.threads),
        "bounce_bytes": str(tier.bounce_bytes),
        "direct_io": str(tier.direct_io),
        "slot_bytes": str(shape.slot_bytes),
        "piece_bytes": str(shape.piece_bytes),
    }


def digest_of(found: Fingerprint) -> str:
    """Return 32 hex digits that stand for it in a file's name."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:32]


def _device(device: Device) -> str:
    if device.torch_device.type != "cuda":
        return f"{device.torch_device.type} as {device.kind.value}"
    facts = torch.cuda.get_device_properties(device.torch_device)
    return f"{facts.name}, {facts.total_memory >> 20} MiB, CUDA {torch.version.cuda}"


def _first_line(path: Path) -> str:
    try:
        with path.open(errors="replace") as file:
            return file.readline(200).strip() or "there"
    except OSError:
        return "none"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _libcufile() -> str:
    """Say which library the loader would take, as far as its path tells."""
    for folder in (*os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), *_CUFILE_FOLDERS):
        path = os.path.realpath(os.path.join(folder, "libcufile.so.0"))
        if folder and os.path.isfile(path):
            return f"{path}, {os.path.getsize(path)} bytes"
    return "none"


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return "none"


def _filesystem(directory: str, root: Path) -> str:
    """Its type, what it was mounted from, and the number that it gives itself."""
    try:
        number = os.statvfs(directory).f_fsid
        device = os.stat(directory).st_dev
        lines = (root / "proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return "unknown"
    wanted, told = f"{os.major(device)}:{os.minor(device)}", "unknown"
    for line in lines:
        mounted, _, source = line.partition(" - ")
        if mounted.split()[2:3] == [wanted]:
            told = " ".join(source.split()[:2])
    return f"{told} {number:x}"
