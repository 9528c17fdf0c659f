"""The worker's half: ``ChainEngine`` deals jobs of chunks out to an engine per tier, whose pumps move them batch by
batch; completions tell how each ended, ``finished`` those of jobs and ``settled`` those of tickets.
"""

from __future__ import annotations

from nixl_offload.engine.chain import ChainEngine, MoveIO
from nixl_offload.engine.engine import Engine
from nixl_offload.engine.records import ChunkIO, Completion, Share
from nixl_offload.engine.states import WorkKind
from nixl_offload.engine.tier_engine import TierEngine
from nixl_offload.engine.transfer_statistics import TierStatus, Work

__all__ = [
    "ChainEngine",
    "ChunkIO",
    "Completion",
    "Engine",
    "MoveIO",
    "Share",
    "TierEngine",
    "TierStatus",
    "Work",
    "WorkKind",
]
