"""What travels between the scheduler's half and the ranks, beside vLLM's own messages.

Threading: plain values. Picklable by vLLM's own transport (process to process on one machine, never from storage).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_offload.base import LoadStoreSpec

from nixl_offload.tiers.file import SlabPlace
from nixl_offload.tiers.shared import SharedPlace
from nixl_offload.types import Key, Location, Outcome

Place = SlabPlace | SharedPlace
"""Where the ranks find what a tier keeps."""


@dataclass
class RankGeometry(KVConnectorHandshakeMetadata):
    """What one rank needs per chunk; sent once, before the first step."""

    slot_bytes: tuple[int, ...]
    """Bytes of a slot (header page and payload) per KV cache group."""
    attention_backends: tuple[str, ...] = ()
    """Names of the backends that its layers really use, sorted: they decide what lies where inside a block."""


@dataclass
class ChunkSpec(LoadStoreSpec):
    """The storage side of a job: which chunks, and where."""

    ticket: int
    keys: tuple[Key, ...]
    locations: tuple[Location, ...]
    places: tuple[Place, ...]
    """One for each tier of the config. Empty only when nothing can be loaded or stored: every chunk fails softly."""


@dataclass
class TicketReport:
    """What ranks say of one ticket: how many have finished, and which positions failed on any of them."""

    ranks: int = 1
    failures: dict[int, Outcome] = field(default_factory=dict)

    def merge(self, other: TicketReport) -> TicketReport:
        """Combine two ranks' words; CORRUPT outweighs the rest."""
        failures = dict(self.failures)
        for position, outcome in other.failures.items():
            if failures.get(position) is not Outcome.CORRUPT:
                failures[position] = outcome
        return TicketReport(self.ranks + other.ranks, failures)


@dataclass
class WorkerReport(OffloadingWorkerMetadata):
    """vLLM's completion message, extended by the failure channel it lacks."""

    tickets: dict[int, TicketReport] = field(default_factory=dict)

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.completed_jobs and not self.tickets

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge another rank's report of the same step into a new one."""
        base = super().aggregate(other)
        assert isinstance(base, OffloadingWorkerMetadata)
        merged = WorkerReport(base.completed_jobs, base.transfer_stats, dict(self.tickets))
        if isinstance(other, WorkerReport):
            for number, report in other.tickets.items():
                ours = merged.tickets.get(number)
                merged.tickets[number] = report if ours is None else ours.merge(report)
        return merged
