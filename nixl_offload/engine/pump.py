"""``TierEngine``: the queue of one tier and its pump, the thread that takes each chunk from the queue to its outcome,
in batches. ``RankEngine``: a rank's job table and the engines of its tiers.

Threading: ``close`` and ``status`` are called by the rank's caller; all else of a ``TierEngine`` runs on the pump's
thread. A ``RankEngine`` has one caller thread (vLLM's worker).
Ownership: the caller owns KV tensors and host slab, closes them after the engines, and leaves a job's blocks untouched
until the job is reported. If a pump ends while I/O is in flight, the memory of that I/O is never freed.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from nixl_offload.engine.jobs import JobTable, TierQueue
from nixl_offload.engine.paths import Batch, InFlight, TierPaths
from nixl_offload.engine.records import LANES, TierStatus
from nixl_offload.keep import keep_forever
from nixl_offload.types import Outcome

logger = logging.getLogger(__name__)

STEP_ALL_S = 0.1
"""Interval at which batches are stepped although they wait for their mover: chunks may have been given up or be late.
"""
MAX_FAILED_PASSES = 100
"""After this many failed passes in a row the pump ends and every job fails, so that no caller waits for it."""
STUMBLE_S = 0.005
"""The pause after a failed pass."""
SLOW = 10
"""Factor of a pump's pauses while nothing moves."""
CROWD = 8
"""With more batches in flight the pump sleeps twice as long between polls: a poll costs about 5 µs per batch, and half
a millisecond matters less then."""
CLOSE_PATIENCE_S = 2.0
"""How long ``close`` waits for the engines after its deadline."""

LEAKED: list[object] = []
"""Memory that I/O may still touch although its engine has ended."""


def leak(what: object) -> None:
    """Add ``what`` to ``LEAKED``, so that it is never freed."""
    keep_forever(what)
    LEAKED.append(what)


class TierEngine:
    """One tier on a rank. Slow work happens on its pump, which no chunk's exception ends. If the pump ends nonetheless,
    every job is FAILED. After any failure each chunk has an outcome, and so has the host slot that it fills.

    Loads overtake stores. A store is FAILED when nothing can write to its location any more, at the end of its
    quarantine, or with the pump; in the last two cases header and checksums detect late bytes in the next chunk. A load
    that storage does not answer in time is FAILED unless something may still write to its blocks.
    """

    def __init__(self, paths: TierPaths) -> None:
        """Start the pump. The engine owns what ``paths`` closes."""
        self.paths = paths
        self.queue = TierQueue(paths.table, paths.tier, paths.layout, store_limit_bytes=paths.store_limit_bytes)
        self.in_flight = InFlight()
        self._table = paths.table
        self._clock = clock = paths.table.clock
        self._stretch = paths.stretch
        self._batches: list[Batch] = []
        self._quiet_s: float | None = None
        """See ``Mover.poll_all``."""
        self._all_wait = False
        """No batch can go on before the mover has news."""
        self._step_all_s = 0.0
        """When a pass steps all batches again."""
        self._moved_s = clock()
        self._stop_by_s: float | None = None
        self._thread = threading.Thread(target=self._main, name=paths.thread_name, daemon=True)
        self._thread.start()

    def status(self) -> TierStatus:
        """Return the tier's status and queued bytes, for metrics. Quick; possibly slightly stale."""
        status = self.paths.status(self.queue.waiting())
        if self.queue.refusal is None:
            return status
        return status._replace(trouble="closed", loads_fail=True, stores_fail=True)

    def close(self, deadline_s: float = 5.0, patience_s: float = 1.0) -> None:
        """Finish work for up to ``deadline_s``; then queued stores and moves are DROPPED, all else is FAILED.
        Idempotent.

        Afterwards the pump has ended and new chunks fail at once. Memory that a hung transfer may still touch is never
        freed; such host slots are TAINTED. A pump that hangs in a system call is left behind with its memory.
        """
        if self._stop_by_s is not None:
            return
        self._stop_by_s = self._clock() + deadline_s
        self.queue.wake()
        self._thread.join(deadline_s + patience_s)
        if self._thread.is_alive():
            logger.error("The pump hangs in a system call; it is left behind with its memory")
            leak(self)
            self.queue.give_up("the engine was closed while storage hung")

    # -- the pump's thread ------------------------------------------------------------------------------------------

    def _main(self) -> None:
        why, failed_passes = "the engine is closed", 0
        try:
            while True:
                try:
                    if self._pass():
                        break
                    failed_passes = 0
                except Exception as error:
                    failed_passes += 1
                    if failed_passes > MAX_FAILED_PASSES:
                        raise
                    self.paths.complaints.error("pass", "The pump stumbled and goes on: %r", error, exc_info=error)
                    time.sleep(STUMBLE_S)
        except BaseException:
            why = "the pump ended unexpectedly"
            logger.critical("The pump thread ended; every job fails from now on and is recomputed", exc_info=True)
        finally:
            self.queue.give_up(why)
            self._end_all()

    def _pass(self) -> bool:
        """Start, push, expire, then sleep if nothing moved. True when the pump's work is over."""
        moved = self._start_queued()
        moved |= self._push()
        now_s = self._clock()
        # Before the returns below, so that deadlines hold while every pass moves something.
        self._table.expire()
        if self._stop_by_s is not None and now_s >= self._stop_by_s:
            return True
        if moved:
            self._moved_s = now_s
            return False
        if self._stop_by_s is not None:
            if not self._batches and self.queue.empty():
                return True
            pause_s: float | None = self.paths.poll_s
        else:
            pause_s = self._pause_s(now_s) if self._batches else None
        self.queue.sleep(pause_s)
        self._stretch.begin()
        return False

    def _pause_s(self, now_s: float) -> float:
        poll_s = self.paths.poll_s
        if now_s - self._moved_s >= self.paths.slow_after_s:
            return SLOW * poll_s
        pause_s = poll_s if len(self._batches) <= CROWD else 2 * poll_s
        if self._quiet_s is None:
            return pause_s
        if not self._all_wait:
            self._all_wait = all(batch.waits_for_mover for batch in self._batches)
            if not self._all_wait:
                return pause_s
        return max(pause_s, min(self._quiet_s, SLOW * poll_s))

    def _start_queued(self) -> bool:
        """Start queued chunks as far as there is room; True if any was started."""
        started = False
        queue, room = self.queue, lambda chunk: self.paths.room(chunk, self.in_flight)
        for lane in LANES:
            while queue.lanes[lane] and (chunks := queue.take(lane, room)):
                started = True
                self._stretch.pause()
                batch = Batch(chunks, chunks[0].kind, self.paths.plans[chunks[0].group], self.paths.mover)
                batch.steps = self.paths.run(batch)
                self.in_flight.add(batch.kind, len(chunks), 0)
                if self._adopt(batch):
                    return True  # its first step did all the work: start over at the first lane
        return started

    def _adopt(self, batch: Batch) -> bool:
        """Add a batch, whose chunks are counted already, and take its first step; True if it has ended."""
        self._batches.append(batch)
        self._all_wait = False
        self.in_flight.add(batch.kind, 0, 1)
        return self._step(batch)

    def _push(self) -> bool:
        """Step every batch that can go on; True if any of them ended."""
        ended, now_s = False, self._clock()
        mover = self.paths.mover
        self._quiet_s = None if mover is None else mover.poll_all()
        steps_all = self._quiet_s is None or now_s >= self._step_all_s
        if self._all_wait and self._quiet_s and not steps_all:
            return False
        if steps_all:
            self._step_all_s = now_s + STEP_ALL_S
        for batch in tuple(self._batches):
            if steps_all or not batch.waits_for_mover:
                self._stretch.pause()
                ended |= self._step(batch)
        self._all_wait = False
        return ended

    def _step(self, batch: Batch) -> bool:
        """Resume a batch; True if it is over and its memory was given back."""
        has_ended = True
        try:
            next(batch.steps)
            has_ended = False
        except StopIteration:
            pass
        except Exception as error:  # noqa: BLE001 - without its pump the engine is dead
            # Transfers in flight cannot be polled any more. A host slot that they may touch is TAINTED.
            self.paths.complaints.crashed(error)
            for chunk in batch.alive:
                tainted = batch.is_pending and chunk.kind.writes and chunk.host_slot is not None
                outcome = Outcome.TAINTED if tainted else Outcome.FAILED
                chunk.end(outcome, f"unexpected {type(error).__name__}", "unexpected")
        if has_ended:
            self._end(batch)
        parts, batch.parts = batch.parts, []
        for part in parts:
            self._adopt(part)
        return has_ended

    def _end(self, batch: Batch) -> None:
        """Report a batch's chunks and return their slots."""
        self._stretch.pause()
        self._batches.remove(batch)
        self.in_flight.add(batch.kind, -len(batch.chunks), -1)
        self.paths.abandon(batch, "the chunk crashed")
        tainted = batch.is_pending or batch.is_quarantined
        for chunk in reversed(batch.chunks):  # so that the next batch gets neighbouring slots again
            if chunk.pool is not None and chunk.staging_slot is not None:
                (chunk.pool.retire if tainted else chunk.pool.release)(chunk.staging_slot)
        if tainted:
            leak((self.paths, batch))
        self._table.complete(batch.chunks, tainted=tainted)

    def _end_all(self) -> None:
        if self._batches:
            leak((self.paths, self._batches))
            logger.error("%d transfers did not end; their memory is kept until the process exits", len(self._batches))
            return
        try:
            self.paths.close()
        except Exception:
            leak(self.paths)
            logger.exception("Closing links and movers failed; their memory is kept until the process exits")


class RankEngine(JobTable):
    """All tiers of one rank. Each submitted job and each ticket yields exactly one ``Completion``.

    Only ``wait``, ``close`` and ``release`` block, each with a limit. After any failure, working tiers go on, and
    chunks of a missing or hung tier are FAILED.
    """

    def __init__(self, tiers: int, **options: Any) -> None:
        """No tier is open yet. ``tiers``: number of values of ``Location.tier``. ``options``: as for ``JobTable``."""
        super().__init__(**options)
        self._tiers = tiers
        self._engines: dict[int, TierEngine] = {}
        self._moves_blocks = False
        """Whether a mover of this rank has ever been able to touch KV blocks."""
        self._closed = False

    @property
    def open_tiers(self) -> frozenset[int]:
        """The tiers that this rank can use."""
        return frozenset(self._engines)

    def join(self, tier: int, engine: TierEngine) -> None:
        """Use ``engine`` for ``tier``, which had none. ``close`` closes it."""
        assert tier not in self._engines, "a tier is open once"
        self._engines[tier] = engine
        self._moves_blocks |= engine.paths.moves_blocks
        self.use(each.queue for each in self._engines.values())

    def detach_all(self) -> dict[int, TierEngine]:
        """Detach and return all engines, by tier; the caller closes them. Nothing may be under way."""
        detached, self._engines = self._engines, {}
        self.use(())
        return detached

    def statuses(self) -> tuple[TierStatus, ...]:
        """Return the status of each tier on this rank, by position."""
        missing = TierStatus(trouble="unavailable", loads_fail=True, stores_fail=True)
        engines = [self._engines.get(tier) for tier in range(self._tiers)]
        return tuple(missing if engine is None else engine.status() for engine in engines)

    def close(self, deadline_s: float = 5.0) -> None:
        """Finish work in all tiers at once, stores and moves included, for up to ``deadline_s``. Idempotent.

        Afterwards every job and ticket has ended; their completions can still be taken. Returns within
        ``CLOSE_PATIENCE_S`` of the deadline.
        """
        if not self._closed:
            self._closed = True
            self._end(deadline_s)

    def release(self, deadline_s: float = 5.0) -> bool:
        """As ``close``, then detach all tiers, which may ``join`` again.

        Returns whether KV memory may be freed: False if a direct transfer that did not end, now or earlier, may still
        touch it.
        """
        ended = self._end(deadline_s) and not LEAKED
        self.detach_all()
        return ended or not self._moves_blocks

    def _end(self, deadline_s: float) -> bool:
        end_s = self.clock() + deadline_s
        self.end_relays(end_s)
        closers = []
        for engine in self._engines.values():
            closer = threading.Thread(target=_close_one, args=(engine, end_s), name="nixl-offload-close", daemon=True)
            try:
                closer.start()
                closers.append(closer)
            except RuntimeError:  # no thread can be started now: close here
                _close_one(engine, end_s)
        for closer in closers:
            closer.join(max(0.0, end_s + CLOSE_PATIENCE_S - self.clock()))
        for engine in self._engines.values():
            engine.queue.give_up("the engine was closed while storage hung")
        return not any(closer.is_alive() for closer in closers)


def _close_one(engine: TierEngine, end_s: float) -> None:
    try:
        engine.close(max(0.0, end_s - engine.queue.table.clock()))
    except Exception:
        logger.exception("The engine of tier %d did not close well", engine.queue.tier)
