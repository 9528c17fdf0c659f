"""Finds out whether GPUDirect Storage is real for a directory, or cuFile copies through host memory, and why.

Threading: safe anywhere. Functions read ``/proc``, ``/sys``, ``/dev`` and cufile.json; only ``gds_report`` writes, a
scratch page that it removes. They load no NVIDIA library, start no process and raise nothing. ``root`` replaces ``/``
in tests. Sources of each condition: docs/gds.md.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from nixl_offload.hardware.mounts import BlockDevice, Mount, beneath, find_device, find_mount, names, read
from nixl_offload.types import PAGE_BYTES

DEFAULTS: Final[Mapping[str, bool | int]] = {
    "properties.force_compat_mode": False,
    "properties.use_pci_p2pdma": False,
    "block.nvme.use_pci_p2pdma": False,
    "block.nvmeof.use_pci_p2pdma": False,
    "block.raid.use_pci_p2pdma": False,
    "properties.max_device_cache_size_kb": 131_072,
    "properties.max_device_pinned_mem_size_kb": 33_554_432,
}
"""The settings that we read, by their dotted names, with cuFile's defaults."""
VARIABLES: Final[Mapping[str, str]] = {
    "CUFILE_FORCE_COMPAT_MODE": "properties.force_compat_mode",
    "CUFILE_USE_PCIP2PDMA": "properties.use_pci_p2pdma",
}
"""Environment variables that override cufile.json."""

_PATH_VARIABLE: Final = "CUFILE_ENV_PATH_JSON"
_MAX_BYTES: Final = 1 << 20
_TOKEN: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_LOCAL: Final = ("ext4", "xfs")
_NETWORK: Final = {
    "nfs": "rpcrdma",
    "nfs4": "rpcrdma",
    "lustre": "lnet",
    "beegfs": "beegfs",
    "gpfs": "mmfslinux",
    "wekafs": "wekafsio",
}
"""Network filesystems that nvidia-fs serves, and the driver that must be registered with it."""
_DRIVERS: Final = {"nvme": "nvme", "raid0": "nvme", "nvmeof": "nvme_rdma"} | _NETWORK
_BLOCK_SECTIONS: Final = {"nvme": "nvme", "nvmeof": "nvmeof", "raid0": "raid"}
"""Kind of drive → its section of cufile.json under ``block``."""
_MOVE: Final = "put the directory on ext4 (mounted with data=ordered) or xfs, on NVMe"


class CufileSettings(NamedTuple):
    """cuFile's settings."""

    where: str
    """The file that cuFile reads, whether it exists or not."""
    error: str | None
    """Why the file cannot be read or parsed."""
    values: Mapping[str, bool | int]
    """Settings by the names of ``DEFAULTS``: from the environment, else the file, else cuFile's default."""
    over: str
    """For messages: the file and the environment variables in force."""


def read_settings(root: str = "/") -> CufileSettings:
    """Return the settings that cuFile would read in this process. Values of a wrong type count as the default."""
    named = os.environ.get(_PATH_VARIABLE)
    path = named or "/etc/cufile.json"
    values, error = dict(DEFAULTS), None
    try:
        with open(beneath(root, path), "rb") as file:
            # JSON with comments: keep strings, replace comments by a blank.
            text = _TOKEN.sub(lambda at: at[0] if at[0][0] == '"' else " ", file.read(_MAX_BYTES).decode())
        said = _flat(dict(json.loads(text)))
        fit = (name for name in DEFAULTS if type(said.get(name)) is type(DEFAULTS[name]))
        values |= {name: said[name] for name in fit if said[name] is False or said[name] > 0}
    except FileNotFoundError:
        error = f"{_PATH_VARIABLE} names {path}, which does not exist" if named else None
    except OSError as exc:
        error = f"{path} cannot be read: {exc.strerror or exc}"
    except (ValueError, TypeError, RecursionError) as exc:
        error = f"{path} cannot be understood: {exc}"
    variables = [name for name in VARIABLES if os.environ.get(name)]
    values |= {VARIABLES[name]: os.environ[name].strip().lower() in {"1", "true", "yes", "on"} for name in variables}
    return CufileSettings(path, error, values, ", over it ".join([path, *variables]))


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, each in value.items():
        found |= _flat(each, f"{prefix}{name}.") if isinstance(each, dict) else {prefix + name: each}
    return found


class Fact(NamedTuple):
    """One condition of real GPUDirect Storage."""

    name: str
    ok: bool | None
    """Whether it holds; None if unknown."""
    words: str
    fix: str | None = None
    """A command or setting that helps where it does not hold, if there is one."""


class GdsReport(NamedTuple):
    """The verdict on a directory."""

    real: bool
    """True if GPUDirect Storage bypasses host memory; False also if that is uncertain."""
    verdict: str
    """One plain sentence."""
    facts: tuple[Fact, ...]
    """All facts. One of nvidia-fs and PCI P2PDMA is enough."""


def gds_report(directory: str, *, root: str = "/") -> GdsReport:
    """Return a report on how cuFile moves files of ``directory``.

    Tests O_DIRECT with one page in a scratch file there (mode 0600, removed). Takes a few ms.
    """
    settings, mount = read_settings(root), find_mount(directory, root) if os.path.isdir(directory) else None
    device = find_device(mount, root) if mount and mount.kind in _LOCAL else None
    kind = device.kind if device else mount.kind if mount and mount.kind in _NETWORK else ""
    driver, conditions = find_driver(root), list(_conditions(directory, mount, device, settings, root))
    routes = [_nvidia_fs(root, _DRIVERS.get(kind)), _p2pdma(root, kind, settings)]
    deciding, route = [driver, *conditions], next((each for each in routes if each.ok), None)
    if route is None and kind:  # routes say nothing about filesystems that none of them serves
        deciding += [each for each in routes if each.ok is None] or routes
    against, doubtful = ([fact for fact in deciding if fact.ok is ok] for ok in (False, None))
    if not driver.ok:
        verdict = f"no GPUDirect Storage: cuFile cannot run here, because {driver.words}; fix: {driver.fix}"
    elif against:
        fixes = "; ".join(fact.fix for fact in against if fact.fix)
        verdict = f"compatibility mode: cuFile copies through host memory, because {_reasons(against)}"
        verdict += f"; fix: {fixes}" if fixes else ""
    elif doubtful or route is None or mount is None:
        verdict = f"GPUDirect Storage: not certain, because {_reasons(doubtful)}; `gdscheck -p` may tell"
    else:
        where = f"{mount.kind} on {device.words if device else mount.source}"
        verdict = f"GPUDirect Storage: real ({route.words}, {where})"
    return GdsReport(not against and not doubtful, verdict, (driver, *conditions, *routes))


def find_driver(root: str = "/") -> Fact:
    """Return whether NVIDIA's kernel driver is loaded."""
    text = read(root, "/proc/driver/nvidia/version")
    if not text:
        help_text = "install NVIDIA's driver, or start the container with --gpus all"
        return Fact("GPU driver", False, "no NVIDIA driver here", help_text)
    number = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    modules = "open" if "open kernel module" in text.partition("\n")[0].lower() else "proprietary"
    return Fact("GPU driver", True, f"NVIDIA driver {number[1] if number else '?'}, {modules} kernel modules")


def pinning_route(root: str, settings: CufileSettings) -> str | None:
    """Return what pins registered device memory here: ``nvidia-fs``, ``PCI P2PDMA``, or None.

    Says nothing about files. Without a route cuFile copies through its own buffers, and pins nothing.
    """
    if settings.values["properties.force_compat_mode"] or not find_driver(root).ok:
        return None
    routes = (_nvidia_fs(root, None, is_any=True), _p2pdma(root, "nvme", settings))
    return next((route.name for route in routes if route.ok is not False), None)


def _reasons(facts: list[Fact]) -> str:
    return "; ".join(fact.words for fact in facts)


def _conditions(
    directory: str, mount: Mount | None, device: BlockDevice | None, settings: CufileSettings, root: str
) -> Iterator[Fact]:
    """Yield all facts except the driver's and the routes'."""
    fix = f"correct {settings.where}, or unset {_PATH_VARIABLE}"
    yield Fact("cufile.json", not settings.error, settings.error or f"read from {settings.over}", fix)
    if settings.values["properties.force_compat_mode"]:
        yield Fact("cufile.json", False, f"force_compat_mode is on ({settings.over})", "turn force_compat_mode off")
    if mount is None:
        yield Fact("filesystem", None, "the filesystem is not known")
    else:
        yield from _of_mount(mount, device)
    if os.path.isdir(directory):
        yield _direct_io(directory)
    has_udev = bool(names(root, "/run/udev/data"))
    words = f"/run/udev, by which cuFile finds out what a mount is, {'is here' if has_udev else 'has no data'}"
    yield Fact("udev", has_udev, words, "in a container: -v /run/udev:/run/udev:ro")


def _of_mount(mount: Mount, device: BlockDevice | None) -> Iterator[Fact]:
    here = f"{mount.kind} at {mount.point}"
    yield Fact("filesystem", mount.kind in (*_NETWORK, *_LOCAL), here, _MOVE)
    options = dict(option.partition("=")[::2] for option in mount.options)
    if mount.kind == "ext4":
        data = options.get("data")
        words = f"{here} has data={data}" if data else f"{here} does not say data=ordered, which cuFile wants to see"
        fix = f"mount -o remount,data=ordered {mount.point} (of the root filesystem: rootflags=data=ordered)"
        yield Fact("mount options", data == "ordered", words, fix)
    if mount.kind.startswith("nfs"):
        protocol = options.get("proto", "tcp")
        yield Fact("mount options", protocol == "rdma", f"{here} goes by {protocol}", "mount it with proto=rdma")
    if mount.kind in _LOCAL and device is None:
        yield Fact("block device", None, "the block device is not known")
    elif device is not None:
        words = device.words + ("" if device.kind else " is no NVMe or RAID 0 of it")
        yield Fact("block device", bool(device.kind), words, _MOVE)


def _direct_io(directory: str) -> Fact:
    try:
        with (
            tempfile.NamedTemporaryFile(prefix=".mover-probe-", dir=directory) as scratch,
            mmap.mmap(-1, PAGE_BYTES) as page,
        ):
            fd = os.open(scratch.name, os.O_RDWR | os.O_DIRECT)
            try:
                os.pwritev(fd, [page], 0)
                os.preadv(fd, [page], 0)
            finally:
                os.close(fd)
    except OSError as error:
        words = f"O_DIRECT does not work there ({error.strerror})"
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOENT):
            words = f"{directory} cannot be written ({error.strerror})"
        return Fact("O_DIRECT", False, words, _MOVE)
    return Fact("O_DIRECT", True, "O_DIRECT reads and writes")


def _nvidia_fs(root: str, wanted: str | None, *, is_any: bool = False) -> Fact:
    """Return whether nvidia-fs works. ``wanted``: the storage driver that it must know, unless ``is_any``."""
    name = "nvidia-fs"
    version = read(root, "/proc/driver/nvidia-fs/version").partition(":")[2].strip()
    registered = re.findall(r"^(\w+):", read(root, "/proc/driver/nvidia-fs/modules"), re.MULTILINE)
    if not version:
        fix = "install nvidia-gds and the nvidia-fs module, then `modprobe nvidia-fs`"
        return Fact(name, False, "nvidia-fs is not loaded", fix)
    if not any(device.startswith("nvidia-fs") for device in names(root, "/dev")):
        words = "nvidia-fs is loaded, but there is no /dev/nvidia-fs* here"
        return Fact(name, False, words, "start the container with NVIDIA_GDS=enabled")
    if not is_any and wanted not in registered:
        words = f"nvidia-fs is loaded, but the {wanted} driver does not know it"
        return Fact(name, False, words, f"install the {wanted} driver of DOCA or MLNX_OFED, with GDS")
    return Fact(name, True, f"nvidia-fs {version}")


def _p2pdma(root: str, kind: str, settings: CufileSettings) -> Fact:
    """Return whether the kernel's PCI P2PDMA may work. ``kind``: see ``BlockDevice``."""
    name, section = "PCI P2PDMA", _BLOCK_SECTIONS.get(kind)
    if section is None:
        return Fact(name, False, "PCI P2PDMA reaches NVMe drives only")
    release = read(root, "/proc/sys/kernel/osrelease").strip()
    kernel = re.match(r"(\d+)\.(\d+)", release)
    off = [each for each in ("properties", f"block.{section}") if not settings.values[f"{each}.use_pci_p2pdma"]]
    ours = f"set it in {settings.where}: take ours, which nixl-offload configs cufile.json prints"
    if kernel and (int(kernel[1]), int(kernel[2])) < (6, 2):
        return Fact(name, False, f"kernel {release} is older than 6.2", "boot a kernel from 6.2 on")
    if "proprietary" in find_driver(root).words:
        return Fact(name, False, "the driver has proprietary kernel modules", "install its open kernel modules")
    if off:
        return Fact(name, False, f"cufile.json does not say use_pci_p2pdma in {' and '.join(off)}", ours)
    return Fact(name, None, "PCI P2PDMA is turned on, but only cuFile knows whether it works")
