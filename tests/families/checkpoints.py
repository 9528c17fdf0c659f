"""Small models of many families, with random weights and answers that depend on what is kept of the prompt.

Architectures come from transformers, which names tensors as checkpoints on the Hub do. As in ``examples.demo.model``
attention is sharp and outweighs a token's own embedding; recurrent state forgets slowly, so that the state of a
boundary still shows at the end of a prompt. The first column of the table, ``control``, proves that for each family.

Threading: plain functions; nothing is shared. transformers and torch are imported when a model is written.
"""

from __future__ import annotations

import json
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
_QUERY_KEY, _OUTPUT, _DOWN = 2.0, 2.0, 0.5
"""Sizes of what a projection gives: the attention's logits get a deviation of their product, 4."""


def write_checkpoint(
    directory: Path,
    model_type: str,
    *,
    dtype: str = "float32",
    embedding: float = 1.0,
    config: dict[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """Write a model of transformers' ``model_type`` with ``COMMON`` and ``fields``; return ``directory``.

    ``embedding``: size of an embedding; less where the output is tied to it. ``config``: what config.json is to say
    otherwise. The same arguments give the same bytes.
    """
    if (directory / "config.json").exists():
        return directory
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    settings = AutoConfig.for_model(model_type, **{**COMMON, **fields})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
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


def _fill(name: str, parameter: torch.Tensor, source: torch.Generator, embedding: float) -> None:
    import torch

    part = name.rpartition(".")[0].rpartition(".")[2]
    if name.endswith("A_log"):  # forgets a fifth within ten to fifty tokens, not within one
        parameter.copy_(torch.log(0.005 + 0.02 * torch.rand(parameter.shape, generator=source)))
    elif name.endswith("dt_bias"):
        parameter.fill_(0.5)
    elif parameter.ndim < 2 or "norm" in part:
        return
    elif "embed" in part:
        parameter.copy_(embedding * torch.randn(parameter.shape, generator=source))
    else:
        size = (
            TINY.logit_scale
            if "lm_head" in name
            else _QUERY_KEY
            if part in ("q_proj", "k_proj")
            else _OUTPUT
            if part in ("o_proj", "out_proj")
            else _DOWN
            if "down_proj" in name
            else 1.0
        )
        width = parameter[0].numel() if parameter.ndim == 2 or "conv" in name else parameter.shape[-1]
        parameter.copy_(torch.randn(parameter.shape, generator=source) * (size / width**0.5))
