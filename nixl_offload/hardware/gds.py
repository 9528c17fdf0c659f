"""Whether GPUDirect Storage is real for a directory, or cuFile copies through host memory, and why.

Threading: a pure function but for a scratch page that it writes and removes; safe anywhere. It loads nothing of
NVIDIA's, starts no process and never raises: what it cannot read is not known, and then nothing is claimed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from typing import Final, NamedTuple

from nixl_offload.hardware.cufile import CufileSettings, read_settings
from nixl_offload.hardware.files import names
from nixl_offload.hardware.gds_routes import Fact, find_driver, iommu_fact, nvidia_fs_fact, p2pdma_fact
from nixl_offload.hardware.libraries import find_library
from nixl_offload.hardware.mounts import BlockDevice, Mount, find_device, find_mount
from nixl_offload.types import PAGE_BYTES

__all__ = ["Fact", "GdsReport", "gds_report"]

_NETWORK: Final = {"nfs": "rpcrdma", "nfs4": "rpcrdma", "lustre": "lnet", "beegfs": "beegfs", "gpfs": "mmfslinux"} | {
    "mmfs": "mmfslinux",
    "wekafs": "wekafsio",
    "scatefs": "scatefs",
}
"""Filesystems that nvidia-fs serves, and the driver that must know it."""
_STORAGE_DRIVERS: Final = {"nvme": "nvme", "raid0": "nvme", "nvmeof": "nvme_rdma"}
_FATAL: Final = ("GPU driver", "libcufile", "libcudart", "directory")
_PLACE: Final = ("filesystem", "block device")
"""Where one of these is not ok, neither route can serve the directory, and the routes give no further reason."""
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
    mount = find_mount(directory, root) if os.path.isdir(directory) else None
    device = find_device(mount, root) if mount else None
    is_local = mount is not None and mount.kind in ("ext4", "xfs")
    kind = _kind_below(device) if is_local else ""
    wanted = _STORAGE_DRIVERS.get(kind) or (_NETWORK.get(mount.kind) if mount else None)
    make = None if os.path.exists(directory) else f"mkdir -p -m 700 {directory}"
    is_directory, has_udev = os.path.isdir(directory), bool(names(root, "/run/udev/data"))
    what, udev_fix = ("is here", None) if has_udev else ("has no data", "in a container: -v /run/udev:/run/udev:ro")
    conditions = [
        driver.fact,
        _library_fact("libcufile", "libcufile.so.0 of CUDA 12.8 or newer", root),
        _library_fact("libcudart", "the CUDA runtime", root),
        _settings_fact(settings, mount, device),
        Fact("directory", is_directory, directory if is_directory else f"{directory} is no directory", make),
        _filesystem_fact(mount, settings),
        *([_device_fact(device)] if is_local else []),
        _direct_io_fact(directory) if is_directory else Fact("O_DIRECT", None, "O_DIRECT was not tried"),
        Fact("udev", has_udev, f"/run/udev, by which cuFile finds out what a mount is, {what}", udev_fix),
    ]
    routes = [
        nvidia_fs_fact(root, wanted),
        p2pdma_fact(root, kind, driver, find_library("libcufile.so", root), settings),
    ]
    route = next((fact for fact in routes if fact.ok), None)
    deciding = list(conditions)
    if route is not None:  # nothing to fix about the other one
        routes = [fact if fact is route else fact._replace(fix=None) for fact in routes]
    elif doubtful := [fact for fact in routes if fact.ok is None]:
        deciding += doubtful
    elif all(fact.ok for fact in conditions if fact.name in _PLACE):
        deciding += routes
    against = [fact for fact in deciding if fact.ok is False]
    doubtful = [fact for fact in deciding if fact.ok is None]
    if against:
        # Without a driver or a library the filesystem does not matter.
        told = [fact for fact in against if fact.name in _FATAL] or against
        fixes = [fact.fix for fact in told[:_REASONS] if fact.fix]
        verdict = f"{_how_bad(against, settings, mount)}, because {_reasons(told)}"
        verdict += f"; fix: {'; '.join(fixes)}" if fixes else ""
    elif doubtful:
        verdict = f"GPUDirect Storage: not certain, because {_reasons(doubtful)}; `gdscheck -p` may tell"
    else:
        assert route is not None
        assert mount is not None
        on = device.words if device else mount.source
        verdict = f"GPUDirect Storage: real ({route.words}, {mount.kind} on {on})"
    facts = (*conditions, *routes, iommu_fact(root, driver.machine))  # an IOMMU costs speed and decides nothing alone
    return GdsReport(not against and not doubtful, verdict, facts)


def _how_bad(against: list[Fact], settings: CufileSettings, mount: Mount | None) -> str:
    if any(fact.name in _FATAL for fact in against):
        return "no GPUDirect Storage: cuFile cannot run here"
    if mount and mount.kind in ("tmpfs", "ramfs"):
        return "no GPUDirect Storage: cuFile takes no files of this kind"
    if not settings.flag("properties.allow_compat_mode"):
        return "no GPUDirect Storage: cuFile refuses these files (allow_compat_mode is off)"
    return "compatibility mode: cuFile copies through host memory"


def _reasons(facts: list[Fact]) -> str:
    more = len(facts) - _REASONS
    return "; ".join(fact.words for fact in facts[:_REASONS]) + (f"; and {more} more" if more > 0 else "")


def _library_fact(name: str, what: str, root: str) -> Fact:
    library = find_library(f"{name}.so", root)
    if library is None:
        return Fact(name, False, f"{name} is not here", f"install {what}")
    if not library.loadable:
        words = f"{library.words} is where the loader does not look"
        return Fact(name, False, words, f"export LD_LIBRARY_PATH={os.path.dirname(library.path)}")
    return Fact(name, True, library.words)


def _settings_fact(settings: CufileSettings, mount: Mount | None, device: BlockDevice | None) -> Fact:
    name = "cufile.json"
    if settings.error:
        return Fact(name, False, settings.error, f"correct {settings.path}, or unset CUFILE_ENV_PATH_JSON")
    where = ", over it ".join(filter(None, [settings.path or "none: built-in defaults", ", ".join(settings.variables)]))
    if settings.flag("properties.force_compat_mode"):
        return Fact(name, False, f"force_compat_mode is on ({where})", "turn force_compat_mode off")
    drives = {f"/dev/{drive.name}" for drive in device.drives()} if device else set()
    denied = drives & set(settings.names("denylist.devices"))
    if mount:
        denied |= {mount.source} & set(settings.names("denylist.devices"))
        denied |= {mount.point} & set(settings.names("denylist.mounts"))
        denied |= {mount.kind} & set(settings.names("denylist.filesystems"))
    if denied:
        words = f"denylist has {', '.join(sorted(denied))} ({where})"
        return Fact(name, False, words, f"take it off the list in {settings.where}")
    compat = "allowed" if settings.flag("properties.allow_compat_mode") else "forbidden: what cannot go direct fails"
    return Fact(name, True, f"{where}; compatibility mode {compat}")


def _filesystem_fact(mount: Mount | None, settings: CufileSettings) -> Fact:
    name = "filesystem"
    if mount is None:
        return Fact(name, None, "what it lies on cannot be told")
    here, data = f"{mount.kind} at {mount.point}", mount.option("data")
    if mount.kind == "ext4" and data != "ordered":
        said = f"has data={data}" if data else "does not say data=ordered, which cuFile wants to see"
        fix = f"mount -o remount,data=ordered {mount.point} (of the root filesystem: rootflags=data=ordered)"
        return Fact(name, False, f"{here} {said}", fix)
    if mount.kind not in ("ext4", "xfs", *_NETWORK):
        return Fact(name, False, here, _MOVE)
    if mount.kind.startswith("nfs") and mount.option("proto") != "rdma":
        words = f"{here} goes by {mount.option('proto') or 'tcp'}, not RDMA"
        return Fact(name, False, words, "mount it with proto=rdma")
    if mount.kind in _NETWORK and not settings.flag("properties.gds_rdma_write_support"):
        return Fact(name, False, "gds_rdma_write_support is off", f"turn it on in {settings.where}")
    return Fact(name, True, here)


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
        words = f"{device.words} goes through the device mapper"
        return Fact(name, False, words, "use the NVMe drive itself, or RAID 0")
    what = "not RAID 0 of NVMe drives" if device.kind.startswith("raid") else "no NVMe drive"
    return Fact(name, False, f"{device.words} is {what}", _MOVE)


def _direct_io_fact(directory: str) -> Fact:
    name = "O_DIRECT"
    try:
        scratch, path = tempfile.mkstemp(prefix=".mover-probe-", dir=directory)
    except OSError as error:
        return Fact(name, False, f"{directory} cannot be written ({error.strerror})", "let this user write there")
    os.close(scratch)
    try:
        with (
            open(os.open(path, os.O_RDWR | os.O_DIRECT), "r+b", buffering=0) as file,
            mmap.mmap(-1, PAGE_BYTES) as page,
        ):
            file.write(page)
            os.preadv(file.fileno(), [page], 0)
    except OSError as error:
        return Fact(name, False, f"O_DIRECT does not work there ({error.strerror})", _MOVE)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return Fact(name, True, "O_DIRECT reads and writes")
