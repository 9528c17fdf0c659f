"""Proves that engines keep a directory that they share to its capacity: the least recently used go, whole chunks of any
namespace, nothing of others; one engine at a time does it, and another takes over when that one ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nixl_offload.config import SharedDirConfig
from nixl_offload.errors import ConfigError, StoreError
from nixl_offload.hardware import machine
from nixl_offload.stores.directory import TreeFiles, TreeStore
from nixl_offload.tiers import kinds, ownership
from nixl_offload.tiers.base import TierContext
from nixl_offload.tiers.ownership import kept_free
from nixl_offload.tiers.shared import eviction
from nixl_offload.tiers.shared.eviction import Eviction, shrink
from tests.hostile import HostileFilesystem
from tests.mounts import mounted
from tests.unit.engine_rig import until
from tests.unit.stored_rig import RANKS, namespace_of, put_chunk

SHARD_BYTES = 4096
CHUNK_BYTES = RANKS * SHARD_BYTES
CAPACITY_BYTES = 64 * CHUNK_BYTES
LEFT = 62
"""Chunks that are left after a pass over more than 63: see ``eviction.STEPS``."""


@pytest.fixture
def store(tmp_path: Path) -> TreeStore:
    return TreeStore(str(tmp_path / "kv"))


def old(number: int) -> float:
    """A time for each chunk. At a greater age two chunks would count as equally old."""
    return time.time() - 1000 + number


def fill(store: TreeStore, count: int, *, tenant: str = "default", used_s: Callable[[int], float]) -> list[list[str]]:
    """Store chunks, last used at ``used_s`` of their numbers. Returns the names of each one's shards."""
    chunks = []
    for number in range(count):
        names = put_chunk(store, namespace_of(tenant), number, SHARD_BYTES)
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # evicted already
                os.utime(Path(store.where, name), (used_s(number), used_s(number)))
        chunks.append(names)
    return chunks


@pytest.fixture
def evicting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Eviction]]:
    """Start eviction without pauses; end it with the test."""
    monkeypatch.setattr(eviction, "LOOK_S", 0.02)
    monkeypatch.setattr(eviction, "PASS_S", 0.0)
    with contextlib.ExitStack() as stack:

        def begin(store: TreeStore, capacity_bytes: int = CAPACITY_BYTES, **options: float) -> Eviction:
            begun = Eviction(store, capacity_bytes, name="Tier", **options)
            stack.callback(begun.close)
            return begun

        yield begin


def there(store: TreeStore) -> set[str]:
    return {info.name for info in store.list("")}


def test_what_was_not_used_for_longest_goes(store: TreeStore) -> None:
    """Over two namespaces together, down to the limit, whole chunks. Ages that differ by seconds are enough."""
    now_s = time.time()
    ours = fill(store, 50, used_s=lambda number: now_s - 1000 + 2 * number)
    others = fill(store, 50, tenant="other", used_s=lambda number: now_s - 999 + 2 * number)
    by_age = [chunk for pair in zip(ours, others, strict=True) for chunk in pair]
    assert shrink(store, CAPACITY_BYTES)[0] == 100 - LEFT
    assert there(store) == {name for chunk in by_age[100 - LEFT :] for name in chunk}


def test_what_was_used_before_the_clock_was_set_back_goes_first(store: TreeStore) -> None:
    """Otherwise such chunks would stay until that time has come, and new chunks would go instead."""
    now_s = time.time()
    future = fill(store, 50, used_s=lambda number: now_s + 1e6 + number)
    others = fill(store, 50, tenant="other", used_s=lambda number: now_s - 1000 + number)
    assert shrink(store, CAPACITY_BYTES)[0] == 100 - LEFT
    left = there(store)
    assert {name for chunk in others for name in chunk} <= left
    assert len({name for chunk in future for name in chunk} & left) == (LEFT - 50) * RANKS


@pytest.mark.parametrize("options", ["size=1m", "size=64m,nr_inodes=300"])
def test_a_filesystem_with_less_room_than_the_capacity_is_not_left_full(
    tmp_path: Path, evicting: Callable[..., Eviction], options: str
) -> None:
    """Chunks that were not used for longest make room for new ones, as they do at the capacity: where bytes are gone,
    and where inodes are.
    """
    with mounted(tmp_path / "kv", options):
        store = TreeStore(str(tmp_path / "kv"))
        with pytest.raises(StoreError, match="No space"):
            fill(store, 200, used_s=old)
        oldest = min(there(store), key=lambda name: Path(store.where, name).stat().st_mtime)
        engine = evicting(store, 1 << 40)
        until(lambda: engine.evicted > 0)
        engine.close()
        fill(store, 1, tenant="other", used_s=lambda number: time.time())
        assert oldest not in there(store)
        assert engine.evicted < 10


def test_a_share_of_the_filesystem_stays_free(tmp_path: Path, evicting: Callable[..., Eviction]) -> None:
    """Others need it, and the kubelet evicts a pod that takes it. Stores leave it free, and eviction restores it."""
    root = tmp_path / "kv"

    def free() -> float:
        space = os.statvfs(root)
        return space.f_bavail / space.f_blocks

    with mounted(root):
        store, files = TreeStore(str(root)), TreeFiles(str(root), direct_io=True, kept_free=0.25)
        fill(store, 30, used_s=old)
        with pytest.raises(StoreError, match="25% that stay free") as caught:
            files.abandon(files.create("draft", 600 << 10))
        assert caught.value.cause == "full"
        (root / "others").write_bytes(bytes(int((free() - 0.2) * (1 << 20))))
        assert free() < 0.25
        engine = evicting(store, 1 << 40, kept_free=0.25)
        until(lambda: free() > 0.25)
        engine.close()
        assert there(store)
        files.abandon(files.create("draft", SHARD_BYTES))


def test_whose_drive_leaves_space_to_others(tmp_path: Path) -> None:
    """A drive on which nothing else lies is the tier's alone, unless a container sees only a part of it."""
    drive, part = tmp_path / "drive", tmp_path / "part"
    path, lost, empty_dir = drive / "kv" / "tier", drive / "lost+found", drive / "kv" / "kubernetes.io~empty-dir" / "kv"

    def share(path: Path, **said: str) -> float:
        fields = {"kind": "shared_dir", "path": str(path), "capacity": "1GiB", **said}
        return kept_free(SharedDirConfig.model_validate(fields))

    part.mkdir()
    with mounted(drive):
        for each in (path, lost, empty_dir):
            each.mkdir(parents=True)
        assert share(path) == share(drive) == 0.0
        assert share(path, keep_free="20%") == 0.2
        for seen, kept in ((drive / "kv", 0.1), (empty_dir, 0.2)):
            subprocess.run(["mount", "--bind", str(seen), str(part)], check=True)
            try:
                assert share(part / "tier") == kept
            finally:
                subprocess.run(["umount", str(part)], check=True)
        (drive / "others").touch()
        assert share(path) == 0.1


def test_files_of_others_stay_and_do_not_count(tmp_path: Path) -> None:
    """However old and large they are. A directory that may not be listed, as lost+found, does not stop eviction."""
    hostile = HostileFilesystem()
    store = TreeStore(str(tmp_path / "kv"), hostile)
    stranger = Path(store.where, "notes.txt")
    stranger.write_bytes(bytes(CAPACITY_BYTES))
    os.utime(stranger, (1.0, 1.0))
    fill(store, 63, used_s=old)
    assert shrink(store, CAPACITY_BYTES)[0] == 0
    fill(store, 64, used_s=old)
    Path(store.where, "lost+found").mkdir()
    hostile.refuse(errno.EACCES, "list", f"{store.where}/lost+found")
    assert shrink(store, CAPACITY_BYTES)[0] == 64 - LEFT
    assert len(there(store)) == LEFT * RANKS + 1
    assert stranger.exists()


def test_a_chunk_that_cannot_be_deleted_does_not_keep_others(tmp_path: Path) -> None:
    """All other chunks of the plan are deleted; then the error is raised."""
    hostile = HostileFilesystem()
    store = TreeStore(str(tmp_path / "kv"), hostile)
    chunks = fill(store, 120, used_s=old)
    going = [name for chunk in chunks[: 120 - LEFT] for name in chunk]
    hostile.refuse(errno.EACCES, "unlink", f"{store.where}/{min(going)}")
    with pytest.raises(StoreError, match=f"cannot delete {min(going)}: Permission denied"):
        shrink(store, CAPACITY_BYTES)
    assert {*going} & there(store) == {min(going)}


def test_one_engine_evicts_and_another_takes_over(store: TreeStore, evicting: Callable[..., Eviction]) -> None:
    """Two engines have the directory open: only one deletes. When it ends the other goes on."""
    fill(store, 100, used_s=old)
    both = [evicting(store), evicting(store)]
    until(lambda: len(there(store)) == LEFT * RANKS and any(each.evicted for each in both))
    [first] = [each for each in both if each.evicted]
    [second] = [each for each in both if each is not first]
    first.close()
    fill(store, 100, used_s=old)
    until(lambda: len(there(store)) <= (LEFT + 1) * RANKS and second.evicted > 0)
    assert first.evicted == 100 - LEFT


def test_a_directory_that_vanishes_ends_nothing(
    store: TreeStore, evicting: Callable[..., Eviction], caplog: pytest.LogCaptureFixture
) -> None:
    """One warning; nothing is made in its place; when it is back, eviction goes on."""
    root = Path(store.where)
    evicting(store)
    until((root / eviction.LOCK_NAME).exists)
    root.rename(root.with_name("away"))
    until(lambda: "nothing is evicted" in caplog.text)
    time.sleep(0.1)
    assert not root.exists()
    assert caplog.text.count("nothing is evicted") == 1
    root.with_name("away").rename(root)
    fill(store, 100, used_s=old)
    until(lambda: len(there(store)) <= (LEFT + 1) * RANKS)


def test_a_drive_that_is_mounted_anew_is_kept_to_its_capacity_again(
    tmp_path: Path, evicting: Callable[..., Eviction]
) -> None:
    """Its device number may change. While nothing is mounted, nothing is made there."""
    root = tmp_path / "kv"
    with mounted(root):
        engine = evicting(TreeStore(str(root)), 16 * CHUNK_BYTES)
        until((root / eviction.LOCK_NAME).exists)
    time.sleep(0.1)
    (root / eviction.LOCK_NAME).unlink(missing_ok=True)  # of a look that had begun before the drive went
    time.sleep(0.1)
    assert not list(root.iterdir())
    with mounted(root):
        fill(TreeStore(str(root)), 32, used_s=old)
        until(lambda: engine.evicted > 0)
        engine.close()


@pytest.mark.parametrize(("filesystem", "kept"), [("ext4", True), ("xfs", True), ("nfs4", False), ("lustre", False)])
def test_who_keeps_a_directory_to_its_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filesystem: str, kept: bool
) -> None:
    """Engines on a drive of this machine, a timer elsewhere; the config overrides both."""
    mount = machine.Mount("/", filesystem, "source", (), "8:1")
    monkeypatch.setattr(ownership, "find_mount", lambda path, root: mount)
    fields = {"kind": "shared_dir", "path": str(tmp_path), "capacity": "1GiB"}
    assert ownership.is_kept(SharedDirConfig.model_validate(fields)) is kept
    for said in (True, False):
        assert ownership.is_kept(SharedDirConfig.model_validate({**fields, "evict": said})) is said


def test_a_capacity_of_less_than_two_chunks_is_refused(tmp_path: Path) -> None:
    """Otherwise each chunk would be deleted as soon as it is written."""
    context = TierContext(0, namespace_of("default"), world_size=RANKS)
    least_bytes = 2 * RANKS * context.slot_classes[-1]
    fields = {"kind": "shared_dir", "path": str(tmp_path / "kv"), "evict": True}
    with pytest.raises(
        ConfigError,
        match=rf"too small for this model: chunks of {least_bytes // 2} bytes on all ranks together need at least",
    ):
        kinds.open_tier(SharedDirConfig.model_validate({**fields, "capacity": least_bytes - 1}), context)
    kinds.open_tier(SharedDirConfig.model_validate({**fields, "capacity": least_bytes}), context).close(())
