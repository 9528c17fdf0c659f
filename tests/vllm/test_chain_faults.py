"""A chain of tiers of which one misbehaves: the others go on as if nothing were.

Proves: while a bucket stalls, requests that hit memory or files are not delayed, memory stays within its bound, and all
is well again afterwards; hits that would be slower than computing are not taken, and are tried again later.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

from tests.s3.proxy import Delay, FaultProxy, Hold
from tests.s3.servers import RcloneServer
from tests.vllm.damage import until
from tests.vllm.harness import (
    CHUNK_TOKENS,
    MAX_BATCHED_TOKENS,
    Engine,
    Workshop,
    assert_same,
    chain_config,
    prompts,
)

STALL_S = float(os.environ.get("NIXL_OFFLOAD_STALL_S", "0"))
"""How long the bucket stalls at least. A minute, as an outage lasts, takes a minute: that is for a run by hand."""
STALL_ROUNDS = 6
"""In each, four prompts are stored that nobody has seen, 16 MiB: twice the bound on memory's growth in all."""
HELD_S = 8.0
"""What a request would wait for the bucket if it waited: ``lookup.timeout``, and less than ``load_timeout``."""
FULL_TOKENS = 2 * MAX_BATCHED_TOKENS
LIMIT = 4 << 20
SOURCES = "vllm:prompt_tokens_cached_by_source"


def resident_bytes(engine: Engine) -> int:
    """What the engine's process holds of the machine's memory."""
    status = Path(f"/proc/{engine.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10


def test_a_bucket_that_stalls(workshop: Workshop, server: RcloneServer) -> None:
    """Memory and files in front of a bucket that answers nothing for a while, its connections open all the time."""
    known = prompts(4, steps=2, seed=811)
    fresh = (prompt for seed in itertools.count(812_000) for prompt in prompts(1, steps=2, seed=seed))
    memory = {"kind": "memory", "capacity": "16MiB", "unsaved_limit": f"{LIMIT >> 20}MiB"}
    files = {"kind": "slab", "path": str(workshop.scratch / "stall"), "capacity": "1GiB"}
    with FaultProxy(server.port) as proxy:
        bucket = server.tier("stall", endpoint=proxy.endpoint, lookup={"timeout": f"{HELD_S:.0f}s"})
        config = chain_config(memory, files, bucket)
        with workshop.start_engine(connector=config, environment=server.environment) as engine:
            right = engine.generate(known)
            engine.generate([next(fresh) for _ in range(8)])  # memory is full, and has been through evictions
            assert engine.settle()
            held = proxy.inject(Hold())
            # This one asks the bucket, which says nothing: from here on the tier is known to be in trouble.
            engine.generate([next(fresh)])
            before_bytes, stalled_s = resident_bytes(engine), time.monotonic()
            sources = engine.labelled(SOURCES, "source")
            rounds = 0
            while time.monotonic() - stalled_s < STALL_S or rounds < STALL_ROUNDS:
                rounds += 1
                assert engine.reset_prefix_cache()
                for prompt, expected in zip(known, right, strict=True):
                    [answer] = engine.generate([prompt])
                    assert answer.external_hit_tokens == FULL_TOKENS
                    assert answer.same_as(expected)
                    assert answer.total_s < HELD_S / 2
                engine.generate([next(fresh) for _ in range(4)])
                assert engine.metrics()["vllm:nixl_offload_unsaved_bytes"] <= LIMIT
            came = engine.labelled(SOURCES, "source")
            assert came["host"] + came["disk"] - sources["host"] - sources["disk"] == rounds * 4 * FULL_TOKENS
            assert resident_bytes(engine) - before_bytes < 48 << 20
            held.release()
            assert engine.settle()
            last = next(fresh)
            engine.generate([last])
            until(lambda: _stored_again(engine, next(fresh)), "the bucket is in use again", deadline_s=60.0)
            engine.stop()


def _stored_again(engine: Engine, prompt: list[int]) -> bool:
    time.sleep(0.5)  # a tier that failed is tried again after a pause, and to ask is to compute
    before = engine.labelled("vllm:nixl_offload_write_through_chunks", "tier").get("s3", 0)
    engine.generate([prompt])
    assert engine.settle()
    return engine.labelled("vllm:nixl_offload_write_through_chunks", "tier").get("s3", 0) > before


def test_a_hit_slower_than_computing_is_not_taken(workshop: Workshop, server: RcloneServer) -> None:
    """Once a few loads have shown that the bucket is slow, prompts are computed although it has them; counted."""
    asked = prompts(8, steps=2, seed=813)
    with FaultProxy(server.port) as proxy:
        # A lookup that is given up halfway would find a part of the prefix, and other steps give other last bits.
        bucket = server.tier("slow", endpoint=proxy.endpoint, lookup={"timeout": f"{HELD_S:.0f}s"})
        with workshop.start_engine(connector=chain_config(bucket), environment=server.environment) as engine:
            right = engine.generate(asked)
            assert engine.settle()
            engine.stop()
        slow = proxy.inject(Delay(0.8, at="answer"), operation="GET")
        config = chain_config(bucket, slow_hits="skip")
        with workshop.start_engine(connector=config, environment=server.environment) as engine:
            engine.generate(prompts(4, steps=2, seed=814))  # so that it is known how fast computing is
            answers = engine.generate(asked)
            assert_same(answers, right)
            taken = [answer.external_hit_tokens for answer in answers]
            assert taken[:3] == [FULL_TOKENS] * 3, "nothing is known of the tier yet"
            assert taken[3:] == [0] * 5
            assert engine.labelled("vllm:nixl_offload_hit_decisions", "decision") == {"taken": 3, "skipped": 5}
            slow.release()
            engine.stop()


def test_files_that_are_gone(workshop: Workshop) -> None:
    """Memory goes on serving when the file tier's directory vanishes, and when it never could be used."""
    asked = prompts(2, steps=2, seed=815)
    path = workshop.scratch / "vanishing"
    config = chain_config(
        {"kind": "memory", "capacity": "64MiB"}, {"kind": "slab", "path": str(path), "capacity": "64MiB"}
    )
    with workshop.start_engine(connector=config) as engine:
        right = engine.generate(asked[:1])
        assert engine.settle()
        path.rename(path.with_name("elsewhere"))
        right += engine.generate(asked[1:])
        assert engine.settle()
        for _ in range(2):
            assert engine.reset_prefix_cache()
            answers = engine.generate(asked)
            assert [answer.external_hit_tokens for answer in answers] == [FULL_TOKENS] * 2
            assert_same(answers, right)
        engine.stop()
    assert FULL_TOKENS % CHUNK_TOKENS == 0
