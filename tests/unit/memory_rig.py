"""A memory tier for tests: KV tensors of every layout, a host slab, a ``MemoryEngine``. Also a packer whose copies are
asynchronous, as on a device, and end when the test says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.chunk.checksum import payload_checksums
from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine import Completion
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.memory_engine import MemoryEngine
from nixl_offload.engine.packer import HostPacker, Parts, Sources, pages_of
from nixl_offload.engine.streams import Device, Fence
from tests.unit.engine_rig import NAMESPACE, SHAPES, Bytes, Driven, Shape, kv_cache, own_shards, rank_memory
from tests.unit.rank_rig import Alone


@dataclass
class SlowFence:
    """A copy on a device: it happens when ``go`` is called."""

    copy: Any
    packer: SlowPacker
    payloads: list[npt.NDArray[np.uint8]]
    over: bool = False
    has_sums: bool = False

    def go(self) -> None:
        self.copy()
        self.over = True

    def done(self) -> bool:
        return self.over or self.packer.released

    def values(self) -> list[npt.NDArray[np.uint64]]:
        assert self.done()
        return payload_checksums(self.payloads)

    def rows(self) -> list[Any]:
        return list(self.payloads)


class SlowPacker(HostPacker):
    """Queues copies as a device does. The test calls ``fences[n].go()``; ``broken`` groups raise instead."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.fences: list[SlowFence] = []
        self.broken: set[int] = set()
        self.released = False
        """For the end of a test: nothing is copied any more, and every fence is done."""

    def gather_many(self, group: int, parts: Parts, fence: Fence) -> SlowFence:
        return self._queue(super().gather_many, group, parts, fence)

    def scatter_many(self, group: int, parts: Sources, fence: Fence) -> Fence:
        return self._queue(super().scatter_many, group, parts, fence)

    def _queue(self, copy: Any, group: int, parts: Any, fence: Fence) -> SlowFence:
        if group in self.broken:
            raise RuntimeError("the device is out of order")
        self.fences.append(SlowFence(lambda: copy(group, parts, fence), self, [payload for _, payload in parts]))
        return self.fences[-1]


@dataclass
class MemoryRig(Driven):
    """Built by ``make``. ``kv`` are the tensors as arrays of shape (NUM_BLOCKS, page)."""

    shape: Shape
    kv: list[npt.NDArray[np.uint8]]
    layout: KVLayout
    host: HostSlab
    engine: Alone
    packer: SlowPacker | None
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
        slow: bool = False,
        seed: int = 1,
        device: Device | None = None,
        cache: tuple[list[torch.Tensor], list[Bytes], KVLayout] | None = None,
        **options: Any,
    ) -> MemoryRig:
        """``host``: the slab of an earlier rig, with its chunks. ``slow``: with a ``SlowPacker``. ``cache``: instead of
        a new ``kv_cache``.
        """
        tensors, kv, layout = cache or kv_cache(SHAPES[shape], seed)
        slot_bytes = max(layout.slot_bytes(group) for group in range(len(layout.groups)))
        if host is None:
            host = HostSlab(memory_bytes=slots * slot_bytes, relay_slots=relay_slots, slot_bytes=slot_bytes)
        packer = None
        if slow:
            packer = SlowPacker([tensor.view(torch.uint8).numpy() for tensor in tensors], pages_of(layout))
        rank = {name: options.pop(name) for name in ("clock", "load_timeout_s") if name in options}
        memory = rank_memory(tensors, layout, host=host, device=device)
        shards = own_shards(layout, namespace)
        make = partial(MemoryEngine, memory=memory, shards=shards, packer=packer, **options)
        engine = Alone(make, **rank)
        return cls(SHAPES[shape], kv, layout, host, engine, packer)

    @property
    def fences(self) -> list[SlowFence]:
        """The copies of a slow packer, in the order of the calls."""
        assert self.packer is not None
        return self.packer.fences

    def memory(self, slot: int) -> npt.NDArray[np.uint8]:
        """The bytes of a slot."""
        return self.host.slot(slot * self.slot_bytes, self.slot_bytes).memory

    def close(self) -> None:
        self.engine.close(1.0)
        self.host.close()
