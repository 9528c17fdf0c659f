"""The worker's half: ``Engine`` takes jobs of chunks, a pump thread moves them, ``finished`` tells how each ended."""

from __future__ import annotations

from nixl_offload.engine.engine import Engine
from nixl_offload.engine.jobs import ChunkIO, JobResult

__all__ = ["ChunkIO", "Engine", "JobResult"]
