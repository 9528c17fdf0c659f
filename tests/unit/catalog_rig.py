"""The rig of tests of the catalog over several tiers: memory, slab and bucket with real indexes, but no bytes.

The bucket's tier is real too; its store is a dictionary (see ``shared_rig``).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nixl_offload.catalog.catalog import Catalog, MoveTicket, Settled, StoreTicket
from nixl_offload.catalog.moves import ChainOptions
from nixl_offload.index import DurableIndex, State
from nixl_offload.tiers.base import Place
from nixl_offload.tiers.shared.tier import SharedTier
from nixl_offload.tiers.slab.file import SlabPlace
from nixl_offload.tiers.slab.tier import SlabTier
from nixl_offload.tiers.slot_tier import MemoryTier, SlotTier
from nixl_offload.tiers.slots import SlotAllocator, SlotPlaces
from nixl_offload.types import Key, Outcome
from tests.invariants import check_slots
from tests.unit.shared_rig import MemoryStore, namespace_of, options

SLOT = 8192
MEMORY, FILE, BUCKET = 0, 1, 2


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big") + bytes(4))


def keys(*numbers: int) -> list[Key]:
    return [key(number) for number in numbers]


class Chain:
    """A catalog over memory, slab and bucket, driven as by the scheduler. ``file_slots`` 0: no slab.
    ``large``: chunks that take two slots.
    """

    def __init__(
        self,
        path: Path,
        *,
        memory_slots: int = 8,
        file_slots: int = 64,
        buckets: int = 0,
        world_size: int = 1,
        exclusive: bool = False,
        write_through_backlog_slots: int = 1000,
        store_backlog_slots: int = 1000,
        store_after: int = 1,
        large: Collection[int] = (),
    ) -> None:
        self._slot_sizes = [SLOT, 2 * SLOT] if large else [SLOT]
        self.now_s = 100.0
        self.world_size = world_size
        self.store_of_bucket = MemoryStore()
        memory = self._memory(memory_slots)
        memory.is_exclusive = exclusive
        self.tiers: list[MemoryTier | SlabTier | SharedTier] = [memory]
        if file_slots:
            self.tiers.append(self._file(path, file_slots))
        for _ in range(buckets):
            self.tiers.append(self._bucket(len(self.tiers)))
        self.catalog = Catalog(
            self.tiers,
            world_size=world_size,
            slot_bytes=lambda key: self._slot_sizes[key in keys(*large)],
            store_backlog_bytes=store_backlog_slots * SLOT,
            chain=ChainOptions(
                write_through_backlog_bytes=write_through_backlog_slots * SLOT,
                memory=MEMORY,
                gpu_has=lambda _: exclusive,
            ),
            store_after=store_after,
        )
        self.written: Counter[int] = Counter()
        """Chunks written through, by target."""
        self.open: dict[int, int] = {}
        """Ticket -> number of keys, for tickets that no rank has reported yet."""

    def _memory(self, slots: int) -> MemoryTier:
        return MemoryTier(MEMORY, Place(b"n" * 32), self._allocator(slots))

    def _file(self, path: Path, slots: int) -> SlabTier:
        place = SlabPlace(b"n" * 32, str(path), SlotPlaces(slots * SLOT, self._slot_sizes[-1]))
        durable = DurableIndex(str(path / "index.table"), self._slot_sizes[0], slots * SLOT // self._slot_sizes[0], {})
        return SlabTier(FILE, place, self._allocator(slots), durable)

    def _allocator(self, slots: int) -> SlotAllocator:
        return SlotAllocator(slots * SLOT, self._slot_sizes, extent_bytes=self._slot_sizes[-1])

    def _bucket(self, position: int) -> SharedTier:
        return SharedTier(
            position,
            self.store_of_bucket,
            namespace_of(),
            lookup=options(),
            ttl_s=None,
            name="Bucket under test",
            threads=1,
            clock=lambda: self.now_s,
        )

    # What vLLM does

    def reserve(self, *numbers: int) -> StoreTicket | None:
        grant = self.catalog.reserve(keys(*numbers), self.now_s)
        if grant is not None:
            self.open[grant.ticket] = len(grant.keys)
        return grant

    def store(self, *numbers: int) -> Settled:
        """Store all of ``numbers``."""
        grant = self.reserve(*numbers)
        assert grant is not None
        assert grant.keys == tuple(keys(*numbers))
        return self.report(grant.ticket)

    def load(self, *numbers: int, failed: Mapping[int, Outcome] | None = None, promoted: Outcome = Outcome.OK) -> None:
        """Load ``numbers``, and end all their promotions with the same outcome."""
        grant = self.catalog.prepare_load(keys(*numbers), self.now_s)
        self.report(grant.ticket, failed)
        if grant.promotion_ticket:
            count = sum(slot is not None for slot in grant.promotion_slots)
            self.report(
                grant.promotion_ticket, dict.fromkeys(range(count), promoted) if promoted is not Outcome.OK else {}
            )

    def begin(self) -> list[MoveTicket]:
        self.catalog.on_step(self.now_s)
        grants = self.catalog.begin_moves(self.now_s)
        self.open.update((grant.ticket, len(grant.keys)) for grant in grants)
        return grants

    def report(self, ticket: int, failed: Mapping[int, Outcome] | None = None) -> Settled:
        """Report the same outcome of a ticket from all ranks."""
        self.open.pop(ticket, None)
        settled = self.catalog.report(ticket, self.world_size, failed or {}, self.now_s)
        assert settled is not None
        if settled.kind == "write_through":
            arrived = zip(settled.keys, settled.tiers, strict=True)
            self.written.update(at for key, at in arrived if self.tiers[at].state(key) is State.READY)
        return settled

    def write_through(
        self, outcome: Outcome = Outcome.OK, to: Collection[int] = (FILE, BUCKET)
    ) -> list[tuple[Key, int, int]]:
        """Begin pending writes and end them like this; return key, source and target of each write to tiers ``to``."""
        writes = []
        for grant in self.begin():
            if grant.targets[0].tier not in to:
                continue
            writes += list(
                zip(grant.keys, [s.tier for s in grant.sources], [t.tier for t in grant.targets], strict=True)
            )
            self.report(grant.ticket, {} if outcome is Outcome.OK else dict.fromkeys(range(len(grant.keys)), outcome))
        return writes

    def wait_a_moment(self) -> None:
        """Let the threads that ask the bucket run."""
        time.sleep(0.001)

    # What is asked

    def holders(self, number: int) -> list[int]:
        """Return the tiers that can serve a chunk."""
        return [position for position, tier in enumerate(self.tiers) if tier.state(key(number)) is State.READY]

    def pinned(self, position: int) -> int:
        """Return how many chunks of a tier with slots are pinned."""
        tier = self.tiers[position]
        assert isinstance(tier, SlotTier)
        return sum(tier.state(key) is State.READY and tier._index.pins(key) > 0 for key in tier._index)

    def held(self) -> int:
        """Return how many chunks are in use, in all tiers."""
        return sum(len(tier._index._held) for tier in self.tiers)

    def told(self, target: int) -> dict[str, int]:
        """Return the outcomes of writes to a tier."""
        failed = {str(how[-1]): count for how, count in self.catalog.counts.items() if how[1:-1] == (target,)}
        return failed | ({"ok": self.written[target]} if self.written[target] else {})

    def come_to_rest(self, others: Iterable[int] = ()) -> None:
        """Report all open tickets, let time pass, and check that nothing is held any more."""
        for ticket in [*self.open, *others]:
            self.catalog.report(ticket, self.world_size, {}, self.now_s)
        for _ in range(20):
            self.now_s += 31.0
            self.write_through(to=(MEMORY, FILE, BUCKET))
        assert not self.catalog.moves.has_pending, "an idle engine would step for ever"
        assert self.catalog.open_tickets == 0
        assert self.held() == 0, "a pin or a reservation was not taken back"
        assert not any(self.catalog.moves.bytes_under_way)
        assert not any(self.catalog.storing_bytes)
        self.check()

    def check(self) -> None:
        """Assert that index and slots of each tier agree."""
        for tier in self.tiers:
            if isinstance(tier, SlotTier):
                check_slots(tier)

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()


MakeChain = Callable[..., Chain]


def chains(tmp_path: Path) -> Iterator[MakeChain]:
    """A fixture: a maker of chains. At the end each comes to rest, holds nothing, and is closed."""
    with ExitStack() as made:

        def make(**arguments: Any) -> Chain:
            chain = Chain(tmp_path, **arguments)
            made.callback(chain.close)
            made.callback(chain.come_to_rest)
            return chain

        yield make
