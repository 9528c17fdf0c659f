"""Puts a rank's engine together: slab file, mover and staging, as the config says and this machine can.

Threading: called once per rank, on the worker's main thread, with the first job.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from nixl_offload.config import Config, FileTier
from nixl_offload.engine import Engine
from nixl_offload.errors import NotSupportedError
from nixl_offload.layout import KVLayout
from nixl_offload.movers.base import MemoryKind, Mover
from nixl_offload.movers.select import open_mover
from nixl_offload.tiers.file import SlabPlace
from nixl_offload.tiers.slab_file import SlabFile, rank_file_name


def open_engine(
    config: Config, tensors: Sequence[torch.Tensor], layout: KVLayout, place: SlabPlace, rank: int
) -> Engine:
    """Open this rank's slab and start its engine. Raises NixlOffloadError when this rank cannot reach its storage."""
    ((position, tier),) = ((number, item) for number, item in enumerate(config.tiers) if isinstance(item, FileTier))
    if tier.mover == "kvikio":
        raise NotSupportedError("mover: kvikio is not built yet; use auto, gds_mt, gds or posix")
    slab = SlabFile(
        os.path.join(place.directory, rank_file_name(rank)),
        rank_bytes=place.rank_bytes,
        extent_bytes=place.extent_bytes,
        direct_io=tier.direct_io,
    )
    slab.open()
    mover: Mover | None = None
    try:
        kind = MemoryKind.VRAM if tensors[0].is_cuda else MemoryKind.DRAM
        mover = open_mover(tier.mover, memory_kind=kind, directory=place.directory, posix_api=tier.posix_api).mover
        return Engine(
            tensors=tensors,
            layout=layout,
            slab=[None] * position + [slab],
            mover=mover,
            rank_namespace=place.rank_namespaces[rank],
            staging_bytes=config.staging_bytes,
            verify=config.verify,
        )
    except BaseException:
        if mover is not None:
            mover.close()
        slab.close()
        raise
