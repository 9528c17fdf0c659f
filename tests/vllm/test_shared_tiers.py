"""Proves over running vLLMs that a bucket, or a shared directory, is one prefix cache for engines that know nothing of
each other: what one computed the others answer from, to the last bit, and what must not be shared is not.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nixl_offload.tiers.shared.naming import parse_shard_name
from tests.s3.servers import RcloneServer
from tests.vllm.damage import ENGINE_OPTIONS, FULL_TOKENS, Prompt, chunk_prompts
from tests.vllm.harness import (
    CHUNK_TOKENS,
    TINY,
    TINY_HYBRID,
    Answer,
    Engine,
    ModelShape,
    Workshop,
    assert_same,
)
from tests.vllm.shared_rig import (
    LOOK_EACH_TIME_S,
    MOVERS,
    RECOVERY_DEADLINE_S,
    Medium,
    bucket,
    hits,
    said,
    side_by_side,
    token_bytes,
    tree,
    until_stored,
)

PROMPTS = chunk_prompts(2, seed=201)
OTHERS = chunk_prompts(1, seed=202)
FORK_TOKENS = 2 * CHUNK_TOKENS
FORK = PROMPTS[0][:FORK_TOKENS] + OTHERS[0][FORK_TOKENS:]
FRESH = chunk_prompts(1, seed=203)
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two engines that run at the same time, and what they share."""

    medium: Medium
    first: Engine
    second: Engine


@pytest.fixture(scope="module")
def pair_on(server: RcloneServer, workshop: Workshop) -> Iterator[Callable[[str, ModelShape], Pair]]:
    """Gives two engines on a medium of this name, started when first asked for."""

    @functools.cache
    def pair(name: str, shape: ModelShape) -> Pair:
        place = f"pair-{shape.sliding_window}"
        medium = tree(workshop.scratch / place) if name == "tree" else bucket(server, name, prefix=f"{place}/{name}")
        made.append(Pair(medium, _start(workshop, medium, shape), _start(workshop, medium, shape)))
        return made[-1]

    made: list[Pair] = []
    yield pair
    side_by_side(*(engine.stop for each in made for engine in (each.first, each.second)))


def _start(workshop: Workshop, medium: Medium, shape: ModelShape = TINY, **options: Any) -> Engine:
    fields = options.pop("fields", {})
    environment = {**medium.environment, **options.pop("environment", {})}
    options = {**ENGINE_OPTIONS, **options}
    return workshop.start_engine(shape, medium.config(**fields), environment=environment, **options)


@pytest.fixture(scope="module")
def right(workshop: Workshop) -> dict[ModelShape, list[Answer]]:
    """What vLLMs without us answer to ``PROMPTS``, ``OTHERS`` and ``FORK``."""
    answers = {}
    for shape in (TINY, TINY_HYBRID):
        with workshop.start_engine(shape, **ENGINE_OPTIONS) as engine:
            answers[shape] = engine.generate([*PROMPTS, *OTHERS])
            assert engine.reset_prefix_cache()
            answers[shape] += engine.generate([FORK])
    return answers


def _load(engine: Engine, asked: list[Prompt], expected: list[Answer]) -> list[Answer]:
    """Let ``engine`` answer; assert that every full chunk comes from the tier, and that the answers are right.

    On a machine that is too busy to answer a lookup or a load in time, it may take more than one attempt.
    """
    deadline = time.monotonic() + RECOVERY_DEADLINE_S
    while True:
        answers = engine.generate(asked)
        assert_same(answers, expected)
        if [answer.external_hit_tokens for answer in answers] == [FULL_TOKENS] * len(answers):
            return answers
        assert time.monotonic() < deadline, f"not every full chunk is loaded{said(engine)}"
        assert engine.settle()
        assert engine.reset_prefix_cache()
        time.sleep(LOOK_EACH_TIME_S)


@pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, TINY) for name in (*MOVERS, "tree")), ("obj", TINY_HYBRID), ("tree", TINY_HYBRID)],
    ids=lambda value: value if isinstance(value, str) else "one-group" if value is TINY else "two-groups",
)
def test_two_engines(
    name: str, shape: ModelShape, pair_on: Callable[[str, ModelShape], Pair], right: dict[ModelShape, list[Answer]]
) -> None:
    """The second's hit tokens are the first's stored tokens; then the other way round; then each takes what it can."""
    pair = pair_on(name, shape)
    medium, first, second, count = pair.medium, pair.first, pair.second, len(PROMPTS)
    answers = until_stored(first, medium, PROMPTS, count * FULL_TOKENS // CHUNK_TOKENS)
    assert hits(answers) == 0
    assert_same(answers, right[shape][:count])
    answers = _load(second, PROMPTS, right[shape][:count])
    assert second.settle()
    assert second.stored_bytes() == 0, "it has found all and stored some again"
    if shape.sliding_window is None:
        assert hits(answers) * token_bytes(shape) == first.stored_bytes()
        assert len(medium.shards()) * CHUNK_TOKENS == hits(answers)

    assert_same(second.generate(OTHERS), right[shape][count:-1])
    assert second.settle()
    _load(first, OTHERS, right[shape][count:-1])

    # A prompt that forks off a stored one takes the common beginning. Of a sliding-window group vLLM stores just the
    # last window, so there a prefix that ends earlier is a miss.
    assert second.reset_prefix_cache()
    [answer] = second.generate([FORK])
    assert answer.external_hit_tokens == (FORK_TOKENS if shape.sliding_window is None else 0), said(second)
    assert_same([answer], right[shape][-1:])
    assert second.settle()
    assert first.reset_prefix_cache()
    _load(first, [FORK], right[shape][-1:])


@pytest.mark.parametrize("name", [pytest.param("obj", marks=pytest.mark.long), "tree"])
def test_two_ranks(server: RcloneServer, workshop: Workshop, name: str) -> None:
    """Two engines with tensor parallelism 2: each rank of the second takes what its like in the first has stored.

    A shard of one rank vanishes: both ranks compute, the answer is the same, and the chunk is whole again. An engine
    with one rank finds nothing of this.
    """
    medium = tree(workshop.scratch / "ranks") if name == "tree" else bucket(server, name, prefix="ranks")
    engines: list[Engine] = []
    side_by_side(*[lambda: engines.append(_start(workshop, medium, **TWO_RANKS))] * 2)
    first, second = engines
    expected = until_stored(first, medium, PROMPTS, 2 * len(PROMPTS) * FULL_TOKENS // CHUNK_TOKENS)
    stored_bytes = first.stored_bytes()
    assert {shard.rank for shard in map(parse_shard_name, medium.shards()) if shard} == {0, 1}

    answers = _load(second, PROMPTS, expected)
    assert hits(answers) * token_bytes() == stored_bytes
    for rank in (0, 1):
        gone = next(shard for shard in medium.shards() if shard.endswith(f".{rank:04x}"))
        medium.delete(gone)
        assert second.reset_prefix_cache()
        assert_same(second.generate(PROMPTS), expected)
        assert second.settle()
        assert second.reset_prefix_cache()
        _load(second, PROMPTS, expected)
        assert gone in medium.shards()
    side_by_side(first.stop, second.stop)
    with _start(workshop, medium) as alone:
        assert hits(alone.generate(PROMPTS)) == 0


@pytest.mark.parametrize("name", ["obj", "tree"])
def test_a_reset_counts_for_one_engine(name: str, pair_on: Callable[[str, ModelShape], Pair]) -> None:
    """After ``reset_prefix_cache`` nothing stored before is served to this engine; other engines lose nothing."""
    pair = pair_on(name, TINY)
    medium, one, other = pair.medium, pair.first, pair.second
    expected = one.generate(FRESH)
    assert one.settle()
    _load(other, FRESH, expected)
    before = medium.snapshot()

    assert one.reset_prefix_cache(connector=True)
    assert medium.snapshot() == before
    answers = one.generate(FRESH)
    assert hits(answers) == 0
    assert_same(answers, expected)

    assert other.reset_prefix_cache()
    _load(other, FRESH, expected)
    assert one.settle()
    assert sorted(medium.snapshot()) == sorted(before)
    assert one.reset_prefix_cache()
    _load(one, FRESH, expected)
