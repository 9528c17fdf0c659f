"""Power loss: what servers write, sync, rename and delete is recorded, and replayed to disks that lack any of what no
``fsync`` had made certain; a server opens each of them.

Checked on each disk: the server opens; every chunk that it finds is what was stored or a miss; what was surely durable
is there; in a shared directory a name leads to a whole file; nothing is left that nobody would ever remove; storing
goes on. On the disk that lacks nothing everything must be there, and it must be, byte for byte, what the recorded
process has left: so nothing was missed in recording. ``disk.py`` says which losses are possible, ``histories.py`` what
is recorded.
"""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.tiers.slab.directory import last_use_s
from tests.prove.cells import Cell, Outcome
from tests.prove.power.disk import Crash, Disk, end_of, samples
from tests.prove.power.histories import NUMBERS, STORIES, Story
from tests.prove.power.recording import History, build, record
from tests.prove.server import Server

DISKS: Final = 250
"""How many are opened of each history; fewer where there are not so many different ones."""
FRESH: Final = (NUMBERS, NUMBERS + 1)
"""Chunks that no history has."""
GO_ON_EVERY: Final = 8
"""On so many of the disks chunks are stored afterwards."""


def cells(seed: int) -> Iterator[Cell]:
    """Return the cells of this part."""
    for name, story in STORIES.items():
        yield Cell(name, partial(try_story, name, story, f"{seed} {name}"), limit_s=1200.0)


def try_story(name: str, story: Story, seed: str, most: int = DISKS) -> Outcome:
    """Record a history in the current directory; open ``most`` of the disks that it may leave, and the whole one."""
    root = Path("recorded").absolute()
    root.mkdir()
    history = record(build(Path.cwd()), root, "tests.prove.power.histories", name)
    since = history.since("begin")
    whole = Crash(history, end_of(history), "journal", since).whole()
    judge = Judge(story, history)
    judge.outcome.missed += _differences(whole, root)
    judge.judge(whole, is_whole=True)
    for disk in itertools.islice(samples(history, since, seed), 4 * most):
        if judge.counts["disks"] > most:
            break
        judge.judge(disk)
    if not judge.counts["whole"]:
        judge.outcome.missed.append("no chunk was whole on any disk")
    judge.outcome.counts = {"histories": 1, "calls": len(history.calls), **judge.counts}
    return judge.outcome


class Judge:
    """Opens disks, and says what is wrong with what is found there."""

    def __init__(self, story: Story, history: History) -> None:
        self.outcome, self.counts = Outcome(), Counter[str]()
        self._story = story
        self._marks = [(said, *words.split()) for said, words in history.marks if words != "begin"]
        self._seen: set[bytes] = set()
        begun = history.since("begin")
        self._lasting = self._ready(begun) - {
            int(number) for said, what, number in self._marks if what == "gone" and said > begun
        }
        """Chunks that were stored and synced before, and are never evicted."""

    def judge(self, disk: Disk, *, is_whole: bool = False) -> None:
        """Open a disk, unless an equal one was opened before."""
        if disk.digest in self._seen:
            return
        self._seen.add(disk.digest)
        self.counts["disks"] += 1
        root = Path("disk").absolute()
        disk.lay_out(root)
        found = Outcome(leaks=_unclaimed(root))
        try:
            server = self._story.open(root, judging=True)
            try:
                self._check(server, disk, found, is_whole=is_whole)
            finally:
                server.close()
        except Exception as error:  # noqa: BLE001 - a server must raise nothing
            found.dead.append(f"{type(error).__name__}: {error}")
        shutil.rmtree(root)
        self.outcome.add(found, disk.words)

    def _check(self, server: Server, disk: Disk, found: Outcome, *, is_whole: bool) -> None:
        story, ready = self._story, self._ready(disk.crashed)
        found.dead += [f"a tier did not open at once: {cause}" for cause in server.refused]
        whole, bad = server.check(range(NUMBERS))
        sure = self._sure(disk, server)
        if lost := sure - whole:
            found.missed.append(f"chunks {sorted(lost)} were surely durable, and are not found")
        # What evicts meanwhile is not noted: engines, and of three tiers what loads leave in memory.
        evicts = story.small_tree or len(story.tiers) == 3
        if is_whole and ready - whole and not evicts:
            found.missed.append(f"nothing was lost, but chunks {sorted(ready - whole)} are")
        if bad and "s" not in story.tiers and story.ranks == 1:  # of two ranks one may lack its file
            found.missed.append(f"chunks {sorted(bad)} are files by their names, but not whole")
        if self.counts["disks"] % GO_ON_EVERY == 0 or is_whole:
            self.counts["gone on"] += 1
            server.store(FRESH)
            server.until(lambda: server.is_at_rest, "what was stored on this disk")
            if len(server.check(FRESH)[0]) < len(FRESH):
                found.missed.append("what was stored on this disk is not there")
        found.wrong += server.wrong
        self.counts += Counter(
            {"whole": len(whole & ready), "missed": len(ready - whole), "sure": len(sure), "found but a miss": len(bad)}
        )

    def _sure(self, disk: Disk, server: Server) -> set[int]:
        """Return the chunks that were durable: in a slab, which never syncs its data, those from before the recording;
        in a shared directory those whose files and names were synced.
        """
        if "m" in self._story.tiers:
            return set()  # lookups promote, and what memory evicts meanwhile is a miss
        if "s" in self._story.tiers:
            return self._lasting
        return {
            number
            for number in range(NUMBERS)
            if all(
                f"tree/{shard_name(server.namespace.name, server.key(number), rank)}" in disk.sure
                for rank in range(self._story.ranks)
            )
        }

    def _ready(self, time: int) -> set[int]:
        ready = set[int]()
        for said, what, number in self._marks:
            if int(said) < time:
                (ready.add if what == "ready" else ready.discard)(int(number))
        return ready


def _unclaimed(root: Path) -> list[str]:
    """Return what a server with another namespace would never remove: slabs that it does not take for ours."""
    return [
        f"{path.relative_to(root)} holds space, but its directory is not known to be ours"
        for path in (root / "slab").glob("*/*.slab")
        if path.stat().st_blocks and last_use_s(path.parent) is None
    ]


def _differences(disk: Disk, root: Path) -> list[str]:
    """Compare with what the recorded process has left."""
    left = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    paths = sorted(left.keys() | disk.files.keys())
    return [f"recording has missed something of {path}" for path in paths if left.get(path) != disk.files.get(path)]
