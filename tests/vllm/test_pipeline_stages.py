"""Proves, over slab, tree and bucket, that pipeline stages of any shape share a cache: even ones, uneven ones, stages
without any layer of a KV cache group, and stages without any layer at all. What one server has stored a second one
loads on every rank, byte by byte, and nobody deletes or rewrites any of it.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm.distributed.utils import get_pp_indices

from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.cli.main import main
from nixl_offload.types import Key, key_group
from tests.s3.servers import RcloneServer
from tests.thinned import thinned
from tests.vllm.fuzz_families import write_base
from tests.vllm.media import MOVERS, Medium, bucket, slab, tree
from tests.vllm.pipeline_rig import BLOCK_TOKENS, CHUNK_TOKENS, PAGE_BYTES, PlayedEngine, played, vllm_config_of

CHUNKS = 5
PROMPTS = [random.Random(seed).choices(range(512), k=CHUNKS * CHUNK_TOKENS + 20) for seed in range(3)]
FULL_TOKENS = [CHUNKS * CHUNK_TOKENS] * len(PROMPTS)
NONE = [0] * len(PROMPTS)
MOST_TRIES = 20


def staged(kinds: str, stages: int) -> tuple[str, ...]:
    """Layers of these kinds, as vLLM deals them out to pipeline stages."""
    return tuple(kinds[slice(*get_pp_indices(len(kinds), rank, stages))] for rank in range(stages))


STAGES = {
    "two, even": staged("FFFF", 2),
    "two, uneven": ("FFFF", "FFF"),
    "three, even": staged("FFFFFF", 3),
    "three, uneven": staged("FFFFFFF", 3),
    "windows in the first alone": ("SS", "FF", "FF"),
    "windows in the last alone": ("FFF", "FFFF", "SSS"),
    "one without layers": ("FF", "", "FFF"),
    "the first without layers": ("", "FF"),
}
CUT_AT_THEIR_BEGINS = ("two, uneven", "windows in the first alone", "one without layers")
SERVERS = {name: (stages, "per_rank") for name, stages in STAGES.items()} | {
    f"{name}, cut": (STAGES[name], 1) for name in CUT_AT_THEIR_BEGINS
}
SHARED_MEDIA = {"tree": "tree", "bucket": "bucket"}
MEDIA = {"slab": "slab", **SHARED_MEDIA}


@pytest.fixture
def medium(request: pytest.FixtureRequest, server: RcloneServer, tmp_path: Path) -> Medium:
    if request.param == "bucket":
        return bucket(server, MOVERS[1], prefix=tmp_path.name)
    return {"slab": slab, "tree": tree}[request.param](tmp_path / "kv")


def what_lies_in(medium: Medium) -> dict[Path, tuple[bytes, int]]:
    """Everything that holds KV: content, and when it was written. A slab's last page is written when it is opened."""
    slabs = list(medium.directory.glob("*/*.slab"))
    files = slabs or [medium.directory / name for name in medium.shards()]
    return {path: (sha256(path.read_bytes()).digest(), 0 if slabs else path.stat().st_mtime_ns) for path in files}


def ranks_by_key(medium: Medium) -> dict[Key, dict[int, int]]:
    """The chunks that lie there, with the size of each shard by rank."""
    found: dict[Key, dict[int, int]] = {}
    for shard in medium.stored():
        found.setdefault(shard.header.key, {})[shard.rank] = shard.path.stat().st_size
    return found


def verified(medium: Medium, file: Path) -> int:
    """Return how many chunks ``nixl-offload verify`` finds good; there are no others."""
    file.write_text(yaml.safe_dump({"tiers": [dict(medium.tier)]}))
    with redirect_stdout(io.StringIO()) as out:
        assert main(["verify", str(file), "--json"]) == 0
    (tier,) = json.loads(out.getvalue().splitlines()[-1])["tiers"]
    good: int = tier["chunks"]["good"]
    assert set(tier["chunks"].values()) == {0, good}
    return good


Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory, server: RcloneServer, monkeypatch: pytest.MonkeyPatch) -> Start:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    model = write_base(tmp_path_factory.mktemp("model"))

    @contextmanager
    def started(stages: Sequence[str], medium: Medium, **fields: Any) -> Iterator[PlayedEngine]:
        with monkeypatch.context() as patch, played():
            if tuple(stages) != staged("".join(stages), len(stages)):
                patch.setenv("VLLM_PP_LAYER_PARTITION", ",".join(str(len(kinds)) for kinds in stages))
            connector = {"staging": "8MiB", "tiers": [dict(medium.tier)], **fields}
            engine = PlayedEngine(vllm_config_of(model, stages, connector), stages)
            try:
                yield engine
            finally:
                engine.close()

    return started


def finds_all_and_stores_nothing(engine: PlayedEngine, medium: Medium) -> None:
    before = what_lies_in(medium)
    for _ in range(2):
        engine.reset_prefix_cache()
        assert engine.generate(PROMPTS) == FULL_TOKENS
    assert engine.wrong() == []
    assert set(engine.moved("store")) == {0}
    assert what_lies_in(medium) == before


@pytest.mark.parametrize(**thinned(servers=SERVERS, medium=MEDIA), indirect=["medium"])
def test_a_second_server_hits_what_the_first_has_stored(
    start: Start,
    medium: Medium,
    servers: tuple[Sequence[str], str | int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Shards are cut by rank, or where any stages begin. Commands understand them."""
    stages, shards = servers
    chunks = 0
    with start(stages, medium, shards=shards) as first:
        assert first.generate(PROMPTS) == NONE
        stored = first.moved("store")
        assert [size > 0 for size in stored] == [bool(kinds) for kinds in stages]
        medium.forget()
        if medium.name != "slab" and shards == "per_rank":
            # By KV cache group and rank: how large a shard must be, by the layers that vLLM has given each rank.
            page_bytes = CHUNK_TOKENS // BLOCK_TOKENS * PAGE_BYTES
            sizes = [
                {rank: HEADER_BYTES + len(names) * page_bytes for rank, names in enumerate(group) if names}
                for group in zip(*(rank.groups for rank in first.ranks), strict=True)
            ]
            found = ranks_by_key(medium)
            assert found == {key: sizes[key_group(key)] for key in found}
            assert {key_group(key) for key in found} == set(range(len(sizes)))
            chunks = len(found)
    with start(stages, medium, shards=shards) as second:
        assert second.generate(PROMPTS) == FULL_TOKENS
        loaded = second.moved("load")
        if shards == "per_rank":  # of a window only the end is loaded
            is_all = [size == of for size, of in zip(loaded, stored, strict=True)]
            assert is_all == ["S" not in kinds for kinds in stages]
        assert [size > 0 for size in loaded] == [bool(kinds) for kinds in stages]
        finds_all_and_stores_nothing(second, medium)
    assert "as each rank has them" not in caplog.text
    good = verified(medium, tmp_path / "kv.yaml")
    assert good == chunks if chunks else good > 0


KINDS = {
    "full": "FFFFFFFF",
    "windows in the first": "SSFFFFFF",
    "windows in the last": "FFFFFFSS",
    "hybrid": "SFSFSFSF",
}


@pytest.mark.parametrize(
    **thinned(kinds=KINDS, sizes={str(sizes): sizes for sizes in ((1, 2), (4, 1), (2, 4))}, medium=SHARED_MEDIA),
    indirect=["medium"],
)
def test_servers_of_other_stages_share_what_is_cut_for_four(
    start: Start, medium: Medium, kinds: str, sizes: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Also where a group has layers in some ranges only: what one stored the other loads, byte by byte."""
    cut, (writer, reader) = {"heads": 1, "layers": 4}, (staged(kinds, stages) for stages in sizes)
    with start(writer, medium, shards=cut) as first:
        for _ in range(MOST_TRIES):  # one rank that has all layers drops what it has no staging for
            first.reset_prefix_cache()
            if first.generate(PROMPTS) == FULL_TOKENS:
                break
        else:
            pytest.fail(f"not stored after {MOST_TRIES} tries")
        ranges = [
            {int(name.split(".")[2]) // 2 for rank in first.ranks for name in rank.groups[at]}
            for at in range(len(first.ranks[0].groups))
        ]
    medium.forget()
    for key, shards in ranks_by_key(medium).items():
        assert {*shards} == ranges[key_group(key)], "a range of layers, two of the model, has a shard where it has any"
    with start(reader, medium, shards=cut) as second:
        finds_all_and_stores_nothing(second, medium)
        assert [size > 0 for size in second.moved("load")] == [True] * sizes[1]
    assert "as each rank has them" not in caplog.text


def test_a_cut_that_is_not_at_a_servers_stages_is_refused_once(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three stages begin within what is cut for two: they store rank by rank, and the log says so."""
    for layers, words in ((2, "`layers: 2` cuts at 3"), (1, "`layers: 1` cuts at none")):
        caplog.clear()
        medium = tree(tmp_path / f"tree-{layers}")
        with start(staged("FFFFFF", 3), medium, shards={"heads": 1, "layers": layers}) as engine:
            engine.generate(PROMPTS[:1])
        assert {rank for ranks in ranks_by_key(medium).values() for rank in ranks} == {0, 1, 2}
        (line,) = [each.getMessage() for each in caplog.records if "as each rank has them" in each.getMessage()]
        assert words in line
