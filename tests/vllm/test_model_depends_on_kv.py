"""Proves that the models' answers depend on their KV cache: that "the answers are the same" is a test that can fail.

An engine answers prompts, answers them again from its prefix cache (the same to the last bit), then its cached blocks
are damaged in place, and the same prompts, again served from the cache, must come out differently, each of them and
in tokens as well as logprobs. No connector is involved.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vllm.harness import (
    BLOCK_TOKENS,
    TAIL_TOKENS,
    TINY,
    TINY_HYBRID,
    Answer,
    Engine,
    ModelShape,
    Workshop,
    prompts,
)


@pytest.fixture(scope="module", params=[TINY, TINY_HYBRID], ids=["one-group", "two-groups"])
def served(request: pytest.FixtureRequest, workshop: Workshop) -> Iterator[tuple[ModelShape, Engine]]:
    """A model and an engine that serves it, without a connector."""
    shape: ModelShape = request.param
    with workshop.start_engine(shape) as engine:
        yield shape, engine


def test_the_models_have_the_groups_they_promise(served: tuple[ModelShape, Engine]) -> None:
    """The hybrid model has two KV-cache groups, sliding window and full, and prefix caching stays on."""
    shape, engine = served
    expected = (
        [["FullAttentionSpec", 2], ["SlidingWindowSpec", 2]] if shape.sliding_window else [["FullAttentionSpec", 4]]
    )
    assert sorted(engine.worker("kv_groups")[0]) == expected


def test_cached_answers_are_bit_identical(served: tuple[ModelShape, Engine]) -> None:
    """Whether computed, cached or computed again after a reset: the same tokens, the same logprobs."""
    _, engine = served
    asked = prompts(3, seed=11)
    cold = engine.generate(asked)
    warm = engine.generate(asked)
    assert engine.reset_prefix_cache()
    again = engine.generate(asked)
    assert [answer.cached_tokens for answer in cold + again] == [0] * 6
    assert [answer.cached_tokens for answer in warm] == [len(asked[0]) - TAIL_TOKENS] * 3
    assert all(a.same_as(b) and a.same_as(c) for a, b, c in zip(cold, warm, again, strict=True))


def test_poisoned_blocks_change_tokens_and_logprobs(served: tuple[ModelShape, Engine]) -> None:
    """All blocks are damaged: no answer survives. Repaired, all do: what was noticed was the damage, nothing else."""
    _, engine = served
    asked = prompts(3, seed=12)
    blocks, cold = _answers_and_blocks(engine, asked)
    _poison(engine, blocks)
    poisoned = engine.generate(asked)
    _poison(engine, blocks)
    repaired = engine.generate(asked)
    assert [answer.cached_tokens for answer in poisoned] == [len(asked[0]) - TAIL_TOKENS] * 3
    for before, damaged, after in zip(cold, poisoned, repaired, strict=True):
        assert damaged.tokens != before.tokens
        assert damaged.logprobs != before.logprobs
        assert after.same_as(before)


def test_a_single_poisoned_block_is_noticed(served: tuple[ModelShape, Engine]) -> None:
    """Each cached block that the rest of the prompt attends to, one of 24 and however far away, shows when damaged.

    It shows in an answer as short as other tests compare.
    """
    shape, engine = served
    asked = prompts(1, seed=13)
    blocks, [cold] = _answers_and_blocks(engine, asked)
    noticed = 0
    for block in blocks:
        _poison(engine, [block])
        [damaged] = engine.generate(asked)
        noticed += not damaged.same_as(cold)
        _poison(engine, [block])
    cached_blocks = (len(asked[0]) - TAIL_TOKENS) // BLOCK_TOKENS
    window_blocks = (shape.sliding_window or 0) // BLOCK_TOKENS  # of the second group, where there is one
    assert noticed == cached_blocks + window_blocks


def _answers_and_blocks(engine: Engine, asked: list[list[int]]) -> tuple[list[int], list[Answer]]:
    assert engine.reset_prefix_cache()
    engine.worker("clear_kv")
    answers = engine.generate(asked)
    blocks: list[int] = engine.worker("written_blocks")[0]
    return blocks, answers


def _poison(engine: Engine, blocks: list[int]) -> None:
    engine.worker("poison_blocks", blocks)
