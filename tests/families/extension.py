"""A worker extension that damages what the memory tier holds. Threading: runs in the worker's thread, between steps."""

from __future__ import annotations

from typing import Any

from nixl_offload.chunk.header import HEADER_BYTES
from tests.families.media import header_in
from tests.vllm.poison import PoisonExtension

_PAGE = 4096


class FamilyExtension(PoisonExtension):
    """Mixed into vLLM's worker class."""

    rank: int

    def flip_memory(self, groups: list[int] | None, rank: int | None = None) -> int:
        """Flip a bit in the payload of each chunk of these KV cache groups, None: of all; return how many. ``rank``: on
        this rank alone.
        """
        if rank not in (None, self.rank):
            return 0
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector: Any = get_kv_transfer_group()
        memory = connector.connector_worker.rank_worker._host._memory
        found = 0
        for offset in range(0, len(memory) - HEADER_BYTES, _PAGE):
            header = header_in(memory[offset : offset + HEADER_BYTES].tobytes())
            if header is not None and (groups is None or header.group in groups):
                memory[offset + HEADER_BYTES + header.first_valid_block * header.block_bytes] ^= 1
                found += 1
        return found
