"""Proves over running vLLMs that a bucket, or a shared directory, is one prefix cache for engines that know nothing of
each other: what one computed the others answer from, to the last bit, and a reset counts for one engine alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from tests.s3.servers import RcloneServer
from tests.vllm.damage import (
    ENGINE_OPTIONS,
    PROMPT_CHUNKS,
    Reference,
    chunk_prompts,
    hits,
    said,
    side_by_side,
    token_bytes,
    until_stored,
)
from tests.vllm.harness import CHUNK_TOKENS, TINY, TINY_HYBRID, Engine, ModelShape, Workshop, assert_same
from tests.vllm.media import MOVERS, Medium, bucket, tree

PROMPTS = chunk_prompts(2, seed=201)
OTHERS = chunk_prompts(1, seed=202)
FORK_TOKENS = 2 * CHUNK_TOKENS
FORK = PROMPTS[0][:FORK_TOKENS] + OTHERS[0][FORK_TOKENS:]
FRESH = chunk_prompts(1, seed=203)


class Pair(NamedTuple):
    """Two engines that run at the same time, what they share, and right answers."""

    medium: Medium
    first: Engine
    second: Engine
    reference: Reference


@pytest.fixture(scope="module")
def pair_on(server: RcloneServer, workshop: Workshop) -> Iterator[Callable[[str, ModelShape], Pair]]:
    """Gives two engines on a medium of this name, started when first asked for."""
    made: list[Pair] = []
    reference = functools.cache(functools.partial(Reference, workshop))

    @functools.cache
    def pair(name: str, shape: ModelShape) -> Pair:
        place = f"pair-{shape.sliding_window}"
        medium = tree(workshop.scratch / place) if name == "tree" else bucket(server, name, prefix=f"{place}/{name}")
        first, second = (
            workshop.start_engine(shape, medium.config(), environment=medium.environment, **ENGINE_OPTIONS)
            for _ in range(2)
        )
        made.append(Pair(medium, first, second, reference(shape)))
        return made[-1]

    yield pair
    side_by_side(*(engine.stop for each in made for engine in (each.first, each.second)))


@pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, TINY) for name in (*MOVERS, "tree")), ("obj", TINY_HYBRID), ("tree", TINY_HYBRID)],
    ids=lambda value: value if isinstance(value, str) else "one-group" if value is TINY else "two-groups",
)
def test_two_engines(name: str, shape: ModelShape, pair_on: Callable[[str, ModelShape], Pair]) -> None:
    """The second's hit tokens are the first's stored tokens; then the other way round; then each takes what it can."""
    medium, first, second, reference = pair_on(name, shape)
    answers = until_stored(first, medium, PROMPTS, len(PROMPTS) * PROMPT_CHUNKS)
    assert hits(answers) == 0
    assert_same(answers, reference.answers(PROMPTS))
    reference.until_loaded(second, PROMPTS)
    assert second.stored_bytes() == 0, "it has found all and stored some again"
    if shape.sliding_window is None:
        assert len(medium.shards()) * CHUNK_TOKENS * token_bytes(shape) == first.stored_bytes()

    reference.check(second, OTHERS)
    assert second.settle()
    reference.until_loaded(first, OTHERS)

    # A prompt that forks off a stored one takes the common beginning. Of a sliding-window group vLLM stores just the
    # last window, so there a prefix that ends earlier is a miss.
    found = hits(reference.check(second, [FORK]))
    assert found == (FORK_TOKENS if shape.sliding_window is None else 0), said(second)
    assert second.settle()
    reference.until_loaded(first, [FORK])


@pytest.mark.parametrize("name", ["obj", "tree"])
def test_a_reset_counts_for_one_engine(name: str, pair_on: Callable[[str, ModelShape], Pair]) -> None:
    """After ``reset_prefix_cache`` nothing stored before is served to this engine; other engines lose nothing."""
    medium, one, other, reference = pair_on(name, TINY)
    reference.check(one, FRESH)
    assert one.settle()
    reference.until_loaded(other, FRESH)
    before = medium.shards()
    assert one.reset_prefix_cache(connector=True)
    assert medium.shards() == before
    assert hits(reference.check(one, FRESH)) == 0
    reference.until_loaded(other, FRESH)
    assert one.settle()
    assert medium.shards() == before
    reference.until_loaded(one, FRESH)
