"""One NIXL agent with one plugin: how it is started, quietly, and how its errors are read. Imports nixl, and late.

Threading: driven by one thread, that of the mover. One process: NIXL does not survive a fork.
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
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from nixl_offload.errors import MoverError, MoverUnavailableError
from nixl_offload.movers.base import LIBRARIES, Extents, MemoryKind
from nixl_offload.movers.nixl_plugins import NixlPlugin

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_agent_numbers = itertools.count(1)
_FEW = 32


class NixlAgent:
    """An agent that is made when first asked for; its memory kinds are what the plugin says it takes."""

    def __init__(self, plugin: NixlPlugin, params: Mapping[str, str]) -> None:
        self.name = f"nixl-offload-{os.getpid()}-{next(_agent_numbers)}"
        self.memory_kinds = plugin.memory_kinds
        """Narrowed to what the plugin takes on this machine, once it has been started."""
        self.errors: tuple[type[Exception], ...] = (RuntimeError, ValueError, TypeError)
        self._plugin = plugin
        self._params = dict(params)
        self._agent: Any = None

    def get(self) -> Any:
        """Return NIXL's agent. Raises MoverUnavailableError when NIXL or its plugin cannot run here."""
        if self._agent is None:
            with LIBRARIES:
                self._agent = self._make()
        return self._agent

    def call(self, what: str, call: Callable[[], _T]) -> _T:
        """Return what ``call`` returns; what NIXL raises becomes a MoverError that says what was tried."""
        try:
            return call()
        except self.errors as error:
            raise MoverError(f"{self._plugin.name}: {what}: {words(error)}") from error

    def forget(self) -> None:
        """Let the agent be collected, which ends it. Nothing of it may be in use."""
        with LIBRARIES:
            self._agent = None

    def _make(self) -> Any:
        api = _import_nixl()
        # A class per status, derived from nothing in common; here all of them mean the same.
        own = (value for value in vars(api.nixlBind).values() if isinstance(value, type))
        self.errors += tuple(value for value in own if issubclass(value, Exception))
        plugin = self._plugin.plugin
        try:
            config = api.nixl_agent_config(
                enable_prog_thread=False, backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            )
            with _defaults(self._plugin.environment):
                agent = api.nixl_agent(self.name, config)
                agent.create_backend(plugin, self._params)
            taken = {kind.removesuffix("_SEG") for kind in agent.get_backend_mem_types(plugin)}
        except self.errors as error:
            raise MoverUnavailableError(
                f"{self._plugin.name}: NIXL's {plugin} plugin does not start here: {words(error)}"
            ) from error
        self.memory_kinds = frozenset(kind for kind in MemoryKind if kind in self.memory_kinds and kind.name in taken)
        return agent


def descriptors(extents: Extents, base: int, device_id: int) -> npt.NDArray[np.uint64] | list[tuple[int, int, int]]:
    """Rows of (address, length, device id) for NIXL: a few as tuples, which cost less."""
    if len(extents) <= _FEW:
        return [(base + at, length, device_id) for at, length in extents.tolist()]
    rows = np.empty((len(extents), 3), dtype=np.uint64)
    rows[:, 0] = extents[:, 0] + base
    rows[:, 1] = extents[:, 1]
    rows[:, 2] = device_id
    return rows


def words(error: Exception) -> str:
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
