"""Ranks for tests: chunks may be submitted again, and a rank of one tier also has the interface of its engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nixl_offload.engine import Chunk, Completion, Job, RankEngine, TierEngine, WorkKind
from nixl_offload.engine.jobs import JobTable
from nixl_offload.engine.streams import READY, Fence
from nixl_offload.types import Outcome

PROMOTED = 1_000_000
"""In a rank of one tier, the ticket of a job's promotions is the job's number plus this."""


class TestedRank(RankEngine):
    """With chunks of its own, so that a test may store and load the same. Each is the position's only shard unless
    ``count`` says how many positions there are.
    """

    __test__ = False

    def submit_store(self, job_id: int, chunks: Sequence[Chunk], count: int | None = None, **options: Any) -> None:
        self._submit(WorkKind.STORE, chunks, count, job_id=job_id, **options)

    def submit_load(
        self,
        job_id: int,
        chunks: Sequence[Chunk],
        count: int | None = None,
        *,
        promotion_ticket: int = 0,
        promoted: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        if promoted is None:
            promoted = [at for at, chunk in enumerate(chunks) if chunk.host_offset is not None]
        options |= {"promotion_ticket": promotion_ticket, "promoted": promoted}
        self._submit(WorkKind.LOAD, chunks, count, job_id=job_id, **options)

    def submit_moves(
        self, ticket: int, moves: Sequence[Chunk], count: int | None = None, kind: WorkKind = WorkKind.WRITE_THROUGH
    ) -> None:
        self._submit(kind, moves, count, fence=READY, ticket=ticket)

    def submit_background(self, ticket: int, chunks: Sequence[Chunk], kind: WorkKind) -> None:
        for chunk in chunks:
            chunk.kind = kind
        self.submit_moves(ticket, chunks)

    def compute_fence(self) -> Fence:
        """Mark this point of the compute stream, as the worker does."""
        for engine in self._engines.values():
            return engine.paths._memory.device.compute_fence()
        return READY

    def idle(self) -> bool:
        return not self.has_jobs

    def _submit(
        self, kind: WorkKind, chunks: Sequence[Chunk], count: int | None, *, fence: Fence | None = None, **options: Any
    ) -> None:
        made = []
        for position, chunk in enumerate(chunks):
            made.append(replace(chunk, position=chunk.position if count is not None else position))
            if kind.in_background:
                made[-1].kind = chunk.kind
        count = len(made) if count is None else count
        self.submit(Job(kind, made, count, fence or self.compute_fence(), **options))


class Alone(TestedRank):
    """A rank of one tier. Attributes that it lacks are its engine's."""

    def __init__(self, make: Callable[[JobTable], TierEngine], tier: int = 0, **options: Any) -> None:
        super().__init__(tier + 1, **options)
        self.promotions: dict[int, tuple[Outcome, ...]] = {}
        """Outcomes of host slots, by the job that was to fill them."""
        self.tier = make(self)
        self.join(tier, self.tier)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["tier"], name)

    def submit_load(self, job_id: int, chunks: Sequence[Chunk], *others: Any, **options: Any) -> None:
        if any(chunk.host_offset is not None for chunk in chunks):
            options.setdefault("promotion_ticket", job_id + PROMOTED)  # 0 is no ticket
        super().submit_load(job_id, chunks, *others, **options)

    def finished(self) -> list[Completion]:
        """Jobs and moves."""
        found = super().finished()
        for settled in self.finished_tickets():
            if settled.job_id >= PROMOTED:
                assert settled.job_id - PROMOTED not in self.promotions, "told twice"
                self.promotions[settled.job_id - PROMOTED] = settled.outcomes
            else:
                found.append(settled)
        return found


def causes_of(done: Completion) -> tuple[tuple[Outcome, str, int], ...]:
    """Outcomes other than OK, their causes and their numbers of chunks; over all tiers."""
    return tuple((*why, count) for share in done.shares for why, count in share.failures.items())
