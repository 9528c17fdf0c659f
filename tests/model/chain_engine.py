"""An engine's scheduler half over a ``World``: the real catalog and tiers, and what a model has to remember of them.

Threading: one thread. What the prober's thread does is waited for, and the journal writes only when told: nothing
here depends on timing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from nixl_offload.catalog.catalog import Catalog
from nixl_offload.catalog.moves import ChainOptions
from nixl_offload.config import SlabConfig
from nixl_offload.config.schema import MemoryConfig
from nixl_offload.index import State
from nixl_offload.tiers.shared.tier import SharedTier
from nixl_offload.tiers.slab.tier import SlabTier
from nixl_offload.tiers.slot_tier import MemoryTier, SlotTier
from nixl_offload.types import Key, Location, Outcome
from tests.contexts import context_of
from tests.model.chain_world import RANKS, SLOT_CLASSES, Copy, World, slot_bytes
from tests.unit.shared_rig import namespace_of, options

SLOT_MAX = max(SLOT_CLASSES)
MEMORY_BYTES = RANKS * 2 * 4 * SLOT_MAX
"""The least that a memory tier takes: room for ten chunks."""
FILE_BYTES = 38 << 20
"""The least that a file tier takes, most of which is promised to its index: room for ten chunks, too."""
NAMESPACE = namespace_of(RANKS, sizes=[(size,) * RANKS for size in SLOT_CLASSES])


@dataclass(frozen=True, slots=True)
class Setup:
    """What does not change over restarts."""

    kinds: tuple[str, ...]
    """Of the tiers, in order: memory, slab, shared, shared."""
    chain: ChainOptions
    store_backlog_bytes: int
    store_after: int


@dataclass(slots=True, eq=False)
class Ticket:
    """What the model remembers of an open ticket. Aligned by position; None is the GPU, or nowhere."""

    kind: str
    keys: tuple[Key, ...]
    sources: tuple[Location | None, ...]
    targets: tuple[Location | None, ...]
    ranks_left: int = RANKS
    failed: dict[int, Outcome] = field(default_factory=dict)
    """The worst that ranks have told."""
    is_cleared: bool = False
    """The cache was reset meanwhile: what it stores is not to be served."""


@dataclass(slots=True, eq=False)
class Job:
    """One rank's part in a ticket."""

    rank: int
    kind: str
    ticket: int
    copies: list[Copy]
    outcomes: list[Outcome] | None = None
    """As the rank will report them; None: not done."""
    load: Job | None = None
    """Of a promotion: the load that reads it."""


class Engine:
    """From its start to its end. ``path``: what outlives it on disk."""

    def __init__(self, setup: Setup, world: World, path: Path) -> None:
        self.setup = setup
        self.world = world
        self.path = path
        self.tiers = [self._open(position, kind) for position, kind in enumerate(setup.kinds)]
        self.slots = {position: tier for position, tier in enumerate(self.tiers) if isinstance(tier, SlotTier)}
        self.file = next((tier for tier in self.tiers if isinstance(tier, SlabTier)), None)
        self.shared = [tier for tier in self.tiers if isinstance(tier, SharedTier)]
        for position, tier in self.slots.items():
            world.begin_slab(position, tier.capacity_bytes)
        self.catalog = Catalog(
            self.tiers,
            world_size=RANKS,
            slot_bytes=slot_bytes,
            store_backlog_bytes=setup.store_backlog_bytes,
            chain=setup.chain,
            store_after=setup.store_after,
        )
        self.tickets: dict[int, Ticket] = {}
        self.jobs: list[Job] = []
        """What ranks have to do or to tell, oldest first."""
        self.offers: Counter[Key] = Counter()
        self.tainted: list[Location] = []
        self.told = {position: set(self.ready(position)) for position in self.slots}
        """Per tier what is READY, by the changes that the catalog told."""

    def ready(self, tier: int) -> dict[Key, Location]:
        """Return what a slab's index calls READY, and where."""
        index = self.slots[tier]._index
        return {key: index.location(key) for key in index if index.state(key) is State.READY}

    def nearest(self, key: Key, allowed: Collection[int] | None = None) -> int | None:
        """Return the first tier, among those allowed, that says READY; one that is out of use only if no other does."""
        ready = [
            position
            for position, tier in enumerate(self.tiers)
            if (allowed is None or position in allowed) and tier.state(key) is State.READY
        ]
        return min(ready, key=lambda position: not self.tiers[position].in_use, default=None)

    def wait_for_threads(self) -> None:
        """Let the prober finish what it was asked to do, and the slab what it looks at."""
        for shared in self.shared:
            while shared._prober.is_busy:
                time.sleep(0)
        while self.file is not None and self.file._looks.pending:
            time.sleep(0)

    def close(self) -> None:
        """Close the tiers. Idempotent."""
        for tier in self.tiers:
            tier.close()

    def _open(self, position: int, kind: str) -> MemoryTier | SlabTier | SharedTier:
        world, context = self.world, context_of(NAMESPACE, SLOT_CLASSES, position=position, world_size=RANKS)
        if kind == "memory":
            memory = MemoryConfig.model_validate({"kind": kind, "capacity": MEMORY_BYTES})
            return MemoryTier.open(memory, context)
        if kind == "slab":
            file = SlabConfig.model_validate({"kind": kind, "path": str(self.path), "capacity": FILE_BYTES})
            tier = SlabTier.open(file, context)
            tier._durable._batch_delay_s = 3600.0  # so that only flush and close write
            return tier
        return SharedTier(
            position,
            world.buckets[position],
            NAMESPACE,
            lookup=options(timeout="30s"),
            max_keys=1000,
            ttl_s=None,
            name="Bucket",
            threads=1,
            clock=world.now,
            wall=world.wall,
        )
