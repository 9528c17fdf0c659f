"""Ports: the link to each tier, with what its mover knows of the engine's memory and how each KV group travels by it.

Threading: made at start; afterwards the pump's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.chunk.layout import KVLayout, chunk_extents
from nixl_offload.engine import image
from nixl_offload.engine.image import GroupPlan, Way
from nixl_offload.engine.pools import Memory
from nixl_offload.engine.records import ChunkIO
from nixl_offload.engine.registrar import Place, Registrar, why_not_direct
from nixl_offload.engine.staging import DeviceSlot, Slot
from nixl_offload.engine.streams import Device
from nixl_offload.errors import MoverError
from nixl_offload.movers.base import Extents, MemoryId, Op, Transfer
from nixl_offload.tiers.link import Link, Target

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Port:
    """One tier as the pump uses it. The ids are those of the link's mover; None: it was not given that memory."""

    link: Link
    plans: Sequence[GroupPlan]
    """Indexed by group."""
    staging: MemoryId | None
    device: MemoryId | None
    pages: MemoryId | None
    tensors: Mapping[int, Place]
    """KV tensors by number; those of direct groups, at least."""
    host: MemoryId | None = None

    def submit_packed(self, op: Op, slot: Slot, target: Target, spans: Extents) -> Transfer:
        """Start one transfer of ``spans``, which are relative to the slot, in memory as in the target."""
        return self._submit_slot(op, self.staging, slot, target, spans)

    def submit_device(self, op: Op, slot: DeviceSlot, target: Target, spans: Extents) -> Transfer:
        """As ``submit_packed``, of a slot in device memory."""
        return self._submit_slot(op, self.device, slot, target, spans)

    def submit_host(self, op: Op, slot: Slot, target: Target, spans: Extents) -> Transfer:
        """As ``submit_packed``, of a host slot. Raises MoverError where there are none."""
        return self._submit_slot(op, self.host, slot, target, spans)

    def submit_direct(self, op: Op, layout: KVLayout, io: ChunkIO, slot: Slot, target: Target) -> Iterator[Transfer]:
        """Start the header page, then the extents in each region: a transfer per piece of memory is what a mover takes.

        Yields each as soon as it is started: where one raises MoverError, those before it are in flight.
        """
        extents = chunk_extents(layout, io.group, io.block_ids, io.first_block)
        yield self._submit_slot(op, self.pages, slot, target, image.extents([0], [HEADER_BYTES]))
        payload_at = target.offset + HEADER_BYTES
        places = [self.tensors[tensor] for tensor in extents.tensor_index.tolist()]
        region_of = np.array([place.memory for place in places])
        memory_offset = extents.memory_offset + np.array([place.offset_bytes for place in places])
        for region in np.unique(region_of).tolist():
            of = region_of == region
            memory_extents = image.extents(memory_offset[of], extents.length[of])
            file_extents = image.extents(extents.payload_offset[of] + payload_at, extents.length[of])
            yield self.link.mover.submit(op, MemoryId(region), memory_extents, target.file, file_extents)

    def _submit_slot(
        self, op: Op, memory: MemoryId | None, slot: Slot | DeviceSlot, target: Target, spans: Extents
    ) -> Transfer:
        if memory is None:
            raise MoverError(f"{self.link.mover.name} cannot touch the memory that the chunk is to lie in")
        in_memory, in_file = spans.copy(), spans.copy()
        in_memory[:, 0] += slot.offset_bytes
        in_file[:, 0] += target.offset
        return self.link.mover.submit(op, memory, in_memory, target.file, in_file)


def open_ports(
    links: Sequence[Link | None],
    memory: Memory,
    layout: KVLayout,
    device: Device,
    *,
    direct_min_extent_bytes: int,
) -> list[Port | None]:
    """Register memory with every mover, once each, and choose for each link and group how it travels.

    Raises MoverError when chunks must be packed in host memory and that cannot be registered. A KV tensor that cannot
    is packed, staging on the device that cannot is done without, and host memory that cannot is not used with that
    tier.
    """
    registrars: dict[int, Registrar] = {}
    ports: list[Port | None] = []
    for link in links:
        if link is None:
            ports.append(None)
            continue
        registrar = registrars.get(id(link.mover))
        if registrar is None:
            registrar = registrars[id(link.mover)] = Registrar(link.mover, memory, layout, device)
        plans = [
            _plan(link, group, registrar, memory, layout, device, direct_min_extent_bytes)
            for group in range(len(layout.groups))
        ]
        used = [plan for plan in plans if plan.block_bytes]
        for plan in used:
            plan.packed = "host" if registrar.device is None else "device"
        if any("host" in {plan.way, plan.packed} for plan in used):
            registrar.register_staging()
        registrar.register_host()
        ports.append(
            Port(
                link,
                plans,
                registrar.staging,
                registrar.device,
                registrar.pages,
                registrar.tensors,
                registrar.host,
            )
        )
    if all(registrar.device is None for registrar in registrars.values()):
        memory.close_device()
    return ports


def _plan(
    link: Link,
    group: int,
    registrar: Registrar,
    memory: Memory,
    layout: KVLayout,
    device: Device,
    direct_min_extent_bytes: int,
) -> GroupPlan:
    """Choose the way of a group, and log it with the reason. One without layers here gets none."""
    if group in layout.empty_groups:
        return image.make_plan(layout, group)
    limits = link.mover.limits
    way: Way = "direct"
    why = why_not_direct(layout, group, device, link.mover, direct_min_extent_bytes) or registrar.why_not_direct(group)
    if why and memory.packs_on_device:
        why_not_there = registrar.why_not_device()
        way = "host" if why_not_there else "device"
        why = why if why_not_there in {"", why} else f"{why}, and {why_not_there}"
    elif why:
        way = "host"
    logger.info("%s, KV group %d: %s%s", link.name, group, _WORDS[way], f", because {why}" if why else "")
    return image.make_plan(
        layout, group, way=way, whole_writes=limits.whole_writes, tells_short_reads=limits.tells_short_reads
    )


_WORDS: Mapping[Way, str] = {
    "direct": "direct",
    "device": "packed on the device",
    "host": "packed through host memory",
}
