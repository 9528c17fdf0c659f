"""The worker's half: ``RankEngine`` puts jobs of chunks into one table; a pump per tier takes its own from there and
moves them batch by batch. Completions tell how each ended: ``finished`` of jobs, ``finished_tickets`` of tickets.
"""

from __future__ import annotations

from nixl_offload.engine.link_engine import LinkEngine
from nixl_offload.engine.memory_engine import MemoryEngine
from nixl_offload.engine.pump import RankEngine, TierEngine
from nixl_offload.engine.records import Chunk, Completion, Job, Share, TierStatus, Work, WorkKind, make_move

__all__ = [
    "Chunk",
    "Completion",
    "Job",
    "LinkEngine",
    "MemoryEngine",
    "RankEngine",
    "Share",
    "TierEngine",
    "TierStatus",
    "Work",
    "WorkKind",
    "make_move",
]
