"""``NixlOffloadConnector``: vLLM's offloading connector with a failure channel and our two halves in it.

Threading: one instance per role; vLLM calls each from one thread. The rule that holds throughout: nothing that storage
does or fails to do raises into vLLM. Loads that fail are reported as such and recomputed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Set
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, PromMetric, PromMetricT
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadKey

from nixl_offload.config import Config, blocks_per_chunk, from_extra_config, merge_extra_config
from nixl_offload.errors import NotSupportedError
from nixl_offload.vllm.compat import check_version, settle_extra_config
from nixl_offload.vllm.identity import group_tokens, reason_to_stay_off
from nixl_offload.vllm.idling import Idling
from nixl_offload.vllm.manager import Looked, NixlOffloadManager, Refused
from nixl_offload.vllm.messages import ChainMetadata, RankGeometry, WorkerReport
from nixl_offload.vllm.plugin import SPEC_NAME, register
from nixl_offload.vllm.request_identity import counts_media, has_lasting_keys, sentence_about_media
from nixl_offload.vllm.spec import NixlOffloadSpec
from nixl_offload.vllm.step_clock import StepClock
from nixl_offload.vllm.stopping import sentence_about_stopping
from nixl_offload.vllm.vllm_internals import without_preempted_loads
from nixl_offload.vllm.worker import NixlConnectorWorker

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class NixlOffloadScheduler(OffloadingConnectorScheduler):
    """vLLM's scheduler half; hears of failures before it hears of completions."""

    recompute = True
    """Whether a request whose load failed goes on (``on_load_failure: recompute``)."""

    def __init__(self, spec: NixlOffloadSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._clock = StepClock(self.offload_manager.observe_prefill, time.monotonic)
        self._idling = Idling(time.monotonic)
        self._counts_media = counts_media(vllm_config)
        self._windows = {
            group.group_idx: group.sliding_window_size_in_chunks * group.tokens_per_chunk
            for group in self.config.kv_group_configs
            if group.sliding_window_size_in_chunks is not None
        }
        """By KV cache group that looks back no farther: how many tokens of it a hit loads."""

    @property
    def offload_manager(self) -> NixlOffloadManager:
        """The manager, as what it is."""
        assert isinstance(self.manager, NixlOffloadManager)
        return self.manager

    def on_new_request(self, request: Request) -> None:
        """As vLLM's; a request whose keys name no content is neither stored nor loaded."""
        super().on_new_request(request)
        self._refuse_worthless_keys(request)

    def _refuse_worthless_keys(self, request: Request) -> None:
        if not has_lasting_keys(request, counts_media=self._counts_media):
            self._req_status[request.request_id].req_context.set_state(Refused())

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        """As vLLM's, less what would take longer to load than to compute."""
        self._idling.stir()
        self._refuse_worthless_keys(request)  # a session may have been given an image since
        found, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens, max_num_new_tokens)
        group = self._lookup_groups[0]
        chunk_tokens = self.config.kv_group_configs[group].tokens_per_chunk
        status = self._req_status[request.request_id]
        if found is not None:
            whole_tokens = request.num_tokens // chunk_tokens * chunk_tokens
            asked = max(found, whole_tokens - num_computed_tokens)
            status.req_context.set_state(Looked(num_computed_tokens, asked, found))
        if not found:
            return found, is_async
        first, last = num_computed_tokens // chunk_tokens, -(-(num_computed_tokens + found) // chunk_tokens)
        keys = status.group_states[group].offload_keys[first:last]
        worth = self.offload_manager.worth_loading(
            keys, status.req_context, num_computed_tokens, found, chunk_tokens, self._windows
        )
        if worth >= found:
            return found, is_async
        # Asked again with a limit, for vLLM remembers what it has answered. Where there are windows it takes one token
        # off, as off the end of a prompt, and with recurrent state that would cost a whole chunk.
        limit = worth + 1 if self._windows else worth
        return super().get_num_new_matched_tokens(request, num_computed_tokens, limit)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """As vLLM's; what was found of a request is counted now that it is scheduled, however often it had to ask."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        status = self._req_status.get(request.request_id)
        if status is not None:
            self.offload_manager.count_lookup(status.req_context)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """As vLLM's, with our moves; in a step without work leave the processor to those who are waited for."""
        if not scheduler_output.total_num_scheduled_tokens and self.offload_manager.is_waiting():
            time.sleep(self._idling.pause_s)
        self._clock.scheduled(scheduler_output)
        meta = super().build_connector_meta(without_preempted_loads(self, scheduler_output))
        moves, places = self.offload_manager.take_moves()
        assert isinstance(meta, OffloadingConnectorMetadata)
        if scheduler_output.total_num_scheduled_tokens or moves or meta.load_jobs or meta.store_jobs:
            self._idling.stir()
        if not moves:
            return meta
        return ChainMetadata(meta.load_jobs, meta.store_jobs, meta.jobs_to_flush, moves, places)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Settle tickets first, so that a failed chunk is gone before its request is looked up again."""
        self._clock.done()
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, WorkerReport):
            if meta.tickets or meta.completed_jobs:
                self._idling.stir()
            lost = self.offload_manager.settle(meta.tickets, meta.loads)
            self.offload_manager.take_work(meta.work, meta.standings)
            if lost and self.recompute:
                self._offer_again(meta.completed_jobs, lost)
        super().update_connector_output(connector_output)

    def has_pending_push_work(self) -> bool:
        """As vLLM's, as long as something comes of it: see ``idling``. Requests hold the engine by themselves."""
        return self._idling.is_patient and super().has_pending_push_work()

    def take_events(self) -> Iterable[KVCacheEvent]:
        """As vLLM's; what chunks were made of is forgotten with them.

        vLLM takes it that whatever is stored also rests in host memory until that is told to be gone, which without a
        memory tier it never is.
        """
        yield from super().take_events()
        described = self._events_tracker._pending_event_metadata
        for key in self.offload_manager.take_removed():
            if key in described and not self.offload_manager.is_known(key):
                del described[key]

    def _offer_again(self, job_ids: Iterable[int], lost: Set[OffloadKey]) -> None:
        """Have requests store anew, as they recompute them, the chunks that a load did not bring.

        vLLM passes over the chunks of a load when it stores; it does not know that loads fail.
        """
        for job_id in job_ids:
            job = self._jobs.get(job_id)
            request = self._req_status.get(job.req_id) if job is not None and not job.is_store else None
            if job is None or request is None or not lost & job.keys:
                continue
            for group in request.group_states:
                first = next((number for number, key in enumerate(group.offload_keys) if key in lost), None)
                if first is not None:
                    group.next_stored_chunk_idx = min(group.next_stored_chunk_idx, first)


class NixlOffloadConnector(OffloadingConnector):
    """Registered as ``NixlOffloadConnector``; configured by ``kv_connector_extra_config: {"config": FILE}``."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Read the config, put it in force, and build this role's half.

        Raises ConfigError, NotSupportedError or TierError in words meant for the operator: at start, and only there.
        """
        check_version()
        if vllm_config.model_config.enable_sleep_mode:
            raise NotSupportedError("NixlOffloadConnector cannot follow sleep mode: KV cache memory stays registered")
        register()
        # Past OffloadingConnector.__init__, which would build vLLM's own halves.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        config = self._put_in_force(vllm_config, kv_cache_config, role)
        offloading_config = build_offloading_config(vllm_config, kv_cache_config)
        self._canonical_layout = offloading_config.canonical_layout
        self.connector_scheduler: NixlOffloadScheduler | None = None
        self.connector_worker: NixlConnectorWorker | None = None
        spec = NixlOffloadSpec(offloading_config, config_file=config, vllm_config=vllm_config)
        self._off = reason_to_stay_off(vllm_config, config)
        if role == KVConnectorRole.SCHEDULER:
            if self._off is not None:
                logger.warning("Nothing is stored or loaded: %s", self._off)
            elif (sentence := sentence_about_stopping(vllm_config, config)) is not None:
                logger.warning("%s", sentence)
            if self._off is None and (sentence := sentence_about_media(vllm_config)) is not None:
                logger.info("%s", sentence)
            self.connector_scheduler = NixlOffloadScheduler(spec, vllm_config, kv_cache_config)
            self.connector_scheduler.recompute = config.on_load_failure == "recompute"
        else:
            self.connector_worker = NixlConnectorWorker(spec, vllm_config, kv_cache_config)

    @staticmethod
    def _put_in_force(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, role: KVConnectorRole) -> Config:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        extra = transfer.kv_connector_extra_config
        config = from_extra_config(extra)
        tokens = group_tokens(vllm_config, kv_cache_config)
        if extra.get("spec_name") != SPEC_NAME:  # in one process both roles share this mapping
            extra.update(merge_extra_config(extra, config))
        extra["spec_name"] = SPEC_NAME
        extra["blocks_per_chunk"] = blocks_per_chunk(config.chunk_tokens, max(tokens))
        told = settle_extra_config(extra)
        if role == KVConnectorRole.SCHEDULER:
            if told:
                logger.warning("%s", told)
            # Read by vLLM's scheduler right after it has built the connector.
            transfer.kv_load_failure_policy = config.on_load_failure
        return config

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Ask for blocks in one piece, where a GPU reads them and the config does not forbid it; else as vLLM's own.

        It is a wish: vLLM drops it where an attention backend does not take it. Not for models with recurrent state,
        whose blocks would be padded to the size of that state.
        """
        transfer = vllm_config.kv_transfer_config
        if transfer is None or not current_platform.is_cuda_alike() or vllm_config.model_config.is_hybrid:
            return super().get_required_kvcache_layout(vllm_config)
        if not from_extra_config(transfer.kv_connector_extra_config).block_outermost:
            return super().get_required_kvcache_layout(vllm_config)
        return "BLHNC"

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Tell the scheduler's half what a chunk needs on this rank."""
        return self.connector_worker.geometry() if self.connector_worker is not None else None

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Open the tiers, now that every rank has told its geometry. Called before the first step and by wake_up."""
        if self.connector_scheduler is None or self._off is not None:
            return
        told = {item.rank: item for item in metadata.values() if isinstance(item, RankGeometry)}
        world_size = self._vllm_config.parallel_config.world_size
        if set(told) != set(range(world_size)):
            logger.warning(
                "Offloading is off: %d of %d ranks told their geometry (MultiConnector passes on one handshake only)",
                len(told),
                world_size,
            )
            return
        self.connector_scheduler.offload_manager.open([told[rank] for rank in range(world_size)])

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return completions and, for models with several KV groups, the requests whose load failed."""
        results = super().get_transfer_results(finished_req_ids)
        if self.connector_worker is not None:
            results.failed_recving = self.connector_worker.take_failed_requests() & results.finished_recving
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that no load filled (models with a single KV group): vLLM keeps the prefix before them."""
        return self.connector_worker.take_failed_blocks() if self.connector_worker is not None else set()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Sleep takes the KV cache's memory away, and what is registered with a mover would point to nothing (0.33)."""
        return False

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
        parent = cast(Any, super())
        return cast(
            KVConnectorPromMetrics,
            parent.build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues),
        )
