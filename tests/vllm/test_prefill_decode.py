"""Proves over two running vLLMs that ours works beside ``NixlConnector``, which hands a prompt's KV from the engine
that computes it to the one that goes on with it: disaggregated prefill, over UCX on the loopback interface.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from examples.demo.engine import transfer_config
from examples.s3_server import free_port
from tests.prove.happenings import DAMAGES
from tests.vllm.damage import Reference, until
from tests.vllm.harness import CHUNK_TOKENS, TAIL_TOKENS, Answer, Engine, Workshop, close, prompts, several
from tests.vllm.media import Medium, tree

PROMPTS = prompts(3, steps=1, seed=94)
CHUNKS_TOKENS = len(PROMPTS[0]) - TAIL_TOKENS
OVER_LOOPBACK = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
LEASE_S = 6
"""How long KV is kept that nobody fetches. The engine that computed it settles only after that."""
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


def beside_nixl(ours: Medium, role: str, order: list[str]) -> dict[str, Any]:
    """Return the transfer config of both connectors. ``role``: the ``kv_role`` of ours."""
    lease = {"kv_lease_duration": LEASE_S}
    children = {
        "nixl": {"kv_connector": "NixlConnector", "kv_connector_extra_config": lease},
        "ours": {**transfer_config(ours.config()), "kv_role": role},
    }
    return several(*(children[name] for name in order))


@dataclass
class Pair:
    """An engine that computes prompts and stores them, and one that loads and goes on with them."""

    prefill: Engine
    decode: Engine
    medium: Medium
    """Where ours keeps what the first has stored."""

    def compute(self, prompt: list[int]) -> Any:
        """Let the first engine compute and store a prompt; return the parameters that it sends to the second."""
        [computed] = self.prefill.generate([prompt], max_tokens=1, transfer_params=REMOTE_DECODE)
        assert computed.transfer_params is not None
        assert computed.transfer_params["do_remote_prefill"]
        return computed.transfer_params

    def load(self, prompt: list[int]) -> Answer:
        """Let the second engine answer from the tier, once its earlier answers "absent" have expired."""
        answers: list[Answer] = []

        def is_found() -> bool:
            assert self.decode.reset_prefix_cache()
            self.decode.worker("clear_kv")
            answers.extend(self.decode.generate([prompt]))
            return answers[-1].external_hit_tokens == CHUNKS_TOKENS

        until(is_found, "every full chunk is found", self.decode)
        return answers[-1]


@pytest.fixture(scope="module", params=[["nixl", "ours"], ["ours", "nixl"]], ids=["nixl-first", "ours-first"])
def pair(
    request: pytest.FixtureRequest, workshop: Workshop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Two engines, told by ``kv_role`` which of them stores and which loads."""
    medium = tree(tmp_path_factory.mktemp("kv"))

    def start(role: str) -> Engine:
        return workshop.start_engine(
            kv_transfer_config=beside_nixl(medium, role, request.param),
            environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), **OVER_LOOPBACK},
        )

    with start("kv_producer") as prefill, start("kv_consumer") as decode:
        yield Pair(prefill, decode, medium)


@pytest.fixture(scope="module")
def right(reference: Reference) -> list[Answer]:
    """The answers of a vLLM without connectors."""
    return reference.answers(PROMPTS)


def test_a_prompt_is_handed_over_and_stored(pair: Pair, right: list[Answer]) -> None:
    """``NixlConnector`` brings all of the prompt; a second time ours does. Only the one that computes stores."""
    transfer = pair.compute(PROMPTS[0])
    [handed_over] = pair.decode.generate([PROMPTS[0]], transfer_params=transfer)
    assert close(handed_over, right[0])
    assert handed_over.external_hit_tokens in (
        len(PROMPTS[0]),
        *range(CHUNK_TOKENS, CHUNKS_TOKENS + 1, CHUNK_TOKENS),
    ), "by the other, or by ours if it is first: as many chunks as have been stored by then"
    assert pair.prefill.settle()
    assert pair.prefill.stored_bytes() > 0
    assert pair.prefill.reset_prefix_cache()
    [computed] = pair.prefill.generate([PROMPTS[0]])
    assert computed.external_hit_tokens == 0, "a producer does not load"

    loaded = pair.load(PROMPTS[0])
    assert close(loaded, right[0])
    assert loaded.loaded_bytes > 0
    assert pair.decode.settle()
    assert pair.decode.stored_bytes() == 0


def test_a_damaged_chunk_is_computed(pair: Pair, right: list[Answer]) -> None:
    """``NixlConnector`` knows nothing of this prompt, and what ours finds is damaged."""
    before = set(pair.medium.shards())
    pair.prefill.generate([PROMPTS[1]])
    assert pair.prefill.settle()
    for shard in pair.medium.stored():
        if shard.path.relative_to(pair.medium.directory).as_posix() not in before:
            DAMAGES["flipped"](shard, shard, 0.5)
    [answer] = pair.decode.generate([PROMPTS[1]])
    assert answer.external_hit_tokens == CHUNKS_TOKENS, "it was found"
    assert close(answer, right[1])


def test_the_engine_that_computed_dies_before_it_has_handed_over(pair: Pair, right: list[Answer]) -> None:
    """``NixlConnector`` fails, vLLM asks again, and ours has what was stored. The engine goes on."""
    before = len(pair.medium.shards())
    transfer = pair.compute(PROMPTS[2])
    for _ in range(1000):  # what is to be handed over keeps the engine from settling
        if len(pair.medium.shards()) == before + CHUNKS_TOKENS // CHUNK_TOKENS:
            break
        pair.prefill.generate([[2, 3, 4]], max_tokens=1)
    pair.prefill.kill()
    [answer] = pair.decode.generate([PROMPTS[2]], transfer_params=transfer)
    assert close(answer, right[2])
    assert answer.loaded_bytes > 0
    assert pair.decode.reset_prefix_cache()
    [again] = pair.decode.generate([PROMPTS[0]])
    assert close(again, right[0])
