"""Puts a rank's engine together: a link and a mover for each tier, as the config says and this machine can.

Threading: on the worker's main thread, once per rank: ``open_movers`` at start, ``open_engine`` with the first job.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from vllm.v1.kv_offload.config import OffloadingParallelConfig

from nixl_offload.config import Config, FileTier, MemoryTier, S3Tier
from nixl_offload.engine import ChainEngine, Engine
from nixl_offload.engine.chain import TierEngine
from nixl_offload.engine.cores import unbound
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.links.base import Link
from nixl_offload.engine.links.objects import ObjectLink
from nixl_offload.engine.links.slab import SlabLink
from nixl_offload.engine.links.tree import TreeLink
from nixl_offload.engine.memory import MemoryEngine
from nixl_offload.errors import NixlOffloadError
from nixl_offload.layout import KVLayout
from nixl_offload.movers.base import MemoryKind, Mover
from nixl_offload.movers.select import open_mover
from nixl_offload.movers.select_object import open_object_mover
from nixl_offload.stores.select import open_store
from nixl_offload.tiers.file import SlabPlace
from nixl_offload.tiers.memory import MemoryPlace, rank_memory_bytes
from nixl_offload.tiers.shared import SharedPlace
from nixl_offload.tiers.slab_file import SlabFile, make_private_directory, rank_file_name
from nixl_offload.vllm.messages import Place

logger = logging.getLogger(__name__)

RELAY_SLOTS = 16
RELAY_SHARE = 4
"""Chunks that travel between farther tiers rest in so many slots, at most a quarter of what staging takes."""


@unbound()
def open_movers(config: Config, tensors: Sequence[torch.Tensor]) -> dict[int, Mover]:
    """Open the movers of shared tiers, by position: at start, for it may take seconds until a server has answered.

    Raises NixlOffloadError when this rank cannot reach its storage at all. A server that is down is no such case.
    """
    movers: dict[int, Mover] = {}
    kind = _kind(tensors)
    try:
        for position, tier in enumerate(config.tiers):
            if isinstance(tier, S3Tier):
                movers[position] = open_object_mover(tier, kind, functools.partial(open_store, tier)).mover
            elif isinstance(tier, FileTier) and tier.layout == "tree":
                make_private_directory(Path(tier.path))
                movers[position] = _file_mover(tier, tier.path, kind)
    except BaseException:
        for mover in movers.values():
            mover.close()
        raise
    return movers


def open_host(
    config: Config, parallel: OffloadingParallelConfig, layout: KVLayout, tensors: Sequence[torch.Tensor]
) -> HostSlab | None:
    """Take this rank's share of the memory tier, and room for what travels between farther tiers; None: not needed.

    Raises TierError when the machine does not have so much.
    """
    nearest, farther = config.tiers[0], sum(not isinstance(tier, MemoryTier) for tier in config.tiers)
    memory_bytes = 0
    if isinstance(nearest, MemoryTier):
        memory_bytes = rank_memory_bytes(nearest.capacity_bytes, parallel.world_size, parallel.data_parallel_size)
    if not memory_bytes and farther < 2:
        return None
    largest = max(layout.slot_bytes(group) for group in range(len(layout.groups)))
    relay_slots = 0 if farther < 2 else max(2, min(RELAY_SLOTS, config.staging_bytes // RELAY_SHARE // largest))
    return HostSlab(
        memory_bytes=memory_bytes,
        relay_slots=relay_slots,
        slot_bytes=largest,
        pinned=_kind(tensors) is MemoryKind.VRAM,
        device=tensors[0].device.index or 0,
        sharers=parallel.world_size * parallel.data_parallel_size,
    )


@unbound()
def open_engine(
    config: Config,
    tensors: Sequence[torch.Tensor],
    layout: KVLayout,
    places: Sequence[Place],
    rank: int,
    movers: Mapping[int, Mover],
    host: HostSlab | None,
) -> ChainEngine:
    """Open this rank's way to each tier and start their engines, which own ``movers`` (of ``open_movers``) from then
    on. ``host`` must outlive them. A tier that cannot be opened here is left out: what is asked of it fails.

    Raises what the first tier raised when this rank can reach none of its storage.
    """
    memory = next((at for at, tier in enumerate(config.tiers) if isinstance(tier, MemoryTier)), None)
    sharers = len(config.tiers) - (memory is not None)
    engines: list[TierEngine | None] = []
    trouble: list[Exception] = []
    with contextlib.ExitStack() as undo:
        for position, (tier, place) in enumerate(zip(config.tiers, places, strict=True)):
            mover = movers.get(position)
            try:
                engine = _open_tier(config, position, tier, place, tensors, layout, rank, mover, host, sharers)
            except Exception as error:  # noqa: BLE001 - the other tiers work without it
                trouble.append(error)
                engines.append(None)
                if mover is not None:
                    with contextlib.suppress(Exception):  # it never moved anything
                        mover.close()
                continue
            undo.callback(engine.close, 0.0)
            engines.append(engine)
        if not any(engines):
            raise trouble[0]
        for what in trouble:
            trace = None if isinstance(what, NixlOffloadError) else what
            logger.error("A tier is out of use on rank %d until the engine restarts: %s", rank, what, exc_info=trace)
        chain = ChainEngine(engines, host, memory=memory)
        undo.pop_all()
    return chain


def _open_tier(
    config: Config,
    position: int,
    tier: MemoryTier | FileTier | S3Tier,
    place: Place,
    tensors: Sequence[torch.Tensor],
    layout: KVLayout,
    rank: int,
    mover: Mover | None,
    host: HostSlab | None,
    sharers: int,
) -> TierEngine:
    """``sharers``: how many engines divide the staging memory."""
    if isinstance(place, MemoryPlace):
        assert host is not None
        return MemoryEngine(
            tensors=tensors,
            layout=layout,
            host=host,
            rank_namespace=place.rank_namespaces[rank],
            tier=position,
            verify=config.verify,
        )
    with contextlib.ExitStack() as undo:
        link = _open_link(tier, place, mover, rank, _kind(tensors), undo)
        engine = Engine(
            tensors=tensors,
            layout=layout,
            links=[*[None] * position, link],
            rank_namespace=place.rank_namespaces[rank],
            staging_bytes=config.staging_bytes // sharers,
            verify=config.verify,
            load_timeout_s=config.load_timeout_s,
            host=host,
        )
        undo.pop_all()
    return engine


def _open_link(
    tier: MemoryTier | FileTier | S3Tier,
    place: Place,
    mover: Mover | None,
    rank: int,
    kind: MemoryKind,
    undo: contextlib.ExitStack,
) -> Link:
    if isinstance(place, SlabPlace):
        assert isinstance(tier, FileTier)
        slab = SlabFile(
            os.path.join(place.directory, rank_file_name(rank)),
            rank_bytes=place.rank_bytes,
            extent_bytes=place.extent_bytes,
            direct_io=tier.direct_io,
        )
        slab.open()
        undo.callback(slab.close)
        mover = _file_mover(tier, place.directory, kind)
        undo.callback(mover.close)
        return SlabLink(slab, mover, time.monotonic)
    assert mover is not None
    assert isinstance(place, SharedPlace)
    if isinstance(tier, FileTier):
        return TreeLink(tier.path, place.namespace, rank, mover, direct_io=tier.direct_io, clock=time.monotonic)
    assert isinstance(tier, S3Tier)
    return ObjectLink(f"s3://{tier.bucket}/{tier.prefix}", place.namespace, rank, mover, time.monotonic)


def _file_mover(tier: FileTier, directory: str, kind: MemoryKind) -> Mover:
    return open_mover(
        tier.mover, kind, directory, tier.posix_api, threads=tier.threads, bounce_bytes=tier.bounce_bytes
    ).mover


def _kind(tensors: Sequence[torch.Tensor]) -> MemoryKind:
    return MemoryKind.VRAM if tensors[0].is_cuda else MemoryKind.DRAM
