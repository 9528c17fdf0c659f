"""What must be given back: pins, slots, tickets and shards once nothing is under way, threads and files after a server.

Threading: the cell's thread.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

from nixl_offload.engine import LinkPaths, pump
from nixl_offload.tiers.shared.tier import SharedTier
from nixl_offload.tiers.slot_tier import SlotTier
from tests.invariants import check_slots
from tests.prove.clock import real_s
from tests.prove.faults.injection import Faults
from tests.prove.server import Server

SOON_S: Final = 3.0
"""Real time within which something must be given back."""
_SHARD: Final = re.compile(r"/\.?[0-9a-f]{40}\.[0-9a-f]{4}")


class Leaks:
    """Looks for them, and calls ``report`` with a sentence for each."""

    def __init__(self, root: Path, faults: Faults, report: Callable[[str], None]) -> None:
        self._root, self._faults, self._report = str(root), faults, report
        self._kept: list[object] = []
        self._excused: set[threading.Thread | str] = set()
        """Threads and files that were reported, or are left behind with storage that hung."""

    def check_held(self, server: Server, after_a_while: Callable[[], None]) -> None:
        """With nothing under way nothing is held, soon: what was given up, and has ended since, included."""
        until_s = real_s() + SOON_S
        while (left := _held(server) + self._open_shards(server)) and real_s() < until_s:
            after_a_while()
        for sentence in left:
            self._report(sentence)

    def check_after(self) -> None:
        """A server has ended: so have its threads, and its files are closed."""
        self._check_threads()
        gc.collect()
        if pump.LEAKED:
            # What hung when a server ended is kept until the process ends, for something may still write to it.
            self._kept += pump.LEAKED
            pump.LEAKED.clear()
            self._excused.update(self._open_files())
        until_s = real_s() + SOON_S
        while (left := self._open_below_root()) and real_s() < until_s:
            time.sleep(0.02)
        for path in left:
            self._report(f"{path} is open after the end")
        self._excused.update(left)

    def _open_shards(self, server: Server) -> list[str]:
        """Return the files of a shared directory that stay open; a slab's one, and what was given up, is for good."""
        if not isinstance(server.serving[-1], SharedTier) or pump.LEAKED:
            return []
        for rank in server.ranks:
            engine = rank.chain._engines.get(len(server.serving) - 1)
            if engine is not None and isinstance(engine.paths, LinkPaths):
                engine.paths.link._close_stale()  # what could not be closed at once is with the next
        return [f"{path} is open" for path in self._open_below_root() if _SHARD.search(path)]

    def _open_below_root(self) -> list[str]:
        return [path for path in self._open_files() if path.startswith(self._root)]

    def _open_files(self) -> list[str]:
        """Return what this process has open, by names; a draft that was deleted since has the one it had."""
        found = []
        with self._faults.spared():
            for descriptor in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    found.append(os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)"))
        return [name for name in found if not name.startswith("socket:") and name not in self._excused]

    def _check_threads(self) -> None:
        until_s = real_s() + SOON_S
        while (left := self._threads()) and real_s() < until_s and not pump.LEAKED:
            time.sleep(0.002)
        frames = sys._current_frames()
        for thread in left if not pump.LEAKED else ():
            stack = "".join(traceback.format_stack(frames.get(thread.ident or 0), limit=6))
            self._report(f"thread {thread.name} goes on: {stack}")
        self._excused.update(left)

    def _threads(self) -> list[threading.Thread]:
        ours = [thread for thread in threading.enumerate() if thread.name.startswith("nixl-offload")]
        return [thread for thread in ours if thread not in self._excused]


def _held(server: Server) -> list[str]:
    """Return what is held although nothing is under way."""
    found = []
    for position, tier in server.opened.items():
        if isinstance(tier, SlotTier):
            check_slots(tier)
        if held := len(tier._index._held):
            found.append(f"tier {position}: {held} chunks are held")
    stored, moves = server.catalog.storing_bytes, server.catalog.moves
    if any((*stored, *moves.bytes_under_way)):
        found.append(f"bytes stored {stored}, moved {moves.bytes_under_way}")
    for rank in server.ranks:
        for position, engine in rank.chain._engines.items():
            in_flight = engine.in_flight
            if in_flight.batches or in_flight.chunks or in_flight.stores or in_flight.background:
                found.append(f"rank {rank.number}, tier {position}: {in_flight}")
            if isinstance(engine.paths, LinkPaths):
                for pool in engine.paths.link_memory.pools.values():
                    if pool.free != pool.usable:
                        out = pool.usable - pool.free
                        found.append(f"rank {rank.number}, tier {position}: {out} staging slots are out")
    return found
