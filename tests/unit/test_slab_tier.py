"""The scheduler's half of a file tier over a real directory: what outlives a reset and a restart."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
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
from tests.unit.gc_rig import namespace_of

SLOT = 64 << 10
WAIT_S = 20.0
OpenTier = Callable[..., SlabTier]


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[OpenTier]:
    """Return a function that opens a tier on the same directory each time; closes what it opened."""
    config = slab_config(tmp_path / "kv", 128 << 20)
    opened: list[SlabTier] = []

    def build(**options: Any) -> SlabTier:
        opened.append(SlabTier.open(config, context_of(namespace_of(), [SLOT], **options)))
        return opened[-1]

    yield build
    for item in opened:
        item.close()
    assert [t.name for t in threading.enumerate() if t.name.startswith("nixl-offload")] == []


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big") + bytes(4))


def store(tier: SlabTier, number: int) -> Location:
    location = tier.reserve(key(number), SLOT, [])
    assert location is not None
    tier.commit(key(number))
    return location


def test_a_failed_opening_holds_nothing_back(open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the lock, which the next attempt of the same engine needs, nor the journal's thread."""

    def fails(*arguments: object) -> list[Key]:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(SlabTier, "adopt", fails)
        with pytest.raises(MemoryError):
            open_tier()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("nixl-offload")] == []
    store(open_tier(), 1)


def test_a_restart_finds_what_was_stored_and_a_reset_forgets_all_of_it(open_tier: OpenTier) -> None:
    """What was being read or written during the reset is not found after the restart either; what came later is."""
    tier = open_tier()
    places = [store(tier, number) for number in range(4)]
    tier.close()
    tier = open_tier()
    assert [tier.pin(key(number)) for number in range(4)] == places
    tier.unpin(key(0))
    tier.reserve(key(8), SLOT, [])
    tier.clear()
    assert tier.state(key(1)) is State.EVICTING
    after = store(tier, 9)
    assert after == places[0], "the one slot that nobody held is free at once, the held ones are not"
    for number in (1, 2, 3):
        tier.unpin(key(number))
    assert not tier.commit(key(8))
    assert len(tier) == 1
    tier.close()
    tier = open_tier()
    assert len(tier) == 1
    assert tier.state(key(9)) is State.READY


def test_what_was_being_written_at_shutdown_is_found_again(open_tier: OpenTier) -> None:
    """The ranks may have finished it; not what was given up meanwhile, nor what nobody knows of."""
    tier = open_tier()
    kept = tier.reserve(key(1), SLOT, [])
    tier.reserve(key(2), SLOT, [])
    tier.abort(key(2))
    tier.reserve(key(3), SLOT, [])
    tier.retire(key(3))
    tier.close([key(number) for number in range(1, 5)])
    tier.close([key(1)])
    tier = open_tier()
    assert [tier.state(key(number)) for number in range(1, 5)] == [State.READY, None, None, None]
    assert tier.pin(key(1)) == kept
    tier.unpin(key(1))
    tier.reserve(key(5), SLOT, [])
    tier.clear()
    tier.close([key(5)])
    assert len(open_tier()) == 0, "a reset counts for what is being written, too"


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_directory_that_is_lost_is_left_alone(open_tier: OpenTier, tmp_path: Path, is_taken: bool) -> None:
    """Nothing is stored there any more, nor written to an index, which may be another engine's; what is known is
    served. A directory that was deleted is not made anew before the next start.
    """
    tier = open_tier()
    store(tier, 1)
    (tmp_path / "kv").rename(tmp_path / "gone")
    other = open_tier() if is_taken else None
    look(tier, 100.0)
    assert tier.reserve(key(2), SLOT, []) is None
    assert tier.state(key(1)) is State.READY
    if other is not None:
        store(other, 3)
        other.close()
    tier.clear()
    tier.close()
    assert (tmp_path / "kv").exists() == is_taken
    again = open_tier()
    assert [again.state(key(number)) for number in (1, 2, 3)] == [None, None, State.READY if is_taken else None]


def test_a_directory_that_hangs_costs_one_thread(open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one look at it has not returned there is no second, and closing does not wait for it for ever."""
    tier = open_tier()
    entered, go_on = threading.Semaphore(0), threading.Event()

    def hang(self: TierDirectory) -> bool:
        entered.release()
        return go_on.wait(WAIT_S)

    monkeypatch.setattr(TierDirectory, "is_held", hang)
    for attempt in range(1, 4):
        tier.look(attempt * 2 * LOOK_PAUSE_S)
    assert entered.acquire(timeout=WAIT_S)
    tier.close(timeout_s=0.01)
    assert not entered.acquire(blocking=False)
    go_on.set()
    assert tier._looker is not None
    tier._looker.join(WAIT_S)


# -- a rank, and another engine in the directory ---------------------------------------------------------------------


class Rank:
    """A rank's half on a clock of its own."""

    def __init__(self, place: SlabPlace) -> None:
        self.path = Path(place.directory) / rank_file_name(0)
        self.now_s = 0.0
        self.slab = SlabFile(
            self.path, place.rank_bytes, place.extent_bytes, owner=place.owner, is_locked_here=place.is_locked_here()
        )
        self._mover = CopyMover()
        self.slab.open()
        self.link = SlabLink(self.slab, self._mover, lambda: self.now_s)
        self.link.connect()

    def may_store(self) -> bool:
        """Ask after any pause is over."""
        self.now_s += PAUSE_S
        return self.link.may_store()

    def close(self) -> None:
        self.link.close()
        self._mover.close()


@pytest.fixture
def open_rank() -> Iterator[Callable[[SlabTier], Rank]]:
    ranks: list[Rank] = []

    def build(tier: SlabTier) -> Rank:
        ranks.append(Rank(tier.place))
        return ranks[-1]

    yield build
    for rank in ranks:
        rank.close()


OpenRank = Callable[[SlabTier], Rank]


def look(tier: SlabTier, now_s: float) -> None:
    """Tell of a store that failed, and wait for what is done about it."""
    tier.stored([key(1)], {key(1): Outcome.FAILED}, now_s)
    assert tier._looker is not None
    tier._looker.join(WAIT_S)


def test_a_directory_made_anew_between_two_looks(
    open_tier: OpenTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine takes it after the first look at the lock: its file is opened, found out, and not cut."""
    tier, looks = open_tier(), list[Path]()

    def look(path: Path, owner: str) -> bool:
        held = is_held_by(path, owner)
        looks.append(path)
        if len(looks) == 1:
            (tmp_path / "kv").rename(tmp_path / "gone")
            theirs = Path(open_tier().place.directory) / rank_file_name(0)
            theirs.write_bytes(bytes(4 * SLOT))
        return held

    monkeypatch.setattr("nixl_offload.tiers.slab.file.is_held_by", look)
    slab = SlabFile(Path(tier.place.directory) / rank_file_name(0), SLOT, SLOT, owner=tier.place.owner)
    with pytest.raises(TierError, match="in use by another engine"):
        slab.open()
    assert slab.path.stat().st_size == 4 * SLOT


def test_a_rank_whose_directory_another_engine_made_anew_stores_nothing(
    open_tier: OpenTier, open_rank: OpenRank, tmp_path: Path
) -> None:
    """It goes on reading the file that it has; its stores fail, by which the scheduler's half finds out."""
    tier = open_tier()
    rank = open_rank(tier)
    assert rank.may_store()
    (tmp_path / "kv").rename(tmp_path / "gone")
    other = open_tier()
    others_rank = open_rank(other)
    assert not rank.may_store()
    assert rank.link.trouble == "locked"
    assert rank.link.may_load()
    assert os.path.samestat(
        os.fstat(rank.slab._fd), (tmp_path / "gone" / rank.path.relative_to(tmp_path / "kv")).stat()
    )
    assert tier.reserve(key(2), SLOT, []) is not None
    look(tier, 100.0)
    assert tier.reserve(key(3), SLOT, []) is None
    assert not rank.may_store()
    assert others_rank.may_store()


def test_a_store_without_a_descriptor_does_not_pause_the_others(
    open_tier: OpenTier, open_rank: OpenRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slab is well; only the process has too many files open."""
    tier = open_tier()
    rank = open_rank(tier)
    where = tier.reserve(key(1), SLOT, [])
    assert where is not None

    def refuse() -> None:
        raise TierError("too many open files", cause="files")

    monkeypatch.setattr(rank.slab, "check", refuse)
    with pytest.raises(TierError):
        next(rank.link.begin_write(key(1), where, SLOT))
    assert (rank.link.trouble, rank.link.may_store()) == ("none", True)


def test_chunks_are_evicted_where_others_have_filled_the_drive(
    open_tier: OpenTier, open_rank: OpenRank, tmp_path: Path
) -> None:
    """The first store that the drive has no room for fails; those after it go where others' chunks were. When there is
    room again the slab grows.
    """
    (tmp_path / "kv").mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(tmp_path / "kv")]
    if subprocess.run(mounting, check=False, capture_output=True).returncode:
        pytest.skip("a tmpfs mount is not permitted here")
    numbers = count()

    def put(tier: SlabTier, rank: Rank) -> tuple[int, list[Key]] | None:
        """Return the offset, and what was evicted. None: the drive is full, as the tier has heard by now."""
        new, evicted = key(next(numbers)), list[Key]()
        location = tier.reserve(new, SLOT, evicted)
        assert location is not None
        assert rank.may_store()
        try:
            for _ in rank.link.begin_write(new, location, SLOT):
                pass
        except TierError:
            tier.abort(new)
            look(tier, rank.now_s)
            assert rank.link.trouble == "full"
            return None
        tier.commit(new)
        return location.offset, evicted

    try:
        tier = open_tier()
        rank = open_rank(tier)
        assert put(tier, rank)
        space = os.statvfs(tmp_path / "kv")
        (tmp_path / "kv" / "others").write_bytes(bytes(space.f_bavail * space.f_frsize - 3 * tier.place.extent_bytes))
        while grown := put(tier, rank):
            assert not grown[1]
        first = put(tier, rank)
        assert first is not None
        assert first[1], "evicted"
        (tmp_path / "kv" / "others").unlink()
        tier.flush(rank.now_s)
        assert tier._looker is not None
        tier._looker.join(WAIT_S)
        more = put(tier, rank)
        assert more is not None
        assert more[0] > first[0]
        assert not more[1]
    finally:
        rank.close()
        tier.close()
        subprocess.run(["umount", "-l", str(tmp_path / "kv")], check=True)


def open_and_close(place: SlabPlace, path: Path) -> None:
    """Open a rank's half as a rank does."""
    config, mover = slab_config(path, 128 << 20), CopyMover()
    try:
        open_link(config, place, 0, mover).close()
    finally:
        mover.close()


def test_a_rank_makes_nothing_under_an_empty_mount_point(open_tier: OpenTier, tmp_path: Path) -> None:
    """It opens once the drive is back, and with it the lock."""
    place = open_tier().place
    (tmp_path / "kv").rename(tmp_path / "not mounted")
    (tmp_path / "kv").mkdir()
    with pytest.raises(TierError, match="not mounted") as caught:
        open_and_close(place, tmp_path / "kv")
    assert caught.value.cause == "missing"
    assert not any((tmp_path / "kv").iterdir())
    (tmp_path / "kv").rmdir()
    (tmp_path / "not mounted").rename(tmp_path / "kv")
    open_and_close(place, tmp_path / "kv")
    assert (Path(place.directory) / rank_file_name(0)).is_file()


def test_a_lock_that_nobody_holds_keeps_no_rank_out(open_tier: OpenTier, open_rank: OpenRank, tmp_path: Path) -> None:
    """A rank on another machine than the scheduler: no lock there, or what an earlier engine left."""
    tier = open_tier()
    place = replace(tier.place, directory=str(tmp_path / "kv there" / "ns"), machine="another")
    tier.place = place
    assert open_rank(tier).may_store()
    lock = DirectoryLock(tmp_path / "kv there" / "lock")
    lock.acquire()
    with pytest.raises(TierError, match="in use by another engine"):
        open_rank(tier)
    lock.release()
    assert open_rank(tier).may_store()


def test_data_parallel_ranks_know_their_own_engine(open_tier: OpenTier, open_rank: OpenRank, tmp_path: Path) -> None:
    """The lock of their root counts: that of the path is shared."""
    tiers = [open_tier(dp_index=index, dp_engines=range(2)) for index in range(2)]
    assert all(open_rank(tier).may_store() for tier in tiers)
    tiers[0].place = replace(tiers[0].place, directory=tiers[1].place.directory)
    with pytest.raises(TierError, match="in use by another engine"):
        open_rank(tiers[0])
