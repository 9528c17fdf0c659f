"""A rank's tiers as one engine: jobs are dealt out to the tier of each chunk and their results put together again;
moves between tiers go on behind them.

Threading: one caller thread (vLLM's worker); each tier has an engine of its own with a pump of its own, so a tier that
hangs delays no other. No method but ``wait`` and ``close`` waits, and those two have limits.
Ownership: closes the engines. The host slab is the caller's, who closes it afterwards.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from nixl_offload.engine.moves import MoveIO, Moves, RelayHost
from nixl_offload.engine.pump import LEAKED
from nixl_offload.engine.records import ChunkIO, Completion, Share
from nixl_offload.engine.states import WorkKind
from nixl_offload.engine.streams import Fence
from nixl_offload.engine.tier_engine import TierEngine
from nixl_offload.engine.transfer_statistics import TierStatus, TransferStatistics, Work
from nixl_offload.engine.waiting import wait_source_free
from nixl_offload.types import Outcome

__all__ = ["ChainEngine", "MoveIO"]

logger = logging.getLogger(__name__)

WAIT_LIMIT_S = 2.0
"""How long ``wait`` lets all tiers together read source blocks or finish loads. Only hung storage takes longer."""
WAIT_LEAST_S = 0.020
"""What of it each tier gets at least, even if another has used it up."""
CLOSE_PATIENCE_S = 2.0
"""How long engines may take to say that the deadline is over."""
_STEP_S = 0.001


@dataclass(slots=True, eq=False)
class _Job:
    """A job of vLLM while some tier works at it."""

    kind: WorkKind
    parts: dict[int, Sequence[int]]
    """By tier: the positions of its chunks in the job. Those that have not ended."""
    outcomes: list[Outcome]
    shared: bool
    """More than one tier has part in it, or a chunk has no tier."""
    submitted_s: float
    bytes_moved: int = 0
    errors: list[str] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)


class ChainEngine:
    """All tiers of one rank. Each submitted job yields exactly one ``Completion`` and each ticket exactly one
    ``Completion``, whatever fails.

    After any failure still holds: tiers that work go on, and chunks of a tier that is not there are FAILED.
    """

    def __init__(
        self,
        engines: Sequence[TierEngine | None],
        host: RelayHost | None = None,
        *,
        memory: int | None = None,
        empty_groups: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``engines`` is indexed by ``Location.tier``; None: this rank cannot use the tier. ``memory``: the position of
        the memory tier, None if there is none. ``host``: without it nothing moves between farther tiers.
        ``empty_groups``: KV groups of which this rank has no layer; no engine hears of their chunks, which are OK at
        once whatever is to be done with them. Without any other group there need be no engine.
        """
        self._engines = list(engines)
        self._live = self._find_live()
        self._memory = memory
        self._empty_groups = frozenset(empty_groups)
        self._clock = clock
        self._jobs: dict[int, _Job] = {}
        self._results: list[Completion] = []
        self._statistics = TransferStatistics()
        self._moves = Moves(
            self._engines,
            () if host is None else tuple(host.relay_offsets),
            memory=memory,
            empty_groups=self._empty_groups,
            clock=clock,
        )
        self._closed = False

    @property
    def open_tiers(self) -> frozenset[int]:
        """The tiers that this rank can use."""
        return frozenset(tier for tier, _ in self._live)

    def join(self, tier: int, engine: TierEngine) -> None:
        """From now on use ``engine`` for ``tier``, which had none; it is closed with the others."""
        assert self._engines[tier] is None, "a tier is open once"
        self._engines[tier] = engine
        self._live = self._find_live()

    def submit_store(self, job_id: int, chunks: Sequence[ChunkIO]) -> None:
        """Queue a store, each chunk to the tier of its location. As ``Engine.submit_store``."""
        for tier, part in self._deal(job_id, chunks, kind=WorkKind.STORE):
            self._engine(tier).submit_store(job_id, part)

    def compute_fence(self) -> Fence | None:
        """Mark this point of the compute stream for loads that are submitted later; None: there is no tier yet."""
        return self._live[0][1].compute_fence() if self._live else None

    def submit_load(
        self,
        job_id: int,
        chunks: Sequence[ChunkIO],
        *,
        expedited: bool = False,
        promotion_ticket: int = 0,
        fence: Fence | None = None,
    ) -> None:
        """Queue a load, each chunk from the tier of its location. ``promotion_ticket``: under which ``settled`` tells
        of the chunks that have a ``host_offset``, in their order; 0: there are none. ``fence``: as
        ``TierEngine.submit_load``.
        """
        if job_id in self._jobs:
            self._refuse_twice(job_id)
            sizes = [chunk.location.slot_bytes for chunk in chunks if chunk.host_offset is not None]
            if promotion_ticket:
                self._settle_all(promotion_ticket, sizes, Outcome.DROPPED)
            return
        chunks = self._expect_promotions(job_id, chunks, promotion_ticket)
        for tier, part in self._deal(job_id, chunks, kind=WorkKind.LOAD):
            self._engine(tier).submit_load(job_id, part, expedited=expedited, fence=fence)

    def submit_moves(self, ticket: int, moves: Sequence[MoveIO]) -> None:
        """Queue moves behind everything else. ``settled`` tells of them, in their order, when the last has ended.

        The caller keeps sources readable and targets reserved until then. Host slots must hold whole images.
        """
        self._moves.submit(ticket, moves)

    def finished(self) -> list[Completion]:
        """Return the jobs that ended since the last call, each exactly once over all calls."""
        self._poll()
        results, self._results = self._results, []
        return results

    def settled(self) -> list[Completion]:
        """Return the tickets that were settled since the last call, each exactly once over all calls."""
        if self._moves.idle:
            return []
        self._poll()
        return self._moves.take()

    def take_work(self) -> Work | None:
        """Return what ``finished`` and ``settled`` have seen end since the last call, added up; None: nothing has."""
        return self._statistics.take()

    def statuses(self) -> tuple[TierStatus, ...]:
        """Return how each tier stands on this rank, by position."""
        missing = TierStatus(trouble="unavailable")
        return tuple(missing if engine is None else engine.status() for engine in self._engines)

    def wait(self, job_ids: Collection[int], limit_s: float | None = None) -> None:
        """Stores: return as soon as their source blocks may be reused. Loads: return when they are finished.

        All tiers get the job at once, and one limit for all (``WAIT_LIMIT_S``), after which each gives up what it can:
        see ``waiting``. Unknown ids are done.
        """
        of_tier: dict[int, list[int]] = {}
        for job_id in job_ids:
            job = self._jobs.get(job_id)
            for tier in job.parts if job is not None else ():
                of_tier.setdefault(tier, []).append(job_id)
        asked = [(self._engine(tier).jobs, of_tier[tier]) for tier in sorted(of_tier)]
        wait_source_free(asked, WAIT_LIMIT_S if limit_s is None else limit_s, self._clock, least_s=WAIT_LEAST_S)

    @property
    def has_jobs(self) -> bool:
        """Whether ``finished`` or ``settled`` may have something to tell, now or later."""
        return bool(self._jobs or self._results) or not self._moves.idle

    def idle(self) -> bool:
        """True if no job is live, no ticket is open, and there is nothing to tell."""
        return not self.has_jobs and all(engine.idle() for _, engine in self._live)

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
        for tier, _ in self._live:
            self._engines[tier] = None
        self._live = ()
        return ended or not is_direct

    def part(self) -> dict[int, TierEngine]:
        """Have no tier any more, and return the engines, by tier: whoever takes them closes them. Nothing may be under
        way.
        """
        parted = dict(self._live)
        for tier in parted:
            self._engines[tier] = None
        self._live = ()
        return parted

    def _end(self, deadline_s: float) -> bool:
        end_s = self._clock() + deadline_s
        while self._moves.relaying and self._clock() < end_s:
            self._poll()
            time.sleep(_STEP_S)
        self._moves.drop_waiting()
        closers = [
            threading.Thread(target=self._close_one, args=(tier, engine, end_s), name="nixl-offload-close", daemon=True)
            for tier, engine in self._live
        ]
        for closer, (tier, engine) in zip(closers, self._live, strict=True):
            try:
                closer.start()
            except RuntimeError:  # no thread to be had now: one after the other
                self._close_one(tier, engine, end_s)
        for closer in closers:
            if closer.ident is not None:
                closer.join(max(0.0, end_s + CLOSE_PATIENCE_S - self._clock()))
        # A chunk that was fetched last is stored to a closed engine, which says no at once: hence twice.
        self._poll()
        self._poll()
        self._give_up()
        return not any(closer.is_alive() for closer in closers)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _find_live(self) -> tuple[tuple[int, TierEngine], ...]:
        return tuple((tier, engine) for tier, engine in enumerate(self._engines) if engine is not None)

    def _engine(self, tier: int) -> TierEngine:
        engine = self._engines[tier]
        assert engine is not None, "only live tiers are dealt to"
        return engine

    def _has(self, tier: int) -> bool:
        return 0 <= tier < len(self._engines) and self._engines[tier] is not None

    def _deal(self, job_id: int, chunks: Sequence[ChunkIO], *, kind: WorkKind) -> list[tuple[int, Sequence[ChunkIO]]]:
        """Record a job and return what each tier is to do of it. Chunks of no tier have failed by then, and those of
        which this rank has no part are OK.
        """
        if job_id in self._jobs:
            self._refuse_twice(job_id)
            return []
        parts: dict[int, Sequence[int]] = {}
        empty = self._empty_groups
        here = [at for at, chunk in enumerate(chunks) if chunk.group not in empty] if empty else range(len(chunks))
        tiers = {chunks[at].location.tier for at in here}
        if len(tiers) == 1 and len(here) == len(chunks) and self._has(chunks[0].location.tier):
            tier = chunks[0].location.tier
            parts[tier] = range(len(chunks))
            self._jobs[job_id] = _Job(kind, parts, [], False, self._clock())
            return [(tier, chunks)]
        for tier in sorted(tiers):
            if self._has(tier):
                parts[tier] = [at for at in here if chunks[at].location.tier == tier]
        outcomes = [Outcome.OK if chunk.group in empty else Outcome.FAILED for chunk in chunks]
        job = _Job(kind, parts, outcomes, True, self._clock())
        if any(not self._has(tier) for tier in tiers):
            job.errors.append("the tier is not available on this rank")
        self._jobs[job_id] = job
        if not parts:
            self._emit(job_id, job)
        return [(tier, [chunks[at] for at in positions]) for tier, positions in parts.items()]

    def _expect_promotions(self, job_id: int, chunks: Sequence[ChunkIO], number: int) -> Sequence[ChunkIO]:
        """Open the ticket of a load's promotions; return the chunks without those that nobody would be told of."""
        if not number:
            if any(chunk.host_offset is not None for chunk in chunks):
                logger.error("job %d has host slots but no ticket for them; they are not filled", job_id)
                return [replace(chunk, host_offset=None) for chunk in chunks]
            return chunks
        promoted = [chunk for chunk in chunks if chunk.host_offset is not None]
        ticket = self._moves.open(number, WorkKind.PROMOTION, [chunk.location.slot_bytes for chunk in promoted])
        of_tier: dict[int, list[int]] = {}
        for position, chunk in enumerate(promoted):
            tier = chunk.location.tier
            if chunk.group in self._empty_groups:
                self._moves.settle(ticket, position, Outcome.OK)
            elif self._has(tier) and tier != self._memory:
                of_tier.setdefault(tier, []).append(position)
            else:
                self._moves.settle(ticket, position, Outcome.FAILED)
        for tier, positions in of_tier.items():
            self._moves.expect_promotions(tier, job_id, ticket, positions)
        return [replace(chunk, host_offset=None) if chunk.location.tier == self._memory else chunk for chunk in chunks]

    def _settle_all(self, number: int, sizes: Sequence[int], outcome: Outcome) -> None:
        ticket = self._moves.open(number, WorkKind.PROMOTION, sizes)
        for position in range(len(sizes)):
            self._moves.settle(ticket, position, outcome)

    def _refuse_twice(self, job_id: int) -> None:
        logger.error("job %d was submitted twice; the second submit is ignored", job_id)

    def _poll(self) -> None:
        """Take what the engines have to tell and let moves go on."""
        if not self._jobs and self._moves.idle:
            return  # as in most steps
        for tier, engine in self._live:
            for done in engine.finished():
                if done.ends_job:
                    self._statistics.add(tier, done)
                    self._ended(tier, done)
                self._moves.completed(tier, done)
        self._moves.step()

    def _ended(self, tier: int, done: Completion) -> None:
        """A tier has done its part of a job."""
        job = self._jobs.get(done.job_id)
        if job is None:
            return  # a job of moves, or one that was given up when an engine did not close in time
        share = Share(tier, done.bytes_moved, done.seconds)
        if not job.shared:
            del self._jobs[done.job_id]
            told = done.job_id, done.kind, done.outcomes, (), done.bytes_moved, done.seconds, done.errors, done.causes
            self._results.append(Completion(*told, (share,)))
            return
        for position, outcome in zip(job.parts.pop(tier), done.outcomes, strict=True):
            job.outcomes[position] = outcome
        job.bytes_moved += done.bytes_moved
        job.errors += done.errors
        job.shares.append(share)
        if not job.parts:
            self._emit(done.job_id, job)

    def _emit(self, job_id: int, job: _Job) -> None:
        del self._jobs[job_id]
        self._results.append(
            Completion(
                job_id,
                job.kind,
                tuple(job.outcomes),
                bytes_moved=job.bytes_moved,
                seconds=self._clock() - job.submitted_s,
                errors=tuple(dict.fromkeys(job.errors)),
                shares=tuple(sorted(job.shares, key=lambda share: share.tier)),
            )
        )

    def _close_one(self, tier: int, engine: TierEngine, end_s: float) -> None:
        try:
            engine.close(max(0.0, end_s - self._clock()))
        except Exception:
            logger.exception("The engine of tier %d did not close well", tier)

    def _give_up(self) -> None:
        """End what an engine that did not close leaves open."""
        for job_id, job in list(self._jobs.items()):
            job.outcomes = job.outcomes or [Outcome.FAILED] * sum(map(len, job.parts.values()))
            job.errors.append("the engine was closed while storage hung")
            self._emit(job_id, job)
        self._moves.give_up()
