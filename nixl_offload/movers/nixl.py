"""NIXL's plugins behind the mover contract: POSIX (aio, io_uring), GDS_MT, GDS and OBJ are one class; the rest is data.

Threading: driven by one thread; the plugins may keep their own. One process: NIXL does not survive a fork.
Ownership: a transfer's handle is never released while in flight (NIXL would return normally and the kernel would go on
writing), so it is kept, polled to its end, and released after. What cannot be drained is leaked on purpose.
NIXL itself is started when the first region, file or object arrives, or by ``connect``.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nixl_offload.errors import MoverError
from nixl_offload.movers.base import (
    Extents,
    FileId,
    MemoryId,
    MemoryKind,
    MemoryRegion,
    Mover,
    Op,
    Prepared,
    Rows,
    Transfer,
    TransferState,
)
from nixl_offload.movers.handles import (
    CheckedSide,
    FileEntry,
    HandleTable,
    MemoryEntry,
    check_adopted,
    checked_extents,
    drain,
    fork_message,
    open_regular_file,
    side_facts,
)
from nixl_offload.movers.nixl_agent import NixlAgent, descriptors, words
from nixl_offload.movers.nixl_plugins import NixlPlugin
from nixl_offload.movers.pinning import check_pinning

logger = logging.getLogger(__name__)

_object_numbers = itertools.count(1)
"""Never one twice: NIXL finds an object by its number, and a second name for it would silently win."""


@dataclass(frozen=True, slots=True, eq=False)
class _NixlPrepared(CheckedSide):
    dlist: Any


@dataclass(slots=True, eq=False)
class _NixlTransfer(Transfer):
    memory: MemoryEntry = field(kw_only=True)
    file: FileEntry = field(kw_only=True)
    handle: Any = field(kw_only=True)
    file_end: int = field(kw_only=True)
    keep: list[Any] = field(default_factory=list)
    """Prepared sides, alive as long as the handle that points into them."""


class NixlMover(Mover):
    """One agent with one plugin. Raises MoverUnavailableError on the first use when the plugin cannot run here.

    After a failure: only this transfer is lost, the mover goes on. ``Transfer.quarantine`` is set where NIXL may still
    be writing. When ``close`` cannot drain within ``close_timeout_s``, agent, handles and files are leaked with one
    warning, because freeing them would free memory under the kernel.
    """

    def __init__(
        self, plugin: NixlPlugin, *, params: Mapping[str, str] | None = None, close_timeout_s: float = 30.0
    ) -> None:
        self.name = plugin.name
        self.memory_kinds = plugin.memory_kinds
        self.limits = plugin.limits
        self.reports_failures = plugin.reports_failures
        self._plugin = plugin
        self._nixl = NixlAgent(plugin, {**plugin.params, **(params or {})})
        self._close_timeout_s = close_timeout_s
        self._pid = os.getpid()
        self._table = HandleTable(plugin.name)
        self._registered: dict[MemoryId | FileId, Any] = {}
        self._prepared: set[_NixlPrepared] = set()
        self._in_flight: set[_NixlTransfer] = set()
        self._quarantined: list[_NixlTransfer] = []
        self._closed = False

    def connect(self) -> None:
        """Start NIXL and its plugin now, which reaches nothing yet. Raises MoverUnavailableError."""
        self._usable_agent()

    # Regions, files and objects

    def register_memory(self, region: MemoryRegion) -> MemoryId:
        """See Mover."""
        agent = self._usable_agent()
        if region.kind not in self.memory_kinds:
            kinds = ", ".join(sorted(kind.value for kind in self.memory_kinds))
            raise MoverError(f"{self.name}: moves {kinds}, not {region.kind.value}")
        if self._plugin.plugin.startswith("GDS"):
            held = (entry.region for entry in self._table.memories.values())
            check_pinning(self.name, region, sum(each.length_bytes for each in held if each.kind is MemoryKind.VRAM))
        descriptor = [(region.address, region.length_bytes, region.device_id, "")]
        registered = self._nixl.call(
            "register memory", lambda: agent.register_memory(descriptor, region.kind.name, [self._plugin.plugin])
        )
        memory = self._table.add_memory(MemoryEntry(region))
        self._registered[memory] = registered
        return memory

    def unregister_memory(self, memory: MemoryId) -> None:
        """See Mover. Raises MoverError while a transfer is in flight or quarantined."""
        agent = self._usable_agent()
        self._table.pop_memory(memory)
        registered = self._registered.pop(memory)
        self._nixl.call("unregister memory", lambda: agent.deregister_memory(registered, [self._plugin.plugin]))

    def open_file(self, path: str, length_bytes: int, *, direct_io: bool) -> FileId:
        """See Mover."""
        agent = self._usable_agent()
        if self._plugin.target != "FILE":
            return super().open_file(path, length_bytes, direct_io=direct_io)
        fd, direct = open_regular_file(path, direct_io=direct_io)
        return self._register_file(agent, FileEntry(fd, path, length_bytes, direct_io, direct))

    def adopt_file(self, fd: int, path: str, length_bytes: int, *, direct: bool) -> FileId:
        """See Mover."""
        try:
            agent = self._usable_agent()
        except MoverError:
            os.close(fd)
            raise
        if self._plugin.target != "FILE":
            return super().adopt_file(fd, path, length_bytes, direct=direct)
        check_adopted(fd, path)
        return self._register_file(agent, FileEntry(fd, path, length_bytes, direct, direct))

    def _register_file(self, agent: Any, entry: FileEntry) -> FileId:
        try:
            # Empty meta info is fd mode: the device id is the descriptor.
            registered = self._nixl.call(
                f"register {entry.path}",
                lambda: agent.register_memory([(0, entry.length_bytes, entry.fd, "")], "FILE", [self._plugin.plugin]),
            )
        except MoverError:
            os.close(entry.fd)
            raise
        file = self._table.add_file(entry)
        self._registered[file] = registered
        return file

    def open_object(self, name: str, length_bytes: int) -> FileId:
        """See Mover."""
        agent = self._usable_agent()
        if self._plugin.target != "OBJ":
            return super().open_object(name, length_bytes)
        number = next(_object_numbers)
        registered = self._nixl.call(
            f"register {name}",
            lambda: agent.register_memory(
                [(0, length_bytes, number, self._plugin.key_prefix + name)], "OBJ", [self._plugin.plugin]
            ),
        )
        file = self._table.add_file(FileEntry(number, name, length_bytes))
        self._registered[file] = registered
        return file

    def close_file(self, file: FileId) -> None:
        """See Mover. Raises MoverError while a transfer is in flight or quarantined."""
        agent = self._usable_agent()
        entry = self._table.pop_file(file)
        registered = self._registered.pop(file)
        try:
            self._nixl.call(
                f"deregister {entry.path}", lambda: agent.deregister_memory(registered, [self._plugin.plugin])
            )
        finally:
            if self._plugin.target == "FILE":
                os.close(entry.fd)

    # Transfers

    def submit(
        self, op: Op, memory: MemoryId, memory_extents: Extents, file: FileId, file_extents: Extents
    ) -> Transfer:
        """See Mover."""
        agent = self._usable_agent()
        m, mem, f, fil = self._table.check(self.limits, op, memory, memory_extents, file, file_extents)
        total_bytes = int(mem[:, 1].sum())
        if not len(mem):
            return Transfer(op, 0, TransferState.DONE)
        file_end = int((fil[:, 0] + fil[:, 1]).max())
        if total_bytes > self.limits.max_extent_bytes:
            mem, fil = mem[::-1], fil[::-1]  # neighbours in falling order are not merged past the limit
        handle = self._nixl.call(
            "initialize transfer",
            lambda: agent.initialize_xfer(
                op.name,
                agent.get_xfer_descs(descriptors(mem, m.region.address, m.region.device_id), m.region.kind.name),
                agent.get_xfer_descs(descriptors(fil, 0, f.fd), self._plugin.target),
                self._nixl.name,
                b"",
                [self._plugin.plugin],
            ),
        )
        return self._launch(_NixlTransfer(op, total_bytes, memory=m, file=f, handle=handle, file_end=file_end))

    def prepare_memory(self, memory: MemoryId, extents: Extents) -> Prepared:
        """See Mover."""
        region = self._table.memory(memory).region
        checked = checked_extents(extents, region.length_bytes, f"memory {memory}")
        rows = descriptors(checked, region.address, region.device_id)
        return self._prepare(
            memory, checked, side_facts(checked, region.address), "NIXL_INIT_AGENT", rows, region.kind.name
        )

    def prepare_file(self, file: FileId, extents: Extents) -> Prepared:
        """See Mover."""
        entry = self._table.file(file)
        checked = checked_extents(extents, entry.length_bytes, entry.path)
        rows = descriptors(checked, 0, entry.fd)
        return self._prepare(file, checked, side_facts(checked, 0), self._nixl.name, rows, self._plugin.target)

    def _prepare(
        self,
        handle: MemoryId | FileId,
        extents: Extents,
        facts: tuple[int, int],
        side: str,
        rows: npt.NDArray[np.uint64],
        kind: str,
    ) -> Prepared:
        agent = self._usable_agent()
        dlist = None
        if len(extents):
            dlist = self._nixl.call("prepare", lambda: agent.prep_xfer_dlist(side, rows, kind, [self._plugin.plugin]))
        prepared = _NixlPrepared(handle, extents, *facts, dlist)
        self._prepared.add(prepared)
        return prepared

    def release_prepared(self, prepared: Prepared) -> None:
        """See Mover. Safe while a transfer of it is in flight: NIXL's handle goes with the last transfer."""
        agent = self._usable_agent()
        if not isinstance(prepared, _NixlPrepared) or prepared not in self._prepared:
            raise MoverError(f"{self.name}: not prepared here, or released before")
        self._prepared.discard(prepared)
        if prepared.dlist is not None and not any(prepared in t.keep for t in (*self._in_flight, *self._quarantined)):
            self._nixl.call("release prepared", lambda: agent.release_dlist_handle(prepared.dlist))

    def submit_prepared(self, op: Op, memory: Prepared, memory_rows: Rows, file: Prepared, file_rows: Rows) -> Transfer:
        """See Mover."""
        agent = self._usable_agent()
        if not isinstance(memory, _NixlPrepared) or not isinstance(file, _NixlPrepared):
            raise MoverError(f"{self.name}: not prepared here")
        if memory not in self._prepared or file not in self._prepared:
            raise MoverError(f"{self.name}: prepared elsewhere, or released before")
        m, memory_index, f, file_index, total_bytes = self._table.check_prepared(
            self.limits, op, memory, memory_rows, file, file_rows
        )
        if not len(memory_index):
            return Transfer(op, 0, TransferState.DONE)
        if total_bytes > self.limits.max_extent_bytes:  # as in submit
            memory_index, file_index = np.ascontiguousarray(memory_index[::-1]), np.ascontiguousarray(file_index[::-1])
        handle = self._nixl.call(
            "make transfer",
            lambda: agent.make_prepped_xfer(
                op.name, memory.dlist, memory_index, file.dlist, file_index, b"", [self._plugin.plugin]
            ),
        )
        file_end = 0 if self.reports_failures else int(file.extents[file_index].sum(axis=1).max())
        return self._launch(
            _NixlTransfer(op, total_bytes, memory=m, file=f, handle=handle, file_end=file_end, keep=[memory, file])
        )

    def _launch(self, transfer: _NixlTransfer) -> Transfer:
        transfer.memory.in_flight += 1
        transfer.file.in_flight += 1
        self._in_flight.add(transfer)
        try:
            state = self._nixl.get().transfer(transfer.handle)
        except self._nixl.errors as error:
            # Part of it may be queued in the plugin or in the kernel, and nothing would ever tell.
            self._finish(transfer, f"{self.name}: not started whole: {words(error)}", quarantine=True)
        else:
            if state != "PROC":
                self._settle(transfer, state)
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        """See Mover. POSIX moves bytes only in here, 64 I/Os a call."""
        if transfer.state is not TransferState.PENDING or not isinstance(transfer, _NixlTransfer):
            return transfer.state
        if os.getpid() != self._pid:
            transfer.error, transfer.quarantine = self._fork_message(), True
            transfer.state = TransferState.FAILED
            return transfer.state
        try:
            state = self._nixl.get().check_xfer_state(transfer.handle)
        except self._nixl.errors as error:
            self._finish(
                transfer,
                f"{self.name}: {transfer.op.value} of {transfer.file.path} failed or came short: {words(error)}",
                quarantine=not self._plugin.settles_before_error,
            )
        else:
            if state != "PROC":
                self._settle(transfer, state)
        return transfer.state

    def _settle(self, transfer: _NixlTransfer, state: str) -> None:
        error = None
        if state != "DONE":
            error = f"{self.name}: {transfer.op.value} of {transfer.file.path} failed: {state}"
        elif not self.reports_failures and os.fstat(transfer.file.fd).st_size < transfer.file_end:
            error = f"{self.name}: {transfer.file.path} ends before byte {transfer.file_end}"
        self._finish(transfer, error, quarantine=state != "DONE" and not self._plugin.settles_before_error)

    def _finish(self, transfer: _NixlTransfer, error: str | None, *, quarantine: bool) -> None:
        """Make final. A quarantined transfer keeps its handle and its shares of memory and file for ever."""
        self._in_flight.discard(transfer)
        if quarantine:
            self._quarantined.append(transfer)
        else:
            transfer.memory.in_flight -= 1
            transfer.file.in_flight -= 1
            try:
                self._nixl.get().release_xfer_handle(transfer.handle)
            except self._nixl.errors as release_error:
                logger.warning("%s: could not release a finished handle: %s", self.name, words(release_error))
            keep, transfer.keep, transfer.handle = transfer.keep, [], None
            for prepared in keep:
                if prepared not in self._prepared and not any(prepared in t.keep for t in self._in_flight):
                    self._nixl.get().release_dlist_handle(prepared.dlist)
        transfer.error, transfer.quarantine = error, quarantine
        transfer.state = TransferState.DONE if error is None else TransferState.FAILED

    # The end

    def close(self) -> None:
        """See Mover. Waits ``close_timeout_s`` at most; in a forked child it does nothing."""
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
            for transfer in list(self._in_flight):
                self._finish(transfer, f"{self.name}: still in flight when the mover was closed", quarantine=True)
            # Collected objects release themselves; these must never be.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((self._nixl, self._quarantined, self._registered)))
            self._closed = True
            return
        for prepared in list(self._prepared):
            self.release_prepared(prepared)
        for file in list(self._table.files):
            self.close_file(file)
        for memory in list(self._table.memories):
            self.unregister_memory(memory)
        self._closed = True
        self._nixl.forget()

    # NIXL itself

    def _usable_agent(self) -> Any:
        if os.getpid() != self._pid:
            raise MoverError(self._fork_message())
        if self._closed:
            raise MoverError(f"{self.name}: this mover is closed")
        agent = self._nixl.get()
        self.memory_kinds = self._nixl.memory_kinds
        return agent

    def _fork_message(self) -> str:
        return fork_message(self.name, self._pid)
