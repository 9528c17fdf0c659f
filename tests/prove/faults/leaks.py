"""What must be given back: pins, slots, tickets and files once nothing is under way, threads and files after a server.

Threading: the cell's thread.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from typing import Final

from nixl_offload.engine import Engine, pump
from nixl_offload.keep import keep_forever
from nixl_offload.movers import nixl
from tests.prove.faults.clock import CLOCK, real_s
from tests.prove.faults.context import Context
from tests.prove.faults.server import Server

SOON_S: Final = 3.0
"""Real time within which something must be given back."""
FIRST: Final = slice(2, 5)
"""The first servers start what stays: libraries, pools of clients, a forked helper."""
LAST: Final = slice(-3, None)
SOCKETS_PER_MOVER: Final = 4 * 3
"""What a mover that is left behind may open later, when its requests go on: its connections, each with both ends of the
proxy's."""
_SHARD: Final = re.compile(r"/\.?[0-9a-f]{40}\.[0-9a-f]{4}")
_STATES: Final = {"01": "established", "08": "closed by its peer", "0A": "listening"}


class Leaks:
    """Looks for them in a cell, and tells its outcome."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._files: list[list[str]] = []
        """What was open after each server, by names."""
        self._counts: list[Counter[str]] = []
        """How much that was by kind, without what had been left behind."""
        self.judged = 0
        """How often there were servers enough to say whether their files are closed."""
        self._left_behind = Counter[str]()
        self._kept: list[object] = []
        self._movers_kept = 0
        """How much movers have left behind since the last look."""
        self._sockets_to_come = 0
        """So many may those that are left behind open."""
        nixl.keep_forever = self._keep
        self._excused: set[threading.Thread | str] = set()
        """Threads and files that were told of, or are left behind with storage that hung."""

    def check_held(self, server: Server) -> None:
        """Nothing is under way: nothing is held soon, what was given up, and has ended since, included."""
        until_s = real_s() + SOON_S
        while (held := server.held() + self._open_shards(server)) and real_s() < until_s:
            self._context.steps_for(0.01)
            CLOCK.ahead_s += 1.0
        self._tell(held)

    def check_after(self) -> None:
        """A server has ended: so have its threads, and its files are closed."""
        self._check_threads()
        gc.collect()
        files = self._closed_soon()
        if pump.LEAKED or self._movers_kept:
            # What hung when a server ended is kept until the process ends, for something may still write to it.
            self._kept += pump.LEAKED
            pump.LEAKED.clear()
            self._movers_kept = 0
            self._excused.update(files)
            if self._counts:
                self._left_behind += _by_kind(files) - self._left_behind - self._counts[-1]
        self._files.append(files)
        self._counts.append(_by_kind(files) - self._left_behind)
        if len(self._counts) > FIRST.stop + 1:
            self.judged += 1
            for kind, to_come in (("files", 0), ("sockets", self._sockets_to_come)):
                counts = [each[kind] for each in self._counts]
                if min(counts[LAST]) > max(counts[FIRST]) + to_come:
                    more = sorted(set(files).difference(*self._files[FIRST], self._excused))
                    if kind == "sockets" and not any(name.startswith("socket:") for name in more):
                        continue  # each has a name of its own: these are of what was left behind
                    self._tell([f"open {kind} by server: {counts}; new are {_with_ports(more)}"])
                    self._files.clear()
                    self._counts.clear()
                    return

    def _keep(self, what: object) -> None:
        """See ``keep_forever``."""
        keep_forever(what)
        self._movers_kept += 1
        if self._context.tier == "s3_obj":
            self._sockets_to_come += SOCKETS_PER_MOVER

    def _closed_soon(self) -> list[str]:
        """Return what is open once it is no more than at first, or some time has passed: libraries close later."""
        until_s = real_s() + SOON_S
        while True:
            files = self._open_files()
            is_judged = len(self._counts) > FIRST.stop and not pump.LEAKED and not self._movers_kept
            if not is_judged or real_s() > until_s:
                return files
            at_first = functools.reduce(Counter.__or__, self._counts[FIRST])  # the most of each kind
            if _by_kind(files) <= at_first + self._left_behind:
                return files
            time.sleep(0.02)

    def _open_shards(self, server: Server) -> list[str]:
        """Return the files of a shared directory that stay open; a slab's one, and what was given up, is for good."""
        if self._context.tier != "shared_dir" or pump.LEAKED:
            return []
        for engines in server.engines:
            if isinstance(engine := engines.get(max(engines)), Engine):
                engine._link_memory.link._close_stale()  # what could not be closed at once is with the next
        root = str(self._context.root)
        ours = [path for path in self._open_files() if path.startswith(root) and _SHARD.search(path)]
        return [f"{path} is open" for path in ours if path not in self._excused]

    def _open_files(self) -> list[str]:
        """Return what this process has open, by names; a draft that was deleted since has the one it had."""
        found = []
        with self._context.faults.spared():
            for descriptor in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    found.append(os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)"))
        return found

    def _check_threads(self) -> None:
        until_s = real_s() + SOON_S
        while (left := self._threads()) and real_s() < until_s and not pump.LEAKED:
            time.sleep(0.002)
        if left and not pump.LEAKED:
            frames = sys._current_frames()
            at = {each.name: "".join(traceback.format_stack(frames.get(each.ident or 0), limit=6)) for each in left}
            self._tell(["threads go on: " + "\n".join(f"{name}\n{stack}" for name, stack in at.items())])
        self._excused.update(left)

    def _threads(self) -> list[threading.Thread]:
        ours = [thread for thread in threading.enumerate() if thread.name.startswith("nixl-offload")]
        return [thread for thread in ours if thread not in self._excused]

    def _tell(self, found: list[str]) -> None:
        self._context.outcome.leaks += [f"{self._context.where}: {sentence}" for sentence in found]


def _by_kind(files: Sequence[str]) -> Counter[str]:
    return Counter("sockets" if name.startswith("socket:") else "files" for name in files)


def _with_ports(files: Sequence[str]) -> list[str]:
    """Return the names, those of TCP sockets with what the kernel knows of them."""
    known = {}
    with open("/proc/self/net/tcp") as table:
        for line in table.readlines()[1:]:
            _, local, peer, state, *_ = words = line.split()
            ports = [int(end.rpartition(":")[2], 16) for end in (local, peer)]
            known[f"socket:[{words[9]}]"] = f" of port {ports[0]} with {ports[1]}, {_STATES.get(state, state)}"
    return [name + known.get(name, "") for name in files]
