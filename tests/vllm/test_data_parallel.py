"""Proves over a real ``vllm serve --data-parallel-size 2`` that one drive serves both ranks: what one has stored the
other loads, to the last bit; a rank that dies leaves it whole; what both store stays within the capacity.

vLLM runs the ranks of a dense model as engines that know nothing of each other, not even how many there are.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from nixl_offload.cli.main import main
from nixl_offload.tiers.ownership import holder_of
from nixl_offload.tiers.shared import eviction
from nixl_offload.vllm.metric_names import PREFIX
from tests.vllm.damage import FULL_TOKENS, PROMPT_CHUNKS, SHARD_BYTES, Prompt, chunk_prompts
from tests.vllm.harness import CHUNK_TOKENS, Workshop, chain_config
from tests.vllm.media import Medium, tree
from tests.vllm.server import Server
from tests.vllm.zygote import Zygote

PROMPTS = chunk_prompts(3, seed=241)
CAPACITY_CHUNKS = 16
LOOKUP = {"timeout": "10s", "present_for": "100ms", "absent_for": "100ms"}
"""Each request looks again, so that ranks see changes that a test makes."""


class Answered(NamedTuple):
    """A rank's answer."""

    tokens: list[int]
    logprobs: list[float]

    @classmethod
    def of(cls, body: dict[str, Any]) -> Answered:
        (choice,) = body["choices"]
        return cls(choice["token_ids"], choice["logprobs"]["token_logprobs"])


class Ranks:
    """A server with two ranks, and the directory that they share."""

    def __init__(
        self, zygote: Zygote, workshop: Workshop, medium: Medium, config: dict[str, Any] | None = None
    ) -> None:
        """``config``: None: the directory is the only tier."""
        self.medium = medium
        # vLLM gives each rank a NUMA node of its own. Set, this has ranks share one; "0" binds them to no core.
        self.server = Server(
            zygote,
            workshop.scratch,
            config or medium.config(lookup=LOOKUP),
            environment={"VLLM_CPU_SIM_MULTI_NUMA": "0"},
            data_parallel_size=2,
            api_server_count=1,
            max_num_batched_tokens=CHUNK_TOKENS,
            max_num_seqs=4,
        )

    def ask(self, prompt: Prompt, rank: int) -> Answered:
        """Answer a prompt on a rank."""
        fields = {"max_tokens": 4, "logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
        return Answered.of(self.server.complete(prompt, rank=rank, **fields))

    def ask_anew(self, prompt: Prompt, rank: int) -> tuple[Answered, float]:
        """Answer a prompt with empty prefix caches; also return how many tokens came from the directory."""
        self.server.reset_prefix_cache()
        time.sleep(0.15)  # what was looked up before has lapsed
        before = self._loaded(rank)
        answer = self.ask(prompt, rank)
        return answer, self._loaded(rank) - before

    def until_stored(self, chunks: int) -> None:
        """Wait until so many shards rest in the directory."""
        self.server.until(lambda: len(self.medium.shards()) >= chunks, 30, f"{chunks} chunks are stored")

    def kill(self, rank: int) -> None:
        """Kill a rank's engine, without a word of warning, and wait until the server has noticed."""
        [pid] = set(re.findall(rf"\(EngineCore_DP{rank} pid=(\d+)\)", self.server.log.read_text(errors="replace")))
        os.kill(int(pid), signal.SIGKILL)
        self.server.until(lambda: "EngineDeadError" in self.server.log.read_text(errors="replace"), 30, "it is noticed")

    def _loaded(self, rank: int) -> float:
        """Tokens that a rank has loaded, ever."""
        return self.server.samples(f"{PREFIX}lookup_tokens_total", "engine", result="hit").get(str(rank), 0.0)


@pytest.fixture(scope="module")
def medium(workshop: Workshop) -> Medium:
    """A directory on a drive of this machine."""
    return tree(workshop.scratch / "kv-ranks", capacity=f"{CAPACITY_CHUNKS * SHARD_BYTES}B")


@pytest.fixture(scope="module")
def ranks(zygote: Zygote, workshop: Workshop, medium: Medium) -> Iterator[Ranks]:
    """The server of all tests; the last one kills it."""
    started = Ranks(zygote, workshop, medium)
    yield started
    started.server.close()


@pytest.fixture(scope="module")
def right(ranks: Ranks) -> list[Answered]:
    """The right answer to each prompt: computed from nothing on rank 0, and stored."""
    answers = [ranks.ask(prompt, 0) for prompt in PROMPTS]
    ranks.until_stored(len(PROMPTS) * PROMPT_CHUNKS)
    return answers


def test_a_rank_loads_what_the_other_has_stored(ranks: Ranks, right: list[Answered]) -> None:
    """Rank 1 has answered nothing yet. Its first answers come from the drive and equal rank 0's."""
    for prompt, expected in zip(PROMPTS, right, strict=True):
        answer, loaded = ranks.ask_anew(prompt, 1)
        assert (answer, loaded) == (expected, FULL_TOKENS)
    assert len(ranks.medium.shards()) == len(PROMPTS) * PROMPT_CHUNKS, "nothing was stored twice"


def test_a_rank_is_killed_while_it_stores(
    ranks: Ranks, right: list[Answered], workshop: Workshop, medium: Medium
) -> None:
    """The server ends, because it needs all its ranks. The stored chunks are whole, and the next engine may evict."""
    for prompt in PROMPTS:
        ranks.ask(prompt, 1)
    ranks.kill(1)
    ranks.server.close()
    assert holder_of(medium.directory / eviction.LOCK_NAME) is None
    file = workshop.scratch / "kv.yaml"
    file.write_text(json.dumps(medium.config()))
    assert main(["verify", str(file)]) == 0
    assert len(medium.namespaces()) == 1, "both ranks had one cache"


def test_memory_and_a_slab_are_divided(zygote: Zygote, workshop: Workshop, medium: Medium) -> None:
    """By the ranks of a dense model, each of which vLLM tells that it is alone."""
    slab = workshop.scratch / "slab-ranks"
    config = chain_config(
        {"kind": "memory", "capacity": f"{CAPACITY_CHUNKS * SHARD_BYTES}B"},
        {"kind": "slab", "path": str(slab), "capacity": "128MiB"},
    )
    ranks = Ranks(zygote, workshop, medium, config)
    try:
        for rank in range(2):
            for prompt in PROMPTS:
                ranks.ask(prompt, rank)
        log = ranks.server.log.read_text(errors="replace")
        assert log.count(f"up to {CAPACITY_CHUNKS // 2} chunks") == 2
        assert {path.name for path in slab.glob("dp-*")} == {"dp-0", "dp-1"}
        assert "is in use by another engine" not in log
        assert sum(path.stat().st_blocks * 512 for path in slab.rglob("*")) <= 128 << 20
    finally:
        ranks.server.close()
