"""``NixlOffloadConnector``: vLLM's offloading connector with a failure channel and our two halves, which
``NixlOffloadSpec`` makes. Methods not defined here are vLLM's. ``OffConnector`` takes its place if nothing may be
stored or loaded.

Threading: one instance per role; vLLM calls each from one thread.
Failure: storage never raises into vLLM. Failed loads are reported and recomputed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, cast

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, PromMetric, PromMetricT
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import resolve_mamba_align_size
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from nixl_offload.chunk.authentication import read_key_file
from nixl_offload.config import Config, from_extra_config, merge_extra_config
from nixl_offload.errors import NotSupportedError
from nixl_offload.units import format_duration
from nixl_offload.vllm.connector_scheduler import NixlOffloadScheduler
from nixl_offload.vllm.identity import reason_to_stay_off
from nixl_offload.vllm.kv_caches import RankCaches, chunk_blocks, offloaded_groups, without_padding
from nixl_offload.vllm.manager import NixlOffloadManager
from nixl_offload.vllm.messages import RankGeometry, StepMetadata
from nixl_offload.vllm.metrics import DEFINITIONS
from nixl_offload.vllm.plugin import SPEC_NAME, check_version, register
from nixl_offload.vllm.rank_identity import allocation_digest
from nixl_offload.vllm.rank_shards import RankShards, cut_chunks, has_replicas, leave_uncut
from nixl_offload.vllm.serving_tiers import sharing_engines
from nixl_offload.vllm.vllm_internals import (
    evict_blocks,
    load_failure_policy,
    outermost_connector,
    set_canonical_layout,
    turn_off_loads_within_the_step,
)
from nixl_offload.vllm.worker import NixlConnectorWorker, NixlOffloadingWorker

logger = logging.getLogger(__name__)


def sentence_about_stopping(vllm_config: VllmConfig, config: Config) -> str | None:
    """Return a warning for the operator if vLLM will kill the ranks before ``drain_timeout`` is over, else None.

    By default it will. That does no harm if memory is the only tier.
    """
    patience_s, drain_s = vllm_config.shutdown_timeout, config.drain_timeout_s
    if patience_s > drain_s or not config.stored:
        return None
    when = f"{patience_s} s after" if patience_s else "as soon as"
    return (
        f"vLLM will kill this engine {when} it is told to stop, so what is still on its way to storage then has to be "
        "computed again: run vllm serve with --shutdown-timeout, some seconds above drain_timeout "
        f"({format_duration(drain_s)})"
    )


class NixlOffloadSpec(OffloadingSpec):
    """Ties our config to vLLM's normalised one."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Return the metrics of our scheduler's half. vLLM calls this in a process without an engine."""
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

        Raises NotSupportedError when built without our connector, and ConfigError for a key file that is not valid.
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
        self.kv_caches: Mapping[str, torch.Tensor] = {}
        """This rank's caches by layer, as vLLM made them. Set before ``get_worker`` is called."""

    def get_manager(self) -> OffloadingManager:
        """Return the scheduler's half; its tiers open when the ranks have sent their geometry."""
        return NixlOffloadManager(self.config, self.config_file, self.vllm_config)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return this rank's half over ``kv_caches``."""
        caches = RankCaches(self.vllm_config, self.kv_cache_config, self.kv_caches, kv_caches)
        return NixlOffloadingWorker(
            self.config,
            self.config_file,
            [item.tensor for item in kv_caches.tensors],
            self._cut(caches) or self._leave_uncut(caches),
            self.vllm_config.cache_config.gpu_memory_utilization,
            engines=len(sharing_engines(self.vllm_config.parallel_config)),
            keys=self._keys,
        )

    def _cut(self, caches: RankCaches) -> RankShards | None:
        """Cut chunks into shards as the config asks; None if they cannot be cut. Logs why, but not for the default
        config on ranks without replicas.
        """
        wanted, blocks = self.config_file.shards, self.config.cache.blocks_per_chunk
        if wanted is None:
            return None
        rank, is_missed = self.config.parallel.rank, True
        try:
            found = cut_chunks(caches, wanted, blocks)
            if rank == 0:
                numbers = ", ".join(str(group.head_ranges * len(group.ranges)) for group in found.plan.groups)
                logger.info("Chunks are cut by KV heads and layers; shards of a chunk, by KV group: %s", numbers)
            return found
        except NotSupportedError as error:
            why = str(error)
            is_missed = wanted.heads != "distinct" or wanted.layers is not None or has_replicas(self.vllm_config)
        except Exception:  # an unknown kind of cache is stored rank by rank
            why = f"the KV heads in the caches of rank {rank} are not found"
            logger.exception("The KV heads in the caches of this rank are not found")
        if rank == 0 and is_missed:
            logger.warning(
                "Chunks are stored as each rank has them, and only engines of the same size share them: %s", why
            )
        return None

    def _leave_uncut(self, caches: RankCaches) -> RankShards:
        """Have each rank store its own part. If its caches are not understood, the scheduler's half stays off."""
        digest = ""
        try:
            digest = allocation_digest(caches)
        except Exception:
            logger.exception("What lies where in the KV caches of this rank is not understood")
        own = without_padding(caches.canonical, offloaded_groups(caches.config))
        return leave_uncut(own, self.config.cache.blocks_per_chunk, digest, self.config.parallel.world_size)


class OffConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores and loads nothing."""

    requires_kv_delivery = False

    def _do_nothing(self, *args: Any, **kwargs: Any) -> None: ...

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _do_nothing
    update_state_after_alloc = set_xfer_handshake_metadata_pp_aware = _do_nothing

    def get_num_new_matched_tokens(self, *args: Any) -> tuple[int, bool]:
        """Find nothing."""
        return 0, False

    def build_connector_meta(self, *args: Any) -> KVConnectorMetadata:
        """Return an empty message."""
        return KVConnectorMetadata()

    def request_finished_all_groups(self, *args: Any) -> tuple[bool, None]:
        """Let vLLM free the blocks at once."""
        return False, None


class NixlOffloadConnector(OffloadingConnector):
    """Registered as ``NixlOffloadConnector``; configured by ``kv_connector_extra_config: {"config": FILE}``."""

    spec: NixlOffloadSpec

    def __new__(cls, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> Any:
        """Read the config and apply it to vLLM's. Return an ``OffConnector`` where nothing may be stored or loaded.

        Raises ConfigError or NotSupportedError in words meant for the operator: at start, and only there.
        """
        check_version()
        register()
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        config = from_extra_config(transfer.kv_connector_extra_config)
        off = reason_to_stay_off(vllm_config, config)
        try:
            if off is None:
                return cls._apply_config(config, vllm_config, role, kv_cache_config)
        except (AssertionError, ValueError) as error:  # vLLM's own offloading does not know the model
            sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
            off = f"vLLM cannot offload this model's KV cache groups, with blocks of {sizes} tokens: {error!r}"
        if role == KVConnectorRole.SCHEDULER:
            logger.warning("Nothing is stored or loaded: %s", off)
        return OffConnector(vllm_config, role, kv_cache_config)

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Build this role's half.

        Raises ConfigError or TierError in words meant for the operator: at start, and only there.
        """
        # Skips OffloadingConnector.__init__, which would build vLLM's own halves.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        spec, config, transfer = self.spec, self.spec.config_file, vllm_config.kv_transfer_config
        assert transfer is not None
        set_canonical_layout(self, spec.config)
        self.connector_scheduler: NixlOffloadScheduler | None = None
        self.connector_worker: NixlConnectorWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            if (sentence := sentence_about_stopping(vllm_config, config)) is not None:
                logger.warning("%s", sentence)
            self.connector_scheduler = NixlOffloadScheduler(spec, vllm_config, kv_cache_config)
            self.connector_scheduler.set_role(loads=transfer.is_kv_consumer, stores=transfer.is_kv_producer)
        else:
            self.connector_worker = NixlConnectorWorker(spec, vllm_config, kv_cache_config)

    @classmethod
    def _apply_config(
        cls, config: Config, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> NixlOffloadConnector:
        """Apply ``config`` to vLLM's own settings, and return a connector with its spec."""
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        extra = transfer.kv_connector_extra_config
        if extra.get("spec_name") != SPEC_NAME:  # in one process both roles share this mapping
            extra.update(merge_extra_config(extra, config))
        extra["spec_name"] = SPEC_NAME
        extra["blocks_per_chunk"], line = chunk_blocks(config.chunk_tokens, vllm_config, kv_cache_config)
        warning = turn_off_loads_within_the_step(extra)
        connector: NixlOffloadConnector = super().__new__(cls)
        connector.spec = NixlOffloadSpec(
            build_offloading_config(vllm_config, kv_cache_config),
            config_file=config,
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
        )
        resolve_mamba_align_size(connector.spec, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            if line:
                logger.info("%s", line)
            if warning:
                logger.warning("%s", warning)
            # Read by vLLM's scheduler right after it has built the connector.
            transfer.kv_load_failure_policy = "recompute"
        return connector

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Ask for blocks in one piece on a GPU, unless the config forbids it; else return vLLM's own wish.

        vLLM ignores the wish if an attention backend does not support it. Models with recurrent state are excluded:
        their blocks would be padded to the size of that state.
        """
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and current_platform.is_cuda_alike() and not vllm_config.model_config.is_hybrid:
            extra = transfer.kv_connector_extra_config
            # Beside a connector that wants another layout, the extra config forbids it (``show --with``).
            if extra.get("block_outermost", True) and from_extra_config(extra).block_outermost:
                return "BLHNC"
        return super().get_required_kvcache_layout(vllm_config)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """As vLLM's. Warns if vLLM would fail the requests whose load fails."""
        super().register_kv_caches(kv_caches)
        outermost = outermost_connector()
        if outermost is not self and load_failure_policy(outermost) == "fail":
            logger.warning(
                "A load that fails ends its request with an error, for %s has kv_load_failure_policy fail. Set it to "
                "recompute there: vLLM does not look for it inside",
                type(outermost).__name__,
            )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return this rank's geometry for the scheduler's half, before vLLM says that it is ready.

        Inside another connector return None: ``MultiConnector`` passes one handshake to all of its connectors, and
        ``NixlConnector`` accepts only its own. The rank's first report has the geometry then.
        """
        if self.connector_worker is None or outermost_connector() not in (None, self):
            return None
        return self.connector_worker.geometry()

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Open the tiers, if every rank has sent its geometry. Called before the first step and by wake_up."""
        if self.connector_scheduler is not None:
            ranks = {item.rank: item for item in metadata.values() if isinstance(item, RankGeometry)}
            self.connector_scheduler.take_geometries(ranks, is_start=True)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """As vLLM's. From now on resets of its prefix cache are noticed."""
        super().bind_kv_cache_manager(kv_cache_manager)
        pool, scheduler = kv_cache_manager.block_pool, self.connector_scheduler
        if scheduler is None:
            return
        scheduler.watch_prefix_cache(lambda: pool.cached_block_hash_to_block)
        is_lazy = self.spec.config_file.stores_lazily and not self.spec.config.enable_kv_cache_events
        if is_lazy and scheduler.ever_stores:
            scheduler.store_lazily(pool, self.spec.vllm_config.scheduler_config.max_num_batched_tokens)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """As vLLM's. Also evicts from vLLM's prefix cache the blocks that a load did not fill, and those after them.

        vLLM leaves them there until it recomputes them, so another request could take them for a hit.
        """
        scheduler = self.connector_scheduler
        assert scheduler is not None
        scheduler.update_connector_output(connector_output)
        if connector_output.invalid_block_ids:
            evict_blocks(self, scheduler.spoiled_blocks(connector_output.invalid_block_ids))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's. A request that has ended is stored only from the blocks that it had at its end."""
        assert self.connector_scheduler is not None
        self.connector_scheduler.check_blocks(request.request_id, block_ids)
        return super().request_finished_all_groups(request, block_ids)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin the step's loads and moves. This is vLLM's last call before the forward pass, after which it loads.

        Safe, in both model runners and on each pipeline stage: earlier steps were launched on the same stream, this
        step zeroes and copies blocks before the call and computes on none of a load's, and all connectors beside ours
        have had ``handle_preemptions``, where stores of reused blocks are finished (decision 0014).
        """
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, OffloadingConnectorMetadata)
        assert self.connector_worker is not None
        if connector_metadata.load_jobs:
            self.connector_worker.start_kv_transfers(connector_metadata)
        if isinstance(connector_metadata, StepMetadata):
            self.connector_worker.start_moves(connector_metadata)

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        """Do nothing: all has begun before the forward pass."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose load has ended, and those of them that must be computed from their first token."""
        assert self.connector_worker is not None
        return self.connector_worker.take_results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that no load filled, if vLLM can keep the prefix before them (``keeps_prefix``)."""
        worker = self.connector_worker
        return worker.take_failed_blocks() if worker is not None and worker.failed_blocks else set()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Return True: registrations follow the KV cache when its memory goes away and comes back."""
        return True

    def unregister_kv_caches(self) -> None:
        """Release KV memory before vLLM takes it away. Idempotent.

        Raises TierError if a transfer that does not end may still write there.
        """
        if self.connector_worker is not None:
            self.connector_worker.sleep()

    def restore_kv_caches(self) -> None:
        """Use KV memory again. It is back at the same addresses. Idempotent."""
        if self.connector_worker is not None:
            self.connector_worker.wake_up()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Name our spec before vLLM asks it for metric definitions: this process never builds the connector."""
        register()
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        transfer.kv_connector_extra_config.setdefault("spec_name", SPEC_NAME)
        types = {kind: partial(_made, made) for kind, made in metric_types.items()}
        make = partial(cast(Any, super()).build_prom_metrics, vllm_config, types, labelnames, per_engine_labelvalues)
        return _LateMetrics(make)


class _LateMetrics(KVConnectorPromMetrics):
    """vLLM's metrics of our connector, made when the first values arrive.

    By then a vLLM connector beside ours has registered its metrics. Those of the same name count that connector alone.
    """

    def __init__(self, make: Callable[[], KVConnectorPromMetrics]) -> None:
        self._make = cache(make)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._make().observe(transfer_stats_data, engine_idx)


def _made(metric: Any, **arguments: Any) -> Any:
    """Make a metric. If its name is taken, make one that is not exported."""
    try:
        return metric(**arguments)
    except ValueError:
        return metric(**arguments, registry=None)
