"""Messages between the scheduler's half and the ranks, beside vLLM's own.

Threading: plain values. Picklable by vLLM's own transport (process to process on one machine, never from storage).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, SupportsIndex

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import LoadStoreSpec

from nixl_offload.catalog.catalog import LoadTicket, MoveTicket, StoreTicket
from nixl_offload.chunk.shards import ShardPlan
from nixl_offload.engine import TierStatus, Work
from nixl_offload.tiers.base import Place
from nixl_offload.types import Outcome, worst
from nixl_offload.vllm.adapters import AdapterName, AdapterUse


@dataclass
class RankGeometry(KVConnectorHandshakeMetadata):
    """What one rank has allocated and loaded. Sent once: in vLLM's handshake, or with its first report."""

    rank: int
    slot_bytes: tuple[int, ...]
    """Bytes of each shard that it holds (header page, payload, padding), in the order of ``ShardPlan.shards_of``; 0: it
    has no layer of the group.
    """
    digest: str
    """``RankShards.digest``."""
    plan: ShardPlan
    """How chunks are cut into shards."""
    attention_backends: tuple[str, ...] = ()
    """Names of the backends that its layers really use, sorted. They decide the layout inside a block."""
    machine: str = ""
    """Equal for ranks that open the same files by the same paths (``hardware.machine``); "": not known."""
    weights: str | None = None
    """Digest of the weights that it has loaded; None: not known."""
    sources: tuple[str, ...] = ()
    """Sources of its models' weights beside their own files (``rank_identity.sources_of``)."""


@dataclass
class TicketSpec(LoadStoreSpec):
    """The storage side of vLLM's job: the catalog's ticket."""

    ticket: StoreTicket | LoadTicket
    adapter: AdapterUse | None = None
    """The LoRA adapter that its keys stand for, if the request has one."""


@dataclass
class StepMetadata(OffloadingConnectorMetadata):
    """vLLM's message to the ranks in a step, with ours beside its jobs."""

    moves: list[MoveTicket] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)
    """Tiers to open, by position in the config, and where they are. Each is sent once, before any job that needs it."""
    opening: int = 0
    """Number of the opening that ``places`` belongs to. Tiers of an earlier opening are closed first."""
    weights_question: int = 0
    """Number of a question to each rank: which weights has it loaded? 0: no question."""


class LoadSample(NamedTuple):
    """How long a tier took on one rank for its part of a load."""

    tier: int
    seconds: float
    failed: bool
    """Whether some of it did not come."""
    ticket: int


@dataclass
class TicketReport:
    """The reports of ranks on one ticket: how many have finished, and which positions failed on any of them."""

    ranks: int = 1
    failures: dict[int, Outcome] = field(default_factory=dict)

    def merge(self, other: TicketReport) -> TicketReport:
        """Combine two reports: the worst outcome of each chunk counts."""
        failures = dict(self.failures)
        for position, outcome in other.failures.items():
            failures[position] = worst(outcome, failures.get(position, Outcome.OK))
        return TicketReport(self.ranks + other.ranks, failures)


class WeightsAnswer(NamedTuple):
    """A rank's answer to a question for its weights."""

    question: int
    digest: str | None
    """None: the rank could not make one."""


class RankStatus(NamedTuple):
    """The tiers that a rank has open, by position in the config. First sent when it has opened a tier or failed to."""

    open: frozenset[int]
    """Jobs for all other tiers fail."""
    failed: frozenset[int] = frozenset()
    """Tiers that it could not open. It tries again."""
    tiers: tuple[TierStatus, ...] = ()
    """By position; empty where the rank has no layer to store."""
    opening: int = 0
    """Number of the opening of the tiers that this status is about."""


@dataclass
class WorkerReport(OffloadingWorkerMetadata):
    """vLLM's completion message, extended by the failure channel it lacks."""

    tickets: dict[int, TicketReport] = field(default_factory=dict)
    loads: list[LoadSample] = field(default_factory=list)
    """For the estimates of the tiers' speed."""
    work: Work | None = None
    """What was moved and what failed, added up over the ranks; for metrics. None: nothing."""
    ranks: dict[int, RankStatus] = field(default_factory=dict)
    """By rank: its status, if that has changed."""
    geometries: dict[int, RankGeometry] = field(default_factory=dict)
    """By rank: its geometry, if no handshake has sent it."""
    adapters: dict[int, dict[AdapterName, tuple[str | None, ...]]] = field(default_factory=dict)
    """By rank: the LoRA adapters that it has loaded, with a digest for each time it did."""
    weights: dict[int, WeightsAnswer] = field(default_factory=dict)
    """By rank: its answer to a question for its weights."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge another rank's report of the same step into a new one."""
        if self is NOTHING or other is NOTHING:
            return other if self is NOTHING else self
        base = super().aggregate(other)
        assert isinstance(base, OffloadingWorkerMetadata)
        merged = replace(self, completed_jobs=base.completed_jobs, transfer_stats=base.transfer_stats)
        if isinstance(other, WorkerReport):
            for by_rank in ("ranks", "geometries", "adapters", "weights"):
                setattr(merged, by_rank, getattr(self, by_rank) | getattr(other, by_rank))
            merged.loads = self.loads + other.loads
            merged.work = self.work.merge(other.work) if self.work and other.work else self.work or other.work
            both = self.tickets.keys() & other.tickets.keys()
            combined = {ticket: self.tickets[ticket].merge(other.tickets[ticket]) for ticket in both}
            merged.tickets = self.tickets | other.tickets | combined
        return merged

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle ``NOTHING`` by its name, so that it is the same object in the scheduler's process, and short."""
        return "NOTHING" if self is NOTHING else super().__reduce_ex__(protocol)


NOTHING: Final = WorkerReport()
"""The empty report, which ranks send in most steps. Never changed."""
