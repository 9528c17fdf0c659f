"""The scheduler's half of a file tier: which chunk rests in which slot, what goes when room is needed, what survives.

Threading: called by the scheduler's thread alone. The durable twin writes behind on a thread of its own.
Ownership: the tier's directory (and its lock), index, slot allocator and durable twin. The bytes belong to the ranks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nixl_offload.config import FileTier as FileTierConfig
from nixl_offload.errors import IndexStateError, TierError
from nixl_offload.index import Index, State
from nixl_offload.index.durable import DurableIndex
from nixl_offload.namespace import Namespace
from nixl_offload.tiers.directory import TierDirectory
from nixl_offload.tiers.slab import SlabAllocator
from nixl_offload.types import Asker, Key, Location, Lookup, Outcome

logger = logging.getLogger(__name__)

HEAL_EVERY_S = 5.0
"""A directory that vanished is looked for this often, and only while stores fail."""

STALE_PER_FLUSH = 100_000
STALE_FLUSH_S = 60.0


@dataclass(frozen=True, slots=True)
class SlabPlace:
    """Where the ranks find their slabs; travels to them with each job. Equal geometry on every rank."""

    directory: str
    rank_namespaces: tuple[bytes, ...]
    """Per rank, the 32 bytes its shard headers carry."""
    rank_bytes: int
    extent_bytes: int


class FileTier:
    """Slots of a slab, one index for all ranks. Methods return at once and never raise for reasons of storage."""

    def __init__(
        self,
        position: int,
        place: SlabPlace,
        index: Index,
        allocator: SlabAllocator,
        durable: DurableIndex,
        directory: TierDirectory | None = None,
    ) -> None:
        """Put the parts together; ``open`` is the usual way. ``directory`` is closed with the tier."""
        self.place = place
        self._position = position
        self._directory = directory
        self._index = index
        self._allocator = allocator
        self._durable = durable
        self._next_heal_s = 0.0
        self._healer: threading.Thread | None = None
        self._lost = threading.Event()
        """Another engine owns the directory now."""

    @classmethod
    def open(
        cls,
        config: FileTierConfig,
        *,
        position: int,
        namespace: Namespace,
        slot_classes: Sequence[int],
        world_size: int,
        dp_index: int = 0,
        dp_size: int = 1,
    ) -> FileTier:
        """Lock the directory, reopen what an earlier engine left there, and return the tier.

        ``slot_classes`` are the sizes in bytes of the slots that the groups of the model need on each rank.
        Raises TierError (locked by another engine, no permission, too little capacity).
        """
        directory = TierDirectory.open(
            config.path,
            capacity_bytes=config.capacity_bytes,
            namespace=namespace,
            slot_classes=slot_classes,
            world_size=world_size,
            dp_index=dp_index,
            dp_size=dp_size,
        )
        try:
            allocator = SlabAllocator(directory.rank_bytes, slot_classes, directory.extent_bytes)
            geometry = {"extent_bytes": str(allocator.extent_bytes), "world_size": str(world_size)}
            durable, rows = DurableIndex.open(str(directory.index_path), geometry)
        except BaseException:
            directory.close()
            raise
        index = Index(policy=config.policy)
        stale: list[Key] = []
        for key, offset, slot_bytes in rows:
            location = Location(position, offset, slot_bytes)
            if slot_bytes not in slot_classes or not allocator.adopt(offset, slot_bytes):
                stale.append(key)
                continue
            try:
                index.insert_ready(key, location)
            except IndexStateError:
                allocator.free(offset, slot_bytes)
                stale.append(key)
        for number, key in enumerate(stale, 1):
            durable.delete(key)
            if number % STALE_PER_FLUSH == 0:  # more than the twin can queue would make it forget all it has
                durable.flush(STALE_FLUSH_S)
        logger.info(
            "File tier %s: %d chunks found again, room for %.1f GiB per rank (%d ranks)%s",
            config.path,
            len(index),
            allocator.rank_bytes / 2**30,
            world_size,
            f", {len(stale)} index rows dropped" if stale else "",
        )
        place = SlabPlace(
            directory=str(directory.namespace_path),
            rank_namespaces=tuple(namespace.rank_digest(rank) for rank in range(world_size)),
            rank_bytes=allocator.rank_bytes,
            extent_bytes=allocator.extent_bytes,
        )
        return cls(position, place, index, allocator, durable, directory)

    def __len__(self) -> int:
        return len(self._index)

    def state(self, key: Key) -> State | None:
        """Return the state of ``key`` in this tier, None when it does not know the key."""
        return self._index.state(key)

    def lookup(self, key: Key, asker: Asker, now_s: float) -> Lookup:
        """Say whether ``key`` can be loaded: nobody else writes here, so the index knows."""
        state = self._index.state(key)
        if state is State.READY:
            return Lookup.HIT
        return Lookup.PENDING if state is State.WRITING else Lookup.MISS

    def flush(self, now_s: float) -> None:
        """Nothing is asked for in the background."""

    def forget_asker(self, request_id: str) -> None:
        """Nothing is remembered of requests."""

    def reserve(self, key: Key, slot_bytes: int, evicted: list[Key]) -> Location | None:
        """Make ``key`` WRITING in a slot, evicting as needed; victims are appended to ``evicted``. None: no room."""
        if self._lost.is_set():
            return None
        offset = self._allocator.allocate(slot_bytes)
        if offset is None:
            offset = self._make_room(slot_bytes, evicted)
        if offset is None:
            return None
        location = Location(self._position, offset, slot_bytes)
        self._index.insert_writing(key, location)
        return location

    def commit(self, key: Key) -> bool:
        """WRITING to READY; the durable twin learns it. False when the chunk had been dropped meanwhile."""
        freed = self._index.commit(key)
        if freed is not None:
            self._free(freed)
            return False
        self._durable.put(key, self._index.location(key))
        return True

    def abort(self, key: Key) -> None:
        """Give a WRITING chunk's slot back."""
        self._free(self._index.abort(key))

    def pin(self, key: Key) -> Location:
        """Forbid eviction of a READY chunk and return where it is."""
        return self._index.pin(key)

    def unpin(self, key: Key) -> None:
        """Take one pin back; frees the slot of a chunk that was dropped meanwhile."""
        freed = self._index.unpin(key)
        if freed is not None:
            self._free(freed)

    def touch(self, key: Key) -> None:
        """Mark as recently used; unknown keys are ignored."""
        self._index.touch(key)

    def drop(self, key: Key) -> None:
        """Never serve this chunk again."""
        self._durable.delete(key)
        freed = self._index.drop(key)
        if freed is not None:
            self._free(freed)

    def stored(self, keys: Sequence[Key], failed: Mapping[Key, Outcome], now_s: float) -> None:
        """A store is over: where storage failed it, look whether the directory is still there."""
        if Outcome.FAILED in failed.values():
            self.heal(now_s)

    def loaded(self, keys: Sequence[Key], failed: Mapping[Key, Outcome], now_s: float) -> list[Key]:
        """A load is over: drop what did not arrive, or not as it was stored. Returns what was dropped."""
        bad = [key for key in reversed(keys) if failed.get(key, Outcome.DROPPED) is not Outcome.DROPPED]
        dropped = [key for key in bad if self.state(key) is State.READY]
        for key in dropped:
            self.drop(key)
        return dropped

    def clear(self) -> None:
        """Drop everything, now and for the next start. Costs per chunk in use, not per chunk."""
        self._durable.clear()
        held = self._index.clear()
        self._allocator.clear((location.offset, location.slot_bytes) for location in held)

    def heal(self, now_s: float) -> None:
        """After failed stores: look on a thread of its own whether the directory vanished, and take it back if so.

        At most one such thread, at most every ``HEAL_EVERY_S`` seconds (``now_s``: monotonic). Never raises. When
        another engine has taken the place meanwhile, nothing is stored any more; what can still be read is served.
        """
        if self._directory is None or self._lost.is_set() or now_s < self._next_heal_s:
            return
        if self._healer is not None and self._healer.is_alive():
            return  # storage hangs: one thread that waits for it is enough
        self._next_heal_s = now_s + HEAL_EVERY_S
        # A daemon, for a hanging filesystem must not keep the process from ending.
        healer = threading.Thread(target=self._restore, args=(self._directory,), name="nixl-offload-heal", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread to be had now
            healer.start()
            self._healer = healer

    def close(self, timeout_s: float = 5.0) -> None:
        """Write the durable twin out and release the lock. Idempotent."""
        if self._healer is not None:
            self._healer.join(timeout_s)
        self._durable.close(timeout_s)
        if self._directory is not None:
            self._directory.close()

    def _restore(self, directory: TierDirectory) -> None:
        try:
            directory.restore()
        except TierError as error:
            if error.cause != "locked":
                logger.debug("%s", error)
                return
            # The index at this path is the other engine's, too.
            self._durable.abandon()
            self._lost.set()
            logger.error("%s Nothing is stored any more until this engine restarts.", error)

    def _make_room(self, slot_bytes: int, evicted: list[Key]) -> int | None:
        starved = self._allocator.reclaimable(slot_bytes)
        if starved is not None:
            for key in self._index.keys_between(*starved):
                if self._index.state(key) is State.READY:
                    self.drop(key)
                    evicted.append(key)
            offset = self._allocator.allocate(slot_bytes)
            if offset is not None:
                return offset
        victim = self._index.evict(slot_bytes)
        if victim is None:
            return None
        key, location = victim
        self._durable.delete(key)
        self._free(location)
        evicted.append(key)
        return self._allocator.allocate(slot_bytes)

    def _free(self, location: Location) -> None:
        self._allocator.free(location.offset, location.slot_bytes)
