"""``nixl-offload verify`` reports every kind of damage and nothing else, beside a running server and without one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nixl_offload.cli.verify import command as verify_command
from nixl_offload.cli.verify import judge as verify_judge
from nixl_offload.errors import StoreError
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.slab.inspect import SlabInspector
from tests.unit.engine_rig import until
from tests.unit.gc_rig import key
from tests.unit.stored_rig import BLOCK_BYTES, SLOT_BYTES, Cli, StoredSlab, Tree, flip, snapshot

CHUNKS = 24


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_judge, "_PAUSES_BESIDE_AN_ENGINE_S", (0.15, 0.05))


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[StoredSlab]:
    """A server that has stored chunks and runs on."""
    slab = StoredSlab(tmp_path)
    slab.open()
    slab.store(range(CHUNKS))
    yield slab
    slab.close()


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def tree(slab: StoredSlab, tmp_path: Path) -> Iterator[Tree]:
    tree = Tree(slab, tmp_path, range(CHUNKS))
    yield tree
    tree.store.close()


def bad(cli: Cli) -> dict[str, list[tuple[int, str]]]:
    """Key -> (rank, reason) of what was reported as bad."""
    return {
        line["key"]: [(problem["rank"], problem["reason"]) for problem in line["problems"]]
        for line in cli.lines[:-1]
        if line["verdict"] == "bad"
    }


def test_all_is_good_beside_a_server_and_nothing_is_touched(slab: StoredSlab, cli: Cli) -> None:
    before = snapshot(slab.root)
    assert cli("verify", slab.file) == 0
    size = f"{2 * CHUNKS * SLOT_BYTES / 1024**2:.2f}MiB"
    assert re.fullmatch(rf"{slab.root}: {CHUNKS} chunks, {size} checked, [0-9.]+[KMG]iB/s", cli.out.splitlines()[0])
    assert cli.out.splitlines()[1:] == [f"  {CHUNKS} good", "  0 bad"]
    assert snapshot(slab.root) == before
    slab.close()
    before = snapshot(slab.root)
    assert cli("verify", slab.file) == 0
    assert snapshot(slab.root) == before, "no side file of the index is made where no server runs"


def test_every_kind_of_damage_to_a_slab_is_reported(slab: StoredSlab, cli: Cli) -> None:
    slab.damage(0, 0, 4096 + 2 * BLOCK_BYTES + 7)
    slab.damage(1, 1, 60)
    slab.damage(2, 0, 0, bytes(SLOT_BYTES))
    slab.damage(3, 1, 8, b"\x07\x00")
    slab.damage(4, 0, 0, slab.shard(4, 1))
    slab.damage(5, 1, 0, slab.shard(6, 1))
    slab.damage(7, 0, 4096 + 4 * BLOCK_BYTES, b"padding")
    slab.damage(8, 0, 0, b"#!/bin/sh\n")
    assert cli("verify", slab.file, "--json") == 1
    assert bad(cli) == {
        key(0).hex(): [(0, "checksum")],
        key(1).hex(): [(1, "header_checksum")],
        key(2).hex(): [(0, "magic")],
        key(3).hex(): [(1, "version")],
        key(4).hex(): [(0, "namespace")],
        key(5).hex(): [(1, "other")],
        key(8).hex(): [(0, "magic")],
    }, "padding is never read, so it cannot be damaged"
    assert cli.lines[-1]["tiers"][0]["chunks"]["good"] == CHUNKS - 7
    assert cli("verify", slab.file) == 1
    text = cli.out
    assert f"BAD {key(0).hex()} in {slab.root}, namespace {slab.namespace.name}\n" in text
    assert f"    rank 0: {slab.place(0)}: block 2 of 4: the checksum is not the header's; written 20" in text
    assert text.endswith(f"  {CHUNKS - 7} good\n  7 bad\n")


def test_a_slab_that_is_cut_off_or_gone_or_sparse(slab: StoredSlab, cli: Cli) -> None:
    slab.close()
    with slab.slab(1).open("r+b") as file:
        file.truncate(slab.offsets[key(20)] + 8192)
    assert cli("verify", slab.file, "--json") == 1
    found = bad(cli)
    assert found[key(20).hex()] == [(1, "length")], "its header is whole, its payload is not there"
    assert found[key(23).hex()] == [(1, "length")]
    with slab.slab(1).open("r+b") as file:
        file.truncate(slab.offsets[key(23)] + SLOT_BYTES)
    assert cli("verify", slab.file, "--json") == 1
    assert bad(cli)[key(20).hex()] == [(1, "checksum")], "a hole reads as zeros"
    assert bad(cli)[key(23).hex()] == [(1, "magic")]
    slab.slab(1).unlink()
    assert cli("verify", slab.file, "--json") == 1
    assert bad(cli)[key(0).hex()] == [(1, "missing")]


def test_a_slot_that_a_server_gives_to_another_chunk_is_not_bad(
    slab: StoredSlab, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server evicts and overwrites between the look at the index and that at the slot; its index follows later."""
    tier = slab.tier
    assert tier is not None
    real, done = SlabInspector.read_into, []

    def read_into(inspector: SlabInspector, shard: Any, offset: int, memory: memoryview) -> None:
        if shard.offset == slab.offsets[key(3)] and not done:
            done.append(True)
            slab.damage(3, 0, 0, slab.shard(9, 0))
            slab.damage(3, 0, 9000, b"half of something new")
            tier._durable.delete(key(3))
        real(inspector, shard, offset, memory)

    monkeypatch.setattr(SlabInspector, "read_into", read_into)
    assert cli("verify", slab.file, "--json") == 0
    (line,) = cli.lines[:-1]
    assert (line["verdict"], line["key"]) == ("changed", key(3).hex())


def test_a_slot_that_is_whole_at_the_second_look_is_good(
    slab: StoredSlab, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, real, reads = slab.shard(3, 0), SlabInspector.look_again, []
    slab.damage(3, 0, 5000)

    def look_again(inspector: SlabInspector, namespace: Any, chunk: Any) -> Any:
        reads.append(chunk.key)
        slab.damage(3, 0, 0, whole)
        return real(inspector, namespace, chunk)

    monkeypatch.setattr(SlabInspector, "look_again", look_again)
    assert cli("verify", slab.file) == 0
    assert reads == [key(3)]


def test_an_index_that_lags_behind_is_harmless(slab: StoredSlab, cli: Cli) -> None:
    """After a crash a row may name a slot that holds another whole chunk: a load finds out, nothing is damaged."""
    slab.close()
    for rank in (0, 1):
        slab.damage(3, rank, 0, slab.shard(9, rank))
    assert cli("verify", slab.file) == 0
    assert "  1 forgotten (the slot holds another chunk by now; harmless)" in cli.out


def test_every_kind_of_damage_to_a_tree_is_reported(tree: Tree, slab: StoredSlab, cli: Cli) -> None:
    flip(tree.path(0), 4096 + 3 * BLOCK_BYTES)
    os.truncate(tree.path(1, 1), 8192)
    os.truncate(tree.path(2), SLOT_BYTES + 4096)
    a, b = tree.path(3).read_bytes(), tree.path(4).read_bytes()
    tree.path(3).write_bytes(b)
    tree.path(4).write_bytes(a)
    tree.path(5).write_bytes(b"")
    tree.path(6).write_bytes(bytes(SLOT_BYTES))
    tree.path(7, 1).unlink()
    tree.path(8).write_bytes(tree.path(8, 1).read_bytes())
    stranger = tree.path(9).with_name(f"{key(9).hex()}.0007")
    stranger.write_bytes(tree.path(9).read_bytes())
    (tree.root / "notes.txt").write_text("not ours")
    tree.path(10).with_suffix(".bak").write_text("not ours either")
    tree.age(3600)
    assert cli("verify", tree.file, "--json") == 1
    expected = {
        key(0).hex(): [(0, "checksum")],
        key(1).hex(): [(1, "length")],
        key(2).hex(): [(0, "length")],
        key(3).hex(): [(0, "other")],
        key(4).hex(): [(0, "other")],
        key(5).hex(): [(0, "length")],
        key(6).hex(): [(0, "magic")],
        key(7).hex(): [(1, "missing")],
        key(8).hex(): [(0, "namespace")],
        key(9).hex(): [(7, "rank")],
    }
    assert bad(cli) == expected
    assert cli("verify", tree.file) == 1
    assert "rank 1: the shard of rank 1 is not there: the chunk is incomplete, and cannot be loaded" in cli.out


def test_a_chunk_whose_ranks_still_write_is_not_bad(tree: Tree, cli: Cli) -> None:
    tree.path(7, 1).unlink()
    os.utime(tree.path(7, 0))
    assert cli("verify", tree.file) == 0
    assert "  1 not finished (still being written)" in cli.out


def test_without_a_manifest_checksums_are_checked_and_identity_is_not(tree: Tree, slab: StoredSlab, cli: Cli) -> None:
    (tree.root / slab.namespace.name / "manifest.json").unlink()
    flip(tree.path(3), 6000)
    assert cli("verify", tree.file, "--json") == 1
    assert bad(cli) == {key(3).hex(): [(0, "checksum")]}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_in_another_process(slab: StoredSlab, tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, or a service manager's stop, at a real command line, slowed down so that it is in the middle."""
    command = [sys.executable, "-m", "nixl_offload.cli.main", "verify", str(slab.file), "--rate", "100kB/s"]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        # Its readers are threads, and there are none before.
        until(lambda: len(os.listdir(f"/proc/{child.pid}/task")) > verify_command.THREADS // 2)
        child.send_signal(number)
        out, err = child.communicate(timeout=20.0)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 130, err
    assert "Traceback" not in err
    assert "; not finished" in out


def test_storage_that_fails_is_exit_code_1(tree: Tree, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk that cannot be read is reported; three in a row end the run."""
    real = TreeStore.read_into
    failing = {tree.slab.name(5, 0)}

    def read_into(store: TreeStore, name: str, offset: int, memory: memoryview) -> None:
        if name in failing:
            raise StoreError(f"{store.where}: cannot read {name}: Input/output error", cause="io")
        real(store, name, offset, memory)

    monkeypatch.setattr(TreeStore, "read_into", read_into)
    assert cli("verify", tree.file) == 1
    assert f"NOT READABLE {key(5).hex()}" in cli.out
    failing.update(tree.slab.name(number, 1) for number in range(CHUNKS))
    assert cli("verify", tree.file) == 1
    assert "gave up after several in a row" in cli.err
    monkeypatch.undo()
    assert cli("verify", tree.file) == 0


def test_a_limit_on_the_rate_is_kept(slab: StoredSlab, cli: Cli) -> None:
    began_s = time.monotonic()
    assert cli("verify", slab.file, "--rate", "2MiB/s") == 0
    least_s = (CHUNKS - verify_command.THREADS) * 2 * SLOT_BYTES / (2 << 20)
    assert time.monotonic() - began_s >= 0.9 * least_s


@pytest.mark.parametrize("name", ["index.sqlite", "manifest.json"])
def test_a_namespace_that_cannot_be_listed_is_no_success(slab: StoredSlab, cli: Cli, name: str) -> None:
    slab.close()
    (slab.root / slab.namespace.name / name).unlink()
    assert cli("verify", slab.file) == 1
    assert "1 namespace whose chunks cannot be listed; nixl-offload ls says why" in cli.out
