"""How many bytes of KV cache a model needs: per token, per chunk, per prompt. ``model_config`` reads them off a model.

Threading: immutable values and pure functions, safe anywhere. Needs neither torch, transformers nor vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nixl_offload.chunk.header import slot_bytes

Kind = Literal["full", "mla", "sliding", "hybrid", "state"]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV vLLM keeps in one group: stored, found and loaded together, as chunks of their own."""

    layers: int
    layer_token_bytes: int
    """Of one token in one layer, on one rank; 0 where they keep a state."""
    window: int | None
    """Tokens that these layers look back; None: all. Of a window group vLLM stores what the last window needs."""
    state_bytes: int = 0
    """Of one layer, on one rank, where all that it keeps of what came before is a state: Mamba, GDN, short
    convolutions. One is stored for each chunk, as it was at the chunk's end."""

    @property
    def bytes_per_token(self) -> int:
        """Of one token in all layers of the group, on one rank."""
        return self.layers * self.layer_token_bytes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's KV cache in numbers, on one rank of ``tp``. ``model_config`` makes them."""

    name: str
    """For people: the model's directory, or its ``model_type``."""
    kind: Kind
    """``full``: every layer keeps every token. ``mla``: likewise, compressed, and whole on every rank. ``sliding``: all
    layers look back a window. ``hybrid``: some do. ``state``: some keep a state."""
    layers: int
    kv_heads: int
    """On one rank; 1 for MLA."""
    head_size: int
    kv_dtype: str
    tp: int
    groups: tuple[KVGroup, ...]
    block_tokens: int | None = None
    """Of a model with state what a chunk holds, whatever ``chunk_tokens`` says: one block, which vLLM makes so large
    that a state fits into it (here: as on CUDA, with the default block size)."""
    replicas: int = 1
    """How many ranks have the same."""

    @property
    def bytes_per_token(self) -> int:
        """Of one token in all layers, on one rank. Where there is a window, layers behind it hold less of a prompt."""
        return sum(group.bytes_per_token for group in self.groups)

    def chunk_holds(self, chunk_tokens: int) -> int:
        """Return the tokens that a chunk really holds where the config says ``chunk_tokens``."""
        return self.block_tokens or chunk_tokens

    def group_chunk_bytes(self, group: KVGroup, chunk_tokens: int) -> int:
        """Return what a chunk of one group takes on the medium, on one rank."""
        kept_bytes = self.chunk_holds(chunk_tokens) * group.bytes_per_token + group.layers * group.state_bytes
        return slot_bytes(1, kept_bytes)

    def chunk_bytes(self, chunk_tokens: int) -> int:
        """Return what ``chunk_tokens`` take on the medium, on one rank: a chunk of each group, with header and padding.

        For a model with windows it is the most: see ``KVGroup.window``.
        """
        return sum(self.group_chunk_bytes(group, chunk_tokens) for group in self.groups)

    def chunks_in(self, capacity_bytes: int, chunk_tokens: int, *, copies: int | None = None) -> int:
        """Return how many times ``chunk_tokens`` fit a capacity that all ``tp`` ranks share, as a tier's is.

        ``copies``: how many ranks store what they have; None: all.
        """
        return capacity_bytes // ((copies or self.tp) * self.chunk_bytes(chunk_tokens))

    def tokens_in(self, capacity_bytes: int, chunk_tokens: int, *, copies: int | None = None) -> int:
        """Return the tokens that fit; with 10**12, tokens per TB. For a model with windows it is the least."""
        return self.chunks_in(capacity_bytes, chunk_tokens, copies=copies) * self.chunk_holds(chunk_tokens)

    def prompt_bytes(self, tokens: int) -> int:
        """Return the KV bytes that a load of ``tokens`` brings back on one rank: of a window group, its window; of
        state, one.
        """
        return sum(
            group.layers * group.state_bytes
            + group.bytes_per_token * (tokens if group.window is None else min(tokens, group.window))
            for group in self.groups
        )
