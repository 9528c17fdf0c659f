"""What a server does from its start until it is killed.

Threading: its own process; one thread drives it.
"""

from __future__ import annotations

import mmap
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nixl_offload.errors import TierError
from nixl_offload.index import State
from nixl_offload.index.database import IndexReader
from nixl_offload.tiers.ownership import is_kept
from nixl_offload.tiers.slab.directory import tree_bytes
from nixl_offload.tiers.slab.tier import SlabTier
from nixl_offload.units import parse_size
from tests.prove.cells import Outcome
from tests.prove.happenings import files
from tests.prove.kills.process import Report
from tests.prove.server import Server, config_of, key_of, memory, slab, tree

NUMBERS = 120
"""Chunks there are."""
SLAB = "36MiB"
"""The least: room for a third of the chunks, of two ranks for two thirds, so that servers evict."""
TREE, SMALL_TREE = "64MiB", "1MiB"
IN_A_CALL = 12
"""Chunks that one call may evict: for those that it stores, or writes through."""
LOCKED_S = 20.0
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

    def config(self, root: Path) -> list[dict[str, Any]]:
        """Return the tiers' config. ``root``: what outlives servers."""
        made = {
            "m": memory("512KiB"),
            "s": slab(root / "slab", SLAB),
            "t": tree(root / "tree", SMALL_TREE if self.small else TREE),
        }
        return [made[kind] for kind in self.tiers]


class Ledger:
    """What a server has surely stored, in memory that outlives it."""

    def __init__(self) -> None:
        self._memory = np.frombuffer(mmap.mmap(-1, NUMBERS + 1), dtype=np.uint8)
        self.sure = self._memory[:NUMBERS]
        """By number: 1 once the journal has it, or its file its name, until it is evicted."""
        self._busy = self._memory[NUMBERS:]

    @property
    def is_busy(self) -> bool:
        """Whether the server was in a call that may evict, ``IN_A_CALL`` at most: these are not noted yet."""
        return bool(self._busy[0])

    def __enter__(self) -> None:
        self._busy[0] = 1

    def __exit__(self, *_: object) -> None:
        self._busy[0] = 0


def _open(setup: Setup, root: Path, counts: dict[str, int]) -> Server:
    """Open, again and again while the server that was killed has not quite ended. Raises TierError after a while."""
    config, began_s = config_of(*setup.config(root)), time.monotonic()
    while True:
        try:
            return Server(config, ranks=setup.ranks, mover=setup.mover)
        except TierError as error:
            if error.cause != "locked" or time.monotonic() - began_s > LOCKED_S:
                raise
            counts["locked"] = counts.get("locked", 0) + 1
            time.sleep(0.02)


def serve(setup: Setup, root: Path, ledger: Ledger, seed: str, tell: Callable[[Report], None]) -> None:
    """Open, check, tell, and go on storing until the end."""
    choose, told = random.Random(seed), Report(is_checked=True)
    stored = setup.stored
    server = _open(setup, root, told.outcome.counts)
    _check(setup, root, server, ledger, told.outcome)
    tell(told)
    while True:
        for _ in range(choose.randrange(200, 2000)):
            if server.room > 4 and choose.random() < 0.5:
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
                tell(Report(Outcome(wrong=server.wrong)))
                server.wrong = []
            time.sleep(0.0005)
        server.close()
        server = _open(setup, root, {})


def serve_and_close(setup: Setup, root: Path, ledger: Ledger, tell: Callable[[Report], None]) -> None:
    """The last one, which ends by itself."""
    told = Report(is_checked=True)
    server = _open(setup, root, told.outcome.counts)
    _check(setup, root, server, ledger, told.outcome)
    server.store(range(4))
    server.until(lambda: server.is_at_rest, "what was begun after the last kill")
    whole, _ = server.check(range(4))
    if len(whole) < 4:
        told.outcome.missed.append(f"of 4 chunks stored after the last kill only {len(whole)} are there")
    told.outcome.wrong += server.wrong
    if "t" in setup.tiers and is_kept(config_of(*setup.config(root)).shared[0]):  # type: ignore[arg-type]
        is_kept_to = lambda: not drafts_in(root) and _tree_bytes(root) <= _tree_capacity(setup)  # noqa: E731
        server.until(is_kept_to, "keeping the directory to its capacity", timeout_s=10.0)
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
    if len(lost) > (IN_A_CALL if was_busy else 0):
        outcome.missed.append(f"{len(lost)} of {len(was_sure)} chunks that were surely stored are gone: {sorted(lost)}")
    if bad and "s" not in setup.tiers and not setup.small and setup.ranks == 1:  # of two ranks one may lack its file
        outcome.missed.append(f"chunks {sorted(bad)} are files by their names, but not whole")
    if server.unanswered:
        outcome.missed.append(f"{server.unanswered} lookups were not answered within 20 s")
    for tier in server.serving:
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
    tier.check()
    if tree_bytes(directory.root) > parse_size(SLAB):
        found.append(f"{tree_bytes(directory.root)} bytes on disk, the capacity is {SLAB}")
    return found


def _note(server: Server, stored: int, ledger: Ledger) -> None:
    """Take note of evictions."""
    for number in _evicted(server, stored):
        ledger.sure[number] = 0


def _evicted(server: Server, tier: int) -> set[int]:
    """Return what a tier has lost since the last call."""
    changes = server.catalog.take_changes()
    gone = {key for change in changes if change.removed and change.tier == tier for key in change.keys}
    return {number for number in range(NUMBERS) if key_of(number) in gone} if gone else set()


def _make_sure(setup: Setup, server: Server, stored: int, ledger: Ledger) -> None:
    """Have the journal written, and note what is stored now."""
    if setup.small:
        return  # an eviction of another thread, or server, may come at any time
    ready = server.ready(stored, range(NUMBERS))
    tier = server.serving[stored]
    if isinstance(tier, SlabTier) and not tier._durable.flush(20.0):
        return
    for number in ready:
        ledger.sure[number] = 1


def drafts_in(root: Path) -> list[Path]:
    return [path for path, _ in files(root / "tree") if path.name.startswith(".") and path.name.endswith(".tmp")]


def _tree_bytes(root: Path) -> int:
    return sum(told.st_size for _, told in files(root / "tree"))


def _tree_capacity(setup: Setup) -> int:
    return parse_size(SMALL_TREE if setup.small else TREE)
