"""NIXL's plugins behind the mover contract: POSIX (aio, io_uring), GDS_MT and OBJ are one class; the rest is data.

Threading: driven by one thread; the plugins may keep their own. One process: NIXL does not survive a fork.
Ownership: a transfer's handle is never released while in flight (NIXL would return normally and the kernel would go on
writing), so it is kept, polled to its end, and released after. What cannot be drained is leaked on purpose.
NIXL itself is started when the first region, file or object arrives, or by ``connect``.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from nixl_offload.errors import MoverError
from nixl_offload.keep import keep_forever, keep_in_children
from nixl_offload.movers.base import Extents, FileId, MemoryId, MemoryKind, MemoryRegion, Mover, Op
from nixl_offload.movers.handles import FileEntry, MemoryEntry, drain, total_bytes
from nixl_offload.movers.library_lock import LIBRARIES
from nixl_offload.movers.nixl_agent import NixlAgent, descriptors, words
from nixl_offload.movers.nixl_plugins import NixlPlugin
from nixl_offload.movers.pinning import add_holder, check_pinning, find_cuts, registered_bytes, remove_holder
from nixl_offload.movers.tracked import TrackedMover, TrackedTransfer

logger = logging.getLogger(__name__)

_object_numbers = itertools.count(1)
"""Never one twice: NIXL finds an object by its number, and a second name for it would silently win."""


@dataclass(slots=True, eq=False)
class _NixlTransfer(TrackedTransfer):
    handle: Any = field(kw_only=True)


class NixlMover(TrackedMover[_NixlTransfer]):
    """One agent with one plugin. Raises MoverUnavailableError on the first use when the plugin cannot run here.

    After a failure: only this transfer is lost, the mover goes on. Each of these plugins reports an error only when
    nothing of the handle is in flight; ``Transfer.quarantine`` is set where a transfer was not started whole, and for
    what ``close`` cannot drain within ``close_timeout_s``. Agent, handles and files of the latter are leaked with one
    warning, because freeing them would free memory under the kernel.
    """

    def __init__(
        self, plugin: NixlPlugin, *, params: Mapping[str, str] | None = None, close_timeout_s: float = 30.0
    ) -> None:
        super().__init__(plugin.name, plugin.memory_kinds, plugin.limits)
        self._plugin = plugin
        self._nixl = NixlAgent(plugin, {**plugin.params, **(params or {})})
        self._close_timeout_s = close_timeout_s
        self._registered: dict[MemoryId | FileId, Any] = {}
        self._cuts: dict[MemoryEntry, npt.NDArray[np.int64]] = {}
        """Of regions that are registered in several pieces: where one ends and the next begins."""
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
        """Where cuFile does not take a piece of device memory as a whole it is registered in several, for NIXL's
        plugins would only warn, and bounce.
        """
        memory = super().register_memory(region)
        try:
            with LIBRARIES:
                cuts = []
                if by_cufile := self._plugin.plugin.startswith("GDS") and region.kind is MemoryKind.VRAM:
                    check_pinning(self.name, region, registered_bytes())
                    cuts = find_cuts(self.name, region)
                bounds = [0, *cuts, region.length_bytes]
                pieces = [
                    (region.address + begin, end - begin, region.device_id, "") for begin, end in pairwise(bounds)
                ]
                self._registered[memory] = self._register("memory", region.kind.name, *pieces)
                if by_cufile:
                    add_holder(region, self._table.memory(memory), cuts)
            if cuts:
                self._cuts[self._table.memory(memory)] = np.array(cuts, dtype=np.int64)
        except MoverError:
            self._table.pop_memory(memory)
            raise
        return memory

    def unregister_memory(self, memory: MemoryId) -> None:
        self._check_usable()
        entry = self._table.memory(memory)
        super().unregister_memory(memory)
        self._cuts.pop(entry, None)
        with LIBRARIES:
            if self._plugin.plugin.startswith("GDS") and entry.region.kind is MemoryKind.VRAM:
                remove_holder(entry.region, entry, lambda: self._deregister("memory", memory))
            else:
                self._deregister("memory", memory)

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
        file = self._table.add_file(FileEntry(number, name, length_bytes))
        self._registered[file] = registered
        return file

    def close_file(self, file: FileId) -> None:
        self._check_usable()
        entry = self._table.pop_file(file)
        try:
            self._deregister(entry.path, file)
        finally:
            if self._plugin.target == "FILE":
                os.close(entry.fd)

    def _register(self, what: str, kind: str, *descriptors: tuple[int, int, int, str]) -> Any:
        agent = self._nixl.get()
        return self._nixl.call(
            f"register {what}", lambda: agent.register_memory(list(descriptors), kind, [self._plugin.plugin])
        )

    def _deregister(self, what: str, handle: MemoryId | FileId) -> None:
        agent, registered = self._nixl.get(), self._registered.pop(handle)
        self._nixl.call(f"deregister {what}", lambda: agent.deregister_memory(registered, [self._plugin.plugin]))
        if self._closed and not self._registered:
            self._nixl.forget()

    # Transfers

    def _make(self, op: Op, memory: MemoryEntry, mem: Extents, file: FileEntry, fil: Extents) -> _NixlTransfer:
        moved_bytes, cuts = total_bytes(mem), self._cuts.get(memory)
        if cuts is not None:
            mem, fil = _split_at(mem, fil, cuts)
        if moved_bytes > self.limits.max_extent_bytes or cuts is not None:
            mem, fil = mem[::-1], fil[::-1]  # neighbours in falling order are not merged past the limit, or a cut
        agent, region = self._nixl.get(), memory.region
        handle = self._nixl.call(
            "initialize transfer",
            lambda: agent.initialize_xfer(
                op.name,
                agent.get_xfer_descs(descriptors(mem, region.address, region.device_id), region.kind.name),
                agent.get_xfer_descs(descriptors(fil, 0, file.fd), self._plugin.target),
                self._nixl.name,
                b"",
                [self._plugin.plugin],
            ),
        )
        return _NixlTransfer(op, moved_bytes, memory=memory, file=file, handle=handle)

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
        """Wait ``close_timeout_s`` at most; in a forked child do nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        drain(self._in_flight, self.poll, self._close_timeout_s)
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
            for file in list(self._table.files):
                self._let_go(self.close_file, file)
            for memory in list(self._table.memories):
                self._let_go(self.unregister_memory, memory)
            if not self._registered:  # else the last mover that shares this memory ends the agent
                self._nixl.forget()
        self._closed = True


def _split_at(memory_extents: Extents, file_extents: Extents, cuts: npt.NDArray[np.int64]) -> tuple[Extents, Extents]:
    """Cut every row that goes over one of ``cuts``, which are rising offsets in the memory, both sides alike. Pure."""
    begins, ends = memory_extents[:, 0], memory_extents.sum(axis=1)
    first, last = np.searchsorted(cuts, begins, side="right"), np.searchsorted(cuts, ends - 1, side="right")
    pieces = last - first + 1
    if not len(pieces) or int(pieces.max()) == 1:
        return memory_extents, file_extents
    row = np.repeat(np.arange(len(pieces)), pieces)
    number = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    bounds = np.concatenate([[0], cuts, [np.iinfo(np.int64).max]])
    begin = np.maximum(begins[row], bounds[number])
    size = np.minimum(ends[row], bounds[number + 1]) - begin
    return np.stack([begin, size], axis=1), np.stack([file_extents[row, 0] + begin - begins[row], size], axis=1)
