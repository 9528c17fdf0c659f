"""Replays our KV events through the rules by which llm-d's router scores servers, as published:

github.com/llm-d/llm-d-router, ``pkg/kvevents/pool.go`` (an event's medium is lower-cased, and is the tier of each of
its block hashes; without a medium the tier is ``gpu``), ``pkg/kvcache/kvblock_scorer.go`` (a server's score is
the sum over the prompt's blocks, up to the first that it lacks, of the weight of the best tier that has the block) and
``pkg/kvcache/backend.go`` (weights by tier; from pull request 2809 on, an unlisted tier counts 0).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.distributed.kv_events import BlockRemoved, BlockStored

from nixl_offload.config import parse_config
from nixl_offload.types import Key
from nixl_offload.vllm.tier_events import label_of
from tests.vllm import manager_rig
from tests.vllm.test_contract_chain import Matching

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = {"gpu": 1.0, "cpu": 0.8, "shared_storage": 0.4, "storage": 0.3, "object_store": 0.2}
KINDS = ["memory", "slab", "shared_dir", "s3"]
LOCAL_DIR = "shared_dir on a local drive"
CHUNKS = 4
TIERS = parse_config(
    {
        "tiers": [
            {"kind": "memory", "capacity": "1GiB"},
            {"kind": "slab", "path": "/kv/slab", "capacity": "1GiB"},
            {"kind": "shared_dir", "path": "/kv/tree", "capacity": "1GiB"},
            {"kind": "s3", "bucket": "kv-cache", "ttl": "7d"},
        ]
    }
).tiers


class Router:
    """One server's blocks as the router knows them."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._tiers: dict[Any, set[str]] = {}

    def hear(self, events: list[Any]) -> None:
        """Take events in their order."""
        for event in events:
            tier = (event.medium or "gpu").lower()
            for block in event.block_hashes:
                if isinstance(event, BlockStored):
                    self._tiers.setdefault(block, set()).add(tier)
                elif isinstance(event, BlockRemoved):
                    self._tiers.get(block, set()).discard(tier)

    def score(self, blocks: list[Any]) -> float:
        """Return the server's score for a prompt of these blocks."""
        total = 0.0
        for block in blocks:
            tiers = self._tiers.get(block)
            if not tiers:
                break
            total += max(self._weights.get(tier, 0.0) for tier in tiers)
        return total


class Stored:
    """A prompt of four chunks, of which a test says which tier has them; vLLM's own code makes the events of it."""

    def __init__(self, path: Path) -> None:
        self._asked = Matching(path, CHUNKS, memory=False)
        scheduler = self._asked.scheduler
        scheduler._events_tracker.self_describing_enabled = True
        assert self._asked.ask() == (
            CHUNKS * manager_rig.CHUNK_TOKENS,
            True,
        )
        list(scheduler.take_events())
        self._labels = {kind: label_of(tier, is_local=False) for kind, tier in zip(KINDS, TIERS, strict=True)}
        self._labels[LOCAL_DIR] = label_of(TIERS[KINDS.index("shared_dir")], is_local=True)
        self.close = self._asked.manager.shutdown

    def events(self, kind: str, *, removed: bool = False, chunks: int = CHUNKS) -> list[Any]:
        """Return what a subscriber is told when the first chunks come to a tier, or go from it."""
        keys = [Key(key) for key in self._asked.keys[:chunks]]
        self._asked.manager._labels[0] = self._labels[kind]
        self._asked.manager.catalog.changes.tell(0, keys, removed=removed)
        return list(self._asked.scheduler._named_events())

    def found_blocks(self, shared: int) -> int:
        """Return how many blocks a lookup finds of a prompt that shares the first ``shared`` blocks."""
        fields = vars(self._asked.request)
        hashes = [hash if at < shared else b"other" + hash for at, hash in enumerate(fields["block_hashes"])]
        request: Any = SimpleNamespace(**{**fields, "request_id": f"shares {shared}", "block_hashes": hashes})
        self._asked.scheduler.on_new_request(request)
        tokens, _ = self._asked.scheduler.get_num_new_matched_tokens(request, 0)
        assert tokens is not None
        return tokens // manager_rig.BLOCK_TOKENS


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    made = Stored(tmp_path)
    yield made
    made.close()


def shipped_weights() -> dict[str, float]:
    """Those of the llm-d example."""
    shipped = yaml.safe_load((ROOT / "examples/kubernetes/llm-d/router.yaml").read_text())
    return {tier["name"]: tier["weight"] for tier in shipped["parameters"]["indexerConfig"]["kvCacheBackendConfigs"]}


def blocks_of(events: list[Any]) -> list[Any]:
    return [block for event in events for block in event.block_hashes]


@pytest.mark.parametrize("weights", [DEFAULTS, shipped_weights()], ids=["published", "shipped"])
def test_a_router_tells_our_tiers_apart(weights: dict[str, float], stored: Stored) -> None:
    """Each kind has a weight of its own, memory before the drive and that before the bucket."""
    scores = {}
    for kind in KINDS:
        events, router = stored.events(kind), Router(weights)
        router.hear(events)
        blocks = blocks_of(events)
        assert len(blocks) == CHUNKS * manager_rig.BLOCKS_PER_CHUNK
        scores[kind] = router.score(blocks) / len(blocks)
    tiers = ["cpu", "storage", "shared_storage", "object_store"]
    assert scores == pytest.approx({kind: weights[tier] for kind, tier in zip(KINDS, tiers, strict=True)})
    assert len(set(scores.values())) == len(KINDS)
    assert 0 < scores["s3"] < scores["slab"] < scores["memory"] < weights["gpu"]


def test_a_router_counts_less_than_a_chunk_more_than_a_lookup_finds(stored: Stored) -> None:
    """It counts single blocks, also of a prompt that parts within a chunk; a lookup takes whole chunks."""
    router, events = Router(dict.fromkeys(DEFAULTS, 1.0)), stored.events("slab")
    router.hear(events)
    blocks = blocks_of(events)
    counted = {shared: int(router.score([*blocks[:shared], "other"])) for shared in range(len(blocks) + 1)}
    assert counted == {shared: shared for shared in counted}
    too_many = [counted[shared] - stored.found_blocks(shared) for shared in counted]
    assert too_many == [shared % manager_rig.BLOCKS_PER_CHUNK for shared in counted]


def test_a_directory_on_a_local_drive_counts_as_a_drive(stored: Stored) -> None:
    """Other machines cannot read it: a router that took it for shared storage would send requests there in vain."""
    router = Router(DEFAULTS)
    events = stored.events(LOCAL_DIR)
    router.hear(events)
    blocks = blocks_of(events)
    assert router.score(blocks) == pytest.approx(DEFAULTS["storage"] * len(blocks))
    router.hear(stored.events(LOCAL_DIR, removed=True))
    assert router.score(blocks) == 0


def test_a_block_counts_as_the_best_tier_that_has_it(stored: Stored) -> None:
    """And less when it goes from there: what stays in the bucket is still known."""
    router = Router(DEFAULTS)
    far = stored.events("s3")
    router.hear(far)
    blocks = blocks_of(far)
    router.hear(stored.events("memory", chunks=1))
    near = manager_rig.BLOCKS_PER_CHUNK
    assert router.score(blocks) == pytest.approx(0.8 * near + 0.2 * (len(blocks) - near))
    router.hear(stored.events("memory", removed=True, chunks=1))
    assert router.score(blocks) == pytest.approx(0.2 * len(blocks))
    router.hear(stored.events("s3", removed=True, chunks=1))
    assert router.score(blocks) == 0, "a prefix ends where its first block is gone"
