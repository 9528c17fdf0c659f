"""Ports: the link to each tier, with what its mover knows of the engine's memory and how each KV group travels by it.

Threading: made at start; afterwards the pump's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from nixl_offload.engine import image
from nixl_offload.engine.image import GroupPlan
from nixl_offload.engine.jobs import ChunkIO
from nixl_offload.engine.links.base import Link, Target
from nixl_offload.engine.staging import Slot, StagingPool
from nixl_offload.errors import MoverError
from nixl_offload.format import HEADER_BYTES
from nixl_offload.layout import KVLayout, chunk_extents
from nixl_offload.movers.base import Extents, MemoryId, MemoryKind, MemoryRegion, Mover, Op, Transfer

logger = logging.getLogger(__name__)


class Host(Protocol):
    """Host memory that is not the engine's: what it needs of ``host.HostSlab``."""

    region: MemoryRegion

    def slot(self, offset: int, slot_bytes: int) -> Slot:
        """Return a view of a slot. Raises LayoutError where there is none."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The engine's own memory: staging slots, and header pages for direct chunks. ``host``: slots that are named by
    ``ChunkIO.host_offset``.
    """

    staging: StagingPool
    pages: StagingPool
    host: Host | None = None


@dataclass(frozen=True, slots=True)
class Port:
    """One tier as the pump uses it. The ids are those of the link's mover."""

    link: Link
    plans: Sequence[GroupPlan]
    """Indexed by group."""
    staging: MemoryId
    pages: MemoryId
    tensors: Mapping[int, MemoryId]
    """KV tensors by number; those of direct groups only."""
    host: MemoryId | None = None
    """None: there are no host slots for this tier."""

    def submit_packed(self, op: Op, slot: Slot, target: Target, spans: Extents) -> Transfer:
        """Start one transfer of ``spans``, which are relative to the slot, in memory as in the target."""
        return self._submit_slot(op, self.staging, slot, target, spans)

    def submit_host(self, op: Op, slot: Slot, target: Target, spans: Extents) -> Transfer:
        """As ``submit_packed``, of a host slot. Raises MoverError where there are none."""
        if self.host is None:
            raise MoverError(f"{self.link.mover.name} cannot touch the host memory")
        return self._submit_slot(op, self.host, slot, target, spans)

    def submit_direct(self, op: Op, layout: KVLayout, io: ChunkIO, slot: Slot, target: Target) -> Iterator[Transfer]:
        """Start the header page, then the extents of each tensor: a transfer per piece of memory is what a mover takes.

        Yields each as soon as it is started: where one raises MoverError, those before it are in flight.
        """
        submit = self.link.mover.submit
        extents = chunk_extents(layout, io.group, io.block_ids, io.first_block)
        header = image.extents([slot.offset_bytes], [HEADER_BYTES])
        at = image.extents([target.offset], [HEADER_BYTES])
        yield submit(op, self.pages, header, target.file, at)
        payload_at = target.offset + HEADER_BYTES
        for tensor in np.unique(extents.tensor_index).tolist():
            of = extents.tensor_index == tensor
            memory_extents = image.extents(extents.memory_offset[of], extents.length[of])
            file_extents = image.extents(extents.payload_offset[of] + payload_at, extents.length[of])
            yield submit(op, self.tensors[tensor], memory_extents, target.file, file_extents)

    def _submit_slot(self, op: Op, memory: MemoryId, slot: Slot, target: Target, spans: Extents) -> Transfer:
        in_memory, in_file = spans.copy(), spans.copy()
        in_memory[:, 0] += slot.offset_bytes
        in_file[:, 0] += target.offset
        return self.link.mover.submit(op, memory, in_memory, target.file, in_file)


@dataclass(frozen=True, slots=True)
class _Registered:
    staging: MemoryId
    pages: MemoryId
    tensors: dict[int, MemoryId]
    host: MemoryId | None


def open_ports(
    links: Sequence[Link | None],
    memory: Memory,
    layout: KVLayout,
    tensors: Sequence[torch.Tensor],
    *,
    direct_min_extent_bytes: int,
) -> list[Port | None]:
    """Register memory with every mover, once each, and choose for each link and group whether it travels direct.

    Raises MoverError when staging or header pages cannot be registered; a KV tensor that cannot is packed, and host
    memory that cannot is not used with that tier.
    """
    registered: dict[int, _Registered] = {}
    ports: list[Port | None] = []
    for link in links:
        if link is None:
            ports.append(None)
            continue
        mover = link.mover
        known = registered.get(id(mover))
        if known is None:
            staging = mover.register_memory(memory.staging.region)
            known = _Registered(staging, mover.register_memory(memory.pages.region), {}, _register_host(memory, mover))
            registered[id(mover)] = known
        plans = []
        for group in range(len(layout.groups)):
            why = _why_packed(layout, group, tensors, mover, direct_min_extent_bytes)
            why = why or _register_tensors(layout, group, tensors, mover, known.tensors)
            logger.info("%s, KV group %d: %s%s", link.name, group, "packed, because " if why else "direct", why)
            plans.append(
                image.make_plan(
                    layout,
                    group,
                    direct=not why,
                    whole_writes=mover.limits.whole_writes,
                    tells_short_reads=mover.limits.tells_short_reads,
                )
            )
        ports.append(Port(link, plans, known.staging, known.pages, known.tensors, known.host))
    return ports


def _why_packed(
    layout: KVLayout, group: int, tensors: Sequence[torch.Tensor], mover: Mover, min_extent_bytes: int
) -> str:
    """Say why a group must go through staging; empty if it may go direct."""
    refs = layout.groups[group].refs
    kind, alignment = _kind(tensors[refs[0][0]]), mover.limits.alignment_bytes
    smallest = min(page_bytes for _, page_bytes in refs)
    if kind not in mover.memory_kinds:
        return f"{mover.name} cannot touch {kind.value}"
    if mover.limits.whole_writes:
        return f"{mover.name} writes a chunk in one piece"
    if not mover.limits.tells_short_reads:
        return f"{mover.name} does not tell when a chunk is cut short"
    if not layout.is_group_direct_capable(group, alignment):
        return f"its pages are not aligned to {alignment} bytes"
    if smallest < min_extent_bytes:
        return f"its pieces of {smallest} bytes are smaller than {min_extent_bytes}"
    return ""


def _register_tensors(
    layout: KVLayout, group: int, tensors: Sequence[torch.Tensor], mover: Mover, registered: dict[int, MemoryId]
) -> str:
    """Register what is not yet of a group's tensors; says why it cannot, or nothing."""
    try:
        for index, _ in layout.groups[group].refs:
            if index not in registered:
                registered[index] = mover.register_memory(_region(layout, index, tensors[index]))
    except MoverError as error:
        return f"its memory cannot be registered: {error}"
    return ""


def _register_host(memory: Memory, mover: Mover) -> MemoryId | None:
    if memory.host is None:
        return None
    try:
        return mover.register_memory(memory.host.region)
    except MoverError as error:
        logger.error(
            "No chunk goes from host memory to this tier or back: %s cannot register it: %s", mover.name, error
        )
        return None


def _kind(tensor: torch.Tensor) -> MemoryKind:
    return MemoryKind.VRAM if tensor.is_cuda else MemoryKind.DRAM


def _region(layout: KVLayout, index: int, tensor: torch.Tensor) -> MemoryRegion:
    spec, kind = layout.tensors[index], _kind(tensor)
    device = tensor.device.index or 0
    return MemoryRegion(spec.base_address, spec.span_bytes, kind, device if kind is MemoryKind.VRAM else 0)
