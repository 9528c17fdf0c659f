"""The worker's half. ``RankEngine`` keeps jobs in one table; each tier's pump takes its chunks from there and moves
them in batches. ``finished`` returns the completions of jobs, ``finished_tickets`` those of tickets.
"""

from __future__ import annotations

from nixl_offload.engine.link_paths import LinkPaths
from nixl_offload.engine.memory_paths import MemoryPaths
from nixl_offload.engine.paths import TierSetup
from nixl_offload.engine.pump import RankEngine, TierEngine
from nixl_offload.engine.records import Chunk, Completion, Job, Share, TierStatus, Work, WorkKind, make_move

__all__ = [
    "Chunk",
    "Completion",
    "Job",
    "LinkPaths",
    "MemoryPaths",
    "RankEngine",
    "Share",
    "TierEngine",
    "TierSetup",
    "TierStatus",
    "Work",
    "WorkKind",
    "make_move",
]
