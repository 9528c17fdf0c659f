"""The memory that is registered with a link's mover, and the transfer path of each KV group over that link.

Threading: made at start; afterwards the pump's. Ownership: the pools are the engine's; the host slab and the KV tensors
are its caller's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine.device_packer import DEVICE_BYTES
from nixl_offload.engine.image import TransferPath, make_plan
from nixl_offload.engine.paths import RankMemory
from nixl_offload.engine.staging import MIN_SLOTS, SlotPool, Staging, device_pool, host_pool
from nixl_offload.engine.streams import Device
from nixl_offload.errors import MoverError
from nixl_offload.movers.base import MemoryId, MemoryRegion
from nixl_offload.tiers.base import Link
from nixl_offload.types import PAGE_BYTES
from nixl_offload.units import format_size

logger = logging.getLogger(__name__)

HEADER_PAGES = 256
"""One for each chunk that may be in flight: see ``link_paths``."""
SPARED_SHARE = 0.25
"""Staging may take this share of the device memory that is free and not claimed by the model. The rest is for CUDA
graphs, libraries and neighbours."""


class TensorMemory(NamedTuple):
    """Where a KV tensor begins: the registered region, and the offset in it."""

    memory: MemoryId
    offset_bytes: int


class LinkMemory:
    """The memory that is registered with a link's mover, each region once."""

    def __init__(
        self,
        link: Link,
        memory: RankMemory,
        *,
        staging_bytes: int,
        packs_on_device: bool,
        direct_min_extent_bytes: int,
        is_authenticated: bool = False,
    ) -> None:
        """Allocate staging, register memory, and choose how each group travels.

        ``staging_bytes``: size of host staging, and of device staging. ``packs_on_device``: pack groups that are not
        direct in device memory, if the mover takes it. ``is_authenticated``: chunks go whole through host memory, where
        MACs are made.
        Raises MoverError if chunks are too large for the mover, or if it refuses host staging that is needed. After
        other refusals we do without: a KV tensor's group is packed, staging moves to the host, and the tier does not
        use the host slab.
        """
        self.pools: dict[TransferPath, SlotPool[Any]] = {}
        """Slots by path: staging, and header pages for ``direct``."""
        self.tensors: dict[int, TensorMemory] = {}
        """Registered KV tensors, by number: at least those of direct groups."""
        self.host_slab: MemoryId | None = None
        """The host slab; None if there is none or the mover cannot use it."""
        self._mover, self._layout, self._device = link.mover, memory.layout, memory.device
        layout, host = memory.layout, memory.host
        self._slot_bytes = max(layout.slot_bytes(group) for group in range(len(layout.groups)))
        self._staging_bytes = staging_bytes
        self._refusals: dict[str, str] = {}
        """By region that was tried: why the mover refused it, or an empty string."""
        limits = link.mover.limits
        self.plans = [make_plan(layout, group, limits) for group in range(len(layout.groups))]
        """By group."""
        for group, plan in enumerate(self.plans):
            if not plan.block_bytes:
                continue
            why = "MACs are made there (authenticate)" if is_authenticated else ""
            why = why or self._why_not_direct(group, direct_min_extent_bytes)
            plan.path, plan.reads_whole = "host" if why else "direct", is_authenticated
            if why and packs_on_device:
                why_not_there = self._why_not_device()
                plan.path = "host" if why_not_there else "device"
                why = why if why_not_there in {"", why} else f"{why}, and {why_not_there}"
            logger.info("%s, KV group %d: %s%s", link.name, group, _WORDS[plan.path], f", because {why}" if why else "")
        used = [plan for plan in self.plans if plan.block_bytes]
        if any(plan.slot_bytes > limits.max_extent_bytes for plan in used):
            most = format_size(limits.max_extent_bytes)
            raise MoverError(f"{link.mover.name} moves {most} at once, less than a chunk: lower chunk_tokens")
        for plan in used:
            plan.packed = "device" if "device" in self.pools else "host"
        if any("host" in {plan.path, plan.packed} for plan in used):
            self._open_host("host", self._slot_bytes, staging_bytes)
        if host is not None:
            try:
                self.host_slab = link.mover.register_memory(host.region)
            except MoverError as error:
                logger.error(
                    "No chunk goes from host memory to this tier or back: %s cannot register it: %s",
                    link.mover.name,
                    error,
                )

    def _why_not_direct(self, group: int, min_extent_bytes: int) -> str:
        """Register header pages and a group's tensors. Returns why that failed, or an empty string."""
        limits, mover = self._mover.limits, self._mover
        smallest = min(run.length for run in self._layout.groups[group].refs)
        if self._device.kind not in mover.memory_kinds:
            return f"{mover.name} cannot touch {self._device.kind.value}"
        if limits.whole_writes:
            return f"{mover.name} writes a chunk in one piece"
        if not limits.tells_short_reads:
            return f"{mover.name} does not tell when a chunk is cut short"
        if not self._layout.is_group_direct_capable(group, limits.alignment_bytes):
            return f"its pages are not aligned to {limits.alignment_bytes} bytes"
        if smallest < min_extent_bytes:
            return f"its pieces of {smallest} bytes are smaller than {min_extent_bytes}"
        why = self._refusal("header pages", lambda: self._open_host("direct", PAGE_BYTES, PAGE_BYTES * HEADER_PAGES))
        return why or self._refusal(f"group {group}", lambda: self._register_tensors(group))

    def _why_not_device(self) -> str:
        """Allocate staging on the device and register it. Returns why that failed, or an empty string."""
        if self._device.kind not in self._mover.memory_kinds:
            return f"{self._mover.name} cannot touch {self._device.kind.value}"
        return self._refusal("staging on the device", self._open_device)

    def _refusal(self, what: str, register: Callable[[], None]) -> str:
        """Register ``what``, trying only once. Returns why that failed, or an empty string."""
        if what not in self._refusals:
            try:
                register()
                self._refusals[what] = ""
            except MoverError as error:
                self._refusals[what] = str(error)
        return self._refusals[what]

    def _register(self, region: MemoryRegion, what: str) -> MemoryId:
        try:
            return self._mover.register_memory(region)
        except MoverError as error:
            raise MoverError(f"{what} cannot be registered: {error}") from error

    def _open_host(self, path: TransferPath, slot_bytes: int, budget_bytes: int) -> None:
        pool = host_pool(slot_bytes=slot_bytes, budget_bytes=budget_bytes, page_locked=self._device.page_locks)
        pool.memory = self._register(pool.region, "header pages" if path == "direct" else "staging in host memory")
        self.pools[path] = pool

    def _open_device(self) -> None:
        pool = device_pool(slot_bytes=self._slot_bytes, budget_bytes=self._staging_bytes, device=self._device)
        pool.memory = self._register(pool.region, "staging on the device")
        self.pools["device"] = pool

    def _register_tensors(self, group: int) -> None:
        """Register the group's tensors that are not registered yet, with all tensors in the same memory."""
        for index, _, _ in self._layout.groups[group].refs:
            if index in self.tensors:
                continue
            begin, end, members = next(span for span in _spans(self._layout) if index in span[2])
            number = self._device.number if self._device.is_accelerator else 0
            memory = self._register(MemoryRegion(begin, end - begin, self._device.kind, number), "its memory")
            for tensor in members:
                self.tensors[tensor] = TensorMemory(memory, self._layout.tensors[tensor].base_address - begin)


def _spans(layout: KVLayout) -> list[tuple[int, int, list[int]]]:
    """Return stretches of memory, [begin, end), and the tensors in each. Overlapping tensors are joined: layers that
    are interleaved in the blocks of one allocation. Each would count against the device's limits alone.
    """
    spans: list[tuple[int, int, list[int]]] = []
    for index in sorted(range(len(layout.tensors)), key=lambda tensor: layout.tensors[tensor].base_address):
        begin, tensors = layout.tensors[index].base_address, [index]
        end = begin + layout.tensors[index].span_bytes
        if spans and begin < spans[-1][1]:
            begin, last_end, others = spans.pop()
            end, tensors = max(last_end, end), [*others, index]
        spans.append((begin, end, tensors))
    return spans


_WORDS: Mapping[TransferPath, str] = {
    "direct": "direct",
    "device": "packed on the device",
    "host": "packed through host memory",
}


def share_staging(
    side: Staging,
    wanted_bytes: int,
    device: Device,
    claimed_share: float,
    *,
    packers: int,
    sharers: int,
    layout: KVLayout,
) -> tuple[Staging, int]:
    """Return where an engine packs chunks, and its share of the staging memory that ``sharers`` engines divide.

    ``claimed_share``: the part of the device's memory that the model has claimed (vLLM's ``gpu_memory_utilization``).
    ``packers``: engines with scratch memory there. If the device can spare less than two chunks for each sharer, chunks
    go through host memory.
    """
    share_bytes = wanted_bytes // sharers
    if side == "host" or device.torch_device.type != "cuda":
        return side, share_bytes
    free_bytes, total_bytes = torch.cuda.mem_get_info(device.torch_device)
    # Much of the memory that is free when a tier opens is for activations: count only unclaimed memory.
    unclaimed_bytes = min(free_bytes, int(total_bytes * max(0.0, 1.0 - claimed_share)))
    spared_bytes = max(0, int(unclaimed_bytes * SPARED_SHARE) - packers * DEVICE_BYTES) // sharers
    least_bytes = MIN_SLOTS * max(layout.slot_bytes(group) for group in range(len(layout.groups)))
    if spared_bytes >= least_bytes:
        return "device", min(share_bytes, spared_bytes)
    logger.warning(
        "Chunks go through host memory: the device can spare %s for a tier, and two chunks take %s. "
        "Lower gpu_memory_utilization or chunk_tokens.",
        format_size(spared_bytes),
        format_size(least_bytes),
    )
    return "host", share_bytes
