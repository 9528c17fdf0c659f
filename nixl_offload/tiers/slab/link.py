"""The link to a slab: its file opened once in the mover, given space before each write, and watched.

Threading: the pump's thread, after ``connect`` at start. The calls do metadata I/O of a local disk, at once.
Ownership: the slab belongs to the link, which closes it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Sequence

from nixl_offload.config import SlabConfig
from nixl_offload.errors import MoverError, TierError
from nixl_offload.movers.base import FileId, Mover, close_if_idle, open_file
from nixl_offload.tiers.base import NOTHING_STORED, Link, Target
from nixl_offload.tiers.breaker import Breaker
from nixl_offload.tiers.free_space import kept_free
from nixl_offload.tiers.slab.file import SlabFile, rank_file_name
from nixl_offload.tiers.slab.tier import SlabPlace
from nixl_offload.types import Key, Location

PAUSE_S = 60.0
"""A slab that cannot be written to is tried again at least this often."""
CHECK_EVERY_S = 1.0
"""How often a slab that works is looked at before a store: a deleted file still takes writes, and nobody would know."""


def open_link(config: SlabConfig, place: SlabPlace, rank: int, mover: Mover) -> SlabLink:
    """Open a rank's slab, and those of the ranks that have copies for it; the link closes them. Raises TierError."""
    with contextlib.ExitStack() as undo:
        slabs = []
        for each in [rank, *place.slots.neighbours(rank)]:
            slab = SlabFile(
                os.path.join(place.directory, rank_file_name(each)),
                rank_bytes=place.rank_bytes,
                extent_bytes=place.extent_bytes,
                direct_io=config.direct_io,
                owner=place.owner,
                is_locked_here=place.is_locked_here(),
                kept_free=kept_free(config),
            )
            slab.open()  # the first rank to come makes it
            undo.callback(slab.close)
            slabs.append(slab)
        undo.pop_all()
    return SlabLink(slabs[0], mover, time.monotonic, neighbours=slabs[1:])


class SlabLink(Link):
    """One slab, its file in the mover, and its health. A chunk's place is the offset of its location.

    After a failure still holds: an open file stays readable, so loads go on while storing is paused.
    """

    shares_file = True

    def __init__(
        self, slab: SlabFile, mover: Mover, clock: Callable[[], float], *, neighbours: Sequence[SlabFile] = ()
    ) -> None:
        """Take over open slabs. ``neighbours``: those of other ranks, only read (``SlotPlaces.seen_from``)."""
        self.name = f"slab tier {slab.path}"
        self.mover = mover
        self._slab = slab
        self._slabs = [slab, *neighbours]
        self._clock = clock
        self._stores = Breaker(
            f"Slab tier {slab.path}", threshold=1, longest_pause_s=PAUSE_S, flap_window_s=PAUSE_S, effect=NOTHING_STORED
        )
        self._files: list[FileId] = []
        """In the mover, of each slab; shorter until all are open."""
        self._check_s = clock()

    @property
    def trouble(self) -> str:
        return self._stores.cause or "none"

    def connect(self) -> None:
        """Open the files; if that fails, the tier starts disabled and is tried again later."""
        self._probe(self._clock())

    def may_store(self) -> bool:
        """Looks at a working slab once per ``CHECK_EVERY_S`` and probes a failed one when due."""
        now_s = self._clock()
        if not self._stores.allows(now_s):
            return False
        if self._stores.closed and now_s < self._check_s:
            return True
        return self._probe(now_s)

    def may_load(self) -> bool:
        """Always: an open file can be read."""
        return True

    def begin_write(
        self, key: Key, location: Location, length_bytes: int, shard: int | None = None
    ) -> Generator[None, None, Target]:
        """Puts real space under the slot."""
        try:
            yield from self._slab.ensure(location.offset, length_bytes)
            return Target(self._opened(0), location.offset)
        except (TierError, OSError) as error:
            found = error if isinstance(error, TierError) else TierError(str(error), cause="io")
            if found.cause != "files":
                self._stores.failed(found.cause, str(found), self._clock())
            raise found from error

    def end_write(self, target: Target) -> Generator[None, None, None]:
        """A slot becomes visible by the index, when all ranks have reported."""
        yield from ()

    def fail_write(self, target: Target, error: str | None) -> None:
        """Looks whether the slab knows why."""
        if error is None:
            return
        cause = "io"
        try:
            self._slab.check()
        except TierError as found:
            cause = found.cause
        self._stores.failed(cause, error, self._clock())

    def begin_read(
        self, key: Key, location: Location, length_bytes: int, shard: int | None = None
    ) -> Generator[None, None, Target]:
        yield from ()
        which, offset = divmod(location.offset, self._slab.rank_bytes)
        return Target(self._opened(which), offset)

    def end_read(self, target: Target) -> None:
        """Nothing is to be done: the file stays open for the next read."""

    def fail_read(self, target: Target, error: str | None) -> None:
        """A slab that cannot be read in one place may be sound in all others."""

    def close(self) -> None:
        for file in self._files:
            close_if_idle(self.mover, file)  # one that late I/O may still touch stays until the mover closes
        self._files = []
        for slab in self._slabs:
            slab.close()

    def _opened(self, which: int) -> FileId:
        if which >= len(self._files):
            raise TierError(f"{self._slab.path} is not open", cause="missing")
        return self._files[which]

    def _probe(self, now_s: float) -> bool:
        self._check_s = now_s + CHECK_EVERY_S
        try:
            self._slab.check()
            for slab in self._slabs[len(self._files) :]:
                file = open_file(self.mover, str(slab.path), slab.rank_bytes, direct_io=slab.direct_io)
                self._files.append(file)
        except (TierError, MoverError, OSError) as error:
            cause = error.cause if isinstance(error, TierError) else "io"
            if cause == "files" and self._stores.closed:
                return True  # it cannot be looked at now, and was well a second ago
            self._stores.failed(cause, str(error), now_s)
            return False
        self._stores.succeeded(now_s)
        return True
