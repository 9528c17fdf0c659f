"""A worker extension that damages KV caches in place, so that tests can prove that a wrong KV block would be noticed.

Threading: runs in the worker's thread, between steps, through ``LLM.collective_rpc``.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.kv_offload.base import CanonicalKVCaches

from nixl_offload.vllm.kv_caches import RankCaches, understood_pages


class PoisonExtension:
    """Mixed into vLLM's worker class; ``self`` is the worker."""

    model_runner: Any

    def clear_kv(self) -> None:
        """Fill the KV cache with zeros. Only after ``reset_prefix_cache``."""
        for cache in self._caches():
            cache.zero_()

    def written_blocks(self) -> list[int]:
        """Blocks written since ``clear_kv``. Block 0 is vLLM's null block and left out."""
        [first, *_] = self._caches()
        return [index for index in range(1, len(first)) if bool(first[index].any())]

    def poison_blocks(self, blocks: list[int]) -> None:
        """Turn the sign of every key and value in ``blocks``. Twice restores them exactly."""
        for cache in self._caches():
            cache[blocks] = -cache[blocks]

    def kv_groups(self) -> list[tuple[str, int]]:
        """Kind of attention and number of layers of each KV-cache group."""
        groups = self.model_runner.kv_cache_config.kv_cache_groups
        return [(type(group.kv_cache_spec).__name__, len(group.layer_names)) for group in groups]

    def why_not_by_heads(self) -> str | None:
        """Say why this worker's pages cannot be divided by KV heads."""
        connector: Any = get_kv_transfer_group()
        config = connector.connector_worker.kv_cache_config
        layers = connector.connector_worker.vllm_config.compilation_config.static_forward_context
        caches = {name: layers[name].kv_cache for group in config.kv_cache_groups for name in group.layer_names}
        return understood_pages(
            RankCaches(connector.connector_worker.vllm_config, config, caches, CanonicalKVCaches([], []))
        )

    def scale_weights(self, layer: int, factor: float) -> None:
        """Replace a norm's weights in place, as a trainer's update does; powers of two are exact. Not a matrix: vLLM on
        the CPU computes with copies of these.
        """
        norm = self.model_runner.get_model().get_parameter(f"model.layers.{layer}.input_layernorm.weight")
        norm.data *= factor

    def unregister_kv(self) -> None:
        """Do what vLLM's worker does before the KV cache's memory goes away."""
        get_kv_transfer_group().unregister_kv_caches()

    def restore_kv(self) -> None:
        """Do what it does when the memory is back."""
        get_kv_transfer_group().restore_kv_caches()

    def _caches(self) -> list[Any]:
        """The tensors, each memory once: layers of different groups share theirs."""
        return list({cache.data_ptr(): cache for cache in self.model_runner.kv_caches}.values())
