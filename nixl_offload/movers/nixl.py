"""NIXL's plugins behind the mover contract: POSIX (aio, io_uring), GDS_MT and OBJ are one class; the rest is data.

Threading: driven by one thread; the plugins may have their own. One process: NIXL does not survive a fork.
Ownership: a transfer's handle is never released while in flight, because NIXL would return normally and the kernel
would go on writing. Handles are kept, polled to their end, and released after. What cannot be drained is leaked on
purpose.
NIXL itself is started when the first region, file or object arrives, or by ``connect``.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nixl_offload.errors import MoverError
from nixl_offload.keep import keep_forever, keep_in_children
from nixl_offload.movers.base import LIBRARIES, FileId, MemoryId, MemoryKind, MemoryRegion, Mover
from nixl_offload.movers.nixl_agent import NixlAgent, descriptors, words
from nixl_offload.movers.nixl_plugins import NixlPlugin
from nixl_offload.movers.pinning import add_holder, check_pinning, remove_holder
from nixl_offload.movers.tracked import FileEntry, TrackedMover, TrackedTransfer

logger = logging.getLogger(__name__)

_object_numbers = itertools.count(1)
"""Never one twice: NIXL finds an object by its number, and a second name for it would silently win."""


@dataclass(slots=True, eq=False)
class _NixlTransfer(TrackedTransfer):
    handle: Any = None


class NixlMover(TrackedMover[_NixlTransfer]):
    """One agent with one plugin. Raises MoverUnavailableError on the first use when the plugin cannot run here.

    After a failure: only this transfer is lost, the mover goes on. Each of these plugins reports an error only when
    nothing of the handle is in flight; ``Transfer.quarantine`` is set where a transfer was not started whole, and for
    what ``close`` cannot drain within ``close_timeout_s``. Agent, handles and files of the latter are leaked with one
    warning, because freeing them would free memory under the kernel.
    """

    transfer_type = _NixlTransfer

    def __init__(
        self, plugin: NixlPlugin, *, params: Mapping[str, str] | None = None, close_timeout_s: float = 30.0
    ) -> None:
        super().__init__(plugin.name, plugin.memory_kinds, plugin.limits)
        self._plugin = plugin
        self._nixl = NixlAgent(plugin, {**plugin.params, **(params or {})})
        self._close_timeout_s = close_timeout_s
        self._registered: dict[MemoryId | FileId, Any] = {}
        self._quarantined: list[_NixlTransfer] = []
        keep_in_children(self)  # agents do not survive a fork, and handles that are collected release themselves

    def connect(self) -> None:
        """Start NIXL and its plugin now, which reaches nothing yet. Raises MoverUnavailableError."""
        self._check_usable()

    def _check_usable(self) -> None:
        super()._check_usable()
        self._nixl.get()
        self.memory_kinds = self._nixl.memory_kinds

    # Regions, files and objects

    def register_memory(self, region: MemoryRegion) -> MemoryId:
        memory = super().register_memory(region)
        try:
            with LIBRARIES:
                if self._goes_by_cufile(region):
                    check_pinning(self.name, region)
                descriptor = (region.address, region.length_bytes, region.device_id, "")
                self._registered[memory] = self._register("memory", region.kind.name, descriptor)
                if self._goes_by_cufile(region):
                    add_holder(region)
        except MoverError:
            super().unregister_memory(memory)
            raise
        return memory

    def unregister_memory(self, memory: MemoryId) -> None:
        region = self._memory(memory)
        super().unregister_memory(memory)
        with LIBRARIES:
            if self._goes_by_cufile(region):
                remove_holder(region, lambda: self._deregister("memory", memory))
            else:
                self._deregister("memory", memory)

    def _goes_by_cufile(self, region: MemoryRegion) -> bool:
        return self._plugin.plugin == "GDS_MT" and region.kind is MemoryKind.VRAM

    def adopt_file(self, fd: int, path: str, length_bytes: int, *, direct: bool) -> FileId:
        if self._plugin.target != "FILE":
            return Mover.adopt_file(self, fd, path, length_bytes, direct=direct)
        return super().adopt_file(fd, path, length_bytes, direct=direct)

    def _add_file(self, entry: FileEntry) -> FileId:
        try:
            # Empty meta info is fd mode: the device id is the descriptor.
            registered = self._register(entry.path, "FILE", (0, entry.length_bytes, entry.fd, ""))
        except MoverError:
            os.close(entry.fd)
            raise
        file = super()._add_file(entry)
        self._registered[file] = registered
        return file

    def open_object(self, name: str, length_bytes: int) -> FileId:
        self._check_usable()
        if self._plugin.target != "OBJ":
            return super().open_object(name, length_bytes)
        number = next(_object_numbers)
        registered = self._register(name, "OBJ", (0, length_bytes, number, self._plugin.key_prefix + name))
        file = super()._add_file(FileEntry(number, name, length_bytes))
        self._registered[file] = registered
        return file

    def close_file(self, file: FileId) -> None:
        entry = self._pop_file(file)
        try:
            self._deregister(entry.path, file)
        finally:
            if self._plugin.target == "FILE":
                os.close(entry.fd)

    def _register(self, what: str, kind: str, descriptor: tuple[int, int, int, str]) -> Any:
        agent = self._nixl.get()
        return self._nixl.call(
            f"register {what}", lambda: agent.register_memory([descriptor], kind, [self._plugin.plugin])
        )

    def _deregister(self, what: str, handle: MemoryId | FileId) -> None:
        agent, registered = self._nixl.get(), self._registered.pop(handle)
        self._nixl.call(f"deregister {what}", lambda: agent.deregister_memory(registered, [self._plugin.plugin]))
        if self._closed and not self._registered:
            self._nixl.forget()

    # Transfers

    def _prepare(self, transfer: _NixlTransfer) -> None:
        mem, fil, region = transfer.mem, transfer.fil, transfer.region
        if transfer.bytes_total > self.limits.max_extent_bytes:
            mem, fil = mem[::-1], fil[::-1]  # NIXL does not merge neighbours in falling order to more than the limit
        agent = self._nixl.get()
        transfer.handle = self._nixl.call(
            "initialize transfer",
            lambda: agent.initialize_xfer(
                transfer.op.name,
                agent.get_xfer_descs(descriptors(mem, region.address, region.device_id), region.kind.name),
                agent.get_xfer_descs(descriptors(fil, 0, transfer.file.fd), self._plugin.target),
                self._nixl.name,
                b"",
                [self._plugin.plugin],
            ),
        )

    def _launch(self, transfer: _NixlTransfer) -> None:
        try:
            state = self._nixl.get().transfer(transfer.handle)
        except self._nixl.errors as error:
            # Part of it may be queued in the plugin or in the kernel, and nothing would ever tell.
            self._finish(transfer, f"{self.name}: not started whole: {words(error)}", quarantine=True)
        else:
            self._settle(transfer, state)

    def _advance(self, transfer: _NixlTransfer) -> None:
        """POSIX moves bytes only in here, 64 I/Os a call."""
        try:
            state = self._nixl.get().check_xfer_state(transfer.handle)
        except self._nixl.errors as error:
            self._finish(transfer, self._failure(transfer, f"failed or came short: {words(error)}"))
        else:
            self._settle(transfer, state)

    def _settle(self, transfer: _NixlTransfer, state: str) -> None:
        if state != "PROC":
            self._finish(transfer, None if state == "DONE" else self._failure(transfer, f"failed: {state}"))

    def _failure(self, transfer: _NixlTransfer, what: str) -> str:
        return f"{self.name}: {transfer.op.value} of {transfer.file.path} {what}"

    def _finish(self, transfer: _NixlTransfer, error: str | None, *, quarantine: bool = False) -> None:
        """Make final; a quarantined transfer keeps its handle for ever."""
        super()._finish(transfer, error, quarantine=quarantine)
        if quarantine:
            self._quarantined.append(transfer)
            return
        try:
            self._nixl.get().release_xfer_handle(transfer.handle)
        except self._nixl.errors as release_error:
            logger.warning("%s: could not release a finished handle: %s", self.name, words(release_error))
        transfer.handle = None

    # The end

    def close(self) -> None:
        """Wait ``close_timeout_s`` at most."""
        if not self._may_close():
            return
        self._drain(self._close_timeout_s)
        if self._in_flight or self._quarantined:
            logger.warning(
                "%s: %d transfers did not end within %.0f s, %d more are quarantined; leaking their memory and files",
                self.name,
                len(self._in_flight),
                self._close_timeout_s,
                len(self._quarantined),
            )
            self._abandon()
            # Collected objects release themselves; these must never be.
            keep_forever((self._nixl, self._quarantined, self._registered))
        else:
            for file in list(self._files):
                self._let_go(self.close_file, file)
            for memory in list(self._memories):
                self._let_go(self.unregister_memory, memory)
            if not self._registered:  # else the last mover that shares this memory ends the agent
                self._nixl.forget()
        self._closed = True
