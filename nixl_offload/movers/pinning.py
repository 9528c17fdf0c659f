"""Checks whether cuFile can register device memory before NIXL tries, and counts the movers that need a registration.

If cuFileBufRegister fails, NIXL's GDS plugins only warn, and bounce all transfers through host memory from then on. So
we try cuFile first. The error says what to change, and the engine then packs chunks.

Threading: ``pinning_limit`` only reads files and is safe anywhere. All else needs the library lock.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter, defaultdict
from contextlib import ExitStack
from typing import Final

from nixl_offload.errors import MoverError
from nixl_offload.hardware.gds import pins_memory, settings_of, settings_path
from nixl_offload.movers.base import MemoryRegion
from nixl_offload.units import short_size

CUFILE: Final = "libcufile.so.0"
_ALREADY_REGISTERED: Final = 5023
"""CU_FILE_MEMORY_ALREADY_REGISTERED: one registration serves all movers of the process."""
_PACKED: Final = "turn `block_outermost` off, so that chunks are packed and only `staging` bytes are registered"


_HOLDERS: Final = Counter[MemoryRegion]()
"""Device memory registered with cuFile, and the number of NIXL movers that need it."""
_ENDS: Final = defaultdict[MemoryRegion, ExitStack](ExitStack)
"""Deregistrations of movers that no longer need a region; run with the last one."""


class _CufileError(ctypes.Structure):
    """CUfileError_t."""

    _fields_ = (("error", ctypes.c_int), ("cuda_error", ctypes.c_int))


def pinning_limit(name: str, size_bytes: int, registered_bytes: int = 0, *, root: str = "/") -> None:
    """Raise MoverError if cuFile's settings forbid ``size_bytes`` more of device memory, saying what to change.

    ``name``: begins the message. ``registered_bytes``: already registered. Compatibility mode pins nothing.
    """
    if not pins_memory(root):
        return
    limit_kb, own_kb = (
        next((int(text) for text in settings_of(name, root) if text.isdecimal()), default_kb)
        for name, default_kb in (("max_device_pinned_mem_size_kb", 33_554_432), ("max_device_cache_size_kb", 131_072))
    )
    needed_kb = -(-(registered_bytes + size_bytes) // 1024) + own_kb
    if needed_kb > limit_kb:
        before = f" beside the {short_size(registered_bytes)} that are" if registered_bytes else ""
        raise MoverError(
            f"{name}: cannot register {short_size(size_bytes)} of device memory{before}: with "
            f"{short_size(own_kb << 10)} of cuFile's own this is over max_device_pinned_mem_size_kb = {limit_kb} "
            f"({short_size(limit_kb << 10)}); set it to {needed_kb} or more under `properties` in {settings_path()}, "
            f"or {_PACKED}"
        )


def check_pinning(name: str, region: MemoryRegion) -> None:
    """Raise MoverError if cuFile cannot register ``region``: register it, then deregister it.

    Skipped if cuFile pins nothing: it bounces anyway, and without a GPU driver ``cuFileBufRegister`` may never return.
    """
    if region in _HOLDERS:
        return
    pinning_limit(name, region.length_bytes, sum(other.length_bytes for other in _HOLDERS))
    if not pins_memory():
        return
    try:
        cufile = ctypes.CDLL(CUFILE, mode=os.RTLD_NOW | os.RTLD_NOLOAD)  # only if NIXL's plugin has loaded it
        register, deregister = cufile.cuFileBufRegister, cufile.cuFileBufDeregister
    except (OSError, AttributeError):
        return
    register.restype = deregister.restype = _CufileError
    register.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    deregister.argtypes = (ctypes.c_void_p,)
    error = register(region.address, region.length_bytes, 0).error
    if not error:
        deregister(region.address)
    elif error != _ALREADY_REGISTERED:
        raise MoverError(
            f"{name}: cuFile refuses to register {short_size(region.length_bytes)} of device memory (error {error}): "
            "is the GPU's BAR1 window large enough (nvidia-smi -q -d MEMORY)? 'Above 4G decoding' and resizable BAR in "
            f"the BIOS enlarge it; or {_PACKED}"
        )


def held(region: MemoryRegion, registered: ExitStack) -> ExitStack:
    """Count a mover that has ``registered`` a region, and return what ends this. The last one deregisters for all.

    cuFile does not count registrations: one mover's deregistration would make all other movers' transfers bounce.
    """

    def end() -> None:
        _ENDS[region].push(registered)
        _HOLDERS[region] -= 1
        if not _HOLDERS[region]:
            del _HOLDERS[region]
            _ENDS.pop(region).close()

    _HOLDERS[region] += 1
    counted = ExitStack()
    counted.callback(end)
    return counted
