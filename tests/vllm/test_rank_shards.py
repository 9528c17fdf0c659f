"""Proves that what parts two engines' shards is in their digest, over KV memory that vLLM lays out itself, and that
sizes and layouts are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MLAAttentionSpec

from nixl_offload.vllm.rank_shards import CutChunks, cut_chunks
from tests.vllm.test_kv_heads import BLOCKS, Memory, full, group, vllm_config, window


def engine(total: int, tp: int = 1, layout: str = "LBHNC", layers: Mapping[str, Any] | None = None) -> Any:
    config = vllm_config(total, tp, 0, layout)
    config.parallel_config.pipeline_parallel_size = 1
    config.compilation_config = SimpleNamespace(static_forward_context=layers or {})
    return config


def cut(config: Any, groups: Sequence[KVCacheGroupSpec], kernel_block: int | None = None) -> CutChunks:
    memory = Memory(config, groups, kernel_block)
    found = cut_chunks(config, memory.config, memory.caches, 1 if len(groups) == 1 else 4, BLOCKS)
    assert isinstance(found, CutChunks), found
    return found


def attention(scale: float) -> Any:
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    return SimpleNamespace(_k_scale_float=scale, _v_scale_float=1.0, get_attn_backend=lambda: backend)


def test_sizes_and_layouts_have_one_digest() -> None:
    made = {
        cut(engine(4, tp, layout), [group(full(max(1, 4 // tp)), "a"), group(window(max(1, 4 // tp)), "b")]).digest
        for tp in (1, 2, 4, 8)
        for layout in ("LBHNC", "BLHNC")
    }
    assert len(made) == 1


def test_what_changes_bytes_changes_the_digest() -> None:
    groups = [group(full(4), "a"), group(window(4), "b")]
    digests = [
        cut(engine(4), groups).digest,
        cut(engine(4, layers={"a": attention(1.0)}), groups).digest,
        cut(engine(4, layers={"a": attention(0.5)}), groups).digest,
        cut(engine(4), groups[::-1]).digest,
        cut(engine(4), [group(full(4), "a"), group(full(4), "b")]).digest,
        cut(engine(4), [group(full(4), "a"), group(window(4), "c")]).digest,
        cut(engine(4, layout="BLHNC"), [group(full(4, head_size_v=16), "a"), group(window(4), "b")]).digest,
        cut(engine(8), [group(full(8), "a"), group(window(8), "b")]).digest,
    ]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("tp", [1, 8])
def test_what_a_kernel_makes_of_a_block_of_mla_counts(tp: int) -> None:
    """An indexer keeps the scales of a kernel's block behind its tokens: another kernel block is another order."""
    spec = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=132, dtype=torch.uint8, max_tp_shards=1)
    whole, halves = (cut(engine(1, tp), [group(spec, "a.k_cache")], part).digest for part in (None, 2))
    assert whole != halves
