"""A worker extension that damages what the memory tier holds. Threading: runs in the worker's thread, between steps."""

from __future__ import annotations

import contextlib
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from nixl_offload.chunk.header import HEADER_BYTES, decode_header
from nixl_offload.errors import FormatError
from nixl_offload.types import PAGE_BYTES
from tests.vllm.poison import PoisonExtension


class FamilyExtension(PoisonExtension):
    """Mixed into vLLM's worker class."""

    rank: int

    def flip_memory(self, groups: list[int] | None, rank: int | None = None) -> int:
        """Flip a bit in the payload of each chunk of these KV cache groups, None: of all; return how many. ``rank``: on
        this rank alone.
        """
        connector: Any = get_kv_transfer_group()
        memory, found = connector.connector_worker.rank_worker._host._memory, 0
        for offset in range(0, len(memory) - HEADER_BYTES, PAGE_BYTES) if rank in (None, self.rank) else ():
            with contextlib.suppress(FormatError):
                header = decode_header(memory[offset : offset + HEADER_BYTES].tobytes())
                if groups is None or header.group in groups:
                    memory[offset + HEADER_BYTES + header.payload_bytes - 1] ^= 1
                    found += 1
        return found
