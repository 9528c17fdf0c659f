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
from nixl_offload.hardware.files import names, read
from nixl_offload.hardware.mounts import BlockDevice, Mount, find_device, find_mount
from nixl_offload.types import PAGE_BYTES

_NETWORK: Final = {"nfs": "rpcrdma", "nfs4": "rpcrdma", "lustre": "lnet", "beegfs": "beegfs", "gpfs": "mmfslinux"} | {
    "mmfs": "mmfslinux",
    "wekafs": "wekafsio",
    "scatefs": "scatefs",
}
"""Filesystems that nvidia-fs serves, and the driver that must know it."""
_DRIVERS: Final = {"nvme": "nvme", "raid0": "nvme", "nvmeof": "nvme_rdma"}
_BLOCK_SECTIONS: Final = {"nvme": "nvme", "nvmeof": "nvmeof", "raid0": "raid"}
"""Kind of drive → its section of cufile.json under ``block``."""
_LOCAL: Final = ("ext4", "xfs")
_REASONS: Final = 3
_MOVE: Final = "put the directory on ext4 (mounted with data=ordered) or xfs, on NVMe"


class Fact(NamedTuple):
    """One thing that decides whether GPUDirect Storage is real."""

    name: str
    ok: bool | None
    """None: not known."""
    words: str
    fix: str | None = None
    """A command or a setting that helps; None where nothing is to be done, or nothing helps."""


class GdsReport(NamedTuple):
    """What was found."""

    real: bool
    """GPUDirect Storage goes past the host, as far as can be told from here. False also where that is not certain."""
    verdict: str
    """One plain sentence."""
    facts: tuple[Fact, ...]
    """All that was looked at, what matters most first. Of nvidia-fs and PCI P2PDMA one is enough."""


def gds_report(directory: str, *, root: str = "/") -> GdsReport:
    """Look at everything that decides how cuFile moves files of ``directory``. ``root`` stands for ``/`` in tests.

    Writes one page to a scratch file there (mode 0600, removed) to see whether O_DIRECT works. Takes a few ms.
    """
    settings, mount = read_settings(root), find_mount(directory, root) if os.path.isdir(directory) else None
    device = find_device(mount, root) if mount and mount.kind in _LOCAL else None
    kind = _kind_below(device)
    facts = [find_driver(root), *_conditions(directory, mount, device, settings, root)]
    storage_driver = _DRIVERS.get(kind) or _NETWORK.get(mount.kind if mount else "")
    routes = [_nvidia_fs(root, storage_driver), _p2pdma(root, kind, settings)]
    route = next((each for each in routes if each.ok), None)
    # Of a filesystem that no route serves the routes say nothing.
    is_served = all(fact.ok for fact in facts if fact.name in ("filesystem", "mount options", "block device"))
    deciding = [*facts, *(routes if is_served and not route else ())]
    against = [fact for fact in deciding if fact.ok is False]
    doubtful = [fact for fact in deciding if fact.ok is None]
    if doubtful and not any(fact not in routes for fact in against):
        verdict = f"GPUDirect Storage: not certain, because {_reasons(doubtful)}; `gdscheck -p` may tell"
    elif against:
        fatal = [fact for fact in against if fact.name == "GPU driver"]
        what = "compatibility mode: cuFile copies through host memory"
        what = "no GPUDirect Storage: cuFile cannot run here" if fatal else what
        fixes = "; ".join(filter(None, (fact.fix for fact in (fatal or against)[:_REASONS])))
        verdict = f"{what}, because {_reasons(fatal or against)}{'; fix: ' if fixes else ''}{fixes}"
    else:
        assert route is not None
        assert mount is not None
        verdict = f"GPUDirect Storage: real ({route.words}, {mount.kind} on {device.words if device else mount.source})"
    return GdsReport(not against and not doubtful, verdict, (*facts, *routes))


def find_driver(root: str = "/") -> Fact:
    """Say whether NVIDIA's kernel driver is loaded."""
    text = read(root, "/proc/driver/nvidia/version")
    number, modules = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text or ""), "proprietary"
    if "open kernel module" in (text or "").partition("\n")[0].lower():
        modules = "open"
    words = (
        f"NVIDIA driver {number[1] if number else '?'}, {modules} kernel modules" if text else "no NVIDIA driver here"
    )
    return _fact("GPU driver", bool(text), words, "install NVIDIA's driver, or start the container with --gpus all")


def pinning_route(root: str, settings: CufileSettings) -> str | None:
    """Return what pins registered device memory on this machine: ``nvidia-fs`` or ``PCI P2PDMA``; None: nothing does.

    This says nothing about files. Without a route cuFile copies through its own buffers, and nothing is pinned.
    """
    if settings.flag("properties.force_compat_mode") or not find_driver(root).ok:
        return None
    if read(root, "/proc/driver/nvidia-fs/version") and _has_nvidia_fs_device(root):
        return "nvidia-fs"
    return None if _p2pdma(root, "nvme", settings).ok is False else "PCI P2PDMA"


def _fact(name: str, ok: bool | None, words: str, fix: str | None = None) -> Fact:
    return Fact(name, ok, words, None if ok else fix)


def _reasons(facts: list[Fact]) -> str:
    more = len(facts) - _REASONS
    return "; ".join(fact.words for fact in facts[:_REASONS]) + (f"; and {more} more" if more > 0 else "")


def _conditions(
    directory: str, mount: Mount | None, device: BlockDevice | None, settings: CufileSettings, root: str
) -> Iterator[Fact]:
    """Look at all but the driver and the routes."""
    over = ", over it ".join([settings.where, *settings.variables])
    fix = f"correct {settings.where}, or unset CUFILE_ENV_PATH_JSON"
    yield _fact("cufile.json", not settings.error, settings.error or f"read from {over}", fix)
    if settings.flag("properties.force_compat_mode"):
        yield _fact("cufile.json", False, f"force_compat_mode is on ({over})", "turn force_compat_mode off")
    if mount is None:
        yield _fact("filesystem", None, "the filesystem is not known")
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
        yield _fact("block device", None, "the block device is not known")
    elif mount.kind in _LOCAL and device is not None:
        is_good = bool(_kind_below(device))
        yield _fact("block device", is_good, device.words + ("" if is_good else " is no NVMe or RAID 0 of it"), _MOVE)


def _kind_below(device: BlockDevice | None) -> str:
    """Return the kind that a route must serve; "" for what none serves."""
    if device is None or any(each.kind != "nvme" or each.members for each in device.members):
        return ""
    return device.kind if device.kind in _DRIVERS and bool(device.members) == (device.kind == "raid0") else ""


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
        return _fact("O_DIRECT", False, words, _MOVE)
    return _fact("O_DIRECT", True, "O_DIRECT reads and writes")


def _nvidia_fs(root: str, wanted: str | None) -> Fact:
    """Say whether nvidia-fs does it. ``wanted``: the storage driver that must know it; None: nothing that it serves."""
    version = (read(root, "/proc/driver/nvidia-fs/version") or "").partition(":")[2].strip()
    registered = re.findall(r"^(\w+):", read(root, "/proc/driver/nvidia-fs/modules") or "", re.MULTILINE)
    device = "start the container with NVIDIA_GDS=enabled"
    driver = "install the {} driver of DOCA or MLNX_OFED, with GDS"
    for is_missing, words, fix in (
        (not version, "is not loaded", "install nvidia-gds and the nvidia-fs module, then `modprobe nvidia-fs`"),
        (not _has_nvidia_fs_device(root), "is loaded, but there is no /dev/nvidia-fs* here", device),
        (wanted is None, "is loaded, but serves nothing of this kind", None),
        (wanted not in registered, f"is loaded, but the {wanted} driver does not know it", driver.format(wanted)),
    ):
        if is_missing:
            return Fact("nvidia-fs", False, f"nvidia-fs {words}", fix)
    return Fact("nvidia-fs", True, f"nvidia-fs {version}")


def _has_nvidia_fs_device(root: str) -> bool:
    return any(device.startswith("nvidia-fs") for device in names(root, "/dev"))


def _p2pdma(root: str, kind: str, settings: CufileSettings) -> Fact:
    """Say whether the kernel does it. ``kind``: as in ``mounts.BlockDevice``, or "" for no block device."""
    section = _BLOCK_SECTIONS.get(kind)
    if section is None:
        return Fact("PCI P2PDMA", False, "PCI P2PDMA reaches NVMe drives only")
    release, driver = (read(root, "/proc/sys/kernel/osrelease") or "").strip(), find_driver(root).words
    kernel, version = _version(release), _version(driver.removeprefix("NVIDIA driver "))
    is_x86 = "aarch64" not in (read(root, "/proc/driver/nvidia/version") or "")
    parameters = (read(root, "/proc/driver/nvidia/params") or "").lower()
    multipath = (read(root, "/sys/module/nvme_core/parameters/multipath") or "").strip() == "Y"
    unbuilt = "# CONFIG_PCI_P2PDMA is not set" in (read(root, f"/boot/config-{release}") or "")
    registry = 'options nvidia NVreg_RegistryDwords="RMForceStaticBar1=1;RmForceDisableIomapWC=1;"'
    off = [each for each in ("properties", f"block.{section}") if not settings.flag(f"{each}.use_pci_p2pdma")]
    ours = f"in {settings.where}: take ours, which nixl-offload configs cufile.json prints"
    no_static = is_x86 and "rmforcestaticbar1=1" not in parameters
    conditions = (
        ((0,) < kernel < (6, 2), f"kernel {release} is older than 6.2", "boot a kernel from 6.2 on"),
        (unbuilt, f"kernel {release} is built without PCI P2PDMA", "boot a kernel with CONFIG_PCI_P2PDMA=y"),
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
        return Fact("PCI P2PDMA", False, ", ".join(words for words, _ in missing), fixes)
    groups = names(root, "/sys/kernel/iommu_groups")[:256] if is_x86 else []
    if {(read(root, f"/sys/kernel/iommu_groups/{group}/type") or "").strip() for group in groups} - {"", "identity"}:
        fix = "put iommu=pt on the kernel's command line, reboot"
        return Fact("PCI P2PDMA", None, "whether the IOMMU lets it pass is not known", fix)
    return Fact("PCI P2PDMA", True, f"PCI P2PDMA of kernel {release}")


def _version(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match.group().split("."))) if match else ()
