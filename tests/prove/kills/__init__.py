"""SIGKILL at random moments: a server is killed while it opens, checks, stores, loads, evicts, writes through or
closes, and another, which waited for that, opens the same storage at once.

Checked by each server that opens: nothing keeps it from opening; every chunk that it finds is loaded, and is what was
stored or a miss; what had surely been stored before the kill is there, and something had, but where servers evict;
capacities are kept. At the end: no file is left that nobody would remove. Which calls a kill meets depends on timing,
so a seed repeats a finding by and large only.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from nixl_offload.errors import TierError
from nixl_offload.index.database import IndexReader
from tests.prove.cells import Cell, Outcome
from tests.prove.happenings import files
from tests.prove.kills.process import Report, ServerProcess
from tests.prove.kills.serving import Ledger, Setup, drafts_in, serve, serve_and_close

KILLS = 4
"""Of each cell."""
EARLY_S = 0.3
"""Kills that meet a start come within this time after the server before was killed."""
LATE_S = 0.4
"""The others, within this time after it has checked everything."""
CHECKED_S = 60.0
LIMIT_S = 2 * KILLS * CHECKED_S
NOT_CHECKED = f"the next server has not opened and checked everything within {CHECKED_S:.0f} s"
DRAFT_AGE_S = 7200.0
"""Older than a draft that a writer may still be at."""

SETUPS = {
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

CELLS_EACH = 6


def cells(seed: int) -> Iterator[Cell]:
    """Return the cells of this part."""
    for name, setup in SETUPS.items():
        for number in range(CELLS_EACH):
            yield Cell(
                f"{name}/{number}", partial(_run, setup, f"{seed} {name} {number}"), limit_s=2 * KILLS * CHECKED_S
            )


def _run(setup: Setup, seed: str) -> Outcome:
    """Kill ``KILLS`` servers one after the other, of two that share a directory now the one and now the other."""
    choose, root, total = random.Random(seed), Path("storage").absolute(), Outcome()
    counts: Counter[str] = Counter(kills=0)
    ledgers = [Ledger() for _ in range(setup.servers)]
    made = 0

    def new(server: int) -> ServerProcess:
        nonlocal made
        made += 1
        return ServerProcess(partial(serve, setup, root, ledgers[server], f"{seed} {made}"))

    def take(told: list[Report]) -> bool:
        for one in told:
            counts.update(one.outcome.counts)
            for kind in ("wrong", "dead", "leaks", "missed"):
                getattr(total, kind).extend(
                    f"{kind} after {counts['kills']} kills: {what}" for what in getattr(one.outcome, kind)
                )
        return any(one.is_checked for one in told)

    processes = [new(server) for server in range(setup.servers)]
    for process in processes:
        process.begin()
    for kill in range(KILLS):
        server = kill % setup.servers
        process, successor = processes[server], new(server)
        early = choose.random() < 0.3
        if not early and not _is_checked(process, take):
            total.dead.append(f"after {counts['kills']} kills: {NOT_CHECKED}")
        _listen(process, take, choose.uniform(0.0, EARLY_S if early else LATE_S))
        counts["kills"] += 1
        process.kill()
        successor.begin()
        told, status = process.wait()
        take(told)
        if status != -signal.SIGKILL:
            total.dead.append(f"after {counts['kills']} kills: the server had ended by itself, with {status}")
        processes[server] = successor
    for process, ledger in zip(processes, ledgers, strict=True):
        if not _is_checked(process, take):
            total.dead.append(f"after {counts['kills']} kills: {NOT_CHECKED}")
        if not setup.small:  # of those that evict nothing is known to be stored
            _until_sure(process, ledger, take)
        process.kill()
        take(process.wait()[0])
    if "s" in setup.tiers:
        _read_index(root, total)
    _age_drafts_in(root, counts)
    last = ServerProcess(partial(serve_and_close, setup, root, ledgers[0]))
    last.begin()
    told, status = last.wait()
    if not take(told) or status:
        total.dead.append(f"the last server, which was to end by itself, ended with {status}, or told nothing")
    total.leaks += _left_behind(setup, root)
    if not setup.small and not counts["sure"]:
        total.missed.append("nothing was surely stored before any kill")
    total.counts = dict(counts)
    return total


def _is_checked(process: ServerProcess, take: Callable[[list[Report]], bool]) -> bool:
    """Wait until a server has opened and checked everything. False: it has ended, or not got so far."""
    until_s = time.monotonic() + CHECKED_S
    while time.monotonic() < until_s and not process.has_ended:
        if take(process.hear(1.0)):
            return True
    return False


def _until_sure(process: ServerProcess, ledger: Ledger, take: Callable[[list[Report]], bool]) -> None:
    """Wait until a server has surely stored something."""
    until_s = time.monotonic() + CHECKED_S
    while not ledger.sure.any() and time.monotonic() < until_s and not process.has_ended:
        take(process.hear(0.01))


def _listen(process: ServerProcess, take: Callable[[list[Report]], bool], seconds: float) -> None:
    """Take what a server reports within ``seconds``."""
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        take(process.hear(left_s))
        if process.has_ended:
            time.sleep(min(0.01, left_s))


def _read_index(root: Path, outcome: Outcome) -> None:
    """Read the index as commands do, beside the log that a killed server has left."""
    for path in root.glob("slab/*/index.sqlite"):
        try:
            list(IndexReader(path).rows())
        except TierError as error:
            outcome.dead.append(f"nixl-offload ls cannot read what a kill has left: {error}")


def _age_drafts_in(root: Path, counts: Counter[str]) -> None:
    """Make drafts, and scratch files, so old that nobody can be writing them."""
    counts["drafts"] += len(drafts_in(root))
    for path, _ in files(root):
        if path.name.startswith("."):
            with suppress(OSError):
                os.utime(path, (time.time() - DRAFT_AGE_S,) * 2)


def _left_behind(setup: Setup, root: Path) -> list[str]:
    """Return the files that should not be there."""
    left = []
    for path in sorted(root.rglob("*")):
        name = path.name
        is_known = path.is_dir() or name in ("lock", "manifest.json", ".evict.lock") or name.endswith(".slab")
        # A journal that was begun and never synced is taken by SQLite for its next transaction.
        is_known |= name in ("index.sqlite", "index.sqlite-journal") or len(name.split(".")[0]) == 40
        if not is_known:
            left.append(f"{path.relative_to(root)}, {path.stat().st_size} bytes, is left")
    return left
