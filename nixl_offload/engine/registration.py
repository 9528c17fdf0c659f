"""What one mover is given of the engine's memory: each piece once, whole; and in words why it does not get more.

Threading: at start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine.engine_memory import EngineMemory
from nixl_offload.engine.streams import Device
from nixl_offload.errors import MoverError
from nixl_offload.movers.base import MemoryId, MemoryKind, MemoryRegion, Mover

logger = logging.getLogger(__name__)


class TensorMemory(NamedTuple):
    """Where a KV tensor begins: in which registered region, and how far from its begin."""

    memory: MemoryId
    offset_bytes: int


class Registration:
    """One mover's registrations. Whatever was refused is not tried again."""

    def __init__(self, mover: Mover, memory: EngineMemory, layout: KVLayout, device: Device) -> None:
        self.tensors: dict[int, TensorMemory] = {}
        self.staging: MemoryId | None = None
        self.device: MemoryId | None = None
        self.pages: MemoryId | None = None
        self.host: MemoryId | None = None
        self._mover = mover
        self._memory = memory
        self._layout = layout
        self._device = device
        self._spans = _spans(layout)
        self._refused: dict[str, str] = {}

    def why_not_direct(self, group: int) -> str:
        """Register header pages and a group's tensors; say why that cannot be, or nothing."""
        return self._attempt("header pages", self._register_pages) or self._attempt(
            f"group {group}", lambda: self._register_tensors(group)
        )

    def why_not_device(self) -> str:
        """Allocate staging on the device and register it; say why that cannot be, or nothing."""
        kind = self._device.kind
        if kind not in self._mover.memory_kinds:
            return f"{self._mover.name} cannot touch {kind.value}"
        return self._attempt("device", self._register_device)

    def register_staging(self) -> None:
        """Allocate staging in host memory and register it. Raises MoverError."""
        if self.staging is None:
            self.staging = self._mover.register_memory(self._memory.open_staging().region)

    def register_host(self) -> None:
        """Register the host slots, if there are any and the mover takes them; an error in the log says if not."""
        if self._memory.host is None or self.host is not None:
            return
        try:
            self.host = self._mover.register_memory(self._memory.host.region)
        except MoverError as error:
            logger.error(
                "No chunk goes from host memory to this tier or back: %s cannot register it: %s",
                self._mover.name,
                error,
            )

    def _attempt(self, what: str, register: Callable[[], None]) -> str:
        if what not in self._refused:
            try:
                register()
                self._refused[what] = ""
            except MoverError as error:
                self._refused[what] = str(error)
        return self._refused[what]

    def _register_pages(self) -> None:
        try:
            self.pages = self._mover.register_memory(self._memory.pages.region)
        except MoverError as error:
            raise MoverError(f"header pages cannot be registered: {error}") from error

    def _register_device(self) -> None:
        region = self._memory.open_device().region
        try:
            self.device = self._mover.register_memory(region)
        except MoverError as error:
            raise MoverError(f"staging on the device cannot be registered: {error}") from error

    def _register_tensors(self, group: int) -> None:
        """Register what is not yet of a group's tensors, with all that lies in the same memory."""
        for index, _, _ in self._layout.groups[group].refs:
            if index in self.tensors:
                continue
            begin, end, members = next(span for span in self._spans if index in span.tensors)
            number = self._device.number if self._device.is_accelerator else 0
            try:
                memory = self._mover.register_memory(MemoryRegion(begin, end - begin, self._device.kind, number))
            except MoverError as error:
                raise MoverError(f"its memory cannot be registered: {error}") from error
            for tensor in members:
                self.tensors[tensor] = TensorMemory(memory, self._layout.tensors[tensor].base_address - begin)


def why_not_direct(layout: KVLayout, group: int, device: Device, mover: Mover, min_extent_bytes: int) -> str:
    """Say why a group must be packed, whatever can be registered; empty if it may go direct."""
    alignment = mover.limits.alignment_bytes
    smallest = min(run.length for run in layout.groups[group].refs)
    if device.kind not in mover.memory_kinds:
        return f"{mover.name} cannot touch {device.kind.value}"
    if MemoryKind.DRAM not in mover.memory_kinds:
        return f"{mover.name} cannot touch host memory, where header pages lie"
    if mover.limits.whole_writes:
        return f"{mover.name} writes a chunk in one piece"
    if not mover.limits.tells_short_reads:
        return f"{mover.name} does not tell when a chunk is cut short"
    if not layout.is_group_direct_capable(group, alignment):
        return f"its pages are not aligned to {alignment} bytes"
    if smallest < min_extent_bytes:
        return f"its pieces of {smallest} bytes are smaller than {min_extent_bytes}"
    return ""


class _Span(NamedTuple):
    """A stretch of memory, [begin, end), and the tensors in it."""

    begin: int
    end: int
    tensors: tuple[int, ...]


def _spans(layout: KVLayout) -> list[_Span]:
    """Join tensors that overlap: layers that lie side by side in each block of one allocation are one piece of memory,
    and registered one by one they would count against the device's limits once for each layer.
    """
    spans: list[_Span] = []
    for index in sorted(range(len(layout.tensors)), key=lambda tensor: layout.tensors[tensor].base_address):
        begin = layout.tensors[index].base_address
        end = begin + layout.tensors[index].span_bytes
        if spans and begin < spans[-1].end:
            last = spans.pop()
            spans.append(_Span(last.begin, max(last.end, end), (*last.tensors, index)))
        else:
            spans.append(_Span(begin, end, (index,)))
    return spans
