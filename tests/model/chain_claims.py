"""What must hold of a chain of tiers: each function fails a test where it does not, and changes nothing.

``check_changes`` alone takes something: the changes that it compares.
"""

from __future__ import annotations

from collections import Counter

from nixl_offload.index import State
from nixl_offload.tiers.slot_tier import SlotTier
from nixl_offload.types import Key, Location, Outcome
from tests.model.chain_engine import SLOT_MAX, Engine, Ticket
from tests.model.chain_world import slot_bytes


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
        shared._presence.check()
    assert engine.catalog.open_tickets == len(engine.tickets)
    check_bounds(engine, seen)
    if not engine.tickets and not engine.catalog.moves.has_pending:
        check_nothing_is_held(engine)


def check_nothing_is_held(engine: Engine) -> None:
    """Nothing is under way and nothing waits."""
    assert not any(engine.catalog.storing_bytes)
    assert engine.catalog.moves.unsaved_bytes == 0
    assert not any(engine.catalog.moves.pending)
    for tier in engine.slots.values():
        assert tier._index.held == 0, "a pin or a place is left"
    for shared in engine.shared:
        assert shared._presence.held == 0, "a pin or a reservation is left"


def check_slab(engine: Engine, position: int, tier: SlotTier) -> None:
    """What is READY is whole, and every slot belongs to one chunk, or to nobody for good."""
    index, world = tier._index, engine.world
    tier.check()
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


def check_bounds(engine: Engine, seen: Counter[str]) -> None:
    """Pins are those of open tickets and of unsaved chunks; these, and what is on its way, stay within their bounds."""
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
    unsaved_bytes = 0
    for position, tier in engine.slots.items():
        for key in tier._index:
            surplus = tier._index.pins(key) - pinned[position, key]
            assert surplus == 0 or (surplus == 1 and position == chain.memory), "a wrong pin"
            unsaved_bytes += surplus * slot_bytes(key)
    assert unsaved_bytes <= chain.unsaved_limit_bytes
    assert unsaved_bytes == engine.catalog.moves.unsaved_bytes
    seen["steps with unsaved chunks pinned"] += unsaved_bytes > 0


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
