"""The journal of an index: what rests where, written behind to SQLite, so that a restart finds it again.

Threading: ``put`` and ``delete`` are called by one thread (the scheduler's); they append to a queue and return, never
block on I/O and never raise. One daemon thread does all writing. Any thread may call ``flush`` and ``close``.
Trust: the journal may lag behind or lack rows. A row is a hint; the header in the slot decides.
Failure: storage trouble costs rows, never an exception: one warning per cause, and writing resumes when it can.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping

from nixl_offload.errors import TierError
from nixl_offload.index.database import (
    BATCH_OPS,
    STORAGE_ERRORS,
    Database,
    Delete,
    IndexReader,
    Put,
    Row,
    is_damage,
    translate,
)
from nixl_offload.types import Key, Location

_log = logging.getLogger(__name__)


class DurableIndex:
    """Rows (key, offset, slot_bytes): a key has one row and an offset has one key; the last put wins, both ways.

    Calls take effect in their order, in batches; a batch is there whole or not at all, also after kill -9. After a
    power cut the last batches may be missing.

    A database is *made anew*, deleted and then filled only with what comes after, when it is damaged, or was written
    for another geometry, or when more than ``max_queued_ops`` calls wait because storage has been away for long. It is
    not kept aside: its space is promised to chunks. Rows are lost by that, but none is wrong.
    """

    def __init__(self, database: Database, batch_delay_s: float, retry_interval_s: float, max_queued_ops: int) -> None:
        """Use ``open``."""
        self._batch_delay_s = batch_delay_s
        self._retry_interval_s = retry_interval_s
        self._max_queued_ops = max_queued_ops
        self._queue: deque[Put | Delete] = deque()
        """The caller appends without a lock (a deque's append is atomic); all else is done under ``_changed``."""
        self._work = threading.Event()
        self._hurry = threading.Event()
        self._changed = threading.Condition()
        """Guards the next four."""
        self._make_anew: str | None = None
        """Why the database has to be made anew, "" if it was cleared: what was queued or written before is void."""
        self._idle = False
        self._stopping = False
        self._abandoned = False
        # The writer's own, once it runs.
        self._database = database
        self._batch: list[Put | Delete] = []
        self._delete_first = False
        self._failing = True
        """Whether the last attempt failed, or there was none yet."""
        self._warned: set[str] = set()
        self._writer = threading.Thread(target=self._run, name="nixl-offload-index", daemon=True)

    @classmethod
    def open(
        cls,
        path: str,
        geometry: Mapping[str, str],
        *,
        batch_delay_s: float = 0.05,
        retry_interval_s: float = 5.0,
        max_queued_ops: int = 1_000_000,
    ) -> tuple[DurableIndex, Iterator[list[Row]]]:
        """Open or create the database at ``path``, whose directory must exist, and start the writer.

        ``geometry`` is all that gives offsets their meaning. Returns the journal and the rows it held, thousands at a
        time, the oldest put first, to be read before the first ``put``. Never raises for storage trouble: then
        rows are missing, and the writer goes on trying.

        ``batch_delay_s``: how long a call waits for company, and so what a kill -9 costs.
        ``retry_interval_s``: pause between attempts while storage fails.
        ``max_queued_ops``: bound of the queue; a queued call takes about 150 bytes.
        """
        journal = cls(Database(path, geometry), batch_delay_s, retry_interval_s, max_queued_ops)
        is_readable = journal._drain()
        journal._writer.start()
        return journal, journal._rows() if is_readable else iter(())

    # The caller's side

    def put(self, key: Key, location: Location) -> None:
        """``key`` rests at ``location``. O(1), no I/O, never raises; ignored after ``close``."""
        self._enqueue((key, location.offset, location.slot_bytes))

    def delete(self, key: Key) -> None:
        """``key`` is gone. O(1), no I/O, never raises; ignored after ``close``."""
        self._enqueue((key,))

    def clear(self) -> None:
        """No key has a row any more. No I/O, never raises, costs nothing per row; ignored after ``close``."""
        if self._stopping:
            return
        with self._changed:
            self._queue.clear()
            self._make_anew = ""
        self._hurry.set()
        self._work.set()

    def abandon(self) -> None:
        """Write nothing more, not even what waits: the file is somebody else's now. Returns at once."""
        with self._changed:
            self._abandoned = True
            self._stopping = True
            self._queue.clear()
        self._hurry.set()
        self._work.set()

    def flush(self, timeout_s: float) -> bool:
        """Wait until every call made so far is in the database. False if that did not happen in time."""
        with self._changed:
            self._idle = False
            self._hurry.set()
            self._work.set()
            return self._changed.wait_for(lambda: self._idle, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Write what waits (one attempt), stop the writer, close the database. Idempotent.

        Returns False if not all was written in time; a writer that still hangs in the storage is left behind.
        """
        with self._changed:
            self._stopping = True
            self._hurry.set()
            self._work.set()
        self._writer.join(timeout_s)
        return not (self._writer.is_alive() or self._queue or self._batch or self._delete_first)

    def _enqueue(self, op: Put | Delete) -> None:
        if self._stopping:
            return
        if len(self._queue) >= self._max_queued_ops:
            with self._changed:
                self._queue.clear()
                self._make_anew = f"more than {self._max_queued_ops} changes could not be written"
        self._queue.append(op)
        if not self._work.is_set():
            self._work.set()

    # Opening

    def _rows(self) -> Iterator[list[Row]]:
        try:
            yield from IndexReader(self._database.path).pieces()
        except TierError as error:
            if isinstance(error.__cause__, Exception) and is_damage(error.__cause__):
                with self._changed:
                    self._make_anew = f"damaged: {error.__cause__}"
                    self._work.set()
            else:
                _log.warning("index %s could not be read to its end: %s", self._database.path, error)

    # The writer's side

    def _run(self) -> None:
        while True:
            if self._failing:
                self._hurry.wait(self._retry_interval_s)
            else:
                self._work.wait()
                self._hurry.wait(self._batch_delay_s)
            self._work.clear()
            self._hurry.clear()
            written = self._drain()
            with self._changed:
                nothing_waits = written and not self._queue and self._make_anew is None
                if nothing_waits:
                    self._idle = True
                    self._changed.notify_all()
                if self._stopping and (nothing_waits or not written):
                    break
        self._database.disconnect()

    def _drain(self) -> bool:
        """Write until nothing waits. False when storage refused; the batch at hand is kept for the next attempt."""
        made_anew = False
        while True:
            self._take_batch()
            if self._abandoned or not (self._batch or self._delete_first or self._failing):
                return True
            try:
                if self._delete_first:
                    self._database.delete()
                    self._delete_first = False
                    made_anew = True
                self._database.write(self._batch)
            except STORAGE_ERRORS as error:
                undeletable = self._delete_first
                self._database.disconnect()
                self._note_failure(error)
                if made_anew or undeletable or not self._delete_first:
                    return False
                continue  # damaged: make it anew at once, for the process may be about to end
            self._batch.clear()
            self._note_success()

    def _take_batch(self) -> None:
        with self._changed:
            reason, self._make_anew = self._make_anew, None
            if reason is not None or self._abandoned:
                self._batch.clear()
            while self._queue and len(self._batch) < BATCH_OPS:
                self._batch.append(self._queue.popleft())
        if reason is not None:
            self._delete_first = True
        if reason:
            _log.warning(
                "index %s is made anew (%s); chunks it does not name will be forgotten at the next start",
                self._database.path,
                reason,
            )

    def _note_failure(self, error: Exception) -> None:
        self._failing = True
        trouble, is_damaged = translate(error, self._database.path), is_damage(error)
        self._delete_first |= is_damaged
        cause = "damage" if is_damaged else trouble.cause
        if cause in self._warned:
            return
        self._warned.add(cause)
        if is_damaged:
            _log.warning("index %s is not usable (%s): deleted, starting empty", self._database.path, error)
        else:
            _log.warning("%s; chunks are served on, but not remembered across a restart until this ends", trouble)

    def _note_success(self) -> None:
        self._failing = False
        if self._warned:
            self._warned.clear()
            _log.info("index %s is written again", self._database.path)
