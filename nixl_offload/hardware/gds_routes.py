"""The two ways on which a drive's bytes reach a GPU without the host: nvidia-fs, and the kernel's own PCI P2PDMA.

Threading: pure functions that read ``/proc``, ``/sys`` and ``/dev``; safe anywhere. What they cannot read is unknown,
never an error. Where each condition is documented: docs/gds.md.
"""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple

from nixl_offload.hardware.cufile import CufileSettings, beneath
from nixl_offload.hardware.libraries import Library, find_library

_P2PDMA_KERNEL: Final = (6, 2)
_P2PDMA_RAID_KERNEL: Final = (7, 1)
_P2PDMA_DRIVER: Final = (565, 47)
_P2PDMA_CUFILE: Final = (1, 13)
_BLOCK_SECTION_CUFILE: Final = (1, 16)
"""From here on the way is switched on per kind of drive as well."""
_P2PDMA_GPUS: Final = re.compile(r"\b(A100|A40|L4|L40S|G?H100|G?H200|G?B100|G?B200|G?B300)\b")
_BLOCK_SECTIONS: Final = {"nvme": "nvme", "nvmeof": "nvmeof", "raid0": "raid"}
_CONTAINER_MEND: Final = "start the container with NVIDIA_GDS=enabled, or --device=/dev/nvidia-fs0 and its siblings"


class Fact(NamedTuple):
    """One thing that decides whether GPUDirect Storage is real."""

    name: str
    ok: bool | None
    """None: not known."""
    words: str
    mend: str | None = None
    """A command or a setting that helps; None where nothing is to be done, or nothing helps."""


class Driver(NamedTuple):
    """The GPU's kernel driver."""

    version: tuple[int, ...]
    open_modules: bool
    machine: str
    """``x86_64`` or ``aarch64``, as the driver says it."""
    fact: Fact


def find_driver(root: str) -> Driver:
    """Return NVIDIA's kernel driver; its ``fact`` says whether it is there."""
    text = read(root, "/proc/driver/nvidia/version")
    if not text:
        mend = "install NVIDIA's driver, or start the container with --gpus all"
        unreadable = Fact("GPU driver", None, "/proc/driver/nvidia/version cannot be read")
        return Driver(
            (), False, "", unreadable if text is None else Fact("GPU driver", False, "no NVIDIA driver here", mend)
        )
    line = text.splitlines()[0]
    number = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", line)
    machine = re.search(r"\bfor (\w+)", line)
    version = number.group(1) if number else "of unknown version"
    is_open = "open kernel module" in line.lower()
    words = f"NVIDIA driver {version}, {'open' if is_open else 'proprietary'} kernel modules"
    return Driver(
        tuple(map(int, number.group(1).split("."))) if number else (),
        is_open,
        machine.group(1) if machine else "",
        Fact("GPU driver", True, words),
    )


def nvidia_fs_fact(root: str, wanted: str | None) -> Fact:
    """Say whether nvidia-fs does it. ``wanted``: the storage driver that must know it; None: nothing that it serves."""
    name = "nvidia-fs"
    version = read(root, "/proc/driver/nvidia-fs/version")
    if version is None:
        return Fact(name, None, "/proc/driver/nvidia-fs cannot be read")
    if not version:
        mend = "install nvidia-gds and the nvidia-fs module, then `modprobe nvidia-fs`"
        return Fact(name, False, "nvidia-fs is not loaded", mend)
    said = f"nvidia-fs {version.partition(':')[2].strip() or version.strip()}"
    if not _has_nvidia_fs_device(root):
        return Fact(name, False, f"{said} is loaded, but there is no /dev/nvidia-fs* here", _CONTAINER_MEND)
    if wanted is None:
        return Fact(name, False, f"{said} is loaded, but serves nothing of this kind")
    modules = read(root, "/proc/driver/nvidia-fs/modules")
    if modules is None:
        return Fact(name, None, f"{said} is loaded; whether the {wanted} driver knows it cannot be read")
    if wanted not in {line.partition(":")[0].strip() for line in modules.splitlines()}:
        mend = f"install the {wanted} driver of DOCA or MLNX_OFED (with GDS), update the initramfs, reboot"
        return Fact(name, False, f"{said} is loaded, but the {wanted} driver does not know it", mend)
    return Fact(name, True, said)


def p2pdma_fact(root: str, device_kind: str, driver: Driver, cufile: Library | None, settings: CufileSettings) -> Fact:
    """Say whether the kernel does it. ``device_kind``: as in ``mounts.BlockDevice``, or "" for no block device."""
    missing: list[tuple[str, str | None]] = []
    unknown: list[str] = []
    release = (read(root, "/proc/sys/kernel/osrelease") or "").strip()
    kernel = _version(release)
    section = _BLOCK_SECTIONS.get(device_kind)
    is_x86 = driver.machine != "aarch64"
    if section is None:
        return Fact("PCI P2PDMA", False, "PCI P2PDMA reaches NVMe drives only")
    if kernel and kernel < _P2PDMA_KERNEL:
        missing.append((f"kernel {release} is older than 6.2", "boot a kernel from 6.2 on"))
    elif "# CONFIG_PCI_P2PDMA is not set" in (read(root, f"/boot/config-{release}") or ""):
        missing.append((f"kernel {release} is built without PCI P2PDMA", "boot a kernel with CONFIG_PCI_P2PDMA=y"))
    elif not kernel:
        unknown.append("the kernel's version")
    if device_kind == "raid0" and is_x86 and kernel < _P2PDMA_RAID_KERNEL:
        missing.append(("it does not go through RAID 0 before kernel 7.1", None))
    if driver.version and driver.version < _P2PDMA_DRIVER:
        missing.append(("the driver is older than 565.47", "install driver 570 or newer"))
    if driver.version and not driver.open_modules:
        missing.append(("the driver has proprietary kernel modules", "install the driver's open kernel modules"))
    if driver.version and is_x86:
        parameters = read(root, "/proc/driver/nvidia/params")
        if not parameters:
            unknown.append("the driver's options")
        elif "rmforcestaticbar1=1" not in parameters.lower():
            mend = (
                'set `options nvidia NVreg_RegistryDwords="RMForceStaticBar1=1;RmForceDisableIomapWC=1;"` for modprobe'
            )
            missing.append(("the driver's option RMForceStaticBar1 is off", f"{mend}, reboot"))
        if (read(root, "/sys/module/nvme_core/parameters/multipath") or "").strip() == "Y":
            missing.append(("NVMe multipath is on", "set `options nvme_core multipath=N` for modprobe, reboot"))
    if cufile and cufile.version and cufile.version < _P2PDMA_CUFILE:
        missing.append(("libcufile is older than 1.13", "install CUDA 12.8 or newer"))
    missing += _switched_off(section, cufile, settings)
    models = _gpu_models(root)
    if models and not any(_P2PDMA_GPUS.search(model) for model in models):
        unknown.append(f"whether {models[0]} takes part, which NVIDIA does not list,")
    if iommu_fact(root, driver.machine).ok is False:
        unknown.append("whether the IOMMU lets it pass")
    if missing:
        mends = "; ".join(mend for _, mend in missing if mend) or None
        return Fact("PCI P2PDMA", False, ", ".join(words for words, _ in missing), mends)
    if unknown:
        return Fact("PCI P2PDMA", None, f"{' and '.join(unknown)} cannot be told", "ask `gdscheck -p`")
    return Fact("PCI P2PDMA", True, f"PCI P2PDMA of kernel {release}")


def iommu_fact(root: str, machine: str) -> Fact:
    """Say whether an IOMMU stands between a drive and the GPU. It costs speed with nvidia-fs, and may stop P2PDMA."""
    mend = "put iommu=pt (or intel_iommu=off, amd_iommu=off) on the kernel's command line, reboot"
    if not names(root, "/sys/class/iommu"):
        return Fact("IOMMU", True, "off")
    if machine == "aarch64":
        return Fact("IOMMU", True, "on, as it should be on Grace")
    groups = names(root, "/sys/kernel/iommu_groups")[:256]
    kinds = {(read(root, f"/sys/kernel/iommu_groups/{group}/type") or "").strip() for group in groups} - {""}
    if kinds == {"identity"}:
        return Fact("IOMMU", True, "on, passes everything through")
    return Fact("IOMMU", False if kinds else None, "on, and translates" if kinds else "on", mend)


def acs_fact(root: str) -> Fact | None:
    """Say which PCI switches send peer traffic up to the CPU; None where nvidia-fs names none."""
    bridges = (read(root, "/proc/driver/nvidia-fs/bridges") or "").split()
    if not bridges:
        return None
    some = ", ".join(bridges[:3]) + (" ..." if len(bridges) > 3 else "")
    return Fact(
        "PCIe ACS", False, f"on for {some}: peer traffic goes up to the CPU, slower", "turn ACS off (BIOS, setpci)"
    )


def pinning_route(root: str, settings: CufileSettings) -> str | None:
    """Return what pins registered device memory on this machine: ``nvidia-fs``, ``PCI P2PDMA``; None: nothing does.

    Whether a file then goes that way is another question; without a route cuFile bounces, and nothing is pinned.
    """
    driver = find_driver(root)
    if settings.flag("properties.force_compat_mode") or not driver.fact.ok:
        return None
    if read(root, "/proc/driver/nvidia-fs/version") and _has_nvidia_fs_device(root):
        return "nvidia-fs"
    fact = p2pdma_fact(root, "nvme", driver, find_library("libcufile.so", root), settings)
    return None if fact.ok is False else "PCI P2PDMA"


def read(root: str, path: str) -> str | None:
    """Return what a file says; "" when there is no such file; None when it is there but cannot be read."""
    try:
        with open(beneath(root, path), encoding="utf-8", errors="replace") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError:
        return None


def names(root: str, path: str) -> list[str]:
    """Return what is in a directory; nothing when it cannot be read."""
    try:
        return sorted(os.listdir(beneath(root, path)))
    except OSError:
        return []


def _has_nvidia_fs_device(root: str) -> bool:
    return any(device.startswith("nvidia-fs") for device in names(root, "/dev"))


def _switched_off(section: str, cufile: Library | None, settings: CufileSettings) -> list[tuple[str, str | None]]:
    said = f"`{section}: {{use_pci_p2pdma: true}}` in `block`"
    if not settings.flag("properties.use_pci_p2pdma"):
        return [
            (
                "cufile.json does not say use_pci_p2pdma",
                f"set use_pci_p2pdma in {settings.where}: take ours, configs/cufile.json",
            )
        ]
    known_older = cufile is not None and (0,) < cufile.version < _BLOCK_SECTION_CUFILE
    if known_older or settings.flag(f"block.{section}.use_pci_p2pdma"):
        return []
    if f"fs.block.{section}.use_pci_p2pdma" in settings.said:
        return [
            (
                "cufile.json has `block` inside of `fs`, where cuFile ignores it",
                f"move it to the top in {settings.where}",
            )
        ]
    return [(f"cufile.json has no {said}", f"set it in {settings.where}: take ours, configs/cufile.json")]


def _gpu_models(root: str) -> list[str]:
    found = []
    for gpu in names(root, "/proc/driver/nvidia/gpus"):
        for line in (read(root, f"/proc/driver/nvidia/gpus/{gpu}/information") or "").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                found.append(value.strip())
    return found


def _version(text: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match.group(1)), int(match.group(2))) if match else ()
