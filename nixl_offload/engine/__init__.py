"""The worker's half: ``ChainEngine`` deals jobs of chunks out to an engine per tier, whose pump threads move them;
``finished`` tells how each ended, ``settled`` what became of moves between tiers.
"""

from __future__ import annotations

from nixl_offload.engine.chain import ChainEngine, MoveIO, MoveResult
from nixl_offload.engine.engine import Engine
from nixl_offload.engine.records import ChunkIO, JobResult, Share
from nixl_offload.engine.tally import Standing, Work

__all__ = ["ChainEngine", "ChunkIO", "Engine", "JobResult", "MoveIO", "MoveResult", "Share", "Standing", "Work"]
