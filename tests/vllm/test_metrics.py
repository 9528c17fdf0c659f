"""Our metrics reach a running vLLM's exporter: chunks by outcome, questions to a shared tier, its breakers.

Proves: names show up with the values that what the engine did must give; and what vLLM refuses with an
assertion (an undefined name, a wrong number of labels) does not happen.
"""

from __future__ import annotations

from tests.vllm.damage import until
from tests.vllm.harness import Workshop, prompts, tier_config, tree_tier


def test_a_shared_tier_is_visible_in_metrics(workshop: Workshop) -> None:
    directory = workshop.scratch / "metrics"
    directory.mkdir()
    config = tier_config(tree_tier(directory))
    asked = prompts(1, seed=901)
    first = workshop.start_engine(connector=config)
    first.generate(asked)
    assert first.settle()
    until(lambda: first.metrics().get("vllm:nixl_offload_chunks") == 6, "six chunks of a prompt are counted as stored")

    second = workshop.start_engine(connector=config)
    [answer] = second.generate(asked)
    assert answer.external_hit_tokens == 1536
    until(lambda: second.metrics().get("vllm:nixl_offload_chunks") == 6, "six chunks are counted as loaded")
    metrics = second.metrics()
    assert metrics["vllm:nixl_offload_probes"] >= 1
    assert metrics["vllm:nixl_offload_known_chunks"] == 6
    assert metrics["vllm:nixl_offload_breaker_state"] == 0
    assert metrics.get("vllm:nixl_offload_probe_errors", 0) == 0
