"""One real ``vllm serve`` with memory, a slab and a bucket: its /metrics against the docs and the dashboard, its KV
events as a subscriber on ZMQ gets them.

Proves: what is documented is exposed and the other way round; every series that a panel or an example in the docs asks
for is there, with values where traffic made some; numbers by tier are those that the traffic must give; damage on the
disk shows as what it is; events carry medium, locality, tokens and the hashes that vLLM's own events have.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockStored, KVEventBatch

from nixl_offload.vllm.metric_names import METRICS, PREFIX
from tests.promql import PAGE, asked, every_expression
from tests.prove.happenings import DAMAGES
from tests.s3.servers import RcloneServer
from tests.vllm.damage import CHUNK_BYTES
from tests.vllm.harness import BLOCK_TOKENS, CHUNK_TOKENS, Workshop, chain_config, prompts
from tests.vllm.media import slab
from tests.vllm.server import Server, series
from tests.vllm.zygote import Zygote

PROMPT_CHUNKS = 6
PROMPTS = 3
CHUNKS = PROMPTS * PROMPT_CHUNKS
PART = re.compile("_(bucket|sum|count|created)$")


class Served(NamedTuple):
    """The server after its traffic, and what it told."""

    server: Server
    events: list[Any]
    metrics: str
    """After the traffic, before anything was damaged."""
    damaged: str
    """After a load met damage."""


class Subscriber:
    """Listens to vLLM's events, as llm-d's indexer does, on a thread of its own: a subscription goes out only while its
    socket is asked for messages.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        # vLLM binds where the endpoint has a *, and connects to any other.
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.events: list[Any] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._socket.close(0)
        self._context.term()

    def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        while not self._closing.is_set():
            if self._socket.poll(50):
                _, _, payload = self._socket.recv_multipart()
                self.events += decoder.decode(payload).events


@pytest.fixture(scope="module")
def served(zygote: Zygote, workshop: Workshop) -> Iterator[Served]:
    """Three prompts through all tiers; the first once more; then the slab is damaged, and the second once more."""
    scratch = workshop.scratch
    subscriber = Subscriber()
    with RcloneServer() as bucket:
        config = chain_config(
            {"kind": "memory", "capacity": "8MiB"},
            {"kind": "slab", "path": str(scratch / "slab"), "capacity": "256MiB"},
            bucket.tier("metrics"),
            slow_hits="skip",
            vllm={"self_describing_kv_events": True},
        )
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": subscriber.endpoint}
        server = Server(zygote, scratch, config, environment=bucket.environment, kv_events_config=json.dumps(events))
        try:
            texts = prompts(PROMPTS, seed=905)
            for number, prompt in enumerate(texts, 1):
                server.complete(prompt)
                arrived = dict.fromkeys(("slab", "s3"), float(number * PROMPT_CHUNKS))
                server.until(
                    lambda arrived=arrived: (
                        server.samples(  # type: ignore[misc]
                            PREFIX + "chunks_total", "tier", operation="write_through", outcome="ok"
                        )
                        == arrived
                    ),
                    60,
                    "the chunks have arrived in the slab and in the bucket, before memory needs their room",
                )
            server.reset_prefix_cache()
            server.complete(texts[0])
            server.until(
                lambda: server.samples(PREFIX + "transfer_bytes_total", "operation").get("load", 0) > 0,
                30,
                "the load is counted",
            )
            metrics = server.metrics()
            for shard in slab(scratch / "slab").stored():
                DAMAGES["flipped"](shard, shard, 0.5)
            # What memory has is served from there: the second prompt went when the first was promoted.
            server.reset_prefix_cache()
            server.complete(texts[1])
            server.until(
                lambda: server.samples(PREFIX + "shard_failures_total", "cause") != {}, 30, "the damage is counted"
            )
            yield Served(server, subscriber.events, metrics, server.metrics())
        finally:
            server.close()
            subscriber.close()


def families(text: str) -> dict[str, str]:
    """Name -> type, of all that is exposed; counters with ``_total``."""
    return dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))


def labelled(text: str, name: str, **labels: str) -> float:
    """Sum of the series of one of our metrics that have ``labels``."""
    return sum(value for at, value in series(text, PREFIX + name) if labels.items() <= at.items())


def test_documented_metrics_are_exposed_and_no_others(served: Served) -> None:
    exposed = {
        name: kind
        for name, kind in families(served.metrics).items()
        if name.startswith(PREFIX) and not name.endswith("_created")
    }
    assert exposed == {metric.exposed: metric.kind for metric in METRICS}
    documented = set(re.findall(r"`(vllm:nixl_offload_\w+)", PAGE.read_text()))
    assert documented == set(exposed)


def test_what_the_docs_say_of_vllms_own_metrics_is_so(served: Served) -> None:
    """Each is named whole once in a row; the others of its row are abbreviated."""
    named = set(re.findall(r"`(vllm:(?!nixl_offload)\w+)", PAGE.read_text()))
    assert named
    assert {PART.sub("", name) for name in named} <= set(families(served.metrics))


NOT_OURS = {"instance", "namespace", "model_name"}
"""Labels that Prometheus or vLLM adds."""


@pytest.mark.parametrize(("where", "expression"), list(every_expression()))
def test_every_expression_asks_for_what_a_running_vllm_has(served: Served, where: str, expression: str) -> None:
    """Metrics by name; of histograms the buckets; every label that is matched or grouped by, where there are values."""
    exposed = families(served.damaged)
    for name, labels in asked(expression).items():
        assert name in exposed or exposed.get(PART.sub("", name)) == "histogram", f"{where}: {name}"
        if found := series(served.damaged, name):
            assert labels - NOT_OURS <= {label for at, _ in found for label in at}, f"{where}: {name}"


def test_numbers_by_tier_are_those_of_the_traffic(served: Served) -> None:
    """Three prompts of six chunks; memory holds fourteen, so the first prompt came back from the slab in part."""
    text, size = served.metrics, CHUNK_BYTES
    assert labelled(text, "transfer_bytes_total", operation="store", tier="memory") == CHUNKS * size
    for tier in ("slab", "s3"):
        assert labelled(text, "transfer_bytes_total", operation="write_through", tier=tier) == CHUNKS * size
        assert labelled(text, "chunks_total", operation="write_through", outcome="ok", tier=tier) == CHUNKS
        assert labelled(text, "queued_bytes", tier=tier) == labelled(text, "pending_chunks", tier=tier) == 0
    loaded = labelled(text, "transfer_bytes_total", operation="load", tier="slab")
    assert loaded > 0
    assert loaded + labelled(text, "transfer_bytes_total", operation="load", tier="memory") == PROMPT_CHUNKS * size
    asked_tokens = (PROMPTS + 1) * PROMPT_CHUNKS * CHUNK_TOKENS
    assert labelled(text, "lookup_tokens_total", tier="memory") == asked_tokens
    assert labelled(text, "lookup_tokens_total", tier="slab", result="hit") == loaded / size * CHUNK_TOKENS
    assert labelled(text, "lookup_tokens_total", tier="s3", result="miss") == PROMPTS * PROMPT_CHUNKS * CHUNK_TOKENS
    assert labelled(text, "hit_decisions_total", tier="slab", decision="taken") == 1
    observed = labelled(text, "transfer_seconds_count", operation="load", tier="slab")
    assert observed == 1
    assert 0 < labelled(text, "transfer_seconds_sum", operation="load", tier="slab") < 30
    assert labelled(text, "probe_seconds_count", tier="s3") == labelled(text, "probes_total", tier="s3") > 0
    assert labelled(text, "disabled_ranks") == 0
    assert labelled(text, "shard_failures_total") == 0
    for tier, capacity_bytes in {"memory": 8 << 20, "slab": 256 << 20}.items():
        used = labelled(text, "used_bytes", tier=tier)
        assert 0 < used <= labelled(text, "capacity_bytes", tier=tier) <= capacity_bytes
    equipment = {at["tier"]: at for at, _ in series(text, PREFIX + "tier_info")}
    assert set(equipment) == {"memory", "slab", "s3"}
    assert equipment["memory"]["mover"] == "copy"
    assert {at["path"] for at in equipment.values()} == {"host"}


def test_damage_shows_as_what_it_is(served: Served) -> None:
    """Bits were flipped in every chunk of the slab: the checksum says so, once for each chunk that was loaded."""
    corrupt = labelled(served.damaged, "chunks_total", operation="load", outcome="corrupt", tier="slab")
    assert corrupt > 0
    assert corrupt == labelled(
        served.damaged, "shard_failures_total", operation="load", outcome="corrupt", cause="checksum", tier="slab"
    )
    assert labelled(served.metrics, "chunks_total", operation="load", outcome="corrupt", tier="slab") == 0
    told = {(at["operation"], at["outcome"]) for at, _ in series(served.metrics, PREFIX + "chunks_total")}
    assert ("load", "corrupt") in told, "told as 0 before it happened"


def test_events_reach_a_subscriber_with_what_an_indexer_needs(served: Served) -> None:
    """Each chunk is stored in each tier: four block hashes that the GPU's events have too, tokens, parent, place."""
    stored = [event for event in served.events if isinstance(event, BlockStored)]
    on_gpu = {block for event in stored if event.medium == "GPU" for block in event.block_hashes}
    for medium, locality in (("CPU", "LOCAL"), ("STORAGE", "LOCAL"), ("OBJECT_STORE", "REMOTE")):
        ours = [event for event in stored if (event.medium, event.locality) == (medium, locality)]
        named = {tuple(event.block_hashes) for event in ours}
        assert len(named) == CHUNKS, f"{medium} {locality}"
        for event in ours:
            assert len(event.block_hashes) == CHUNK_TOKENS // BLOCK_TOKENS
            assert set(event.block_hashes) <= on_gpu
            assert len(event.token_ids) == CHUNK_TOKENS
            assert event.block_size == BLOCK_TOKENS
            assert event.parent_block_hash is None or event.parent_block_hash in on_gpu
        assert sum(event.parent_block_hash is None for event in ours) >= PROMPTS, "the first chunk of each prompt"
    removed = {event.medium for event in served.events if type(event).__name__ == "BlockRemoved"}
    assert "CPU" in removed, "memory holds fewer chunks than there are"
    assert "AllBlocksCleared" in {type(event).__name__ for event in served.events}, "vLLM's own cache was reset"
