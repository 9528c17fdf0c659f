"""A rank as tests ask it: chunks may be submitted again, and a rank of one tier answers for that tier's engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nixl_offload.engine import ChainEngine, Chunk, Completion, TierEngine, WorkKind
from nixl_offload.types import Outcome


class TestedRank(ChainEngine):
    """With chunks of its own, so that a test may store and load the same."""

    __test__ = False

    def _submit(self, kind: WorkKind, chunks: Sequence[Chunk], *others: Any, **options: Any) -> None:
        super()._submit(kind, [replace(chunk) for chunk in chunks], *others, **options)

    def idle(self) -> bool:
        return not self.has_jobs

    def submit_background(self, job_id: int, chunks: Sequence[Chunk], kind: WorkKind) -> None:
        self.submit_moves(job_id, [replace(chunk, kind=kind) for chunk in chunks])


class Alone(TestedRank):
    """A rank of one tier. What it does not know, its engine is asked."""

    def __init__(self, make: Callable[..., TierEngine], tier: int = 0, **options: Any) -> None:
        super().__init__(tier + 1, **options)
        self.promotions: dict[int, tuple[Outcome, ...]] = {}
        """What became of host slots, by the job that was to fill them."""
        self.tier = make(table=self.table)
        self.join(tier, self.tier)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["tier"], name)

    def submit_load(self, job_id: int, chunks: Sequence[Chunk], *others: Any, **options: Any) -> None:
        if any(chunk.host_offset is not None for chunk in chunks):
            options.setdefault("promotion_ticket", job_id + 1000000)  # 0 is no ticket
        super().submit_load(job_id, chunks, *others, **options)

    def finished(self) -> list[Completion]:
        """Jobs and moves."""
        found = super().finished()
        for settled in self.settled():
            if settled.kind is WorkKind.PROMOTION:
                assert settled.job_id - 1000000 not in self.promotions, "told twice"
                self.promotions[settled.job_id - 1000000] = settled.outcomes
            else:
                found.append(settled)
        return found


def causes_of(done: Completion) -> tuple[tuple[Outcome, str, int], ...]:
    """What did not end well, why in one word, and of how many chunks; over all tiers."""
    return tuple((*why, count) for share in done.shares for why, count in share.failures.items())
