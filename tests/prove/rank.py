"""A rank without vLLM: KV blocks, and the real engine, link and mover of each of its tiers.

Threading: the cell's thread; engines have threads of their own. Ownership: ``close`` ends them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nixl_offload.config import Config
from nixl_offload.engine import LinkEngine, TierEngine
from nixl_offload.engine.autotune import open_planned
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.memory_engine import MemoryEngine
from nixl_offload.engine.streams import device_of
from nixl_offload.movers.base import Mover
from nixl_offload.movers.select import make_mover, open_object_mover
from nixl_offload.movers.threaded import CopyMover
from nixl_offload.stores.filesystem import tier_error
from nixl_offload.tiers import kinds
from nixl_offload.tiers.ownership import make_private_directory, require_lock
from nixl_offload.tiers.slab.file import SlabPlace
from nixl_offload.tiers.slot_tier import rank_memory_bytes
from tests.unit.engine_rig import Shape, kv_cache
from tests.unit.rank_rig import TestedRank

STAGING_SLOTS = 4
DIRECT_BYTES = 4096
"""Runs of so many bytes go direct."""


class Rank:
    """One rank. ``chain`` has no tier until what ``open`` returns has joined it."""

    def __init__(
        self,
        config: Config,
        shape: Shape,
        number: int,
        ranks: int,
        *,
        mover: str = "",
        staging_slots: int = STAGING_SLOTS,
    ) -> None:
        """``mover``: ``copy`` or a POSIX mover by name; "": what the config says."""
        self.number = number
        self._config, self._shape, self._mover, self._staging_slots = config, shape, mover, staging_slots
        self.tensors, self.kv, self.layout = kv_cache(shape, number)
        self.slot_bytes = max(self.layout.slot_bytes(group) for group in range(len(self.layout.groups)))
        memory = config.memory
        memory_bytes = 0 if memory is None else rank_memory_bytes(memory.capacity_bytes, ranks, 1)
        relay_slots = 2 if len(config.stored) > 1 else 0
        self.host: HostSlab | None = None
        if memory_bytes or relay_slots:
            self.host = HostSlab(
                memory_bytes=memory_bytes,
                relay_slots=relay_slots,
                slot_bytes=self.slot_bytes,
                progress=lambda done, total: None,
            )
        self.chain = TestedRank(
            len(config.tiers),
            relay_offsets=() if self.host is None else self.host.relay_offsets,
            load_timeout_s=config.load_timeout_s,
        )

    def open(self, position: int, place: kinds.AnyPlace) -> TierEngine:
        """Open one tier, as ``vllm.rank_tiers`` does. Raises TierError, MoverError, with nothing left open."""
        tier = self._config.tiers[position]
        common: dict[str, Any] = {
            "table": self.chain,
            "tensors": self.tensors,
            "layout": self.layout,
            "rank_namespace": place.rank_namespaces[self.number],
            "tier": position,
            "verify": self._config.verify,
        }
        if not tier.outlives_process:
            assert self.host is not None
            return MemoryEngine(host=self.host, **common)
        mover = self._open_mover(tier, place)
        link = None
        try:
            link = kinds.open_link(tier, place, self.number, mover)
            return LinkEngine(
                link=link,
                staging_bytes=self._staging_slots * self.slot_bytes,
                direct_min_extent_bytes=DIRECT_BYTES,
                host=self.host,
                **common,
            )
        except BaseException:
            if link is not None:
                link.close()
            mover.close()
            raise

    def fill(self, blocks: range, group: int, rows: npt.NDArray[np.uint8] | int) -> None:
        """Let KV blocks hold a payload, or a value in every byte."""
        at = 0
        for run in self._shape.groups[group].refs:
            part = self.kv[run.tensor_index][blocks.start : blocks.stop, run.page_offset : run.page_offset + run.length]
            part[:] = rows if isinstance(rows, int) else rows[:, at : at + run.length]
            at += run.length

    def read(self, blocks: range, group: int) -> npt.NDArray[np.uint8]:
        """Return what KV blocks hold, a row for each."""
        return np.concatenate(
            [
                self.kv[run.tensor_index][blocks.start : blocks.stop, run.page_offset : run.page_offset + run.length]
                for run in self._shape.groups[group].refs
            ],
            axis=1,
        )

    def close(self, deadline_s: float, *, keeps_memory: bool = False) -> None:
        """End threads and movers. ``keeps_memory``: something may still use what tiers in memory are made of."""
        self.chain.close(deadline_s)
        if self.host is not None and not keeps_memory:
            self.host.close()

    def _open_mover(self, tier: Any, place: kinds.AnyPlace) -> Mover:
        if self._mover == "copy":
            return CopyMover()
        device = device_of(self.tensors[0])
        if tier.kind == "s3":
            return open_object_mover(tier, device.kind).mover
        directory = place.directory if isinstance(place, SlabPlace) else tier.path
        if isinstance(place, SlabPlace) and place.is_locked_here():
            require_lock(Path(directory), place.owner)
        try:
            make_private_directory(Path(directory))
        except OSError as error:
            raise tier_error(error, f"cannot use {directory}") from error
        if self._mover:
            return make_mover(self._mover)
        return open_planned(tier, directory, device, None)[0]
