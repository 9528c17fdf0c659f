"""How many bytes of KV cache a model needs: per token, per chunk, per prompt. ``model_config`` reads them off a model.

Threading: immutable values and pure functions, safe anywhere. Needs neither torch, transformers nor vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nixl_offload.chunk.header import slot_bytes

Kind = Literal["full", "mla", "sliding", "hybrid"]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV vLLM keeps in one group: stored, found and loaded together, as chunks of their own."""

    layers: int
    layer_token_bytes: int
    """Of one token in one layer, on one rank."""
    window: int | None
    """Tokens that these layers look back; None: all. Of a window group vLLM stores what the last window needs."""

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
    layers look back a window. ``hybrid``: some do."""
    layers: int
    kv_heads: int
    """On one rank; 1 for MLA."""
    head_size: int
    kv_dtype: str
    tp: int
    groups: tuple[KVGroup, ...]

    @property
    def bytes_per_token(self) -> int:
        """Of one token in all layers, on one rank. Where there is a window, layers behind it hold less of a prompt."""
        return sum(group.bytes_per_token for group in self.groups)

    def chunk_bytes(self, chunk_tokens: int) -> int:
        """Return what ``chunk_tokens`` take on the medium, on one rank: a chunk of each group, with header and padding.

        Block sizes do not matter. For a model with windows it is the most: see ``KVGroup.window``.
        """
        return sum(slot_bytes(1, chunk_tokens * group.bytes_per_token) for group in self.groups)

    def chunks_in(self, capacity_bytes: int, chunk_tokens: int) -> int:
        """Return how many times ``chunk_tokens`` fit a capacity that all ``tp`` ranks share, as a tier's is."""
        return capacity_bytes // (self.tp * self.chunk_bytes(chunk_tokens))

    def tokens_in(self, capacity_bytes: int, chunk_tokens: int) -> int:
        """Return the tokens that fit; with 10**12, tokens per TB. For a model with windows it is the least."""
        return self.chunks_in(capacity_bytes, chunk_tokens) * chunk_tokens

    def prompt_bytes(self, tokens: int) -> int:
        """Return the KV bytes that a load of ``tokens`` brings back on one rank: of a window group, its window."""
        return sum(
            group.bytes_per_token * (tokens if group.window is None else min(tokens, group.window))
            for group in self.groups
        )
