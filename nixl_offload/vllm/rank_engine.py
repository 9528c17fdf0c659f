"""Puts a rank's engine together: a link and a mover for each tier, as the config says and this machine can.

Threading: on the worker's main thread, once per rank: ``open_movers`` at start, ``open_engine`` with the first job.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from nixl_offload.config import Config, FileTier, MemoryTier, S3Tier
from nixl_offload.engine import Engine
from nixl_offload.engine.links.base import Link
from nixl_offload.engine.links.objects import ObjectLink
from nixl_offload.engine.links.slab import SlabLink
from nixl_offload.engine.links.tree import TreeLink
from nixl_offload.errors import NotSupportedError
from nixl_offload.layout import KVLayout
from nixl_offload.movers.base import MemoryKind, Mover
from nixl_offload.movers.select import open_mover
from nixl_offload.movers.select_object import open_object_mover
from nixl_offload.stores.select import open_store
from nixl_offload.tiers.file import SlabPlace
from nixl_offload.tiers.slab_file import SlabFile, make_private_directory, rank_file_name
from nixl_offload.vllm.messages import Place


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


def open_engine(
    config: Config,
    tensors: Sequence[torch.Tensor],
    layout: KVLayout,
    places: Sequence[Place],
    rank: int,
    movers: Mapping[int, Mover],
) -> Engine:
    """Open this rank's way to each tier and start its engine, which owns ``movers`` (of ``open_movers``) from then on.

    Raises NixlOffloadError when this rank cannot reach its storage at all.
    """
    with contextlib.ExitStack() as undo:
        links = [
            _open_link(tier, place, movers.get(position), rank, _kind(tensors), undo)
            for position, (tier, place) in enumerate(zip(config.tiers, places, strict=True))
        ]
        engine = Engine(
            tensors=tensors,
            layout=layout,
            links=links,
            rank_namespace=places[0].rank_namespaces[rank],
            staging_bytes=config.staging_bytes,
            verify=config.verify,
            load_timeout_s=config.load_timeout_s,
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
    if isinstance(tier, FileTier):
        return TreeLink(tier.path, place.namespace, rank, mover, direct_io=tier.direct_io, clock=time.monotonic)
    assert isinstance(tier, S3Tier)
    return ObjectLink(f"s3://{tier.bucket}/{tier.prefix}", place.namespace, rank, mover, time.monotonic)


def _file_mover(tier: FileTier, directory: str, kind: MemoryKind) -> Mover:
    if tier.mover == "kvikio":
        raise NotSupportedError("mover: kvikio is not built yet; use auto, gds_mt, gds or posix")
    return open_mover(tier.mover, memory_kind=kind, directory=directory, posix_api=tier.posix_api).mover


def _kind(tensors: Sequence[torch.Tensor]) -> MemoryKind:
    return MemoryKind.VRAM if tensors[0].is_cuda else MemoryKind.DRAM
