"""What lies outside of the catalog: ranks that copy chunks between slabs and buckets, badly at times, and their bytes.

A world says what is true: which bytes lie where on which rank, and for what reasons they may be wrong. It decides
nothing and knows no catalog. Threading: one thread, except that a ``Bucket`` may be asked from any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from nixl_offload.errors import StoreError
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.types import Key, Location, Outcome, key_group
from tests.unit.shared_rig import MemoryStore, answer, refuse

RANKS = 2
SLOT_CLASSES = (32 << 10, 48 << 10)
"""By group. Small, for every byte is compared after every step."""
UNIT_BYTES = 16 << 10
"""Divides every slot: in such steps the world remembers what was written lately."""


def slot_bytes(key: Key) -> int:
    """Return the slot that a chunk needs on each rank."""
    return SLOT_CLASSES[key_group(key)]


@cache
def image_of(key: Key, rank: int) -> bytes:
    """Return a chunk's image on a rank: no two chunks, ranks or halves of one have a byte's worth in common."""
    stamp = hashlib.sha256(key + bytes([rank])).digest()
    times = slot_bytes(key) // 2 // len(stamp)
    return stamp * times + stamp[::-1] * times


@dataclass(slots=True, eq=False)
class Copy:
    """One chunk on its way on one rank, in two halves, so that what others do may come between them."""

    key: Key
    source: Location | None
    """None: KV blocks of the GPU."""
    target: Location | None
    """None likewise."""
    buffer: bytearray
    moved: int = 0
    """Halves that have gone from source to target."""
    given_up: bool = False
    """The load does not wait for it any more, so its source may be anybody's by now."""
    outcome: Outcome | None = None
    """What became of the target."""


@dataclass(slots=True, eq=False)
class LateWriter:
    """Something that may write to a tainted place for as long as its rank's process lives."""

    rank: int
    place: Location
    buffer: bytes


class World:
    """Bytes of every rank and of buckets. ``kinds`` tells the tiers in order: memory, slab, shared, shared."""

    def __init__(self, kinds: Sequence[str], namespace: str) -> None:
        self.kinds = tuple(kinds)
        self.namespace = namespace
        self.now_s = 1000.0
        self.buckets = {position: MemoryStore(self.wall) for position, kind in enumerate(kinds) if kind == "shared"}
        """By position of the tier."""
        self.slabs: list[dict[int, bytearray]] = [{} for _ in range(RANKS)]
        """Per rank, by position of the tier."""
        self.file_works = True
        """Whether ranks can write to their file slabs."""
        self.late_writers: list[LateWriter] = []
        self.dirty: set[int] = set()
        """Units of file slabs written, on any rank, since the index was last written out."""
        self.doubtful: set[tuple[Key, int]] = set()
        """Chunks at offsets of the file tier that were found after a restart and may not be whole there."""
        self.sure: set[tuple[int, Key]] = set()
        """Tiers and chunks whose every shard was there when a store ended well, and nobody had a reason to delete."""
        self.meddled: set[tuple[int, str]] = set()
        """Objects, by tier, that others cut or deleted since a rank last wrote them."""

    def now(self) -> float:
        """Return the time, as callers of the catalog pass it in."""
        return self.now_s

    def wall(self) -> float:
        """Return the time of day."""
        return 1_700_000_000.0 + self.now_s

    def names(self, key: Key) -> list[str]:
        """Return the names of a chunk's shards, by rank."""
        return [shard_name(self.namespace, key, rank) for rank in range(RANKS)]

    def is_whole(self, key: Key, place: Location) -> bool:
        """Whether every rank has the image of ``key`` in this place of a slab."""
        end = place.offset + place.slot_bytes
        return all(self.slabs[rank][place.tier][place.offset : end] == image_of(key, rank) for rank in range(RANKS))

    @property
    def reachable(self) -> bool:
        """Whether every bucket answers."""
        return all(bucket.before is answer for bucket in self.buckets.values())

    @reachable.setter
    def reachable(self, answers: bool) -> None:
        for bucket in self.buckets.values():
            bucket.before = answer if answers else refuse

    def is_stored(self, key: Key, tier: int) -> bool:
        """Whether every rank's shard of ``key`` is in the bucket of ``tier`` as it should be."""
        found = [self.buckets[tier].objects.get(name) for name in self.names(key)]
        return all(item is not None and item[0] == image_of(key, rank) for rank, item in enumerate(found))

    def is_dirty(self, place: Location) -> bool:
        """Whether a rank wrote to this place of the file tier since the index was last written out."""
        units = range(place.offset // UNIT_BYTES, -(-(place.offset + place.slot_bytes) // UNIT_BYTES))
        return not self.dirty.isdisjoint(units)

    # What ranks do.

    def begin_slab(self, tier: int, size_bytes: int) -> None:
        """Every rank has a slab for a tier, unless it has one from before a restart."""
        for slabs in self.slabs:
            slabs.setdefault(tier, bytearray(size_bytes))

    def advance(self, rank: int, copy: Copy) -> None:
        """Move the next half, unless both have moved. Raises StoreError where the bucket says no."""
        if copy.moved == 2:
            return
        half = slice(copy.moved * (len(copy.buffer) // 2), (copy.moved + 1) * (len(copy.buffer) // 2))
        source, target = copy.source, copy.target
        if source is None:
            copy.buffer[half] = image_of(copy.key, rank)[half]
        elif self.kinds[source.tier] == "shared":
            if copy.moved == 1:
                self.buckets[source.tier].read_into(self.names(copy.key)[rank], 0, memoryview(copy.buffer))
        else:
            start = source.offset
            copy.buffer[half] = self.slabs[rank][source.tier][start + half.start : start + half.stop]
        copy.moved += 1
        if target is None:
            return
        if self.kinds[target.tier] != "shared":
            # An image that arrives at once is written in one go, too.
            self._write(rank, target, copy.buffer, slice(0, half.stop) if copy.moved == 2 else half)

    def complete(self, rank: int, copy: Copy) -> Outcome:
        """Move what is left, check what came, and say how it ended. Fails a test where no reason is known for it."""
        if copy.target is not None and self.kinds[copy.target.tier] == "slab" and not self.file_works:
            return Outcome.FAILED
        try:
            while copy.moved < 2:
                self.advance(rank, copy)
        except StoreError as error:
            if error.cause == "missing" and copy.source is not None:
                was_there = (copy.source.tier, copy.key) in self.sure
                assert not was_there or copy.given_up, f"{copy} read in vain: nobody had deleted it"
            return self._excused(rank, copy) if error.cause == "short" else Outcome.FAILED
        if copy.buffer != image_of(copy.key, rank):
            return self._excused(rank, copy)
        if copy.target is not None and self.kinds[copy.target.tier] == "shared":
            return self._put(rank, copy)
        return Outcome.OK

    def taint(self, rank: int, copy: Copy) -> None:
        """From now on something may write to the target of ``copy`` at any time."""
        assert copy.target is not None
        image = image_of(copy.key, rank)
        self.late_writers.append(LateWriter(rank, copy.target, image))

    def write_late(self, writer: LateWriter) -> None:
        """Let it write: its own image, in whose place nobody else may have anything by now."""
        if self.kinds[writer.place.tier] != "shared":
            self._write(writer.rank, writer.place, writer.buffer, slice(0, len(writer.buffer)))

    def die(self) -> None:
        """Every rank's process ends: memory is gone, and nothing of it writes any more."""
        self.late_writers.clear()
        for slabs in self.slabs:
            for tier, slab in slabs.items():
                if self.kinds[tier] == "memory":
                    slab[:] = b"\xdb" * len(slab)

    def _put(self, rank: int, copy: Copy) -> Outcome:
        assert copy.target is not None
        tier, name = copy.target.tier, self.names(copy.key)[rank]
        try:
            self.buckets[tier].write(name, memoryview(copy.buffer))
        except StoreError:
            return Outcome.FAILED
        self.meddled.discard((tier, name))
        return Outcome.OK

    def _excused(self, rank: int, copy: Copy) -> Outcome:
        """CORRUPT, where the world knows why."""
        source = copy.source
        assert source is not None
        kind = self.kinds[source.tier]
        known = copy.given_up
        known = known or (kind == "slab" and (copy.key, source.offset) in self.doubtful)
        known = known or (kind == "shared" and (source.tier, self.names(copy.key)[rank]) in self.meddled)
        assert known, f"rank {rank} read something else than {copy.key.hex()} from {source}"
        return Outcome.CORRUPT

    def _write(self, rank: int, place: Location, buffer: bytes | bytearray, part: slice) -> None:
        start = place.offset
        self.slabs[rank][place.tier][start + part.start : start + part.stop] = buffer[part]
        if self.kinds[place.tier] == "slab":
            first, last = (start + part.start) // UNIT_BYTES, (start + part.stop - 1) // UNIT_BYTES
            self.dirty.update(range(first, last + 1))

    # What others do.

    def rot(self, key: Key, place: Location, rank: int) -> None:
        """A bit of a chunk in a file slab flips."""
        start = place.offset + place.slot_bytes // 2
        flipped = self.slabs[rank][place.tier][start] ^ 1
        self._write(rank, Location(place.tier, start, 1), bytes([flipped]), slice(0, 1))
        self.doubtful.add((key, place.offset))

    def others_put(self, key: Key, tier: int) -> None:
        """Another server stores a chunk."""
        for rank, name in enumerate(self.names(key)):
            self.buckets[tier].objects[name] = image_of(key, rank), self.wall()
            self.meddled.discard((tier, name))

    def others_delete(self, key: Key, tier: int, rank: int) -> None:
        """Somebody deletes a shard."""
        self.meddle(key, tier, rank)
        self.buckets[tier].objects.pop(self.names(key)[rank], None)

    def others_spoil(self, key: Key, tier: int, rank: int, *, cut: bool) -> None:
        """A shard is cut short, or its bytes change where they are."""
        name, objects = self.names(key)[rank], self.buckets[tier].objects
        if name in objects:
            self.meddle(key, tier, rank)
            content, modified_s = objects[name]
            spoilt = content[: len(content) // 2] if cut else content[:-1] + bytes([content[-1] ^ 1])
            objects[name] = spoilt, modified_s

    def meddle(self, key: Key, tier: int, rank: int) -> None:
        """Note that this shard is not what a rank made it."""
        self.meddled.add((tier, self.names(key)[rank]))
        self.sure.discard((tier, key))
