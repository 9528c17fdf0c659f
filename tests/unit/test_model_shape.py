"""What a token of KV weighs: published figures of well-known models, vLLM's own arithmetic in numbers, and refusals.

The configs are cut down to the fields that decide. ``tests/vllm/test_cli_warm.py`` compares with a running vLLM.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nixl_offload.chunk.header import slot_bytes
from nixl_offload.cli.model_config import LLAMA_3_1_8B, model_shape, read_model_shape
from nixl_offload.cli.model_shape import KVGroup
from nixl_offload.errors import ConfigError


def llama(layers: int, hidden: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "torch_dtype": "bfloat16",
        **more,
    }


LLAMA_8B = dict(LLAMA_3_1_8B)
LLAMA_70B = llama(80, 8192, 64, 8)
LLAMA_405B = llama(126, 16384, 128, 8)
QWEN_72B = {**llama(80, 8192, 64, 8), "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 131072}
QWEN3_8B = {**llama(36, 4096, 32, 8), "model_type": "qwen3", "head_dim": 128, "sliding_window": None}
QWEN3_30B = {**llama(48, 2048, 32, 4), "model_type": "qwen3_moe", "head_dim": 128}
MISTRAL_7B = {**llama(32, 4096, 32, 8), "model_type": "mistral", "sliding_window": 4096}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 1,
}
GEMMA3_27B = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "torch_dtype": "bfloat16",
}
QWEN3_NEXT_80B = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "torch_dtype": "bfloat16",
}
GRANITE_4_H_SMALL = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 40,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
    "mamba_n_heads": 128,
    "mamba_expand": 2,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "torch_dtype": "bfloat16",
}
NEMOTRON_NANO_9B_V2 = {
    "model_type": "nemotron_h",
    "hidden_size": 4480,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "torch_dtype": "bfloat16",
}
LFM2_1B = {
    "model_type": "lfm2",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "conv_dim": 2048,
    "conv_L_cache": 3,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "bytes_per_token", "kind"),
    [
        (LLAMA_8B, 131_072, "full"),
        (LLAMA_70B, 327_680, "full"),
        (LLAMA_405B, 516_096, "full"),
        (QWEN_72B, 327_680, "full"),
        (QWEN3_8B, 147_456, "full"),
        (QWEN3_30B, 98_304, "full"),
        (MISTRAL_7B, 131_072, "sliding"),
        (DEEPSEEK_V3, 70_272, "mla"),
        (GEMMA3_27B, 507_904, "hybrid"),
        (GPT_OSS_20B, 49_152, "hybrid"),
    ],
    ids=["8B", "70B", "405B", "qwen2.5-72B", "qwen3-8B", "qwen3-30B", "mistral", "deepseek", "gemma3", "gpt-oss"],
)
def test_published_figures(config: dict[str, Any], bytes_per_token: int, kind: str) -> None:
    """405B, Qwen2.5-72B and DeepSeek-V3: 516.096, 327.680 and 70.272 KB, table 1 of DeepSeek's arXiv 2505.09343."""
    shape = model_shape(config)
    assert (shape.bytes_per_token, shape.kind, shape.tp) == (bytes_per_token, kind, 1)
    assert sum(group.layers for group in shape.groups) == shape.layers


def test_ranks_share_heads_but_not_the_latents_of_mla() -> None:
    """Fewer KV heads than ranks are copied, one to each; MLA's one vector is whole on all."""
    assert model_shape(LLAMA_70B, tp=8).bytes_per_token == 40_960
    assert model_shape(LLAMA_70B, tp=16).bytes_per_token == 40_960
    assert model_shape(QWEN3_30B, tp=8).kv_heads == 1
    assert model_shape(DEEPSEEK_V3, tp=8).bytes_per_token == 70_272
    sizes = [(LLAMA_70B, 8, 1), (LLAMA_70B, 16, 2), (QWEN3_30B, 8, 2), (DEEPSEEK_V3, 8, 8)]
    assert all(model_shape(config, tp=tp).replicas == replicas for config, tp, replicas in sizes)
    for config, tp in ((LLAMA_70B, 3), (LLAMA_70B, 128), (DEEPSEEK_V3, 5), (LLAMA_70B, 0)):
        with pytest.raises(ConfigError, match=r"ranks|1 or more"):
            model_shape(config, tp=tp)


def test_data_types() -> None:
    assert model_shape(LLAMA_8B, kv_dtype="fp8").bytes_per_token == 65_536
    assert model_shape(LLAMA_8B, kv_dtype="float32").bytes_per_token == 262_144
    assert model_shape(DEEPSEEK_V3, kv_dtype="fp8_ds_mla").bytes_per_token == 61 * 656
    assert model_shape({**LLAMA_8B, "torch_dtype": None, "dtype": "float16"}).kv_dtype == "float16"
    quantized = {**LLAMA_8B, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}
    assert model_shape(quantized, kv_dtype="fp8").bytes_per_token == 65_536
    for config, kv_dtype, words in (
        ({**LLAMA_8B, "torch_dtype": "float32"}, "auto", "is of dtype 'float32'.*--kv-dtype"),
        ({**LLAMA_8B, "torch_dtype": None}, "auto", "names no dtype.*--kv-dtype"),
        (quantized, "auto", "quantizes its KV cache"),
        (LLAMA_8B, "fp8_ds_mla", "'fp8_ds_mla' is not understood"),
        (LLAMA_8B, "nvfp4", "'nvfp4' is not understood; understood are auto, bfloat16"),
    ):
        with pytest.raises(ConfigError, match=words):
            model_shape(config, kv_dtype=kv_dtype)


def test_chunks_and_capacities() -> None:
    """A chunk is a header page and its tokens, rounded up to pages; a capacity is shared by all ranks."""
    shape = model_shape(LLAMA_8B)
    assert shape.chunk_bytes(256) == 4096 + 256 * 131_072 == slot_bytes(16, 16 * 131_072)
    assert shape.chunks_in(10**12, 256) == 10**12 // 33_558_528
    assert shape.tokens_in(10**12, 256) == 29_798 * 256
    two = model_shape(LLAMA_8B, tp=2)
    assert two.chunks_in(1 << 30, 256) == (1 << 30) // (2 * two.chunk_bytes(256)) == 31
    assert shape.prompt_bytes(10_000) == 10_000 * 131_072


def test_windows_make_groups_as_vllm_makes_them() -> None:
    """Of 10 layers and 52 vLLM makes one group and six; a prompt's tail is all that is stored of a window."""
    gemma = model_shape(GEMMA3_27B)
    assert [(group.layers, group.window) for group in gemma.groups] == [
        *[(9, 1024)] * 4,
        *[(8, 1024)] * 2,
        (10, None),
    ]
    assert gemma.prompt_bytes(10_000) == 16 * 128 * 4 * (10 * 10_000 + 52 * 1024)
    assert gemma.prompt_bytes(100) == 100 * gemma.bytes_per_token
    assert gemma.chunk_bytes(256) == sum(4096 + 256 * group.bytes_per_token for group in gemma.groups)
    oss = model_shape(GPT_OSS_20B)
    assert oss.groups == (KVGroup(12, 2048, 128), KVGroup(12, 2048, None))
    uneven = {**GPT_OSS_20B, "num_hidden_layers": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
    uneven["layer_types"] = [*uneven["layer_types"], "full_attention"]
    assert [group.layers for group in model_shape(uneven).groups] == [2, 2, 1]
    assert [group.layers for group in model_shape({**GPT_OSS_20B, "layer_types": None}).groups] == [12, 12]


@pytest.mark.parametrize(
    ("config", "block_tokens", "state_bytes", "layers", "bytes_per_token"),
    [
        (QWEN3_NEXT_80B, 544, 3 * 8192 * 2 + 32 * 128 * 128 * 2, [12, 12, 12, 12], 24_576),
        (GRANITE_4_H_SMALL, 528, 3 * 8448 * 2 + 128 * 64 * 128 * 2, [4] * 10, 16_384),
        (NEMOTRON_NANO_9B_V2, 1312, 3 * 12_288 * 2 + 128 * 80 * 128 * 4, [4] * 7 + [3], 16_384),
        (LFM2_1B, 16, 2048 * 2 * 2, [5, 5, 6], 12_288),
    ],
    ids=["gdn", "mamba2", "mamba2-float32", "short-conv"],
)
def test_state(
    config: dict[str, Any], block_tokens: int, state_bytes: int, layers: list[int], bytes_per_token: int
) -> None:
    """A block of Qwen3-Next is 544 tokens on a GPU, as vLLM logs. A chunk is whole blocks, with a state per layer."""
    shape = model_shape(config)
    assert (shape.kind, shape.block_tokens, shape.bytes_per_token) == ("state", block_tokens, bytes_per_token)
    assert {group.state_bytes for group in shape.groups} == {0, state_bytes}
    assert sorted(group.layers for group in shape.groups) == sorted(layers)
    states = sum(group.layers * group.state_bytes for group in shape.groups)
    one = shape.chunk_holds(1)
    assert one == shape.chunk_holds(4096) == block_tokens
    assert shape.prompt_bytes(10_000) == 10_000 * bytes_per_token + states
    assert 0 <= shape.chunk_bytes(1) - one * bytes_per_token - states <= 2 * 4096 * len(shape.groups)
    assert shape.tokens_in(10**12, 1) % block_tokens == 0


def test_layers_of_nemotron_by_either_name() -> None:
    names = {"M": "mamba", "*": "attention", "-": "mlp"}
    layers = [names[letter] for letter in str(NEMOTRON_NANO_9B_V2["hybrid_override_pattern"])]
    named = {**NEMOTRON_NANO_9B_V2, "hybrid_override_pattern": None, "layers_block_type": layers}
    assert model_shape(named) == model_shape(NEMOTRON_NANO_9B_V2)
    with pytest.raises(ConfigError, match=r"layers_block_type .*not known here"):
        model_shape({**named, "layers_block_type": ["rwkv"]})


def test_state_on_many_ranks() -> None:
    """Heads are dealt out, and a group of Mamba's that all ranks need is on each."""
    half = model_shape(QWEN3_NEXT_80B, tp=2)
    assert (half.block_tokens, half.groups[0].state_bytes) == (544, 1_097_728 // 2)
    assert model_shape(GRANITE_4_H_SMALL, tp=2).groups[0].state_bytes == 3 * (8192 + 512) // 2 * 2 + 64 * 64 * 128 * 2
    with pytest.raises(ConfigError, match="cannot be dealt out to 5 ranks"):
        model_shape({**NEMOTRON_NANO_9B_V2, "num_key_value_heads": 40}, tp=5)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**QWEN3_NEXT_80B, "layer_types": ["linear_attention"] * 48}, "are not both"),
        ({**LFM2_1B, "full_attn_idxs": None}, "layer_types does not name each of the 16"),
        ({**LFM2_1B, "layer_types": [["conv"]] * 16}, r"\['conv'\]; what such a layer keeps"),
        ({**NEMOTRON_NANO_9B_V2, "layers_block_type": ["mamba", {}]}, r"layers_block_type \['mamba', {}\]"),
        ({**QWEN3_NEXT_80B, "num_hidden_layers": 1 << 40}, "10000 at most"),
        ({**GRANITE_4_H_SMALL, "layer_types": ["attention", "rwkv"] * 20}, "'rwkv'; what such a layer keeps"),
        ({**NEMOTRON_NANO_9B_V2, "hybrid_override_pattern": None}, "hybrid_override_pattern None"),
        ([], "holds no mapping"),
        ({}, "model_type None is not understood; understood are "),
        ({**LLAMA_8B, "model_type": "mamba\x1b[2J"}, r"'mamba\\x1b\[2J' is not understood"),
        ({**LLAMA_8B, "model_type": "llava"}, "'llava' is not understood"),
        ({**LLAMA_8B, "num_hidden_layers": "32"}, "num_hidden_layers is '32'; a positive whole number"),
        ({**LLAMA_8B, "num_hidden_layers": True}, "num_hidden_layers is True"),
        ({**LLAMA_8B, "model_type": "qwen2", "num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({**LLAMA_8B, "model_type": "qwen3"}, "head_dim is missing"),
        ({**LLAMA_8B, "hidden_size": 4097}, "hidden_size 4097 is no multiple of 32 heads"),
        ({**LLAMA_8B, "model_type": "mistral"}, "sliding_window is missing"),
        ({**QWEN_72B, "use_sliding_window": True}, "use_sliding_window without layer_types"),
        ({**LLAMA_8B, "layer_types": ["full_attention"]}, "layer_types does not name each of the 32 layers"),
        ({**LLAMA_8B, "layer_types": ["linear_attention"] * 32}, "'linear_attention'; what such a layer keeps"),
        ({**DEEPSEEK_V3, "index_topk": 2048}, "sparse attention"),
        ({**DEEPSEEK_V3, "kv_lora_rank": None}, "kv_lora_rank is missing"),
    ],
)
def test_what_is_not_understood_is_refused(config: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model_shape(config)


def test_a_file_or_its_directory(tmp_path: Path) -> None:
    file = tmp_path / "Llama-3.1-8B" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(LLAMA_8B))
    for path in (file, file.parent):
        shape = read_model_shape(path)
        assert (shape.name, shape.bytes_per_token) == ("Llama-3.1-8B", 131_072)
    for content, words in (("{", "is not JSON"), ("[1]", "holds no mapping"), (None, "cannot be read")):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_text(content)
        with pytest.raises(ConfigError, match=f"config.json: .*{words}"):
            read_model_shape(file)
