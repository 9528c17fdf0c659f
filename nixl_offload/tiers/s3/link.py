"""The link to a bucket: a shard is an object, named by key and number, which the mover puts and gets whole.

Threading: the pump's thread. Nothing here does I/O: the mover does, and its failures tell how the bucket is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Final

from nixl_offload.errors import MoverError, TierError
from nixl_offload.movers.base import FileId, Mover, close_if_idle
from nixl_offload.tiers.base import Link, Target, at_once
from nixl_offload.tiers.breaker import Breaker
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.types import Key, Location

FAILURES: Final = 8
"""In a row, of stores or of loads; then no more of them go to the bucket until a trial succeeds."""
TRIAL_LIMIT_S: Final = 10.0
"""A trial that is not heard of for so long is lost, and another may go."""


class ObjectLink(Link):
    """One rank's shards in a bucket. Loads and stores are watched apart: a bucket that refuses writers can be read.

    After a failure still holds: an object is whole or absent, for a PUT is one request.
    """

    def __init__(self, where: str, namespace_name: str, rank: int, mover: Mover, clock: Callable[[], float]) -> None:
        """``where`` is for people, such as ``s3://bucket/prefix``, without credentials."""
        self.name = f"S3 tier {where}"
        self.mover = mover
        self._namespace = namespace_name
        self._rank = rank
        self._clock = clock
        self._loads = Breaker(f"Loads from {self.name}", threshold=FAILURES, trial_limit_s=TRIAL_LIMIT_S)
        self._stores = Breaker(f"Stores to {self.name}", threshold=FAILURES, trial_limit_s=TRIAL_LIMIT_S)
        self._stale: list[FileId] = []

    @property
    def trouble(self) -> str:
        return self._stores.cause or self._loads.cause or "none"

    def connect(self) -> None:
        """The first transfer tells."""

    def may_store(self) -> bool:
        return self._stores.allows(self._clock())

    def may_load(self) -> bool:
        return self._loads.allows(self._clock())

    @property
    def suspect(self) -> bool:
        return not self._loads.closed

    def begin_write(
        self, key: Key, location: Location, length_bytes: int, shard: int | None = None
    ) -> Generator[None, None, Target]:
        return (yield from at_once(self._open(key, shard, length_bytes, self._stores)))

    def end_write(self, target: Target) -> Generator[None, None, None]:
        """The object is there since its PUT was answered."""
        self._end(target)
        self._stores.succeeded(self._clock())
        yield from at_once(None)

    def fail_write(self, target: Target, error: str | None) -> None:
        """What a PUT given up may still write is a whole object."""
        self._end(target)
        if error is not None:
            self._stores.failed("io", error, self._clock())

    def begin_read(
        self, key: Key, location: Location, length_bytes: int, shard: int | None = None
    ) -> Generator[None, None, Target]:
        """Whether the object is there shows when it is read."""
        return (yield from at_once(self._open(key, shard, length_bytes, self._loads)))

    def end_read(self, target: Target) -> None:
        self._end(target)
        self._loads.succeeded(self._clock())

    def fail_read(self, target: Target, error: str | None) -> None:
        self._end(target)
        if error is not None:
            self._loads.failed("io", error, self._clock())

    def overdue(self) -> None:
        self._loads.failed("timeout", "a load was given up before it was answered", self._clock())

    def close(self) -> None:
        self._close_stale()

    def _open(self, key: Key, shard: int | None, length_bytes: int, breaker: Breaker) -> Target:
        self._close_stale()
        name = shard_name(self._namespace, key, self._rank if shard is None else shard)
        try:
            return Target(self.mover.open_object(name, length_bytes), 0)
        except MoverError as error:
            breaker.failed("io", str(error), self._clock())
            raise TierError(str(error), cause="io") from error

    def _end(self, target: Target) -> None:
        self._stale.append(target.file)
        self._close_stale()

    def _close_stale(self) -> None:
        """Forget what was opened; an object that late I/O may still touch stays until the mover closes."""
        self._stale = [file for file in self._stale if not close_if_idle(self.mover, file)]
