"""The pump: the one thread that drives movers, packer and staging, and takes every chunk from its queue to its outcome.

Threading: everything here but ``start`` and ``stop`` runs on the pump's own thread.
Ownership: a ``Flight`` owns its staging slots and its share of the KV blocks until each of its transfers is final. If
the pump must end earlier, all that memory is kept for the life of the process instead of being freed under the kernel.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from nixl_offload.engine.jobs import JobTable
from nixl_offload.engine.ratelog import RateLog
from nixl_offload.engine.records import Lane, Stage, Task
from nixl_offload.engine.staging import DeviceSlot, Slot, SlotPool
from nixl_offload.engine.streams import Fence
from nixl_offload.movers.base import Mover, Transfer, TransferState
from nixl_offload.types import Outcome

logger = logging.getLogger(__name__)

POLL_S = 0.0005
"""Pause between polls while something is in flight. NIXL's POSIX I/O moves only when polled: at 1 ms small extents run
at full speed, at 5 ms at a third of it; without a pause polling burns half a CPU second per GB."""
CROWD_POLL_S = 0.001
CROWD_FLIGHTS = 8
"""More flights than this are polled at the longer pause: one poll costs some 5 µs of Python per flight, and with many
in flight none of them is waited for by the half millisecond."""
STUCK_POLL_S = 0.005
"""The pause once nothing has moved for ``STUCK_AFTER_S``: a hung disk shall not cost a core."""
STUCK_AFTER_S = 0.25
MAX_FLIGHTS = 32
"""Chunks in flight. Bounds descriptors in the mover and what one poll costs; 32 chunks keep any NVMe busy."""
MAX_STORE_FLIGHTS = 24
"""Of those, stores and moves; the rest is left for loads, so that no load waits behind a wall of writes."""
MAX_MOVE_FLIGHTS = 8
"""Of those, moves between tiers, which hold no staging: hung ones leave room for stores."""
MAX_FAILED_PASSES = 100
"""In a row; then the pump gives up and every job fails, rather than have callers wait for a loop that does nothing."""

LEAKED: list[object] = []
"""Whatever may still be touched by I/O when an engine had to end; never freed."""


@dataclass(slots=True, eq=False)
class Flight:
    """One chunk between its queue and its outcome. ``steps`` yields whenever it waits for a transfer or a fence."""

    task: Task
    direct: bool = False
    steps: Iterator[None] = field(default_factory=lambda: iter(()))
    draining: bool = False
    """Its path crashed with something in flight; ``steps`` only waits for that."""
    slots: list[tuple[SlotPool[Any], Slot | DeviceSlot]] = field(default_factory=list)
    mover: Mover | None = None
    """Of every transfer: a chunk travels by one link."""
    transfers: list[Transfer] = field(default_factory=list)
    fences: list[Fence] = field(default_factory=list)
    """Work of the device on its slots or blocks that is not known to be over."""
    host: Slot | None = None
    """The host slot that its image lies in, or is to. Held here for as long as something may touch it."""
    landed: bool = False
    """The image in ``host`` is whole and verified."""
    undo: Callable[[str | None], None] | None = None
    """Ends what was begun at the link, should the flight not come to its proper end; called once, with the error."""

    @property
    def pending(self) -> bool:
        """Whether some transfer is not final, or some fence was not passed when it was last polled."""
        return bool(self.fences) or any(transfer.state is TransferState.PENDING for transfer in self.transfers)

    def poll(self) -> bool:
        """Push on every transfer that is not final; whether anything is still under way. Raises what a fence raises:
        then nothing is known of the device any more.
        """
        if self.mover is not None:
            for transfer in self.transfers:
                if transfer.state is TransferState.PENDING:
                    self.mover.poll(transfer)
        if self.fences:
            self.fences = [fence for fence in self.fences if not fence.done()]
        return self.pending

    def passes(self, fence: Fence) -> Iterator[None]:
        """Wait until the device is past ``fence``. Until then its slots are not given back, whatever happens."""
        self.fences.append(fence)
        while self.poll() and fence in self.fences:
            yield

    def abandon(self, error: str | None) -> None:
        """Let the link undo what was begun there; nothing if that has ended already."""
        undo, self.undo = self.undo, None
        if undo is not None:
            undo(error)


class Paths(Protocol):
    """What the pump drives: how a chunk travels (``paths.ChunkPaths``)."""

    def has_room(self, task: Task, stores_in_flight: int) -> bool:
        """Whether staging allows to start ``task`` now. Pure and quick: called under the table's lock."""

    def why_not(self, task: Task) -> str | None:
        """Why a load that found no room shall not wait for it; None: it shall. Pure and quick, as ``has_room``."""

    def begin(self, task: Task) -> Flight:
        """Start a chunk: acquire what it needs and return its flight. Every exception becomes its failure."""

    def close(self) -> None:
        """Nothing is in flight: close links and movers."""


class Pump:
    """Runs until ``stop``. No exception of a chunk ends it; if it ends nonetheless, every job is FAILED."""

    def __init__(
        self, table: JobTable, paths: Paths, *, load_timeout_s: float, clock: Callable[[], float], name: str
    ) -> None:
        self._table = table
        self._paths = paths
        self._load_timeout_s = load_timeout_s
        self._clock = clock
        self._flights: list[Flight] = []
        self._stores = 0
        """Flights of stores that are no moves."""
        self._moves = 0
        self._failed_passes = 0
        self._moved_s = clock()
        self._stop_by_s: float | None = None
        self._log = RateLog(logger, clock)
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, deadline_s: float, patience_s: float = 1.0) -> bool:
        """Let the pump finish what it can within ``deadline_s``; True if the thread is gone on return.

        False means that it is caught in a system call that does not return; it is a daemon thread and holds on to its
        memory.
        """
        self._stop_by_s = self._clock() + deadline_s
        self._table.wake()
        if self._thread.ident is not None:
            self._thread.join(deadline_s + patience_s)
        return not self._thread.is_alive()

    # -- the pump's thread ------------------------------------------------------------------------------------------

    def _main(self) -> None:
        why = "the engine is closed"
        try:
            self._loop()
        except BaseException:
            why = "the pump ended unexpectedly"
            logger.critical("The pump thread ended; every job fails from now on and is recomputed", exc_info=True)
        finally:
            self._table.give_up(why)
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
        self._expire()
        if self._stop_by_s is not None and now_s >= self._stop_by_s:
            return True
        if moved:
            self._moved_s = now_s
            return False
        if self._stop_by_s is not None:
            if not self._flights and self._table.empty():
                return True
            self._table.sleep(POLL_S)
        elif self._flights:
            self._table.sleep(self._pause_s(now_s))
        else:
            self._table.sleep(None)
        return False

    def _pause_s(self, now_s: float) -> float:
        if now_s - self._moved_s >= STUCK_AFTER_S:
            return STUCK_POLL_S
        return POLL_S if len(self._flights) <= CROWD_FLIGHTS else CROWD_POLL_S

    def _launch(self) -> bool:
        """Start queued chunks as far as limits allow; True if any was started."""
        started = False
        for lane in Lane:
            while len(self._flights) < MAX_FLIGHTS and (task := self._table.take(lane, self._fits)) is not None:
                started = True
                try:
                    flight = self._paths.begin(task)
                except Exception as error:  # noqa: BLE001 - a dead pump would be a dead engine
                    self._crashed(task, error)
                    self._table.land(task, Outcome.FAILED)
                    continue
                self._flights.append(flight)
                self._count(task, 1)
                self._step(flight)
            if lane in {Lane.EXPEDITED_LOAD, Lane.LOAD}:
                self._table.refuse(lane, self._paths.why_not)
        return started

    def _count(self, task: Task, change: int) -> None:
        if task.job.is_move:
            self._moves += change
        elif task.job.is_store:
            self._stores += change

    def _fits(self, task: Task) -> bool:
        if task.job.is_move:
            if self._moves >= MAX_MOVE_FLIGHTS or len(self._flights) >= MAX_STORE_FLIGHTS:
                return False
        elif task.job.is_store and self._stores + self._moves >= MAX_STORE_FLIGHTS:
            return False
        return self._paths.has_room(task, self._stores)

    def _push(self) -> bool:
        """Move every flight on; True if any of them ended."""
        ended = False
        for flight in tuple(self._flights):
            ended |= self._step(flight)
        return ended

    def _step(self, flight: Flight) -> bool:
        """Resume a flight; True if it is over and its memory was given back."""
        try:
            next(flight.steps)
            return False
        except StopIteration:
            pass
        except Exception as error:  # noqa: BLE001 - a dead pump would be a dead engine
            if flight.pending and not flight.draining:
                # Told only when nothing moves any more: FAILED gives KV blocks and location away.
                flight.draining = True
                flight.steps = self._drain(flight, error)
                self._log_crash(error)
                return False
            late = flight.pending and flight.task.job.is_store and flight.host is not None
            self._crashed(flight.task, error, Outcome.TAINTED if late else Outcome.FAILED)
        self._flights.remove(flight)
        self._count(flight.task, -1)
        self._abandon(flight)
        if flight.task.stage is not Stage.DONE:
            self._crashed(flight.task, RuntimeError("a chunk ended without an outcome"))
        tainted = flight.pending or any(transfer.quarantine for transfer in flight.transfers)
        for pool, slot in flight.slots:
            if tainted:
                pool.retire(slot)
            else:
                pool.release(slot)
        if tainted:
            LEAKED.append((self._paths, flight))
        if flight.task.is_landing:
            self._table.land(flight.task, _landing_outcome(flight, tainted=tainted))
        return True

    def _abandon(self, flight: Flight) -> None:
        try:
            flight.abandon("the chunk crashed")
        except Exception as error:  # noqa: BLE001 - a dead pump would be a dead engine
            self._log_crash(error)

    def _drain(self, flight: Flight, error: Exception) -> Iterator[None]:
        """Poll what a crashed flight has left until it is final. If that raises too, ``_step`` taints its slots."""
        while flight.poll():
            yield
        self._table.finish(flight.task, Outcome.FAILED, f"unexpected {type(error).__name__}", "unexpected")

    def _crashed(self, task: Task, error: Exception, outcome: Outcome = Outcome.FAILED) -> None:
        """An exception that no path expects: a bug, ours or a mover's. The chunk fails, the pump goes on."""
        self._log_crash(error)
        self._table.finish(task, outcome, f"unexpected {type(error).__name__}", "unexpected")

    def _log_crash(self, error: Exception) -> None:
        self._log.error(f"crash:{type(error).__name__}", "A chunk failed unexpectedly: %r", error, exc_info=error)

    def _expire(self) -> None:
        self._table.expire_loads(self._load_timeout_s)

    def _close(self) -> None:
        if self._flights:
            LEAKED.append((self._paths, self._flights))
            logger.error("%d transfers did not end; their memory is kept until the process exits", len(self._flights))
            return
        try:
            self._paths.close()
        except Exception:
            LEAKED.append(self._paths)
            logger.exception("Closing links and movers failed; their memory is kept until the process exits")


def _landing_outcome(flight: Flight, *, tainted: bool) -> Outcome:
    if tainted and flight.host is not None:
        return Outcome.TAINTED
    if flight.landed:
        return Outcome.OK
    outcome = flight.task.outcome
    return Outcome.FAILED if outcome is None or outcome is Outcome.OK else outcome
