"""Small models of many families, with random weights and answers that depend on what is kept of the prompt.

Architectures come from transformers, which names tensors as checkpoints on the Hub do. As in ``examples.demo.model``
attention is sharp and outweighs a token's own embedding; recurrent state forgets slowly, so that the state of a
boundary still shows at the end of a prompt. The first column of the table, ``control``, proves that for each family.

Threading: plain functions; nothing is shared. transformers and torch are imported when a model is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from examples.demo.model import TINY, write_model

if TYPE_CHECKING:
    import torch

COMMON: Final[dict[str, Any]] = {
    "vocab_size": TINY.vocab,
    "hidden_size": TINY.hidden,
    "intermediate_size": TINY.intermediate,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TINY.max_tokens,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
IMAGE_TOKEN: Final = TINY.vocab - 1
IMAGE_TOKENS: Final = 8
"""What an image adds at the beginning of a prompt."""
IMAGE_PIXELS: Final = 56
"""Width and height."""
CPU_MLA: Final[dict[str, Any]] = {"attention_backend": "CPU_MLA"}
"""vLLM's reference implementation: without it vLLM takes another where the processor has AMX, which refuses float32 and
keeps prefix caching on."""

_SIZES: Final[Mapping[str, float]] = {
    "lm_head": TINY.logit_scale,
    **dict.fromkeys(("q_proj", "k_proj", "qkv_proj", "kv_a_proj_with_mqa", "o_proj", "out_proj"), 2.0),
    "down_proj": TINY.mlp_gain,
}
"""How large is what a projection gives, where it is not 1. The attention's logits get a deviation of 2 times 2."""


def write_checkpoint(
    directory: Path,
    model_type: str,
    *,
    auto: str = "AutoModelForCausalLM",
    dtype: str = "float32",
    embedding: float = 1.0,
    config: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """Write a model of transformers' ``model_type`` with ``COMMON`` and ``fields``; return ``directory``.

    ``auto``: transformers' class that makes it. ``embedding``: size of an embedding; less where the output is tied to
    it. ``config``: what config.json is to say otherwise. The same arguments give the same bytes. An existing directory
    is reused.
    """
    if (directory / "config.json").exists():
        return directory
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    settings = transformers.AutoConfig.for_model(model_type, **{**COMMON, **fields})
    torch.manual_seed(1)
    model = getattr(transformers, auto).from_config(settings, dtype=torch.float32)
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(name, parameter, source, embedding)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    written = json.loads((directory / "config.json").read_text())
    written |= {"dtype": dtype, "torch_dtype": dtype, **(config or {})}
    (directory / "config.json").write_text(json.dumps(written, indent=2))
    return directory


def _fill(name: str, parameter: torch.Tensor, source: torch.Generator, embedding: float) -> None:
    import torch

    part = name.removesuffix(".weight").rpartition(".")[2]
    if name.endswith("A_log"):  # forgets a fifth within ten to fifty tokens, not within one
        parameter.copy_(torch.log(0.005 + 0.02 * torch.rand(parameter.shape, generator=source)))
    elif name.endswith("dt_bias"):
        parameter.fill_(0.5)
    elif part == "query_tokens" or "embed" in part:
        parameter.copy_(embedding * torch.randn(parameter.shape, generator=source))
    elif parameter.ndim >= 2 and "norm" not in part:
        width = parameter[0].numel() if parameter.ndim == 2 or "conv" in name else parameter.shape[-1]
        parameter.copy_(torch.randn(parameter.shape, generator=source) * (_SIZES.get(part, 1.0) / width**0.5))


def write_mla(directory: Path) -> Path:
    """Write a DeepSeek-V2 without experts, whose attention is MLA."""
    return write_checkpoint(
        directory,
        "deepseek_v2",
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=COMMON["num_hidden_layers"],
        moe_intermediate_size=128,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
    )


def write_vision(directory: Path) -> Path:
    """Write a BLIP-2 that sees images of ``IMAGE_PIXELS``, with its tokenizer and processor."""
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    write_checkpoint(
        directory,
        "blip-2",
        auto="AutoModelForImageTextToText",
        vision_config={**tower, "num_hidden_layers": 0, "image_size": IMAGE_PIXELS, "patch_size": 14},
        qformer_config={**tower, "num_hidden_layers": 1, "encoder_hidden_size": 64, "vocab_size": 16},
        text_config={**COMMON, "model_type": "llama"},
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=IMAGE_TOKEN,
    )
    size = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    words = {f"t{token}": token for token in range(IMAGE_TOKEN)} | {"<image>": IMAGE_TOKEN}
    files = {
        "processor_config.json": {
            "processor_class": "Blip2Processor",
            "num_query_tokens": IMAGE_TOKENS,
            "image_processor": {"image_processor_type": "BlipImageProcessor", "size": size},
        },
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "t0",
            "eos_token": "t1",
            "additional_special_tokens": ["<image>"],
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def write_eagle(directory: Path) -> Path:
    """Write an EAGLE head for TINY: one layer behind a projection of embeddings beside hidden states."""
    from safetensors.torch import load_file, save_file

    file = write_model(directory, replace(TINY, layers=1), seed=3) / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    wanted = {name: tensor for name, tensor in tensors.items() if name.startswith("layers.")}
    del wanted["layers.0.input_layernorm.weight"]  # EAGLE's first layer has none
    wanted["fc.weight"] = _random(TINY.hidden, 2 * TINY.hidden)
    save_file(wanted, file, metadata={"format": "pt"})
    return directory


def add_mtp(directory: Path) -> Path:
    """Give a Qwen3-Next a layer that predicts a token more: a copy of its last layer, behind a projection."""
    import torch
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    tensors = load_file(file)
    if "mtp.fc.weight" in tensors:
        return directory
    last = f"model.layers.{json.loads((directory / 'config.json').read_text())['num_hidden_layers'] - 1}."
    copies = {
        f"mtp.layers.0.{name.removeprefix(last)}": t.clone() for name, t in tensors.items() if name.startswith(last)
    }
    dtype = tensors["model.norm.weight"].dtype
    tensors |= copies | {"mtp.fc.weight": _random(TINY.hidden, 2 * TINY.hidden).to(dtype)}
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = torch.zeros(TINY.hidden, dtype=dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def _random(rows: int, columns: int) -> torch.Tensor:
    import torch

    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(4)) / columns**0.5
