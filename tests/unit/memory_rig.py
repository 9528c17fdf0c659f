"""A memory tier for tests: KV tensors of every layout, a host slab, an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine import Completion, MemoryPaths, TierEngine, TierSetup
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.streams import Device
from tests.unit.engine_rig import NAMESPACE, SHAPES, Bytes, Driven, Shape, kv_cache, own_shards, rank_memory
from tests.unit.rank_rig import Alone


@dataclass
class MemoryRig(Driven):
    """Built by ``make``. ``kv`` are the tensors as arrays of shape (NUM_BLOCKS, page)."""

    shape: Shape
    kv: list[npt.NDArray[np.uint8]]
    layout: KVLayout
    host: HostSlab
    engine: Alone
    results: dict[int, Completion] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        shape: str = "per_layer",
        *,
        slots: int = 16,
        relay_slots: int = 1,
        namespace: bytes = NAMESPACE,
        host: HostSlab | None = None,
        seed: int = 1,
        device: Device | None = None,
        cache: tuple[list[torch.Tensor], list[Bytes], KVLayout] | None = None,
        **options: Any,
    ) -> MemoryRig:
        """``host``: the slab of an earlier rig, with its chunks. ``cache``: instead of a new ``kv_cache``."""
        tensors, kv, layout = cache or kv_cache(SHAPES[shape], seed)
        slot_bytes = max(layout.slot_bytes(group) for group in range(len(layout.groups)))
        if host is None:
            host = HostSlab(memory_bytes=slots * slot_bytes, relay_slots=relay_slots, slot_bytes=slot_bytes)
        rank = {name: options.pop(name) for name in ("clock", "load_timeout_s") if name in options}
        memory = rank_memory(tensors, layout, host=host, device=device)
        shards = own_shards(layout, namespace)
        engine = Alone(lambda table: TierEngine(MemoryPaths(TierSetup(table, memory, shards, **options))), **rank)
        return cls(SHAPES[shape], kv, layout, host, engine)

    def memory(self, slot: int) -> npt.NDArray[np.uint8]:
        """The bytes of a slot."""
        return self.host.slot(slot * self.slot_bytes, self.slot_bytes).memory

    def close(self) -> None:
        self.engine.close(1.0)
        self.host.close()
