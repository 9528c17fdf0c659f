"""NIXL's plugins for files behind the mover contract: POSIX (aio, io_uring) and GDS_MT are one class; the rest is data.

Threading: driven by one thread; the plugins may have their own. One process: NIXL does not survive a fork.
Ownership: a transfer's handle is never released while in flight, because NIXL would return normally and the kernel
would go on writing. Handles are kept, polled to their end, and released after. What cannot be drained is leaked on
purpose.
NIXL itself is started when the first region or file arrives.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nixl_offload.errors import MoverError
from nixl_offload.keep import keep_forever, keep_in_children
from nixl_offload.movers.base import LIBRARIES, FileId, MemoryId, MemoryKind, MemoryRegion, MoverLimits
from nixl_offload.movers.nixl_agent import NixlAgent
from nixl_offload.movers.nixl_plugins import NixlPlugin
from nixl_offload.movers.pinning import add_holder, check_pinning, remove_holder
from nixl_offload.movers.tracked import FileEntry, TrackedMover, TrackedTransfer
from nixl_offload.types import PAGE_BYTES


@dataclass(slots=True, eq=False)
class _NixlTransfer(TrackedTransfer):
    handle: Any = None


class NixlMover(TrackedMover[_NixlTransfer]):
    """One agent with one plugin. Raises MoverUnavailableError on the first use when the plugin cannot run here.

    After a failure: only this transfer is lost, the mover goes on. Each of these plugins reports an error only when
    nothing of the handle is in flight; ``Transfer.quarantine`` is set where a transfer was not started whole, and for
    what ``close`` cannot drain within ``close_timeout_s``.
    """

    transfer_type = _NixlTransfer

    def __init__(
        self, plugin: NixlPlugin, *, params: Mapping[str, str] | None = None, close_timeout_s: float = 30.0
    ) -> None:
        super().__init__(plugin.name, plugin.memory_kinds, MoverLimits(alignment_bytes=PAGE_BYTES), close_timeout_s)
        self._is_cufile = plugin.plugin == "GDS_MT"
        self._nixl = NixlAgent(plugin, params or {})
        self._registered: dict[MemoryId | FileId, Any] = {}
        keep_in_children(self)  # agents do not survive a fork, and handles that are collected release themselves

    def _check_usable(self) -> None:
        super()._check_usable()
        self._nixl.start()
        self.memory_kinds = self._nixl.memory_kinds

    def _register(self, memory: MemoryId, region: MemoryRegion) -> None:
        by_cufile = self._is_cufile and region.kind is MemoryKind.VRAM
        with LIBRARIES:
            if by_cufile:
                check_pinning(self.name, region)
            self._registered[memory] = self._nixl.register_memory(region)
            if by_cufile:
                add_holder(region)

    def _unregister(self, memory: MemoryId, region: MemoryRegion) -> None:
        with LIBRARIES:
            if self._is_cufile and region.kind is MemoryKind.VRAM:
                remove_holder(region, lambda: self._deregister("memory", memory))
            else:
                self._deregister("memory", memory)

    def _add_file(self, entry: FileEntry) -> FileId:
        try:
            # Empty meta info is fd mode: the device id is the descriptor.
            registered = self._nixl.register(entry.path, "FILE", (0, entry.length_bytes, entry.fd, ""))
        except MoverError:
            os.close(entry.fd)
            raise
        file = super()._add_file(entry)
        self._registered[file] = registered
        return file

    def close_file(self, file: FileId) -> None:
        entry = self._pop_file(file)
        try:
            self._deregister(entry.path, file)
        finally:
            os.close(entry.fd)

    def _deregister(self, what: str, handle: MemoryId | FileId) -> None:
        self._nixl.deregister(what, self._registered.pop(handle))
        if self._closed and not self._registered:
            self._nixl.forget()

    def _launch(self, transfer: _NixlTransfer) -> None:
        transfer.handle = self._nixl.prepare(transfer, "FILE", transfer.file.fd)
        try:
            state = self._nixl.begin(transfer.handle)
        except MoverError as error:
            self._finish(transfer, str(error), quarantine=True)
        else:
            self._end_unless_pending(transfer, state)

    def _advance(self, transfer: _NixlTransfer) -> None:
        try:
            state = self._nixl.check(transfer.handle)
        except MoverError as error:
            self._finish(transfer, f"{transfer.op.value} of {transfer.file.path} failed: {error}")
        else:
            self._end_unless_pending(transfer, state)

    def _end_unless_pending(self, transfer: _NixlTransfer, state: str) -> None:
        if state != "PROC":
            what = f"{self.name}: {transfer.op.value} of {transfer.file.path} failed: {state}"
            self._finish(transfer, None if state == "DONE" else what)

    def _finish(self, transfer: _NixlTransfer, error: str | None, *, quarantine: bool = False) -> None:
        """Make final; a quarantined transfer keeps its handle for ever."""
        super()._finish(transfer, error, quarantine=quarantine)
        if quarantine:
            keep_forever(transfer)
        elif transfer.handle is not None:
            self._nixl.release(transfer.handle)
            transfer.handle = None

    def close(self) -> None:
        """Wait ``close_timeout_s`` at most."""
        if not self._may_close():
            return
        self._drain(self._close_timeout_s)
        self._closed = True
        self._release_all()
        if not self._registered:  # else the last mover that shares this memory ends the agent
            self._nixl.forget()
