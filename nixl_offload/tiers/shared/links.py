"""The links to a bucket and to a shared directory: a shard is an object, or a file that shows when it is whole.

Threading: the pump's thread. Objects are moved by the mover alone. Every call to a directory that could hang runs on
the link's own daemon threads, and is given up after a while.
Ownership: a descriptor belongs to the mover from ``adopt_file`` on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from nixl_offload.errors import MoverError, StoreError, TierError
from nixl_offload.movers.base import FileId, Mover, close_if_idle
from nixl_offload.stores.directory import Draft, OpenFile, TreeFiles
from nixl_offload.stores.filesystem import REAL, Filesystem
from nixl_offload.tiers.base import NOTHING_STORED, Link, Target, at_once
from nixl_offload.tiers.breaker import Breaker
from nixl_offload.tiers.calls import Call, CallThreads
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.types import Key, Location

T = TypeVar("T")
O = TypeVar("O", bound=OpenFile)  # noqa: E741

FAILURES: Final = 8
"""In a row, of loads, or of stores to a bucket; then no more of them are tried until a trial succeeds."""
TRIAL_LIMIT_S: Final = 10.0
"""A trial without an outcome for this time is lost, and another may go."""
STORE_PAUSE_S: Final = 60.0
"""A directory that cannot be written to is tried again at least this often."""
BEGIN_LIMIT_S: Final = 5.0
"""How long creating or opening a file may take. Only a filesystem that hangs takes longer."""
END_LIMIT_S: Final = 30.0
"""How long syncing a file and renaming it may take: a busy server has to write it all down."""
MAX_PENDING: Final = 128
"""Calls that have not returned, those given up included. With so many of them nothing more is asked."""
TOUCH_AFTER_S: Final = 3600.0
"""A file that is read gets a new modification time when the old one is older: what goes first when space is made is
what was not used for longest."""
KEPT_TOUCH_S: Final = 30.0
"""The same on a local drive: it may be full, and evict, within minutes, and a new time costs it microseconds."""


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
        """Files that nobody uses any more. One that late I/O may still touch stays open until the mover closes."""

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
        self._stale = [file for file in self._stale if not close_if_idle(self.mover, file)]


class ObjectLink(SharedLink):
    """One rank's shards in a bucket. The mover's failures tell how the bucket is.

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


@dataclass(slots=True, eq=False)
class _WriteTarget(Target):
    draft: Draft


class TreeLink(SharedLink):
    """One rank's shards in a shared directory.

    After a failure still holds: a name leads to a whole file or to none; what readers have open stays as it was.
    """

    def __init__(
        self,
        root: str,
        namespace_name: str,
        rank: int,
        mover: Mover,
        *,
        direct_io: bool,
        clock: Callable[[], float],
        is_kept: bool = False,
        kept_free: float = 0.0,
        filesystem: Filesystem = REAL,
    ) -> None:
        """``is_kept``: engines evict from the directory, so it must show soon what is in use. ``kept_free``: as for
        ``TreeFiles``.
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
        loads = Breaker(f"Loads from {name}", threshold=FAILURES, trial_limit_s=TRIAL_LIMIT_S)
        super().__init__(name, namespace_name, rank, mover, clock, stores=stores, loads=loads)
        touch_after_s = KEPT_TOUCH_S if is_kept else TOUCH_AFTER_S
        self._files = TreeFiles(
            root, filesystem=filesystem, direct_io=direct_io, touch_after_s=touch_after_s, kept_free=kept_free
        )
        self._calls = CallThreads("nixl-offload-tree", clock=clock)
        self._syncs = CallThreads("nixl-offload-tree-sync", clock=clock)
        """For what takes long: nothing that is opened or created waits behind the syncing of files."""
        self._in_use: list[tuple[Call[None], FileId]] = []
        """Files that a call still works with."""

    @property
    def trouble(self) -> str:
        return "io" if self._pending >= MAX_PENDING else super().trouble

    def connect(self) -> None:
        """Waits for ``BEGIN_LIMIT_S`` at most."""
        call = self._calls.start(partial(self._files.make_directory, f"{self._files.root}/{self._namespace}"))
        try:
            call.result(BEGIN_LIMIT_S)
        except StoreError as error:
            self._stores.failed(error.cause, str(error), self._clock())
        except TimeoutError:
            self._stores.failed("io", str(self._hung(BEGIN_LIMIT_S)), self._clock())

    def may_store(self) -> bool:
        return self._pending < MAX_PENDING and super().may_store()

    def may_load(self) -> bool:
        return self._pending < MAX_PENDING and super().may_load()

    def begin_write(
        self, key: Key, location: Location, length_bytes: int, shard: int | None = None
    ) -> Generator[None, None, Target]:
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
        # Of two descriptors the first to be closed is the one that may wait for what was written to reach a server.
        self._in_use.append((self._calls.start(partial(self._files.discard, target.draft)), target.file))
        if error is not None:
            self._stores.failed("io", error, self._clock())

    def begin_read(
        self, key: Key, location: Location, length_bytes: int, shard: int | None = None
    ) -> Generator[None, None, Target]:
        """That a file is gone is an answer: the filesystem works."""
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
        """A thread that hangs is left behind."""
        self._calls.close()
        self._syncs.close()
        super().close()

    @property
    def _pending(self) -> int:
        return self._calls.pending + self._syncs.pending

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
        """Wait for a call; one that does not return is given up. Raises TierError.

        What counts is the time since it was taken up, or, while it waits for a thread, since a call has ended.
        """
        asked_s = self._clock()
        try:
            while not call.done():
                since_s = max(asked_s, threads.ended_s) if call.begun_s is None else call.begun_s
                if self._clock() >= since_s + limit_s:
                    raise self._hung(limit_s)
                yield
        except BaseException:  # it takes too long, or nobody waits any more: the engine ends
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
