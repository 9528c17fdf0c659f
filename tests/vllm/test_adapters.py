"""LoRA on running vLLMs: KV belongs to what an adapter holds, not to its name and path alone.

Everywhere adapters of one name and one path hold other bytes. Each pair of engines shares a directory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from examples.demo.model import TINY
from tests.vllm.damage import ENGINE_OPTIONS, FULL_TOKENS, chunk_prompts, hits, said
from tests.vllm.harness import Answer, Engine, Workshop, same
from tests.vllm.media import Medium, tree

PROMPTS = chunk_prompts(1, seed=1401)
OPTIONS: dict[str, Any] = {**ENGINE_OPTIONS, "enable_lora": True, "max_lora_rank": 8, "max_loras": 1}


def write_adapter(directory: Path, seed: int) -> None:
    """Write an adapter of rank 8 to ``directory``, in the place of what is there."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    numbers = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(TINY.layers):
        path = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        tensors[f"{path}.lora_A.weight"] = torch.randn(8, TINY.hidden, generator=numbers) * 0.2
        tensors[f"{path}.lora_B.weight"] = torch.randn(TINY.kv_heads * TINY.head_size, 8, generator=numbers) * 0.2
    save_file(tensors, directory / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def shared(workshop: Workshop) -> Medium:
    return tree(workshop.scratch / "kv-adapters")


def ask(engine: Engine, adapter: dict[str, Any]) -> list[Answer]:
    """Answer without what the GPU remembers."""
    assert engine.settle()
    assert engine.reset_prefix_cache()
    return engine.generate(PROMPTS, adapter=adapter)


def test_adapters_of_one_name(workshop: Workshop, shared: Medium) -> None:
    """Two servers, one after the other on the same path: first other bytes, then the first ones again. A third without
    a connector says what is right.
    """
    path = workshop.scratch / "adapter"
    adapter = {"lora_name": "mine", "lora_int_id": 1, "lora_path": str(path)}
    right = []
    with workshop.start_engine(**OPTIONS) as plain:
        for seed in (1, 2):
            apart = workshop.scratch / f"adapter-{seed}"
            write_adapter(apart, seed)
            theirs = {"lora_name": f"adapter-{seed}", "lora_int_id": seed, "lora_path": str(apart)}
            right.append(plain.generate(PROMPTS, adapter=theirs))
    assert not same(*right), "the adapters make no difference"
    write_adapter(path, 1)
    with workshop.start_engine(connector=shared.config(), **OPTIONS) as first:
        assert same(first.generate(PROMPTS, adapter=adapter), right[0]), "loaded by the request itself"
        found = ask(first, adapter)
        assert same(found, right[0])
        assert hits(found) == FULL_TOKENS, f"what the first request computed was not stored{said(first)}"
        stored = shared.shards()
        # Replaced under the first server, which keeps what it has in memory.
        write_adapter(path, 2)
        with workshop.start_engine(connector=shared.config(), **OPTIONS) as second:
            second.call("add_adapter", adapter=adapter)
            answers = second.generate(PROMPTS, adapter=adapter)
            assert same(answers, right[1])
            assert hits(answers) == 0
            assert second.settle()
            second.stop()
        assert len(shared.shards()) == 2 * len(stored), "as many again, under other names"
        kept = ask(first, adapter)
        assert same(kept, right[0])
        assert hits(kept) == FULL_TOKENS
        # Read anew in place, as /v1/load_lora_adapter with load_inplace does.
        first.call("add_adapter", adapter={**adapter, "load_inplace": True})
        assert first.generate(PROMPTS, adapter=adapter)[0].external_hit_tokens == 0, "of neither content"
        assert "has other content than before" in first.log.read_text(errors="replace")
        replaced = ask(first, adapter)
        assert same(replaced, right[1])
        assert hits(replaced) == FULL_TOKENS, "the second server's"
        first.stop()
    assert len(shared.shards()) == 2 * len(stored), "nothing was stored while vLLM's cache held both"
    # Loaded before the first request: that one waits a step for the ranks' word, and loads.
    with workshop.start_engine(connector=shared.config(), **OPTIONS) as third:
        third.call("add_adapter", adapter=adapter)
        found = third.generate(PROMPTS, adapter=adapter)
        assert same(found, right[1])
        assert hits(found) == FULL_TOKENS
        plain_answers = third.generate(PROMPTS)
        assert plain_answers[0].external_hit_tokens == 0, "without an adapter it is another model"
        third.stop()
