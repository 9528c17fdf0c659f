"""NIXL behind the mover contract: its plugins as data, an agent, the mover of files. ``nixl_objects`` moves objects.

Threading: one thread drives a mover; plugins may have threads of their own. One process: NIXL does not survive a fork.
Ownership: a handle in flight is never released, because NIXL would return normally and the kernel would go on writing.
Handles are kept, polled to their end, and released after. What cannot be drained is leaked on purpose.
NIXL is imported and started when the first region or file arrives. Meanwhile a few variables of the process's
environment are set and put back: what starts on other threads in that moment may see them.
Where the numbers come from: docs/decisions/0004-movers.md for files, docs/decisions/0008-object-movers.md for objects.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import MoverError, MoverUnavailableError
from nixl_offload.keep import keep_forever, keep_in_children
from nixl_offload.movers.base import (
    FILE_LIMITS,
    LIBRARIES,
    MAX_IO_BYTES,
    Extents,
    FileEntry,
    FileId,
    MemoryId,
    MemoryKind,
    MemoryRegion,
    Mover,
    MoverLimits,
    TrackedTransfer,
)
from nixl_offload.movers.pinning import check_pinning, held
from nixl_offload.stores.s3 import ATTEMPTS, S3Address

logger = logging.getLogger(__name__)

_agent_numbers = itertools.count(1)
_FEW = 32

# Plugins


@dataclass(frozen=True)
class NixlPlugin:
    """All that differs between one NIXL plugin and another."""

    name: str
    """The mover's name."""
    plugin: str
    """NIXL's name of it."""
    params: Mapping[str, str]
    memory_kinds: frozenset[MemoryKind]
    """What we would use it for; what it really takes is asked when it starts."""
    key_prefix: str = ""
    """Of an object plugin: comes before every object name."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set while the plugin starts, unless the process has other values: what it can be told in no other way."""
    host: NixlPlugin | None = None
    """Moves host memory in its place, to and from the same files, if that plugin starts."""


_HOST = frozenset({MemoryKind.DRAM})
_AIO = NixlPlugin("posix_aio", "POSIX", {"use_aio": "true"}, _HOST)

PLUGINS: Mapping[str, NixlPlugin] = MappingProxyType(
    {
        "posix_uring": NixlPlugin("posix_uring", "POSIX", {"use_uring": "true"}, _HOST),
        "posix_aio": _AIO,
        # GDS_MT registers memory with cuFile, which takes long and may fail for a memory tier of a hundred GB.
        "gds_mt": NixlPlugin("gds_mt", "GDS_MT", {"thread_count": "8"}, frozenset(MemoryKind), host=_AIO),
    }
)


def object_plugin(tier: S3Config) -> NixlPlugin:
    """Return NIXL's OBJ plugin for a bucket. Credentials are no parameter: its SDK goes through the AWS chain."""
    address = S3Address.of(tier)
    params = {
        "bucket": address.bucket,
        "scheme": "http" if address.plain_http else "https",
        "use_virtual_addressing": str(not address.path_style).lower(),
        "num_threads": str(tier.connections),
        "req_checksum": "required",  # with "supported" the SDK sends trailers that some servers store as data
        "resp_checksum": "required",
        "endpoint_override": address.endpoint,
        "region": address.region,
        "ca_bundle": address.ca_bundle,
    }
    return NixlPlugin(
        "obj",
        "OBJ",
        {name: value for name, value in params.items() if value is not None},
        frozenset(MemoryKind),
        key_prefix=address.prefix,
        # The SDK's own default is ten retries, half a minute against a server that is down.
        environment={"AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": str(ATTEMPTS)},
    )


# Movers


@dataclass(slots=True, eq=False)
class NixlTransfer(TrackedTransfer):
    """A transfer and NIXL's handle of it; None between attempts."""

    handle: Any = None


class AgentMover(Mover):
    """A mover over a NIXL agent with one plugin. The first use raises MoverUnavailableError if the plugin cannot run.

    ``memory_kinds`` is then narrowed to the kinds that the plugin takes on this machine.
    """

    transfer_type = NixlTransfer

    def __init__(self, plugin: NixlPlugin, *, limits: MoverLimits, close_timeout_s: float) -> None:
        super().__init__(plugin.name, plugin.memory_kinds, limits, close_timeout_s)
        self._plugin = plugin
        self._host_plugin = plugin.plugin
        """NIXL's name of the plugin that moves host memory."""
        self._agent: Any = None
        self._agent_name = f"nixl-offload-{os.getpid()}-{next(_agent_numbers)}"
        self._errors: tuple[type[Exception], ...] = (RuntimeError, ValueError, TypeError)
        """What NIXL raises. Its own exceptions are added when it is imported."""
        self._registered: dict[MemoryId | FileId, contextlib.ExitStack] = {}
        """Undo each registration, and keep the agent until then."""
        keep_in_children(self)  # agents do not survive a fork, and handles that are collected release themselves

    def connect(self) -> None:
        """Start NIXL and its plugin now, without reaching the storage. Raises MoverUnavailableError."""
        self._check_usable()

    def _check_usable(self) -> None:
        super()._check_usable()
        if self._agent is None:
            with LIBRARIES:
                self._agent = self._make()

    def _make(self) -> Any:
        api, plugin = _import_nixl(), self._plugin
        # A class per status, derived from nothing in common; here all of them mean the same.
        own = (value for value in vars(api.nixlBind).values() if isinstance(value, type))
        self._errors += tuple(value for value in own if issubclass(value, Exception))
        try:
            config = api.nixl_agent_config(
                enable_prog_thread=False, backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            )
            with _defaults(plugin.environment):
                agent = api.nixl_agent(self._agent_name, config)
                agent.create_backend(plugin.plugin, dict(plugin.params))
            taken = {kind.removesuffix("_SEG") for kind in agent.get_backend_mem_types(plugin.plugin)}
        except self._errors as error:
            raise MoverUnavailableError(
                f"{plugin.name}: NIXL's {plugin.plugin} plugin does not start here: {_words(error)}"
            ) from error
        self.memory_kinds = frozenset(kind for kind in plugin.memory_kinds if kind.name in taken)
        if plugin.host is not None:
            try:
                agent.create_backend(plugin.host.plugin, dict(plugin.host.params))
                self._host_plugin = plugin.host.plugin
            except self._errors as error:
                logger.info("%s: %s does not start: %s", plugin.name, plugin.host.name, _words(error))
        return agent

    def _plugin_for(self, kind: MemoryKind) -> str:
        return self._host_plugin if kind is MemoryKind.DRAM else self._plugin.plugin

    def _call(self, doing: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the agent. What NIXL raises becomes a MoverError; ``doing`` says what failed."""
        try:
            return method(*arguments)
        except self._errors as error:
            raise MoverError(f"{self.name}: {doing}: {_words(error)}") from error

    # Memory, files and objects

    def _register_as(
        self, handle: MemoryId | FileId, what: str, kind: str, descriptor: tuple[int, int, int, str], *plugins: str
    ) -> None:
        """Register memory, a file or an object (``what``, for messages) with each of the plugins, or with none."""
        with contextlib.ExitStack() as undo:
            for plugin in plugins:
                done = self._call(f"register {what}", self._agent.register_memory, [descriptor], kind, [plugin])
                undo.callback(self._call, f"deregister {what}", self._agent.deregister_memory, done, [plugin])
            self._registered[handle] = undo.pop_all()

    def _register(self, memory: MemoryId, region: MemoryRegion) -> None:
        descriptor = (region.address, region.length_bytes, region.device_id, "")
        with LIBRARIES:
            self._register_as(memory, "memory", region.kind.name, descriptor, self._plugin_for(region.kind))

    def _unregister(self, memory: MemoryId, region: MemoryRegion) -> None:
        with LIBRARIES:
            self._registered.pop(memory).close()

    def _unregister_file(self, file: FileId, entry: FileEntry) -> None:
        self._registered.pop(file).close()

    def _release_all(self) -> None:
        super()._release_all()
        with LIBRARIES:
            self._agent = None  # it ends with the last registration, which another mover of cuFile may need

    # Transfers

    def _prepare(self, transfer: NixlTransfer, target_kind: str, target_id: int) -> None:
        """Make the handle of a transfer between its region and what was registered as ``target_id``."""
        mem, fil, region, agent = transfer.mem, transfer.fil, transfer.region, self._agent
        if transfer.bytes_total > MAX_IO_BYTES:
            mem, fil = mem[::-1], fil[::-1]  # NIXL does not merge neighbours in falling order to more than the limit

        def initialize() -> Any:
            ours = agent.get_xfer_descs(_descriptors(mem, region.address, region.device_id), region.kind.name)
            theirs = agent.get_xfer_descs(_descriptors(fil, 0, target_id), target_kind)
            plugins = [self._plugin_for(region.kind)]
            return agent.initialize_xfer(transfer.op.name, ours, theirs, self._agent_name, b"", plugins)

        transfer.handle = self._call("initialize transfer", initialize)

    def _begin(self, transfer: NixlTransfer) -> str | None:
        """Start a prepared transfer. Returns its state: PROC or DONE; None if it is FAILED already.

        After an error a part of it may be queued in plugin or kernel, and its end would not show: it is quarantined.
        """
        try:
            return str(self._call("not started whole", self._agent.transfer, transfer.handle))
        except MoverError as error:
            self._finish(transfer, str(error), quarantine=True)
            return None

    def _check(self, transfer: NixlTransfer) -> str:
        """Return PROC, DONE or why it failed, with nothing in flight. POSIX moves bytes only here, 64 I/Os a call."""
        try:
            return str(self._call("failed or came short", self._agent.check_xfer_state, transfer.handle))
        except MoverError as error:
            return str(error)

    def _failure(self, transfer: NixlTransfer, state: str) -> str:
        return (
            f"{self.name}: {transfer.op.value} of {transfer.file.path} failed: {state.removeprefix(self.name + ': ')}"
        )

    def _release(self, transfer: NixlTransfer) -> None:
        """Free the handle of a transfer that has ended."""
        handle, transfer.handle = transfer.handle, None
        if handle is not None:
            try:
                self._agent.release_xfer_handle(handle)
            except self._errors as error:
                logger.warning("%s: could not release a finished handle: %s", self.name, _words(error))

    def _finish(self, transfer: Any, error: str | None, *, quarantine: bool = False) -> None:
        """Make final; a quarantined transfer keeps its handle for ever."""
        super()._finish(transfer, error, quarantine=quarantine)
        if quarantine:
            keep_forever(transfer)
        else:
            self._release(transfer)


class NixlMover(AgentMover):
    """Moves files by POSIX (aio, io_uring), or by GDS_MT, and then host memory by POSIX.

    After a failure: only this transfer is lost, the mover goes on. Each of these plugins reports an error only when
    nothing of the handle is in flight; ``Transfer.quarantine`` is set where a transfer was not started whole, and for
    what ``close`` cannot drain within ``close_timeout_s``.
    """

    def __init__(self, plugin: NixlPlugin, *, close_timeout_s: float = 30.0) -> None:
        super().__init__(plugin, limits=FILE_LIMITS, close_timeout_s=close_timeout_s)
        self._is_cufile = plugin.plugin == "GDS_MT"

    def _register(self, memory: MemoryId, region: MemoryRegion) -> None:
        by_cufile = self._is_cufile and region.kind is MemoryKind.VRAM
        with LIBRARIES:
            if by_cufile:
                check_pinning(self.name, region)
            super()._register(memory, region)
            if by_cufile:
                self._registered[memory] = held(region, self._registered[memory])

    def _register_file(self, file: FileId, entry: FileEntry) -> None:
        # Empty meta info is fd mode: the device id is the descriptor.
        descriptor = (0, entry.length_bytes, entry.fd, "")
        self._register_as(file, entry.path, "FILE", descriptor, *{self._plugin.plugin, self._host_plugin})

    def _launch(self, transfer: NixlTransfer) -> None:
        self._prepare(transfer, "FILE", transfer.file.fd)
        self._note(transfer, self._begin(transfer))

    def _advance(self, transfer: NixlTransfer) -> None:
        self._note(transfer, self._check(transfer))

    def _note(self, transfer: NixlTransfer, state: str | None) -> None:
        if state is not None and state != "PROC":
            self._finish(transfer, None if state == "DONE" else self._failure(transfer, state))


# Details


def _descriptors(extents: Extents, base: int, device_id: int) -> npt.NDArray[np.uint64] | list[tuple[int, int, int]]:
    """Rows of (address, length, device id) for NIXL: a few as tuples, which cost less."""
    if len(extents) <= _FEW:
        return [(base + at, length, device_id) for at, length in extents.tolist()]
    rows = np.empty((len(extents), 3), dtype=np.uint64)
    rows[:, 0] = extents[:, 0] + base
    rows[:, 1] = extents[:, 1]
    rows[:, 2] = device_id
    return rows


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _import_nixl() -> ModuleType:
    """Import NIXL quietly: unless NIXL_LOG_LEVEL says otherwise, it logs agents to stdout and failures to stderr.

    Its level is read once per process; where someone else has imported it already, theirs stays.
    """
    if "nixl._api" in sys.modules:
        return sys.modules["nixl._api"]
    quiet = not logger.isEnabledFor(logging.DEBUG)
    with _defaults({"NIXL_LOG_LEVEL": "FATAL"} if quiet else {}):
        try:
            return importlib.import_module("nixl._api")
        except ImportError as error:
            raise MoverUnavailableError(f"NIXL cannot be imported ({error}); `pip install nixl` brings it") from error


@contextlib.contextmanager
def _defaults(variables: Mapping[str, str]) -> Iterator[None]:
    """Set what the environment does not have, for as long as this lasts."""
    added = [name for name in variables if name not in os.environ]
    for name in added:
        os.environ[name] = variables[name]
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
