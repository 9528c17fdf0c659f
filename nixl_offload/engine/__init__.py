"""The worker's half: ``ChainEngine`` puts jobs of chunks into one table; a pump per tier takes its own from there and
moves them batch by batch. Completions tell how each ended: ``finished`` of jobs, ``settled`` of tickets.
"""

from __future__ import annotations

from nixl_offload.engine.chain import ChainEngine
from nixl_offload.engine.engine import Engine
from nixl_offload.engine.pump import TierEngine
from nixl_offload.engine.records import Chunk, Completion, Share, make_move
from nixl_offload.engine.states import WorkKind
from nixl_offload.engine.transfer_statistics import TierStatus, Work

__all__ = [
    "ChainEngine",
    "Chunk",
    "Completion",
    "Engine",
    "Share",
    "TierEngine",
    "TierStatus",
    "Work",
    "WorkKind",
    "make_move",
]
