"""The link to a bucket: a shard is an object, which the mover puts and gets whole.

Threading: the pump's thread. Nothing here does I/O: the mover does, and its failures tell how the bucket is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Final

from nixl_offload.errors import MoverError, TierError
from nixl_offload.movers.base import Mover
from nixl_offload.tiers.base import Target, at_once
from nixl_offload.tiers.breaker import Breaker
from nixl_offload.tiers.shared.link import SharedLink
from nixl_offload.types import Key, Location

FAILURES: Final = 8
"""In a row, of stores or of loads; then no more of them go to the bucket until a trial succeeds."""
TRIAL_LIMIT_S: Final = 10.0
"""A trial without an outcome for this time is lost, and another may go."""


class ObjectLink(SharedLink):
    """One rank's shards in a bucket.

    After a failure still holds: an object is whole or absent, for a PUT is one request.
    """

    def __init__(self, where: str, namespace_name: str, rank: int, mover: Mover, clock: Callable[[], float]) -> None:
        """``where`` is for people, such as ``s3://bucket/prefix``, without credentials."""
        name = f"S3 tier {where}"
        loads = Breaker(f"Loads from {name}", threshold=FAILURES, trial_limit_s=TRIAL_LIMIT_S)
        stores = Breaker(f"Stores to {name}", threshold=FAILURES, trial_limit_s=TRIAL_LIMIT_S)
        super().__init__(name, namespace_name, rank, mover, clock, stores=stores, loads=loads)

    def connect(self) -> None:
        """The first transfer tells."""

    def begin_write(
        self, key: Key, location: Location, length_bytes: int, shard: int | None = None
    ) -> Generator[None, None, Target]:
        return (yield from at_once(self._open(key, shard, length_bytes, self._stores)))

    def end_write(self, target: Target) -> Generator[None, None, None]:
        """The object is there since its PUT was answered."""
        self._close_file(target.file)
        self._stores.succeeded(self._clock())
        yield from at_once(None)

    def fail_write(self, target: Target, error: str | None) -> None:
        """What a PUT given up may still write is a whole object."""
        self._close_file(target.file)
        if error is not None:
            self._stores.failed("io", error, self._clock())

    def begin_read(
        self, key: Key, location: Location, length_bytes: int, shard: int | None = None
    ) -> Generator[None, None, Target]:
        """Whether the object is there shows when it is read."""
        return (yield from at_once(self._open(key, shard, length_bytes, self._loads)))

    def _open(self, key: Key, shard: int | None, length_bytes: int, breaker: Breaker) -> Target:
        self._close_stale()
        try:
            return Target(self.mover.open_object(self._name_of(key, shard), length_bytes), 0)
        except MoverError as error:
            breaker.failed("io", str(error), self._clock())
            raise TierError(str(error), cause="io") from error
