"""Builds a rank's engine: a link and a mover for each tier, as the config asks and this machine allows.

Threading: ``plan_tiers`` and ``open_host`` on the worker's main thread at start, ``open_tier_engine`` on a thread of
each tier's own, once the scheduler's half has sent where the tier is. ``plan_tiers`` first touches each directory on a
daemon thread, which storage that hangs may keep for ever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.v1.kv_offload.config import OffloadingParallelConfig

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.chunk.layout import KVLayout
from nixl_offload.chunk.shards import Shard
from nixl_offload.config import Config, TierConfig
from nixl_offload.engine import Engine, TierEngine
from nixl_offload.engine.autotune import TransferPlan
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.jobs import JobTable
from nixl_offload.engine.memory_tier import MemoryEngine
from nixl_offload.engine.opened_mover import (
    OpenedMover,
    open_planned,
    plan_tier,
    share_staging,
    spared_bytes,
    staging_of,
)
from nixl_offload.engine.packer import pages_of
from nixl_offload.engine.queued import DeviceGroups
from nixl_offload.engine.streams import Device, device_of
from nixl_offload.hardware.cores import unbound
from nixl_offload.movers.base import MemoryKind
from nixl_offload.movers.select_object import open_object_mover
from nixl_offload.tiers.kinds import AnyPlace, open_link
from nixl_offload.tiers.memory.tier import rank_memory_bytes
from nixl_offload.tiers.os_errors import tier_error
from nixl_offload.tiers.slab.file import make_private_directory, require_lock
from nixl_offload.tiers.slab.tier import SlabPlace
from nixl_offload.types import PAGE_BYTES
from nixl_offload.vllm.background import join_all

logger = logging.getLogger(__name__)

TOUCH_LIMIT_S = 5.0
"""A start waits so long for all directories together: what is not written to by then may hang, and is not measured."""
RELAY_SLOTS = 16
RELAY_SHARE = 4
"""Chunks that travel between farther tiers rest in so many slots, at most a quarter of what staging takes."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory that a rank moves chunks to and from."""

    tensors: Sequence[torch.Tensor]
    layout: KVLayout
    host: HostSlab | None
    claimed_share: float
    """Of the device's memory: what vLLM keeps for itself (``gpu_memory_utilization``)."""
    shards: Sequence[int] = ()
    """By group of ``layout``: the number of its shard, where chunks are cut into shards; none: it is the rank's."""
    keys: ChunkKeys | None = None
    """Of tiers that others write to; None: chunks are not authenticated."""


@unbound()
def plan_tiers(config: Config, tensors: Sequence[torch.Tensor], layout: KVLayout) -> list[TransferPlan | None]:
    """Compare transfer paths between device memory and files, and have kernels compiled: at start, for it may take
    seconds. Returns a plan for each tier; None: nothing was compared, and the tier takes the first mover that works.
    Trouble is told when the tier is opened.
    """
    device = device_of(tensors[0])
    plans: list[TransferPlan | None] = [None] * len(config.tiers)
    if not device.is_accelerator:
        return plans
    try:
        # Compiles the Triton kernels, which takes seconds, before there is a job to wait for them.
        slow = DeviceGroups(tensors, pages_of(layout), device).sums_slowly
    except Exception:
        logger.exception("Kernels cannot be used on %s", device.torch_device)
        return plans
    touched = _touch([tier.path for tier in config.tiers if tier.kind in ("slab", "shared_dir")])
    for position, tier in enumerate(config.tiers):
        if tier.kind in ("slab", "shared_dir") and tier.path in touched:
            try:
                why = "the device has no quick kernels for checksums" if slow else ""
                if config.authenticate is not None and tier.is_shared:
                    why = "MACs are made in host memory (authenticate)"
                plans[position] = plan_tier(tier, device, layout, host_because=why)
            except Exception as error:  # noqa: BLE001 - the tier is opened without a plan, or says what is wrong
                logger.debug("Nothing was compared in %s: %s", tier.path, error)
    return plans


def _touch(directories: Sequence[str]) -> set[str]:
    """Make directories and write a page in each. Returns those where that was done within ``TOUCH_LIMIT_S``."""
    done: set[str] = set()

    def touch(directory: str) -> None:
        try:
            make_private_directory(Path(directory))
            with tempfile.TemporaryFile(buffering=0, prefix=".mover-probe-", dir=directory) as file:
                file.write(bytes(PAGE_BYTES))
                os.fsync(file.fileno())
            done.add(directory)
        except OSError as error:
            logger.debug("Nothing is compared in %s: %s", directory, error)

    threads = {
        directory: threading.Thread(target=touch, args=(directory,), name="nixl-offload-touch", daemon=True)
        for directory in directories
    }
    with contextlib.suppress(RuntimeError):  # the machine has no thread to spare, and nothing more is compared
        for thread in threads.values():
            thread.start()
    hung = join_all([thread for thread in threads.values() if thread.ident is not None], TOUCH_LIMIT_S)
    for directory in (directory for directory, thread in threads.items() if thread in hung):
        logger.warning(
            "%s: nothing was written within %.0f s, so transfer paths are not compared there until the next start",
            directory,
            TOUCH_LIMIT_S,
        )
    return done.copy()


def open_host(
    config: Config,
    parallel: OffloadingParallelConfig,
    layout: KVLayout,
    tensors: Sequence[torch.Tensor],
    engines: int = 1,
    keys: ChunkKeys | None = None,
) -> HostSlab | None:
    """Take this rank's share of the memory tier, and room for what travels between farther tiers; None: not needed.

    ``engines``: data-parallel engines that divide the memory tier. ``keys``: as for ``HostSlab``. Raises TierError when
    the machine does not have so much.
    """
    device = device_of(tensors[0])
    farther, memory_bytes = len(config.stored), 0
    if config.memory is not None:
        memory_bytes = rank_memory_bytes(config.memory.capacity_bytes, parallel.world_size, engines)
        _compare_with_kv_cache(memory_bytes, tensors, parallel.rank)
    if not memory_bytes and farther < 2:
        return None
    largest = max(layout.slot_bytes(group) for group in range(len(layout.groups)))
    relay_slots = 0 if farther < 2 else max(2, min(RELAY_SLOTS, config.staging_bytes // RELAY_SHARE // largest))
    return HostSlab(
        memory_bytes=memory_bytes,
        relay_slots=relay_slots,
        slot_bytes=largest,
        pinned=device.page_locks,
        device=device.number,
        sharers=parallel.world_size * engines,
        keys=keys,
    )


def _compare_with_kv_cache(memory_bytes: int, tensors: Sequence[torch.Tensor], rank: int) -> None:
    """Warn, once for all ranks, of a memory tier that can hold little but copies of what the KV cache has."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (each.untyped_storage() for each in tensors)}
    kv_cache_bytes = sum(storages.values())
    if rank == 0 and memory_bytes < kv_cache_bytes:
        logger.warning(
            "The memory tier (%.1f GiB on each rank) is smaller than the KV cache (%.1f GiB): chunks leave it before "
            "they leave the KV cache, so few hits come from it. A capacity of twice the KV cache or more does better",
            memory_bytes / 2**30,
            kv_cache_bytes / 2**30,
        )


@unbound()
def open_tier_engine(
    config: Config,
    position: int,
    place: AnyPlace,
    memory: RankMemory,
    rank: int,
    plan: TransferPlan | None,
    table: JobTable,
) -> TierEngine:
    """Open this rank's link to a tier, its mover, and the engine that owns both, for jobs in ``table``. ``memory`` must
    outlive it.

    Raises whatever keeps it from being opened. May take as long as storage hangs.
    """
    tier = config.tiers[position]
    device = device_of(memory.tensors[0])
    shards = [Shard(number, place.rank_namespaces[number]) for number in memory.shards]
    rank_namespace = b"" if shards else place.rank_namespaces[rank]
    if device.torch_device.type == "cuda":
        torch.cuda.set_device(device.torch_device)  # a new thread's is the first GPU
    # As vLLM's own calls do: what is made here is written to in inference mode, and the KV caches were made in it.
    with torch.inference_mode(), contextlib.ExitStack() as undo:
        if not tier.outlives_process:
            assert memory.host is not None
            return MemoryEngine(
                table=table,
                tensors=memory.tensors,
                layout=memory.layout,
                host=memory.host,
                rank_namespace=rank_namespace,
                shards=shards,
                tier=position,
                verify=config.verify,
            )
        keys = memory.keys if tier.is_shared else None
        opened = _open_mover(tier, place, device, plan, authenticated=keys is not None)
        undo.callback(opened.close)
        assert opened.mover is not None
        link = open_link(tier, place, rank, opened.mover)
        undo.callback(link.close)
        spared = spared_bytes(device, memory.claimed_share, len(config.tiers))
        side = "host" if keys is not None else staging_of(opened, link.mover, device)
        side, staging_bytes = share_staging(side, config.staging_bytes, spared, len(config.stored), memory.layout)
        engine = Engine(
            table=table,
            tensors=memory.tensors,
            layout=memory.layout,
            link=link,
            tier=position,
            rank_namespace=rank_namespace,
            shards=shards,
            staging_bytes=staging_bytes,
            verify=config.verify,
            host=memory.host,
            device=device,
            staging=side,
            keys=keys,
        )
        undo.pop_all()
    return engine


def _open_mover(
    tier: TierConfig, place: AnyPlace, device: Device, plan: TransferPlan | None, *, authenticated: bool
) -> OpenedMover:
    if tier.kind in ("slab", "shared_dir"):
        directory = place.directory if isinstance(place, SlabPlace) else tier.path
        if isinstance(place, SlabPlace) and place.is_locked_here():
            require_lock(Path(directory), place.owner)
        try:
            make_private_directory(Path(directory))
        except OSError as error:
            raise tier_error(error, f"cannot use {directory}") from error
        return open_planned(tier, directory, device, plan)
    assert tier.kind == "s3", "memory has no mover"
    kind = MemoryKind.DRAM if authenticated else device.kind
    return OpenedMover(open_object_mover(tier, kind).mover)
