"""The pump: the one thread of an engine, which takes every chunk from its queue to its outcome, batch by batch.

Threading: everything here but ``start`` and ``stop`` runs on the pump's own thread.
Ownership: if the pump must end while something is in flight, the memory of that is kept for the life of the process
instead of being freed under the kernel.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from nixl_offload.engine.batch import Batch
from nixl_offload.engine.jobs import TierQueue
from nixl_offload.engine.ratelog import RateLog
from nixl_offload.engine.records import Chunk
from nixl_offload.engine.states import Lane, WorkKind
from nixl_offload.engine.streams import Fence
from nixl_offload.engine.transfer_statistics import TierStatus
from nixl_offload.keep import keep_forever
from nixl_offload.types import Outcome

logger = logging.getLogger(__name__)

POLL_S = 0.0005
"""Pause between polls of I/O that nothing holds up."""
STUCK_POLL_S = 0.005
"""The pause once nothing has moved for long: a hung disk shall not cost a core."""
STEP_ALL_S = 0.25
"""So often a batch is moved on even while its mover has nothing new: it may have been given up meanwhile."""
MAX_FAILED_PASSES = 100
"""In a row; then the pump gives up and every job fails, rather than have callers wait for a loop that does nothing."""

HOLD_S = 100e-6
"""The pump releases the interpreter after the first piece of work that ends later than this. Pieces take some 100 µs at
most."""

LEAKED: list[object] = []
"""What I/O may still touch although its engine has ended: see ``leak``."""


def leak(what: object) -> None:
    """Have ``what`` in ``LEAKED``, and never free it."""
    keep_forever(what)
    LEAKED.append(what)


@dataclass(slots=True)
class InFlight:
    """What the pump has in flight."""

    batches: int = 0
    store_batches: int = 0
    chunks: int = 0
    stores: int = 0
    """Chunks of stores; background work is counted apart."""
    background: int = 0
    """Chunks."""

    def add(self, kind: WorkKind, chunks: int, sign: int) -> None:
        """Count a batch in (1) or out (-1)."""
        count = sign * chunks
        self.batches += sign
        self.chunks += count
        if kind.in_background:
            self.background += count
        elif kind.writes:
            self.store_batches += sign
            self.stores += count


@dataclass(frozen=True, slots=True)
class Pauses:
    """How long the pump sleeps between polls while something is in flight."""

    poll_s: float
    crowd_poll_s: float
    """With more than ``crowd`` batches in flight."""
    crowd: int
    slow_poll_s: float
    """Once nothing has moved for ``slow_after_s``."""
    slow_after_s: float


class Turn:
    """A pump's stretch of time without a wait, after which it lets others have the interpreter.

    vLLM's scheduler shares it, and shall not wait for a batch. A thread that wants the interpreter gets it when the one
    that has it waits for something, and otherwise only after the switch interval, 5 ms. The pump's work on a batch is
    many small pieces; between them it asks ``pause``.
    """

    def __init__(self) -> None:
        self._began_s = time.perf_counter()

    def begin(self) -> None:
        """The thread has waited: another stretch begins."""
        self._began_s = time.perf_counter()

    def pause(self) -> None:
        """Between two pieces of work: let go of the interpreter if this stretch has lasted for ``HOLD_S``."""
        if time.perf_counter() - self._began_s >= HOLD_S:
            self._let_go()
            self.begin()

    def _let_go(self) -> None:
        # The kernel makes some 80 us of it, long enough for a thread that waits to wake up. ``sched_yield`` takes half
        # a microsecond: its caller has the interpreter back before anybody else could take it.
        time.sleep(0)


class PumpPaths:
    """What the pump drives: how the chunks of one tier travel. Without more it is of a tier that has no mover."""

    turn: Turn
    """The pump's stretches without a wait."""

    def room(self, chunk: Chunk, in_flight: InFlight) -> int:
        """Return how many chunks like ``chunk`` may start now, as one batch. Pure and quick: called under the table's
        lock. A chunk that will be rejected is always admitted.
        """
        raise NotImplementedError

    def begin(self, chunks: list[Chunk]) -> Batch:
        """Start chunks of one job, group and kind. Does no I/O before the first step; no step raises for a chunk that
        cannot be moved.
        """
        raise NotImplementedError

    def why_not(self, chunk: Chunk) -> str | None:
        """Why a load that found no room shall not wait for it; None: it shall. Pure and quick, as ``room``."""
        return None

    def look(self) -> float | None:
        """As ``movers.base.Mover.look``, of the tier's mover. None where there is none."""
        return None

    def abandon(self, batch: Batch, error: str | None) -> None:
        """Undo at the tier what was begun for a batch and not ended."""

    def close(self) -> None:
        """Nothing is in flight: close what is open."""


class Pump:
    """Runs until ``stop``. No exception of a chunk ends it; if it ends nonetheless, every job is FAILED."""

    def __init__(
        self,
        queue: TierQueue,
        driven: PumpPaths,
        *,
        name: str,
        pauses: Pauses,
    ) -> None:
        self._queue = queue
        self._table = queue.table
        self._clock = clock = queue.table.clock
        self._driven = driven
        self._turn = driven.turn
        self._pauses = pauses
        self._batches: list[Batch] = []
        self._in_flight = InFlight()
        self._failed_passes = 0
        self._quiet_s: float | None = None
        """See ``PumpPaths.look``."""
        self._all_wait = False
        """No batch can go on before the mover has news."""
        self._step_all_s = 0.0
        """When the next pass moves all batches on."""
        self._moved_s = clock()
        self._stop_by_s: float | None = None
        self._log = RateLog(logger, clock)
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, deadline_s: float, patience_s: float = 1.0) -> None:
        """Let the pump finish what it can within ``deadline_s``; every job has ended on return.

        A thread that is caught in a system call is left behind, and its memory with it; it is a daemon thread.
        """
        self._stop_by_s = self._clock() + deadline_s
        self._queue.wake()
        if self._thread.ident is not None:
            self._thread.join(deadline_s + patience_s)
        if self._thread.is_alive():
            logger.error("The pump hangs in a system call; it is left behind with its memory")
            leak(self)
            self._queue.give_up("the engine was closed while storage hung")

    # -- the pump's thread ------------------------------------------------------------------------------------------

    def _main(self) -> None:
        why = "the engine is closed"
        try:
            self._loop()
        except BaseException:
            why = "the pump ended unexpectedly"
            logger.critical("The pump thread ended; every job fails from now on and is recomputed", exc_info=True)
        finally:
            self._queue.give_up(why)
            self._close()

    def _loop(self) -> None:
        while not self._guarded_pass():
            pass

    def _guarded_pass(self) -> bool:
        try:
            over = self._pass()
        except Exception as error:
            self._failed_passes += 1
            if self._failed_passes > MAX_FAILED_PASSES:
                raise
            self._log.error("pass", "The pump stumbled and goes on: %r", error, exc_info=error)
            time.sleep(STUCK_POLL_S)
            return False
        self._failed_passes = 0
        return over

    def _pass(self) -> bool:
        """Start, push, expire, then sleep if nothing moved. True when the pump's work is over."""
        moved = self._launch()
        moved |= self._push()
        now_s = self._clock()
        # Before the shortcut below: deadlines hold also while something moves without a pause.
        self._table.expire()
        if self._stop_by_s is not None and now_s >= self._stop_by_s:
            return True
        if moved:
            self._moved_s = now_s
            return False
        if self._stop_by_s is not None:
            if not self._batches and self._queue.empty():
                return True
            pause_s: float | None = self._pauses.poll_s
        else:
            pause_s = self._pause_s(now_s) if self._batches else None
        self._queue.sleep(pause_s)
        self._turn.begin()
        return False

    def _pause_s(self, now_s: float) -> float:
        pauses = self._pauses
        if now_s - self._moved_s >= pauses.slow_after_s:
            return pauses.slow_poll_s
        pause_s = pauses.poll_s if len(self._batches) <= pauses.crowd else pauses.crowd_poll_s
        if self._quiet_s is None:
            return pause_s
        if not self._all_wait:
            self._all_wait = all(batch.waits_for_mover(now_s) for batch in self._batches)
            if not self._all_wait:
                return pause_s
            self._step_all_s = min(self._step_all_s, *(batch.parts_s or math.inf for batch in self._batches))
        return max(pause_s, min(self._quiet_s, pauses.slow_poll_s))

    def _launch(self) -> bool:
        """Start queued chunks as far as there is room; True if any was started."""
        started = False
        for lane in self._queue.busy_lanes():
            while chunks := self._queue.take(lane, self._room):
                started = True
                self._turn.pause()
                try:
                    batch = self._driven.begin(chunks)
                except Exception as error:  # noqa: BLE001 - a dead pump would be a dead engine
                    self._log_crash(error)
                    for chunk in chunks:
                        chunk.end(Outcome.FAILED, f"unexpected {type(error).__name__}", "unexpected")
                    self._table.complete(chunks)
                    continue
                if self._adopt(batch):
                    return True  # it copied within its first step: look at the first lane again
            if lane is Lane.LOAD or lane is Lane.EXPEDITED_LOAD:
                self._queue.refuse(lane, self._driven.why_not)
        return started

    def _room(self, chunk: Chunk) -> int:
        return self._driven.room(chunk, self._in_flight)

    def _adopt(self, batch: Batch) -> bool:
        """Begin a batch; True if it has ended already."""
        self._batches.append(batch)
        self._all_wait = False
        batch.chunks_begun = len(batch.chunks)
        self._in_flight.add(batch.kind, batch.chunks_begun, 1)
        return self._step(batch)

    def _push(self) -> bool:
        """Move every batch on that can go on; True if any of them ended."""
        ended, now_s = False, self._clock()
        self._quiet_s = self._driven.look()
        steps_all = self._quiet_s is None or now_s >= self._step_all_s
        if self._all_wait and self._quiet_s and not steps_all:
            return False
        if steps_all:
            self._step_all_s = now_s + STEP_ALL_S
        for batch in tuple(self._batches):
            if steps_all or not batch.waits_for_mover(now_s):
                self._turn.pause()
                ended |= self._step(batch)
        self._all_wait = False
        return ended

    def _step(self, batch: Batch) -> bool:
        """Resume a batch; True if it is over and its memory was given back."""
        try:
            next(batch.steps)
            return False
        except StopIteration:
            pass
        except Exception as error:  # noqa: BLE001 - a dead pump would be a dead engine
            self._log_crash(error)
            self._crashed(batch, error)
        self._end(batch)
        return True

    def _crashed(self, batch: Batch, error: Exception) -> None:
        """What is in flight cannot even be polled. Where it may still touch a host slot, that slot is TAINTED."""
        for chunk in batch.alive:
            tainted = batch.is_pending and chunk.kind.writes and chunk.host is not None
            chunk.end(
                Outcome.TAINTED if tainted else Outcome.FAILED, f"unexpected {type(error).__name__}", "unexpected"
            )

    def _end(self, batch: Batch) -> None:
        """Tell of the chunks that have ended and give their slots back; the others go on as parts."""
        self._turn.pause()
        self._batches.remove(batch)
        self._in_flight.add(batch.kind, batch.chunks_begun, -1)
        try:
            self._driven.abandon(batch, "the chunk crashed")
        except Exception as error:  # noqa: BLE001 - a dead pump would be a dead engine
            self._log_crash(error)
        tainted = batch.is_pending or batch.is_quarantined
        for chunk in batch.chunks:
            if chunk.result is None:
                self._log_crash(RuntimeError("a chunk ended without an outcome"))
                chunk.end(Outcome.FAILED, "unexpected RuntimeError", "unexpected")
            if chunk.pool is not None:
                (chunk.pool.retire if tainted else chunk.pool.release)(chunk.slot)
        if tainted:
            leak((self._driven, batch))
        self._table.complete(batch.chunks, tainted=tainted)
        for part in batch.parts:
            self._adopt(part)

    def _log_crash(self, error: Exception) -> None:
        self._log.error(f"crash:{type(error).__name__}", "A chunk failed unexpectedly: %r", error, exc_info=error)

    def _close(self) -> None:
        if self._batches:
            leak((self._driven, self._batches))
            logger.error("%d transfers did not end; their memory is kept until the process exits", len(self._batches))
            return
        try:
            self._driven.close()
        except Exception:
            leak(self._driven)
            logger.exception("Closing links and movers failed; their memory is kept until the process exits")


class TierEngine(ABC):
    """One tier on a rank: its queue in the rank's table, and the pump that works it off. Everything slow happens there.

    Threading: the rank's caller thread (vLLM's worker) plus the pump. Ownership: tensors belong to the caller. It keeps
    them alive, and the blocks of a job untouched until it is reported.
    After any failure each chunk has an outcome, and so has the host slot that it fills.

    Loads overtake stores. A store is FAILED when nothing can write to its location any more, or when a transfer has not
    ended within its quarantine, or with the pump: then only header and checksums tell late bytes from the next chunk's
    own. A load that storage does not answer in time is FAILED unless something may still write to its blocks.
    """

    def __init__(self, queue: TierQueue, compute_fence: Callable[[], Fence]) -> None:
        self.queue = queue
        self.compute_fence = compute_fence
        """Marks this point of the compute stream, the caller's own."""
        self._closed = False

    def _start(self, driven: PumpPaths, *, name: str, pauses: Pauses) -> None:
        """Start the pump. The last step of construction."""
        self._pump = Pump(self.queue, driven, name=name, pauses=pauses)
        self._pump.start()

    @abstractmethod
    def status(self) -> TierStatus:
        """Return what waits here and how the tier stands, for metrics. Quick; it may be a moment old."""

    def close(self, deadline_s: float = 5.0) -> None:
        """Finish what ``deadline_s`` allows; queued stores and moves become DROPPED then, all else FAILED. Idempotent.

        Afterwards the pump is gone, and new chunks fail at once. Memory that a hung transfer may still touch is kept
        for the life of the process; host slots that one may still touch are TAINTED.
        """
        if not self._closed:
            self._closed = True
            self._pump.stop(deadline_s)
