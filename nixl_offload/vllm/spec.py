"""The offloading spec: what vLLM's connector asks for a manager (scheduler) and a worker (each rank).

Threading: built once per role, read-only afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from nixl_offload.chunk.authentication import read_key_file
from nixl_offload.config import Config
from nixl_offload.errors import NotSupportedError
from nixl_offload.vllm.kv_caches import offloaded_groups, without_padding
from nixl_offload.vllm.manager import NixlOffloadManager
from nixl_offload.vllm.metrics import DEFINITIONS
from nixl_offload.vllm.rank_shards import RankShards, cut_chunks, has_replicas
from nixl_offload.vllm.serving_tiers import sharing_engines
from nixl_offload.vllm.worker import NixlOffloadingWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


class NixlOffloadSpec(OffloadingSpec):
    """Ties our config to vLLM's normalised one."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Return the metrics that our scheduler's half tells; asked of the class, where no engine runs."""
        return dict(DEFINITIONS)

    def __init__(
        self,
        config: OffloadingConfig,
        *,
        config_file: Config | None = None,
        vllm_config: VllmConfig | None = None,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        """Take vLLM's normalised config and ours, and read the keys that ours names.

        Raises NotSupportedError when built without our connector, and ConfigError for a file of keys that is not right.
        """
        super().__init__(config)
        if config_file is None or vllm_config is None or kv_cache_config is None:
            raise NotSupportedError(
                'NixlOffloadSpec works only inside NixlOffloadConnector: set "kv_connector": "NixlOffloadConnector" '
                "(the stock OffloadingConnector stops the engine at the first failed transfer)"
            )
        self.config_file = config_file
        self.vllm_config = vllm_config
        self.kv_cache_config = kv_cache_config
        authenticate = config_file.authenticate
        self._keys = None if authenticate is None else read_key_file(authenticate.key_file)
        self._kv_caches: Mapping[str, torch.Tensor] = {}
        """This rank's, by layer, as vLLM has made them."""

    def get_manager(self) -> OffloadingManager:
        """Return the scheduler's half; its tiers open when the ranks have sent their geometry."""
        return NixlOffloadManager(self.config, self.config_file, self.vllm_config)

    def take_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take what vLLM has allocated on this rank, before the worker is asked for."""
        self._kv_caches = kv_caches

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return this rank's half over ``kv_caches``."""
        shards = self._cut(kv_caches)
        self._kv_caches = {}  # they go away while the engine sleeps
        return NixlOffloadingWorker(
            self.config,
            self.config_file,
            without_padding(kv_caches, offloaded_groups(self.kv_cache_config)),
            self.vllm_config.cache_config.gpu_memory_utilization,
            engines=len(sharing_engines(self.vllm_config.parallel_config)),
            shards=shards,
            keys=self._keys,
        )

    def _cut(self, kv_caches: CanonicalKVCaches) -> RankShards | None:
        """Cut chunks into shards, as the config asks for; None where that cannot be, with a line in the log. By default
        none where ranks have nothing alike.
        """
        wanted, blocks = self.config_file.shards, self.config.cache.blocks_per_chunk
        if wanted is None:
            return None
        rank, is_missed = self.config.parallel.rank, True
        try:
            found = cut_chunks(self.vllm_config, self.kv_cache_config, self._kv_caches, kv_caches, wanted, blocks)
            if not isinstance(found, str):
                if rank == 0:
                    numbers = ", ".join(str(group.head_ranges * len(group.ranges)) for group in found.plan.groups)
                    logger.info("Chunks are cut by KV heads and layers; shards of a chunk, by KV group: %s", numbers)
                return found
            is_missed = wanted.heads != "distinct" or wanted.layers is not None or has_replicas(self.vllm_config)
        except Exception:  # an unknown kind of cache is stored rank by rank
            found = f"the KV heads in the caches of rank {rank} are not found"
            logger.exception("The KV heads in the caches of this rank are not found")
        if rank == 0 and is_missed:
            logger.warning(
                "Chunks are stored as each rank has them, and only engines of the same size share them: %s", found
            )
        return None
