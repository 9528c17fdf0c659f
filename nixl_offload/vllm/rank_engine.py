"""Builds a rank's engine: a link and a mover for each tier, as the config asks and this machine allows.

Threading: once per rank: ``reach_tiers`` on the worker's main thread at start, ``open_engine`` on a thread of its own,
once the scheduler's half has sent where the tiers are.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.v1.kv_offload.config import OffloadingParallelConfig

from nixl_offload.chunk.layout import KVLayout
from nixl_offload.config import Config, MemoryConfig, S3Config, SharedDirConfig, SlabConfig, TierConfig
from nixl_offload.engine import ChainEngine, Engine, TierEngine
from nixl_offload.engine.autotune.candidates import TransferPlan
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.memory_tier import MemoryEngine
from nixl_offload.engine.opened_mover import OpenedMover, engine_options, open_planned, plan_tier, spared_bytes
from nixl_offload.engine.packer import pages_of
from nixl_offload.engine.queued import DeviceGroups
from nixl_offload.engine.streams import Device, device_of
from nixl_offload.errors import NixlOffloadError
from nixl_offload.hardware.cores import unbound
from nixl_offload.movers.select_object import open_object_mover
from nixl_offload.stores.select import open_store
from nixl_offload.tiers.kinds import open_link
from nixl_offload.tiers.memory.tier import MemoryPlace, rank_memory_bytes
from nixl_offload.tiers.slab.file import make_private_directory
from nixl_offload.tiers.slab.tier import SlabPlace
from nixl_offload.vllm.messages import Place

logger = logging.getLogger(__name__)

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


@unbound()
def reach_tiers(config: Config, tensors: Sequence[torch.Tensor], layout: KVLayout) -> list[OpenedMover]:
    """Reach shared tiers, compare ways between device memory and files, and have kernels compiled: at start, for it may
    take seconds.

    Raises NixlOffloadError when this rank cannot reach its storage at all. A server that is down is no such case.
    """
    found: list[OpenedMover] = []
    device = device_of(tensors[0])
    # Compiles the Triton kernels, which takes seconds, before there is a job to wait for them.
    slow = device.is_accelerator and DeviceGroups(tensors, pages_of(layout), device).sums_slowly
    try:
        for tier in config.tiers:
            if isinstance(tier, S3Config):
                found.append(
                    OpenedMover(open_object_mover(tier, device.kind, functools.partial(open_store, tier)).mover)
                )
            elif isinstance(tier, SharedDirConfig):
                make_private_directory(Path(tier.path))
                plan = plan_tier(tier, device, layout, sums_slowly=slow)
                found.append(open_planned(tier, tier.path, device, plan))
            elif isinstance(tier, SlabConfig) and device.is_accelerator:
                found.append(OpenedMover(plan=_plan_for_slab(tier, device, layout, slow)))
            else:
                found.append(OpenedMover())
    except BaseException:
        for reach in found:
            reach.close()
        raise
    return found


def _plan_for_slab(tier: SlabConfig, device: Device, layout: KVLayout, slow: bool) -> TransferPlan | None:
    """Trouble is told when the slab is opened: the directory may be there by then."""
    with contextlib.suppress(NixlOffloadError, OSError):
        make_private_directory(Path(tier.path))
        return plan_tier(tier, device, layout, sums_slowly=slow)
    return None


def open_host(
    config: Config, parallel: OffloadingParallelConfig, layout: KVLayout, tensors: Sequence[torch.Tensor]
) -> HostSlab | None:
    """Take this rank's share of the memory tier, and room for what travels between farther tiers; None: not needed.

    Raises TierError when the machine does not have so much.
    """
    device = device_of(tensors[0])
    nearest, farther = config.tiers[0], sum(not isinstance(tier, MemoryConfig) for tier in config.tiers)
    memory_bytes = 0
    if isinstance(nearest, MemoryConfig):
        memory_bytes = rank_memory_bytes(nearest.capacity_bytes, parallel.world_size, parallel.data_parallel_size)
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
        sharers=parallel.world_size * parallel.data_parallel_size,
    )


def engine_of_nothing(layout: KVLayout) -> ChainEngine | None:
    """Return the engine of a rank that has no layer of any offloaded group: it needs no memory, reaches no storage, and
    is done with its part of everything at once. None: this rank has some layer.
    """
    empty = layout.empty_groups
    return ChainEngine((), empty_groups=empty) if len(empty) == len(layout.groups) else None


@unbound()
def open_engine(
    config: Config, memory: RankMemory, places: Sequence[Place], rank: int, reaches: Sequence[OpenedMover]
) -> ChainEngine:
    """Open this rank's way to each tier and start their engines, which own what is open of ``reaches`` from then on.
    ``memory`` must outlive them. A tier that cannot be opened here is left out: what is asked of it fails.

    Raises what the first tier raised when this rank can reach none of its storage.
    """
    nearest = next((at for at, tier in enumerate(config.tiers) if isinstance(tier, MemoryConfig)), None)
    sharers = len(config.tiers) - (nearest is not None)
    engines: list[TierEngine | None] = []
    trouble: list[Exception] = []
    with contextlib.ExitStack() as undo:
        for position, (tier, place, reach) in enumerate(zip(config.tiers, places, reaches, strict=True)):
            try:
                engine = _open_tier(config, position, tier, place, memory, rank, reach, sharers)
            except Exception as error:  # noqa: BLE001 - the other tiers work without it
                trouble.append(error)
                engines.append(None)
                reach.close()
                continue
            undo.callback(engine.close, 0.0)
            engines.append(engine)
        if not any(engines):
            raise trouble[0]
        for what in trouble:
            trace = None if isinstance(what, NixlOffloadError) else what
            logger.error("A tier is out of use on rank %d until the engine restarts: %s", rank, what, exc_info=trace)
        chain = ChainEngine(engines, memory.host, memory=nearest, empty_groups=memory.layout.empty_groups)
        undo.pop_all()
    return chain


def _open_tier(
    config: Config,
    position: int,
    tier: TierConfig,
    place: Place,
    memory: RankMemory,
    rank: int,
    reach: OpenedMover,
    sharers: int,
) -> TierEngine:
    """``sharers``: how many engines divide the staging memory."""
    if isinstance(place, MemoryPlace):
        assert memory.host is not None
        return MemoryEngine(
            tensors=memory.tensors,
            layout=memory.layout,
            host=memory.host,
            rank_namespace=place.rank_namespaces[rank],
            tier=position,
            verify=config.verify,
        )
    device = device_of(memory.tensors[0])
    with contextlib.ExitStack() as undo:
        if isinstance(tier, SlabConfig) and isinstance(place, SlabPlace):
            make_private_directory(Path(place.directory))
            reach = open_planned(tier, place.directory, device, reach.plan)
            undo.callback(reach.close)
        assert reach.mover is not None
        link = open_link(tier, place, rank, reach.mover)
        undo.callback(link.close)
        options = engine_options(reach, link.mover, device, memory.layout)
        options = options.share(
            config.staging_bytes, spared_bytes(device, memory.claimed_share), sharers, memory.layout
        )
        engine = Engine(
            tensors=memory.tensors,
            layout=memory.layout,
            link=link,
            tier=position,
            rank_namespace=place.rank_namespaces[rank],
            staging_bytes=options.staging_bytes,
            verify=config.verify,
            load_timeout_s=config.load_timeout_s,
            direct_min_extent_bytes=options.direct_min_extent_bytes,
            host=memory.host,
            device=device,
            staging=options.staging,
        )
        undo.pop_all()
    return engine
