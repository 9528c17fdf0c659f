"""A rank's tiers as one engine: jobs go into one table, from which each tier's pump takes the chunks that are its own.

Threading: one caller thread (vLLM's worker); each tier has an engine of its own with a pump of its own, so a tier that
hangs delays no other. No method but ``wait`` and ``close`` waits, and those two have limits.
Ownership: closes the engines. The host slab is the caller's, who closes it afterwards.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence

from nixl_offload.engine.jobs import JobTable
from nixl_offload.engine.pump import LEAKED, TierEngine
from nixl_offload.engine.records import Chunk, Completion, Job
from nixl_offload.engine.states import Lane, WorkKind
from nixl_offload.engine.streams import READY, Fence
from nixl_offload.engine.transfer_statistics import TierStatus, Work
from nixl_offload.types import Outcome

logger = logging.getLogger(__name__)

WAIT_LIMIT_S = 2.0
"""How long ``wait`` lets tiers read source blocks, or finish loads. Only hung storage takes longer: that shall not hang
the engine."""
CLOSE_PATIENCE_S = 2.0
"""How long engines may take to say that the deadline is over."""
_STEP_S = 0.001

Refused = tuple[Outcome, str]
"""Why nothing of a job is done: what its chunks are, and the words."""


class ChainEngine:
    """All tiers of one rank. Each submitted job and each ticket yields exactly one ``Completion``.

    Chunks belong to the table once they are submitted. ``count``: how many the caller counts where
    ``Chunk.position`` says of which of them each chunk is a shard; None: each chunk is one, in order.
    After any failure still holds: tiers that work go on, and chunks of a tier that is not there are FAILED.
    """

    def __init__(
        self,
        tiers: int,
        relay_offsets: Sequence[int] = (),
        *,
        load_timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """No tier is open yet. ``tiers``: how many positions there are for ``Location.tier``. ``relay_offsets``: of the
        slots in the host slab for moves between farther tiers. ``load_timeout_s``: after that a load has failed.
        """
        self.table = JobTable(clock=clock, load_timeout_s=load_timeout_s, relay_offsets=relay_offsets)
        self._engines: list[TierEngine | None] = [None] * tiers
        self._clock = clock
        self._closed = False

    @property
    def open_tiers(self) -> frozenset[int]:
        """The tiers that this rank can use."""
        return frozenset(tier for tier, engine in enumerate(self._engines) if engine is not None)

    def join(self, tier: int, engine: TierEngine) -> None:
        """From now on use ``engine`` for ``tier``, which had none; it is closed with the others."""
        assert self._engines[tier] is None, "a tier is open once"
        self._engines[tier] = engine
        self.table.use(each.queue for each in self._live())

    def submit_store(
        self, job_id: int, chunks: Sequence[Chunk], count: int | None = None, *, refused: Refused | None = None
    ) -> None:
        """Queue a store, each chunk to the tier of its location, of blocks that the compute stream has written, or will
        have when it gets here.

        Under pressure chunks become DROPPED at once. The blocks of each chunk must reach to the chunk's end.
        """
        fence = self.compute_fence() or READY
        self._submit(WorkKind.STORE, chunks, count, fence, Lane.STORE, refused, job_id=job_id)

    def compute_fence(self) -> Fence | None:
        """Mark this point of the compute stream for loads that are submitted later; None: there is no tier yet."""
        live = self._live()
        return live[0].compute_fence() if live else None

    def submit_load(
        self,
        job_id: int,
        chunks: Sequence[Chunk],
        count: int | None = None,
        *,
        expedited: bool = False,
        promotion_ticket: int = 0,
        promoted: Sequence[int] | None = None,
        fence: Fence | None = None,
        refused: Refused | None = None,
    ) -> None:
        """Queue a load, each chunk from the tier of its location, some of it by way of host slots that keep it.

        ``expedited`` puts it before the loads that wait already. ``promotion_ticket``: under which ``settled`` tells of
        the chunks that have a ``host_offset``, in their order; 0: there are none. ``promoted``: their positions; None:
        where this rank has a shard of each. ``fence``: behind it nothing but this load touches the blocks; None: that
        is so from this point of the compute stream on.
        """
        if promoted is None:
            promoted = [at for at, chunk in enumerate(chunks) if chunk.host_offset is not None]
        lane = Lane.EXPEDITED_LOAD if expedited else Lane.LOAD
        fence = fence or self.compute_fence() or READY
        ticket = promotion_ticket
        self._submit(
            WorkKind.LOAD, chunks, count, fence, lane, refused, job_id=job_id, ticket=ticket, promoted=promoted
        )

    def submit_moves(self, ticket: int, moves: Sequence[Chunk], count: int | None = None) -> None:
        """Queue moves (``records.make_move``) behind everything else: whole images between host slots and tiers.

        ``settled`` tells of them, in their order, when the last has ended. The caller keeps sources readable and
        targets reserved until then, and bounds how many there are.
        """
        kind = moves[0].kind if moves and moves[0].onward is None else WorkKind.WRITE_THROUGH
        self._submit(kind, moves, count, READY, Lane.BACKGROUND, None, ticket=ticket)

    def finished(self) -> list[Completion]:
        """Return the jobs that ended since the last call, each exactly once over all calls."""
        self.table.expire()
        completions = self.table.drain()
        for done in completions if logger.isEnabledFor(logging.DEBUG) else ():
            what = f"{len(done.outcomes)} chunks, {done.bytes_moved} bytes, {done.seconds * 1e3:.1f} ms"
            logger.debug("job %d (%s): %s %s", done.job_id, done.kind.name.lower(), what, "; ".join(done.errors))
        return completions

    def settled(self) -> list[Completion]:
        """Return the tickets that were settled since the last call, each exactly once over all calls."""
        self.table.expire()
        return self.table.settled()

    def take_work(self) -> Work | None:
        """Return what tiers have done of jobs since the last call, added up; None: nothing."""
        return self.table.take_work()

    def statuses(self) -> tuple[TierStatus, ...]:
        """Return how each tier stands on this rank, by position."""
        missing = TierStatus(trouble="unavailable")
        return tuple(missing if engine is None else engine.status() for engine in self._engines)

    def wait(self, job_ids: Collection[int], limit_s: float | None = None) -> None:
        """Stores: return as soon as their source blocks may be reused. Loads: return when they are finished.

        After ``limit_s`` (``WAIT_LIMIT_S``) all is given up that can be: see ``JobTable.wait``.
        """
        self.table.wait(job_ids, WAIT_LIMIT_S if limit_s is None else limit_s)

    @property
    def has_jobs(self) -> bool:
        """Whether ``finished`` or ``settled`` may have something to tell, now or later."""
        return self.table.has_jobs

    def close(self, deadline_s: float = 5.0) -> None:
        """Finish what ``deadline_s`` allows, stores and moves included, in all tiers at the same time. Idempotent.

        Afterwards every job and ticket has ended, and ``finished`` and ``settled`` still give the last results. Returns
        within ``CLOSE_PATIENCE_S`` of the deadline.
        """
        if not self._closed:
            self._closed = True
            self._end(deadline_s)

    def release(self, deadline_s: float = 5.0) -> bool:
        """As ``close``, and have no tier afterwards: any of them may ``join`` again.

        Returns whether KV memory may go away: False where a transfer that did not end, now or earlier, may still touch
        it. Only those of the direct path do.
        """
        is_direct = any(status.access is not None and "direct" in status.access.paths for status in self.statuses())
        ended = self._end(deadline_s) and not LEAKED
        self.part()
        return ended or not is_direct

    def part(self) -> dict[int, TierEngine]:
        """Detach and return all engines, by tier; the caller closes them. Nothing may be under way."""
        parted = {tier: engine for tier, engine in enumerate(self._engines) if engine is not None}
        self._engines = [None] * len(self._engines)
        self.table.use(())
        return parted

    def _live(self) -> list[TierEngine]:
        return [engine for engine in self._engines if engine is not None]

    def _submit(
        self,
        kind: WorkKind,
        chunks: Sequence[Chunk],
        count: int | None,
        fence: Fence,
        lane: Lane,
        refused: Refused | None,
        *,
        job_id: int | None = None,
        ticket: int = 0,
        promoted: Sequence[int] = (),
    ) -> None:
        if count is None:
            count = len(chunks)
            for position, chunk in enumerate(chunks):
                chunk.position = position
        job = Job(kind, list(chunks), count, fence, self._clock(), job_id, ticket, promoted)
        self.table.add(job, lane, refused)

    def _end(self, deadline_s: float) -> bool:
        end_s = self._clock() + deadline_s
        while self.table.is_relaying and self._clock() < end_s:
            self.table.expire()
            time.sleep(_STEP_S)
        self.table.drop_waiting_relays()
        live = self._live()
        closers = [
            threading.Thread(target=_close_one, args=(engine, end_s), name="nixl-offload-close", daemon=True)
            for engine in live
        ]
        for closer, engine in zip(closers, live, strict=True):
            try:
                closer.start()
            except RuntimeError:  # no thread to be had now: one after the other
                _close_one(engine, end_s)
        for closer in closers:
            if closer.ident is not None:
                closer.join(max(0.0, end_s + CLOSE_PATIENCE_S - self._clock()))
        for engine in live:
            engine.queue.give_up("the engine was closed while storage hung")
        return not any(closer.is_alive() for closer in closers)


def _close_one(engine: TierEngine, end_s: float) -> None:
    try:
        engine.close(max(0.0, end_s - engine.queue.table.clock()))
    except Exception:
        logger.exception("The engine of tier %d did not close well", engine.queue.tier)
