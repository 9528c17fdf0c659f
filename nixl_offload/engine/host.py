"""Host memory of one rank: the memory tier's slots, then the relay slots for moves between two farther tiers.

Threading: the thread that owns the rank makes and closes it; the owner of a slot reads and writes its view. Helper
threads bring pages in at the start, without the GIL.
Ownership: one allocation, made whole at the start, because a kernel that runs out of memory later kills the engine. It
lives as long as any view of it; ``close`` only unlocks its pages.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import platform
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.chunk.checksum import payload_checksums
from nixl_offload.chunk.header import ExpectedRows, HeaderRows, Pages, add_checksums, check_headers, lacks_checksums
from nixl_offload.engine.staging import HostSlot, Slot
from nixl_offload.engine.streams import cuda_runtime
from nixl_offload.errors import LayoutError, TierError
from nixl_offload.hardware import machine
from nixl_offload.hardware.machine import unbound
from nixl_offload.movers.base import MemoryRegion
from nixl_offload.types import PAGE_BYTES, align_up
from nixl_offload.units import format_size, short_size

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20
PIN_PIECE_BYTES = 1 << 30
"""Memory is page-locked in pieces that end at multiples of this *address*, so that progress can be logged. A copy to or
from a device must not cross from one piece into the next: see ``device_packer``."""
LOG_EVERY_S = 5.0
STEP_BYTES = 64 << 20
"""Bytes that a thread brings in at once. Before each step the machine's free memory is checked again."""
MAX_THREADS = 8
"""Of one rank. They clear 20 GB/s or more, which the ranks of a machine divide."""

_MADV_POPULATE_WRITE = 23
_MPOL_PREFERRED = 1
_MBIND = {"x86_64": 237, "aarch64": 235}
_REGISTER_PORTABLE = 1
_NOT_SUPPORTED = 801
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HostSlab:
    """``memory_bytes`` for the memory tier, then ``relay_slots`` slots of ``slot_bytes``; page-aligned, present, and
    page-locked if ``pinned``. A location of the memory tier is a byte offset in it.
    """

    def __init__(
        self,
        *,
        memory_bytes: int,
        relay_slots: int,
        slot_bytes: int,
        pinned: bool = False,
        device: int = 0,
        sharers: int = 1,
        keys: ChunkKeys | None = None,
    ) -> None:
        """Allocate and prefault, by several threads: 0.2 to 2 seconds per GiB on a busy virtual machine of two cores.

        ``pinned`` needs CUDA and makes copies asynchronous; the attribute is False if CUDA cannot lock memory here.
        ``device``: the GPU whose NUMA node is preferred. ``sharers``: ranks that divide a configured ``capacity``, for
        error messages. ``keys``: as for ``SlotHeaders``. Raises TierError with cause ``full`` if the machine or a
        control group does not have that much, or cannot lock it; nothing stays allocated then.
        """
        self.memory_bytes = align_up(memory_bytes)
        slot_bytes = align_up(slot_bytes)
        self.length_bytes = self.memory_bytes + relay_slots * slot_bytes
        if memory_bytes < 0 or relay_slots < 0 or not self.length_bytes:
            raise LayoutError(f"a host slab of {memory_bytes} bytes and {relay_slots} slots of {slot_bytes}")
        self.relay_offsets = tuple(self.memory_bytes + slot * slot_bytes for slot in range(relay_slots))
        self.headers = SlotHeaders(keys)
        self.pinned = pinned
        self._sharers = sharers
        self._pieces: list[int] = []
        """Begins of what is page-locked."""
        began_s = time.monotonic()
        self._require_room(self.length_bytes)
        self._memory: npt.NDArray[np.uint8] | None = self._map()
        self.region = MemoryRegion(self._memory.ctypes.data, self.length_bytes)
        try:
            node = _prefer_node(self.region, device if pinned else None)
            self._fill(self._memory)
        except BaseException:
            self.close()
            raise
        logger.info(
            "Host memory: %s (memory tier %s, %d relay slots of %s), %s, NUMA node %s, in %.1f s",
            short_size(self.length_bytes),
            short_size(self.memory_bytes),
            relay_slots,
            short_size(slot_bytes),
            "page-locked" if self.pinned else "pageable",
            node,
            time.monotonic() - began_s,
        )

    def slot(self, offset: int, slot_bytes: int) -> HostSlot:
        """Return a view of a slot, which belongs to no pool; its ``offset_bytes`` counts from the begin of ``region``.

        Raises LayoutError if it is outside the slab or not page-aligned, or if the slab is closed.
        """
        memory = self._memory
        if memory is None:
            raise LayoutError("the host memory is closed")
        if offset < 0 or slot_bytes < 1 or offset % PAGE_BYTES or offset + slot_bytes > self.length_bytes:
            raise LayoutError(f"a slot of {slot_bytes} bytes at {offset} of {self.length_bytes} bytes of host memory")
        return Slot(-1, offset, memory, slot_bytes)

    def close(self) -> None:
        """Unlock the pages and drop the memory, which is freed with its last view. Idempotent.

        No copy between it and a device may be in flight.
        """
        self._memory = None
        pieces, self._pieces = self._pieces, []
        for address in pieces:
            code = int(_cudart().cudaHostUnregister(address))
            if code:
                logger.warning("Host memory at %#x could not be unlocked: CUDA error %d", address, code)

    def _map(self) -> npt.NDArray[np.uint8]:
        """Reserve addresses, aligned to a huge page; no page is touched yet."""
        try:
            area = mmap.mmap(-1, self.length_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise TierError(
                f"{short_size(self.length_bytes)} of host memory: {error.strerror}", cause="full"
            ) from error
        everything: npt.NDArray[np.uint8] = np.frombuffer(area, dtype=np.uint8)
        start = -everything.ctypes.data % HUGE_PAGE_BYTES
        # Children and core dumps have no use for it, and a child would make the kernel copy pages under a device.
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
            with suppress(OSError):  # a kernel built without it
                area.madvise(advice, start, self.length_bytes)
        return everything[start : start + self.length_bytes]

    def _fill(self, memory: npt.NDArray[np.uint8]) -> None:
        """Bring all pages in, and lock each piece as soon as it is present. Raises TierError."""
        address, end = self.region.address, self.region.address + self.length_bytes
        log_s = time.monotonic() + LOG_EVERY_S
        threads = min(MAX_THREADS, max(2, len(os.sched_getaffinity(0)) // max(1, self._sharers)))
        with unbound(), closing(populate(memory, threads, self._require_room)) as steps:
            for ready_bytes in steps:
                if time.monotonic() >= log_s:
                    log_s = time.monotonic() + LOG_EVERY_S
                    logger.info(
                        "Host memory: %s of %s are ready", short_size(ready_bytes), short_size(self.length_bytes)
                    )
                while self.pinned and address < end:
                    piece_end = min(end, (address // PIN_PIECE_BYTES + 1) * PIN_PIECE_BYTES)
                    if self.region.address + ready_bytes < piece_end:
                        break
                    self.pinned = _lock(address, piece_end - address)
                    if self.pinned:
                        self._pieces.append(address)
                        address = piece_end

    def _require_room(self, wanted_bytes: int) -> None:
        """Raise TierError unless ``wanted_bytes`` are still available, beside a reserve.

        Checked before each step, because other ranks of this machine take memory at the same time. Steps that have
        begun were checked before.
        """
        room = machine.room()
        if wanted_bytes <= room.usable_bytes:
            return
        had_bytes = self.length_bytes - wanted_bytes
        relay_bytes = self.length_bytes - self.memory_bytes
        fits = ((room.usable_bytes + had_bytes - relay_bytes) * self._sharers >> 20) << 20
        ranks = f" (for {self._sharers} ranks)" if self._sharers > 1 else ""
        advice = (
            f"a capacity of {format_size(fits)}{ranks} would do" if fits > 0 else "there is no room for a memory tier"
        )
        raise TierError(
            f"{short_size(self.length_bytes)} of host memory were asked for, {short_size(self.memory_bytes)} of it for "
            f"the memory tier; {short_size(room.available_bytes + had_bytes)} can be had, limited by "
            f"{room.limited_by}: {advice}",
            cause="full",
        )


class SlotHeaders:
    """The header pages of a slab, which the engines of several tiers share. Safe on any thread.

    A store into memory leaves the checksums out, unless a device summed the blocks. The first write-through adds them
    in place, because movers take an image as one extent; and the MAC, if chunks of any tier are authenticated.
    Meanwhile other threads read the page: loads from memory, and write-throughs of the same chunk to other tiers. They
    must not take a half-written page for damage, or send it to storage. So a page is written once, under a lock, and
    ``check`` looks again under that lock at a page that seems damaged. Nothing is summed under it. Namespace, key,
    group and lengths are the same before and after.
    """

    def __init__(self, keys: ChunkKeys | None = None) -> None:
        """``keys``: of the tiers whose chunks are authenticated, or None."""
        self._keys = keys
        self._lock = threading.Lock()

    def check(self, pages: Sequence[Pages] | Pages, expect: ExpectedRows) -> HeaderRows:
        """As ``check_headers``, for pages with and without checksums."""
        headers = check_headers(pages, expect, may_lack_checksums=True)
        if headers.errors:
            with self._lock:
                headers = check_headers(pages, expect, may_lack_checksums=True)
        return headers

    def complete(self, page: Pages, rows: npt.NDArray[np.uint8]) -> bool:
        """Add what a checked page lacks before a tier gets it, unless another thread does so first; return False if it
        lacks nothing. ``rows``: the blocks from the first valid one to the last, contiguous uint8 of shape (n,
        block_bytes). Raises LayoutError as ``add_checksums``.
        """
        with self._lock:
            if not self._lacks_something(page):
                return False
            whole = page.copy()
        if lacks_checksums(whole):
            whole = add_checksums(whole, *payload_checksums([rows]))
        if self._keys is not None:
            whole = self._keys.signed(whole, rows)
        with self._lock:
            if self._lacks_something(page):  # else a tier may already be sending it
                page[:] = whole
        return True

    def _lacks_something(self, page: Pages) -> bool:
        return lacks_checksums(page) or (self._keys is not None and not self._keys.knows(page))


def populate(memory: npt.NDArray[np.uint8], threads: int, before: Callable[[int], None]) -> Generator[int, None, None]:
    """Make ``memory`` present. Yields after each step how many bytes from its begin are present.

    ``before`` is called before each step with the bytes that are left; its exceptions are raised here. Raises TierError
    with cause ``full`` if the kernel refuses. The caller closes the iterator, which waits for the helper threads.
    """
    total_bytes = len(memory)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="nixl-offload-populate")
    steps: deque[tuple[int, Future[None]]] = deque()
    try:
        for begin in range(0, total_bytes, STEP_BYTES):
            before(total_bytes - begin)
            end = min(total_bytes, begin + STEP_BYTES)
            try:
                step = pool.submit(_bring_in, memory[begin:end])
            except RuntimeError:  # no thread can be started: this one does it
                _bring_in(memory[begin:end])
                step = Future()
                step.set_result(None)
            steps.append((end, step))
            while len(steps) > threads or (steps and (end == total_bytes or steps[0][1].done())):
                ready_bytes, step = steps.popleft()
                step.result()
                yield ready_bytes
    finally:
        pool.shutdown(cancel_futures=True)


def _bring_in(memory: npt.NDArray[np.uint8]) -> None:
    """Make memory present. Raises TierError."""
    while _LIBC.madvise(memory.ctypes.data, len(memory), _MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        if code == errno.EINVAL:  # Linux before 5.14
            memory[::PAGE_BYTES] = 0
            break
        if code not in {errno.EINTR, errno.EAGAIN}:
            raise TierError(f"host memory cannot be had: {os.strerror(code)}", cause="full")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it bare


def _lock(address: int, length_bytes: int) -> bool:
    """Page-lock for all CUDA contexts of the process. Returns False, with a warning, if CUDA cannot lock memory here.
    Raises TierError.

    Copies from and to pageable memory keep the order of their stream; those to it block the calling thread.
    """
    try:
        code = int(_cudart().cudaHostRegister(address, length_bytes, _REGISTER_PORTABLE))
        why = f"CUDA error {code}"
    except (RuntimeError, AssertionError) as error:  # torch without CUDA, or a driver that does not start
        code, why = -1, str(error)
    if code == 0:
        return True
    if code == _NOT_SUPPORTED:
        with suppress(OSError, AttributeError):
            cuda_runtime().cudaGetLastError()  # else torch takes it for the error of its next kernel
        logger.warning(
            "Host memory stays pageable: CUDA cannot page-lock it here (error 801, confidential computing). Copies "
            "between it and the GPU are slower"
        )
        return False
    soft_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "none" if soft_bytes == resource.RLIM_INFINITY else short_size(soft_bytes)
    raise TierError(
        f"{short_size(length_bytes)} of host memory could not be page-locked: {why}; RLIMIT_MEMLOCK is {limit} "
        "(ulimit -l): a smaller capacity or a higher limit may do",
        cause="full",
    )


def _prefer_node(region: MemoryRegion, device: int | None) -> str:
    """Ask for pages on the NUMA node of a GPU, or of the caller's core. Returns the node, or why none is preferred.
    Never raises.
    """
    try:
        if device is not None:
            facts: Any = torch.cuda.get_device_properties(device)  # torch's stubs know no PCI address
            address = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
            node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
        else:
            (home,) = Path(f"/sys/devices/system/cpu/cpu{_LIBC.sched_getcpu()}").glob("node[0-9]*")
            node = int(home.name.removeprefix("node"))
        mask = (ctypes.c_ulong * (max(0, node) // 64 + 1))()
        mask[node // 64] = 1 << node % 64
        call = _MBIND[platform.machine()]
        arguments = (region.address, region.length_bytes, _MPOL_PREFERRED, ctypes.addressof(mask), 64 * len(mask) + 1)
        if node < 0 or _LIBC.syscall(ctypes.c_long(call), *map(ctypes.c_ulong, arguments), ctypes.c_ulong(0)):
            return f"any ({node} cannot be asked for)"
        return str(node)
    except Exception as error:  # noqa: BLE001 - locality is a wish
        return f"any ({error!r})"
