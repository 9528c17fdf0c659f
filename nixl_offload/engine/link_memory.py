"""What a link's mover knows of the engine's memory, and how each KV group travels by that link.

Threading: made at start; afterwards the pump's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.chunk.layout import ChunkBlocks, KVLayout, job_extents
from nixl_offload.engine import image
from nixl_offload.engine.engine_memory import EngineMemory
from nixl_offload.engine.image import GroupPlan, Spans, TransferPath
from nixl_offload.engine.records import Chunk
from nixl_offload.engine.registration import Registration, TensorMemory, why_not_direct
from nixl_offload.engine.staging import DeviceSlot, Slot
from nixl_offload.engine.streams import Device
from nixl_offload.errors import MoverError
from nixl_offload.movers.base import Extents, FileId, MemoryId, Op, Transfer
from nixl_offload.tiers.base import Link, Target
from nixl_offload.units import format_size

logger = logging.getLogger(__name__)

SlotParts = Sequence[tuple[Slot | DeviceSlot, Target | None, Spans]]
"""Chunks to move: where they lie in memory and in the tier, and which bytes of them, the same on both sides."""


@dataclass(frozen=True, slots=True)
class LinkMemory:
    """A link and the memory that its mover was given. None: it was not given that memory.

    Each ``submit`` yields a transfer for every file that the chunks lie in, as soon as it is started: where one raises
    MoverError, those before it are in flight.
    """

    link: Link
    plans: Sequence[GroupPlan]
    """Indexed by group."""
    staging: MemoryId | None
    device: MemoryId | None
    pages: MemoryId | None
    tensors: Mapping[int, TensorMemory]
    """KV tensors by number; those of direct groups, at least."""
    host: MemoryId | None = None

    def submit_direct(
        self, op: Op, layout: KVLayout, parts: Sequence[tuple[Slot, Target | None, Chunk]]
    ) -> Iterator[Transfer]:
        """Move header pages, then the KV blocks themselves: a transfer per piece of registered memory and file."""
        header = ((0, HEADER_BYTES),)
        yield from self.submit(op, self.pages, [(page, target, header) for page, target, _ in parts])
        blocks = [
            ChunkBlocks(number, chunk.group, chunk.block_ids, chunk.first_block)
            for number, (_, _, chunk) in enumerate(parts)
        ]
        starts, extents = job_extents(layout, blocks)
        targets = [target for _, target, _ in parts if target is not None]
        counts = np.diff(starts)
        payload_at = np.repeat([target.offset + HEADER_BYTES for target in targets], counts)
        file_of = np.repeat([int(target.file) for target in targets], counts)
        tensors = [self.tensors[tensor] for tensor in extents.tensor_index.tolist()]
        memory_of = np.array([int(tensor.memory) for tensor in tensors])
        memory_offset = extents.memory_offset + np.array([tensor.offset_bytes for tensor in tensors])
        file_offset = extents.payload_offset + payload_at
        for memory, file in dict.fromkeys(zip(memory_of.tolist(), file_of.tolist(), strict=True)):
            of = (memory_of == memory) & (file_of == file)
            yield self.link.mover.submit(
                op,
                MemoryId(memory),
                np.stack([memory_offset[of], extents.length[of]], axis=1),
                FileId(file),
                np.stack([file_offset[of], extents.length[of]], axis=1),
            )

    def submit(self, op: Op, memory: MemoryId | None, parts: SlotParts) -> Iterator[Transfer]:
        """Move slots of one ``memory``. Raises MoverError where the mover was not given that."""
        if parts and memory is None:
            raise MoverError(f"{self.link.mover.name} cannot touch the memory that the chunk is to lie in")
        by_file: dict[FileId, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
        for slot, target, spans in parts:
            assert target is not None, "only chunks that were begun at the link are moved"
            in_memory, in_file = by_file.setdefault(target.file, ([], []))
            for begin, length in spans:
                in_memory.append((slot.offset_bytes + begin, length))
                in_file.append((target.offset + begin, length))
        most = self.link.mover.limits.max_extents_per_transfer
        for file, (in_memory, in_file) in by_file.items():
            assert memory is not None
            for rows in (slice(begin, begin + most) for begin in range(0, len(in_memory), most)):
                yield self.link.mover.submit(op, memory, _extents(in_memory[rows]), file, _extents(in_file[rows]))


def open_link(
    link: Link,
    memory: EngineMemory,
    layout: KVLayout,
    device: Device,
    *,
    direct_min_extent_bytes: int,
    authenticated: bool = False,
) -> LinkMemory:
    """Register memory with the link's mover, each piece once, and choose for each group how it travels.

    ``authenticated``: by host memory, where MACs are made, and whole.
    Raises MoverError when chunks are too large for the mover, or must be packed in host memory and that cannot be
    registered. A KV tensor that cannot is packed, staging on the device that cannot is done without, and host memory
    that cannot is not used with this tier.
    """
    registration = Registration(link.mover, memory, layout, device)
    plans = [
        _plan(link, group, registration, memory, layout, device, direct_min_extent_bytes, authenticated)
        for group in range(len(layout.groups))
    ]
    used = [plan for plan in plans if plan.block_bytes]
    most_bytes = link.mover.limits.max_extent_bytes
    if any(plan.slot_bytes > most_bytes for plan in used):
        raise MoverError(
            f"{link.mover.name} moves {format_size(most_bytes)} at once, less than a chunk: lower chunk_tokens"
        )
    for plan in used:
        plan.packed = "host" if registration.device is None else "device"
    if any("host" in {plan.path, plan.packed} for plan in used):
        registration.register_staging()
    registration.register_host()
    if registration.device is None:
        memory.close_device()
    return LinkMemory(
        link,
        plans,
        registration.staging,
        registration.device,
        registration.pages,
        registration.tensors,
        registration.host,
    )


def _plan(
    link: Link,
    group: int,
    registration: Registration,
    memory: EngineMemory,
    layout: KVLayout,
    device: Device,
    direct_min_extent_bytes: int,
    authenticated: bool,
) -> GroupPlan:
    """Choose the path of a group, and log it with the reason. One without layers here gets none."""
    if group in layout.empty_groups:
        return image.make_plan(layout, group)
    limits = link.mover.limits
    path: TransferPath = "direct"
    why = "MACs are made there (authenticate)" if authenticated else ""
    why = why or why_not_direct(layout, group, device, link.mover, direct_min_extent_bytes)
    why = why or registration.why_not_direct(group)
    if why and memory.packs_on_device:
        why_not_there = registration.why_not_device()
        path = "host" if why_not_there else "device"
        why = why if why_not_there in {"", why} else f"{why}, and {why_not_there}"
    elif why:
        path = "host"
    logger.info("%s, KV group %d: %s%s", link.name, group, _WORDS[path], f", because {why}" if why else "")
    return image.make_plan(
        layout,
        group,
        path=path,
        whole_writes=limits.whole_writes,
        tells_short_reads=limits.tells_short_reads,
        reads_whole=authenticated,
    )


def _extents(pairs: Sequence[tuple[int, int]]) -> Extents:
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


_WORDS: Mapping[TransferPath, str] = {
    "direct": "direct",
    "device": "packed on the device",
    "host": "packed through host memory",
}
