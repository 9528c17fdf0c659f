"""Extensions of vLLM's worker: one damages what the memory tier holds; one takes bytes of a KV cache group out to a
slab and back, through the rank's worker. Bytes are written and compared through what vLLM's layers see as their KV
caches, not through what the worker makes of them.

Threading: run in the worker's thread, between steps.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Final

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.kv_cache_interface import group_kernel_blocks
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from nixl_offload.catalog.catalog import LoadTicket, StoreTicket
from nixl_offload.chunk.header import HEADER_BYTES, decode_header
from nixl_offload.errors import FormatError
from nixl_offload.types import PAGE_BYTES, Key, Location, align_up
from nixl_offload.vllm.messages import TicketSpec
from nixl_offload.vllm.worker import NixlOffloadingWorker
from tests.vllm.poison import PoisonExtension

CHUNKS: Final = 2
"""Of a group, that go out and back."""
DEADLINE_S: Final = 60.0
_MARK: Final = 0x5A
"""What lies in blocks that a refused load must leave alone."""


class FamilyExtension(PoisonExtension):
    """Mixed into vLLM's worker class."""

    rank: int

    def flip_memory(self, groups: list[int] | None, rank: int | None = None) -> int:
        """Flip a bit in the payload of each chunk of these KV cache groups, None: of all; return how many. ``rank``: on
        this rank alone.
        """
        connector: Any = get_kv_transfer_group()
        memory, found = connector.connector_worker.rank_worker._host._memory, 0
        for offset in range(0, len(memory) - HEADER_BYTES, PAGE_BYTES) if rank in (None, self.rank) else ():
            with contextlib.suppress(FormatError):
                header = decode_header(memory[offset : offset + HEADER_BYTES].tobytes())
                if groups is None or header.group in groups:
                    memory[offset + HEADER_BYTES + header.payload_bytes - 1] ^= 1
                    found += 1
        return found


class RoundTripExtension(FamilyExtension):
    """Mixed into vLLM's worker class. Nothing else may be stored, loaded or computed."""

    def round_trip(self, group: int) -> tuple[list[int], int, list[str]]:
        """Fill the KV cache with noise, store chunks of a group and load them into other blocks. Returns where the
        chunks lie in the slab, how many bytes each has, and what is wrong.
        """
        worker = self._rank_worker()
        source, target = self._blocks(group)
        for number, cache in enumerate(self._storages()):
            noise = torch.Generator().manual_seed(1000 * group + number)
            cache.copy_(torch.randint(0, 256, cache.shape, dtype=torch.uint8, generator=noise))
        before = {name: [part.clone() for part in parts] for name, parts in self._views().items()}
        keys, locations = self._chunks(group)
        worker.submit_store(1, self._job(group, source), TicketSpec(StoreTicket(1, keys, locations)))
        wrong = [f"a store ended {outcome}" for outcome in self._outcomes() if outcome != "ok"]
        wrong += [f"a load ended {outcome}" for outcome in self._load(group, target) if outcome != "ok"]
        after, mine = self._views(), self._layers(group)
        others = [block for block in range(len(before[mine[0]][0])) if block not in target]
        for name, parts in before.items():
            for now, was in zip(after[name], parts, strict=True):
                if not torch.equal(now[others], was[others]):
                    wrong.append(f"{name}: other blocks have changed")
                if name in mine and not torch.equal(now[target], was[source]):
                    wrong.append(f"{name}: other bytes")
        chunk_bytes = worker.layout.groups[group].block_bytes * worker.layout.blocks_per_chunk
        return [location.offset for location in locations], chunk_bytes, wrong

    def load_damaged(self, group: int) -> list[str]:
        """Load the chunks again, which have been damaged meanwhile. Returns what is wrong."""
        _, target = self._blocks(group)
        for cache in self._storages():
            cache.fill_(_MARK)
        wrong = [f"a load ended {outcome}" for outcome in self._load(group, target) if outcome != "corrupt"]
        return wrong + ["blocks have changed" for cache in self._storages() if not bool((cache == _MARK).all())]

    def _load(self, group: int, target: list[int]) -> list[str]:
        ticket = TicketSpec(LoadTicket(2, *self._chunks(group)))
        self._rank_worker().submit_load(2, ticket, self._job(group, target))
        return self._outcomes()

    def _rank_worker(self) -> NixlOffloadingWorker:
        connector: Any = get_kv_transfer_group()
        worker = connector.connector_worker.rank_worker
        assert isinstance(worker, NixlOffloadingWorker)
        return worker

    def _outcomes(self) -> list[str]:
        until_s = time.monotonic() + DEADLINE_S
        while not (jobs := self._rank_worker().engine.finished()):
            assert time.monotonic() < until_s, "the job does not end"
            time.sleep(0.001)
        [job] = jobs
        return [outcome.value for outcome in job.outcomes]

    def _blocks(self, group: int) -> tuple[list[int], list[int]]:
        """Return blocks to store and to load into, neither in order. Block 0 is vLLM's null block."""
        count = CHUNKS * self._rank_worker().layout.blocks_per_chunk
        return list(range(2 * count, 0, -2)), list(range(1, 2 * count, 2))

    def _job(self, group: int, blocks: list[int]) -> GPULoadStoreSpec:
        groups = len(self._rank_worker().layout.groups)
        return GPULoadStoreSpec(
            blocks, group_sizes=[len(blocks) if at == group else 0 for at in range(groups)], block_indices=[0] * groups
        )

    def _chunks(self, group: int) -> tuple[tuple[Key, ...], tuple[Location, ...]]:
        worker = self._rank_worker()
        sizes = worker.geometry().slot_bytes
        step = align_up(max(sizes), PAGE_BYTES)
        ends = worker._chunks._group_ids[group].to_bytes(4, "big")
        return (
            tuple(Key(number.to_bytes(32, "big") + ends) for number in range(CHUNKS)),
            tuple(Location(0, (group * CHUNKS + number) * step, sizes[group]) for number in range(CHUNKS)),
        )

    def _layers(self, group: int) -> list[str]:
        names: list[str] = self.model_runner.kv_cache_config.kv_cache_groups[group].layer_names
        return names

    def _views(self) -> dict[str, list[torch.Tensor]]:
        """Return what each layer sees as its KV cache, block by block, as bytes."""
        runner, found = self.model_runner, {}
        layers = runner.compilation_config.static_forward_context
        for group in range(len(runner.kv_cache_config.kv_cache_groups)):
            for name in self._layers(group):
                cache = layers[name].kv_cache
                parts = cache if isinstance(cache, tuple | list) else [cache]
                blocks = [group_kernel_blocks(part, runner.kv_cache_config.num_blocks) for part in parts]
                found[name] = [part.reshape(len(part), -1).contiguous().view(torch.uint8) for part in blocks]
        return found

    def _storages(self) -> list[torch.Tensor]:
        """Return all memory of the KV cache, each piece once, as bytes."""
        found = {}
        for tensor in self._rank_worker()._tensors:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = torch.tensor([], dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
        return list(found.values())
