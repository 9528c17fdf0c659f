"""Proves on a real vLLM that a block-outermost KV cache (BLHNC), where a block of all layers is one piece, is stored
and loaded as any other, packed and direct; that groups store their own pages only; and when the layout is asked for.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from examples.demo.model import TINY_HYBRID
from nixl_offload.vllm import connector as connector_module
from nixl_offload.vllm.connector import NixlOffloadConnector
from nixl_offload.vllm.kv_caches import without_padding
from tests.vllm.blocks_outermost import ENVIRONMENT
from tests.vllm.harness import TINY, ModelShape, Workshop, ask_anew, assert_same, file_tier, prompts

EXTENSION = "tests.vllm.blocks_outermost.BlocksOutermostExtension"


@pytest.mark.parametrize(
    ("shape", "options", "way"),
    [
        pytest.param(TINY, {}, "packed", id="blocks of 256 KiB: packed"),
        pytest.param(TINY, {"block_size": 256}, "direct", id="blocks of 1 MiB: direct"),
        pytest.param(TINY_HYBRID, {}, "packed", id="two groups in one tensor"),
    ],
)
def test_stored_and_loaded_bit_by_bit(
    workshop: Workshop, tmp_path: Path, shape: ModelShape, options: dict[str, Any], way: str
) -> None:
    """Answers from loaded blocks are those from computed ones, logprobs included."""
    asked = prompts(2, seed=515, shape=shape)
    with workshop.start_engine(
        shape, file_tier(tmp_path / "kv"), worker_extension_cls=EXTENSION, environment=ENVIRONMENT, **options
    ) as engine:
        [strides] = engine.worker("block_strides")
        assert all(stride > page for stride, page in strides), "the layout is not block-outermost"
        assert engine.worker("why_not_by_heads") == [None]
        first = engine.generate(asked)
        second = ask_anew(engine, asked)
        assert all(answer.external_hit_tokens > 0 for answer in second)
        log = Path(engine.log).read_text(encoding="utf-8", errors="replace")
    assert_same(second, first)
    assert f"KV group 0: {way}" in log


def _spec(kind: type[FullAttentionSpec | SlidingWindowSpec], heads: int, **fields: Any) -> Any:
    return kind(block_size=16, num_kv_heads=heads, head_size=64, dtype=torch.float16, **fields)


def test_a_group_stores_its_own_pages_only() -> None:
    """VLLM names the whole block for each group; the smaller group's blocks end in what was somebody else's."""
    large, small = _spec(FullAttentionSpec, 4), _spec(SlidingWindowSpec, 4, sliding_window=64)
    groups = [KVCacheGroupSpec(["a", "b", "c"], large), KVCacheGroupSpec(["d"], small)]
    stride = 3 * large.page_size_bytes
    packed = CanonicalKVCacheTensor(torch.zeros((8, stride), dtype=torch.int8), stride)
    given = CanonicalKVCaches([packed], [[CanonicalKVCacheRef(0, stride)] for _ in groups])
    trimmed = without_padding(given, groups)
    assert [[ref.page_size_bytes for ref in refs] for refs in trimmed.group_data_refs] == [
        [stride],
        [small.page_size_bytes],
    ]
    assert trimmed.tensors is given.tensors


class _Platform(SimpleNamespace):
    def is_cuda_alike(self) -> bool:
        return bool(self.cuda)


@pytest.mark.parametrize(
    ("cuda", "hybrid", "fields", "layout"),
    [
        pytest.param(True, False, {}, "BLHNC", id="a GPU"),
        pytest.param(True, False, {"block_outermost": False}, "LBHNC", id="forbidden"),
        pytest.param(True, True, {}, "LBHNC", id="recurrent state"),
        pytest.param(False, False, {}, "LBHNC", id="no GPU"),
    ],
)
def test_when_the_layout_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, cuda: bool, hybrid: bool, fields: dict[str, Any], layout: str
) -> None:
    """On a GPU, unless the config forbids it or the model has recurrent state."""
    monkeypatch.setattr(connector_module, "current_platform", _Platform(cuda=cuda))
    assert NixlOffloadConnector.get_required_kvcache_layout(_vllm_config(tmp_path, hybrid, **fields)) == layout


def _vllm_config(tmp_path: Path, hybrid: bool, **fields: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"config": file_tier(tmp_path, **fields)}),
        model_config=SimpleNamespace(is_hybrid=hybrid),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
