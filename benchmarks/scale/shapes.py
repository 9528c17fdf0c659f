"""The two model shapes of the simulation, as namespaces: what a chunk is and how many shards it has.

Threading: frozen values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from nixl_offload.identity.namespace import GroupFields, Namespace, NamespaceFields, make_namespace
from nixl_offload.types import PAGE_BYTES


@dataclass(frozen=True)
class Shape:
    """Bytes of KV per token on each rank, ranks, and tokens per chunk."""

    name: str
    rank_token_bytes: int
    ranks: int
    chunk_tokens: int

    @property
    def shard_bytes(self) -> int:
        return PAGE_BYTES + self.rank_token_bytes * self.chunk_tokens

    def namespace(self) -> Namespace:
        tokens = 16
        return make_namespace(
            NamespaceFields(
                tenant="default",
                engine="vllm",
                platform="cuda",
                attention_backend=None,
                model=self.name,
                revision=None,
                weights=None,
                dtype="bfloat16",
                kv_layout="BLHNC",
                tokens_per_block=tokens,
                blocks_per_chunk=self.chunk_tokens // tokens,
                tokens_per_hash=tokens,
                hash_algorithm="sha256",
                hash_seed=None,
                groups=(GroupFields(0, tokens, (self.shard_bytes,) * self.ranks),),
                ranks=("ab",) * self.ranks,
                settings={},
                tp=self.ranks,
                pp=1,
                pcp=1,
                dcp=1,
                world_size=self.ranks,
            )
        )


SMALL: Final = Shape("8B", 128 << 10, 1, 256)
"""32 layers, 8 KV heads of 128, 2-byte values, one rank: 32 MiB per object."""
LARGE: Final = Shape("70B TP 8", 40 << 10, 8, 512)
"""80 layers, of each one KV head per rank: 20 MiB per object, eight per chunk."""
LONG: Final = Shape("8B, chunks of 1,024", 128 << 10, 1, 1024)
"""128 MiB per object."""
SHAPES: Final = {shape.name: shape for shape in (SMALL, LARGE)}
