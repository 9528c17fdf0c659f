"""Proves that a failed load in a model with two KV-cache groups ends as a recompute of that request.

vLLM has no way to keep a good prefix there: block ids are unique within a group only. The request must be reported as
failed, resume, and be answered as without a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.harness import TINY_HYBRID, Answer, Engine, Workshop, close, file_tier, prompts

PROMPTS = prompts(3, steps=2, seed=81)


@pytest.fixture(scope="module")
def directory(workshop: Workshop) -> Path:
    """The tier's directory."""
    return workshop.scratch / "kv-groups"


@pytest.fixture(scope="module")
def engine(workshop: Workshop, directory: Path) -> Iterator[Engine]:
    """An engine on a model with sliding windows in every other layer."""
    with workshop.start_engine(TINY_HYBRID, file_tier(directory)) as started:
        yield started


@pytest.fixture
def right(engine: Engine) -> list[Answer]:
    """Answers computed from nothing, one by one; afterwards they are stored, and nothing else is."""
    assert engine.reset_prefix_cache(connector=True)
    answers = engine.generate(PROMPTS)
    assert engine.settle()
    return answers


def _damage(directory: Path, share: int) -> None:
    """Flip a byte of every ``share``-th 4 KiB page of the slab, header pages among them."""
    (slab,) = directory.glob("*/rank-00000.slab")
    with slab.open("r+b") as file:
        content = bytearray(file.read())
        for page in range(0, len(content) // 4096, share):
            content[page * 4096 + 17] ^= 0x01
        file.seek(0)
        file.write(content)


@pytest.mark.parametrize("share", [1, 200], ids=["everything damaged", "some chunks damaged"])
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "at once"])
def test_a_failed_load_is_recomputed(
    engine: Engine, directory: Path, right: list[Answer], share: int, *, together: bool
) -> None:
    """Same answers, no dead engine, and what was damaged is stored anew.

    What a batch recomputes has other shapes, so its answers, and those loaded from it, are only close.
    """
    same = close if together else Answer.same_as
    assert engine.reset_prefix_cache()
    assert all(answer.external_hit_tokens > 0 for answer in engine.generate(PROMPTS)), "nothing to damage"
    assert engine.reset_prefix_cache()
    _damage(directory, share)
    answers = engine.generate(PROMPTS, together=together)
    assert all(same(answer, other) for answer, other in zip(answers, right, strict=True))
    assert engine.settle()
    assert engine.reset_prefix_cache()
    again = engine.generate(PROMPTS)
    assert all(same(answer, other) for answer, other in zip(again, right, strict=True))
    if share == 1:
        assert all(answer.external_hit_tokens > 0 for answer in again), "not stored anew"
    assert engine.settle()
