"""One NIXL agent with one plugin: how it is started, quietly, and how its errors are read. Imports nixl, and late.

Threading: ``register`` and ``deregister`` by the thread that drives the mover, all else by any. One process: NIXL does
not survive a fork.
Ownership: the mover's; nothing is released here. While an agent is made, a few variables of the process's environment
are set and put back: what is started on other threads in that moment may see them.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from nixl_offload.errors import MoverError, MoverUnavailableError
from nixl_offload.movers.base import LIBRARIES, MAX_IO_BYTES, Extents, MemoryKind, MemoryRegion
from nixl_offload.movers.nixl_plugins import NixlPlugin
from nixl_offload.movers.tracked import TrackedTransfer

logger = logging.getLogger(__name__)

_agent_numbers = itertools.count(1)
_FEW = 32


class NixlAgent:
    """An agent that is made when first asked for; its memory kinds are what the plugin says it takes.

    What NIXL raises becomes a MoverError that says what was tried.
    """

    def __init__(self, plugin: NixlPlugin, params: Mapping[str, str]) -> None:
        self.name = f"nixl-offload-{os.getpid()}-{next(_agent_numbers)}"
        self.memory_kinds = plugin.memory_kinds
        """Narrowed to what the plugin takes on this machine, once it has been started."""
        self._plugin = plugin
        self._params = {**plugin.params, **params}
        self._errors: tuple[type[Exception], ...] = (RuntimeError, ValueError, TypeError)
        self._agent: Any = None

    def start(self) -> None:
        """Start NIXL and its plugin. Raises MoverUnavailableError when one cannot run here."""
        if self._agent is None:
            with LIBRARIES:
                self._agent = self._make()

    def register_memory(self, region: MemoryRegion) -> Any:
        """Register host or device memory."""
        return self.register("memory", region.kind.name, (region.address, region.length_bytes, region.device_id, ""))

    def register(self, what: str, kind: str, descriptor: tuple[int, int, int, str]) -> Any:
        """Register a file or an object. ``what`` is for messages."""
        try:
            return self._agent.register_memory([descriptor], kind, [self._plugin.plugin])
        except self._errors as error:
            raise self._failure(f"register {what}", error) from error

    def deregister(self, what: str, registered: Any) -> None:
        """Undo ``register``."""
        try:
            self._agent.deregister_memory(registered, [self._plugin.plugin])
        except self._errors as error:
            raise self._failure(f"deregister {what}", error) from error

    def prepare(self, transfer: TrackedTransfer, target_kind: str, target_id: int) -> Any:
        """Return the handle of a transfer between its region and what was registered as ``target_id``."""
        mem, fil, region, agent = transfer.mem, transfer.fil, transfer.region, self._agent
        if transfer.bytes_total > MAX_IO_BYTES:
            mem, fil = mem[::-1], fil[::-1]  # NIXL does not merge neighbours in falling order to more than the limit
        try:
            return agent.initialize_xfer(
                transfer.op.name,
                agent.get_xfer_descs(_descriptors(mem, region.address, region.device_id), region.kind.name),
                agent.get_xfer_descs(_descriptors(fil, 0, target_id), target_kind),
                self.name,
                b"",
                [self._plugin.plugin],
            )
        except self._errors as error:
            raise self._failure("initialize transfer", error) from error

    def begin(self, handle: Any) -> str:
        """Start a transfer and return its state: PROC, DONE or another word.

        After an error part of it may be queued in the plugin or in the kernel, and nothing would ever tell.
        """
        try:
            return str(self._agent.transfer(handle))
        except self._errors as error:
            raise self._failure("not started whole", error) from error

    def check(self, handle: Any) -> str:
        """Return the state of a transfer. After an error nothing of it is in flight. POSIX moves bytes only in here,
        64 I/Os a call.
        """
        try:
            return str(self._agent.check_xfer_state(handle))
        except self._errors as error:
            raise self._failure("failed or came short", error) from error

    def release(self, handle: Any) -> None:
        """Free the handle of a transfer that has ended."""
        try:
            self._agent.release_xfer_handle(handle)
        except self._errors as error:
            logger.warning("%s: could not release a finished handle: %s", self._plugin.name, _words(error))

    def forget(self) -> None:
        """Let the agent be collected, which ends it. Nothing of it may be in use."""
        with LIBRARIES:
            self._agent = None

    def _failure(self, doing: str, error: Exception) -> MoverError:
        return MoverError(f"{self._plugin.name}: {doing}: {_words(error)}")

    def _make(self) -> Any:
        api = _import_nixl()
        # A class per status, derived from nothing in common; here all of them mean the same.
        own = (value for value in vars(api.nixlBind).values() if isinstance(value, type))
        self._errors += tuple(value for value in own if issubclass(value, Exception))
        plugin = self._plugin.plugin
        try:
            config = api.nixl_agent_config(
                enable_prog_thread=False, backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            )
            with _defaults(self._plugin.environment):
                agent = api.nixl_agent(self.name, config)
                agent.create_backend(plugin, self._params)
            taken = {kind.removesuffix("_SEG") for kind in agent.get_backend_mem_types(plugin)}
        except self._errors as error:
            raise MoverUnavailableError(
                f"{self._plugin.name}: NIXL's {plugin} plugin does not start here: {_words(error)}"
            ) from error
        self.memory_kinds = frozenset(kind for kind in MemoryKind if kind in self.memory_kinds and kind.name in taken)
        return agent


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
    """What NIXL said."""
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
