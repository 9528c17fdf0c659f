"""Both halves of a slab tier over a real directory: which chunks survive a reset and a restart, and a directory that is
lost, hangs, is full, or belongs to another engine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from nixl_offload.errors import TierError
from nixl_offload.index import State
from nixl_offload.movers.threaded import CopyMover
from nixl_offload.tiers.ownership import DirectoryLock, is_held_by
from nixl_offload.tiers.slab.directory import TierDirectory
from nixl_offload.tiers.slab.file import PAUSE_S, SlabFile, SlabLink, SlabPlace, open_link, rank_file_name
from nixl_offload.tiers.slab.tier import LOOK_PAUSE_S, SlabTier
from nixl_offload.types import Key, Location, Outcome
from tests.contexts import context_of, slab_config
from tests.mounts import mounted
from tests.unit.catalog_rig import key
from tests.unit.engine_rig import until
from tests.unit.stored_rig import namespace_of

SLOT = 64 << 10
WAIT_S = 20.0


class Rank:
    """A rank's half on a clock of its own."""

    def __init__(self, place: SlabPlace) -> None:
        self.path = Path(place.directory) / rank_file_name(0)
        self.now_s = 0.0
        sizes = place.slots.rank_bytes, place.slots.extent_bytes
        self.slab = SlabFile(self.path, *sizes, owner=place.owner, is_locked_here=place.is_locked_here())
        self._mover = CopyMover()
        self.slab.open()
        self.link = SlabLink(self.slab, self._mover, lambda: self.now_s)
        self.link.connect()

    def may_store(self) -> bool:
        """Ask after all pauses are over."""
        self.now_s += PAUSE_S
        return self.link.may_store()

    def close(self) -> None:
        self.link.close()
        self._mover.close()


class Server:
    """Engines on one directory, one after the other or at once. They are closed at the end."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self.config = slab_config(path, 128 << 20)
        self._stack = stack

    def tier(self, **options: Any) -> SlabTier:
        tier = SlabTier.open(self.config, context_of(namespace_of(), [SLOT], **options))
        return self._stack.enter_context(closing(tier))

    def rank(self, tier: SlabTier) -> Rank:
        return self._stack.enter_context(closing(Rank(tier.place)))

    def is_opened_by(self, place: SlabPlace) -> bool:
        """Open and close a rank's half as a rank does. Raises TierError."""
        with closing(CopyMover()) as mover, closing(open_link(self.config, place, 0, mover)):
            return True


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with ExitStack() as stack:
        yield Server(tmp_path / "kv", stack)
    assert [t.name for t in threading.enumerate() if t.name.startswith("nixl-offload")] == []


def store(tier: SlabTier, number: int) -> Location:
    location = tier.reserve(key(number), SLOT, [])
    assert location is not None
    tier.commit((key(number),))
    return location


def look(tier: SlabTier, now_s: float) -> None:
    """Report a failed store, and wait for the look that follows."""
    tier.after_store([key(1)], {key(1): Outcome.FAILED}, now_s)
    until(lambda: not tier._looks.pending)


def test_a_failed_opening_holds_nothing_back(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps neither the lock, which the engine's next attempt needs, nor the index's thread."""

    def fails(*arguments: object) -> list[Key]:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(SlabTier, "adopt", fails)
        with pytest.raises(MemoryError):
            server.tier()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("nixl-offload")] == []
    store(server.tier(), 1)


def test_a_restart_finds_what_was_stored_and_a_reset_forgets_all_of_it(server: Server) -> None:
    """What was being read or written during the reset is not found after the restart either; what came later is."""
    tier = server.tier()
    places = [store(tier, number) for number in range(4)]
    tier.close()
    tier = server.tier()
    assert tier.pin([key(number) for number in range(4)]) == places
    tier.unpin((key(0),))
    tier.reserve(key(8), SLOT, [])
    tier.clear()
    assert tier.state(key(1)) is State.EVICTING
    assert store(tier, 9) == places[0], "the one slot that nobody held is free at once, the held ones are not"
    for number in (1, 2, 3):
        tier.unpin((key(number),))
    assert not tier.commit((key(8),))
    assert len(tier) == 1
    tier.close()
    tier = server.tier()
    assert len(tier) == 1
    assert tier.state(key(9)) is State.READY


def test_what_was_being_written_at_shutdown_is_found_again(server: Server) -> None:
    """Ranks may have finished it. Chunks that were given up, and unknown ones, are not found."""
    tier = server.tier()
    kept = tier.reserve(key(1), SLOT, [])
    tier.reserve(key(2), SLOT, [])
    tier.abort(key(2))
    tier.reserve(key(3), SLOT, [])
    tier.retire(key(3))
    tier.close([key(number) for number in range(1, 5)])
    tier.close([key(1)])
    tier = server.tier()
    assert [tier.state(key(number)) for number in range(1, 5)] == [State.READY, None, None, None]
    assert tier.pin((key(1),)) == [kept]
    tier.unpin((key(1),))
    tier.reserve(key(5), SLOT, [])
    tier.clear()
    tier.close([key(5)])
    assert len(server.tier()) == 0, "a reset counts for what is being written, too"


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_directory_that_is_lost_is_left_alone(server: Server, is_taken: bool) -> None:
    """Nothing is stored there any more, nor written to an index, which may be another engine's; what is known is
    served. A rank reads the file that it has. A directory that was deleted is not made anew before the next start.
    """
    tier = server.tier()
    store(tier, 1)
    rank, gone = server.rank(tier), server.path.with_name("gone")
    assert rank.may_store()
    server.path.rename(gone)
    other = server.tier() if is_taken else None
    others_rank = server.rank(other) if other is not None else None
    assert not rank.may_store()
    assert rank.link.trouble == ("locked" if is_taken else "missing")
    assert rank.link.may_load()
    assert os.path.samestat(os.fstat(rank.slab._fd), (gone / rank.path.relative_to(server.path)).stat())
    look(tier, 100.0)
    assert tier.reserve(key(2), SLOT, []) is None
    assert tier.state(key(1)) is State.READY
    if other is not None and others_rank is not None:
        assert others_rank.may_store()
        store(other, 3)
        other.close()
    tier.clear()
    tier.close()
    assert server.path.exists() == is_taken
    again = server.tier()
    assert [again.state(key(number)) for number in (1, 2, 3)] == [None, None, State.READY if is_taken else None]


def test_a_directory_that_hangs_costs_one_thread(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one look at it has not returned there is no second, and closing does not wait for it for ever."""
    tier = server.tier()
    entered, go_on = threading.Semaphore(0), threading.Event()

    def hang(self: TierDirectory) -> bool:
        entered.release()
        return go_on.wait(WAIT_S)

    monkeypatch.setattr(TierDirectory, "is_held", hang)
    for attempt in range(1, 4):
        tier.check_directory(attempt * 2 * LOOK_PAUSE_S)
    assert entered.acquire(timeout=WAIT_S)
    tier.close(timeout_s=0.01)
    assert not entered.acquire(blocking=False)
    go_on.set()
    until(lambda: not tier._looks.pending)


def test_a_directory_made_anew_between_two_looks(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine takes it after the first look at the lock: its file is opened, found out, and not cut."""
    tier, looks = server.tier(), list[Path]()

    def look(path: Path, owner: str) -> bool:
        held = is_held_by(path, owner)
        looks.append(path)
        if len(looks) == 1:
            server.path.rename(server.path.with_name("gone"))
            theirs = Path(server.tier().place.directory) / rank_file_name(0)
            theirs.write_bytes(bytes(4 * SLOT))
        return held

    monkeypatch.setattr("nixl_offload.tiers.slab.file.is_held_by", look)
    slab = SlabFile(Path(tier.place.directory) / rank_file_name(0), SLOT, SLOT, owner=tier.place.owner)
    with pytest.raises(TierError, match="in use by another engine"):
        slab.open()
    assert slab.path.stat().st_size == 4 * SLOT


def test_chunks_are_evicted_where_others_have_filled_the_drive(server: Server) -> None:
    """The first store that the drive has no room for fails; those after it go where others' chunks were. When there is
    room again the slab grows.
    """
    numbers, others = count(), server.path / "others"

    def put(tier: SlabTier, rank: Rank) -> tuple[int, list[Key]] | None:
        """Return the offset and the evicted chunks; None if the drive is full, of which the tier is then informed."""
        new, evicted = key(next(numbers)), list[Key]()
        location = tier.reserve(new, SLOT, evicted)
        assert location is not None
        assert rank.may_store()
        try:
            for _ in rank.link.begin_write(new, location, SLOT, 0):
                pass
        except TierError:
            tier.abort(new)
            look(tier, rank.now_s)
            assert rank.link.trouble == "full"
            return None
        tier.commit((new,))
        return location.offset, evicted

    with mounted(server.path, "size=64m"):
        tier = server.tier()
        rank = server.rank(tier)
        assert put(tier, rank)
        space = os.statvfs(server.path)
        others.write_bytes(bytes(space.f_bavail * space.f_frsize - 3 * tier.place.slots.extent_bytes))
        while grown := put(tier, rank):
            assert not grown[1]
        first = put(tier, rank)
        assert first is not None
        assert first[1], "evicted"
        others.unlink()
        tier.on_step(rank.now_s)
        until(lambda: not tier._looks.pending)
        more = put(tier, rank)
        assert more is not None
        assert more[0] > first[0]
        assert not more[1]
        rank.close()
        tier.close()


def test_a_rank_makes_nothing_under_an_empty_mount_point(server: Server) -> None:
    """It opens once the drive and its lock are back."""
    place, away = server.tier().place, server.path.with_name("not mounted")
    server.path.rename(away)
    server.path.mkdir()
    with pytest.raises(TierError, match="not mounted") as caught:
        server.is_opened_by(place)
    assert caught.value.cause == "missing"
    assert not any(server.path.iterdir())
    server.path.rmdir()
    away.rename(server.path)
    assert server.is_opened_by(place)
    assert (Path(place.directory) / rank_file_name(0)).is_file()


def test_a_lock_that_nobody_holds_keeps_no_rank_out(server: Server, tmp_path: Path) -> None:
    """A rank on another machine than the scheduler: no lock there, or what an earlier engine left."""
    tier = server.tier()
    tier.place = replace(tier.place, directory=str(tmp_path / "kv there" / "ns"), machine="another")
    assert server.rank(tier).may_store()
    lock = DirectoryLock(tmp_path / "kv there" / "lock")
    lock.acquire()
    with pytest.raises(TierError, match="in use by another engine"):
        server.rank(tier)
    lock.release()
    assert server.rank(tier).may_store()


def test_data_parallel_ranks_know_their_own_engine(server: Server) -> None:
    """The lock of their root counts; the lock of the path is shared."""
    tiers = [server.tier(dp_index=index, dp_engines=range(2)) for index in range(2)]
    assert all(server.rank(tier).may_store() for tier in tiers)
    tiers[0].place = replace(tiers[0].place, directory=tiers[1].place.directory)
    with pytest.raises(TierError, match="in use by another engine"):
        server.rank(tiers[0])
