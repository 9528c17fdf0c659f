"""A mover by KvikIO: device or host memory and files, by cuFile or by KvikIO's own POSIX path.

If cuFile does not take a file (see ``path_of``), KvikIO uses its compatibility mode: page-locked bounce buffers. cuFile
also has a compatibility mode, which ``hardware.gds`` reports.

Threading: as ``ThreadedMover``. The mover's threads open files and hand pieces to KvikIO, because both may block: with
cuFile, KvikIO waits for the device's default stream first. KvikIO's pool moves the bytes. Its threads do not survive a
fork, and its destructors wait for them: a forked child must end by ``os._exit``. KvikIO's settings are process-wide,
and the mover that starts last sets them: number of threads, size of bounce buffers, O_DIRECT if a file takes it, all
I/O in the pool. ``KVIKIO_COMPAT_MODE`` (default auto) decides whether cuFile is used.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import re
import threading
from collections.abc import Sequence
from typing import Any, Literal

from nixl_offload.errors import MoverError, MoverUnavailableError
from nixl_offload.keep import keep_in_children
from nixl_offload.movers.base import FILE_LIMITS, LIBRARIES, FileEntry, FileId, MemoryId, MemoryKind, MemoryRegion, Op
from nixl_offload.movers.pinning import pinning_limit
from nixl_offload.movers.threaded import Row, ThreadedMover, ThreadedTransfer
from nixl_offload.types import PAGE_BYTES

logger = logging.getLogger(__name__)

IoPath = Literal["cufile", "compat"]

_ERRORS = (RuntimeError, OSError, ValueError, MemoryError)
"""Exceptions of KvikIO: nearly always RuntimeError; the others translate C++ exceptions."""
_WHERE = re.compile(r"^[A-Za-z/ ]+ at: \S+:\d+: ")
_ALREADY_REGISTERED = "already registered"
_DEFAULTS = threading.Lock()
"""KvikIO opens a file by process-wide defaults, so threads take turns."""
_DEFAULTS_WAIT_S = 5.0
"""After this wait a file is opened without the lock: storage hangs under its holder."""


class _CudaArray:
    """A piece of memory for KvikIO, which finds out by itself whether it is device memory."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, address: int, length_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class KvikioMover(ThreadedMover):
    """Moves bytes by KvikIO. The first use raises MoverUnavailableError if KvikIO or the driver is missing.

    ``threads`` pieces of at most ``bounce_bytes`` move at once. In compatibility mode each holds that much page-locked
    memory. A transfer is FAILED only when all of its I/O has ended: no quarantine. If ``close`` cannot drain within
    ``close_timeout_s``, it leaks memory and files with one warning, because threads may still write there.
    """

    def __init__(self, threads: int = 8, bounce_bytes: int = 16 << 20, *, close_timeout_s: float = 30.0) -> None:
        super().__init__(
            "kvikio",
            FILE_LIMITS,  # KvikIO also takes unaligned bytes, but by the page cache and another copy
            threads=threads,
            close_timeout_s=close_timeout_s,
            memory_kinds=frozenset(MemoryKind),
        )
        self._bounce_bytes = max(bounce_bytes // PAGE_BYTES, 1) * PAGE_BYTES  # keeps pieces aligned
        self._kvikio: Any = None
        self._opened: dict[FileEntry, tuple[Any, IoPath]] = {}
        """KvikIO's handle of a file, and the path of device memory to it."""
        self._in_cufile: set[MemoryId] = set()
        """Regions whose registration with cuFile covers their allocation."""
        keep_in_children(self)  # a collected handle deregisters its file with cuFile

    def _check_usable(self) -> None:
        super()._check_usable()
        if self._kvikio is None:
            with LIBRARIES:
                self._kvikio = _load(self.name, self._threads, self._bounce_bytes)

    def _register(self, memory: MemoryId, region: MemoryRegion) -> None:
        """Register device memory with cuFile. This covers the whole allocation around it."""
        if region.kind is not MemoryKind.VRAM:
            return
        if not self._kvikio.defaults.is_compat_mode_preferred():
            held_bytes = sum(self._memory(each).length_bytes for each in self._in_cufile)
            pinning_limit(self.name, region.length_bytes, held_bytes)
        try:
            with LIBRARIES:
                self._kvikio.memory_register(_CudaArray(region.address, region.length_bytes))
            self._in_cufile.add(memory)
        except _ERRORS as error:
            if _ALREADY_REGISTERED in str(error):  # by another region of the same allocation
                return
            raise MoverError(
                f"{self.name}: cannot register {region.length_bytes} bytes of device memory: {_describe(error)}; "
                "nixl-offload check says what cuFile lacks here, and KVIKIO_COMPAT_MODE=ON does without cuFile"
            ) from error

    def _unregister(self, memory: MemoryId, region: MemoryRegion) -> None:
        if memory not in self._in_cufile:
            return
        self._in_cufile.remove(memory)
        try:
            with LIBRARIES:
                self._kvikio.memory_deregister(_CudaArray(region.address, region.length_bytes))
        except _ERRORS as error:
            raise MoverError(f"{self.name}: cannot unregister device memory: {_describe(error)}") from error

    def path_of(self, file: FileId) -> IoPath:
        """Return how bytes move between device memory and this file: by cuFile or KvikIO's bounce buffers.

        Opens the file if no transfer has. Raises MoverError.
        """
        return self._open(self._file(file))[1]

    def _unregister_file(self, file: FileId, entry: FileEntry) -> None:
        if entry in self._opened:
            self._opened.pop(entry)[0].close()

    def _move(self, transfer: ThreadedTransfer, rows: Sequence[Row]) -> None:
        """Hand all rows to KvikIO's pool and wait for all, even if one fails."""
        handle, _ = self._open(transfer.file)
        start = handle.pread if transfer.op is Op.READ else handle.pwrite
        futures, failure = [], None
        try:
            for address, length, offset in rows:
                futures.append((length, start(_CudaArray(address, length), length, offset, self._bounce_bytes)))
        except _ERRORS as error:
            failure = _describe(error)
        for length, future in futures:
            try:
                moved = future.get()
            except _ERRORS as error:
                words = _describe(error)
                # cuFile's -1 looks like EPERM; its errno is lost.
                lost = transfer.op is Op.READ and words == os.strerror(errno.EPERM)
                failure = "an error of cuFile's that KvikIO does not hand on" if lost else words
            else:
                if moved != length:
                    failure = f"short, {moved} of {length} bytes"
        if failure is not None:
            raise MoverError(f"{transfer.op.value} of {transfer.file.path} failed: {failure}")

    def _open(self, entry: FileEntry) -> tuple[Any, IoPath]:
        """Open a file by KvikIO, once, by the path of its descriptor: KvikIO takes only paths. Raises MoverError."""
        has_turn = entry not in self._opened and _DEFAULTS.acquire(timeout=_DEFAULTS_WAIT_S)
        try:
            if entry not in self._opened:
                self._opened[entry] = self._open_with_defaults(entry)
            return self._opened[entry]
        finally:
            if has_turn:
                _DEFAULTS.release()

    def _open_with_defaults(self, entry: FileEntry) -> tuple[Any, IoPath]:
        kvikio = self._kvikio
        modes = kvikio.CompatMode
        writes = (fcntl.fcntl(entry.fd, fcntl.F_GETFL) & os.O_ACCMODE) == os.O_RDWR
        arguments = f"/proc/self/fd/{entry.fd}", "r+" if writes else "r"
        try:
            # With both off, KvikIO never opens the file with O_DIRECT.
            with kvikio.defaults.set({"auto_direct_io_read": entry.direct, "auto_direct_io_write": entry.direct}):
                if not kvikio.defaults.is_compat_mode_preferred():
                    try:
                        with kvikio.defaults.set("compat_mode", modes.OFF):
                            return kvikio.CuFile(*arguments), "cufile"
                    except _ERRORS as error:
                        if kvikio.defaults.get("compat_mode") == modes.OFF:
                            raise
                        logger.warning(
                            "%s: cuFile does not take %s (%s); bouncing through host memory",
                            self.name,
                            entry.path,
                            _describe(error),
                        )
                with kvikio.defaults.set("compat_mode", modes.ON):
                    return kvikio.CuFile(*arguments), "compat"
        except _ERRORS as error:
            raise MoverError(f"cannot open {entry.path}: {_describe(error)}") from error


def _load(name: str, threads: int, bounce_bytes: int) -> Any:
    """Return KvikIO with its defaults set. Raises MoverUnavailableError."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MoverUnavailableError(
            f"{name}: no NVIDIA driver: libcuda.so.1 cannot be loaded, and KvikIO wants it even for host memory"
        ) from error
    try:
        import kvikio
        import kvikio.defaults
    except ModuleNotFoundError as error:
        raise MoverUnavailableError(
            f"{name}: {error.name} is not installed; kvikio-cu13 or kvikio-cu12 has it, whichever fits torch's CUDA"
        ) from error
    except (ImportError, *_ERRORS) as error:
        raise MoverUnavailableError(f"{name}: KvikIO cannot be loaded: {_describe(error)}") from error
    settings: dict[str, object] = {
        "bounce_buffer_size": bounce_bytes,
        "gds_threshold": 0,
        "auto_direct_io_read": True,
        "auto_direct_io_write": True,
    }
    if kvikio.defaults.get("num_threads") != threads:  # setting it, even unchanged, waits for an idle pool
        settings["num_threads"] = threads
    try:
        kvikio.defaults.set(settings)
    except _ERRORS as error:
        raise MoverUnavailableError(f"{name}: KvikIO takes no such setting: {_describe(error)}") from error
    return kvikio


def _describe(error: BaseException) -> str:
    """Return the error's text without the position in KvikIO's source."""
    return _WHERE.sub("", " ".join(str(error).split())) or type(error).__name__
