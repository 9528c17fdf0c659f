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
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.tiers.slab.directory import last_use_s
from tests.prove.cells import Cell, Outcome
from tests.prove.power.disk import Crash, Disk, Naming, crash_times, samples, whole_calls
from tests.prove.power.histories import NUMBERS, STORIES, Story
from tests.prove.power.recording import History, build, record
from tests.prove.server import Server

DISKS = 100
"""How many are opened of each history and way to keep names; of small histories a third more, as samples."""
LIMIT_S = 600.0
FRESH = (NUMBERS, NUMBERS + 1)
"""Chunks that no history has."""
GO_ON_EVERY = 8
"""On so many of the disks chunks are stored afterwards."""


def cells(seed: int) -> Iterator[Cell]:
    """Return the cells of this part."""
    for name, story in STORIES.items():
        for naming in story.names:
            yield Cell(f"{name}, names: {naming}", partial(try_story, name, story, naming, f"{seed} {name}"), LIMIT_S)


def try_story(name: str, story: Story, naming: Naming, seed: str, most: int = DISKS) -> Outcome:
    """Record a history in the current directory, and open ``most`` of the disks that it may leave, or a few more."""
    root = Path("recorded").absolute()
    root.mkdir()
    history = record(build(Path.cwd()), root, "tests.prove.power.histories", name)
    since = history.since("begin")
    outcome, counts = Outcome(), Counter[str]()
    whole = Crash(history, crash_times(history, since)[-1], naming, since).whole()
    outcome.missed += _differences(whole, root)
    judge = Judge(story, history, outcome, counts)
    judge.judge(whole, is_whole=True)
    if story.is_small:
        times = crash_times(history, since)
        every = _unlike(disk for at in times for disk in whole_calls(Crash(history, at, naming, since)))
        tried = every if len(every) <= most else random.Random(seed).sample(every, most)
        counts["possible"], counts["of these tried"] = len(every), len(tried)
        disks = tried + list(itertools.islice(samples(history, naming, since, seed), most // 3))
    else:
        disks = list(itertools.islice(samples(history, naming, since, seed), most))
    for disk in disks:
        judge.judge(disk)
    if not counts["whole"]:
        outcome.missed.append("no chunk was whole on any disk")
    outcome.counts = {"histories": 1, "calls": len(history.calls), **counts}
    return outcome


class Judge:
    """Opens disks, and says what is wrong with what is found there."""

    def __init__(self, story: Story, history: History, outcome: Outcome, counts: Counter[str]) -> None:
        self._story = story
        self._outcome = outcome
        self._counts = counts
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
        self._counts["disks"] += 1
        root = Path("disk").absolute()
        disk.lay_out(root)
        wrong, dead, leaks, missed = list[str](), list[str](), list[str](), list[str]()
        try:
            leaks += _unclaimed(root)
            server = self._story.open(root, judging=True)
            try:
                whole, bad = server.check(range(NUMBERS))
                ready = self._ready(disk.crashed)
                self._counts["whole"] += len(whole & ready)
                self._counts["missed"] += len(ready - whole)
                sure = self._sure(disk, server)
                self._counts["sure"] += len(sure)
                if lost := sure - whole:
                    missed.append(f"chunks {sorted(lost)} were surely durable, and are not found")
                self._counts["found but a miss"] += len(bad)
                # What evicts meanwhile is not told: engines, and of three tiers what loads leave in memory.
                evicts = self._story.small_tree or len(self._story.tiers) == 3
                if is_whole and ready - whole and not evicts:
                    missed.append(f"nothing was lost, but chunks {sorted(ready - whole)} are")
                if (
                    bad and "s" not in self._story.tiers and self._story.ranks == 1
                ):  # of two ranks one may lack its file
                    missed.append(f"chunks {sorted(bad)} are files by their names, but not whole")
                if self._counts["disks"] % GO_ON_EVERY == 0 or is_whole:
                    self._counts["gone on"] += 1
                    server.store(FRESH)
                    server.until(lambda: server.is_at_rest, "what was stored on this disk")
                    if len(server.check(FRESH)[0]) < len(FRESH):
                        missed.append("what was stored on this disk is not there")
                wrong += server.wrong
            finally:
                server.close()
        except Exception as error:  # noqa: BLE001 - a server must raise nothing
            dead.append(f"{type(error).__name__}: {error}")
        shutil.rmtree(root)
        for kind, found in (("wrong", wrong), ("dead", dead), ("leaks", leaks), ("missed", missed)):
            getattr(self._outcome, kind).extend(f"{disk.told}: {what}" for what in found)

    def _sure(self, disk: Disk, server: Server) -> set[int]:
        """Return the chunks that were durable: in a slab, which never syncs its data, those from before the recording;
        in a shared directory those whose files and names were synced.
        """
        if "m" in self._story.tiers:
            return set()  # lookups promote, and what memory evicts meanwhile is a miss
        if "s" in self._story.tiers:
            return self._lasting
        name = server.namespace.name
        return {
            number
            for number in range(NUMBERS)
            if all(
                f"tree/{shard_name(name, server.key(number), rank)}" in disk.sure for rank in range(self._story.ranks)
            )
        }

    def _ready(self, time: int) -> set[int]:
        ready = set[int]()
        for said, what, number in self._marks:
            if int(said) < time:
                (ready.add if what == "ready" else ready.discard)(int(number))
        return ready


def _unlike(disks: Iterable[Disk]) -> list[Disk]:
    """Return one each of equal disks."""
    return list({disk.digest: disk for disk in disks}.values())


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
