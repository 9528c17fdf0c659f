"""The two routes by which a drive's bytes reach a GPU without the host: nvidia-fs, and the kernel's own PCI P2PDMA.

Threading: pure functions that read ``/proc``, ``/sys`` and ``/dev``; safe anywhere. What they cannot read is unknown,
never an error. Where each condition is documented: docs/gds.md.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from nixl_offload.hardware.cufile import CufileSettings
from nixl_offload.hardware.files import names, read
from nixl_offload.hardware.libraries import Library, find_library

_P2PDMA_GPUS: Final = re.compile(r"\b(A100|A40|L4|L40S|G?H100|G?H200|G?B100|G?B200|G?B300)\b")
_BLOCK_SECTIONS: Final = {"nvme": "nvme", "nvmeof": "nvmeof", "raid0": "raid"}
"""Kind of drive → its section of cufile.json under ``block``, from cuFile 1.16 on."""


class Fact(NamedTuple):
    """One thing that decides whether GPUDirect Storage is real."""

    name: str
    ok: bool | None
    """None: not known."""
    words: str
    fix: str | None = None
    """A command or a setting that helps; None where nothing is to be done, or nothing helps."""


class GpuDriver(NamedTuple):
    """The GPU's kernel driver; ``machine`` is ``x86_64`` or ``aarch64``, as it says."""

    fact: Fact
    version: tuple[int, ...] = ()
    open_modules: bool = False
    machine: str = ""


def find_driver(root: str) -> GpuDriver:
    """Return NVIDIA's kernel driver."""
    text = read(root, "/proc/driver/nvidia/version")
    if text is None:
        return GpuDriver(Fact("GPU driver", None, "/proc/driver/nvidia/version cannot be read"))
    if not text:
        fix = "install NVIDIA's driver, or start the container with --gpus all"
        return GpuDriver(Fact("GPU driver", False, "no NVIDIA driver here", fix))
    line = text.splitlines()[0]
    number, machine = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", line), re.search(r"\bfor (\w+)", line)
    version, is_open = number[1] if number else "of unknown version", "open kernel module" in line.lower()
    words = f"NVIDIA driver {version}, {'open' if is_open else 'proprietary'} kernel modules"
    return GpuDriver(Fact("GPU driver", True, words), _version(version), is_open, machine[1] if machine else "")


def nvidia_fs_fact(root: str, wanted: str | None) -> Fact:
    """Say whether nvidia-fs does it. ``wanted``: the storage driver that must know it; None: nothing that it serves."""
    name = "nvidia-fs"
    version = read(root, "/proc/driver/nvidia-fs/version")
    if version is None:
        return Fact(name, None, "/proc/driver/nvidia-fs cannot be read")
    if not version:
        fix = "install nvidia-gds and the nvidia-fs module, then `modprobe nvidia-fs`"
        return Fact(name, False, "nvidia-fs is not loaded", fix)
    said = f"nvidia-fs {version.partition(':')[2].strip() or version.strip()}"
    if not _has_nvidia_fs_device(root):
        fix = "start the container with NVIDIA_GDS=enabled, or --device=/dev/nvidia-fs0 and its siblings"
        return Fact(name, False, f"{said} is loaded, but there is no /dev/nvidia-fs* here", fix)
    if wanted is None:
        return Fact(name, False, f"{said} is loaded, but serves nothing of this kind")
    modules = read(root, "/proc/driver/nvidia-fs/modules")
    if modules is None:
        return Fact(name, None, f"{said} is loaded; whether the {wanted} driver knows it cannot be read")
    if wanted not in {line.partition(":")[0].strip() for line in modules.splitlines()}:
        fix = f"install the {wanted} driver of DOCA or MLNX_OFED (with GDS), update the initramfs, reboot"
        return Fact(name, False, f"{said} is loaded, but the {wanted} driver does not know it", fix)
    return Fact(name, True, said)


def p2pdma_fact(
    root: str, device_kind: str, driver: GpuDriver, cufile: Library | None, settings: CufileSettings
) -> Fact:
    """Say whether the kernel does it. ``device_kind``: as in ``mounts.BlockDevice``, or "" for no block device."""
    name = "PCI P2PDMA"
    section = _BLOCK_SECTIONS.get(device_kind)
    if section is None:
        return Fact(name, False, "PCI P2PDMA reaches NVMe drives only")
    release = (read(root, "/proc/sys/kernel/osrelease") or "").strip()
    kernel, is_x86, version = _version(release), driver.machine != "aarch64", driver.version
    unbuilt = "# CONFIG_PCI_P2PDMA is not set" in (read(root, f"/boot/config-{release}") or "")
    parameters = read(root, "/proc/driver/nvidia/params") or ""
    registry = 'options nvidia NVreg_RegistryDwords="RMForceStaticBar1=1;RmForceDisableIomapWC=1;"'
    is_closed, bus = bool(version) and not driver.open_modules, bool(version) and is_x86
    no_static = bus and bool(parameters) and "rmforcestaticbar1=1" not in parameters.lower()
    multipath = bus and (read(root, "/sys/module/nvme_core/parameters/multipath") or "").strip() == "Y"
    library = cufile.version if cufile else ()
    allowed = settings.flag("properties.use_pci_p2pdma")
    # Before cuFile 1.16 there is no switch per kind of drive.
    allowed_kind = (0,) < library < (1, 16) or settings.flag(f"block.{section}.use_pci_p2pdma")
    in_block = f"cufile.json has no `{section}: {{use_pci_p2pdma: true}}` in `block`"
    ours = f"{settings.where}: take ours, which nixl-offload configs cufile.json prints"
    conditions = (
        ((0,) < kernel < (6, 2), f"kernel {release} is older than 6.2", "boot a kernel from 6.2 on"),
        (unbuilt, f"kernel {release} is built without PCI P2PDMA", "boot a kernel with CONFIG_PCI_P2PDMA=y"),
        (
            device_kind == "raid0" and is_x86 and kernel < (7, 1),
            "it does not go through RAID 0 before kernel 7.1",
            None,
        ),
        ((0,) < version < (565, 47), "the driver is older than 565.47", "install driver 570 or newer"),
        (is_closed, "the driver has proprietary kernel modules", "install the driver's open kernel modules"),
        (no_static, "the driver's option RMForceStaticBar1 is off", f"set `{registry}` for modprobe, reboot"),
        (multipath, "NVMe multipath is on", "set `options nvme_core multipath=N` for modprobe, reboot"),
        ((0,) < library < (1, 13), "libcufile is older than 1.13", "install CUDA 12.8 or newer"),
        (not allowed, "cufile.json does not say use_pci_p2pdma", f"set use_pci_p2pdma in {ours}"),
        (allowed and not allowed_kind, in_block, f"set it in {ours}"),
    )
    missing = [(words, fix) for is_missing, words, fix in conditions if is_missing]
    if missing:
        fixes = "; ".join(fix for _, fix in missing if fix) or None
        return Fact(name, False, ", ".join(words for words, _ in missing), fixes)
    unknown = [] if kernel else ["the kernel's version"]
    if driver.version and is_x86 and not parameters:
        unknown.append("the driver's options")
    gpus = names(root, "/proc/driver/nvidia/gpus")
    texts = [read(root, f"/proc/driver/nvidia/gpus/{gpu}/information") or "" for gpu in gpus]
    models = re.findall(r"^Model:\s*(.+?)\s*$", "\n".join(texts), re.MULTILINE)
    if models and not any(map(_P2PDMA_GPUS.search, models)):
        unknown.append(f"whether {models[0]} takes part, which NVIDIA does not list,")
    if iommu_fact(root, driver.machine).ok is False:
        unknown.append("whether the IOMMU lets it pass")
    if unknown:
        return Fact(name, None, f"{' and '.join(unknown)} cannot be told", "ask `gdscheck -p`")
    return Fact(name, True, f"PCI P2PDMA of kernel {release}")


def iommu_fact(root: str, machine: str) -> Fact:
    """Say whether an IOMMU stands between a drive and the GPU. It costs speed with nvidia-fs, and may stop P2PDMA."""
    if not names(root, "/sys/class/iommu"):
        return Fact("IOMMU", True, "off")
    if machine == "aarch64":
        return Fact("IOMMU", True, "on, as it should be on Grace")
    groups = names(root, "/sys/kernel/iommu_groups")[:256]
    kinds = {(read(root, f"/sys/kernel/iommu_groups/{group}/type") or "").strip() for group in groups} - {""}
    if kinds == {"identity"}:
        return Fact("IOMMU", True, "on, passes everything through")
    fix = "put iommu=pt (or intel_iommu=off, amd_iommu=off) on the kernel's command line, reboot"
    return Fact("IOMMU", False if kinds else None, "on, and translates" if kinds else "on", fix)


def pinning_route(root: str, settings: CufileSettings) -> str | None:
    """Return what pins registered device memory on this machine: ``nvidia-fs`` or ``PCI P2PDMA``; None: nothing does.

    This says nothing about files. Without a route cuFile copies through its own buffers, and nothing is pinned.
    """
    driver = find_driver(root)
    if settings.flag("properties.force_compat_mode") or not driver.fact.ok:
        return None
    if read(root, "/proc/driver/nvidia-fs/version") and _has_nvidia_fs_device(root):
        return "nvidia-fs"
    fact = p2pdma_fact(root, "nvme", driver, find_library("libcufile.so", root), settings)
    return None if fact.ok is False else "PCI P2PDMA"


def _has_nvidia_fs_device(root: str) -> bool:
    return any(device.startswith("nvidia-fs") for device in names(root, "/dev"))


def _version(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match.group().split("."))) if match else ()
