"""``nixl-offload warm`` between directories: what it copies is found by the tier, what is damaged never arrives."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from nixl_offload.cli.main import main
from nixl_offload.cli.warm import command, copying
from nixl_offload.config import Config, S3Config, SharedDirConfig, SlabConfig, parse_config
from nixl_offload.errors import ConfigError
from nixl_offload.identity.namespace import Namespace, make_namespace
from nixl_offload.index import State
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.shared.naming import parse_shard_name, witness_rank
from nixl_offload.tiers.slab.file import rank_file_name
from nixl_offload.tiers.slab.tier import SlabTier
from nixl_offload.types import Location

from .warm_rig import CHUNK_BYTES, RANKS, SLOT_BYTES, image, key, namespace, put_chunk, put_manifest

BLUE, RED = namespace("blue"), namespace("red")
HOUR_S = 3600.0
OpenTier = Callable[[], SlabTier]


class Rig:
    """A shared directory that holds chunks, and a config with a nearer directory."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.source = directory / "shared"
        self.target = directory / "kv"
        self.file = directory / "kv.yaml"
        self._capsys = capsys
        self.store = TreeStore(str(self.source))
        self.config()

    def config(self, **fields: Any) -> None:
        tier = {"kind": "slab", "path": str(self.target), "capacity": "128MiB", **fields}
        self.file.write_text(yaml.safe_dump({"tiers": [tier]}))

    def fill(self, space: Namespace, numbers: range) -> None:
        """Chunk n is n hours old."""
        put_manifest(self.store, space)
        for number in numbers:
            for name in put_chunk(self.store, space, number):
                modified_s = time.time() - number * HOUR_S
                os.utime(self.source / name, (modified_s, modified_s))

    def warm(self, *arguments: str, source: Path | None = None) -> tuple[int, dict[str, Any], str]:
        """Return exit code, report and what was complained of."""
        code = main(["warm", str(self.file), "--from", str(source or self.source), "--json", *arguments])
        said = self._capsys.readouterr()
        return code, json.loads(said.out) if said.out else {}, said.err

    def tier(self) -> SlabTier:
        """Open the slab as an engine would. The caller closes it."""
        (config,) = parse_config(yaml.safe_load(self.file.read_text())).tiers
        assert isinstance(config, SlabConfig)
        return SlabTier.open(config, position=0, namespace=BLUE, slot_classes=[SLOT_BYTES], world_size=RANKS)

    def slot(self, rank: int, location: Location) -> bytes:
        with (self.target / BLUE.name / rank_file_name(rank)).open("rb") as slab:
            return os.pread(slab.fileno(), SLOT_BYTES, location.offset)

    def found(self) -> set[int]:
        """The chunks that the slab's next engine will serve; each must be in its slots, byte by byte, on every rank."""
        tier, numbers = self.tier(), set()
        try:
            for number in range(100):
                if tier.state(key(number)) is State.READY:
                    location = tier.pin(key(number))
                    for rank in range(RANKS):
                        expected = bytes(image(BLUE, number, rank, first_valid_block=number % 3))
                        assert self.slot(rank, location) == expected
                    tier.unpin(key(number))
                    numbers.add(number)
            assert len(tier) == len(numbers)
        finally:
            tier.close()
        return numbers


@pytest.fixture
def rig(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Rig]:
    made = Rig(tmp_path, capsys)
    yield made
    made.store.close()


def test_a_slab_is_filled_and_found_by_the_tier(rig: Rig) -> None:
    """All shards of both ranks, byte by byte; what is there is not copied again; files are the owner's alone."""
    rig.fill(BLUE, range(20))
    code, report, errors = rig.warm()
    assert (code, errors, report["copied"], report["copied_bytes"]) == (0, "", 20, 20 * CHUNK_BYTES)
    assert report["namespace"] == BLUE.name
    assert rig.found() == set(range(20))
    for path in rig.target.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0
    rig.fill(BLUE, range(20, 22))
    code, report, _ = rig.warm()
    assert (code, report["copied"], report["present"]) == (0, 2, 20)
    assert rig.found() == set(range(22))


def test_the_newest_come_first_and_go_last(rig: Rig) -> None:
    """As many as --max-size holds; when an engine needs room, the oldest of them give way first."""
    rig.fill(BLUE, range(12))
    code, report, _ = rig.warm("--max-size", str(8 * CHUNK_BYTES))
    assert (code, report["copied"], report["left_out"]["surplus"]) == (0, 8, 4)
    assert rig.found() == set(range(8))
    code, report, _ = rig.warm("--max-size", str(8 * CHUNK_BYTES))
    assert (code, report["copied"], report["present"]) == (0, 0, 8)
    tier = rig.tier()
    evicted: list[Any] = []
    number = 1000
    while not evicted:
        assert tier.reserve(key(number), SLOT_BYTES, evicted) is not None
        tier.commit(key(number))
        number += 1
    tier.close()
    assert evicted == [key(7)]


def test_nothing_that_is_there_makes_room(rig: Rig) -> None:
    """A full slab takes nothing more, and keeps what it has."""
    tier = rig.tier()
    slots = tier.place.rank_bytes // tier.place.extent_bytes * (tier.place.extent_bytes // SLOT_BYTES)
    for number in range(1000, 1000 + slots - 3):
        assert tier.reserve_unused(key(number), SLOT_BYTES) is not None
        tier.commit(key(number))
    tier.close()
    for rank in range(RANKS):
        path = rig.target / BLUE.name / rank_file_name(rank)
        path.touch(mode=0o600)
    rig.fill(BLUE, range(6))
    code, report, _ = rig.warm()
    assert (code, report["copied"], report["no_room"]) == (0, 3, 3)
    tier = rig.tier()
    assert len(tier) == slots
    tier.close()


def test_a_slab_in_use_is_refused_in_words_that_help(rig: Rig) -> None:
    rig.fill(BLUE, range(2))
    tier = rig.tier()
    code, report, error = rig.warm()
    tier.close()
    assert (code, f"nixl-offload: {report['error']}\n") == (1, error)
    assert f"{rig.target} is in use by another engine (pid {os.getpid()}" in error
    assert "stop the server and run this again, or use a shared directory" in error
    assert error.count("\n") == 1
    assert rig.found() == set()


def test_a_shared_directory_behind_a_slab_is_the_source_unless_there_is_a_bucket() -> None:
    slab = SlabConfig(kind="slab", path="/kv", capacity=1 << 30)
    directory = SharedDirConfig(kind="shared_dir", path="/shared", capacity=1 << 30)
    bucket = S3Config(kind="s3", bucket="our-kv")
    arguments = SimpleNamespace(file="kv.yaml", source=None)
    assert command._tiers(Config(tiers=(slab, directory)), arguments) == (directory, slab)
    assert command._tiers(Config(tiers=(slab, directory, bucket)), arguments) == (bucket, slab)
    arguments.source = "s3"
    with pytest.raises(ConfigError, match="no shared tier behind"):
        command._tiers(Config(tiers=(slab,)), arguments)


@pytest.mark.parametrize("kind", ["slab", "shared_dir"])
def test_what_is_damaged_never_arrives(rig: Rig, kind: str) -> None:
    """A flipped bit in a block, in a header, a shard cut off, two swapped, one of another tenant, one missing."""
    rig.config(kind=kind)
    rig.fill(BLUE, range(8))
    names = [put_chunk(rig.store, BLUE, number) for number in range(8)]
    contents = [(rig.source / chunk[1]).read_bytes() for chunk in names]
    bad = {
        0: _flipped(contents[0], 4096 + 3 * 1000 + 5),
        1: _flipped(contents[1], 300),
        2: contents[2][:-4096],
        3: contents[4],
        5: bytes(image(RED, 5, 1)),
        6: (rig.source / names[6][0]).read_bytes(),
    }
    for number, content in bad.items():
        (rig.source / names[number][1]).write_bytes(content)
    (rig.source / names[7][0]).unlink()
    code, report, errors = rig.warm()
    assert (code, report["copied"], report["damaged"]) == (1, 1, 5)
    assert report["left_out"]["incomplete"] == 2
    assert len(report["failures"]) == 5
    assert errors == ""
    code, report, _ = rig.warm()
    assert (code, report["present"], report["damaged"]) == (1, 1, 5)
    if kind == "slab":
        assert rig.found() == {4}
        return
    arrived = {path.relative_to(rig.target).as_posix() for path in rig.target.rglob("*.000?")}
    assert {names[4][0], names[4][1]} <= arrived
    for number in (0, 1, 2, 3, 5, 6):
        assert names[number][1] not in arrived


def test_a_tree_is_warmed_beside_servers(rig: Rig) -> None:
    """Whole files, synced and renamed, the shard that servers ask for last; shards that are there are not copied."""
    rig.config(kind="shared_dir", capacity=12 * CHUNK_BYTES)
    rig.fill(BLUE, range(10))
    code, report, _ = rig.warm("--rate", "1TB/s")
    assert (code, report["copied"]) == (0, 10)
    files = [path for path in rig.target.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert len(files) == 10 * RANKS
    for path in files:
        assert path.read_bytes() == (rig.source / path.relative_to(rig.target)).read_bytes()
        assert path.stat().st_mode & 0o777 == 0o600
    half = parse_shard_name(files[0].relative_to(rig.target).as_posix())
    assert half is not None
    files[0].unlink()
    code, report, _ = rig.warm()
    assert (code, report["copied"], report["present"], report["copied_bytes"]) == (0, 1, 9, SLOT_BYTES)
    rig.fill(BLUE, range(20, 24))
    code, report, _ = rig.warm()
    assert (code, report["copied"]) == (0, 1), "the capacity has room for one more, less the manifest"


def test_the_witness_is_written_last(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    write = TreeStore.write

    def noted(self: TreeStore, name: str, memory: memoryview) -> None:
        written.append(name)
        write(self, name, memory)

    rig.config(kind="shared_dir")
    rig.fill(BLUE, range(8))
    monkeypatch.setattr(TreeStore, "write", noted)
    assert rig.warm()[0] == 0
    for number in range(8):
        named = [parse_shard_name(name) for name in written]
        ranks = [name.rank for name in named if name is not None and name.key == key(number)]
        assert len(ranks) == RANKS
        assert ranks[-1] == witness_rank(key(number), range(RANKS))


def test_a_slot_that_was_overwritten_is_filled_anew(rig: Rig) -> None:
    """The index is believed only as far as every rank's header agrees."""
    rig.fill(BLUE, range(3))
    assert rig.warm()[0] == 0
    tier = rig.tier()
    location = tier.pin(key(1))
    tier.close()
    with (rig.target / BLUE.name / rank_file_name(1)).open("r+b") as slab:
        os.pwrite(slab.fileno(), bytes(4096), location.offset)
    code, report, _ = rig.warm()
    assert (code, report["copied"], report["present"]) == (0, 1, 2)
    assert rig.found() == {0, 1, 2}


def test_an_interrupted_run_is_gone_on_with(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 130, what was copied stays, and the next run copies the rest. The second chunk is due after 0.5 s."""
    rig.fill(BLUE, range(12))
    reads = itertools.count(1)
    read_into = TreeStore.read_into

    def interrupting(self: TreeStore, name: str, offset: int, memory: memoryview) -> None:
        if memory.nbytes == SLOT_BYTES and next(reads) == RANKS + 1:
            os.kill(os.getpid(), signal.SIGINT)
        read_into(self, name, offset, memory)

    with monkeypatch.context() as patch:
        patch.setattr(TreeStore, "read_into", interrupting)
        code, report, error = rig.warm("--rate", f"{2 * CHUNK_BYTES}/s")
    assert (code, error) == (130, "nixl-offload: interrupted\n")
    assert report["interrupted"]
    first = report["copied"]
    assert 0 < first < 12
    code, report, _ = rig.warm()
    assert (code, report["present"], report["copied"]) == (0, first, 12 - first)
    assert rig.found() == set(range(12))


def test_which_namespace(rig: Rig) -> None:
    """One is taken; of several the one that the target holds; else the operator has to say; unverifiable ones never."""
    code, _, error = rig.warm()
    assert (code, "holds no namespace" in error) == (2, True)
    rig.fill(BLUE, range(1))
    rig.fill(RED, range(1))
    code, _, error = rig.warm()
    assert code == 2
    assert f"{RED.name}  tenant red, model org/model" in error
    assert rig.warm("--namespace", BLUE.name)[0] == 0
    code, report, _ = rig.warm()
    assert (code, report["namespace"], report["present"]) == (0, BLUE.name, 1)
    (rig.source / BLUE.name / "manifest.json").write_text("{}")
    code, _, error = rig.warm("--namespace", BLUE.name)
    assert (code, "no manifest that fits it" in error) == (2, True)
    assert rig.warm("--namespace", "0f\x1b")[0] == 2


def test_others_chunks_are_not_given_up_unasked(rig: Rig) -> None:
    """A slab that holds another model's chunks is refused, unless the namespace was named."""
    rig.fill(BLUE, range(1))
    assert rig.warm()[0] == 0
    other = TreeStore(str(rig.source.parent / "other"))
    put_manifest(other, RED)
    put_chunk(other, RED, 1)
    source = Path(other.where)
    code, _, error = rig.warm(source=source)
    assert code == 2
    assert f"holds {BLUE.name} of another model" in error
    assert rig.found() == {0}
    assert rig.warm("--namespace", RED.name, source=source)[0] == 0
    assert rig.found() == {0}, "there is room for both"
    other.close()


def test_what_cannot_be_warmed(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    rig.fill(BLUE, range(1))
    for arguments, words in (
        ([], "no shared tier behind the directory; say --from"),
        (["--from", "elsewhere"], "'elsewhere': allowed: s3, or the absolute path of a shared directory"),
        (["--from", str(rig.target)], "is the directory to be warmed"),
        (["--from", "/k\0v"], "--from: tiers[0].path: '/k\\x00v' contains a NUL byte"),
    ):
        assert main(["warm", str(rig.file), *arguments]) == 2
        assert words in capsys.readouterr().err
    (rig.target / "dp-0").mkdir(parents=True)
    code, _, error = rig.warm()
    assert (code, "data-parallel engines have a slab each" in error) == (2, True)
    assert main(["warm", str(rig.file), "--from", str(rig.source / "none")]) == 1
    assert "is the filesystem mounted?" in capsys.readouterr().err
    rig.file.write_text("tiers: [{kind: memory, capacity: 1GiB}]")
    assert main(["warm", str(rig.file)]) == 2
    assert "none has kind: slab or shared_dir, so there is nothing to warm" in capsys.readouterr().err
    for rate in ("5MB", "x/s", "0/s"):
        with pytest.raises(SystemExit):
            main(["warm", str(rig.file), "--rate", rate])


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory away")
@pytest.mark.parametrize("kind", ["slab", "shared_dir"])
def test_root_leaves_nothing_that_the_server_cannot_open(rig: Rig, kind: str) -> None:
    rig.config(kind=kind)
    rig.fill(BLUE, range(1))
    rig.target.mkdir()
    os.chown(rig.target, 2000, 0)
    code, _, error = rig.warm()
    assert (code, "sudo -u '#2000' nixl-offload" in error) == (2, True)
    assert not list(rig.target.iterdir())


def test_no_memory_for_a_shard_is_told_and_ends(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.fill(BLUE, range(2))

    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(copying, "mmap", SimpleNamespace(mmap=refuse))
    code, report, _ = rig.warm()
    assert (code, report["failed"], report["copied"]) == (1, 2, 0)
    assert f"no memory for a shard of {SLOT_BYTES} bytes" in report["failures"][0]


def test_no_memory_is_taken_by_what_a_manifest_says(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever can write the source can write a manifest that fits its namespace and names shards of any size."""
    group = replace(BLUE.fields.groups[0], slot_bytes=(SLOT_BYTES, 1 << 50))
    forged = make_namespace(replace(BLUE.fields, groups=(group,)))
    put_manifest(rig.store, forged)
    assert main(["warm", str(rig.file), "--from", str(rig.source), "--namespace", forged.name]) == 2
    assert f"5GiB at most, and it says {1 << 50} bytes" in capsys.readouterr().err


def test_the_report_for_people(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    rig.fill(BLUE, range(3))
    (rig.source / put_chunk(rig.store, BLUE, 2)[0]).unlink()
    assert main(["warm", str(rig.file), "--from", str(rig.source)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{rig.source} -> {rig.target}"
    assert lines[1] == f"Namespace {BLUE.name}: tenant blue, model org/model."
    assert lines[2].startswith("Copied: 2 chunks, 80.0KiB in ")
    assert lines[3:] == ["  1 incomplete in the source: no server could load them"]


def _flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]
