"""What the links to a bucket and to a shared directory have in common: names of shards, and whether the tier works.

Threading: the pump's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from nixl_offload.movers.base import FileId, Mover, close_if_idle
from nixl_offload.tiers.base import Link, Target
from nixl_offload.tiers.breaker import Breaker
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.types import Key


class SharedLink(Link):
    """One rank's shards. Loads and stores are watched apart: storage that refuses writers can be read."""

    def __init__(
        self,
        name: str,
        namespace_name: str,
        rank: int,
        mover: Mover,
        clock: Callable[[], float],
        *,
        stores: Breaker,
        loads: Breaker,
    ) -> None:
        """``clock`` is that of the breakers."""
        self.name = name
        self.mover = mover
        self._namespace = namespace_name
        self._rank = rank
        self._clock = clock
        self._stores = stores
        self._loads = loads
        self._stale: list[FileId] = []
        """Files that nobody uses any more, of which the mover has not let go yet."""

    @property
    def trouble(self) -> str:
        return self._stores.cause or self._loads.cause or "none"

    def may_store(self) -> bool:
        self._close_stale()
        return self._stores.allows(self._clock())

    def may_load(self) -> bool:
        self._close_stale()
        return self._loads.allows(self._clock())

    @property
    def suspect(self) -> bool:
        return not self._loads.closed

    def end_read(self, target: Target) -> None:
        self._close_file(target.file)
        self._loads.succeeded(self._clock())

    def fail_read(self, target: Target, error: str | None) -> None:
        self._close_file(target.file)
        if error is not None:
            self._loads.failed("io", error, self._clock())

    def overdue(self) -> None:
        self._loads.failed("timeout", "a load was given up before it was answered", self._clock())

    def close(self) -> None:
        self._close_stale()

    def _name_of(self, key: Key, shard: int | None) -> str:
        return shard_name(self._namespace, key, self._rank if shard is None else shard)

    def _close_file(self, file: FileId) -> None:
        self._stale.append(file)
        self._close_stale()

    def _close_stale(self) -> None:
        """Close what can be closed. A file that late I/O may still touch stays until the mover closes."""
        self._stale = [file for file in self._stale if not close_if_idle(self.mover, file)]
