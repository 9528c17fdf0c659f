"""Storage that commit 35d74f4 wrote (``tests/fixtures/storage.tar.xz``) still serves: every chunk of a slab, a shared
directory and a bucket is found by the scheduler's half, loaded by every rank, byte by byte, listed and verified.

The namespace comes from the manifest, so that the test needs neither that model nor that version of vLLM. Where vLLM is
not installed, the commands alone are tested.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from nixl_offload.cli.main import main
from nixl_offload.config import parse_config
from nixl_offload.identity.namespace import GroupFields, Namespace, NamespaceFields, make_namespace
from tests.fixtures.old_storage import (
    ARCHIVE,
    BLOCKS_PER_CHUNK,
    CHUNKS,
    MEDIA,
    PAGE_BYTES,
    PROMPTS,
    Chunk,
    Model,
    contents,
)
from tests.s3.servers import RcloneServer

MODELS = contents()
CASES = [(name, medium) for name in MODELS for medium in MEDIA]
DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("archive")
    with tarfile.open(ARCHIVE) as packed:
        packed.extractall(root, filter="data")
    return root


@pytest.fixture(scope="module")
def server() -> Iterator[RcloneServer]:
    with RcloneServer() as started, pytest.MonkeyPatch.context() as patch:
        for name, value in started.environment.items():
            patch.setenv(name, value)
        yield started


@pytest.fixture
def tier(name: str, medium: str, archive: Path, server: RcloneServer, tmp_path: Path) -> dict[str, Any]:
    """Return the tier as a config of that time says it; on a copy, for engines write to what they open."""
    if medium == "bucket":
        prefix = f"{tmp_path.name}-{name}"
        shutil.copytree(archive / name / medium, server.directory / prefix)
        server.forget()
        # A first answer may take longer on a busy machine than a request would wait for it.
        return server.tier(prefix, mover="obstore", lookup={"timeout": "5s"})
    shutil.copytree(archive / name / medium, tmp_path / medium)
    if medium == "slab":
        return {"kind": "file", "path": str(tmp_path / medium), "capacity": "48MiB"}
    return {"kind": "file", "layout": "tree", "path": str(tmp_path / medium), "capacity": "1GiB"}


def manifest_of(directory: Path) -> Any:
    (path,) = directory.glob(f"{'[0-9a-f]' * 32}/manifest.json")
    return json.loads(path.read_text())


def namespace_of(manifest: Any) -> Namespace:
    """Return the namespace with the fields of a manifest."""
    fields = dict(manifest["fields"])
    fields["groups"] = tuple(
        GroupFields(group["group_id"], group["tokens_per_block"], tuple(group["slot_bytes"]))
        for group in fields["groups"]
    )
    fields["ranks"] = tuple(fields["ranks"])
    return make_namespace(NamespaceFields(**fields))


@contextmanager
def serving(tier: dict[str, Any], namespace: Namespace, chunks: Sequence[Chunk]) -> Iterator[tuple[list[Any], Any]]:
    """Open the scheduler's half, ask for every chunk until it is a hit, and yield where each rests, and what the ranks
    need to know to find it.
    """
    from vllm.config import ParallelConfig

    from nixl_offload.types import Key, Lookup, LookupContext
    from nixl_offload.vllm.open_tiers import open_tier

    ranks = namespace.fields.world_size
    parallel = ParallelConfig(pipeline_parallel_size=ranks)
    opened = open_tier(parse_config({"tiers": [tier]}).tiers[0], 0, namespace, parallel)
    try:
        found = []
        for number, chunk in enumerate(chunks):
            key, context = Key(bytes.fromhex(chunk.key)), LookupContext(f"request {number}")
            until(
                lambda key=key, context=context: opened.lookup(key, context, now_s()) is not Lookup.RETRY, opened.flush
            )
            assert opened.lookup(key, context, now_s()) is Lookup.HIT, chunk
            found.append(opened.pin(key))
            opened.unpin(key)
        absent = Key(bytes(32) + bytes(4))
        until(lambda: opened.lookup(absent, LookupContext("absent"), now_s()) is not Lookup.RETRY, opened.flush)
        assert opened.lookup(absent, LookupContext("absent"), now_s()) is Lookup.MISS
        yield found, opened.place
    finally:
        opened.close()


def loaded(
    tier: dict[str, Any], model: Model, rank: int, chunks: Sequence[Chunk], locations: Sequence[Any], place: Any
) -> list[bytes]:
    """Open the half of a rank, load every chunk in one job, and return the payloads."""
    from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec
    from nixl_offload.engine import ChainEngine, ChunkIO
    from nixl_offload.types import Key, Outcome
    from nixl_offload.vllm.rank_engine import RankMemory, open_tier_engine

    blocks = len(chunks) * BLOCKS_PER_CHUNK
    layers = [layer for group in model.layers for layer in group[rank]]
    tensors = [torch.zeros((blocks, PAGE_BYTES), dtype=torch.int8) for _ in layers]
    layout = KVLayout(
        tuple(RegionSpec(at, t.data_ptr(), blocks, PAGE_BYTES, PAGE_BYTES) for at, t in enumerate(tensors)),
        tuple(GroupLayout.of_pages((layers.index(each), PAGE_BYTES) for each in of[rank]) for of in model.layers),
        BLOCKS_PER_CHUNK,
    )
    ids = [np.arange(BLOCKS_PER_CHUNK, dtype=np.int32) + at * BLOCKS_PER_CHUNK for at in range(len(chunks))]
    config = parse_config({"staging": "4MiB", "tiers": [tier]})
    memory = RankMemory(tensors, layout, None, 1.0)
    engine = ChainEngine([open_tier_engine(config, 0, place, memory, rank, None)], empty_groups=layout.empty_groups)
    try:
        job = [
            ChunkIO(Key(bytes.fromhex(chunk.key)), location, chunk.group, block_ids, 0)
            for chunk, location, block_ids in zip(chunks, locations, ids, strict=True)
        ]
        engine.submit_load(1, job)
        results: list[Any] = []
        until(lambda: bool(results), lambda _: results.extend(engine.finished()))
        assert set(results[0].outcomes) == {Outcome.OK}, results
    finally:
        engine.close()
    return [
        b"".join(
            tensors[layers.index(layer)][block].numpy().tobytes() for block in of for layer in _here(model, c, rank)
        )
        for c, of in zip(chunks, ids, strict=True)
    ]


def _here(model: Model, chunk: Chunk, rank: int) -> list[str]:
    return model.layers[chunk.group][rank]


def now_s() -> float:
    return time.monotonic()


def until(condition: Callable[[], bool], step: Callable[[float], object]) -> None:
    deadline_s = now_s() + DEADLINE_S
    while not condition():
        assert now_s() < deadline_s, "waited in vain"
        step(now_s())
        time.sleep(0.001)


def test_the_fixture_is_what_it_says() -> None:
    """One group on one rank; two groups on two ranks, where a rank has no layer of one group."""
    one, two = MODELS["one"], MODELS["two"]
    assert (len(one.layers), one.ranks, len(one.chunks)) == (1, 1, PROMPTS * CHUNKS)
    assert (len(two.layers), two.ranks) == (2, 2)
    assert any(not layers for group in two.layers for layers in group)
    assert {chunk.group for chunk in two.chunks} == {0, 1}


@pytest.mark.parametrize(("name", "medium"), CASES)
def test_every_chunk_hits_and_loads_on_every_rank(name: str, medium: str, archive: Path, tier: dict[str, Any]) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    model, namespace = MODELS[name], namespace_of(manifest_of(archive / name / medium))
    assert namespace.name == model.namespace
    with serving(tier, namespace, model.chunks) as (locations, place):
        for rank in range(model.ranks):
            payloads = loaded(tier, model, rank, model.chunks, locations, place)
            for chunk, payload in zip(model.chunks, payloads, strict=True):
                assert payload == model.payload(chunk, rank), (chunk, rank)


@pytest.mark.parametrize(("name", "medium"), CASES)
def test_commands_find_every_chunk_good(name: str, medium: str, tier: dict[str, Any], tmp_path: Path) -> None:
    model = MODELS[name]
    config = tmp_path / "kv.yaml"
    config.write_text(yaml.safe_dump({"tiers": [tier]}))
    code, listed = cli("ls", config, "--json")
    (held,) = listed["tiers"][0]["namespaces"]
    assert (code, held["name"], held["chunks"]) == (0, model.namespace, len(model.chunks))
    code, verified = cli("verify", config, "--json")
    chunks = verified["tiers"][0]["chunks"]
    assert code == 0
    assert {verdict for verdict, count in chunks.items() if count} == {"good"}
    assert chunks["good"] == len(model.chunks)


def cli(command: str, config: Path, *options: str) -> tuple[int, Any]:
    """Run a command; return its exit code and the last line of JSON that it prints."""
    out = io.StringIO()
    with redirect_stdout(out):
        code = main([command, str(config), *options])
    try:
        return code, json.loads(out.getvalue())
    except json.JSONDecodeError:
        return code, json.loads(out.getvalue().splitlines()[-1])
