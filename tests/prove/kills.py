"""SIGKILL at random moments: a server is killed while it opens, checks, stores, loads, evicts, writes through or
closes, and another, which waited for that, opens the same storage at once.

Checked by each server that opens: nothing keeps it from opening; every chunk that it finds is loaded, and is what was
stored or a miss; what had surely been stored before the kill is there; capacities are kept. At the end: no file is left
that nobody would remove. Which calls a kill meets depends on timing, so a seed repeats a finding by and large only.
"""

from __future__ import annotations

import mmap
import os
import pickle
import random
import select
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from nixl_offload.errors import TierError
from nixl_offload.index import State
from nixl_offload.tiers.shared_dir.kind import is_kept
from nixl_offload.tiers.slab.index_reader import IndexReader
from nixl_offload.tiers.slab.tier import SlabTier
from nixl_offload.units import parse_size
from tests.prove.cells import Cell, Outcome
from tests.prove.kills_index import index_cells
from tests.prove.server import Server, config_of, key_of, memory, slab, tree

KILLS = 4
"""Of each cell."""
NUMBERS = 120
"""Chunks there are."""
SLAB = "41MiB"
SMALL_TREE = "1MiB"
EARLY_S = 0.3
"""Kills that meet a start come within this time after the server before was killed."""
LATE_S = 0.4
"""The others, within this time after it has checked everything."""
LOCKED_S = 20.0
"""An engine of vLLM's tries a locked tier again after 10 s; a server that is gone must not hold it longer than that."""
LIFE_S = 60.0
DRAFT_AGE_S = 7200.0
"""Older than a draft that a writer may still be at."""


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

    def config(self, root: Path) -> list[dict[str, Any]]:
        """Return the tiers' config. ``root``: what outlives servers."""
        made = {
            "m": memory("512KiB"),
            "s": {**slab(root / "slab", SLAB), **self._mover()},
            "t": {**tree(root / "tree", SMALL_TREE if self.small else "64MiB"), **self._mover()},
        }
        return [made[kind] for kind in self.tiers]

    def _mover(self) -> dict[str, Any]:
        return {} if self.mover == "copy" else {"mover": "posix", "posix_api": self.mover}


SETUPS = {
    "slab/alone": Setup("s"),
    "slab/two ranks, io_uring": Setup("s", ranks=2, mover="io_uring"),
    "slab/aio": Setup("s", mover="aio"),
    "slab/behind memory": Setup("ms"),
    "slab/behind memory, before a tree": Setup("mst"),
    "tree/alone": Setup("t"),
    "tree/two ranks, io_uring": Setup("t", ranks=2, mover="io_uring"),
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
            yield Cell(f"{name}/{number}", partial(_run, setup, f"{seed} {name} {number}"), limit_s=KILLS * LIFE_S)
    yield from index_cells(seed)


class Ledger:
    """What a server has surely stored, in memory that outlives it."""

    def __init__(self) -> None:
        self._memory = np.frombuffer(mmap.mmap(-1, NUMBERS + 1), dtype=np.uint8)
        self.sure = self._memory[:NUMBERS]
        """By number: 1 once the journal has it, or its file its name, until it is evicted."""
        self._busy = self._memory[NUMBERS:]

    @property
    def is_busy(self) -> bool:
        """Whether the server was in a call that may evict: what that evicts is not noted before it returns."""
        return bool(self._busy[0])

    def __enter__(self) -> None:
        self._busy[0] = 1

    def __exit__(self, *_: object) -> None:
        self._busy[0] = 0


@dataclass(slots=True)
class Told:
    """What a server tells, once it has checked everything, and when something goes wrong later."""

    outcome: Outcome = field(default_factory=Outcome)
    is_checked: bool = False


class Life:
    """A server's process. It begins when ``begin`` is called, and ends when it is killed."""

    def __init__(self, serve: Callable[[Callable[[Told], None]], None]) -> None:
        begin, self._begin = os.pipe()
        self.told, tell = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(begin)
            os.close(tell)
        else:
            os.close(self._begin)
            os.close(self.told)
            _live(serve, begin, tell)
        self._heard = bytearray()

    def begin(self) -> None:
        """Let it open its storage."""
        os.write(self._begin, b"!")  # that it is closed tells nothing: lives that were forked meanwhile have it open
        os.close(self._begin)

    def hear(self, timeout_s: float) -> list[Told]:
        """Return what it told meanwhile, after ``timeout_s`` at most; [] as well when it has ended."""
        if not select.select([self.told], [], [], max(0.0, timeout_s))[0]:
            return []
        self._heard += os.read(self.told, 1 << 20)
        told = []
        while len(self._heard) >= 8 and len(self._heard) >= 8 + (size := int.from_bytes(self._heard[:8], "big")):
            told.append(pickle.loads(self._heard[8 : 8 + size]))
            del self._heard[: 8 + size]
        return told

    def kill(self) -> None:
        """Send SIGKILL; ``bury`` it afterwards."""
        os.kill(self.pid, signal.SIGKILL)

    def bury(self) -> tuple[list[Told], int]:
        """Wait for its end; return what it told last, and its status."""
        status = os.waitpid(self.pid, 0)[1]
        told = []
        while more := self.hear(0.0):
            told += more
        os.close(self.told)
        return told, status


def _live(serve: Callable[[Callable[[Told], None]], None], begin: int, tell: int) -> NoReturn:
    """In the server's process."""

    def told(what: Told) -> None:
        data = pickle.dumps(what)
        os.write(tell, len(data).to_bytes(8, "big") + data)

    try:
        os.read(begin, 1)
        serve(told)
    except BaseException:  # noqa: BLE001 - it is what came out
        told(Told(Outcome(dead=[traceback.format_exc(limit=-4)])))
    os._exit(0)


def _run(setup: Setup, seed: str) -> Outcome:
    """Kill ``KILLS`` servers one after the other, of two that share a directory now the one and now the other."""
    choose, root, total = random.Random(seed), Path("storage").absolute(), Outcome()
    counts: Counter[str] = Counter(kills=0)
    ledgers = [Ledger() for _ in range(setup.servers)]
    made = 0

    def new(server: int) -> Life:
        nonlocal made
        made += 1
        return Life(partial(_serve, setup, root, ledgers[server], f"{seed} {made}"))

    def take(told: list[Told]) -> bool:
        for one in told:
            counts.update(one.outcome.counts)
            for kind in ("wrong", "dead", "leaks", "missed"):
                getattr(total, kind).extend(
                    f"{kind} after {counts['kills']} kills: {what}" for what in getattr(one.outcome, kind)
                )
        return any(one.is_checked for one in told)

    lives = [new(server) for server in range(setup.servers)]
    for life in lives:
        life.begin()
    for kill in range(KILLS):
        server = kill % setup.servers
        life, heir = lives[server], new(server)
        early = choose.random() < 0.3
        _wait(life, take, choose.uniform(0.0, EARLY_S if early else LATE_S), until_checked=not early)
        counts["kills"] += 1
        life.kill()
        heir.begin()
        told, status = life.bury()
        take(told)
        if status != signal.SIGKILL:
            total.dead.append(f"after {counts['kills']} kills: the server had ended by itself, with {status}")
        lives[server] = heir
    for life in lives:
        _wait(life, take, 0.0, until_checked=True)
        life.kill()
        take(life.bury()[0])
    if "s" in setup.tiers:
        _read_index(root, total)
    _age_drafts(root, counts)
    last = Life(partial(_serve_and_close, setup, root, ledgers[0]))
    last.begin()
    take(last.bury()[0])
    total.leaks += _left_behind(setup, root)
    total.counts = dict(counts)
    return total


def _wait(life: Life, take: Callable[[list[Told]], bool], delay_s: float, *, until_checked: bool) -> None:
    until_s = time.monotonic() + LIFE_S
    while until_checked and time.monotonic() < until_s:
        told = life.hear(1.0)
        if take(told):
            break
        if not told and select.select([life.told], [], [], 0)[0]:
            return  # it has ended
    until_s = time.monotonic() + delay_s
    while (left_s := until_s - time.monotonic()) > 0:
        if not take(life.hear(left_s)) and select.select([life.told], [], [], 0)[0]:
            time.sleep(min(0.01, left_s))


# In a server's process.


def _open(setup: Setup, root: Path, counts: dict[str, int]) -> Server:
    """Open, again and again while the server that was killed has not quite ended. Raises TierError after a while."""
    config, began_s = config_of(*setup.config(root)), time.monotonic()
    while True:
        try:
            return Server(config, ranks=setup.ranks, mover="copy" if setup.mover == "copy" else "")
        except TierError as error:
            if error.cause != "locked" or time.monotonic() - began_s > LOCKED_S:
                raise
            counts["locked"] = counts.get("locked", 0) + 1
            time.sleep(0.02)


def _serve(setup: Setup, root: Path, ledger: Ledger, seed: str, tell: Callable[[Told], None]) -> None:
    """Open, check, tell, and go on storing until the end."""
    choose, told = random.Random(seed), Told(is_checked=True)
    stored = setup.stored
    server = _open(setup, root, told.outcome.counts)
    _check(setup, root, server, ledger, told.outcome)
    tell(told)
    while True:
        for _ in range(choose.randrange(200, 2000)):
            if server.lanes > 4 and choose.random() < 0.5:
                with ledger:
                    server.store(choose.sample(range(NUMBERS), 4))
                    _note(server, stored, ledger)
            with ledger:
                server.step()
                _note(server, stored, ledger)
            if choose.random() < 0.05:
                _make_sure(setup, server, stored, ledger)
            if choose.random() < 0.01:
                with ledger:
                    server.check(choose.sample(range(NUMBERS), 20))
                    _note(server, stored, ledger)
            if server.wrong:
                tell(Told(Outcome(wrong=server.wrong)))
                server.wrong = []
            time.sleep(0.0005)
        server.close()
        server = _open(setup, root, {})


def _serve_and_close(setup: Setup, root: Path, ledger: Ledger, tell: Callable[[Told], None]) -> None:
    """The last one, which ends by itself."""
    told = Told(is_checked=True)
    server = _open(setup, root, told.outcome.counts)
    _check(setup, root, server, ledger, told.outcome)
    server.store(range(4))
    if not server.until(lambda: server.is_idle):
        told.outcome.dead.append("what was begun after the last kill did not end within 30 s")
    whole, _ = server.check(range(4))
    if len(whole) < 4:
        told.outcome.missed.append(f"of 4 chunks stored after the last kill only {len(whole)} are there")
    told.outcome.wrong += server.wrong
    if "t" in setup.tiers and is_kept(config_of(*setup.config(root)).shared[0]):  # type: ignore[arg-type]
        server.until(lambda: not _drafts(root) and _tree_bytes(root) <= _tree_capacity(setup), timeout_s=10.0)
    server.close()
    tell(told)


def _check(setup: Setup, root: Path, server: Server, ledger: Ledger, outcome: Outcome) -> None:
    """Look at every chunk. ``ledger`` is what the server before has left."""
    was_sure, was_busy = {number for number in range(NUMBERS) if ledger.sure[number]}, ledger.is_busy
    with ledger:  # what loads leave in memory is written through, and may evict what the server before has stored
        whole, bad = server.check(range(NUMBERS))
        gone = _evicted(server, setup.stored) - bad
        ledger.sure[:] = 0
    outcome.counts |= {"checks": 1, "whole": len(whole), "found but a miss": len(bad)}
    outcome.wrong += server.wrong
    server.wrong = []
    lost = was_sure - whole - gone
    outcome.counts["sure"] = len(was_sure)
    if lost and not was_busy:
        outcome.missed.append(f"{len(lost)} of {len(was_sure)} chunks that were surely stored are gone: {sorted(lost)}")
    if bad and "s" not in setup.tiers and not setup.small:
        outcome.missed.append(f"chunks {sorted(bad)} are files by their names, but not whole")
    if server.counts["unanswered"]:
        outcome.missed.append(f"{server.counts['unanswered']} lookups were not answered within 20 s")
    for tier in server.tiers:
        if isinstance(tier, SlabTier):
            outcome.missed += _unequal(tier)


def _unequal(tier: SlabTier) -> list[str]:
    """Compare what a slab's index says with its journal, and the bytes on disk with the capacity."""
    directory = tier._directory
    assert directory is not None
    if not tier._durable.flush(20.0):
        return ["the journal was not written within 20 s"]
    found = []
    rows = {row.key: (row.offset, row.slot_bytes) for row in IndexReader(directory.index_path).rows()}
    known = {key: (tier._index.location(key).offset, tier._index.location(key).slot_bytes) for key in tier._index}
    if rows != {key: place for key, place in known.items() if tier.state(key) is State.READY}:
        found.append(f"the journal has {len(rows)} rows, the index {len(known)} chunks, and they differ")
    used_bytes = sum(taken.bytes_total for taken in tier.occupancy().values())
    if used_bytes != sum(size for _, size in known.values()):
        found.append(f"{used_bytes} bytes are taken, but not by the chunks that are known")
    if directory.measure_bytes() > parse_size(SLAB):
        found.append(f"{directory.measure_bytes()} bytes on disk, the capacity is {SLAB}")
    return found


def _note(server: Server, stored: int, ledger: Ledger) -> None:
    """Take note of evictions."""
    for number in _evicted(server, stored):
        ledger.sure[number] = 0


def _evicted(server: Server, tier: int) -> set[int]:
    """Return what a tier has lost since the last call."""
    changes = server.catalog.changes.take()
    gone = {key for change in changes if change.removed and change.tier == tier for key in change.keys}
    return {number for number in range(NUMBERS) if key_of(number) in gone} if gone else set()


def _make_sure(setup: Setup, server: Server, stored: int, ledger: Ledger) -> None:
    """Have the journal written, and note what is stored now."""
    if setup.small:
        return  # an eviction of another thread, or server, may come at any time
    ready = server.ready(stored, range(NUMBERS))
    tier = server.tiers[stored]
    if isinstance(tier, SlabTier) and not tier._durable.flush(20.0):
        return
    for number in ready:
        ledger.sure[number] = 1


# When all servers are gone.


def _read_index(root: Path, outcome: Outcome) -> None:
    """Read the index as commands do, beside the log that a killed server has left."""
    for path in root.glob("slab/*/index.sqlite"):
        try:
            list(IndexReader(path).rows())
        except TierError as error:
            outcome.dead.append(f"nixl-offload ls cannot read what a kill has left: {error}")


def _drafts(root: Path) -> list[Path]:
    return [path for path in (root / "tree").rglob(".*") if path.name.endswith(".tmp")]


def _age_drafts(root: Path, counts: Counter[str]) -> None:
    """Make drafts, and scratch files, so old that nobody can be writing them."""
    counts["drafts"] += len(_drafts(root))
    for path in root.rglob("*"):
        if path.name.startswith("."):
            with suppress(OSError):
                os.utime(path, (time.time() - DRAFT_AGE_S,) * 2)


def _tree_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "tree").rglob("*") if path.is_file())


def _tree_capacity(setup: Setup) -> int:
    return parse_size(SMALL_TREE if setup.small else "64MiB")


def _left_behind(setup: Setup, root: Path) -> list[str]:
    """Return the files that should not be there."""
    left = []
    for path in sorted(root.rglob("*")):
        name = path.name
        is_known = path.is_dir() or name in ("lock", "manifest.json", ".evict.lock") or name.endswith(".slab")
        is_known |= name == "index.sqlite" or len(name.split(".")[0]) == 72
        if not is_known:
            left.append(f"{path.relative_to(root)}, {path.stat().st_size} bytes, is left")
    return left
