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
from typing import Final

from nixl_offload.engine import LinkEngine, pump
from tests.prove.faults.clock import CLOCK, real_s
from tests.prove.faults.context import Context
from tests.prove.faults.server import Server

SOON_S: Final = 3.0
"""Real time within which something must be given back."""
_SHARD: Final = re.compile(r"/\.?[0-9a-f]{40}\.[0-9a-f]{4}")


class Leaks:
    """Looks for them in a cell, and adds them to its outcome."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._kept: list[object] = []
        self._excused: set[threading.Thread | str] = set()
        """Threads and files that were reported, or are left behind with storage that hung."""

    def check_held(self, server: Server) -> None:
        """With nothing under way nothing is held, soon: what was given up, and has ended since, included."""
        until_s = real_s() + SOON_S
        while (held := server.held() + self._open_shards(server)) and real_s() < until_s:
            self._context.steps_for(0.01)
            CLOCK.ahead_s += 1.0
        self._report(held)

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
        self._report([f"{path} is open after the end" for path in left])
        self._excused.update(left)

    def _open_shards(self, server: Server) -> list[str]:
        """Return the files of a shared directory that stay open; a slab's one, and what was given up, is for good."""
        if self._context.tier != "shared_dir" or pump.LEAKED:
            return []
        for engines in server.engines:
            if isinstance(engine := engines.get(max(engines)), LinkEngine):
                engine.paths.link._close_stale()  # what could not be closed at once is with the next
        return [f"{path} is open" for path in self._open_below_root() if _SHARD.search(path)]

    def _open_below_root(self) -> list[str]:
        return [path for path in self._open_files() if path.startswith(str(self._context.root))]

    def _open_files(self) -> list[str]:
        """Return what this process has open, by names; a draft that was deleted since has the one it had."""
        found = []
        with self._context.faults.spared():
            for descriptor in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    found.append(os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)"))
        return [name for name in found if not name.startswith("socket:") and name not in self._excused]

    def _check_threads(self) -> None:
        until_s = real_s() + SOON_S
        while (left := self._threads()) and real_s() < until_s and not pump.LEAKED:
            time.sleep(0.002)
        if left and not pump.LEAKED:
            frames = sys._current_frames()
            stacks = ["".join(traceback.format_stack(frames.get(each.ident or 0), limit=6)) for each in left]
            names = [each.name for each in left]
            self._report(["threads go on: " + "\n".join(map("\n".join, zip(names, stacks, strict=True)))])
        self._excused.update(left)

    def _threads(self) -> list[threading.Thread]:
        ours = [thread for thread in threading.enumerate() if thread.name.startswith("nixl-offload")]
        return [thread for thread in ours if thread not in self._excused]

    def _report(self, found: list[str]) -> None:
        self._context.outcome.leaks += [f"{self._context.where}: {sentence}" for sentence in found]
