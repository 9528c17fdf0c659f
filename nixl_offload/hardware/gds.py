"""Whether GPUDirect Storage is real for a directory, or cuFile copies through host memory, and why.

Threading: pure functions that read ``/proc``, ``/sys`` and ``/dev``, but for a scratch page that ``gds_report`` writes
and removes; safe anywhere. Nothing of NVIDIA's is loaded, no process is started, nothing is raised. What cannot be read
is not known, and then nothing is claimed. Where each condition is documented: docs/gds.md.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import tempfile
from collections.abc import Iterator
from typing import Final, NamedTuple

from nixl_offload.hardware.cufile import CufileSettings, read_settings
from nixl_offload.hardware.mounts import BlockDevice, Mount, find_device, find_mount, names, read
from nixl_offload.types import PAGE_BYTES

_LOCAL: Final = ("ext4", "xfs")
_NETWORK: Final = {
    "nfs": "rpcrdma",
    "nfs4": "rpcrdma",
    "lustre": "lnet",
    "beegfs": "beegfs",
    "gpfs": "mmfslinux",
    "wekafs": "wekafsio",
}
"""Filesystems that nvidia-fs serves, and the driver that must know it."""
_DRIVERS: Final = {"nvme": "nvme", "raid0": "nvme", "nvmeof": "nvme_rdma"} | _NETWORK
_BLOCK_SECTIONS: Final = {"nvme": "nvme", "nvmeof": "nvmeof", "raid0": "raid"}
"""Kind of drive → its section of cufile.json under ``block``."""
_MOVE: Final = "put the directory on ext4 (mounted with data=ordered) or xfs, on NVMe"


class Fact(NamedTuple):
    """One thing that decides whether GPUDirect Storage is real."""

    name: str
    ok: bool | None
    """None: not known."""
    words: str
    fix: str | None = None
    """A command or a setting that helps; None where nothing helps."""


class GdsReport(NamedTuple):
    """What was found."""

    real: bool
    """GPUDirect Storage goes past the host, as far as can be told from here. False also where that is not certain."""
    verdict: str
    """One plain sentence."""
    facts: tuple[Fact, ...]
    """All that was looked at. Of nvidia-fs and PCI P2PDMA one is enough."""


def gds_report(directory: str, *, root: str = "/") -> GdsReport:
    """Look at everything that decides how cuFile moves files of ``directory``. ``root`` stands for ``/`` in tests.

    Writes one page to a scratch file there (mode 0600, removed) to see whether O_DIRECT works. Takes a few ms.
    """
    settings, mount = read_settings(root), find_mount(directory, root) if os.path.isdir(directory) else None
    device = find_device(mount, root) if mount and mount.kind in _LOCAL else None
    kind = device.kind if device else mount.kind if mount and mount.kind in _NETWORK else ""
    driver, others = find_driver(root), list(_conditions(directory, mount, device, settings, root))
    routes = [_nvidia_fs(root, _DRIVERS.get(kind)), _p2pdma(root, kind, settings)]
    deciding = [driver, *others]
    route = next((each for each in routes if each.ok), None)
    if route is None and kind:  # of a filesystem that no route serves the routes say nothing
        deciding += [each for each in routes if each.ok is None] or routes
    against = [fact for fact in deciding if fact.ok is False]
    doubtful = [fact for fact in deciding if fact.ok is None]
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
    return GdsReport(not against and not doubtful, verdict, (*deciding[: 1 + len(others)], *routes))


def find_driver(root: str = "/") -> Fact:
    """Say whether NVIDIA's kernel driver is loaded."""
    text = read(root, "/proc/driver/nvidia/version") or ""
    if not text:
        help_text = "install NVIDIA's driver, or start the container with --gpus all"
        return Fact("GPU driver", False, "no NVIDIA driver here", help_text)
    number = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    modules = "open" if "open kernel module" in text.partition("\n")[0].lower() else "proprietary"
    return Fact("GPU driver", True, f"NVIDIA driver {number[1] if number else '?'}, {modules} kernel modules")


def pinning_route(root: str, settings: CufileSettings) -> str | None:
    """Return what pins registered device memory on this machine: ``nvidia-fs`` or ``PCI P2PDMA``; None: nothing does.

    This says nothing about files. Without a route cuFile copies through its own buffers, and nothing is pinned.
    """
    if settings.flag("properties.force_compat_mode") or not find_driver(root).ok:
        return None
    routes = (_nvidia_fs(root, None, is_any=True), _p2pdma(root, "nvme", settings))
    return next((route.name for route in routes if route.ok is not False), None)


def _reasons(facts: list[Fact]) -> str:
    return "; ".join(fact.words for fact in facts)


def _fact(name: str, ok: bool, words: str, fix: str) -> Fact:
    return Fact(name, ok, words, None if ok else fix)


def _conditions(
    directory: str, mount: Mount | None, device: BlockDevice | None, settings: CufileSettings, root: str
) -> Iterator[Fact]:
    """Look at all but the driver and the routes."""
    over = ", over it ".join([settings.where, *settings.variables])
    fix = f"correct {settings.where}, or unset CUFILE_ENV_PATH_JSON"
    yield _fact("cufile.json", not settings.error, settings.error or f"read from {over}", fix)
    if settings.flag("properties.force_compat_mode"):
        yield Fact("cufile.json", False, f"force_compat_mode is on ({over})", "turn force_compat_mode off")
    if mount is None:
        yield Fact("filesystem", None, "the filesystem is not known")
    else:
        yield from _of_mount(mount, device)
    if os.path.isdir(directory):
        yield _direct_io(directory)
    has_udev = bool(names(root, "/run/udev/data"))
    words = f"/run/udev, by which cuFile finds out what a mount is, {'is here' if has_udev else 'has no data'}"
    yield _fact("udev", has_udev, words, "in a container: -v /run/udev:/run/udev:ro")


def _of_mount(mount: Mount, device: BlockDevice | None) -> Iterator[Fact]:
    here = f"{mount.kind} at {mount.point}"
    yield _fact("filesystem", mount.kind in (*_NETWORK, *_LOCAL), here, _MOVE)
    options = dict(option.partition("=")[::2] for option in mount.options)
    if mount.kind == "ext4":
        data = options.get("data")
        words = f"{here} has data={data}" if data else f"{here} does not say data=ordered, which cuFile wants to see"
        fix = f"mount -o remount,data=ordered {mount.point} (of the root filesystem: rootflags=data=ordered)"
        yield _fact("mount options", data == "ordered", words, fix)
    if mount.kind.startswith("nfs"):
        protocol = options.get("proto", "tcp")
        yield _fact("mount options", protocol == "rdma", f"{here} goes by {protocol}", "mount it with proto=rdma")
    if mount.kind in _LOCAL and device is None:
        yield Fact("block device", None, "the block device is not known")
    elif device is not None:
        words = device.words + ("" if device.kind else " is no NVMe or RAID 0 of it")
        yield _fact("block device", bool(device.kind), words, _MOVE)


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
    """Say whether nvidia-fs does it. ``wanted``: the storage driver that must know it, unless ``is_any``."""
    version = (read(root, "/proc/driver/nvidia-fs/version") or "").partition(":")[2].strip()
    registered = re.findall(r"^(\w+):", read(root, "/proc/driver/nvidia-fs/modules") or "", re.MULTILINE)
    has_device = any(device.startswith("nvidia-fs") for device in names(root, "/dev"))
    device = "start the container with NVIDIA_GDS=enabled"
    for is_missing, words, fix in (
        (not version, "is not loaded", "install nvidia-gds and the nvidia-fs module, then `modprobe nvidia-fs`"),
        (not has_device, "is loaded, but there is no /dev/nvidia-fs* here", device),
        (
            not is_any and wanted not in registered,
            f"is loaded, but the {wanted} driver does not know it",
            f"install the {wanted} driver of DOCA or MLNX_OFED, with GDS",
        ),
    ):
        if is_missing:
            return Fact("nvidia-fs", False, f"nvidia-fs {words}", fix)
    return Fact("nvidia-fs", True, f"nvidia-fs {version}")


def _p2pdma(root: str, kind: str, settings: CufileSettings) -> Fact:
    """Say whether the kernel does it. ``kind``: as in ``mounts.BlockDevice``."""
    name, section = "PCI P2PDMA", _BLOCK_SECTIONS.get(kind)
    if section is None:
        return Fact(name, False, "PCI P2PDMA reaches NVMe drives only")
    release, driver = (read(root, "/proc/sys/kernel/osrelease") or "").strip(), find_driver(root).words
    kernel, version = _version(release), _version(driver.removeprefix("NVIDIA driver "))
    is_x86 = "aarch64" not in (read(root, "/proc/driver/nvidia/version") or "")
    parameters = (read(root, "/proc/driver/nvidia/params") or "").lower()
    multipath = (read(root, "/sys/module/nvme_core/parameters/multipath") or "").strip() == "Y"
    registry = 'options nvidia NVreg_RegistryDwords="RMForceStaticBar1=1;RmForceDisableIomapWC=1;"'
    off = [each for each in ("properties", f"block.{section}") if not settings.flag(f"{each}.use_pci_p2pdma")]
    ours = f"in {settings.where}: take ours, which nixl-offload configs cufile.json prints"
    no_static = is_x86 and "rmforcestaticbar1=1" not in parameters
    conditions = (
        ((0,) < kernel < (6, 2), f"kernel {release} is older than 6.2", "boot a kernel from 6.2 on"),
        (kind == "raid0" and is_x86 and kernel < (7, 1), "it does not go through RAID 0 before kernel 7.1", None),
        ((0,) < version < (565, 47), "the driver is older than 565.47", "install driver 570 or newer"),
        ("proprietary" in driver, "the driver has proprietary kernel modules", "install its open kernel modules"),
        (no_static, "the driver's option RMForceStaticBar1 is off", f"set `{registry}` for modprobe, reboot"),
        (is_x86 and multipath, "NVMe multipath is on", "set `options nvme_core multipath=N` for modprobe, reboot"),
        (bool(off), f"cufile.json does not say use_pci_p2pdma in {' and '.join(off)}", f"set it {ours}"),
    )
    missing = [(words, fix) for is_missing, words, fix in conditions if is_missing]
    if missing:
        fixes = "; ".join(fix for _, fix in missing if fix) or None
        return Fact(name, False, ", ".join(words for words, _ in missing), fixes)
    groups = names(root, "/sys/kernel/iommu_groups")[:256] if is_x86 else []
    if {(read(root, f"/sys/kernel/iommu_groups/{group}/type") or "").strip() for group in groups} - {"", "identity"}:
        fix = "put iommu=pt on the kernel's command line, reboot"
        return Fact(name, None, "whether the IOMMU lets it pass is not known", fix)
    return Fact(name, True, f"PCI P2PDMA of kernel {release}")


def _version(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match.group().split("."))) if match else ()
