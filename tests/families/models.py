"""Which families are tried: a checkpoint and the options of an engine for each.

Threading: immutable descriptions; ``write`` makes files in the directory that it is given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from examples.demo.model import TINY, TINY_HYBRID, write_model
from tests.families.checkpoints import (
    CPU_MLA,
    IMAGE_TOKENS,
    add_mtp,
    write_checkpoint,
    write_eagle,
    write_mla,
    write_vision,
)
from tests.vllm import vision

_MAMBA_LAYERS = ["mamba", "mamba", "attention", "mamba"]


@dataclass(frozen=True)
class Family:
    """A kind of model, small."""

    name: str
    write: Callable[[Path], Path]
    """Writes the checkpoint to a directory that is empty or holds it already."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """``vllm.LLM``'s, beyond the harness's."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of our config, beyond one tier."""
    has_block_steps: bool = False
    """A step ends where a block does. Mamba 2 can keep the state of a boundary within a step on a GPU only."""
    draft: Callable[[Path], Path] | None = None
    """Writes the checkpoint of a draft; its directory becomes ``speculative_config["model"]``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of the engine's process."""
    extension: str = "tests.families.extensions.FamilyExtension"
    """Of vLLM's worker class."""
    ranks: int = 1
    """Of tensor parallelism, each a process of its own."""
    image_tokens: int = 0
    """What the image that all prompts come with adds in front of them; 0: there is none."""


_llama: Final = partial(write_model, shape=TINY)


def _checkpoint(model_type: str, **fields: Any) -> Callable[[Path], Path]:
    return partial(write_checkpoint, model_type=model_type, **fields)


_qwen3_next: Final = _checkpoint(
    "qwen3_next",
    num_hidden_layers=3,
    layer_types=["linear_attention", "linear_attention", "full_attention"],
    head_dim=128,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    shared_expert_intermediate_size=128,
    dtype="bfloat16",
)

_nemotron_h: Final = _checkpoint(
    "nemotron_h",
    head_dim=64,
    hybrid_override_pattern="M-M*M-",
    num_hidden_layers=6,
    mamba_num_heads=8,
    mamba_head_dim=64,
    ssm_state_size=64,
    n_groups=2,
    config={"hybrid_override_pattern": "M-M*M-"},
)

STATE: Final[Mapping[str, Any]] = {"max_num_batched_tokens": 1024, "kv_cache_memory_bytes": 128 << 20}
"""Options of models with recurrent state: a step holds whole blocks, which are larger."""

FAMILIES: Final = {
    family.name: family
    for family in (
        Family("llama", _llama),
        Family("llama-windows", partial(write_model, shape=TINY_HYBRID)),
        Family("mistral-window", _checkpoint("mistral", head_dim=64, sliding_window=512)),
        Family(
            "gemma3",
            _checkpoint("gemma3_text", head_dim=64, sliding_window=512, query_pre_attn_scalar=64, num_hidden_layers=6),
        ),
        Family(
            "gpt-oss",
            _checkpoint(
                "gpt_oss", head_dim=64, sliding_window=512, num_local_experts=4, num_experts_per_tok=2, dtype="bfloat16"
            ),
            {"dtype": "bfloat16"},
        ),
        Family(
            "llama4",
            _checkpoint(
                "llama4_text",
                head_dim=64,
                attention_chunk_size=512,
                num_local_experts=2,
                interleave_moe_layer_step=2,
                intermediate_size_mlp=512,
                dtype="bfloat16",
            ),
            {"dtype": "bfloat16"},
        ),
        Family("deepseek-mla", write_mla, CPU_MLA),
        Family("qwen3-next", _qwen3_next, {**STATE, "dtype": "bfloat16"}),
        Family("qwen3-next fine", _qwen3_next, {**STATE, "dtype": "bfloat16", "prefix_match_unit": 32}),
        Family(
            "qwen3-next MTP",
            lambda directory: add_mtp(_qwen3_next(directory)),
            {**STATE, "dtype": "bfloat16", "speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
        ),
        Family("nemotron-h", _nemotron_h, STATE, has_block_steps=True),
        Family(
            "granite4",
            _checkpoint(
                "granitemoehybrid",
                layer_types=_MAMBA_LAYERS,
                mamba_n_heads=8,
                mamba_d_head=64,
                mamba_d_state=64,
                num_local_experts=0,
                num_experts_per_tok=0,
                shared_intermediate_size=512,
                position_embedding_type="nope",
                attention_multiplier=0.125,
                config={"layer_types": _MAMBA_LAYERS},
            ),
            STATE,
            has_block_steps=True,
        ),
        Family(
            "falcon-h1",
            _checkpoint("falcon_h1", mamba_d_ssm=512, mamba_n_heads=8, mamba_d_head=64, mamba_d_state=64),
            STATE,
            has_block_steps=True,
        ),
        Family(
            "lfm2",
            _checkpoint(
                "lfm2",
                layer_types=["conv", "full_attention", "conv", "full_attention"],
                block_auto_adjust_ff_dim=False,
                embedding=0.2,
                config={"conv_dim": TINY.hidden, "conv_L_cache": 3, "block_dim": TINY.hidden},
            ),
            STATE,
            extension="tests.families.mended.MendedExtension",
        ),
        Family(
            "jamba",
            _checkpoint(
                "jamba",
                attn_layer_period=4,
                attn_layer_offset=2,
                num_experts=2,
                expert_layer_period=8,
                use_mamba_kernels=False,
            ),
            STATE,
        ),
        Family(
            "mamba2",
            _checkpoint("mamba2", state_size=64, num_heads=8, head_dim=64, n_groups=1),
            STATE,
            has_block_steps=True,
        ),
        Family(
            "n-gram draft",
            _llama,
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
        ),
        Family(
            "draft model",
            _llama,
            {"speculative_config": {"num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}},
            draft=partial(write_model, shape=TINY, seed=2),
        ),
        Family(
            "EAGLE", _llama, {"speculative_config": {"method": "eagle", "num_speculative_tokens": 2}}, draft=write_eagle
        ),
        Family("two pipeline stages", _llama, {"pipeline_parallel_size": 2}),
        Family("nemotron-h TP 2", _nemotron_h, STATE, has_block_steps=True, ranks=2),
        Family(
            "qwen3-next TP 2",
            partial(_qwen3_next, linear_num_key_heads=2, linear_num_value_heads=4),
            {**STATE, "dtype": "bfloat16"},
            ranks=2,
        ),
        Family(
            "BLIP-2",
            write_vision,
            {"skip_tokenizer_init": False},
            environment=vision.ENVIRONMENT,
            image_tokens=IMAGE_TOKENS,
        ),
    )
}


def _deepseek_mtp(directory: Path) -> Path:
    """A DeepSeek-V3 without experts, with one layer that predicts a token more; config alone."""
    file = write_mla(directory) / "config.json"
    config = json.loads(file.read_text())
    config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
    config |= {"first_k_dense_replace": config["num_hidden_layers"] + 1, "n_group": 1, "topk_group": 1}
    file.write_text(json.dumps(config))
    return directory


_SERVED: Final = {"serve_without_prefix_caching": True}
"""Of our config: for MLA vLLM's CPU build turns prefix caching off."""
_MTP: Final = {**CPU_MLA, "method": "mtp", "num_speculative_tokens": 1}
LAYOUTS: Final = {
    family.name: family
    for family in (
        FAMILIES["qwen3-next MTP"],
        FAMILIES["jamba"],
        replace(FAMILIES["deepseek-mla"], fields=_SERVED),
        Family("deepseek MTP", _deepseek_mtp, {**CPU_MLA, "load_format": "dummy", "speculative_config": _MTP}, _SERVED),
    )
}
"""Models that vLLM's CPU build cannot run, or whose cached KV it cannot use: only their KV caches are tried."""
