"""Proves over a running vLLM that a prompt served from files is answered exactly as without any cache.

The reference is an engine without a connector. Against it stand an engine that stores, the same engine after it forgot
its prefix cache, a new engine on the same directory, and an engine so short of KV blocks that it must evict and load
all the time. That the comparison can fail is shown on the loaded blocks themselves: damaged, they change the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.vllm.harness import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    MAX_BATCHED_TOKENS,
    TAIL_TOKENS,
    TINY,
    TINY_HYBRID,
    Answer,
    Engine,
    ModelShape,
    Workshop,
    assert_same,
    close,
    file_tier,
    prompts,
)

PROMPTS = prompts(4, seed=21)
FULL_CHUNKS_TOKENS = len(PROMPTS[0]) - TAIL_TOKENS
FORK = PROMPTS[0][: 2 * MAX_BATCHED_TOKENS] + PROMPTS[1][2 * MAX_BATCHED_TOKENS :]
"""Shares its first chunks with the first prompt and goes on differently."""
MANY = prompts(12, steps=2, seed=22)


@dataclass(frozen=True)
class Reference:
    """Answers of an engine without a connector, each computed from nothing."""

    each: list[Answer]
    fork: Answer
    many: list[Answer]


@pytest.fixture(scope="module", params=[TINY, TINY_HYBRID], ids=["one-group", "two-groups"])
def shape(request: pytest.FixtureRequest) -> ModelShape:
    """A model with one KV-cache group and one with two."""
    chosen: ModelShape = request.param
    return chosen


@pytest.fixture(scope="module")
def reference(shape: ModelShape, workshop: Workshop) -> Reference:
    """What a vLLM without us answers."""
    with workshop.start_engine(shape) as engine:
        each = engine.generate(PROMPTS)
        assert engine.reset_prefix_cache()
        [fork] = engine.generate([FORK])
        return Reference(each, fork, engine.generate(MANY))


@pytest.fixture(scope="module")
def directory(shape: ModelShape, workshop: Workshop) -> Path:
    """The file tier's directory, the same for all engines of one model."""
    return workshop.scratch / f"kv-{shape.sliding_window}"


@pytest.fixture(scope="module")
def first_engine(
    shape: ModelShape, directory: Path, workshop: Workshop, reference: Reference
) -> Iterator[tuple[Engine, list[Answer]]]:
    """An engine that has served and stored ``PROMPTS``, and its answers."""
    with workshop.start_engine(shape, file_tier(directory)) as engine:
        answers = engine.generate(PROMPTS)
        assert engine.settle()
        yield engine, answers


@pytest.fixture(scope="module")
def second_engine(
    first_engine: tuple[Engine, list[Answer]], shape: ModelShape, directory: Path, workshop: Workshop
) -> Iterator[Engine]:
    """A new engine on the directory, after the first was stopped."""
    first_engine[0].stop()
    with workshop.start_engine(shape, file_tier(directory)) as engine:
        yield engine


def test_storing_changes_nothing(first_engine: tuple[Engine, list[Answer]], reference: Reference) -> None:
    """The engine that stores answers bit by bit as the one without a connector."""
    _, answers = first_engine
    assert [answer.cached_tokens for answer in answers] == [0] * len(PROMPTS)
    assert_same(answers, reference.each)


def test_every_full_chunk_is_stored_once(first_engine: tuple[Engine, list[Answer]], shape: ModelShape) -> None:
    """As many bytes as the full chunks of the prompts have, and no more when the prompts come again."""
    engine, _ = first_engine
    token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_size * 4
    stored_bytes = engine.stored_bytes()
    if shape.sliding_window is None:
        assert stored_bytes == len(PROMPTS) * FULL_CHUNKS_TOKENS * token_bytes
    engine.generate(PROMPTS)
    assert engine.settle()
    assert engine.stored_bytes() == stored_bytes


def test_a_forgotten_prefix_is_loaded(first_engine: tuple[Engine, list[Answer]], reference: Reference) -> None:
    """The same engine after ``reset_prefix_cache``: every full chunk comes from files, the answers are the same."""
    engine, _ = first_engine
    assert engine.reset_prefix_cache()
    engine.worker("clear_kv")
    _assert_loaded(engine.generate(PROMPTS), reference.each)


def test_a_restart_loses_nothing(second_engine: Engine, reference: Reference) -> None:
    """A new engine on the directory loads every full chunk, answers the same, and stores nothing again."""
    _assert_loaded(second_engine.generate(PROMPTS), reference.each)
    assert second_engine.settle()
    assert second_engine.stored_bytes() == 0


def test_a_wrong_load_would_be_noticed(second_engine: Engine, reference: Reference, shape: ModelShape) -> None:
    """Damage to the blocks that were just loaded changes tokens and logprobs; damaging them back restores both.

    Damage to one block shows, too, whichever of those it is that the rest of the prompt attends to.
    """
    assert second_engine.reset_prefix_cache()
    second_engine.worker("clear_kv")
    _assert_loaded(second_engine.generate(PROMPTS), reference.each)
    loaded = second_engine.worker("written_blocks")[0]
    second_engine.worker("poison_blocks", loaded)
    for damaged, right in zip(second_engine.generate(PROMPTS), reference.each, strict=True):
        assert damaged.external_hit_tokens == 0
        assert damaged.tokens != right.tokens
        assert damaged.logprobs != right.logprobs
    second_engine.worker("poison_blocks", loaded)
    assert_same(second_engine.generate(PROMPTS), reference.each)
    assert second_engine.reset_prefix_cache()
    second_engine.worker("clear_kv")
    _assert_loaded(second_engine.generate(PROMPTS[:1]), reference.each[:1])
    noticed = 0
    for block in second_engine.worker("written_blocks")[0]:
        second_engine.worker("poison_blocks", [block])
        [damaged] = second_engine.generate(PROMPTS[:1])
        noticed += not damaged.same_as(reference.each[0])
        second_engine.worker("poison_blocks", [block])
    assert noticed == (FULL_CHUNKS_TOKENS + (shape.sliding_window or 0)) // BLOCK_TOKENS


def test_a_shared_prefix_is_loaded_and_the_rest_computed(
    second_engine: Engine, reference: Reference, shape: ModelShape
) -> None:
    """A prompt that forks off a stored one takes its first chunks from files; then it is stored itself.

    Of a sliding-window group vLLM stores just the last window, so there a prefix that ends earlier is a miss.
    """
    assert second_engine.reset_prefix_cache()
    [answer] = second_engine.generate([FORK])
    assert answer.external_hit_tokens == (2 * MAX_BATCHED_TOKENS if shape.sliding_window is None else 0)
    assert_same([answer], [reference.fork])
    assert second_engine.settle()
    assert second_engine.reset_prefix_cache()
    _assert_loaded(second_engine.generate([FORK]), [reference.fork])


def test_concurrent_loads(second_engine: Engine, reference: Reference) -> None:
    """All prompts at once: loads run side by side. Batches have other shapes, so logprobs are only close."""
    assert second_engine.reset_prefix_cache()
    answers = second_engine.generate(PROMPTS, together=True)
    assert [answer.cached_tokens for answer in answers] == [FULL_CHUNKS_TOKENS] * len(PROMPTS)
    assert all(close(answer, right) for answer, right in zip(answers, reference.each, strict=True))


def test_an_engine_short_of_blocks(shape: ModelShape, workshop: Workshop, reference: Reference) -> None:
    """The KV cache holds two prompts; twelve are served three times, alone and together.

    Blocks are reused while their stores are under way and while others load: no answer may ever differ.
    """
    tier = file_tier(workshop.scratch / f"kv-short-{shape.sliding_window}")
    blocks = 2 * (len(MANY[0]) + 64) // BLOCK_TOKENS + 8
    with workshop.start_engine(
        shape, tier, num_gpu_blocks_override=blocks * (1 if shape.sliding_window is None else 2), max_model_len=2048
    ) as engine:
        assert_same(engine.generate(MANY), reference.many)
        together = engine.generate(MANY, together=True)
        assert all(close(answer, right) for answer, right in zip(together, reference.many, strict=True))
        assert engine.settle()
        again = engine.generate(MANY)
        assert_same(again, reference.many)
        assert sum(answer.external_hit_tokens for answer in again) > 0
        engine.stop()


def _assert_loaded(answers: list[Answer], expected: list[Answer]) -> None:
    """Every full chunk came from the connector, and the answers are the same to the last bit."""
    assert [answer.external_hit_tokens for answer in answers] == [FULL_CHUNKS_TOKENS] * len(answers)
    assert [answer.cached_tokens for answer in answers] == [FULL_CHUNKS_TOKENS] * len(answers)
    assert FULL_CHUNKS_TOKENS % CHUNK_TOKENS == 0
    assert_same(answers, expected)
