"""Whether GPUDirect Storage is real for a directory, or cuFile copies through host memory, and why. It never pretends.

Threading: a pure function but for a scratch page that it writes and removes; safe anywhere. Quick, loads nothing of
NVIDIA's, starts no process, and never raises: what it cannot read is told as not known, and then nothing is claimed.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Final, NamedTuple

from nixl_offload.hardware.cufile import DEFAULTS, CufileSettings, beneath, read_settings
from nixl_offload.hardware.gds_routes import (
    Driver,
    Fact,
    acs_fact,
    find_driver,
    iommu_fact,
    names,
    nvidia_fs_fact,
    p2pdma_fact,
)
from nixl_offload.hardware.libraries import Library, find_library
from nixl_offload.hardware.mounts import BlockDevice, Mount, find_device, find_mount
from nixl_offload.types import PAGE_BYTES
from nixl_offload.units import format_size

__all__ = ["Fact", "GdsReport", "gds_report"]

_NETWORK: Final = {
    "nfs": "rpcrdma",
    "nfs4": "rpcrdma",
    "lustre": "lnet",
    "beegfs": "beegfs",
    "gpfs": "mmfslinux",
    "mmfs": "mmfslinux",
    "wekafs": "wekafsio",
    "scatefs": "scatefs",
}
"""Filesystems that nvidia-fs serves, and the driver that must know it."""
_STORAGE_DRIVERS: Final = {"nvme": "nvme", "raid0": "nvme", "nvmeof": "nvme_rdma"}
_IN_MEMORY: Final = ("tmpfs", "ramfs")
_ROUTES: Final = ("nvidia-fs", "PCI P2PDMA")
_FATAL: Final = ("GPU driver", "libcufile", "libcudart", "directory")
_ADVICE: Final = ("IOMMU", "PCIe ACS", "limits")
"""They cost speed and decide nothing."""
_PLACE: Final = ("filesystem", "block device")
"""Where these are wrong or not known, no route could serve them, and that is no reason of its own."""
_REASONS: Final = 3
_MOVE: Final = "put the directory on ext4 (mounted with data=ordered) or xfs, on NVMe"


class GdsReport(NamedTuple):
    """What was found."""

    real: bool
    """GPUDirect Storage goes past the host, as far as can be told from here. False also where that is not certain."""
    verdict: str
    """One plain sentence."""
    facts: tuple[Fact, ...]
    """All that was looked at, what matters most first. Of the routes, nvidia-fs and PCI P2PDMA, one is enough."""


def gds_report(directory: str, *, root: str = "/") -> GdsReport:
    """Look at everything that decides how cuFile moves files of ``directory``. ``root`` stands for ``/`` in tests.

    Writes one page to a scratch file there (mode 0600, removed) to see whether O_DIRECT works. Takes a few ms.
    """
    settings = read_settings(root)
    driver = find_driver(root)
    cufile = find_library("libcufile.so", root)
    mount = find_mount(directory, root) if os.path.isdir(directory) else None
    device = find_device(mount, root) if mount else None
    kind = _kind_below(device) if mount and mount.kind in ("ext4", "xfs") else ""
    wanted = _STORAGE_DRIVERS.get(kind) or (_NETWORK.get(mount.kind) if mount else None)
    facts = [
        driver.fact,
        _library_fact("libcufile", cufile, "libcufile.so.0 of CUDA 12.8 or newer"),
        _library_fact("libcudart", find_library("libcudart.so", root), "the CUDA runtime"),
        _settings_fact(settings, mount, device),
        _directory_fact(directory),
        _filesystem_fact(mount, settings),
        *([_device_fact(device)] if mount and mount.kind in ("ext4", "xfs") else []),
        _direct_io_fact(directory),
        _udev_fact(root),
        nvidia_fs_fact(root, wanted),
        p2pdma_fact(root, kind, driver, cufile, settings),
        iommu_fact(root, driver.machine),
        *filter(None, [acs_fact(root)]),
        _limits_fact(settings),
    ]
    return _judge(facts, driver, settings, mount, device)


def _judge(
    facts: list[Fact], driver: Driver, settings: CufileSettings, mount: Mount | None, device: BlockDevice | None
) -> GdsReport:
    routes = [fact for fact in facts if fact.name in _ROUTES]
    deciding = [fact for fact in facts if fact.name not in (*_ROUTES, *_ADVICE)]
    route = next((fact for fact in routes if fact.ok), None)
    if route is not None:
        # The other way is not needed, so nothing about it is to be mended.
        facts = [fact._replace(mend=None) if fact in routes and fact is not route else fact for fact in facts]
    elif any(fact.ok is None for fact in routes):
        deciding += [fact for fact in routes if fact.ok is None]
    elif all(fact.ok for fact in facts if fact.name in _PLACE):
        deciding += routes
    against = [fact for fact in deciding if fact.ok is False]
    doubtful = [fact for fact in deciding if fact.ok is None]
    if against:
        # Without a driver it is idle talk which filesystem would do.
        told = [fact for fact in against if fact.name in _FATAL] or against
        verdict = f"{_how_bad(against, settings, mount)}, because {_reasons(told)}{_to_mend(told)}"
    elif doubtful:
        verdict = f"GPUDirect Storage: not certain, because {_reasons(doubtful)}; `gdscheck -p` may tell"
    else:
        on = device.words if device else mount.source if mount else "?"
        verdict = f"GPUDirect Storage: real ({route.words if route else '?'}, {mount.kind if mount else '?'} on {on})"
    return GdsReport(not against and not doubtful, verdict, tuple(facts))


def _how_bad(against: list[Fact], settings: CufileSettings, mount: Mount | None) -> str:
    if any(fact.name in _FATAL for fact in against):
        return "no GPUDirect Storage: cuFile cannot run here"
    if mount and mount.kind in _IN_MEMORY:
        return "no GPUDirect Storage: cuFile takes no files of this kind"
    if not settings.flag("properties.allow_compat_mode"):
        return "no GPUDirect Storage: cuFile refuses these files (allow_compat_mode is off)"
    return "compatibility mode: cuFile copies through host memory"


def _reasons(facts: list[Fact]) -> str:
    more = len(facts) - _REASONS
    return "; ".join(fact.words for fact in facts[:_REASONS]) + (f"; and {more} more" if more > 0 else "")


def _to_mend(facts: list[Fact]) -> str:
    mends = [fact.mend for fact in facts[:_REASONS] if fact.mend]
    return f"; to mend: {'; '.join(mends)}" if mends else ""


def _library_fact(name: str, library: Library | None, what: str) -> Fact:
    if library is None:
        return Fact(name, False, f"{name} is not here", f"install {what}")
    if not library.loadable:
        directory = os.path.dirname(library.path)
        words = f"{library.words} is where the loader does not look"
        return Fact(name, False, words, f"export LD_LIBRARY_PATH={directory}")
    return Fact(name, True, library.words)


def _settings_fact(settings: CufileSettings, mount: Mount | None, device: BlockDevice | None) -> Fact:
    name = "cufile.json"
    if settings.error:
        return Fact(name, False, settings.error, f"mend {settings.path}, or unset CUFILE_ENV_PATH_JSON")
    variables = f", over it {', '.join(settings.variables)}" if settings.variables else ""
    where = f"{settings.path or 'none: built-in defaults'}{variables}"
    if settings.flag("properties.force_compat_mode"):
        return Fact(name, False, f"force_compat_mode is on ({where})", "turn force_compat_mode off")
    drives = {f"/dev/{drive.name}" for drive in device.drives()} | {mount.source if mount else ""} if device else set()
    denied = (
        (drives & set(settings.names("denylist.devices")))
        | ({mount.point} & set(settings.names("denylist.mounts")) if mount else set())
        | ({mount.kind} & set(settings.names("denylist.filesystems")) if mount else set())
    )
    if denied:
        return Fact(
            name,
            False,
            f"denylist has {', '.join(sorted(denied))} ({where})",
            f"take it off the list in {settings.where}",
        )
    compat = "allowed" if settings.flag("properties.allow_compat_mode") else "forbidden: what cannot go direct fails"
    return Fact(name, True, f"{where}; compatibility mode {compat}")


def _directory_fact(directory: str) -> Fact:
    if os.path.isdir(directory):
        return Fact("directory", True, os.path.realpath(directory))
    if os.path.exists(directory):
        return Fact("directory", False, f"{directory} is no directory")
    return Fact("directory", False, f"{directory} is not there", f"mkdir -p -m 700 {directory}")


def _filesystem_fact(mount: Mount | None, settings: CufileSettings) -> Fact:
    name = "filesystem"
    if mount is None:
        return Fact(name, None, "what it lies on cannot be told")
    if mount.kind == "xfs":
        return Fact(name, True, f"xfs at {mount.point}")
    if mount.kind == "ext4":
        data = mount.option("data")
        mend = f"mount -o remount,data=ordered {mount.point} (of the root filesystem: rootflags=data=ordered)"
        if data == "ordered":
            return Fact(name, True, f"ext4 at {mount.point}, data=ordered")
        said = f"has data={data}" if data else "does not say data=ordered, which cuFile wants to see"
        return Fact(name, False, f"ext4 at {mount.point} {said}", mend)
    if mount.kind in _NETWORK:
        if mount.kind.startswith("nfs") and mount.option("proto") != "rdma":
            mend = "mount it with proto=rdma"
            return Fact(
                name, False, f"{mount.kind} at {mount.point} goes by {mount.option('proto') or 'tcp'}, not RDMA", mend
            )
        if not settings.flag("properties.gds_rdma_write_support"):
            return Fact(name, False, "gds_rdma_write_support is off", f"turn it on in {settings.where}")
        return Fact(name, True, f"{mount.kind} at {mount.point}")
    return Fact(name, False, f"{mount.kind} at {mount.point}", _MOVE)


def _kind_below(device: BlockDevice | None) -> str:
    """Return the kind that a route must serve; "" for what none serves."""
    if device is None:
        return ""
    if not device.members:
        return device.kind if device.kind in _STORAGE_DRIVERS else ""
    is_array = device.kind == "raid0" and all(each.kind == "nvme" and not each.members for each in device.members)
    return "raid0" if is_array else ""


def _device_fact(device: BlockDevice | None) -> Fact:
    name = "block device"
    if device is None:
        return Fact(name, None, "the block device cannot be told")
    if _kind_below(device):
        return Fact(name, True, device.words)
    if device.kind in ("lvm", "crypt", "multipath", "dm"):
        return Fact(
            name, False, f"{device.words} goes through the device mapper", "use the NVMe drive itself, or RAID 0"
        )
    if device.kind.startswith("raid"):
        return Fact(name, False, f"{device.words} is not RAID 0 of NVMe drives", "use an NVMe drive, or RAID 0 of some")
    return Fact(name, False, f"{device.words} is no NVMe drive", _MOVE)


def _direct_io_fact(directory: str) -> Fact:
    name = "O_DIRECT"
    if not os.path.isdir(directory):
        return Fact(name, None, "O_DIRECT was not tried")
    path = None
    try:
        fd, path = tempfile.mkstemp(prefix=".mover-probe-", dir=directory)
        os.close(fd)
        with mmap.mmap(-1, PAGE_BYTES) as page:
            fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            try:
                os.pwrite(fd, page, 0)
                os.preadv(fd, [page], 0)
            finally:
                os.close(fd)
    except OSError as error:
        why = error.strerror or str(error)
        if path is None:
            return Fact(name, False, f"{directory} cannot be written ({why})", "let this user write there")
        return Fact(name, False, f"O_DIRECT does not work there ({why})", _MOVE)
    finally:
        if path is not None:
            _remove(path)
    return Fact(name, True, "O_DIRECT reads and writes")


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return


def _udev_fact(root: str) -> Fact:
    """CuFile asks udev what a mount is made of."""
    mend = "in a container: -v /run/udev:/run/udev:ro"
    if names(root, "/run/udev/data"):
        return Fact("udev", True, "/run/udev is here")
    if os.path.isdir(beneath(root, "/run/udev")):
        return Fact("udev", False, "/run/udev has no data", mend)
    return Fact("udev", False, "/run/udev is missing, by which cuFile finds out what a mount is", mend)


def _limits_fact(settings: CufileSettings) -> Fact:
    name = "limits"
    pinned = format_size(settings.number("properties.max_device_pinned_mem_size_kb") << 10)
    one = format_size(settings.number("properties.max_direct_io_size_kb") << 10)
    legacy = [key for key in DEFAULTS if key.endswith(("direct_io_size_kb", "cache_size_kb")) and key in settings.said]
    if legacy and any(key.startswith("properties.gpu_bounce_buffer_slab_config.") for key in settings.said):
        said = ", ".join(key.partition(".")[2] for key in legacy)
        return Fact(
            name, False, f"gpu_bounce_buffer_slab_config together with {said}", f"keep one of them in {settings.where}"
        )
    poll = ", polls" if settings.flag("properties.use_poll_mode") else ""
    return Fact(name, True, f"pins up to {pinned} of device memory, I/O up to {one} at once{poll}")
