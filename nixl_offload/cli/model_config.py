"""A model's KV cache by its Hugging Face ``config.json`` alone, for ``check --model``.

A config that is not understood is refused: a number that is wrong by a layer or a data type misleads whoever sizes
drives by it. Threading: pure but for reading the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from nixl_offload.cli.model_shape import Kind, KVGroup, ModelShape
from nixl_offload.errors import ConfigError

DTYPE_BYTES: Final[dict[str, int]] = {
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float32": 4,
    "float": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
FP8_DS_MLA: Final = "fp8_ds_mla"
FP8_DS_MLA_BYTES: Final = 656
"""Per token and layer: 512 fp8 values, their 4 float32 scales, 64 bfloat16 values of rotary position."""

_ATTENTION: Final = (
    *("gemma2", "gemma3_text", "glm4", "glm4_moe", "gpt_oss", "granite", "granitemoe", "llama", "mistral", "mixtral"),
    *("olmo2", "phi3", "qwen2", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3", "qwen3_moe"),
    *("qwen3_vl_text", "qwen3_vl_moe_text", "qwen2_vl", "qwen2_5_vl"),
)
_MLA: Final = ("deepseek_v2", "deepseek_v3", "kimi_k2")
_STATE: Final = ("granitemoehybrid", "lfm2", "nemotron_h", "qwen3_next")
"""Some layers attend, others keep a state."""
_WRAPPERS: Final = ("gemma3", "llava", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Models that see: the language model's config is the ``text_config`` within."""
_KV_HEADS_OF_ALL: Final = ("llama", "phi3")
"""Where ``num_key_value_heads`` is left out, each head has keys and values of its own."""
_HEAD_DIM_OWN: Final = (
    "gemma2",
    "gemma3_text",
    "glm4_moe",
    "gpt_oss",
    "nemotron_h",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
)
"""Their ``head_dim`` is not ``hidden_size / num_attention_heads`` where it is left out."""
_PATTERNS: Final = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}
"""Without ``layer_types``: every so many layers one attends to all, the others to a window."""
_UNEVEN: Final = 1.5
"""vLLM splits the layers of a hybrid model into groups of as many as the rarer kind has, unless the other has less than
so many times more; then it pads."""

_BLOCK_TOKENS: Final = 16
"""vLLM's default on CUDA. A block of a model with state is a multiple of it."""
_STATE_KINDS: Final = {
    "full_attention": "attention",
    "attention": "attention",
    "linear_attention": "state",
    "mamba": "state",
    "conv": "state",
}
_LAYERS_MOST: Final = 10_000
_Kind = TypeVar("_Kind")

LLAMA_3_1_8B: Final[Mapping[str, Any]] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
"""As much of its config.json as decides: what is taken where nobody names a model."""


def read_model_shape(path: str | os.PathLike[str], *, kv_dtype: str = "auto", tp: int = 1) -> ModelShape:
    """Read ``config.json``, or that of the directory ``path``, and return the shape of the model's KV cache.

    ``kv_dtype`` is as vLLM's ``--kv-cache-dtype``, or ``float32``; ``auto`` is that of the weights. ``tp``: the ranks
    that share the attention heads. ``check --model`` prints ``bytes_per_token``, ``chunk_bytes(chunk_tokens)``,
    ``chunks_in(capacity, chunk_tokens)`` and ``tokens_in(10**12, chunk_tokens)``; ``kind`` says whether windows make
    these a bound. Raises ConfigError, never a guess: the file cannot be read, or is of a model, a data type or a
    number of ranks for which nobody has worked the sum out.
    """
    source = os.fspath(path)
    file = os.path.join(source, "config.json") if os.path.isdir(source) else source
    try:
        with open(file, encoding="utf-8") as opened:
            config = json.load(opened)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: is not JSON: {str(error).splitlines()[0]}") from error
    name = os.path.basename(os.path.dirname(os.path.abspath(file)))
    return model_shape(config, name=name, source=file, kv_dtype=kv_dtype, tp=tp)


def model_shape(
    config: object, *, name: str = "", source: str = "config.json", kv_dtype: str = "auto", tp: int = 1
) -> ModelShape:
    """Do the same for the content of a config.json; ``source`` names it in errors."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"{source}: is not a model's config.json: it holds no mapping")
    reader = _Reader(config, source)
    if tp < 1:
        raise ConfigError(f"tensor parallel size {tp}; allowed: 1 or more")
    if reader.model_type in _MLA:
        return _mla(reader, name, kv_dtype, tp)
    if reader.model_type in _ATTENTION:
        return _attention(reader, name, kv_dtype, tp)
    if reader.model_type in _STATE:
        return _state(reader, name, kv_dtype, tp)
    known = ", ".join(sorted({*_ATTENTION, *_MLA, *_STATE, *_WRAPPERS} - {"qwen2_vl_text", "qwen2_5_vl_text"}))
    raise ConfigError(f"{source}: model_type {_said(reader.model_type)} is not understood; understood are {known}")


class _Reader:
    """The language model's config, and what surrounds it."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.source = source
        self.outer = config
        inner = config.get("text_config")
        wrapped = config.get("model_type") in _WRAPPERS and isinstance(inner, Mapping)
        self.config: Mapping[str, Any] = inner if wrapped and isinstance(inner, Mapping) else config
        self.model_type = self.config.get("model_type", config.get("model_type") if not wrapped else None)

    def get(self, name: str) -> Any:
        return self.config.get(name)

    def number(self, name: str) -> int:
        """Return a field that must be a positive whole number."""
        value = self.get(name)
        if type(value) is not int or value < 1:
            found = "is missing" if value is None else f"is {_said(value)}"
            raise self.error(f"{name} {found}; a positive whole number is needed")
        return value

    def layers(self) -> int:
        """Return how many there are. Lists of that length are made, so a number that no model has is refused."""
        layers = self.number("num_hidden_layers")
        if layers > _LAYERS_MOST:
            raise self.error(f"num_hidden_layers is {_said(layers)}; {_LAYERS_MOST} at most are understood")
        return layers

    def error(self, text: str) -> ConfigError:
        return ConfigError(f"{self.source}: {text}")

    def dtype(self, kv_dtype: str) -> str:
        """Return the data type of the KV cache."""
        if kv_dtype != "auto":
            return kv_dtype
        for config in (self.config, self.outer):
            quantization = config.get("quantization_config") or {}
            if isinstance(quantization, Mapping) and (
                quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
            ):
                raise self.error("the checkpoint quantizes its KV cache; say which --kv-dtype the server uses")
        names = [config.get(field) for config in (self.config, self.outer) for field in ("dtype", "torch_dtype")]
        found = next((value for value in names if value is not None), None)
        if found in ("bfloat16", "float16"):
            return str(found)
        told = "names no dtype" if found is None else f"is of dtype {_said(found)}"
        raise self.error(f"the model {told}, which vLLM serves as it sees fit; say which --kv-dtype the server uses")


def _attention(reader: _Reader, name: str, kv_dtype: str, tp: int) -> ModelShape:
    """Keys and values of each KV head."""
    layers = reader.layers()
    kv_heads, rank_heads, head_size, dtype, layer_token_bytes = _heads(reader, kv_dtype, tp)
    windows = _windows(reader, layers)
    groups = tuple(KVGroup(count, layer_token_bytes, window) for count, window in _grouped(windows))
    kinds = {window is None for window in windows}
    kind: Kind = "hybrid" if len(kinds) == 2 else "full" if kinds == {True} else "sliding"
    replicas = tp * rank_heads // kv_heads
    return ModelShape(_name(reader, name), kind, layers, rank_heads, head_size, dtype, tp, groups, replicas=replicas)


def _heads(reader: _Reader, kv_dtype: str, tp: int) -> tuple[int, int, int, str, int]:
    """Return KV heads, those on a rank, their size, the data type, and bytes of a token in a layer on a rank."""
    heads = reader.number("num_attention_heads")
    shares = reader.get("num_key_value_heads") is None and reader.model_type in _KV_HEADS_OF_ALL
    kv_heads = heads if shares else reader.number("num_key_value_heads")
    head_size = _head_size(reader, heads)
    if heads % tp or max(kv_heads, tp) % min(kv_heads, tp):
        raise reader.error(f"{heads} heads and {kv_heads} KV heads cannot be dealt out to {tp} ranks")
    rank_heads = max(1, kv_heads // tp)
    dtype = reader.dtype(kv_dtype)
    return kv_heads, rank_heads, head_size, dtype, 2 * rank_heads * head_size * _dtype_bytes(dtype)


def _state(reader: _Reader, name: str, kv_dtype: str, tp: int) -> ModelShape:
    """Keys and values in some layers, a state in the others, as vLLM groups and pads them (``mamba_utils.py``)."""
    kinds = _state_layers(reader)
    if not {"attention", "state"} <= set(kinds):
        raise reader.error("the layers are not both: some that attend, some that keep a state")
    _, rank_heads, head_size, dtype, token_bytes = _heads(reader, kv_dtype, tp)
    state_bytes = _state_bytes(reader, tp)
    unit_bytes = _BLOCK_TOKENS * token_bytes
    groups = tuple(
        KVGroup(count, token_bytes, None) if kind == "attention" else KVGroup(count, 0, None, state_bytes)
        for count, kind in _grouped(kinds)
    )
    return ModelShape(
        _name(reader, name),
        "state",
        len(kinds),
        rank_heads,
        head_size,
        dtype,
        tp,
        groups,
        _BLOCK_TOKENS * -(-state_bytes // unit_bytes),
    )


def _state_layers(reader: _Reader) -> list[str]:
    """Return what each layer keeps, ``attention`` or ``state``; layers that keep nothing are left out."""
    if reader.model_type == "nemotron_h" and (blocks := reader.get("layers_block_type") or reader.get("layer_types")):
        if not isinstance(blocks, list) or any(each not in (*_STATE_KINDS, "mlp", "moe") for each in blocks):
            raise reader.error(f"layers_block_type {_said(blocks)}; what such layers keep is not known here")
        return [_STATE_KINDS[each] for each in blocks if each in _STATE_KINDS]
    if reader.model_type == "nemotron_h":
        pattern = reader.get("hybrid_override_pattern")
        if not isinstance(pattern, str) or set(pattern) - set("M*-E"):
            raise reader.error(f"hybrid_override_pattern {_said(pattern)}; a string of M, *, - and E is needed")
        return ["attention" if letter == "*" else "state" for letter in pattern if letter in "M*"]
    layers = reader.layers()
    types = reader.get("layer_types")
    if types is None and reader.model_type == "qwen3_next":
        interval = reader.number("full_attention_interval") if "full_attention_interval" in reader.config else 4
        types = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]
    elif types is None and reader.model_type == "lfm2" and isinstance(reader.get("full_attn_idxs"), list):
        types = ["full_attention" if layer in reader.config["full_attn_idxs"] else "conv" for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise reader.error(f"layer_types does not name each of the {layers} layers")
    unknown = [each for each in types if each not in tuple(_STATE_KINDS)]  # what a file says may have no hash
    if unknown:
        raise reader.error(f"layer_types has {_said(unknown[0])}; what such a layer keeps is not known here")
    return [_STATE_KINDS[each] for each in types]


def _state_bytes(reader: _Reader, tp: int) -> int:
    """Return the bytes of a layer's state on one rank: the end of the convolution's input, and the recurrent state."""
    number = reader.number
    model_bytes = _dtype_bytes(reader.dtype("auto"))
    if reader.model_type == "lfm2":
        width = number("conv_dim") if reader.get("conv_dim") is not None else number("hidden_size")
        return _share(reader, width, tp) * (number("conv_L_cache") - 1) * model_bytes
    if reader.model_type == "qwen3_next":
        keys = number("linear_num_key_heads") * number("linear_key_head_dim")
        heads, head = number("linear_num_value_heads"), number("linear_value_head_dim")
        width, kernel = 2 * keys + heads * head, number("linear_conv_kernel_dim")
        values, recurrent_bytes = head * number("linear_key_head_dim"), model_bytes
    else:
        nemotron = reader.model_type == "nemotron_h"
        heads = number("mamba_num_heads" if nemotron else "mamba_n_heads")
        head = number("mamba_head_dim") if nemotron else number("mamba_expand") * number("hidden_size") // heads
        size, parts = (
            number("ssm_state_size" if nemotron else "mamba_d_state"),
            number("n_groups" if nemotron else "mamba_n_groups"),
        )
        parts = parts if parts % tp == 0 else tp
        width, kernel = heads * head + 2 * parts * size, number("conv_kernel" if nemotron else "mamba_d_conv")
        values, recurrent_bytes = head * size, model_bytes
        if nemotron:  # vLLM: float32 unless config.json says otherwise
            recurrent_bytes = _dtype_bytes(str(reader.get("mamba_ssm_cache_dtype") or "float32"))
    convolution = _share(reader, width, tp) * (kernel - 1) * model_bytes
    return convolution + _share(reader, heads, tp) * values * recurrent_bytes


def _share(reader: _Reader, whole: int, tp: int) -> int:
    if whole % tp:
        raise reader.error(f"a state of {whole} channels or heads cannot be dealt out to {tp} ranks")
    return whole // tp


def _mla(reader: _Reader, name: str, kv_dtype: str, tp: int) -> ModelShape:
    """One compressed vector per token, which every rank holds whole."""
    if reader.get("index_topk") is not None:
        raise reader.error(
            "sparse attention (index_topk) keeps an index beside the KV cache, whose size is not known here"
        )
    layers = reader.layers()
    head_size = reader.number("kv_lora_rank") + reader.number("qk_rope_head_dim")
    if reader.number("num_attention_heads") % tp:
        raise reader.error(f"{reader.get('num_attention_heads')} heads cannot be dealt out to {tp} ranks")
    dtype = reader.dtype(kv_dtype)
    if dtype == FP8_DS_MLA:
        if (reader.get("kv_lora_rank"), reader.get("qk_rope_head_dim")) != (512, 64):
            raise reader.error(f"{FP8_DS_MLA} is for 512 compressed and 64 rotary values only")
        token_bytes = FP8_DS_MLA_BYTES
    else:
        token_bytes = head_size * _dtype_bytes(dtype)
    groups = (KVGroup(layers, token_bytes, None),)
    return ModelShape(_name(reader, name), "mla", layers, 1, head_size, dtype, tp, groups, replicas=tp)


def _head_size(reader: _Reader, heads: int) -> int:
    if reader.get("head_dim") is not None or reader.model_type in _HEAD_DIM_OWN:
        return reader.number("head_dim")
    hidden = reader.number("hidden_size")
    if hidden % heads:
        raise reader.error(f"hidden_size {hidden} is no multiple of {heads} heads, and there is no head_dim")
    return hidden // heads


def _windows(reader: _Reader, layers: int) -> list[int | None]:
    """Return for each layer how far it looks back; None: all the way."""
    types = reader.get("layer_types")
    if types is None and reader.model_type in _PATTERNS:
        pattern = reader.get("sliding_window_pattern") or _PATTERNS[reader.model_type]
        if type(pattern) is not int or pattern < 1:
            raise reader.error(f"sliding_window_pattern {_said(pattern)}; a positive whole number is needed")
        types = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]
    if types is None:
        if reader.model_type == "mistral" and "sliding_window" not in reader.config:
            raise reader.error("sliding_window is missing, and says for mistral whether there is one; null: none")
        windowed = reader.get("sliding_window") is not None and reader.get("use_sliding_window") is not False
        if windowed and reader.get("use_sliding_window") is True:
            raise reader.error("use_sliding_window without layer_types: which layers have a window is not known here")
        return [reader.number("sliding_window") if windowed else None] * layers
    if not isinstance(types, list) or len(types) != layers:
        raise reader.error(f"layer_types does not name each of the {layers} layers")
    unknown = [each for each in types if each not in ("full_attention", "sliding_attention")]
    if unknown:
        raise reader.error(
            f"layer_types has {_said(unknown[0])}; what such a layer keeps is not known here, only full_attention and "
            "sliding_attention are"
        )
    return [reader.number("sliding_window") if each == "sliding_attention" else None for each in types]


def _grouped(kinds: Sequence[_Kind]) -> list[tuple[int, _Kind]]:
    """Return (layers, kind) of each group, dealt out as vLLM does: all of about one size. ``kinds``: of each layer."""
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    least, most = min(counts.values()), max(counts.values())
    size = most if most < least * _UNEVEN else least
    groups = []
    for kind, count in counts.items():
        parts = math.ceil(count / size)
        groups += [(len(range(part, count, parts)), kind) for part in range(parts)]
    return groups


def _dtype_bytes(dtype: str) -> int:
    if dtype not in DTYPE_BYTES:
        known = ", ".join(["auto", *DTYPE_BYTES, f"{FP8_DS_MLA} (MLA only)"])
        raise ConfigError(f"KV cache dtype {dtype!r} is not understood; understood are {known}")
    return DTYPE_BYTES[dtype]


def _name(reader: _Reader, name: str) -> str:
    return _said(name).strip("'") if name else str(reader.model_type)


def _said(value: object) -> str:
    """Make what a file says safe for a terminal."""
    text = repr(value)
    return "".join(char if char.isprintable() else "?" for char in text[:80])
