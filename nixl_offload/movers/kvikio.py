"""KvikIO behind the mover contract: device or host memory and files, by cuFile or by KvikIO's own POSIX path.

If cuFile does not take a file (``path_of`` says which it is), KvikIO reads and writes through page-locked bounce
buffers: its compatibility mode. cuFile has such a mode of its own, which ``hardware.gds`` reports.

Threading: driven by one thread. A thread of the mover's own opens files and hands pieces to KvikIO, because both may
block: with cuFile, KvikIO waits for the device's default stream first. KvikIO's pool moves the bytes. One process: its
threads do not survive a fork, and a forked child must end by ``os._exit``, because KvikIO's destructors wait for them.
Process-wide in KvikIO, set by the mover that starts last: the number of threads, the size of bounce buffers, O_DIRECT
where a file takes it, no size below which the calling thread does the I/O. Whether cuFile may be used stays as
``KVIKIO_COMPAT_MODE`` says (auto, unless set).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Literal

from nixl_offload.errors import MoverError
from nixl_offload.keep import keep_forever, keep_in_children
from nixl_offload.movers.base import LIBRARIES, FileId, MemoryId, MemoryKind, MemoryRegion, MoverLimits, Op
from nixl_offload.movers.kvikio_library import KVIKIO_ERRORS, load_kvikio, words_of
from nixl_offload.movers.launcher import Launcher
from nixl_offload.movers.pinning import pinning_limit
from nixl_offload.movers.tracked import FileEntry, TrackedMover, TrackedTransfer
from nixl_offload.types import PAGE_BYTES

logger = logging.getLogger(__name__)

IoPath = Literal["cufile", "compat"]

_ALREADY_REGISTERED = "already registered"
_DEFAULTS = threading.Lock()
"""KvikIO opens a file by process-wide defaults. Movers that open files at once take turns."""
_DEFAULTS_WAIT_S = 5.0
"""Then a file is opened in any case: storage hangs under the mover that holds the lock."""


class _CudaArray:
    """A piece of memory as KvikIO takes it. KvikIO finds out by itself whether it is a device's."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, address: int, length_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@dataclass(slots=True, eq=False)
class _OpenFile:
    """KvikIO's side of a file: it opens by path only, so it is given the path of a descriptor."""

    handle: Any
    io_path: IoPath


@dataclass(slots=True, eq=False)
class _KvikioTransfer(TrackedTransfer):
    pieces: list[tuple[int, Any]] = field(default_factory=list)
    """Length and KvikIO's future of each piece not known to be done; filled by the launching thread."""
    launch: Future[None] | None = None
    failure: str | None = None
    """Of the piece that failed last; ``error`` is set when all have ended."""


class KvikioMover(TrackedMover[_KvikioTransfer]):
    """Moves bytes by KvikIO. Raises MoverUnavailableError on the first use where KvikIO or the driver is missing.

    ``threads`` move at once, each at most ``bounce_bytes`` at a time; where KvikIO has to bounce, each holds that much
    page-locked memory. After a failure the other pieces of the transfer go on, and the state turns FAILED only when all
    have ended: no quarantine. When ``close`` cannot drain within ``close_timeout_s``, memory and files are leaked with
    one warning, because threads may still write there.
    """

    transfer_type = _KvikioTransfer

    def __init__(self, threads: int = 8, bounce_bytes: int = 16 << 20, *, close_timeout_s: float = 30.0) -> None:
        # KvikIO would take bytes off the grid as well, but by the page cache and another copy.
        limits = MoverLimits(alignment_bytes=PAGE_BYTES)
        super().__init__("kvikio", frozenset({MemoryKind.VRAM, MemoryKind.DRAM}), limits)
        self._threads = threads
        self._bounce_bytes = max(bounce_bytes // PAGE_BYTES, 1) * PAGE_BYTES  # pieces keep to the grid
        self._close_timeout_s = close_timeout_s
        self._kvikio: Any = None
        self._launcher: Launcher | None = None
        self._opened: dict[FileEntry, Future[_OpenFile]] = {}
        self._in_cufile: set[MemoryId] = set()
        """Regions by which cuFile knows their allocations."""
        keep_in_children(self)  # handles that are collected deregister their files with cuFile

    def connect(self) -> None:
        """Load KvikIO and set its defaults now. Raises MoverUnavailableError."""
        self._check_usable()

    def _check_usable(self) -> None:
        super()._check_usable()
        if self._kvikio is None:
            with LIBRARIES:
                self._kvikio = load_kvikio(self.name, self._threads, self._bounce_bytes)
            self._launcher = Launcher("nixl-offload-kvikio")

    # Regions and files

    def register_memory(self, region: MemoryRegion) -> MemoryId:
        """Device memory is registered with cuFile, with all of the allocation that it is part of."""
        memory = super().register_memory(region)
        if region.kind is not MemoryKind.VRAM:
            return memory
        try:
            if not self._kvikio.defaults.is_compat_mode_preferred():
                held_bytes = sum(self._memory(each).length_bytes for each in self._in_cufile)
                pinning_limit(self.name, region.length_bytes, held_bytes)
            with LIBRARIES:
                self._kvikio.memory_register(_CudaArray(region.address, region.length_bytes))
            self._in_cufile.add(memory)
        except KVIKIO_ERRORS as error:
            if _ALREADY_REGISTERED in str(error):  # another region of the same allocation
                return memory
            super().unregister_memory(memory)
            raise MoverError(
                f"{self.name}: cannot register {region.length_bytes} bytes of device memory: {words_of(error)}; "
                "nixl-offload check says what cuFile lacks here, and KVIKIO_COMPAT_MODE=ON does without cuFile"
            ) from error
        except MoverError:
            super().unregister_memory(memory)
            raise
        return memory

    def unregister_memory(self, memory: MemoryId) -> None:
        region = self._memory(memory)
        super().unregister_memory(memory)
        if memory not in self._in_cufile:
            return
        self._in_cufile.remove(memory)
        try:
            with LIBRARIES:
                self._kvikio.memory_deregister(_CudaArray(region.address, region.length_bytes))
        except KVIKIO_ERRORS as error:
            raise MoverError(f"{self.name}: cannot unregister device memory: {words_of(error)}") from error

    def _add_file(self, entry: FileEntry) -> FileId:
        """Have KvikIO open it anew, on the mover's own thread; where that fails, the transfers fail."""
        assert self._launcher is not None
        self._opened[entry] = self._launcher.submit(self._open, entry)
        return super()._add_file(entry)

    def _open(self, entry: FileEntry) -> _OpenFile:
        """Open by KvikIO what ``entry.fd`` is, on the launching thread. Raises MoverError."""
        has_turn = _DEFAULTS.acquire(timeout=_DEFAULTS_WAIT_S)
        try:
            return self._open_with_defaults(entry)
        finally:
            if has_turn:
                _DEFAULTS.release()

    def _open_with_defaults(self, entry: FileEntry) -> _OpenFile:
        kvikio = self._kvikio
        modes = kvikio.CompatMode
        writes = (fcntl.fcntl(entry.fd, fcntl.F_GETFL) & os.O_ACCMODE) == os.O_RDWR
        arguments = f"/proc/self/fd/{entry.fd}", "r+" if writes else "r"
        try:
            # Without either, KvikIO never opens the file with O_DIRECT.
            with kvikio.defaults.set({"auto_direct_io_read": entry.direct, "auto_direct_io_write": entry.direct}):
                if not kvikio.defaults.is_compat_mode_preferred():
                    try:
                        with kvikio.defaults.set("compat_mode", modes.OFF):
                            return _OpenFile(kvikio.CuFile(*arguments), "cufile")
                    except KVIKIO_ERRORS as error:
                        if kvikio.defaults.get("compat_mode") == modes.OFF:
                            raise
                        logger.warning(
                            "%s: cuFile does not take %s (%s); bouncing through host memory",
                            self.name,
                            entry.path,
                            words_of(error),
                        )
                with kvikio.defaults.set("compat_mode", modes.ON):
                    return _OpenFile(kvikio.CuFile(*arguments), "compat")
        except KVIKIO_ERRORS as error:
            raise MoverError(f"{self.name}: cannot open {entry.path}: {words_of(error)}") from error

    def path_of(self, file: FileId) -> IoPath:
        """How bytes of device memory and this file travel: by cuFile, or by KvikIO's own bounce buffers.

        Waits until the file is open. Raises MoverError.
        """
        return self._opened[self._file(file)].result().io_path

    def close_file(self, file: FileId) -> None:
        entry = self._pop_file(file)
        opened = self._opened.pop(entry)
        wait([opened])  # else the path of the descriptor could be somebody else's when KvikIO comes to open it
        if opened.exception() is None:
            assert self._launcher is not None
            self._launcher.submit(opened.result().handle.close)
        os.close(entry.fd)

    # Transfers

    def _launch(self, transfer: _KvikioTransfer) -> None:
        assert self._launcher is not None
        transfer.launch = self._launcher.submit(self._start_pieces, transfer, self._opened[transfer.file])

    def _start_pieces(self, transfer: _KvikioTransfer, opened: Future[_OpenFile]) -> None:
        """Hand all pieces to KvikIO's pool. Raises MoverError or what KvikIO raises; some may be on their way then."""
        handle = opened.result().handle
        start = handle.pread if transfer.op is Op.READ else handle.pwrite
        for address, length, offset in transfer.rows():
            future = start(_CudaArray(address, length), length, offset, self._bounce_bytes)
            transfer.pieces.append((length, future))

    def _advance(self, transfer: _KvikioTransfer) -> None:
        assert transfer.launch is not None
        if not transfer.launch.done():
            return
        while transfer.pieces and transfer.pieces[-1][1].done():
            length, future = transfer.pieces.pop()
            try:
                moved = future.get()
            except KVIKIO_ERRORS as error:
                words = words_of(error)
                # That is what -1 looks like; the errno that went with it is lost.
                lost = transfer.op is Op.READ and words == os.strerror(errno.EPERM)
                transfer.failure = "an error of cuFile's that KvikIO does not hand on" if lost else words
            else:
                if moved != length:
                    transfer.failure = f"short, {moved} of {length} bytes"
        if transfer.pieces:
            return
        refusal = transfer.launch.exception()
        transfer.launch = None
        failure = transfer.failure or (words_of(refusal) if refusal is not None else None)
        where = f"{self.name}: {transfer.op.value} of {transfer.file.path}"
        self._finish(transfer, None if failure is None else f"{where} failed: {failure}")

    # The end

    def close(self) -> None:
        """Wait ``close_timeout_s`` at most."""
        if not self._may_close():
            return
        end_s = time.monotonic() + self._close_timeout_s
        self._drain(self._close_timeout_s)
        unopened = wait(self._opened.values(), max(0.0, end_s - time.monotonic())).not_done
        if self._in_flight or unopened:
            logger.warning(
                "%s: %d transfers did not end, %d files were not open, within %.0f s; leaking their memory and files",
                self.name,
                len(self._in_flight),
                len(unopened),
                self._close_timeout_s,
            )
            # KvikIO's handles close themselves when collected; these must not be.
            keep_forever((self._opened, list(self._in_flight)))
            self._abandon()
            self._closed = True
            if self._launcher is not None:
                self._launcher.end(wait=False)
            return
        for file in list(self._files):
            self._let_go(self.close_file, file)
        for memory in list(self._memories):
            self._let_go(self.unregister_memory, memory)
        self._closed = True
        if self._launcher is not None:
            self._launcher.end(wait=True)
