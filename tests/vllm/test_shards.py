"""Proves over running vLLMs that servers of different tensor parallelism are one prefix cache: what one stored the
others answer from, in a directory and in a bucket; that damage is found by whoever reads it; and that what ranks have
alike is stored once.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch

from nixl_offload.tiers.shared.naming import parse_shard_name
from tests.s3.servers import RcloneServer
from tests.vllm.damage import ENGINE_OPTIONS, FULL_TOKENS, PROMPT_CHUNKS, chunk_prompts, loads_refused
from tests.vllm.families import CPU_MLA, write_mla
from tests.vllm.harness import TINY, TINY_HYBRID, Answer, Engine, ModelShape, Workshop, close
from tests.vllm.shared_rig import Medium, bucket, said, tree, until_stored
from tests.vllm.staged_cpu import EXTENSION

ODD_RANK: Final = "tests.vllm.odd_rank.OddRankExtension"
PROMPTS: Final = chunk_prompts(2, seed=301)
LATER: Final = chunk_prompts(2, seed=302)
ONE_HEAD: Final = dataclasses.replace(TINY, kv_heads=1)
SIZES: Final[dict[int, dict[str, Any]]] = {
    1: {},
    2: {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "in_process": False},
}
# Two ranks on a machine with one NUMA node.
ENVIRONMENT: Final = {"VLLM_CPU_SIM_MULTI_NUMA": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto"}
STORED_DEADLINE_S: Final = 120.0
Start = Callable[..., Engine]


@pytest.fixture
def medium(request: pytest.FixtureRequest, server: RcloneServer, workshop: Workshop) -> Medium:
    """What engines of the test share; each test has its own."""
    place = f"shards-{request.node.name}".replace("[", "-").rstrip("]")
    return tree(workshop.scratch / place) if request.param == "tree" else bucket(server, "obstore", prefix=place)


@pytest.fixture
def start(workshop: Workshop) -> Iterator[Start]:
    """Starts an engine of a size; the test's engines end with it. ``shards`` None: what a config says by default."""
    started: list[Engine] = []

    def begin(medium: Medium, tp: int, shape: ModelShape = TINY, *, pp: int = 1, **fields: Any) -> Engine:
        own = {name: fields.pop(name) for name in ("model", "block_size") if name in fields} | fields.pop("options", {})
        nearer, shared = fields.pop("nearer", []), fields.pop("is_shared", True)
        config = medium.config(**{name: value for name, value in {"shards": 2, **fields}.items() if value is not None})
        config["tiers"] = [*nearer, *(config["tiers"] if shared else [])]
        environment = {**medium.environment, **ENVIRONMENT}
        # The extension counts in the namespace.
        options = {**ENGINE_OPTIONS, **SIZES[max(tp, pp)], "worker_extension_cls": EXTENSION, **own}
        options |= {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
        started.append(workshop.start_engine(shape, config, environment=environment, **options))
        return started[-1]

    yield begin
    for engine in started:
        engine.close()


def stored_whole(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    """Ask until the engine loads every full chunk: a busy machine may shed a store. Returns the first answers."""
    first = engine.generate(prompts)
    deadline = time.monotonic() + STORED_DEADLINE_S
    while True:
        assert engine.settle()
        assert engine.reset_prefix_cache()
        answers = engine.generate(prompts)
        assert all(close(answer, other) for answer, other in zip(answers, first, strict=True))
        if [answer.external_hit_tokens for answer in answers] == [FULL_TOKENS] * len(prompts):
            return first
        assert time.monotonic() < deadline, f"not everything is stored{said(engine)}"


def all_from_the_tier(engine: Engine, prompts: list[list[int]], right: list[Answer]) -> None:
    """Ask: every full chunk is loaded, and the answers are those of the engine that computed them, but for rounding."""
    assert engine.reset_prefix_cache()
    answers = engine.generate(prompts)
    assert [answer.external_hit_tokens for answer in answers] == [FULL_TOKENS] * len(prompts), said(engine)
    assert all(close(answer, other) for answer, other in zip(answers, right, strict=True))
    assert not loads_refused(engine)


@pytest.mark.parametrize(
    ("medium", "shape"),
    [pytest.param("tree", TINY, id="tree-full"), pytest.param("obstore", TINY_HYBRID, id="bucket-hybrid")],
    indirect=["medium"],
)
def test_sizes_share_what_they_store(medium: Medium, workshop: Workshop, start: Start, shape: ModelShape) -> None:
    """Stored with one rank, served with two, and what those store served with one again; as without a cache."""
    alone = workshop.start_engine(shape, **ENGINE_OPTIONS)
    without = alone.generate([*PROMPTS, *LATER])
    alone.stop()
    one = start(medium, 1, shape)
    right = stored_whole(one, PROMPTS)
    assert len(medium.shards()) >= 2 * PROMPT_CHUNKS * len(PROMPTS)
    two = start(medium, 2, shape)
    all_from_the_tier(two, PROMPTS, right)
    later = stored_whole(two, LATER)
    assert len(medium.namespaces()) == 1
    all_from_the_tier(one, LATER, later)
    assert all(close(answer, other) for answer, other in zip([*right, *later], without, strict=True))


@pytest.mark.parametrize(
    ("medium", "shape"),
    [
        pytest.param("tree", TINY, id="tree-full", marks=pytest.mark.long),
        pytest.param("obstore", TINY_HYBRID, id="bucket-hybrid"),
    ],
    indirect=["medium"],
)
def test_pipeline_stages_share_what_they_store(
    medium: Medium, workshop: Workshop, start: Start, shape: ModelShape
) -> None:
    """Stored with one rank, served with two stages, and what those store served with one, and with two ranks, again."""
    alone = workshop.start_engine(shape, **ENGINE_OPTIONS)
    without = alone.generate([*PROMPTS, *LATER])
    alone.stop()
    cut = {"heads": 2, "layers": 2}
    one = start(medium, 1, shape, shards=cut)
    right = stored_whole(one, PROMPTS)
    assert len(medium.shards()) >= 4 * PROMPT_CHUNKS * len(PROMPTS)
    staged = start(medium, 1, shape, pp=2, shards=cut)
    all_from_the_tier(staged, PROMPTS, right)
    later = stored_whole(staged, LATER)
    staged.stop()
    two = start(medium, 2, shape, shards=cut)
    all_from_the_tier(two, [*PROMPTS, *LATER], [*right, *later])
    assert len(medium.namespaces()) == 1
    all_from_the_tier(one, LATER, later)
    assert all(close(answer, other) for answer, other in zip([*right, *later], without, strict=True))


@pytest.mark.parametrize(
    ("medium", "reader"),
    [pytest.param("tree", 1, id="tree-one"), pytest.param("obstore", 2, id="bucket-two")],
    indirect=["medium"],
)
def test_damage_to_a_shard_is_found_by_whoever_reads_it(medium: Medium, start: Start, reader: int) -> None:
    """A flipped bit in one of two shards of a chunk: the chunk is computed anew, and the answer is right."""
    writer = start(medium, 3 - reader)
    right = until_stored(writer, medium, PROMPTS, 2 * PROMPT_CHUNKS * len(PROMPTS))
    writer.stop()
    damaged = next(name for name in medium.shards() if (shard := parse_shard_name(name)) and shard.rank == 1)
    medium.flip(damaged, len(medium.read(damaged)) - 5000)
    engine = start(medium, reader)
    answers = engine.generate(PROMPTS)
    assert engine.settle()
    assert loads_refused(engine)
    assert all(close(answer, other) for answer, other in zip(answers, right, strict=True))


@pytest.mark.parametrize(
    "medium", [pytest.param("tree"), pytest.param("obstore", marks=pytest.mark.long)], indirect=True
)
def test_mla_of_two_ranks_is_stored_once_by_default(medium: Medium, workshop: Workshop, start: Start) -> None:
    """Half the shards and bytes of ``per_rank``. vLLM's CPU build must not reuse KV of MLA, so nothing is loaded."""
    model = write_mla(workshop.scratch / f"mla-{medium.directory.name}")
    found: list[dict[str, int]] = []
    for shards in ("per_rank", None):
        before = set(medium.shards())
        engine = start(
            medium, 2, model=model, shards=shards, serve_without_prefix_caching=True, block_size=16, options=CPU_MLA
        )
        until_stored(engine, medium, PROMPTS, len(before) + (1 if shards is None else 2) * PROMPT_CHUNKS * 2)
        engine.stop()
        found.append({name: len(medium.read(name)) for name in medium.shards() if name not in before})
    assert 2 * len(found[1]) == len(found[0])
    assert 2 * sum(found[1].values()) == sum(found[0].values())


with_amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM caches prefixes of MLA on a CPU only with AMX"
)
AMX: Final = {"dtype": "bfloat16"}


@with_amx
@pytest.mark.parametrize(
    "medium", [pytest.param("tree"), pytest.param("obstore", marks=pytest.mark.long)], indirect=True
)
def test_mla_that_is_stored_once_is_served(medium: Medium, workshop: Workshop, start: Start) -> None:
    """By default each chunk is written by one of two ranks, and read by both of another server; one rank finds all of
    it, too, and what that stores two ranks find.

    What different sizes compute is not compared: bfloat16 is all that AMX takes, and this model doubles its rounding
    from layer to layer.
    """
    model = write_mla(workshop.scratch / f"mla-{medium.directory.name}")
    two = start(medium, 2, model=model, options=AMX, shards=None)
    right = stored_whole(two, PROMPTS)
    assert len(medium.shards()) == PROMPT_CHUNKS * len(PROMPTS)
    two.stop()
    one = start(medium, 1, model=model, options=AMX, shards=None)
    assert [answer.external_hit_tokens for answer in one.generate(PROMPTS)] == [FULL_TOKENS] * len(PROMPTS)
    stored_whole(one, LATER)
    assert len(medium.shards()) == PROMPT_CHUNKS * (len(PROMPTS) + len(LATER))
    assert not loads_refused(one)
    again = start(medium, 2, model=model, options=AMX, shards=None)
    all_from_the_tier(again, PROMPTS, right)
    assert [answer.external_hit_tokens for answer in again.generate(LATER)] == [FULL_TOKENS] * len(LATER)
    assert not loads_refused(again)
    assert len(medium.namespaces()) == 1


@pytest.mark.parametrize("kind", ["one-head", pytest.param("mla", marks=with_amx)])
def test_a_slab_has_one_copy_of_what_two_ranks_have_alike(workshop: Workshop, start: Start, kind: str) -> None:
    """By default each chunk lies in one of the two slabs, both ranks are served from it, also after a restart, and
    damage to it is found.
    """
    medium = tree(workshop.scratch / "shards-unused")
    path = workshop.scratch / f"slab-one-copy-{kind}"
    fields: dict[str, Any] = {
        "nearer": [{"kind": "slab", "path": str(path), "capacity": "64MiB"}],
        "is_shared": False,
        "shards": None,
        "shape": ONE_HEAD,
    }
    if kind == "mla":
        fields |= {"model": write_mla(workshop.scratch / "mla-slab"), "options": AMX}
    first = start(medium, 2, **fields)
    right = stored_whole(first, PROMPTS)
    first.stop()
    slabs = sorted(path.glob("*/rank-*.slab"))
    stored = [slab.read_bytes().count(b"NIXLOFF1") for slab in slabs]
    chunks = PROMPT_CHUNKS * len(PROMPTS)
    assert len(stored) == 2
    assert sum(stored) == chunks
    assert max(stored) - min(stored) <= 1
    second = start(medium, 2, **fields)
    all_from_the_tier(second, PROMPTS, right)
    second.stop()
    content = slabs[1].read_bytes()
    with slabs[1].open("r+b") as file:
        at = content.index(b"NIXLOFF1") + 4096 + 100
        file.seek(at)
        file.write(bytes([content[at] ^ 1]))
    third = start(medium, 2, **fields)
    answers = third.generate(PROMPTS)
    assert third.settle()
    assert loads_refused(third)
    assert all(close(answer, other) for answer, other in zip(answers, right, strict=True))


@pytest.mark.parametrize("medium", ["tree"], indirect=True)
def test_a_rank_that_alone_does_not_understand_its_caches_has_all_store_rank_by_rank(
    medium: Medium, start: Start
) -> None:
    """Offloading goes on, and the log says once what that costs. Where ranks have nothing alike it says nothing."""
    line = "Chunks are stored as each rank has them"
    engine = start(medium, 2, ONE_HEAD, shards=None, options={"worker_extension_cls": ODD_RANK})
    right = stored_whole(engine, PROMPTS)
    all_from_the_tier(engine, PROMPTS, right)
    assert len(medium.shards()) == 2 * PROMPT_CHUNKS * len(PROMPTS)
    log = engine.log.read_text(errors="replace")
    assert log.count(line) == 1
    assert "the KV heads in the caches of rank 1 are not found" in log
    assert "an odd rank" in log
    other = start(medium, 2, shards=None)
    other.generate(PROMPTS)
    assert line not in other.log.read_text(errors="replace")


@pytest.mark.parametrize("medium", ["obstore"], indirect=True)
def test_chains_of_tiers_move_shards(medium: Medium, workshop: Workshop, start: Start) -> None:
    """From memory to a slab and on to what is shared, by two ranks; from there into the memory of one, and served."""
    nearer = [
        {"kind": "memory", "capacity": "64MiB"},
        {"kind": "slab", "path": str(workshop.scratch / f"slab-{medium.directory.name}"), "capacity": "64MiB"},
    ]
    two = start(medium, 2, nearer=nearer)
    right = until_stored(two, medium, PROMPTS, 2 * PROMPT_CHUNKS * len(PROMPTS))
    all_from_the_tier(two, PROMPTS, right)
    two.stop()
    again = start(medium, 2, nearer=nearer[1:], is_shared=False)
    all_from_the_tier(again, PROMPTS, right)
    again.stop()
    one = start(medium, 1, nearer=nearer[:1])
    all_from_the_tier(one, PROMPTS, right)
    assert one.settle()
    for path in medium.shards():
        medium.delete(path)
    all_from_the_tier(one, PROMPTS, right)
