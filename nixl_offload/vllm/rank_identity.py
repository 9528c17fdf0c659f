"""Digests of a rank's KV caches, weights and adapters in memory, and sources of its weights beside a model's files.

The namespace holds this for all ranks, so engines that differ in it share nothing. Every byte counts; none is sampled.

Threading: pure functions, on the worker's main thread. ``weights_digest`` waits for its work on each device's stream.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.v1.kv_cache_interface import group_kernel_blocks

from nixl_offload.errors import NamespaceError
from nixl_offload.identity.settings import collect
from nixl_offload.vllm.kv_caches import RankCaches, layers_of
from nixl_offload.vllm.vllm_internals import kv_scales

_REMOTE_CODE: Final = "transformers_modules."
"""Modules of a model's own code; transformers puts the commit or a digest of the sources into the name."""
_KNOWN_CODE: Final = ("torch", "transformers", "vllm")
"""Packages whose models read weights only from ``secondary_weights`` and their own files."""
PIECE_WORDS: Final = 2 << 20
"""Words of four bytes that are summed at a time: 8 MiB, with 32 MiB of scratch. A device has little memory left."""
_WEIGHTS_DOMAIN: Final = b"nixl-offload loaded weights 1\0"
_ADAPTER_DOMAIN: Final = b"nixl-offload loaded adapter 1\0"


def sources_of(models: Iterable[torch.nn.Module]) -> tuple[str, ...]:
    """Return sources of weights beside the models' own files, sorted: directories, Hub ids, modules of unknown code."""
    found = set()
    for model in models:
        found |= {str(source.model_or_path) for source in getattr(model, "secondary_weights", ())}
        classes = {type(module) for module in model.modules()}
        found |= {made.__module__ for made in classes if made.__module__.partition(".")[0] not in _KNOWN_CODE}
    return tuple(sorted(found))


def allocation_digest(caches: RankCaches) -> str:
    """Return a hex digest of this rank's offloaded KV caches. The number and place of blocks do not count."""
    layers, pages = caches.vllm.compilation_config.static_forward_context, caches.by_layer
    facts: list[object] = [sorted(name for name in sys.modules if name.startswith(_REMOTE_CODE))]
    for number in get_offloading_group_ids(caches.config):
        group = caches.config.kv_cache_groups[number]
        facts.append([number, str(group.role), group.is_eagle_group])
        for name, spec in layers_of(group):
            page = group_kernel_blocks(pages[name], caches.config.num_blocks) if name in pages else None
            facts.append(
                [
                    name,
                    type(spec).__qualname__,
                    collect(spec, {}).values,
                    None if page is None else _page_facts(page, spec.page_size_bytes),
                    layer_facts(layers.get(name)),
                ]
            )
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _page_facts(blocks: torch.Tensor, page_bytes: int) -> list[object]:
    """``blocks``: shape (blocks, ...), one page each. The stride between blocks does not count."""
    item_bytes = blocks.element_size()
    stride_bytes = blocks.stride(0) * item_bytes
    offset_bytes = blocks.storage_offset() * item_bytes
    return [
        str(blocks.dtype),
        list(blocks.shape[1:]),
        [stride * item_bytes for stride in blocks.stride()[1:]],
        # If layers lie side by side within a block, a layer's place in it counts.
        offset_bytes % stride_bytes if stride_bytes > page_bytes else None,
    ]


def layer_facts(layer: Any) -> list[object]:
    """Return a layer's backend and scales. In a quantized cache bytes mean other values under another scale."""
    if layer is None:
        return []
    backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else None
    return [backend.get_name() if backend is not None else None, *kv_scales(layer)]


def adapter_digest(adapter: object) -> str:
    """Return a hex digest of an adapter's plain values and tensors, at any depth, without vLLM's ``id``.

    The tensors are in host memory. Raises NamespaceError for a value of an unknown type.
    """
    facts = {name: value for name, value in vars(adapter).items() if name != "id"}
    try:
        text = json.dumps([type(adapter).__qualname__, facts], default=_fact, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise NamespaceError(f"an adapter cannot be compared: {error}") from error
    return hashlib.sha256(_ADAPTER_DOMAIN + text.encode("ascii")).hexdigest()


def weights_digest(models: Iterable[torch.nn.Module]) -> str:
    """Return a hex digest of the parameters and persistent buffers of ``models``, made where they are.

    In host memory each is summed with XXH3-128. On a device two sums of every 8 MiB are kept, modulo 2**64: of the
    words, and of the words times fixed pseudo-random numbers. An update of weights changes both. The sums are made at
    the speed of memory. They do not stop forgery on purpose; ``identity.weights`` says why that is enough.
    """
    tensors = [
        (f"{number}.{name}", tensor) for number, model in enumerate(models) for name, tensor in _tensors_of(model)
    ]
    facts = [[name, str(each.dtype), list(each.shape), list(each.stride()), each.device.type] for name, each in tensors]
    whole = hashlib.sha256(_WEIGHTS_DOMAIN + json.dumps(facts).encode("ascii"))
    factors: dict[torch.device, torch.Tensor] = {}
    sums: dict[torch.device, list[torch.Tensor]] = {}
    with torch.no_grad():
        for _, each in tensors:
            if each.device.type == "cpu":
                whole.update(xxhash.xxh3_128_digest(_content(each).numpy().data))
                continue
            if each.device not in factors:
                factors[each.device] = make_factors(PIECE_WORDS).to(each.device)
            sums.setdefault(each.device, []).extend(piece_sums(each, factors[each.device]))
        for of_device in sums.values():  # in the order of the tensors
            whole.update(torch.stack(of_device).cpu().numpy().tobytes() if of_device else b"")
    return whole.hexdigest()


def piece_sums(tensor: torch.Tensor, factors: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield sums of a tensor's pieces, on its device. ``factors``: from ``make_factors``, one per word of a piece."""
    for part in torch.split(_content(tensor), len(factors) * 4):
        piece = part.clone() if part.data_ptr() % 4 or part.storage_offset() % 4 else part
        whole = piece.numel() // 4
        # 32-bit words and 64-bit products: with words of 64 bits, two changes of top bits would cancel out.
        words = piece[: whole * 4].view(torch.int32)
        yield words.sum(dtype=torch.int64)
        yield (words * factors[:whole]).sum()
        yield from piece[whole * 4 :].to(torch.int64).unbind()


def make_factors(count: int) -> torch.Tensor:
    """Return odd pseudo-random numbers, the same at each call: SplitMix64 of the position."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64))


def _fact(value: object) -> object:
    """Return a replacement for a value that ``json`` does not know."""
    if isinstance(value, torch.Tensor):
        content = _content(value.detach().cpu().contiguous()).numpy()
        return ["tensor", str(value.dtype), list(value.shape), xxhash.xxh3_128_hexdigest(content.data)]
    if hasattr(value, "__dict__") and not callable(value):
        return [type(value).__qualname__, vars(value)]
    raise TypeError(f"nobody knows how to compare a {type(value).__qualname__}")


def _tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    persistent = model.state_dict().keys()
    for name, parameter in model.named_parameters():
        yield from _plain(name, parameter)
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield from _plain(name, buffer)


def _plain(name: str, tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that hold a tensor's bytes: vLLM's shared weights and quantized ones keep them in others."""
    partitions = getattr(tensor, "partitions", None)
    if isinstance(partitions, Mapping):
        for part, inner in partitions.items():
            yield from _plain(f"{name}.{part}", inner)
    elif is_traceable_wrapper_subclass(tensor):
        for part in tensor.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{part}", getattr(tensor, part))
    else:
        yield name, tensor.detach()


def _content(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor. If it has no holes, they are in the order of its memory, and not copied."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat = tensor.as_strided((tensor.numel(),), (1,)) if _is_dense(tensor) else tensor.contiguous().view(-1)
    return flat.view(torch.uint8)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
