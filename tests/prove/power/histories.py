"""What servers do while they are recorded: short histories and long ones.

``python -m tests.prove.power.histories ROOT NAME``, with the recording library preloaded. The process says in the log
when what matters begins (``begin``), and which chunks may be loaded from a stored tier (``ready 5``, ``gone 5``).
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nixl_offload.tiers.slab.tier import SlabTier
from tests.prove.power.disk import Naming
from tests.prove.power.recording import mark
from tests.prove.server import Server, config_of, tiers_of

NUMBERS = 60
"""Chunks there are in any history. A slab has room for 40 of them, two ranks' for 36, an evicting tree for some 14."""
SLAB = {1: "36MiB", 2: "35MiB"}
"""By ranks: the least capacity, most of which is promised to the index."""


@dataclass(frozen=True, slots=True)
class Story:
    """A history: which tiers, what is done, and how it is tried."""

    tiers: str
    tell: Callable[[Path, Story], None]
    ranks: int = 1
    mover: str = "copy"
    small_tree: bool = False
    names: tuple[Naming, ...] = ("journal", "any")
    """Ways in which names may be lost that make a difference."""

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


class Recorded:
    """A server that has the log say what is stored."""

    def __init__(self, root: Path, story: Story) -> None:
        self.server = story.open(root)
        self._stored = [at for at, kind in enumerate(story.tiers) if kind != "m"]
        self.ready = set(range(NUMBERS))  # the server before may have said any of them
        self._mark()

    def store(self, numbers: Sequence[int]) -> None:
        """Store chunks, and wait until they are wherever they go."""
        for start in range(0, len(numbers), 4):
            self.server.store(numbers[start : start + 4])
            self.server.until(self._rests, "what was stored")

    def load(self, numbers: Sequence[int]) -> None:
        """Load what is there of these."""
        self.server.check(numbers)
        self._mark()
        assert not self.server.wrong

    def flush(self) -> None:
        """Have the index's journal written."""
        for tier in self.server.serving:
            if isinstance(tier, SlabTier):
                assert tier._durable.flush(20.0)

    def close(self) -> None:
        """End as a shutdown does."""
        self.server.close()

    def _rests(self) -> bool:
        self._mark()
        return self.server.is_at_rest

    def _mark(self) -> None:
        ready = {number for at in self._stored for number in self.server.ready(at, range(NUMBERS))}
        for number in ready - self.ready:
            mark(f"ready {number}")
        for number in self.ready - ready:
            mark(f"gone {number}")
        self.ready = ready


def _first_start(root: Path, story: Story) -> None:
    server = Recorded(root, story)
    server.store(range(2))
    server.flush()
    server.close()


def _one_chunk(root: Path, story: Story) -> None:
    """All that a server writes before it is cut off is one chunk."""
    server = Recorded(root, story)
    server.store([1])
    server.flush()


def _overwriting(root: Path, story: Story) -> None:
    """A full slab, of which slots get other chunks; some come back, to other slots."""
    server = Recorded(root, story)
    server.store(range(42))
    server.flush()
    mark("begin")
    server.store([43, 45])
    server.flush()
    server.store([1, 44])
    server.flush()
    assert not {2, 3, 5, 7} & server.ready, "the slab was not full"


def _reopening(root: Path, story: Story) -> None:
    server = Recorded(root, story)
    server.store(range(6))
    server.close()
    mark("begin")
    server = Recorded(root, story)
    server.store([7])
    server.close()


def _made_anew(root: Path, story: Story) -> None:
    """A reset of the cache has the index deleted."""
    server = Recorded(root, story)
    server.store(range(8))
    server.flush()
    mark("begin")
    server.server.catalog.clear()
    server.store([8, 9, 0])
    server.flush()
    server.close()


def _damaged_index(root: Path, story: Story) -> None:
    """One that cannot be used is deleted at the start."""
    server = Recorded(root, story)
    server.store(range(8))
    server.close()
    (index,) = root.glob("slab/*/index.sqlite")
    with index.open("r+b") as file:
        file.seek(4096)
        file.write(bytes(4096))
    mark("begin")
    server = Recorded(root, story)
    server.store([8, 9])
    server.flush()
    server.close()


def _long(root: Path, story: Story) -> None:
    """Long enough for the index's log to be written back several times."""
    choose = random.Random(1)
    server = Recorded(root, story)
    server.store(range(16))
    server.flush()
    mark("begin")
    for number in range(150):
        server.store(choose.sample(range(NUMBERS), 2))
        if number % 3 == 0:
            server.load(choose.sample(range(NUMBERS), 4))
        server.flush()
        if number % 50 == 49:
            server.close()
            server = Recorded(root, story)


def _evicting(root: Path, story: Story) -> None:
    """Each server that opens evicts at once; directories become empty, and are made again."""
    choose = random.Random(1)
    mark("begin")
    for _ in range(6):
        server = Recorded(root, story)
        server.load(range(NUMBERS))
        for _ in range(3):
            server.store(choose.sample(range(NUMBERS), 4))
        server.close()


STORIES = {
    "slab/first start": Story("s", _first_start),
    "slab/overwriting": Story("s", _overwriting, names=("journal",)),
    "slab/overwriting, aio": Story("s", _overwriting, mover="posix_aio", names=("journal",)),
    "slab/reopening": Story("s", _reopening),
    "slab/index made anew": Story("s", _made_anew),
    "slab/index damaged": Story("s", _damaged_index),
    "slab/long": Story("s", _long),
    "slab/long, two ranks": Story("s", _long, ranks=2),
    "slab/long, behind memory": Story("ms", _long),
    "tree/one chunk": Story("t", _one_chunk),
    "tree/first start": Story("t", _first_start),
    "tree/first start, aio": Story("t", _first_start, mover="posix_aio"),
    "tree/evicting": Story("t", _evicting, small_tree=True),
    "tree/long, two ranks, behind memory": Story("mt", _long, ranks=2),
    "chain/memory, slab, tree": Story("mst", _long),
}


if __name__ == "__main__":
    _story = STORIES[sys.argv[2]]
    _story.tell(Path(sys.argv[1]), _story)
    sys.stdout.flush()
    os._exit(0)  # as a kill does: nothing is closed that the story has left open
