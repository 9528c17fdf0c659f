"""The scheduler's half of a slab tier: slots in a directory that one engine owns, and an index to find them again.

Threading: called by the scheduler's thread alone. The durable index writes on a thread of its own.
Ownership: the tier's directory (and its lock) and the durable index, besides the index and slots of a ``SlotTier``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from nixl_offload.calls import CallThreads
from nixl_offload.config import SlabConfig
from nixl_offload.hardware.machine import machine_token
from nixl_offload.index import DurableIndex, State
from nixl_offload.tiers.base import TierContext
from nixl_offload.tiers.ownership import warn_of_others
from nixl_offload.tiers.slab.directory import TierDirectory
from nixl_offload.tiers.slab.file import SlabPlace
from nixl_offload.tiers.slot_tier import SlotTier
from nixl_offload.tiers.slots import SlotAllocator
from nixl_offload.types import Key, Location, Outcome

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 60.0
"""How often the directory is checked. If a store failed or the drive had no room, it is checked at once, ..."""
LOOK_PAUSE_S = 5.0
"""... but not more often than this."""

CLOSE_S = 5.0


class SlabTier(SlotTier):
    """Slots of a slab, one index for all ranks, also on disk."""

    place: SlabPlace
    _durable: DurableIndex

    def __init__(
        self,
        position: int,
        place: SlabPlace,
        allocator: SlotAllocator,
        durable: DurableIndex,
        directory: TierDirectory | None = None,
    ) -> None:
        """Assemble the parts; ``open`` is the usual way. ``directory`` is closed with the tier."""
        super().__init__(position, place, allocator, durable)
        self._directory = directory
        self._next_look_s = self._next_due_s = 0.0
        self._looks = CallThreads("nixl-offload-look", 1)
        self._extents = allocator.extent_count
        """Extents that the drive had room for at the last look."""
        self._lost = threading.Event()
        """Set when the directory or its lock is gone, or belongs to another engine."""

    @classmethod
    def open(cls, config: SlabConfig, context: TierContext) -> SlabTier:
        """Lock the directory, adopt the chunks that an earlier engine left there, and return the tier.

        Raises TierError (locked by another engine, no permission) and ConfigError (too little capacity).
        """
        warn_of_others(config.path)
        namespace, engines = context.namespace, context.dp_engines
        replicas = namespace.slot_replicas
        with contextlib.ExitStack() as undo:
            directory = TierDirectory.open(config, context)
            undo.callback(directory.close)
            allocator = SlotAllocator(directory.rank_bytes, context.slot_classes, directory.extent_bytes, replicas)
            n_slots = directory.rank_bytes * allocator.places.together // allocator.slot_classes[0]
            durable = DurableIndex(str(directory.index_path), allocator.slot_classes[0], n_slots, directory.geometry)
            undo.callback(durable.close, CLOSE_S)
            place = SlabPlace(
                directory=str(directory.namespace_path),
                namespace=namespace.digest,
                slots=allocator.places,
                owner=directory.owner,
                machine=machine_token(),
            )
            tier = cls(context.position, place, allocator, durable, directory)
            stale = tier.adopt(durable.rows())
            for location in stale:
                durable.delete(location)
            undo.pop_all()
        logger.info(
            "Slab tier %s: %d chunks found again, room for %.1f GiB per rank (%d ranks of each of %d engines)%s%s",
            config.path,
            len(tier),
            allocator.rank_bytes / 2**30,
            context.world_size,
            len(engines),
            f", up to {allocator.places.together} of them with one copy of what they have alike" if replicas else "",
            f", {len(stale)} index rows dropped" if stale else "",
        )
        if len(engines) > 1 and context.dp_index == engines[0]:
            logger.warning(
                "Slab tier %s: %d data-parallel engines have a part of it each, and do not find each other's chunks; "
                "kind: shared_dir has them share all",
                config.path,
                len(engines),
            )
        return tier

    def reserve(self, key: Key, slot_bytes: int, evicted: list[Key]) -> Location | None:
        if self._lost.is_set():
            return None
        self._allocator.limit = self._extents
        return super().reserve(key, slot_bytes, evicted)

    def on_step(self, now_s: float) -> None:
        """If the drive had no room at the last look, look again."""
        if self._extents < self._allocator.extent_count:
            self.check_directory(now_s)

    def after_store(self, keys: Sequence[Key], failed: Mapping[Key, Outcome], now_s: float) -> None:
        """Check the directory if storage failed this store, and every ``LOOK_EVERY_S``."""
        if now_s >= self._next_due_s or not {Outcome.FAILED, Outcome.TAINTED}.isdisjoint(failed.values()):
            self._next_due_s = now_s + LOOK_EVERY_S
            self.check_directory(now_s)

    def check_directory(self, now_s: float) -> None:
        """Check on a thread whether the directory is still ours and how much room the drive has. If it has none, slabs
        do not grow, and chunks are evicted instead.

        At most one such check runs, every ``LOOK_PAUSE_S`` at most (``now_s``: monotonic). Never raises. A lost
        directory is not made again: nothing is stored any more, and chunks that are still readable are served.
        """
        self._looks.keep_up()
        if self._directory is None or self._lost.is_set() or now_s < self._next_look_s or self._looks.pending:
            return
        self._next_look_s = now_s + LOOK_PAUSE_S
        self._looks.start(partial(self._look, self._directory))

    def close(self, in_flight: Iterable[Key] = (), *, timeout_s: float = CLOSE_S) -> None:
        """Write the durable index out and release the lock. Idempotent.

        ``in_flight``: chunks that were being written when the engine shut down. Ranks may have finished them after
        their last report, so it records them as stored. If one is not whole, its header or checksums fail when
        the next engine loads it, as after a crash.
        """
        for key in in_flight:
            if self.state(key) is State.WRITING:
                self._durable.put(key, self._index.location(key))
        self._looks.close(timeout_s)
        self._durable.close(timeout_s)
        if self._directory is not None:
            self._directory.close()

    def _look(self, directory: TierDirectory) -> None:
        try:
            if directory.is_held():
                self._extents = directory.extents_now()
                return
        except OSError as error:
            logger.debug("%s", error)
            return
        self._durable.abandon()  # the index at this path may be another engine's
        self._lost.set()
        logger.error(
            "Slab tier %s was deleted, moved or unmounted, or another engine has taken it. Nothing is stored there any "
            "more until this engine restarts.",
            directory.namespace_path,
        )
