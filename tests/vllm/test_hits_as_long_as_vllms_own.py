"""Proves for models with a recurrent state or windows: prompts with a common beginning get as long a hit from a tier as
from vLLM's own cache. vLLM keeps states and windows at a prompt's end, and where two prompts part.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from nixl_offload.engine import jobs
from tests.vllm.fuzz_families import FAMILIES, Family, start_family, write_base
from tests.vllm.fuzz_rig import MAX_TOKENS, fuzzed
from tests.vllm.pipeline_rig import CHUNK_TOKENS

DOCUMENTS, PROMPTS = 4, 6


@pytest.mark.parametrize(("name", "unit"), [("state", 1), ("state, tails", 1), ("mixed", CHUNK_TOKENS)])
def test_prompts_that_part_find_all_that_vllm_would(
    name: str, unit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``unit``: hits are multiples of it, as a chunk may be several blocks. Ours may find more: it evicts nothing."""
    monkeypatch.setattr(jobs, "STORE_GRACE_S", 10.0)  # nothing is dropped for a busy processor
    model, source = write_base(tmp_path / "model"), random.Random(10)
    prompts = []
    for _ in range(DOCUMENTS):
        document = source.choices(range(500), k=MAX_TOKENS)
        for _ in range(PROMPTS):
            shared = document[: source.randrange(1, 5) * CHUNK_TOKENS + source.choice([0, 0, 16, 40, 48])]
            prompts.append(shared + source.choices(range(500), k=source.choice([3, 5, 20, 80])))
    with fuzzed():
        right = hits(FAMILIES[name], prompts, model, tmp_path / "right", is_ours=False)
        ours = hits(FAMILIES[name], prompts, model, tmp_path / "ours", is_ours=True)
    assert sum(right) > DOCUMENTS * 2 * CHUNK_TOKENS
    short = [at for at, (own, loaded) in enumerate(zip(right, ours, strict=True)) if loaded < own // unit * unit]
    assert short == []


def hits(family: Family, prompts: Sequence[list[int]], model: Path, path: Path, *, is_ours: bool) -> list[int]:
    """Return how many tokens of each prompt were found: in a slab alone, or in vLLM's own cache alone."""
    path.mkdir()
    engine, found = start_family(family, "slab", model, path, blocks=1000), []
    engine.scheduler_half.set_role(loads=is_ours, stores=is_ours)
    for at, prompt in enumerate(prompts):
        engine.ask(str(at), prompt)
        engine.settle()
        found.append(engine.rank.began_with[str(at)])
        if is_ours:
            engine.reset_prefix_cache()
    assert engine.rank.wrong == []
    engine.close()
    return found
