"""Finds out whether GPUDirect Storage is real for a directory, or cuFile copies through host memory, and why.

Judges ext4 and xfs on a local NVMe drive. Other setups that cuFile serves are "not certain". Sources: docs/gds.md.
Threading: safe anywhere. Functions read ``/proc``, ``/sys``, ``/dev`` and cufile.json (tests: below ``root``); only
``gds_report`` writes, a scratch page that it removes. They load no NVIDIA library, start no process, raise nothing.
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
from collections.abc import Iterator
from typing import Final, NamedTuple

from nixl_offload.hardware.machine import LOCAL, beneath, find_mount, names, read
from nixl_offload.types import PAGE_BYTES

PATH_VARIABLE: Final = "CUFILE_ENV_PATH_JSON"
COMPAT_VARIABLE: Final = "CUFILE_FORCE_COMPAT_MODE"
P2PDMA_VARIABLE: Final = "CUFILE_USE_PCIP2PDMA"

_MOVE: Final = "put the directory on ext4 (mounted with data=ordered) or xfs, on NVMe"


def settings_path() -> str:
    """Return the path of the file that cuFile reads, whether it exists or not."""
    return os.environ.get(PATH_VARIABLE) or "/etc/cufile.json"


def settings_of(name: str, root: str = "/", section: str = "") -> list[str]:
    """Return the numbers or words to which cuFile's file sets ``name``; none: cuFile's default holds. ``section``: only
    of the innermost section; empty: of any.

    The file is JSON with comments and perhaps with commas too many, so it is searched.
    """
    strings_and_comments = re.compile(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
    text = strings_and_comments.sub(lambda found: found[1] or " ", read(root, settings_path()))
    within = rf'"{section}"\s*:\s*\{{[^{{}}]*' if section else ""
    return re.findall(rf'{within}"{name}"\s*:\s*(\w+)', text)


def _is_on(variable: str, name: str, root: str) -> bool:
    text = os.environ.get(variable)
    return text.strip().lower() in {"1", "true", "yes", "on"} if text else "true" in settings_of(name, root)


class Fact(NamedTuple):
    """One condition of real GPUDirect Storage."""

    name: str
    ok: bool | None
    """Whether it holds; None if unknown."""
    words: str
    fix: str = ""
    """What helps where it does not hold."""


class GdsReport(NamedTuple):
    """The verdict on a directory."""

    real: bool | None
    """Whether GPUDirect Storage bypasses host memory; None if that is uncertain."""
    verdict: str
    """One plain sentence."""
    facts: tuple[Fact, ...]


def gds_report(directory: str, *, root: str = "/") -> GdsReport:
    """Return a report on how cuFile moves files of ``directory``.

    Tests O_DIRECT with one page in a scratch file there (mode 0600, removed). Takes a few ms.
    """
    driver, facts = find_driver(root), tuple(_conditions(directory, root))
    against, doubtful, known = ([fact for fact in facts if fact.ok is ok] for ok in (False, None, True))
    if not driver.ok:
        verdict = f"no GPUDirect Storage: cuFile cannot run here, because {driver.words}; fix: {driver.fix}"
    elif against:
        verdict = f"compatibility mode: cuFile copies through host memory, because {_words(against)}"
        verdict += f"; fix: {'; '.join(fact.fix for fact in against)}"
    elif doubtful:
        verdict = f"GPUDirect Storage: not certain, because {_words(doubtful)}; `gdscheck -p` may tell"
    else:
        verdict = f"GPUDirect Storage: real ({_words(known)})"
    return GdsReport(False if against or not driver.ok else None if doubtful else True, verdict, (driver, *facts))


def find_driver(root: str = "/") -> Fact:
    """Return whether NVIDIA's kernel driver is loaded."""
    text = read(root, "/proc/driver/nvidia/version")
    if not text:
        help_text = "install NVIDIA's driver, or start the container with --gpus all"
        return Fact("GPU driver", False, "no NVIDIA driver here", help_text)
    number = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    modules = "open" if "open kernel module" in text.partition("\n")[0].lower() else "proprietary"
    return Fact("GPU driver", True, f"NVIDIA driver {number[1] if number else '?'}, {modules} kernel modules")


def pins_memory(root: str = "/") -> bool:
    """Whether cuFile may pin registered device memory here, for any file. If not, it uses buffers of its own."""
    if _is_on(COMPAT_VARIABLE, "force_compat_mode", root) or not find_driver(root).ok:
        return False
    return _has_node(root) or _p2pdma_obstacle(root) is None


def _words(facts: list[Fact]) -> str:
    return "; ".join(fact.words for fact in facts)


def _conditions(directory: str, root: str) -> Iterator[Fact]:
    """Yield what is known of the way between a drive and the GPU, and which of the other conditions do not hold."""
    mount = tuple(_of_mount(directory, root))
    if mount[0].ok is not None:  # some network filesystems have GPUDirect clients, and ways, of their own
        yield _route(root)
    yield from mount
    yield _direct_io(directory)
    if _is_on(COMPAT_VARIABLE, "force_compat_mode", root):
        words = f"force_compat_mode is on (in {settings_path()} or by {COMPAT_VARIABLE})"
        yield Fact("cufile.json", False, words, "turn force_compat_mode off")
    if not names(root, "/run/udev/data"):
        words = "/run/udev, by which cuFile finds out what a mount is, has no data"
        yield Fact("udev", False, words, "in a container: -v /run/udev:/run/udev:ro")


def _route(root: str) -> Fact:
    """Return whether bytes can go from an NVMe drive to the GPU: by nvidia-fs, or by the kernel's PCI P2PDMA."""
    version = read(root, "/proc/driver/nvidia-fs/version").partition(":")[2].strip()
    if not version:
        words, fix = "nvidia-fs is not loaded", "install nvidia-gds and the nvidia-fs module, then `modprobe nvidia-fs`"
    elif not _has_node(root):
        words = "nvidia-fs is loaded, but there is no /dev/nvidia-fs* here"
        fix = "start the container with NVIDIA_GDS=enabled"
    elif not re.search(r"^nvme:", read(root, "/proc/driver/nvidia-fs/modules"), re.MULTILINE):
        words = "nvidia-fs is loaded, but the nvme driver does not know it"
        fix = "install the nvme driver of DOCA or MLNX_OFED, with GDS"
    else:
        return Fact("route", True, f"nvidia-fs {version}")
    obstacle = _p2pdma_obstacle(root)
    if obstacle is None:
        return Fact("route", None, "PCI P2PDMA is turned on, but only cuFile knows whether it works")
    return Fact("route", False, f"{words}, and no PCI P2PDMA: {obstacle[0]}", f"{fix}; or {obstacle[1]}")


def _has_node(root: str) -> bool:
    return any(name.startswith("nvidia-fs") for name in names(root, "/dev"))


def _p2pdma_obstacle(root: str) -> tuple[str, str] | None:
    """Return what prevents the kernel's PCI P2PDMA, and a fix; None if nothing is known to."""
    release = read(root, "/proc/sys/kernel/osrelease").strip()
    kernel = re.match(r"(\d+)\.(\d+)", release)
    if kernel and (int(kernel[1]), int(kernel[2])) < (6, 2):
        return f"kernel {release} is older than 6.2", "boot a kernel from 6.2 on"
    if "proprietary" in find_driver(root).words:
        return "the driver has proprietary kernel modules", "install its open kernel modules"
    # From cuFile 1.16 on, both sections must say it. The variable stands for one of them.
    places = ["true" in settings_of("use_pci_p2pdma", root, section) for section in ("properties", "nvme")]
    if sum(places) + bool(os.environ.get(P2PDMA_VARIABLE)) < 2 or not _is_on(P2PDMA_VARIABLE, "use_pci_p2pdma", root):
        words = f"{settings_path()} does not say use_pci_p2pdma in properties and block.nvme"
        return words, f"set it in {settings_path()}: take ours, which nixl-offload configs cufile.json prints"
    return None


def _of_mount(directory: str, root: str) -> Iterator[Fact]:
    """Yield whether the directory's filesystem, its options and its drive are such that cuFile goes direct."""
    mount = find_mount(directory, root)
    if mount is None:
        yield Fact("filesystem", None, "the filesystem is not known")
        return
    here = f"{mount.kind} at {mount.point}"
    if mount.kind not in ("ext4", "xfs"):
        yield Fact("filesystem", False if mount.kind in LOCAL else None, here, _MOVE)
        return
    yield Fact("filesystem", True, here)
    if mount.kind == "ext4" and "data=ordered" not in mount.options:
        data = next((option for option in mount.options if option.startswith("data=")), "")
        words = f"{here} has {data}" if data else f"{here} does not say data=ordered, which cuFile wants to see"
        fix = f"mount -o remount,data=ordered {mount.point} (of the root filesystem: rootflags=data=ordered)"
        yield Fact("mount options", False, words, fix)
    device = os.path.realpath(beneath(root, f"/sys/dev/block/{mount.device}"))
    name = os.path.basename(device)
    drive = os.path.dirname(device) if os.path.exists(f"{device}/partition") else device
    if read("/", f"{drive}/device/transport").strip() == "pcie":  # NVMe drives alone have this file
        yield Fact("block device", True, name)
    elif not os.path.exists(device) or re.match("nvme|md", name):
        yield Fact("block device", None, f"{name} is not known to be an NVMe drive of this machine")
    else:
        yield Fact("block device", False, f"{name} is no NVMe drive", _MOVE)


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
        return Fact("O_DIRECT", False, f"O_DIRECT does not work in {directory} ({error.strerror})", _MOVE)
    return Fact("O_DIRECT", True, "O_DIRECT reads and writes")
