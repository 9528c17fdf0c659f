"""An engine's scheduler half over a ``World``: the real catalog and tiers, and what a model has to remember of them.

Threading: one thread. What the prober's thread does is waited for, and the index is written only when told: nothing
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
from tests.invariants import check_presence, check_slots
from tests.model.chain_world import RANKS, SLOT_CLASSES, Copy, World, slot_bytes
from tests.unit.shared_rig import namespace_of, options

SLOT_MAX = max(SLOT_CLASSES)
MEMORY_BYTES = RANKS * 2 * 4 * SLOT_MAX
"""The least that a memory tier takes: room for ten chunks."""
FILE_BYTES = 2 << 20
"""The least that a file tier takes: room for some sixteen chunks."""
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

    @property
    def is_exclusive(self) -> bool:
        """Whether memory takes what leaves the GPU, and gives up what the GPU has: everything."""
        return self.setup.chain.gpu_has(Key(b""))

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
            while shared._prober._asking.pending or shared._prober._tasks.pending:
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
            opened = MemoryTier.open(memory, context)
            opened.is_exclusive = self.is_exclusive
            return opened
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


# What must hold: each function fails a test where it does not. ``check_changes`` takes the changes that it compares.


def overlap(one: Location, other: Location) -> bool:
    """Whether two places share bytes."""
    ends = one.offset + one.slot_bytes, other.offset + other.slot_bytes
    return one.tier == other.tier and one.offset < ends[1] and other.offset < ends[0]


def check_everything(engine: Engine, seen: Counter[str]) -> None:
    """What holds at any time."""
    check_changes(engine, seen)
    for position, tier in engine.slots.items():
        check_slab(engine, position, tier)
    for shared in engine.shared:
        check_presence(shared._presence)
    assert engine.catalog.open_tickets == len(engine.tickets)
    check_bounds(engine)
    if not engine.tickets and not engine.catalog.moves.has_pending:
        check_nothing_is_held(engine)


def check_nothing_is_held(engine: Engine) -> None:
    """Nothing is under way and nothing waits."""
    assert not any(engine.catalog.storing_bytes)
    assert not any(engine.catalog.moves.pending)
    for tier in engine.slots.values():
        assert len(tier._index._held) == 0, "a pin or a place is left"
    for shared in engine.shared:
        assert len(shared._presence._held) == 0, "a pin or a reservation is left"


def check_slab(engine: Engine, position: int, tier: SlotTier) -> None:
    """What is READY is whole, and every slot belongs to one chunk, or to nobody for good."""
    index, world = tier._index, engine.world
    check_slots(tier)
    for key, place in engine.ready(position).items():
        assert world.is_whole(key, place) or (key, place.offset) in world.doubtful, "READY and not whole"
    places = {key: index.location(key) for key in index}
    tainted = [place for place in engine.tainted if place.tier == position]
    for place in places.values():
        assert not any(overlap(place, other) for other in tainted), "a chunk lies in a tainted place"
    assert tier.statistics().retired_bytes == sum(place.slot_bytes for place in tainted), "a tainted place is used"
    for ticket in engine.tickets.values():
        for key, *held in zip(ticket.keys, ticket.sources, ticket.targets, strict=True):
            for place in held:
                if place is not None and place.tier == position:
                    assert places.get(key) == place, "a place was given back while a rank may touch it"


def check_bounds(engine: Engine) -> None:
    """Pins are those of open tickets, and what is on its way stays within its bounds."""
    storing, writing_through = Counter[int](), Counter[int]()
    pinned = Counter[tuple[int, Key]]()
    for ticket in engine.tickets.values():
        for key, source, target in zip(ticket.keys, ticket.sources, ticket.targets, strict=True):
            if source is not None:
                pinned[source.tier, key] += 1
            if target is not None and ticket.kind == "store":
                storing[target.tier] += target.slot_bytes
            if target is not None and ticket.kind == "write_through":
                writing_through[target.tier] += target.slot_bytes
    chain = engine.setup.chain
    # One chunk that is larger than the bound may pass.
    assert all(size <= max(engine.setup.store_backlog_bytes, SLOT_MAX) for size in storing.values())
    assert all(size <= max(chain.write_through_backlog_bytes, SLOT_MAX) for size in writing_through.values())
    for position, tier in engine.slots.items():
        for key in tier._index:
            assert tier._index.pins(key) == pinned[position, key], "a wrong pin"


def check_changes(engine: Engine, seen: Counter[str]) -> None:
    """The changes that were told lead to what is READY, each of them something new."""
    for change in engine.catalog.take_changes():
        if change.tier in engine.told:
            told = engine.told[change.tier]
            for key in change.keys:
                assert (key in told) == change.removed, "told of what had not happened"
                (told.discard if change.removed else told.add)(key)
                seen["evicted or dropped"] += change.removed
    for position, told in engine.told.items():
        assert told == set(engine.ready(position)), "a change was not told"


def check_place(engine: Engine, key: Key, place: Location) -> None:
    """A place has been given to an open ticket: it is nobody else's."""
    assert place.slot_bytes == slot_bytes(key)
    if place.tier not in engine.slots:
        return
    assert 0 <= place.offset <= engine.slots[place.tier].capacity_bytes - place.slot_bytes
    assert not any(overlap(place, other) for other in engine.tainted), "a tainted place was given away"
    holders = sum(
        overlap(place, held)
        for ticket in engine.tickets.values()
        for held in (*ticket.sources, *ticket.targets)
        if held is not None
    )
    assert holders == 1, "a place was given away that is in use"


def check_settled(engine: Engine, ticket: Ticket, position: int) -> None:
    """A ticket has just been settled: what became of one of its chunks."""
    key, source, target = ticket.keys[position], ticket.sources[position], ticket.targets[position]
    outcome = ticket.failed.get(position, Outcome.OK)
    if source is not None and outcome in (
        {Outcome.CORRUPT} if ticket.kind == "write_through" else {Outcome.FAILED, Outcome.CORRUPT}
    ):
        assert engine.tiers[source.tier].state(key) is not State.READY, "what is damaged or gone would be read again"
    if target is None:
        return
    state = engine.tiers[target.tier].state(key)
    if outcome is Outcome.OK and not ticket.is_cleared:
        assert state is State.READY
        if target.tier in engine.slots:
            assert engine.ready(target.tier)[key] == target
        elif not engine.world.is_stored(key, target.tier):
            names = [(target.tier, name) for name in engine.world.names(key)]
            assert engine.world.meddled.intersection(names), "READY before every rank had stored it"
    elif target.tier in engine.slots or outcome is not Outcome.OK:
        assert state is None
