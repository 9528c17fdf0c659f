"""The tier's directory: its lock, its capacity, which files may be removed and which never are, the geometry."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nixl_offload.config import parse_config
from nixl_offload.errors import ConfigError, TierError
from nixl_offload.index.durable import max_bytes
from nixl_offload.stores.filesystem import REAL, Filesystem, tree_bytes
from nixl_offload.tiers.ownership import DirectoryLock, holder_of, require_apart, warn_of_others
from nixl_offload.tiers.slab.directory import TierDirectory, remove_namespace
from tests.contexts import back, context_of, opened, slab_config, slab_of
from tests.hostile import HostileFilesystem
from tests.unit.stored_rig import namespace_of

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SLOT = 68 * KIB


def open_tier(
    path: Path,
    capacity_bytes: int = 16 * MIB,
    model: str = "model",
    *,
    slot_classes: Sequence[int] = (SLOT,),
    filesystem: Filesystem = REAL,
    **options: Any,
) -> TierDirectory:
    config, context = slab_config(path, capacity_bytes), context_of(namespace_of(model=model), slot_classes, **options)
    return TierDirectory.open(config, context, filesystem=filesystem)


def fill(tier: TierDirectory, ranks: int = 1) -> None:
    """Back every extent of every rank, as a full cache does."""
    for rank in range(ranks):
        with opened(slab_of(tier, rank), tier.rank_bytes, tier.extent_bytes, direct_io=False) as slab:
            back(slab, 0, tier.rank_bytes)


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_everything_is_private_and_where_the_readme_says(tmp_path: Path, umask: int) -> None:
    """Directories 0700, files 0600 under any umask, a manifest that people can read, names from digests only. A slab
    that was left open to others is closed.
    """
    before = os.umask(umask)
    try:
        tier = open_tier(tmp_path / "a" / "kv")
        fill(tier)
        slab_of(tier).chmod(0o666)
        fill(tier)
    finally:
        os.umask(before)
    namespace = namespace_of(model="model")
    assert tier.namespace_path == tmp_path / "a" / "kv" / namespace.name
    manifest = json.loads((tier.namespace_path / "manifest.json").read_text())
    assert (manifest["fields"]["model"], manifest["namespace"]) == ("model", namespace.digest.hex())
    paths = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
    assert {path.name for path in paths if path.is_file()} == {"lock", "manifest.json", "rank-00000.slab"}
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert tier.is_held()
    tier.close()
    tier.close()


@pytest.mark.parametrize("name", ["lock", ""])
def test_a_lock_counts_while_storage_does_not_say_whose_it_is(tmp_path: Path, name: str) -> None:
    """If storage fails while the directory is checked, storing must not end until the next start."""
    filesystem = HostileFilesystem()
    tier = open_tier(tmp_path, filesystem=filesystem)
    filesystem.refuse(errno.EIO, "stat", str(tmp_path / name if name else tier.namespace_path))
    with contextlib.suppress(OSError):
        assert tier.is_held()
    tier.close()


def test_a_lock_that_is_merely_looked_at_is_free(tmp_path: Path) -> None:
    """If an engine took an examining process for an owner, it would never store again."""
    (tmp_path / "lock").write_bytes(b'{"owner": "an engine that has ended"}')
    assert holder_of(tmp_path / "lock") is None
    locks = [DirectoryLock(tmp_path / "lock") for _ in range(2)]
    for lock in locks:
        lock.acquire(shared=True)
        assert holder_of(tmp_path / "lock") is None, "nobody has it alone"
    locks[0].release()
    with pytest.raises(TierError, match="in use by another engine"):
        locks[0].acquire()
    locks[1].release()
    locks[0].acquire()
    assert f"pid {os.getpid()} on " in str(holder_of(tmp_path / "lock"))
    locks[0].release()


@pytest.mark.parametrize("hint", [b"[" * 4000, b'{"pid": Infinity, "host": "h", "since": "s"}', b"[1]", b""])
def test_a_lock_says_anything(tmp_path: Path, hint: bytes) -> None:
    first = open_tier(tmp_path)
    (tmp_path / "lock").write_bytes(hint)
    with pytest.raises(TierError, match="which one is not known") as caught:
        open_tier(tmp_path)
    assert caught.value.cause == "locked"
    assert holder_of(tmp_path / "lock") == "which one is not known"
    first.close()


@pytest.mark.parametrize(("ranks", "capacity_bytes"), [(1, 4 * MIB), (2, 16 * MIB), (3, 50_000_000)])
def test_capacity_is_a_promise(tmp_path: Path, ranks: int, capacity_bytes: int) -> None:
    """With all slabs full, real bytes and the index's reserve stay within the capacity and use most of it."""
    tier = open_tier(tmp_path / "kv", capacity_bytes, world_size=ranks)
    fill(tier, ranks)
    used_bytes = tree_bytes(tier.root) + max_bytes(ranks * (tier.rank_bytes // SLOT))
    assert 0.75 * capacity_bytes < used_bytes <= capacity_bytes
    assert tier.rank_bytes % tier.extent_bytes == 0
    tier.close()


def test_too_small_a_capacity_names_the_least(tmp_path: Path) -> None:
    """The capacity in the message is enough, and gives every class an extent of four slots."""
    classes = [SLOT, 20 * KIB]
    with pytest.raises(ConfigError, match=r"need at least (\d+)MiB") as caught:
        open_tier(tmp_path, MIB, slot_classes=classes, world_size=2)
    least_bytes = int(str(caught.value).rsplit(" ", 1)[1].removesuffix("MiB")) * MIB
    tier = open_tier(tmp_path, least_bytes, slot_classes=classes, world_size=2)
    assert tier.extent_bytes >= 4 * SLOT
    assert tier.rank_bytes >= 2 * tier.extent_bytes
    tier.close()


def make_foreign(path: Path, model: str, used_s: float, capacity_bytes: int = 64 * MIB) -> Path:
    """Leave the full slab of another model behind, last used at ``used_s``."""
    tier = open_tier(path, capacity_bytes, model)
    with opened(slab_of(tier), tier.rank_bytes, tier.extent_bytes, direct_io=False) as slab:
        back(slab, 0, 3 * MIB)
    os.utime(tier.namespace_path / "manifest.json", (used_s, used_s))
    tier.close()
    return tier.namespace_path


def test_foreign_namespaces_go_oldest_first_and_only_as_far_as_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three namespaces of over 3 MiB in 16 MiB: the least recently used one must go, so that we have half."""
    young, old, middle = (make_foreign(tmp_path, name, used) for name, used in (("y", 3e8), ("o", 2e8), ("m", 1e8)))
    open_tier(tmp_path, 64 * MIB, "m").close()  # which counts as use, though its manifest did not change
    with caplog.at_level(logging.INFO):
        tier = open_tier(tmp_path)
    assert not old.exists()
    assert middle.exists()
    assert young.exists()
    assert [record.message for record in caplog.records if old.name in record.message and "removed" in record.message]
    fill(tier)
    assert tree_bytes(tier.root) <= 16 * MIB
    assert tier.rank_bytes > 6 * MIB
    tier.close()


def test_what_is_not_recognised_is_counted_and_never_removed(tmp_path: Path) -> None:
    """Users' files, directories that only look like ours, and what a link points to survive; their bytes count."""
    outside = tmp_path / "outside"
    real = make_foreign(outside, "real", 1e8)
    root = tmp_path / "kv"
    root.mkdir()
    (root / real.name).symlink_to(real)
    no_manifest = root / ("ab" * 16)
    no_manifest.mkdir()
    (no_manifest / "rank-00000.slab").write_bytes(bytes(MIB))
    wrong_manifest = root / ("cd" * 16)
    wrong_manifest.mkdir()
    (wrong_manifest / "manifest.json").write_text(json.dumps({"namespace": "ef" * 32}))
    (wrong_manifest / "data").write_bytes(bytes(MIB))
    shared = root / ("12" * 16)
    (shared / "00").mkdir(parents=True)
    (shared / "manifest.json").write_text(json.dumps({"namespace": "12" * 32, "created_s": 1.0}))
    (shared / "00" / "shard").write_bytes(bytes(MIB))
    (root / "notes.txt").write_bytes(bytes(7 * MIB))
    tier = open_tier(root)
    fill(tier)
    assert tree_bytes(tier.root) <= 16 * MIB
    tier.close()
    for path in (root / real.name, real / "rank-00000.slab", no_manifest / "rank-00000.slab", wrong_manifest / "data",
                 shared / "00" / "shard", root / "notes.txt"):  # fmt: skip
        assert path.exists(), path
    (root / "notes.txt").write_bytes(bytes(14 * MIB))
    with pytest.raises(TierError, match="not ours") as caught:
        open_tier(root)
    assert caught.value.cause == "full"


@pytest.mark.parametrize(
    ("mode", "warns"), [(0o700, False), (0o755, False), (0o770, True), (0o702, True), (0o1777, True)]
)
def test_a_directory_that_others_can_write_to_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(mode)
    warn_of_others(str(tmp_path / "kv"))
    assert [f"mode {mode:04o}" in record.getMessage() for record in caplog.records] == [True] * warns
    warn_of_others(str(tmp_path / "away"))


@pytest.mark.parametrize("plant", [Path.symlink_to, Path.hardlink_to])
def test_a_slab_s_name_that_leads_elsewhere_is_removed(tmp_path: Path, plant: Callable[[Path, Path], None]) -> None:
    """Its target is neither cut nor written."""
    open_tier(tmp_path / "kv").close()
    (directory,) = (path for path in (tmp_path / "kv").iterdir() if path.is_dir())
    target = tmp_path / "target"
    target.write_bytes(bytes(20 * MIB))
    (directory / "rank-00000.slab").unlink(missing_ok=True)
    plant(directory / "rank-00000.slab", target)
    open_tier(tmp_path / "kv").close()
    assert target.stat().st_size == 20 * MIB
    assert target.stat().st_nlink == 1
    assert not (directory / "rank-00000.slab").exists()


@pytest.mark.parametrize("inside", ["", "deeper"])
def test_directories_that_a_link_makes_one_are_refused(tmp_path: Path, inside: str) -> None:
    """The config names two, and a slab would take the other tier's files for its own."""
    (tmp_path / "drive" / inside).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "drive" / inside)
    tiers = [
        {"kind": "slab", "path": str(tmp_path / "drive"), "capacity": "1GiB"},
        {"kind": "shared_dir", "path": str(tmp_path / "link"), "capacity": "1GiB"},
    ]
    slab, shared = parse_config({"tiers": tiers}).tiers
    with pytest.raises(TierError, match=r"link and .*drive, are .* the same, or one in the other"):
        require_apart(shared, [slab])
    (tmp_path / "link").unlink()
    require_apart(shared, [slab])


def test_links_inside_a_removed_namespace_are_not_followed(tmp_path: Path) -> None:
    """Removing a namespace removes links in it, never what they point to."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    root = tmp_path / "kv"
    victim = make_foreign(root, "victim", 1e8)
    (victim / "link").symlink_to(precious)
    (victim / "directory").mkdir()
    (victim / "directory" / "deep").symlink_to(precious)
    (root / "bulk").write_bytes(bytes(6 * MIB))
    open_tier(root).close()
    assert not victim.exists()
    assert (precious / "file").read_text() == "kept"


def test_what_a_killed_start_has_left_is_removed_and_takes_no_room(tmp_path: Path) -> None:
    """Otherwise a kill at a bad moment would cost an extent, and the least capacity would be too small."""
    tier = open_tier(tmp_path)
    rank_bytes, directory = tier.rank_bytes, tier.namespace_path
    tier.close()
    left = [".mover-probe-abc_d123", "manifest.tmp"]
    for name in left:
        (directory / name).write_bytes(bytes(512 * KIB))
    tier = open_tier(tmp_path)
    assert tier.rank_bytes == rank_bytes
    assert not {path.name for path in directory.iterdir()} & set(left)
    tier.close()


def test_a_smaller_capacity_cuts_the_slabs_and_keeps_the_geometry(tmp_path: Path) -> None:
    """Chunks below the new end keep their place, those beyond are refused, and the files shrink."""
    tier = open_tier(tmp_path, 64 * MIB)
    fill(tier)
    before = tier.rank_bytes, tier.extent_bytes
    with slab_of(tier).open("r+b") as file:
        file.write(b"kept")
    (tier.namespace_path / "rank-00007.slab").write_bytes(bytes(MIB))
    tier.close()
    tier = open_tier(tmp_path, 32 * MIB)
    assert tier.rank_bytes < before[0]
    assert tier.extent_bytes == before[1]
    assert slab_of(tier).stat().st_size == tier.rank_bytes
    assert slab_of(tier).read_bytes()[:4] == b"kept"
    assert not (tier.namespace_path / "rank-00007.slab").exists(), "a rank that does not exist"
    assert tree_bytes(tier.root) <= 32 * MIB
    tier.close()


@pytest.mark.parametrize("extent", ["x", -1, True, 4096, 68 * KIB + 1, 1 << 60, None])
def test_a_manifest_is_never_trusted(tmp_path: Path, extent: object) -> None:
    """A damaged or forged manifest costs the old geometry, nothing else."""
    tier = open_tier(tmp_path)
    right = tier.extent_bytes
    tier.close()
    path = tier.namespace_path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["slab"]["extent_bytes"] = extent
    path.write_text(json.dumps(manifest) if extent is not None else "{torn")
    tier = open_tier(tmp_path)
    assert tier.extent_bytes == right
    assert json.loads(path.read_text())["slab"]["extent_bytes"] == right
    tier.close()


def test_data_parallel_engines_share_path_and_capacity(tmp_path: Path) -> None:
    """Each has its own root and share; together they keep the capacity. An engine of another shape is kept out."""
    engines = [open_tier(tmp_path, 32 * MIB, dp_index=index, dp_engines=range(2)) for index in range(2)]
    assert [tier.root.name for tier in engines] == ["dp-0", "dp-1"]
    for refused in ({}, {"dp_index": 1, "dp_engines": range(2)}):
        with pytest.raises(TierError) as caught:
            open_tier(tmp_path, 32 * MIB, **refused)
        assert caught.value.cause == "locked"
    for tier in engines:
        fill(tier)
    assert sum(tree_bytes(tier.root) for tier in engines) <= 32 * MIB
    for tier in engines:
        assert tier.is_held()
        tier.close()
    alone = open_tier(tmp_path, 32 * MIB)
    fill(alone)
    assert tree_bytes(alone.root) <= 32 * MIB, "what two engines left counts for one"
    assert alone.rank_bytes > 14 * MIB
    alone.close()
    pair = [open_tier(tmp_path, 32 * MIB, dp_index=index, dp_engines=range(2)) for index in range(2)]
    for tier in pair:
        fill(tier)
        tier.close()
    used_bytes = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*"))
    assert used_bytes <= 32 * MIB, "and what one left counts for two"


def test_engines_that_start_together_remove_the_same_namespace(tmp_path: Path) -> None:
    """A namespace of one engine in a directory that several share now: all have seen it, one removes it first."""
    fill(left := open_tier(tmp_path))
    left.close()
    for _ in range(2):
        remove_namespace(left.namespace_path)
    assert not left.namespace_path.exists()


def test_a_namespace_of_a_running_engine_is_not_removed(tmp_path: Path) -> None:
    """Engines with different numbers of siblings on one path: those that another holds are counted, not removed."""
    other = open_tier(tmp_path, 64 * MIB, "other", dp_index=3, dp_engines=range(4))
    fill(other)
    tier = open_tier(tmp_path, 30 * MIB, dp_index=0, dp_engines=range(2))
    assert slab_of(other).exists()
    assert tier.rank_bytes < 8 * MIB
    tier.close()
    other.close()
    tier = open_tier(tmp_path, 30 * MIB, dp_index=0, dp_engines=range(2))
    assert not other.namespace_path.exists()
    tier.close()
