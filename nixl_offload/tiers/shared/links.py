"""The links to a bucket and to a shared directory. A shard is an object, or a file that becomes visible when whole.

Threading: the pump's thread. The mover alone moves objects. Directory calls that could hang run on the link's own
daemon threads, with a time limit.
Ownership: from ``adopt_file`` on, a descriptor belongs to the mover.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from nixl_offload.calls import Call, CallThreads
from nixl_offload.errors import MoverError, StoreError, TierError
from nixl_offload.movers.base import FileId, Mover, close_if_idle
from nixl_offload.stores.directory import Draft, OpenFile, TreeFiles
from nixl_offload.stores.filesystem import REAL, Filesystem
from nixl_offload.tiers.base import NOTHING_STORED, Link, Target
from nixl_offload.tiers.breaker import Breaker
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.types import Key, Location

T = TypeVar("T")
O = TypeVar("O", bound=OpenFile)  # noqa: E741

FAILURES: Final = 8
"""After this many failed loads, or failed stores to a bucket, in a row, only trials are made until one succeeds."""
TRIAL_LIMIT_S: Final = 10.0
"""A trial without an outcome after this time is lost, and another may go."""
STORE_PAUSE_S: Final = 60.0
"""A directory that cannot be written to is tried again at least this often."""
BEGIN_LIMIT_S: Final = 5.0
"""Time limit for creating or opening a file. Only a filesystem that hangs takes longer."""
END_LIMIT_S: Final = 30.0
"""Time limit for syncing and renaming a file; a busy server needs time to write all its data."""
MAX_PENDING: Final = 128
"""With this many unfinished calls, abandoned ones included, the link makes no new ones."""
TOUCH_AFTER_S: Final = 3600.0
"""A read renews a file's modification time if it is older than this. Eviction deletes files in order of that time."""
KEPT_TOUCH_S: Final = 30.0
"""The same for directories from which engines evict. They may fill within minutes; a new time costs microseconds."""


class SharedLink(Link):
    """A rank's access to shards. Loads and stores have a breaker each: storage that refuses writes may be readable."""

    def __init__(
        self, name: str, namespace_name: str, mover: Mover, clock: Callable[[], float], stores: Breaker
    ) -> None:
        """``clock``: the time for the breakers, monotonic seconds."""
        self.name = name
        self.mover = mover
        self._namespace = namespace_name
        self._clock = clock
        self._stores = stores
        self._loads = Breaker(f"Loads from {name}", threshold=FAILURES, trial_limit_s=TRIAL_LIMIT_S)
        self._stale: list[FileId] = []
        """Files that are no longer used. One that late I/O may still touch stays open until the mover closes."""

    @property
    def _is_stuck(self) -> bool:
        """Whether so many calls hang that no more are made."""
        return False

    @property
    def trouble(self) -> str:
        return "io" if self._is_stuck else self._stores.cause or self._loads.cause or "none"

    def may_store(self) -> bool:
        self._close_stale()
        return not self._is_stuck and self._stores.allows(self._clock())

    def may_load(self) -> bool:
        self._close_stale()
        return not self._is_stuck and self._loads.allows(self._clock())

    @property
    def refuses(self) -> bool:
        return self._is_stuck or not self._stores.closed

    @property
    def suspect(self) -> bool:
        return self._is_stuck or not self._loads.closed

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

    def _name_of(self, key: Key, shard: int) -> str:
        return shard_name(self._namespace, key, shard)

    def _close_file(self, file: FileId) -> None:
        self._stale.append(file)
        self._close_stale()

    def _close_stale(self) -> None:
        self._stale = [file for file in self._stale if not close_if_idle(self.mover, file)]


class ObjectLink(SharedLink):
    """A rank's access to shards in a bucket. Transfers that fail show that the bucket has trouble.

    After a failure, an object is whole or absent, because a PUT is one request.
    """

    def __init__(self, where: str, namespace_name: str, mover: Mover, clock: Callable[[], float]) -> None:
        """``where`` is for people, such as ``s3://bucket/prefix``, without credentials."""
        name = f"S3 tier {where}"
        stores = Breaker(f"Stores to {name}", threshold=FAILURES, trial_limit_s=TRIAL_LIMIT_S)
        super().__init__(name, namespace_name, mover, clock, stores)

    def connect(self) -> None:
        """Do nothing: the first transfer shows whether the bucket works."""

    def begin_write(self, key: Key, location: Location, length_bytes: int, shard: int) -> Generator[None, None, Target]:
        yield from ()
        return self._open(key, shard, length_bytes, self._stores)

    def end_write(self, target: Target) -> Generator[None, None, None]:
        """The object has been visible since its PUT was answered."""
        yield from ()
        self._close_file(target.file)
        self._stores.succeeded(self._clock())

    def fail_write(self, target: Target, error: str | None) -> None:
        """An abandoned PUT may still write its object, but only a whole one."""
        self._close_file(target.file)
        if error is not None:
            self._stores.failed("io", error, self._clock())

    def begin_read(self, key: Key, location: Location, length_bytes: int, shard: int) -> Generator[None, None, Target]:
        """Open the object; the read shows whether it exists."""
        yield from ()
        return self._open(key, shard, length_bytes, self._loads)

    def _open(self, key: Key, shard: int, length_bytes: int, breaker: Breaker) -> Target:
        self._close_stale()
        try:
            return Target(self.mover.open_object(self._name_of(key, shard), length_bytes), 0)
        except MoverError as error:
            breaker.failed("io", str(error), self._clock())
            raise TierError(str(error), cause="io") from error


@dataclass(slots=True, eq=False)
class _WriteTarget(Target):
    draft: Draft


class TreeLink(SharedLink):
    """A rank's access to shards in a shared directory.

    After a failure, a name leads to a whole file or to none. Files that readers have open do not change.
    """

    def __init__(
        self,
        root: str,
        namespace_name: str,
        mover: Mover,
        *,
        direct_io: bool,
        clock: Callable[[], float],
        is_kept: bool = False,
        kept_free: float = 0.0,
        filesystem: Filesystem = REAL,
    ) -> None:
        """``is_kept``: engines evict from the directory, so reads update modification times often. ``kept_free``: as
        for ``TreeFiles``.
        """
        name = f"Shared directory tier {root}"
        stores = Breaker(
            name,
            threshold=1,
            longest_pause_s=STORE_PAUSE_S,
            trial_limit_s=TRIAL_LIMIT_S,
            flap_window_s=STORE_PAUSE_S,
            effect=NOTHING_STORED,
        )
        super().__init__(name, namespace_name, mover, clock, stores)
        touch_after_s = KEPT_TOUCH_S if is_kept else TOUCH_AFTER_S
        self._files = TreeFiles(
            root, filesystem=filesystem, direct_io=direct_io, touch_after_s=touch_after_s, kept_free=kept_free
        )
        self._calls = CallThreads("nixl-offload-tree", clock=clock)
        self._syncs = CallThreads("nixl-offload-tree-sync", clock=clock)
        """Threads for slow syncs, so that opening and creating files never waits for them."""
        self._in_use: list[tuple[Call[None], FileId]] = []
        """Files that a call still uses."""

    @property
    def _is_stuck(self) -> bool:
        return self._calls.pending + self._syncs.pending >= MAX_PENDING

    def connect(self) -> None:
        """Make the namespace's directory. Waits for ``BEGIN_LIMIT_S`` at most."""
        call = self._calls.start(partial(self._files.make_directory, f"{self._files.root}/{self._namespace}"))
        try:
            call.result(BEGIN_LIMIT_S)
        except StoreError as error:
            self._stores.failed(error.cause, str(error), self._clock())
        except TimeoutError:
            self._stores.failed("io", str(self._hung(BEGIN_LIMIT_S)), self._clock())

    def begin_write(self, key: Key, location: Location, length_bytes: int, shard: int) -> Generator[None, None, Target]:
        try:
            file, draft = yield from self._open(partial(self._files.create, self._name_of(key, shard), length_bytes))
        except TierError as error:
            if error.cause != "files":
                self._stores.failed(error.cause, str(error), self._clock())
            raise
        return _WriteTarget(file, 0, draft)

    def end_write(self, target: Target) -> Generator[None, None, None]:
        assert isinstance(target, _WriteTarget)
        call = self._syncs.start(partial(self._files.publish, target.draft))
        self._in_use.append((call, target.file))
        try:
            yield from self._answer(self._syncs, call, END_LIMIT_S)
        except TierError as error:
            target.draft.is_unwanted = True
            self._stores.failed(error.cause, str(error), self._clock())
            raise
        finally:
            self._close_stale()
        self._stores.succeeded(self._clock())

    def fail_write(self, target: Target, error: str | None) -> None:
        assert isinstance(target, _WriteTarget)
        # Of the two descriptors, the first to close may block until a server has the data: a thread closes it.
        self._in_use.append((self._calls.start(partial(self._files.discard, target.draft)), target.file))
        if error is not None:
            self._stores.failed("io", error, self._clock())

    def begin_read(self, key: Key, location: Location, length_bytes: int, shard: int) -> Generator[None, None, Target]:
        """Open the file. If it is missing, that counts as a success: the filesystem has answered."""
        try:
            file, _ = yield from self._open(partial(self._files.open, self._name_of(key, shard), length_bytes))
        except TierError as error:
            if error.cause == "missing":
                self._loads.succeeded(self._clock())
            elif error.cause != "files":
                self._loads.failed(error.cause, str(error), self._clock())
            raise
        return Target(file, 0)

    def close(self) -> None:
        """Close the files and end the threads; a thread that hangs is abandoned."""
        self._calls.close()
        self._syncs.close()
        super().close()

    def _open(self, work: Callable[[], O]) -> Generator[None, None, tuple[FileId, O]]:
        """Open or create a file and hand it to the mover, which closes it. Raises TierError."""
        call = self._calls.start(work, discard=self._files.abandon)
        opened = yield from self._answer(self._calls, call, BEGIN_LIMIT_S)
        try:
            return self.mover.adopt_file(opened.fd, opened.path, opened.size_bytes, direct=opened.direct), opened
        except MoverError as error:
            if isinstance(opened, Draft):
                self._calls.start(partial(self._files.discard, opened))
            raise TierError(str(error), cause="io") from error

    def _answer(self, threads: CallThreads, call: Call[T], limit_s: float) -> Generator[None, None, T]:
        """Wait for a call and return its result; abandon it after ``limit_s``. Raises TierError.

        Time counts from when a thread began the call. While it is queued, time counts from when a call last ended.
        """
        asked_s = self._clock()
        try:
            while not call.done():
                since_s = max(asked_s, threads.ended_s) if call.begun_s is None else call.begun_s
                if self._clock() >= since_s + limit_s:
                    raise self._hung(limit_s)
                yield
        except BaseException:  # the limit has passed, or the generator was closed because the engine ends
            call.abandon()
            raise
        try:
            return call.result()
        except StoreError as error:
            raise TierError(str(error), cause=error.cause) from error

    def _hung(self, limit_s: float) -> TierError:
        return TierError(f"{self._files.root} did not answer in {limit_s:g} s", cause="io")

    def _close_stale(self) -> None:
        self._stale += [file for call, file in self._in_use if call.done()]
        self._in_use = [each for each in self._in_use if each[1] not in self._stale]
        super()._close_stale()
