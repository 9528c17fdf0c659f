"""What a rank has moved and what failed of it, added up by tier between two reports; and how its tiers stand.

Threading: plain values, which travel to the scheduler's half for metrics. ``jobs.JobTable`` adds up under its lock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from nixl_offload.engine.records import Share
from nixl_offload.engine.states import Operation

MAX_SAMPLES = 256
"""Durations per tier and operation between two reports; more are not reported."""


class Act(NamedTuple):
    """An operation of one tier. Tiers are positions in the config."""

    operation: Operation
    tier: int


class Failure(NamedTuple):
    """What did not end well: of which operation, as what ``types.Outcome``, and why in one word."""

    operation: Operation
    tier: int
    outcome: str
    cause: str


@dataclass(slots=True)
class Work:
    """What was done since the last report, on one rank or several."""

    payload_bytes: Counter[Act] = field(default_factory=Counter)
    """Of shards that are OK; without headers and padding."""
    seconds: dict[Act, list[float]] = field(default_factory=dict)
    """From submit to the last shard, waiting included: one number for each job of which something is OK."""
    failures: Counter[Failure] = field(default_factory=Counter)
    """Shards."""

    def __bool__(self) -> bool:
        return bool(self.payload_bytes or self.failures)

    def add(self, share: Share) -> None:
        """Count what one tier has done of a job."""
        if share.bytes_moved:
            act = Act(share.operation, share.tier)
            self.payload_bytes[act] += share.bytes_moved
            samples = self.seconds.setdefault(act, [])
            if len(samples) < MAX_SAMPLES:
                samples.append(share.seconds)
        for (outcome, cause), shards in share.failures.items():
            self.failures[Failure(share.operation, share.tier, outcome.value, cause)] += shards

    def merge(self, other: Work) -> Work:
        """Add two reports up, into a new one."""
        seconds = {act: list(samples) for act, samples in self.seconds.items()}
        for act, samples in other.seconds.items():
            seconds.setdefault(act, []).extend(samples)
        return Work(self.payload_bytes + other.payload_bytes, seconds, self.failures + other.failures)


class Waiting(NamedTuple):
    """Payload bytes that wait for their turn in one tier on one rank; what is under way is no part of it."""

    load_bytes: int = 0
    store_bytes: int = 0
    move_bytes: int = 0


class TierAccess(NamedTuple):
    """What one tier runs on, on one rank."""

    mover: str
    paths: tuple[str, ...]
    """Between KV blocks and the tier, of all KV groups: ``direct``, ``device``, ``host``."""


class TierStatus(NamedTuple):
    """How one tier stands on one rank."""

    waiting: Waiting = Waiting()
    trouble: str = ""
    """Why it is left alone now, in a word; empty while all is well."""
    access: TierAccess | None = None
    """None: the tier cannot be used on this rank."""
