"""SIGKILL at random moments: a server is killed while it opens, checks, stores, loads, evicts, writes through or
closes, and another, which waited for that, opens the same storage at once.

Checked by each server that opens: nothing but the lock of the one before keeps it from opening; every chunk that it
finds is loaded, and is what was stored or a miss; what had surely been stored before the kill is there, and something
had, but where servers evict; capacities are kept. At the end: no file is left that nobody would remove. Which calls a
kill meets depends on timing, so a seed repeats a finding by and large only.

Threading: a cell's process has one thread, and forks its servers, each of which is driven by one.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from nixl_offload.errors import TierError
from nixl_offload.index import State
from nixl_offload.index.durable import IndexReader
from nixl_offload.stores.filesystem import tree_bytes
from nixl_offload.tiers.ownership import is_kept
from nixl_offload.tiers.shared.eviction import PASS_S
from nixl_offload.tiers.slab.tier import SlabTier
from nixl_offload.units import parse_size
from nixl_offload.vllm import background
from tests.invariants import check_slots
from tests.prove.cells import Cell, Outcome
from tests.prove.happenings import files
from tests.prove.server import Server, config_of, key_of, tiers_of

KILLS: Final = 4
"""Of each cell."""
CELLS_EACH: Final = 6
EARLY_S: Final = 0.3
"""Kills that meet a start come within this time after the server before was killed."""
LATE_S: Final = 0.4
"""The others, within this time after it has checked everything."""
CHECKED_S: Final = 60.0
NOT_CHECKED: Final = f"the next server has not opened and checked everything within {CHECKED_S:.0f} s"
DRAFT_AGE_S: Final = 7200.0
"""Older than a draft that a writer may still be at."""
NUMBERS: Final = range(120)
"""Chunks there are."""
SLAB: Final = "1900KiB"
"""Room for two thirds of the chunks, of two ranks for a third, so that servers evict."""
TREE, SMALL_TREE = "64MiB", "1MiB"
IN_A_CALL: Final = 12
"""Chunks that one call may evict: for those that it stores, or writes through."""
LOCKED_S: Final = 20.0
"""An engine of vLLM's tries a locked tier again after 10 s; a server that is gone must not hold it longer than that."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The tiers of a cell, nearest first: ``m``, ``s`` and ``t``."""

    tiers: str
    ranks: int = 1
    mover: str = "copy"
    servers: int = 1
    small: bool = False
    """The shared directory has room for a third of the chunks, so that servers evict."""

    @property
    def stored(self) -> int:
        """The nearest tier that outlives a server."""
        return self.tiers.index("s" if "s" in self.tiers else "t")

    @property
    def tree_capacity(self) -> str:
        """Of the shared directory."""
        return SMALL_TREE if self.small else TREE


SETUPS: Final = {
    "slab/alone": Setup("s"),
    "slab/two ranks, io_uring": Setup("s", ranks=2, mover="posix_uring"),
    "slab/aio": Setup("s", mover="posix_aio"),
    "slab/behind memory": Setup("ms"),
    "slab/behind memory, before a tree": Setup("mst"),
    "tree/alone": Setup("t"),
    "tree/two ranks, io_uring": Setup("t", ranks=2, mover="posix_uring"),
    "tree/evicting": Setup("t", small=True),
    "tree/behind memory": Setup("mt"),
    "tree/two servers": Setup("t", servers=2),
    "tree/two servers, behind memory, evicting": Setup("mt", servers=2, small=True),
}


def cells(seed: int) -> Iterator[Cell]:
    """Return the cells of this part."""
    for name, setup in SETUPS.items():
        for number in range(CELLS_EACH):
            run = Killing(setup, f"{seed} {name} {number}").run
            yield Cell(f"{name}/{number}", run, limit_s=2 * KILLS * CHECKED_S)


class Ledger:
    """What a server has surely stored, in memory that outlives it."""

    def __init__(self) -> None:
        shared = np.frombuffer(mmap.mmap(-1, len(NUMBERS) + 1), dtype=np.uint8)
        self.sure = shared[: len(NUMBERS)]
        """By number: 1 once the index on disk has it, or its file its name, until it is evicted."""
        self._busy = shared[len(NUMBERS) :]

    @property
    def is_busy(self) -> bool:
        """Whether the server was in a call that may evict, ``IN_A_CALL`` at most: these are not noted yet."""
        return bool(self._busy[0])

    def __enter__(self) -> None:
        self._busy[0] = 1

    def __exit__(self, *_: object) -> None:
        self._busy[0] = 0


Report = tuple[Outcome, bool]
"""What a server says, once it has checked everything, and when something goes wrong later; and whether it has."""


class Killing:
    """A cell: kills ``KILLS`` servers one after the other, of two that share a directory now one and now the other."""

    def __init__(self, setup: Setup, seed: str) -> None:
        self._setup, self._seed = setup, seed
        self._total, self._counts = Outcome(), Counter[str](kills=0)
        self._made = 0

    def run(self) -> Outcome:
        """In the cell's process."""
        setup, choose, root, total = self._setup, random.Random(self._seed), Path("storage").absolute(), self._total
        ledgers = [Ledger() for _ in range(setup.servers)]
        processes = [self._new(root, ledger) for ledger in ledgers]
        for process in processes:
            process.begin()
        for kill in range(KILLS):
            server = kill % setup.servers
            process, successor = processes[server], self._new(root, ledgers[server])
            is_early = choose.random() < 0.3
            if not is_early:
                self._wait_until_checked(process)
            self._listen(process, choose.uniform(0.0, EARLY_S if is_early else LATE_S))
            self._counts["kills"] += 1
            process.kill()
            successor.begin()
            if (status := self._ended(process)) != -signal.SIGKILL:
                total.dead.append(f"after {self._counts['kills']} kills: the server had ended by itself, with {status}")
            processes[server] = successor
        for process, ledger in zip(processes, ledgers, strict=True):
            self._wait_until_checked(process)
            until_s = time.monotonic() + CHECKED_S
            # Of servers that evict nothing is known to be stored.
            while not setup.small and not ledger.sure.any() and time.monotonic() < until_s and not process.has_ended:
                self._take(process.hear(0.01))
            process.kill()
            self._ended(process)
        for path in root.glob("slab/*/index.table"):  # as commands do
            try:
                list(IndexReader(path).rows())
            except TierError as error:
                total.dead.append(f"nixl-offload ls cannot read what a kill has left: {error}")
        self._counts["drafts"] += len(_drafts_in(root))
        _age_drafts_in(root)
        last = self._new(root, ledgers[0], is_last=True)
        last.begin()
        self._wait_until_checked(last)
        if status := self._ended(last):
            total.dead.append(f"the last server, which was to end by itself, ended with {status}")
        total.leaks += _left_behind(root)
        if not setup.small and not self._counts["sure"]:
            total.missed.append("nothing was surely stored before any kill")
        total.counts = dict(self._counts)
        return total

    def _new(self, root: Path, ledger: Ledger, *, is_last: bool = False) -> ServerProcess:
        self._made += 1
        return ServerProcess(partial(_serve, self._setup, root, ledger, f"{self._seed} {self._made}", is_last))

    def _take(self, reports: list[Report]) -> bool:
        """Add what a server has said to the outcome. Returns whether it has checked everything."""
        for outcome, _ in reports:
            self._counts.update(outcome.counts)
            self._total.add(outcome, f"after {self._counts['kills']} kills")
        return any(is_checked for _, is_checked in reports)

    def _wait_until_checked(self, process: ServerProcess) -> None:
        if not self._listen(process, CHECKED_S, until_checked=True):
            self._total.dead.append(f"after {self._counts['kills']} kills: {NOT_CHECKED}")

    def _listen(self, process: ServerProcess, seconds: float, *, until_checked: bool = False) -> bool:
        """Take what a server says until then, or until it ends or has checked everything. Whether it has."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0 and not process.has_ended:
            if self._take(process.hear(left_s)) and until_checked:
                return True
        return False

    def _ended(self, process: ServerProcess) -> int:
        """Wait for its end; return its exit code: 0, or the signal's number below 0."""
        status = process.join()
        while not process.has_ended:
            self._take(process.hear(0.0))
        return status


class ServerProcess:
    """A server in a process of its own that can be killed: forked, so before the parent has a thread. It begins when
    ``begin`` is called.
    """

    def __init__(self, serve: Callable[[Callable[[Report], None]], None]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()

        def run() -> None:
            try:
                theirs.recv()
                serve(theirs.send)
            except BaseException:  # noqa: BLE001 - it is what came out
                theirs.send((Outcome(dead=[traceback.format_exc(limit=-4)]), False))
            os._exit(0)

        self._process = context.Process(target=run)
        self._process.start()
        theirs.close()
        self.has_ended = False
        """Known once all that it said was heard."""

    def begin(self) -> None:
        """Let it open its storage."""
        self._pipe.send(True)

    def hear(self, timeout_s: float) -> list[Report]:
        """Return what it said meanwhile, after ``timeout_s`` at most; [] as well when it has ended."""
        try:
            return [self._pipe.recv()] if self._pipe.poll(max(0.0, timeout_s)) else []
        except (EOFError, OSError):  # killed, perhaps in the middle of a report
            self.has_ended = True
            return []

    def kill(self) -> None:
        """Send SIGKILL; ``join`` afterwards."""
        self._process.kill()

    def join(self) -> int:
        """Wait for its end; return its exit code."""
        self._process.join()
        return self._process.exitcode or 0


# In a server's process.


def _serve(setup: Setup, root: Path, ledger: Ledger, seed: str, is_last: bool, tell: Callable[[Report], None]) -> None:
    """Open, check, tell, and go on storing until the end; the last one ends by itself."""
    background.FIRST_PAUSE_S = background.LONGEST_PAUSE_S = 0.02
    choose, outcome = random.Random(seed), Outcome()
    server = _open(setup, root, outcome)
    _check(setup, root, server, ledger, outcome)
    tell((outcome, True))
    if is_last:
        outcome = Outcome()
        _end(setup, root, server, outcome)
        tell((outcome, False))
    while not is_last:
        for _ in range(choose.randrange(200, 2000)):
            if server.room > 4 and choose.random() < 0.5:
                with ledger:
                    server.store(choose.sample(NUMBERS, 4))
                    _note_evictions(setup, server, ledger)
            with ledger:
                server.step()
                _note_evictions(setup, server, ledger)
            if choose.random() < 0.05 and not setup.small:  # else another thread, or server, may evict at any time
                _make_sure(setup, server, ledger)
            if choose.random() < 0.01:
                with ledger:
                    server.check(choose.sample(NUMBERS, 20))
                    _note_evictions(setup, server, ledger)
            if server.wrong:
                tell((Outcome(wrong=server.wrong), False))
                server.wrong = []
            time.sleep(0.0005)
        server.close()
        outcome = Outcome()
        server = _open(setup, root, outcome)
        tell((outcome, False))


def _open(setup: Setup, root: Path, outcome: Outcome) -> Server:
    """Open, in vain only while the server that was killed has not quite ended."""
    tiers = tiers_of(setup.tiers, root, SLAB, setup.tree_capacity)
    server = Server(config_of(*tiers), ranks=setup.ranks, mover=setup.mover)
    server.until(lambda: server.is_open, "opening", LOCKED_S)
    outcome.counts["locked"] = server.refused.count("locked")
    outcome.dead += [f"a tier did not open at once: {cause}" for cause in server.refused if cause != "locked"]
    return server


def _end(setup: Setup, root: Path, server: Server, outcome: Outcome) -> None:
    for _ in range(2 if setup.small else 1):  # what a small directory has is not stored, and may then be evicted
        server.store(NUMBERS[:4])
        server.until(lambda: server.is_at_rest, "what was begun after the last kill")
        whole, _ = server.check(NUMBERS[:4])
    if len(whole) < 4:
        outcome.missed.append(f"of 4 chunks stored after the last kill only {len(whole)} are there")
    outcome.wrong += server.wrong
    if "t" in setup.tiers and is_kept(server.config.shared[0]):  # type: ignore[arg-type]

        def is_kept_to() -> bool:
            used_bytes = sum(status.st_size for _, status in files(root / "tree"))
            return not _drafts_in(root) and used_bytes <= parse_size(setup.tree_capacity)

        # Eviction goes by the filesystem's free space. Where other cells free as much as this one writes, the next
        # pass is the regular one.
        server.until(is_kept_to, "keeping the directory to its capacity", timeout_s=PASS_S + 15.0)
    server.close()


def _check(setup: Setup, root: Path, server: Server, ledger: Ledger, outcome: Outcome) -> None:
    """Look at every chunk. ``ledger`` is what the server before has left."""
    was_sure, was_busy = {number for number in NUMBERS if ledger.sure[number]}, ledger.is_busy
    with ledger:  # what loads leave in memory is written through, and may evict what the server before has stored
        whole, bad = server.check(NUMBERS)
        gone = _evicted(setup, server) - bad
        ledger.sure[:] = 0
    outcome.counts |= {"checks": 1, "whole": len(whole), "found but a miss": len(bad), "sure": len(was_sure)}
    outcome.wrong += server.wrong
    server.wrong = []
    lost = was_sure - whole - gone
    if len(lost) > (IN_A_CALL if was_busy else 0):
        outcome.missed.append(f"{len(lost)} of {len(was_sure)} chunks that were surely stored are gone: {sorted(lost)}")
    if bad and "s" not in setup.tiers and not setup.small and setup.ranks == 1:  # of two ranks one may lack its file
        outcome.missed.append(f"chunks {sorted(bad)} are files by their names, but not whole")
    for tier in server.serving:
        if isinstance(tier, SlabTier):
            outcome.missed += _unequal(tier)


def _unequal(tier: SlabTier) -> list[str]:
    """Compare what a slab's index says in memory and on disk, and the bytes on disk with the capacity."""
    directory = tier._directory
    assert directory is not None
    if not tier._durable.flush(20.0):
        return ["the index was not written within 20 s"]
    found = []
    rows = {row.key: (row.offset, row.slot_bytes) for row in IndexReader(directory.index_path).rows()}
    known = {key: (tier._index.location(key).offset, tier._index.location(key).slot_bytes) for key in tier._index}
    if rows != {key: place for key, place in known.items() if tier.state(key) is State.READY}:
        found.append(f"the index has {len(rows)} rows on disk and {len(known)} chunks in memory, and they differ")
    check_slots(tier)
    if tree_bytes(directory.root) > parse_size(SLAB):
        found.append(f"{tree_bytes(directory.root)} bytes on disk, the capacity is {SLAB}")
    return found


def _evicted(setup: Setup, server: Server) -> set[int]:
    gone = server.removed(setup.stored)
    return {number for number in NUMBERS if key_of(number) in gone} if gone else set()


def _note_evictions(setup: Setup, server: Server, ledger: Ledger) -> None:
    for number in _evicted(setup, server):
        ledger.sure[number] = 0


def _make_sure(setup: Setup, server: Server, ledger: Ledger) -> None:
    """Have the index written, and note what is stored now."""
    ready = server.ready(setup.stored, NUMBERS)
    tier = server.serving[setup.stored]
    if not isinstance(tier, SlabTier) or tier._durable.flush(20.0):
        for number in ready:
            ledger.sure[number] = 1


# What is left.


def _drafts_in(root: Path) -> list[Path]:
    return [path for path, _ in files(root / "tree") if path.name.startswith(".") and path.name.endswith(".tmp")]


def _age_drafts_in(root: Path) -> None:
    """Make drafts, and scratch files, so old that nobody can be writing them."""
    for path, _ in files(root):
        if path.name.startswith("."):
            with suppress(OSError):
                os.utime(path, (time.time() - DRAFT_AGE_S,) * 2)


def _left_behind(root: Path) -> list[str]:
    """Return the files that should not be there."""
    left = []
    for path in sorted(root.rglob("*")):
        name = path.name
        is_known = path.is_dir() or name in ("lock", "manifest.json", ".evict.lock") or name.endswith(".slab")
        is_known |= name == "index.table" or len(name.split(".")[0]) == 40
        if not is_known:
            left.append(f"{path.relative_to(root)}, {path.stat().st_size} bytes, is left")
    return left
