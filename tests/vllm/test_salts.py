"""A share per salt in a running vLLM: a salt that floods memory and slab leaves another salt's prompt where it is, and
takes its room where no share is set. Answers are those of a vLLM without us.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.harness import MAX_BATCHED_TOKENS, TINY, Answer, Engine, Workshop, chain_config, prompts
from tests.vllm.test_chain import files, sources

FULL_TOKENS = 2 * MAX_BATCHED_TOKENS
MEMORY = {"kind": "memory", "capacity": "20MiB"}
"""Room for 19 chunks of TINY, the slab's for 16. A prompt has four, the flood forty."""
QUIET, *FLOOD = prompts(1 + 10, steps=2, seed=2801)


@pytest.fixture(scope="module")
def right(workshop: Workshop) -> Answer:
    """What a vLLM without us answers to ``QUIET``."""
    with workshop.start_engine(TINY) as engine:
        [answer] = engine.generate([QUIET])
        return answer


def after_flood(engine: Engine) -> tuple[Answer, dict[str, float]]:
    """Ask with one salt, let another flood the tiers, ask again without what the GPU remembers; return the answer, and
    its tokens by where they came from.
    """
    engine.generate([QUIET], max_tokens=1, salt="quiet")
    assert engine.settle()
    for prompt in FLOOD:
        engine.generate([prompt], max_tokens=1, salt="noisy")
        assert engine.settle()
    assert engine.reset_prefix_cache()
    before = sources(engine)
    [answer] = engine.generate([QUIET], salt="quiet")
    after = sources(engine)
    assert engine.settle()
    return answer, {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}


def tiers(names: str, path: Path, **fields: Any) -> list[dict[str, Any]]:
    known = {"memory": MEMORY, "slab": files(path, "56MiB")}
    return [{**known[name], **fields} for name in names.split("+")]


@pytest.mark.parametrize(("names", "source"), [("memory", "host"), ("slab", "disk"), ("memory+slab", "host")])
def test_a_salt_that_floods_leaves_another_ones_prompt(
    names: str, source: str, right: Answer, workshop: Workshop
) -> None:
    chosen = tiers(names, workshop.scratch / f"shares-{names}", share_per_salt="30%")
    with workshop.start_engine(TINY, chain_config(*chosen)) as engine:
        answer, came = after_flood(engine)
        assert came == {source: FULL_TOKENS}
        assert answer.same_as(right)
        evicted = engine.labelled("vllm:nixl_offload_share_evicted_chunks", "tier")
        assert set(evicted) == set(names.split("+"))
        assert all(evicted.values())


@pytest.mark.parametrize("name", ["memory", "slab"])
def test_without_a_share_it_does_not(name: str, right: Answer, workshop: Workshop) -> None:
    with workshop.start_engine(TINY, chain_config(*tiers(name, workshop.scratch / f"no-shares-{name}"))) as engine:
        answer, came = after_flood(engine)
        assert came == {}
        assert answer.same_as(right)
        assert engine.labelled("vllm:nixl_offload_share_evicted_chunks", "tier") == {}
