"""Which bytes of a layer's pages belong to a range of KV heads, in one order for all engines.

The canonical order of a shard: block after block; in a block layer after layer, in a layer head after head, and of a
head what vLLM keeps for the tokens of the block, as it lies. It depends neither on tensor parallelism nor on whether
layers lie side by side in a block.
Threading: immutable descriptions and pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nixl_offload.chunk.layout import GroupLayout, PageRun
from nixl_offload.errors import LayoutError


@dataclass(frozen=True, slots=True)
class HeadPages:
    """One layer's pages on one rank: in each, head after head without gaps."""

    tensor_index: int
    page_offset: int
    """Bytes from the begin of the tensor's page."""
    heads: int
    """That this rank has; 1 where KV is not divided (MLA)."""
    head_bytes: int
    """Of one head in one block."""


def shard_groups(layers: Sequence[HeadPages], shards: int) -> tuple[GroupLayout, ...]:
    """Return what a rank stores of a group: a layout for each of its ``shards``, in the order of their heads.

    ``layers``: those that the rank has of the group, in the model's order. Raises LayoutError when a layer's heads
    cannot be dealt out evenly.
    """
    for layer in layers:
        if layer.heads % shards:
            raise LayoutError(f"{layer.heads} KV heads cannot be dealt out to {shards} shards")
    return tuple(GroupLayout(tuple(_run(layer, shard, shards) for layer in layers)) for shard in range(shards))


def _run(layer: HeadPages, shard: int, shards: int) -> PageRun:
    length = layer.heads // shards * layer.head_bytes
    return PageRun(layer.tensor_index, layer.page_offset + shard * length, length)
