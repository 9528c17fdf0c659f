"""A rank's half, driven as vLLM drives it but without a model: real tensors, real tiers, the mover ``auto`` finds.

Threading: the caller's thread. Ownership: ``Rig`` owns the worker; the test shuts it down.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from nixl_offload.catalog.catalog import LoadTicket, StoreTicket
from nixl_offload.engine import Completion
from nixl_offload.tiers.base import Place
from nixl_offload.tiers.slab.file import SlabPlace
from nixl_offload.tiers.slots import SlotPlaces
from nixl_offload.types import Key, Location, Outcome
from nixl_offload.vllm.messages import RankStatus, TicketSpec
from nixl_offload.vllm.rank_shards import leave_uncut
from nixl_offload.vllm.worker import NixlOffloadingWorker
from tests.vllm.manager_rig import config_of, offloading_config

DEADLINE_S = 20.0
SLOTS = 64
Shape = tuple[int, int, int]
"""Layers, bytes of a block in each, and blocks of a chunk."""
SMALL: Shape = (3, 8192, 4)


class Rig:
    """One rank with some layers of KV, and a slab or memory of 64 slots."""

    def __init__(
        self, directory: Path, *further: dict[str, Any], kind: str = "slab", shape: Shape = SMALL, is_open: bool = True
    ) -> None:
        """``kind``: of the nearest tier. ``further``: farther ones."""
        layers, page_bytes, blocks_per_chunk = shape
        self.tensors = [torch.zeros((SLOTS * blocks_per_chunk, page_bytes), dtype=torch.int8) for _ in range(layers)]
        nearest = {"kind": kind, "capacity": "64MiB"} | ({"path": str(directory)} if kind == "slab" else {})
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, page_bytes) for tensor in self.tensors],
            [[CanonicalKVCacheRef(index, page_bytes) for index in range(layers)]],
        )
        offloading = offloading_config(events=False, chunk_blocks=blocks_per_chunk)
        config = config_of(nearest, *further, staging="8MiB")
        shards = leave_uncut(caches, blocks_per_chunk, "digest", 1)
        self.worker = NixlOffloadingWorker(offloading, config, self.tensors, shards)
        (self.slot_bytes,) = self.worker.geometry().slot_bytes
        slots = SlotPlaces(SLOTS * self.slot_bytes, 4 * self.slot_bytes)
        self.place = SlabPlace(b"r" * 32, str(directory), slots) if kind == "slab" else Place(b"r" * 32)
        if is_open:
            assert self.open(self.place).open

    def open(self, *places: Place) -> RankStatus:
        """Open the tiers and wait for what the rank says of it."""
        self.worker.open(dict(enumerate(places)))
        return self.status()

    def status(self) -> RankStatus:
        """Wait until the rank says how it stands."""
        return self._until(self.worker.take_status)[0]

    def fill(self, block: int, seed: int) -> None:
        """Write bytes that are unique to this block and seed."""
        generator = torch.Generator().manual_seed(seed * 1000 + block)
        for tensor in self.tensors:
            tensor[block] = torch.randint(-128, 128, tensor[block].shape, dtype=torch.int8, generator=generator)

    def block(self, block: int) -> bytes:
        """All layers of one block."""
        return b"".join(tensor[block].numpy().tobytes() for tensor in self.tensors)

    def to_store(self, *slots: int) -> TicketSpec:
        """Chunks named after their slots."""
        keys = tuple(Key(slot.to_bytes(32, "big") + bytes(4)) for slot in slots)
        locations = tuple(Location(0, slot * self.slot_bytes, self.slot_bytes) for slot in slots)
        return TicketSpec(StoreTicket(1, keys, locations))

    def to_load(self, *slots: int) -> TicketSpec:
        """The same chunks."""
        ticket = self.to_store(*slots).ticket
        return TicketSpec(LoadTicket(1, ticket.keys, ticket.locations))

    def results(self, count: int = 1) -> list[Completion]:
        """Wait for jobs as vLLM does: ask again and again."""
        found: list[Completion] = []
        while len(found) < count:
            found += self._until(self.worker.engine.finished)
        return found

    def _until(self, ask: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while not (told := ask()):
            assert time.monotonic() < deadline, "the rank says nothing"
            time.sleep(0.001)
        return told

    def store(self, blocks: list[int], *slots: int) -> None:
        """Store whole chunks and wait."""
        self.worker.submit_store(1, gpu(blocks, 0), self.to_store(*slots))
        (item,) = self.results()
        assert set(item.outcomes) == {Outcome.OK}

    def load(self, blocks: list[int], *slots: int) -> tuple[Outcome, ...]:
        """Load whole chunks and wait; return what became of each."""
        self.worker.submit_load(1, self.to_load(*slots), gpu(blocks, 0))
        (item,) = self.results()
        return item.outcomes


def gpu(blocks: list[int], first: int) -> GPULoadStoreSpec:
    """``first``: the request's number of its first block."""
    return GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[first])
