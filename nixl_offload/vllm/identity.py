"""Who this engine is: the fields of the namespace, read from vLLM's config, and a warning when hashes will not last.

Threading: pure functions; reads a model directory's weight files (headers and samples) once at start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size

from nixl_offload.config import Config
from nixl_offload.errors import NamespaceError
from nixl_offload.namespace import LOCAL_WEIGHTS, GroupFields, Namespace, NamespaceFields, digest_names, make_namespace
from nixl_offload.vllm.compat import check_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

logger = logging.getLogger(__name__)

_SAMPLE_BYTES = 64 * 1024
_SAMPLES_PER_FILE = 16
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def group_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Return tokens per block of each KV cache group that is offloaded."""
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    return tuple(
        resolve_dcp_kv_block_size(kv_cache_config.kv_cache_groups[group].kv_cache_spec, dcp)
        for group in get_offloading_group_ids(kv_cache_config)
    )


def warn_about_hash(vllm_config: VllmConfig) -> None:
    """Say so when block hashes differ from process to process, so that nothing will be found after a restart."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm.startswith("xxhash") and not os.environ.get("PYTHONHASHSEED"):
        logger.warning(
            "prefix caching hashes with %s and PYTHONHASHSEED is not set: block hashes differ in every process, so "
            "nothing stored now will be found after a restart or by another server. "
            "Set PYTHONHASHSEED, or use --prefix-caching-hash-algo sha256",
            algorithm,
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        logger.warning(
            "prefix caching is off (--no-enable-prefix-caching): vLLM may not ask for stored prefixes at all"
        )


def weights_digest(model: str) -> str:
    """Return a digest of a local model's weight files, or "" when ``model`` is neither such a file nor a directory.

    Also "" for a directory without weight files (they are streamed from elsewhere, say): nothing is known of them.

    Reads names, sizes and up to 16 samples of 64 KiB per file: different weights under one name must not share KV, and
    the same weights under two paths may. Raises NamespaceError when one cannot be read.
    """
    root = Path(model)
    if root.is_file():
        paths = [root]
    elif root.is_dir():
        paths = sorted(item for item in root.iterdir() if item.suffix in _WEIGHT_SUFFIXES)
    else:
        paths = []
    if not paths:
        return ""
    try:
        return _sample(paths)
    except OSError as error:
        raise NamespaceError(f"cannot tell which model this is: a weight file is unreadable: {error}") from error


def _sample(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES_PER_FILE):
                file.seek(sample * max(0, size - _SAMPLE_BYTES) // max(1, _SAMPLES_PER_FILE - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def model_digest(vllm_config: VllmConfig, weights: str) -> str:
    """Return a digest of what decides the model's KV besides its name; ``weights`` is from ``weights_digest``."""
    model = vllm_config.model_config
    hf_config: Any = model.hf_config
    settings = hf_config.to_dict() if hasattr(hf_config, "to_dict") else vars(hf_config)
    # Where the model was loaded from does not change its KV.
    settings = {
        name: value for name, value in settings.items() if name not in ("_name_or_path", "transformers_version")
    }
    facts = {
        "settings": settings,
        # Of a model from the hub: the same name and revision ("main") may mean other weights tomorrow.
        "commit": getattr(hf_config, "_commit_hash", None),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        # Dummy weights lie in no file; streamed ones are named elsewhere.
        "load_format": str(vllm_config.load_config.load_format),
        "weights_at": model.model_weights,
        "weights": weights,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=_plain).encode()).hexdigest()


def _plain(value: object) -> object:
    # A set's order differs from process to process.
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)


def _platform() -> str:
    """Name what decides how an attention kernel lays values out inside a page."""
    kind = str(current_platform.device_type)
    if kind != "cpu":
        return f"{kind}:{current_platform.get_device_capability()}"
    isa = current_platform.get_cpu_architecture().name
    return f"cpu:{isa}:{'amx' if getattr(torch.cpu, '_is_amx_tile_supported', bool)() else 'plain'}"


def build_namespace(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    offloading: OffloadingConfig,
    config: Config,
    slot_bytes: tuple[int, ...],
    attention_backends: Sequence[str],
) -> Namespace:
    """Return the fingerprint of everything that makes bytes interchangeable between two engines.

    ``slot_bytes``: what a chunk of each group needs, header page included, as the ranks told it.
    ``attention_backends``: those that the ranks use, sorted; what vLLM chooses may change with a package installed.
    """
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = offloading.parallel
    algorithm = str(cache.prefix_caching_hash_algo)
    weights = weights_digest(model.model)
    major, minor = check_version()
    return make_namespace(
        NamespaceFields(
            tenant=config.tenant,
            engine=f"vllm {major}.{minor}",
            platform=_platform(),
            attention_backend="+".join(attention_backends) or None,
            model=LOCAL_WEIGHTS if weights else offloading.model.name,
            revision=model.revision,
            model_digest=model_digest(vllm_config, weights),
            dtype=offloading.model.dtype,
            kv_layout=str(offloading.kv_cache_layout or "default"),
            tokens_per_block=max(group.tokens_per_block for group in offloading.groups),
            blocks_per_chunk=offloading.cache.blocks_per_chunk,
            tokens_per_hash=offloading.cache.tokens_per_hash,
            hash_algorithm=algorithm,
            hash_seed=(os.environ.get("PYTHONHASHSEED") or None) if algorithm.startswith("xxhash") else None,
            groups=tuple(
                GroupFields(
                    group_id=group.group_id,
                    layer_count=len(group.layer_names),
                    layers_digest=digest_names(group.layer_names),
                    tokens_per_block=group.tokens_per_block,
                    slot_bytes=size,
                    spec=repr(kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec),
                )
                for group, size in zip(offloading.groups, slot_bytes, strict=True)
            ),
            tp=parallel.tp_size,
            pp=parallel.pp_size,
            pcp=parallel.pcp_size,
            dcp=parallel.dcp_size,
            world_size=parallel.world_size,
        )
    )
