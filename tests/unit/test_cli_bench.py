"""``nixl-offload bench``: every tier is driven for real with a tiny model, and nothing of it stays behind."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from nixl_offload.cli.bench import drive as bench_drive
from nixl_offload.cli.bench.tiers import SCRATCH
from nixl_offload.cli.main import main
from nixl_offload.config import SlabConfig, parse_config
from nixl_offload.engine import ChunkIO, Engine
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.tiers.slab.file import SlabFile
from nixl_offload.tiers.slab.other_namespaces import survey
from nixl_offload.tiers.slab.tier import SlabTier

from .warm_rig import RANKS, SLOT_BYTES, key, namespace

MODEL = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": 128,
    "torch_dtype": "bfloat16",
}
TOKEN_BYTES = 4 * 2 * 64 * 2 * 2
GROUP_CHUNK_BYTES = 64 * TOKEN_BYTES // 2


class Rig:
    """A config, a tiny model with two KV groups, an empty directory."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.directory = directory
        self.data = directory / "kv"
        self.data.mkdir()
        self.file = directory / "kv.yaml"
        self.model = directory / "tiny"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(MODEL))
        self._capsys = capsys
        self.config(self.tier())

    def tier(self, **fields: Any) -> dict[str, Any]:
        return {"kind": "slab", "path": str(self.data), "capacity": "64MiB", "mover": "posix", **fields}

    def config(self, *tiers: dict[str, Any], **fields: Any) -> None:
        self.file.write_text(yaml.safe_dump({"chunk_tokens": 64, "staging": "1MiB", "tiers": list(tiers), **fields}))

    def bench(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        command = ["bench", str(self.file), "--model", str(self.model), "--seconds", "0.05", "--size", "4MiB", "--json"]
        code = main([*command, *arguments])
        said = self._capsys.readouterr()
        return code, json.loads(said.out) if said.out else {}, said.err

    def left(self) -> list[str]:
        return [path.name for path in self.data.rglob("*")]


@pytest.fixture
def rig(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Rig:
    return Rig(tmp_path, capsys)


def test_memory_and_a_slab_with_a_hybrid_models_groups(rig: Rig) -> None:
    """Both groups' chunks; bytes, rates and times agree with each other; nothing is left in the directory."""
    rig.config({"kind": "memory", "capacity": "8MiB"}, rig.tier())
    code, report, errors = rig.bench()
    assert (code, errors, rig.left()) == (0, "", [])
    assert report["model"]["bytes_per_token"] == TOKEN_BYTES
    assert report["model"]["name"] == "tiny"
    assert (report["tiers"][0]["kind"], report["tiers"][0]["mover"]) == ("memory", "copy")
    assert report["tiers"][1]["mover"].startswith("posix_")
    for tier in report["tiers"]:
        for operation in ("store", "load"):
            figures = tier[operation]
            assert figures["failed_chunks"] == 0
            assert figures["bytes"] == figures["chunks"] * GROUP_CHUNK_BYTES
            assert figures["bytes_s"] == pytest.approx(figures["bytes"] / figures["seconds"])
            assert 0 < figures["p50_s"] <= figures["p99_s"] <= figures["seconds"]
            assert figures["cpu_s_per_gb"] > 0
            assert figures["in_flight"] <= 16
        assert tier["load_tokens_s"] == pytest.approx(tier["load"]["bytes_s"] / TOKEN_BYTES)
        assert tier["load_10000_tokens_s"] < 10_000 / tier["load_tokens_s"], "windows need less than all tokens"
        assert 2 << 20 <= tier["size_bytes"] <= 4 << 20


def test_a_tree_and_what_a_killed_run_left_there(rig: Rig) -> None:
    """The scratch namespace goes, that of a run killed an hour ago too; a server's chunks and younger runs stay."""
    store = TreeStore(str(rig.data))
    names = [shard_name(space, key(1), 0) for space in (SCRATCH + 16 * "0", SCRATCH + 16 * "1", namespace().name)]
    for name, age_s in zip(names, (7200, 60, 7200), strict=True):
        store.write(name, memoryview(b"content"))
        modified_s = time.time() - age_s
        os.utime(rig.data / name, (modified_s, modified_s))
    store.close()
    rig.config(rig.tier(kind="shared_dir"))
    code, report, errors = rig.bench()
    assert (code, errors) == (0, "")
    assert report["tiers"][0]["load"]["chunks"] > 0
    files = {path.relative_to(rig.data).as_posix() for path in rig.data.rglob("*") if path.is_file()}
    assert files == set(names[1:])
    assert not (rig.data / names[0].partition("/")[0]).exists()


def test_beside_an_engine_that_has_the_slab_open(rig: Rig) -> None:
    """What the engine holds is not touched."""
    (config,) = parse_config({"tiers": [rig.tier()]}).tiers
    assert isinstance(config, SlabConfig)
    tier = SlabTier.open(config, position=0, namespace=namespace(), slot_classes=[SLOT_BYTES], world_size=RANKS)
    try:
        before = sorted(rig.left())
        code, report, _ = rig.bench("--tier", "slab")
        assert (code, report["tiers"][0]["load"]["failed_chunks"]) == (0, 0)
        assert sorted(rig.left()) == before
    finally:
        tier.close()


def test_an_engine_that_starts_meanwhile_counts_no_scratch_slab(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even before it loses its name: it would take room from the engine's own slabs."""
    counted: list[tuple[int, int]] = []
    ensure = SlabFile.ensure

    def looked_at(slab: SlabFile, offset: int, length_bytes: int) -> None:
        ensure(slab, offset, length_bytes)
        counted.append((slab.path.stat().st_blocks, survey(rig.data, ()).other_bytes))

    monkeypatch.setattr(SlabFile, "ensure", looked_at)
    rig.config(rig.tier())
    code, _, _ = rig.bench()
    blocks, other_bytes = counted[0]
    assert (code, blocks > 0, other_bytes) == (0, True, 0)


@pytest.mark.parametrize("kind", ["slab", "shared_dir"])
def test_an_interruption_leaves_nothing(rig: Rig, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.config(rig.tier(kind=kind))
    seen: list[list[str]] = []

    def interrupting(self: Engine, job_id: int, chunks: Sequence[ChunkIO]) -> None:
        seen.append(rig.left())
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Engine, "submit_load", interrupting)
    code, report, error = rig.bench()
    assert (code, report, error) == (130, {"error": "interrupted"}, "nixl-offload: interrupted\n")
    assert bool(seen[0]) is (kind == "shared_dir"), "a scratch slab has no name while it is used"
    assert rig.left() == []


def test_a_tier_that_cannot_be_measured_does_not_hide_the_others(rig: Rig) -> None:
    """No directory, no room, a mover that cannot run: told for the tier, exit code 1."""
    rig.config({"kind": "memory", "capacity": "4MiB"}, rig.tier(path=str(rig.directory / "none")))
    code, report, _ = rig.bench()
    assert code == 1
    assert report["tiers"][0]["load"]["chunks"] > 0
    words = "there is no such directory; make it, or mount its filesystem"
    assert report["tiers"][1]["trouble"] == f"{rig.directory / 'none'}: {words}"
    rig.config(rig.tier(capacity="256KiB"))
    code, report, _ = rig.bench()
    assert code == 1
    assert "room for 1 chunk of 69632 bytes; at least 4 are needed" in report["tiers"][0]["trouble"]
    assert rig.left() == []


def test_chunks_that_fail_are_counted_and_told(rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Loads of chunks that were never stored: refused by the engine's own checks, given up after a few."""
    chunk = bench_drive.TierBench._chunk

    def other_key(self: bench_drive.TierBench, place: int, room: int) -> ChunkIO:
        io = chunk(self, place, room)
        return ChunkIO(type(io.key)(os.urandom(32) + io.key[-4:]), io.location, io.group, io.block_ids, 0)

    monkeypatch.setattr(bench_drive.TierBench, "_chunk", other_key)
    code, report, _ = rig.bench()
    load = report["tiers"][0]["load"]
    assert (code, load["chunks"], load["errors"]) == (1, 0, ["corrupt: key"])
    assert load["failed_chunks"] >= 8
    assert main(["bench", str(rig.file), "--model", str(rig.model), "--seconds", "0.05", "--size", "1MiB"]) == 1
    assert "chunks failed to load: corrupt: key" in capsys.readouterr().out


def test_the_table(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", str(rig.file), "--model", str(rig.model), "--seconds", "0.05", "--size", "2MiB"]
    assert main([*command, "--prefill", "5000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        f"tiny, bfloat16, one rank of TP 1: {TOKEN_BYTES:,} bytes of KV per token; a chunk of 64 tokens is 136KiB."
    )
    assert " ".join(lines[3].split()) == "tier mover by operation MB/s chunks/s p50 ms p99 ms CPU s/GB in flight"
    assert [line.split()[0] for line in lines[4:6]] == ["slab", "slab"]
    assert lines[7].split("  ")[0] == "tier"
    assert lines[7].endswith("faster than computing")
    assert lines[-1] == "Computing 10,000 tokens takes 2.0 s at 5,000 tokens/s."


def test_wrong_usage(rig: Rig) -> None:
    (rig.directory / "odd.json").write_text('{"model_type": "rwkv"}')
    for arguments, words in (
        (["--model", str(rig.directory / "odd.json")], "model_type 'rwkv' is not understood"),
        (["--tp", "3"], "cannot be dealt out to 3 ranks"),
        (["--tier", "s3"], "s3 is not among the tiers"),
    ):
        code, _, error = rig.bench(*arguments)
        assert (code, words in error) == (2, True), error
    for arguments in (["--seconds", "0"], ["--tp", "0"], ["--prefill", "fast"], ["--size", "1 apple"]):
        with pytest.raises(SystemExit):
            rig.bench(*arguments)
    assert rig.left() == []
