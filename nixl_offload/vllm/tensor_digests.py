"""Digests of what a rank holds in memory: an adapter, or the weights of its models. Nothing is sampled: any byte that
changes makes another digest.

Threading: pure functions. ``weights_digest`` queues work on the current stream of each device and waits for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nixl_offload.errors import NamespaceError

PIECE_WORDS: Final = 2 << 20
"""What is summed at a time, in words of four bytes: 8 MiB, with 32 MiB of scratch, for a device has little left."""
_WEIGHTS_DOMAIN: Final = b"nixl-offload loaded weights 1\0"
_ADAPTER_DOMAIN: Final = b"nixl-offload loaded adapter 1\0"


def adapter_digest(adapter: object) -> str:
    """Return a hex digest of plain values and tensors in an adapter, however deep, without the ``id`` that vLLM gives
    it. Tensors rest in host memory.

    Raises NamespaceError for a value of a kind that is not known.
    """
    facts = {name: value for name, value in vars(adapter).items() if name != "id"}
    try:
        text = json.dumps([type(adapter).__qualname__, facts], default=_fact, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise NamespaceError(f"an adapter cannot be compared: {error}") from error
    return hashlib.sha256(_ADAPTER_DOMAIN + text.encode("ascii")).hexdigest()


def weights_digest(models: Iterable[torch.nn.Module]) -> str:
    """Return a hex digest of the parameters and persistent buffers of ``models``, where they are.

    In host memory each is summed with XXH3-128. On a device two sums of every 8 MiB are kept, one of the words, and one
    of the words times fixed numbers that look random, modulo 2**64: an update of weights changes both, at the speed of
    memory. Somebody who makes two models with one digest on purpose is not stopped; ``identity.weights`` says why that
    is enough.
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
    """Yield sums of a tensor, piece by piece, each a number where the tensor is. ``factors``: from ``make_factors``, as
    many as a piece has words.
    """
    for part in torch.split(_content(tensor), len(factors) * 4):
        piece = part.clone() if part.data_ptr() % 4 or part.storage_offset() % 4 else part
        whole = piece.numel() // 4
        # Words of half the size of a product: else two signs that change at the top of words would cancel out.
        words = piece[: whole * 4].view(torch.int32)
        yield words.sum(dtype=torch.int64)
        yield (words * factors[:whole]).sum()
        yield from piece[whole * 4 :].to(torch.int64).unbind()


def make_factors(count: int) -> torch.Tensor:
    """Return odd numbers without a pattern, the same at each call: SplitMix64 of the position."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64))


def _fact(value: object) -> object:
    """Return for ``json`` what stands for a value that it does not know."""
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
    """Some keep their bytes in other tensors: vLLM's shared weights, and those of quantization libraries."""
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
    """Return the bytes of a tensor, in the order of its memory where it has no holes: without a copy then."""
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
