"""The link to a shared directory: a file per shard, written under a draft's name and renamed into place when whole.

Threading: the pump's thread; every call that could hang runs on the link's own daemon threads, and is given up after a
while. Ownership: descriptors belong to the mover from ``adopt_file`` on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from nixl_offload.errors import MoverError, TierError
from nixl_offload.movers.base import FileId, Mover, close_if_idle
from nixl_offload.tiers.base import NOTHING_STORED, Link, Target
from nixl_offload.tiers.breaker import Breaker
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.tiers.shared_dir.calls import Call, CallThreads
from nixl_offload.tiers.shared_dir.files import KEPT_TOUCH_S, TOUCH_AFTER_S, Draft, OpenedShard, TreeFiles
from nixl_offload.types import Key, Location

T = TypeVar("T")

BEGIN_LIMIT_S: Final = 5.0
"""How long creating or opening a file may take. Only a filesystem that hangs takes longer."""
END_LIMIT_S: Final = 30.0
"""How long syncing a file and renaming it may take: a busy server has to write it all down."""
MAX_PENDING: Final = 128
"""Calls that have not returned, those given up included. With so many of them nothing more is asked."""
LOAD_FAILURES: Final = 8
"""In a row; then no load is tried until a trial succeeds."""
STORE_PAUSE_S: Final = 60.0
"""A directory that cannot be written to is tried again at least this often."""
TRIAL_LIMIT_S: Final = 10.0
"""A trial that is not heard of for so long is lost, and another may go."""


@dataclass(slots=True, eq=False)
class _WriteTarget(Target):
    draft: Draft
    is_trial: bool
    """Begun while the tier was in trouble: if it succeeds, the trouble is over."""


class TreeLink(Link):
    """One rank's shards in a shared directory. Loads and stores are watched apart: a full disk can be read.

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
    ) -> None:
        """``is_kept``: engines evict from the directory, so it must show soon what is in use. ``kept_free``: as for
        ``TreeFiles``.
        """
        self.name = f"shared directory tier {root}"
        self.mover = mover
        self._namespace = namespace_name
        self._rank = rank
        self._clock = clock
        self._files = TreeFiles(
            root,
            direct_io=direct_io,
            touch_after_s=KEPT_TOUCH_S if is_kept else TOUCH_AFTER_S,
            kept_free=kept_free,
        )
        self._calls = CallThreads("nixl-offload-tree", clock=clock)
        self._syncs = CallThreads("nixl-offload-tree-sync", clock=clock)
        """For what takes long: nothing that is opened or created waits behind the syncing of files."""
        self._stores = Breaker(
            f"Shared directory tier {root}",
            threshold=1,
            longest_pause_s=STORE_PAUSE_S,
            trial_limit_s=TRIAL_LIMIT_S,
            flap_window_s=STORE_PAUSE_S,
            effect=NOTHING_STORED,
        )
        self._loads = Breaker(
            f"Loads from shared directory tier {root}", threshold=LOAD_FAILURES, trial_limit_s=TRIAL_LIMIT_S
        )
        self._verdicts: list[tuple[Call[str], str]] = []
        """Failed writes whose cause is being looked for, and what the mover said."""
        self._stale: list[tuple[Call[None] | None, FileId]] = []
        """Files to be closed, when the call that uses them has returned and the mover lets go of them."""

    @property
    def trouble(self) -> str:
        if self._pending >= MAX_PENDING:
            return "io"
        return self._stores.cause or self._loads.cause or "none"

    def connect(self) -> None:
        """Waits for ``BEGIN_LIMIT_S`` at most."""
        call = self._calls.start(partial(self._files.connect, self._namespace))
        try:
            if not call.wait(BEGIN_LIMIT_S):
                raise self._hung(BEGIN_LIMIT_S)
            call.result()
        except TierError as error:
            self._stores.failed(error.cause, str(error), self._clock())

    def may_store(self) -> bool:
        """In trouble one store at a time is let through, when a trial is due."""
        self._reap()
        if self._verdicts or self._pending >= MAX_PENDING:
            return False
        return self._stores.allows(self._clock())

    def may_load(self) -> bool:
        self._reap()
        return self._pending < MAX_PENDING and self._loads.allows(self._clock())

    @property
    def suspect(self) -> bool:
        return not self._loads.closed

    def begin_write(
        self, key: Key, location: Location, length_bytes: int, shard: int | None = None
    ) -> Generator[None, None, Target]:
        is_trial = not self._stores.closed
        name = self._name_of(key, shard)
        call = self._calls.start(partial(self._files.create, name, length_bytes), discard=self._files.discard_unused)
        try:
            draft = yield from self._answer(self._calls, call, BEGIN_LIMIT_S)
            try:
                file = self.mover.adopt_file(draft.fd, draft.path, length_bytes, direct=draft.direct)
            except MoverError as error:
                self._calls.start(partial(self._files.discard, draft))
                raise TierError(str(error), cause="io") from error
        except TierError as error:
            if error.cause != "files":
                self._stores.failed(error.cause, str(error), self._clock())
            raise
        return _WriteTarget(file, 0, draft, is_trial)

    def end_write(self, target: Target) -> Generator[None, None, None]:
        assert isinstance(target, _WriteTarget)
        call = self._syncs.start(partial(self._files.publish, target.draft))
        try:
            yield from self._answer(self._syncs, call, END_LIMIT_S)
        except TierError as error:
            target.draft.given_up = True
            self._stores.failed(error.cause, str(error), self._clock())
            raise
        finally:
            self._close_file(target.file, call)
        if target.is_trial:
            self._stores.succeeded(self._clock())

    def fail_write(self, target: Target, error: str | None) -> None:
        """The cause is told when the filesystem has said it; until then nothing is stored."""
        assert isinstance(target, _WriteTarget)
        draft = target.draft
        # Of two descriptors the first to be closed is the one that may wait for what was written to reach a server.
        self._close_file(target.file, self._calls.start(partial(self._files.discard, draft)))
        if error is not None:
            self._verdicts.append((self._calls.start(partial(self._files.why, draft.length_bytes)), error))

    def begin_read(
        self, key: Key, location: Location, length_bytes: int, shard: int | None = None
    ) -> Generator[None, None, Target]:
        """That a file is gone is an answer: the filesystem works."""
        name = self._name_of(key, shard)
        call: Call[OpenedShard] = self._calls.start(
            partial(self._files.open, name, length_bytes), discard=self._files.discard_opened
        )
        try:
            opened = yield from self._answer(self._calls, call, BEGIN_LIMIT_S)
            try:
                file = self.mover.adopt_file(opened.fd, opened.path, length_bytes, direct=opened.direct)
            except MoverError as error:
                raise TierError(str(error), cause="io") from error
        except TierError as error:
            if error.cause == "missing":
                self._loads.succeeded(self._clock())
            elif error.cause != "files":
                self._loads.failed(error.cause, str(error), self._clock())
            raise
        return Target(file, 0)

    def end_read(self, target: Target) -> None:
        self._close_file(target.file, None)
        self._loads.succeeded(self._clock())

    def fail_read(self, target: Target, error: str | None) -> None:
        self._close_file(target.file, None)
        if error is not None:
            self._loads.failed("io", error, self._clock())

    def overdue(self) -> None:
        self._loads.failed("timeout", "a load was given up before it was answered", self._clock())

    def close(self) -> None:
        """A thread that hangs is left behind."""
        self._calls.close()
        self._syncs.close()
        self._reap()

    def _name_of(self, key: Key, shard: int | None) -> str:
        return shard_name(self._namespace, key, self._rank if shard is None else shard)

    @property
    def _pending(self) -> int:
        return self._calls.pending + self._syncs.pending

    def _answer(self, threads: CallThreads, call: Call[T], limit_s: float) -> Generator[None, None, T]:
        """Wait for a call; one that does not return is given up. Raises TierError.

        What counts is the time since it was taken up, or, while it waits for a thread, since a call has ended.
        """
        asked_s = self._clock()
        try:
            while not call.done:
                since_s = max(asked_s, threads.ended_s) if call.begun_s is None else call.begun_s
                if self._clock() >= since_s + limit_s:
                    raise self._hung(limit_s)
                yield
        except BaseException:  # it takes too long, or nobody waits any more: the engine ends
            call.abandon()
            raise
        return call.result()

    def _hung(self, limit_s: float) -> TierError:
        return TierError(f"{self._files.root} did not answer in {limit_s:g} s", cause="io")

    def _reap(self) -> None:
        """Close what can be closed, and take note of the verdicts that have come."""
        self._stale = [(call, file) for call, file in self._stale if not self._closes(call, file)]
        come = [verdict for verdict in self._verdicts if verdict[0].done]
        self._verdicts = [verdict for verdict in self._verdicts if verdict not in come]
        for call, error in come:
            self._stores.failed(call.result(), error, self._clock())

    def _close_file(self, file: FileId, call: Call[None] | None) -> None:
        if not self._closes(call, file):
            self._stale.append((call, file))

    def _closes(self, call: Call[None] | None, file: FileId) -> bool:
        """Close a file in the mover, unless ``call`` still uses it or the mover owns it; whether it is closed."""
        return (call is None or call.done) and close_if_idle(self.mover, file)
