"""The hands of ``nixl-offload verify``: goes through a tier's namespaces, several reads in flight, verdicts in order.

Threading: the caller's thread lists and settles, ``THREADS`` others read and check. Memory: a piece per thread and the
names of the chunks in flight. After an interruption or a failure of storage ``TierProgress`` says how far it was.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from nixl_offload.cli.inventory.base import Held, Inventory
from nixl_offload.cli.verify.delete import SLAB_BATCH, Deleted, delete_bad
from nixl_offload.cli.verify.judge import BAD, GOOD, STALE, UNREADABLE, Judge, Throttle, Verdict
from nixl_offload.cli.verify.state import TierProgress
from nixl_offload.errors import StoreError

THREADS: Final = 8
_IN_FLIGHT: Final = 2 * THREADS
_FAILURES_IN_A_ROW: Final = 3
"""After so many chunks that cannot be read, the storage is taken to be down."""


class TierRun:
    """One tier's verification. ``tell`` hears of every verdict but good ones, ``tick`` is called after every chunk."""

    def __init__(
        self,
        inventory: Inventory,
        progress: TierProgress,
        *,
        namespace: str | None,
        delete: bool,
        bytes_per_s: float | None,
        tell: Callable[[Held, Verdict, Deleted | None], None],
        tick: Callable[[], None],
    ) -> None:
        self._inventory = inventory
        self._progress = progress
        self._namespace = namespace
        self._delete = delete
        self._tell = tell
        self._tick = tick
        self._stop = threading.Event()
        self._judge = Judge(inventory, Throttle(bytes_per_s), self._stop)
        self._bad: list[Verdict] = []
        self._failed_in_a_row = 0

    @property
    def bytes_read(self) -> int:
        """By this run; what it resumes not counted."""
        return self._judge.bytes_read

    def run(self) -> None:
        """Read everything. Raises StoreError, TierError, KeyboardInterrupt; ``progress`` is right all the same."""
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="nixl-offload-verify")
        try:
            for held in self._inventory.namespaces():
                if self._namespace not in (None, held.name) or held.path < self._progress.namespace:
                    continue
                if held.path != self._progress.namespace:
                    self._progress.namespace, self._progress.cursor = held.path, ""
                if held.trouble is not None:
                    self._progress.failures += 1
                    continue
                self._go_through(pool, held)
        finally:
            self._stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
        self._progress.done = True

    def _go_through(self, pool: ThreadPoolExecutor, held: Held) -> None:
        flight: deque[Future[Verdict]] = deque()
        try:
            for chunk in self._inventory.chunks(held, self._progress.cursor):
                flight.append(pool.submit(self._judge.judge, held, chunk))
                if len(flight) >= _IN_FLIGHT:
                    self._settle(held, flight)
            while flight:
                self._settle(held, flight)
        finally:
            self._delete_bad(held)

    def _settle(self, held: Held, flight: deque[Future[Verdict]]) -> None:
        verdict = flight[0].result()
        flight.popleft()
        if verdict.kind == UNREADABLE:
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= _FAILURES_IN_A_ROW:
                raise StoreError(f"{verdict.problems[0].words}; gave up after several in a row", cause="io")
        elif verdict.kind == GOOD:
            self._failed_in_a_row = 0
        self._progress.add(verdict.kind, verdict.chunk.size_bytes)
        self._progress.cursor = verdict.chunk.cursor
        if self._delete and verdict.kind in (BAD, STALE):
            self._bad.append(verdict)
            if len(self._bad) >= (SLAB_BATCH if self._inventory.locks else 1):
                self._delete_bad(held)
        elif verdict.kind != GOOD:
            self._tell(held, verdict, None)
        self._tick()

    def _delete_bad(self, held: Held) -> None:
        bad, self._bad = self._bad, []
        if not bad:
            return
        for deleted in delete_bad(self._inventory, held, bad):
            self._progress.deleted += deleted.done
            self._progress.left += not deleted.done and deleted.verdict.kind == BAD
            self._tell(held, deleted.verdict, deleted)
