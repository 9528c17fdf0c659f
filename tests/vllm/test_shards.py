"""Proves over running vLLMs that servers of different tensor parallelism and pipeline stages are one prefix cache: what
one stored the others answer from, in a directory and in a bucket; that damage is found by whoever reads it; that what
ranks have alike is stored once; and that a chunk is there only if all ranks have it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from examples.demo.model import TINY_HYBRID
from tests.families.checkpoints import CPU_MLA, write_mla
from tests.families.trial import SIMULATED_NODES, TWO_RANKS
from tests.prove.happenings import DAMAGES
from tests.s3.servers import RcloneServer
from tests.vllm.damage import (
    ENGINE_OPTIONS,
    FULL_TOKENS,
    PROMPT_CHUNKS,
    Reference,
    chunk_prompts,
    hits,
    loads_refused,
    said,
    until_loaded,
    until_stored,
)
from tests.vllm.harness import TINY, Answer, Engine, ModelShape, Workshop, assert_close, chain_config
from tests.vllm.media import Medium, bucket, slab, tree
from tests.vllm.staged_cpu import EXTENSION

PROMPTS: Final = chunk_prompts(2, seed=301)
LATER: Final = chunk_prompts(2, seed=302)
CHUNKS: Final = PROMPT_CHUNKS * len(PROMPTS)
ONE_HEAD: Final = dataclasses.replace(TINY, kv_heads=1)
MEMORY: Final = {"kind": "memory", "capacity": "64MiB", "lazy": False}
Start = Callable[..., Engine]


@pytest.fixture
def medium(request: pytest.FixtureRequest, server: RcloneServer, workshop: Workshop) -> Medium:
    """What engines of the test share; each test has its own."""
    place = f"shards-{request.node.name}".replace("[", "-").rstrip("]")
    return tree(workshop.scratch / place) if request.param == "tree" else bucket(server, "obstore", prefix=place)


on_a_tree = pytest.mark.parametrize("medium", ["tree"], indirect=True)
in_a_bucket = pytest.mark.parametrize("medium", ["bucket"], indirect=True)


@pytest.fixture
def start(workshop: Workshop, server: RcloneServer) -> Iterator[Start]:
    """Starts an engine of a size; the test's engines end with it. ``shards`` None: what a config says by default."""
    started: list[Engine] = []

    def begin(
        tiers: list[Any], tp: int = 1, pp: int = 1, shape: ModelShape = TINY, shards: Any = 2, **options: Any
    ) -> Engine:
        fields = {} if shards is None else {"shards": shards}
        if "block_size" in options:
            fields["serve_without_prefix_caching"] = True
        # The extension counts in the namespace.
        options = {**ENGINE_OPTIONS, **(TWO_RANKS if tp * pp > 1 else {}), "worker_extension_cls": EXTENSION, **options}
        options |= {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
        environment = {**server.environment, **SIMULATED_NODES}
        started.append(workshop.start_engine(shape, chain_config(*tiers, **fields), environment=environment, **options))
        return started[-1]

    yield begin
    for engine in started:
        engine.close()


def stored_whole(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    """Ask until the engine loads every full chunk: a busy machine may shed a store. Returns the first answers."""
    first = engine.generate(prompts)
    until_loaded(engine, prompts, first, assert_close)
    return first


def all_from_the_tier(engine: Engine, prompts: list[list[int]], right: list[Answer]) -> None:
    """Ask: every full chunk is loaded, and the answers are those of the engine that computed them, but for rounding."""
    assert engine.reset_prefix_cache()
    answers = engine.generate(prompts)
    assert hits(answers) == FULL_TOKENS * len(prompts), said(engine)
    assert_close(answers, right)
    assert not loads_refused(engine)


@pytest.mark.parametrize(
    ("medium", "shape", "stages"),
    [
        pytest.param("tree", TINY, 1, id="tree-full"),
        pytest.param("bucket", TINY_HYBRID, 2, id="bucket-hybrid-stages"),
        pytest.param("tree", TINY, 2, id="tree-full-stages", marks=pytest.mark.long),
    ],
    indirect=["medium"],
)
def test_sizes_share_what_they_store(
    medium: Medium, workshop: Workshop, start: Start, shape: ModelShape, stages: int
) -> None:
    """Stored with one rank, served with two ranks or stages, and what those store served with one again; as without a
    cache. A flipped bit in one of the shards of a chunk, or one that is not there, is found by ranks that read it.
    """
    without = Reference(workshop.start_engine(shape, **ENGINE_OPTIONS)).answers([*PROMPTS, *LATER])
    cut = {"heads": 2, "layers": stages}
    one = start([medium.tier], shape=shape, shards=cut)
    assert_close(stored_whole(one, PROMPTS), without[:2])
    assert len(medium.shards()) >= 2 * stages * CHUNKS
    writer = two = start([medium.tier], 1 if stages > 1 else 2, stages, shape=shape, shards=cut)
    all_from_the_tier(writer, PROMPTS, without[:2])
    assert_close(stored_whole(writer, LATER), without[2:])
    if stages > 1:
        writer.stop()
        two = start([medium.tier], 2, shape=shape, shards=cut)
        all_from_the_tier(two, [*PROMPTS, *LATER], without)
    assert len(medium.namespaces()) == 1
    all_from_the_tier(one, LATER, without[2:])
    for damage in ("flipped", "deleted"):
        shard = medium.stored(rank=1)[0]
        DAMAGES[damage](shard, shard, 1.0)
        medium.forget()
        assert two.reset_prefix_cache()
        assert_close(two.generate([*PROMPTS, *LATER]), without)
    assert loads_refused(two)


@on_a_tree
def test_mla_of_two_ranks_is_stored_once_by_default(medium: Medium, workshop: Workshop, start: Start) -> None:
    """Half the shards and bytes of ``per_rank``. vLLM's CPU build must not reuse KV of MLA, so nothing is loaded."""
    model = write_mla(workshop.scratch / "mla")
    found: list[dict[str, int]] = []
    for shards in ("per_rank", None):
        before = set(medium.shards())
        engine = start([medium.tier], 2, model=model, shards=shards, block_size=16, **CPU_MLA)
        until_stored(engine, medium, PROMPTS, len(before) + (1 if shards is None else 2) * CHUNKS)
        engine.stop()
        new = set(medium.shards()) - before
        found.append({name: (medium.directory / name).stat().st_size for name in new})
    assert 2 * len(found[1]) == len(found[0])
    assert 2 * sum(found[1].values()) == sum(found[0].values())


def test_a_slab_has_one_copy_of_what_two_ranks_have_alike(workshop: Workshop, start: Start) -> None:
    """By default each chunk lies in one of the two slabs, both ranks are served from it, also after a restart, and
    damage to it is found.
    """
    path, options = workshop.scratch / "slab-one-copy", {"shards": None, "shape": ONE_HEAD}
    tiers = [slab(path, "64MiB").tier]
    first = start(tiers, 2, **options)
    right = stored_whole(first, PROMPTS)
    first.stop()
    slabs = sorted(path.glob("*/rank-*.slab"))
    stored = [file.read_bytes().count(b"NIXLOFF1") for file in slabs]
    assert len(stored) == 2
    assert sum(stored) == CHUNKS
    assert max(stored) - min(stored) <= 1
    second = start(tiers, 2, **options)
    all_from_the_tier(second, PROMPTS, right)
    content = bytearray(slabs[1].read_bytes())
    content[content.index(b"NIXLOFF1") + 4096 + 100] ^= 1
    with slabs[1].open("r+b") as file:
        file.write(content)
    assert second.reset_prefix_cache()
    answers = second.generate(PROMPTS)
    assert second.settle()
    assert loads_refused(second)
    assert_close(answers, right)


def test_a_chunk_is_there_only_if_both_ranks_have_it(workshop: Workshop, start: Start) -> None:
    """Each rank stores its own heads. While rank 1 cannot store, new chunks are found on no rank; afterwards they are
    stored again. Damage on rank 0 makes both compute. Another server, whose processes import for themselves as for a
    user, finds what the first has stored.
    """
    medium = slab(workshop.scratch / "slab-rank-by-rank", "64MiB")
    engine = start([medium.tier], 2, shards=None)
    right = stored_whole(engine, PROMPTS)
    own, other = sorted(medium.namespace().glob("*.slab"))
    assert own.read_bytes() != other.read_bytes()
    aside = other.rename(other.with_name("aside"))
    other.mkdir()
    time.sleep(1.1)  # a rank looks at a slab that works once a second
    first = engine.generate(LATER)
    assert engine.settle()
    assert engine.reset_prefix_cache()
    answers = engine.generate(LATER)
    assert hits(answers) == 0, "rank 0 has stored them, rank 1 has not"
    assert_close(answers, first)
    other.rmdir()
    aside.rename(other)
    assert_close(stored_whole(engine, LATER), first)
    refused = loads_refused(engine)
    for shard in medium.stored(rank=0):
        DAMAGES["flipped"](shard, shard, 0.5)
    assert_close(stored_whole(engine, PROMPTS), right)
    assert loads_refused(engine) > refused
    engine.stop()
    again = start([medium.tier], 2, shards=None, forked=False)
    assert_close(stored_whole(again, PROMPTS), right)
    assert again.stored_bytes() == 0


@in_a_bucket
def test_chains_of_tiers_move_shards(medium: Medium, workshop: Workshop, start: Start) -> None:
    """From memory to a slab and on to what is shared, by two ranks; from there into the memory of one, and served."""
    drive = slab(workshop.scratch / "slab-of-two", "64MiB").tier
    two = start([MEMORY, drive, medium.tier], 2)
    right = until_stored(two, medium, PROMPTS, 2 * CHUNKS)
    all_from_the_tier(two, PROMPTS, right)
    two.stop()
    again = start([drive], 2)
    all_from_the_tier(again, PROMPTS, right)
    again.stop()
    one = start([MEMORY, medium.tier])
    all_from_the_tier(one, PROMPTS, right)
    assert one.settle()
    for shard in medium.stored():
        shard.path.unlink()
    medium.forget()
    all_from_the_tier(one, PROMPTS, right)
