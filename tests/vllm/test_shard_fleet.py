"""Proves that a fleet of servers with one, two and four ranks over one bucket answers right, whatever happens to it: a
hundred prompts, damage to shards between them, one of them killed, and a server of objects that is gone for a while.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any, Final

import pytest

from nixl_offload.tiers.shared.naming import parse_shard_name
from tests.s3.servers import RcloneServer
from tests.vllm.damage import ENGINE_OPTIONS, chunk_prompts
from tests.vllm.harness import TINY, Engine, Workshop, close
from tests.vllm.shared_rig import bucket, said, side_by_side

SHAPE: Final = dataclasses.replace(TINY, kv_heads=4)
SIZES: Final = (1, 2, 4)
PROMPTS: Final = chunk_prompts(20, seed=401)
ROUNDS, ASKED = 10, 10
KILLED: Final = 3
"""The round before which the server with two ranks is killed, and started anew."""
GONE: Final = (5, 6)
"""Rounds in which the server of objects is gone."""
LOOKUP: Final = {"timeout": "1s", "present_for": "1s", "absent_for": "300ms"}


@pytest.mark.long
def test_a_mixed_fleet_answers_right(workshop: Workshop) -> None:
    """Each answer is that of a vLLM without us, but for rounding; each size is served by what the others stored."""
    with RcloneServer() as server:
        _answer_a_hundred(server, workshop)


def _answer_a_hundred(server: RcloneServer, workshop: Workshop) -> None:
    medium = bucket(server, "obstore", prefix="fleet", request_timeout="1s")
    engines: dict[int, Engine] = {}

    def begin(tp: int) -> None:
        options: dict[str, Any] = {**ENGINE_OPTIONS}
        if tp > 1:
            options |= {"tensor_parallel_size": tp, "distributed_executor_backend": "mp", "in_process": False}
        config = medium.config(lookup=LOOKUP, shards=4, load_timeout="5s")
        engines[tp] = workshop.start_engine(SHAPE, config, environment=medium.environment, **options)

    alone = workshop.start_engine(SHAPE, **ENGINE_OPTIONS)
    right = alone.generate(PROMPTS)
    alone.stop()
    for tp in SIZES:
        begin(tp)
    dice = random.Random(7)
    hits = dict.fromkeys(SIZES, 0)
    wrong: list[str] = []
    for number in range(ROUNDS):
        if number == GONE[0]:
            server.stop()
        if number == GONE[-1] + 1:
            server.start()
        asked: dict[int, list[int]] = {tp: [] for tp in SIZES}
        for _ in range(ASKED):
            asked[dice.choice(SIZES)].append(dice.randrange(len(PROMPTS)))

        def ask(tp: int, wanted: list[int], number: int = number) -> None:
            if not wanted:
                return
            assert engines[tp].reset_prefix_cache()
            for prompt, answer in zip(wanted, engines[tp].generate([PROMPTS[n] for n in wanted]), strict=True):
                hits[tp] += answer.external_hit_tokens
                if not close(answer, right[prompt]):
                    wrong.append(f"round {number}, TP {tp}, prompt {prompt}")
            assert engines[tp].settle()

        if number == KILLED:
            engines[2].generate(PROMPTS[:4])
            engines[2].kill()  # its stores are under way
            begin(2)
        side_by_side(*(lambda tp=tp, wanted=wanted: ask(tp, wanted) for tp, wanted in asked.items()))  # type: ignore[misc]
        shards = medium.shards()
        for name in dice.sample(shards, min(4, len(shards))):
            if dice.random() < 0.3:
                medium.delete(name)
            else:
                medium.flip(name, dice.randrange(len(medium.read(name))))
    assert wrong == []
    assert len(medium.namespaces()) == 1
    assert {shard.rank for name in medium.shards() if (shard := parse_shard_name(name))} == {0, 1, 2, 3}
    for tp, engine in engines.items():
        assert hits[tp], f"TP {tp} was served nothing{said(engine)}"
