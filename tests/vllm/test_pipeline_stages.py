"""Proves, over slab, tree and bucket, that pipeline stages of any shape share a cache: even ones, uneven ones, stages
without any layer of a KV cache group, and stages without any layer at all. What one server has stored a second one of
the same configuration loads on every rank, byte by byte, and nobody deletes or rewrites any of it.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.distributed.utils import get_pp_indices

from examples.demo.model import ModelShape, write_model
from nixl_offload.cli.main import main
from nixl_offload.tiers.shared.naming import parse_shard_name
from nixl_offload.types import Key, key_group
from tests.s3.servers import RcloneServer
from tests.thinned import thinned
from tests.vllm.harness import tree_tier
from tests.vllm.pipeline_rig import BLOCK_TOKENS, CHUNK_TOKENS, PAGE_BYTES, PlayedEngine, played, vllm_config_of

CHUNKS = 5
PROMPTS = [random.Random(seed).choices(range(512), k=CHUNKS * CHUNK_TOKENS + 20) for seed in range(3)]
FULL_TOKENS = [CHUNKS * CHUNK_TOKENS] * len(PROMPTS)
HEADER_BYTES = 4096


def by_vllm(layers: int, stages: int) -> tuple[str, ...]:
    """Layers of full attention, as vLLM deals them out to pipeline stages."""
    return staged("F" * layers, stages)


def staged(kinds: str, stages: int) -> tuple[str, ...]:
    """Layers of these kinds, likewise."""
    return tuple(kinds[slice(*get_pp_indices(len(kinds), rank, stages))] for rank in range(stages))


STAGES = {
    "two, even": by_vllm(4, 2),
    "two, uneven": ("FFFF", "FFF"),
    "three, even": by_vllm(6, 3),
    "three, uneven": by_vllm(7, 3),
    "windows in the first alone": ("SS", "FF", "FF"),
    "windows in the last alone": ("FFF", "FFFF", "SSS"),
    "one without layers": ("FF", "", "FFF"),
    "the first without layers": ("", "FF"),
}
MOST_TRIES = 20
SHARED_MEDIA = {"tree": "tree", "bucket": "bucket"}
MEDIA = {"slab": "slab", **SHARED_MEDIA}


class Shard(NamedTuple):
    """What lies there of a rank's shard; a slab is taken for one."""

    size_bytes: int
    content: bytes
    modified_ns: int | None
    """None for a slab: its last page is written when it is opened."""


@dataclass(frozen=True)
class Medium:
    """Storage that servers share, one after the other or at the same time."""

    name: str
    tier: Mapping[str, Any]
    directory: Path
    forget: Callable[[], None] = lambda: None
    """Makes an S3 server look at its files again."""

    @property
    def many_writers(self) -> bool:
        return self.name != "slab"

    def shards(self) -> dict[str, Shard]:
        """Everything that holds KV, by its name."""
        found = {}
        for path in self.directory.rglob("*"):
            name = path.relative_to(self.directory).as_posix()
            if path.suffix == ".slab" or parse_shard_name(name) is not None:
                status, content = path.stat(), sha256(path.read_bytes()).digest()
                found[name] = Shard(status.st_size, content, status.st_mtime_ns if self.many_writers else None)
        return found


@pytest.fixture(scope="module")
def server() -> Iterator[RcloneServer]:
    with RcloneServer() as started, pytest.MonkeyPatch.context() as patch:
        for name, value in started.environment.items():
            patch.setenv(name, value)
        yield started


@pytest.fixture
def medium(request: pytest.FixtureRequest, server: RcloneServer, tmp_path: Path) -> Medium:
    if request.param == "slab":
        return Medium("slab", {"kind": "slab", "path": str(tmp_path / "slab"), "capacity": "64MiB"}, tmp_path / "slab")
    if request.param == "tree":
        return Medium("tree", tree_tier(tmp_path / "tree"), tmp_path / "tree")
    prefix = tmp_path.name
    return Medium("bucket", server.tier(prefix, mover="obstore"), server.directory / prefix, server.forget)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint for vLLM's configuration to name; nobody runs it."""
    shape = ModelShape(layers=12, hidden=64, heads=2, kv_heads=1, intermediate=64, vocab=512, max_tokens=2048)
    return write_model(tmp_path_factory.mktemp("model") / "base", shape)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with played():
        yield


Start = Callable[..., Any]


@pytest.fixture
def start(model: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    @contextmanager
    def started(
        stages: Sequence[str], *tiers: Mapping[str, Any], layout: str = "LBHNC", **fields: Any
    ) -> Iterator[PlayedEngine]:
        if tuple(stages) != staged("".join(stages), len(stages)):
            monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", ",".join(str(len(kinds)) for kinds in stages))
        connector = {"staging": "8MiB", "shards": "per_rank", "tiers": [dict(tier) for tier in tiers], **fields}
        engine = PlayedEngine(vllm_config_of(model, stages, connector), stages, layout)
        try:
            yield engine
        finally:
            engine.close()
            monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)

    return started


def shard_bytes(engine: PlayedEngine) -> list[list[int]]:
    """By KV cache group and rank: how large a shard must be, by the layers that vLLM has given each rank."""
    page_bytes = CHUNK_TOKENS // BLOCK_TOKENS * PAGE_BYTES
    groups = zip(*(rank.groups for rank in engine.ranks), strict=True)
    return [[HEADER_BYTES + len(names) * page_bytes if names else 0 for names in group] for group in groups]


def assert_whole(medium: Medium, engine: PlayedEngine) -> int:
    """Every chunk has one shard for each rank with a layer of its group, of that rank's own size. Returns how many."""
    sizes, found = shard_bytes(engine), keys_in(medium)
    assert {key_group(key) for key in found} == set(range(len(sizes)))
    for key, of_ranks in found.items():
        assert of_ranks == {rank: size for rank, size in enumerate(sizes[key_group(key)]) if size}
    return len(found)


def keys_in(medium: Medium) -> dict[Key, dict[int, int]]:
    """The chunks that lie there, with the size of each shard by rank."""
    found: dict[Key, dict[int, int]] = {}
    for name, shard in medium.shards().items():
        parsed = parse_shard_name(name)
        assert parsed is not None
        found.setdefault(parsed.key, {})[parsed.rank] = shard.size_bytes
    return found


def command(*arguments: object) -> str:
    """Run one that must succeed; return what it prints."""
    with redirect_stdout(io.StringIO()) as out:
        assert main([str(argument) for argument in arguments]) == 0
    return out.getvalue()


def store_all(engine: PlayedEngine) -> None:
    """Compute until everything is stored: one rank that has all layers drops what it has no staging for."""
    for _ in range(MOST_TRIES):
        engine.reset_prefix_cache()
        if engine.generate(PROMPTS) == FULL_TOKENS:
            return
    pytest.fail(f"not stored after {MOST_TRIES} tries")


@pytest.mark.parametrize(**thinned(stages=STAGES, medium=MEDIA), indirect=["medium"])
def test_a_second_server_hits_what_the_first_has_stored(
    start: Start, medium: Medium, stages: Sequence[str], tmp_path: Path
) -> None:
    with start(stages, medium.tier) as first:
        assert first.generate(PROMPTS) == [0] * len(PROMPTS)
        stored = first.moved("store")
        assert [size > 0 for size in stored] == [bool(kinds) for kinds in stages]
        if medium.many_writers:
            medium.forget()
            chunks = assert_whole(medium, first)
    before = medium.shards()
    with start(stages, medium.tier) as second:
        assert second.generate(PROMPTS) == FULL_TOKENS
        assert second.wrong() == []
        # Of a window only the end is loaded.
        loaded = second.moved("load")
        assert all(size <= of for size, of in zip(loaded, stored, strict=True))
        assert [size == of for size, of in zip(loaded, stored, strict=True)] == ["S" not in kinds for kinds in stages]
        second.reset_prefix_cache()
        assert second.generate(PROMPTS) == FULL_TOKENS
        assert (second.moved("store"), second.wrong()) == ([0] * len(stages), [])
    assert medium.shards() == before
    file = tmp_path / "kv.yaml"
    file.write_text(yaml.safe_dump({"tiers": [dict(medium.tier)]}))
    (verified,) = json.loads(command("verify", file, "--json").splitlines()[-1])["tiers"]
    assert set(verified["chunks"].values()) == {0, verified["chunks"]["good"]}
    assert verified["chunks"]["good"] == chunks if medium.many_writers else verified["chunks"]["good"] > 0


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
    with start(writer, medium.tier, shards=cut) as first:
        assert first.generate(PROMPTS) == [0] * len(PROMPTS)
        store_all(first)
        of_group = [
            {int(name.split(".")[2]) // 2 for rank in first.ranks for name in rank.groups[at]}
            for at in range(len(first.ranks[0].groups))
        ]
    medium.forget()
    before = medium.shards()
    for key, shards in keys_in(medium).items():
        assert {*shards} == of_group[key_group(key)], (
            "a range of layers, two of the model, has a shard where it has any"
        )
    with start(reader, medium.tier, shards=cut) as second:
        assert second.generate(PROMPTS) == FULL_TOKENS
        assert second.wrong() == []
        assert [size > 0 for size in second.moved("load")] == [True] * sizes[1]
        second.reset_prefix_cache()
        assert second.generate(PROMPTS) == FULL_TOKENS
        assert (second.moved("store"), second.wrong()) == ([0] * sizes[1], [])
    assert medium.shards() == before
    assert "as each rank has them" not in caplog.text


@pytest.mark.parametrize(
    **thinned(
        stages={name: STAGES[name] for name in ("two, uneven", "windows in the first alone", "one without layers")},
        medium=MEDIA,
    ),
    indirect=["medium"],
)
def test_stages_cut_at_their_own_begins(
    start: Start, medium: Medium, stages: Sequence[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever they are, without a word in the config; and commands understand what lies there."""
    memory = {"kind": "memory", "capacity": "16MiB"}
    with start(stages, memory, medium.tier, shards=1) as first:
        assert first.generate(PROMPTS) == [0] * len(PROMPTS)
        first.reset_prefix_cache()
        assert first.generate(PROMPTS) == FULL_TOKENS
        assert first.wrong() == []
    medium.forget()
    with start(stages, medium.tier, shards=1) as second:
        assert second.generate(PROMPTS) == FULL_TOKENS
        assert second.wrong() == []
        assert [size > 0 for size in second.moved("load")] == [bool(kinds) for kinds in stages]
    assert "as each rank has them" not in caplog.text
    file = tmp_path / "kv.yaml"
    file.write_text(yaml.safe_dump({"tiers": [dict(medium.tier)]}))
    (verified,) = json.loads(command("verify", file, "--json").splitlines()[-1])["tiers"]
    assert set(verified["chunks"].values()) == {0, verified["chunks"]["good"]}
    assert verified["chunks"]["good"] > 0


def test_a_cut_that_is_not_at_a_servers_stages_is_refused_once(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three stages begin within what is cut for two: they store rank by rank, and the log says so."""
    for shards, words in (
        ({"heads": 1, "layers": 2}, "`layers: 2` cuts at 3"),
        ({"heads": 1, "layers": 1}, "`layers: 1` cuts at none"),
    ):
        caplog.clear()
        with start(staged("FFFFFF", 3), tree_tier(tmp_path / "tree"), shards=shards) as engine:
            engine.generate(PROMPTS[:1])
            assert [rank.worker._shards for rank in engine.ranks] == [None] * 3
        (line,) = [each.getMessage() for each in caplog.records if "as each rank has them" in each.getMessage()]
        assert words in line
