"""What servers do while they are recorded: short histories and long ones.

``python -m tests.prove.power.histories ROOT NAME``, with the recording library preloaded. The process says in the log
when what matters begins (``begin``), and which chunks may be loaded from a stored tier (``ready 5``, ``gone 5``).
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nixl_offload.tiers.slab.tier import SlabTier
from tests.prove.power.recording import mark
from tests.prove.server import Server, config_of, tiers_of

NUMBERS = 60
"""Chunks there are in any history. A slab has room for 50 of them, two ranks' for 36, an evicting tree for some 14."""
SLAB = {1: "1MiB", 2: "1300KiB"}
"""By ranks: capacities."""


@dataclass(frozen=True, slots=True)
class Story:
    """A history: which tiers, what is done, and how it is tried."""

    tiers: str
    steps: Sequence[str]
    """``open``, ``close``; ``store`` and ``load`` of chunks; ``flush``: the index is written; ``clear``: a
    reset of the cache; ``damage``: the index's file; ``begin``; ``gone``: of chunks that have to be evicted by now.
    """
    ranks: int = 1
    mover: str = "copy"
    small_tree: bool = False

    def open(self, root: Path, *, judging: bool = False) -> Server:
        """Serve, once every tier is open. A server that judges evicts nothing from a tree."""
        capacity = "300KiB" if self.small_tree and not judging else "64MiB"
        config = config_of(*tiers_of(self.tiers, root, SLAB[self.ranks], capacity))
        server = Server(config, ranks=self.ranks, mover=self.mover)
        try:
            server.until(lambda: server.is_open, "opening")
        except BaseException:
            server.close()
            raise
        return server


def tell(root: Path, story: Story) -> None:
    """Do all steps, and have the log say what is stored after each."""
    ready = set[int]()

    def mark_ready() -> None:
        nonlocal ready
        stored = [at for at, kind in enumerate(story.tiers) if kind != "m"]
        now = {number for at in stored for number in server.ready(at, range(NUMBERS))}
        for number in now - ready:
            mark(f"ready {number}")
        for number in ready - now:
            mark(f"gone {number}")
        ready = now

    def is_at_rest() -> bool:
        mark_ready()
        return server.is_at_rest

    for step in story.steps:
        what, *words = step.split()
        numbers = [int(word) for word in words]
        if what == "begin":
            mark("begin")
        elif what == "open":
            server = story.open(root)
            ready = set(range(NUMBERS))  # the server before may have said any of them
            mark_ready()
        elif what == "close":
            server.close()
        elif what == "store":
            for start in range(0, len(numbers), 4):
                server.store(numbers[start : start + 4])
                server.until(is_at_rest, "what was stored")
        elif what == "load":
            server.check(numbers)
            mark_ready()
            assert not server.wrong
        elif what == "flush":
            assert all(tier._durable.flush(20.0) for tier in server.serving if isinstance(tier, SlabTier))
        elif what == "clear":
            server.catalog.clear()
        elif what == "damage":
            (index,) = root.glob("slab/*/index.table")
            with index.open("r+b") as file:
                file.write(bytes(4096))
        else:
            assert what == "gone"
            assert not ready.intersection(numbers), f"{step}: the slab was not full"


def _all(what: str, numbers: Sequence[int]) -> str:
    return " ".join([what, *map(str, numbers)])


def _long() -> Iterator[str]:
    """Long enough for many rows of the index to be written over."""
    choose = random.Random(1)
    yield from ("open", _all("store", range(16)), "flush", "begin")
    for number in range(150):
        yield _all("store", choose.sample(range(NUMBERS), 2))
        if number % 3 == 0:
            yield _all("load", choose.sample(range(NUMBERS), 4))
        yield "flush"
        if number % 50 == 49:
            yield from ("close", "open")


def _evicting() -> Iterator[str]:
    """Each server that opens evicts at once; directories become empty, and are made again."""
    choose = random.Random(1)
    yield "begin"
    for _ in range(6):
        yield from ("open", _all("load", range(NUMBERS)))
        yield from (_all("store", choose.sample(range(NUMBERS), 4)) for _ in range(3))
        yield "close"


_FIRST_START = ("open", "store 0 1", "flush", "close")
_OVERWRITING = (  # a full slab, of which slots get other chunks; some come back, to other slots
    *("open", _all("store", range(54)), "flush", "begin"),
    *("store 55 57", "flush", "store 0 56 58", "flush", "gone 6 8 10"),
)
_EIGHT = _all("store", range(8))
STORIES = {
    "slab/first start": Story("s", _FIRST_START),
    "slab/overwriting": Story("s", _OVERWRITING),
    "slab/overwriting, aio": Story("s", _OVERWRITING, mover="posix_aio"),
    "slab/reopening": Story("s", ("open", _all("store", range(6)), "close", "begin", "open", "store 7", "close")),
    "slab/index made anew": Story("s", ("open", _EIGHT, "flush", "begin", "clear", "store 8 9 0", "flush", "close")),
    "slab/index damaged": Story(
        "s", ("open", _EIGHT, "close", "damage", "begin", "open", "store 8 9", "flush", "close")
    ),
    "slab/long": Story("s", [*_long()]),
    "slab/long, two ranks": Story("s", [*_long()], ranks=2),
    "slab/long, behind memory": Story("ms", [*_long()]),
    "tree/one chunk": Story("t", ("open", "store 1", "flush")),
    "tree/first start": Story("t", _FIRST_START),
    "tree/first start, aio": Story("t", _FIRST_START, mover="posix_aio"),
    "tree/evicting": Story("t", [*_evicting()], small_tree=True),
    "tree/long, two ranks, behind memory": Story("mt", [*_long()], ranks=2),
    "chain/memory, slab, tree": Story("mst", [*_long()]),
}


if __name__ == "__main__":
    tell(Path(sys.argv[1]), STORIES[sys.argv[2]])
    sys.stdout.flush()
    os._exit(0)  # as a kill does: nothing is closed that the story has left open
