"""Proves over a running vLLM that KV cache groups which chunks do not fit end no start: chunks get smaller, or nothing
is stored.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.demo.model import TINY_HYBRID
from tests.families.models import FAMILIES
from tests.vllm.harness import Workshop, ask_anew, file_tier, prompts


def test_blocks_that_no_hash_fits(workshop: Workshop, tmp_path: Path) -> None:
    """Without prefix caching a Mamba group has one block for all tokens, and vLLM hashes by nothing that fits both."""
    family = FAMILIES["qwen3-next"]
    config = file_tier(tmp_path / "slab", serve_without_prefix_caching=True)
    options = {**family.options, "enable_prefix_caching": False}
    model = family.write(workshop.scratch / "qwen3-next")
    with workshop.start_engine(connector=config, model=model, **options) as engine:
        for _ in range(2):
            [answer] = engine.generate(prompts(1, seed=11))
            assert answer.external_hit_tokens == 0
        engine.stop()
        log = engine.log.read_text()
    assert log.count("Nothing is stored or loaded: vLLM cannot offload this model's KV cache groups") == 1
    assert not (tmp_path / "slab").exists(), "what is off takes nothing"


@pytest.mark.parametrize(("retention_tokens", "chunk_tokens"), [(128, 128), (192, 192), (512, 256)])
def test_a_retention_interval_below_the_chunk_makes_the_chunk_smaller(
    workshop: Workshop, tmp_path: Path, retention_tokens: int, chunk_tokens: int
) -> None:
    """Of windows vLLM keeps what lies before multiples of the interval, so chunks must divide it."""
    with workshop.start_engine(
        TINY_HYBRID, file_tier(tmp_path / "slab"), prefix_cache_retention_interval=retention_tokens
    ) as engine:
        [prompt] = prompts(1, seed=12, shape=TINY_HYBRID)
        [right] = engine.generate([prompt])
        [answer] = ask_anew(engine, [prompt])
        assert answer.external_hit_tokens > 0
        assert answer.same_as(right)
        says = f"A chunk is {chunk_tokens} tokens, not 256: prefix_cache_retention_interval" in engine.log.read_text()
        assert says is (chunk_tokens != 256)
