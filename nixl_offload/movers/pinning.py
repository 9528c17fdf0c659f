"""Whether device memory of this size can be registered with cuFile at all, and in which pieces, asked before NIXL is.

NIXL's GDS plugins only warn when cuFileBufRegister fails, and then bounce every transfer through host memory for good;
so the limits are looked at here first, and a refusal says what to change.

Threading: ``check_pinning`` reads files and asks NVIDIA's driver, and pins nothing; safe anywhere. ``find_cuts`` pins
and lets go again: on the thread that registers, with the library lock.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from nixl_offload.errors import MoverError
from nixl_offload.hardware.cufile import CufileSettings, read_settings
from nixl_offload.hardware.files import names, read
from nixl_offload.hardware.gds import pinning_route
from nixl_offload.movers.base import MemoryKind, MemoryRegion
from nixl_offload.units import format_size

logger = logging.getLogger(__name__)

NVML: Final = "libnvidia-ml.so.1"
CUDA: Final = "libcuda.so.1"

CUFILE: Final = "libcufile.so.0"
PIECE_BYTES: Final = (4 << 30, 1 << 30, 256 << 20)
"""What is tried where cuFile does not take a region whole, one after the other. Cuts lie at addresses that are
multiples of it, so that no page of a GPU's is in two pieces."""

_ALREADY_REGISTERED: Final = 5023
"""CU_FILE_MEMORY_ALREADY_REGISTERED: one registration serves all movers of the process."""


@dataclass(slots=True)
class _Registration:
    owner: object
    """The holder whose plugin cuFile took the memory from; to the others it says that it has it."""
    cuts: list[int]
    holders: list[object]
    left_over: Callable[[], None] | None = None
    """How to let go of it, where its owner is gone and others are not."""


_REGISTERED: Final[dict[MemoryRegion, _Registration]] = {}
"""Device memory that NIXL's movers have registered with cuFile. Read anywhere; changed with the library lock."""

_BAR1_LINE: Final = 1
"""Of a GPU's ``resource`` file in sysfs: start, end and flags of each window, one a line."""
_PACKED: Final = "turn `block_outermost` off, so that chunks are packed and only `staging` bytes are registered"


class Bar1(NamedTuple):
    """The window through which other devices reach a GPU's memory."""

    total_bytes: int
    free_bytes: int | None
    """None: not known."""


class _Bar1Memory(ctypes.Structure):
    """NVML's nvmlBAR1Memory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def check_pinning(name: str, region: MemoryRegion, registered_bytes: int, *, root: str = "/") -> None:
    """Refuse what cuFile could not pin: call it before ``region`` is registered, for device memory.

    ``name`` is the mover's, for the message; ``registered_bytes`` is what is registered already. Raises MoverError
    that says which limit it is and what to change. Where nothing is pinned (compatibility mode), or nothing more as
    another mover has the same memory registered, there is no limit.
    """
    if region.kind is not MemoryKind.VRAM or region in _REGISTERED:
        return
    settings = read_settings(root)
    route = pinning_route(root, settings)
    if route is None:
        logger.debug(
            "%s: nothing is pinned of %s: cuFile bounces here, and has no limit", name, _words(region.length_bytes)
        )
        return
    what = f"{name}: cannot register {_words(region.length_bytes)} of device memory"
    _check_settings(what, region, registered_bytes, settings)
    bar1 = find_bar1(region.device_id, root)
    if bar1 is None:
        return
    if region.length_bytes > bar1.total_bytes:
        raise MoverError(
            f"{what}: the GPU's BAR1 window is {_words(bar1.total_bytes)}; switch on resizable (large) BAR and "
            f"'above 4G decoding' in the BIOS, or {_PACKED}"
        )
    # With PCI P2PDMA all of the GPU's memory is in the window from the start, and counts as used.
    if route == "nvidia-fs" and bar1.free_bytes is not None and region.length_bytes > bar1.free_bytes:
        raise MoverError(
            f"{what}: of the GPU's BAR1 window of {_words(bar1.total_bytes)} only {_words(bar1.free_bytes)} are free; "
            f"stop what else uses this GPU by GPUDirect, switch on a larger BAR in the BIOS, or {_PACKED}"
        )


def _check_settings(what: str, region: MemoryRegion, registered_bytes: int, settings: CufileSettings) -> None:
    limit_kb = settings.number("properties.max_device_pinned_mem_size_kb")
    own_kb = settings.number("properties.max_device_cache_size_kb")
    needed_kb = -(-(registered_bytes + region.length_bytes) // 1024) + own_kb
    if needed_kb <= limit_kb:
        return
    before = f" beside the {_words(registered_bytes)} that are" if registered_bytes else ""
    raise MoverError(
        f"{what}{before}: with {_words(own_kb << 10)} of cuFile's own this is over max_device_pinned_mem_size_kb = "
        f"{limit_kb} ({_words(limit_kb << 10)}); set it to {needed_kb} or more under `properties` in {settings.where}, "
        f"or {_PACKED}"
    )


def registered_bytes() -> int:
    """Return how much device memory NIXL's movers have registered with cuFile."""
    return sum(region.length_bytes for region in list(_REGISTERED))


def add_holder(region: MemoryRegion, holder: object, cuts: list[int]) -> None:
    """``holder``'s plugin has been asked to register ``region``, cut so. With the library lock."""
    registration = _REGISTERED.setdefault(region, _Registration(holder, cuts, []))
    registration.holders.append(holder)


def remove_holder(region: MemoryRegion, holder: object, deregister: Callable[[], None]) -> None:
    """``holder`` needs ``region`` no more: call ``deregister``, or have the last holder call it. With the library lock.

    cuFile does not count registrations. When the plugin that made one takes it back, everybody else's transfers bounce.
    """
    registration = _REGISTERED[region]
    registration.holders.remove(holder)
    if registration.holders and holder is registration.owner:
        registration.left_over = deregister
        return
    if not registration.holders:
        del _REGISTERED[region]
    try:
        deregister()
    finally:
        if not registration.holders and registration.left_over is not None:
            registration.left_over()


def find_cuts(name: str, region: MemoryRegion, *, root: str = "/") -> list[int]:
    """Return the offsets at which to cut device memory, so that cuFile pins each piece while it holds all the others.

    None where it takes the region whole; those of the mover of another tier that has it registered. Raises MoverError
    when it takes no pieces either. Where nothing is pinned cuFile is not asked: it bounces, registered or
    not, and without a GPU's driver ``cuFileBufRegister`` may never return.
    """
    if region in _REGISTERED:
        return _REGISTERED[region].cuts
    if pinning_route(root, read_settings(root)) is None:
        return []
    cufile = _cufile()
    error = 0 if cufile is None else _refusal(cufile, region, [])
    if cufile is None or error in (0, _ALREADY_REGISTERED):  # by a library of somebody else's
        return []
    for piece_bytes in PIECE_BYTES:
        cuts = list(range(-region.address % piece_bytes or piece_bytes, region.length_bytes, piece_bytes))
        if not cuts:
            continue
        error = _refusal(cufile, region, cuts)
        if not error:
            logger.warning(
                "%s: cuFile does not register %s of device memory at once; it is registered in %d pieces of at most %s",
                name,
                _words(region.length_bytes),
                len(cuts) + 1,
                _words(piece_bytes),
            )
            return cuts
    raise MoverError(
        f"{name}: cuFile refuses to register {_words(region.length_bytes)} of device memory, in pieces too; its log "
        f"(cufile.log) may say why; {_PACKED}"
    )


class _CufileError(ctypes.Structure):
    """CUfileError_t."""

    _fields_ = (("error", ctypes.c_int), ("cuda_error", ctypes.c_int))


def _cufile() -> ctypes.CDLL | None:
    """The library that NIXL's plugin has loaded; None: it has loaded none, so there is none to ask."""
    try:
        cufile = ctypes.CDLL(CUFILE, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        cufile.cuFileBufRegister.restype = cufile.cuFileBufDeregister.restype = _CufileError
        cufile.cuFileBufRegister.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        cufile.cuFileBufDeregister.argtypes = (ctypes.c_void_p,)
    except (OSError, AttributeError):
        return None
    return cufile


def _refusal(cufile: ctypes.CDLL, region: MemoryRegion, cuts: list[int]) -> int:
    """Register all pieces at the same time, and let go of them; return cuFile's error, 0 where it took them."""
    held: list[int] = []
    try:
        for begin, end in pairwise([0, *cuts, region.length_bytes]):
            error: int = cufile.cuFileBufRegister(region.address + begin, end - begin, 0).error
            if error:
                return error
            held.append(region.address + begin)
        return 0
    finally:
        for address in held:
            cufile.cuFileBufDeregister(address)


def find_bar1(device: int, root: str = "/") -> Bar1 | None:
    """Return the window of CUDA's device number ``device``; None when neither driver nor kernel tells.

    Asks NVML. Where that is not to be had, the kernel tells how large it is, but not what is free; if it is not known
    which of the GPUs is meant, the largest window counts, so that nothing is refused in error.
    """
    address = _pci_address(device) if root == "/" else None
    told = _from_nvml(address) if address else None
    if told is not None:
        return told
    gpus = [address] if address else names(root, "/proc/driver/nvidia/gpus")
    sizes = [_window_bytes(read(root, f"/sys/bus/pci/devices/{gpu.lower()}/resource") or "") for gpu in gpus]
    return Bar1(max(sizes), None) if any(sizes) else None


def _pci_address(device: int) -> str | None:
    """Return ``0000:4e:00.0``. CUDA's numbers are not NVML's: CUDA_VISIBLE_DEVICES changes only the former."""
    try:
        cuda = ctypes.CDLL(CUDA)
        number = ctypes.c_int()
        text = ctypes.create_string_buffer(32)
        if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(number), device):
            return None
        return None if cuda.cuDeviceGetPCIBusId(text, len(text), number) else text.value.decode()
    except (OSError, AttributeError, UnicodeDecodeError):  # no driver, or a library of that name that is another
        return None


def _from_nvml(address: str) -> Bar1 | None:
    try:
        nvml = ctypes.CDLL(NVML)
        if nvml.nvmlInit_v2():
            return None
        try:
            handle, memory = ctypes.c_void_p(), _Bar1Memory()
            if nvml.nvmlDeviceGetHandleByPciBusId_v2(address.encode(), ctypes.byref(handle)):
                return None
            if nvml.nvmlDeviceGetBAR1MemoryInfo(handle, ctypes.byref(memory)):
                return None
            return Bar1(int(memory.total), int(memory.free))
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None


def _window_bytes(resource: str) -> int:
    lines = resource.splitlines()
    try:
        start, end = (int(word, 16) for word in lines[_BAR1_LINE].split()[:2])
    except (IndexError, ValueError):
        return 0
    return end - start + 1 if end > start else 0


def _words(size_bytes: int) -> str:
    """For people: whole units where that is exact, else MiB rounded up."""
    exact = format_size(size_bytes)
    return exact if len(exact) <= 8 else f"{-(-size_bytes // (1 << 20))}MiB"
