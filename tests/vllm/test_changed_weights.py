"""KV belongs to the weights that computed it, on running vLLMs that share a directory: to what an adapter holds, not to
its name and path, and to weights that change in a running vLLM. Nothing computed with other ones is served, by the
server that has changed or by another; what was stored before stays for those who have its weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from examples.demo.model import TINY
from tests.vllm.damage import ENGINE_OPTIONS, FULL_TOKENS, chunk_prompts, hits, said
from tests.vllm.harness import Answer, Engine, Workshop, chain_config, same
from tests.vllm.media import tree

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


def ask(engine: Engine, *, adapter: dict[str, Any] | None = None, connector: bool = False) -> list[Answer]:
    """Answer without what the GPU remembers. ``connector``: nor what ours does."""
    assert engine.settle()
    assert engine.reset_prefix_cache(connector=connector)
    answers = engine.generate(PROMPTS, adapter=adapter)
    assert engine.settle()
    return answers


def test_adapters_of_one_name(workshop: Workshop) -> None:
    """Two servers, one after the other on the same path: first other bytes, then the first ones again. A third without
    a connector says what is right.
    """
    path, shared = workshop.scratch / "adapter", tree(workshop.scratch / "kv-adapters")
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
        found = ask(first, adapter=adapter)
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
        kept = ask(first, adapter=adapter)
        assert same(kept, right[0])
        assert hits(kept) == FULL_TOKENS
        # Read anew in place, as /v1/load_lora_adapter with load_inplace does.
        first.call("add_adapter", adapter={**adapter, "load_inplace": True})
        assert first.generate(PROMPTS, adapter=adapter)[0].external_hit_tokens == 0, "of neither content"
        assert "has other content than before" in first.log.read_text(errors="replace")
        replaced = ask(first, adapter=adapter)
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


def test_weights_replaced_in_place(workshop: Workshop) -> None:
    """Through memory, a slab and a directory that a second server shares, which has the weights of the start."""
    shared = tree(workshop.scratch / "kv-weights")
    tiers = (
        {"kind": "memory", "capacity": "32MiB"},
        {"kind": "slab", "path": str(workshop.scratch / "slab-weights"), "capacity": "128MiB"},
        shared.tier,
    )
    with workshop.start_engine(**ENGINE_OPTIONS) as plain:
        old = plain.generate(PROMPTS)
        plain.worker("scale_weights", 0, 2.0)
        assert plain.reset_prefix_cache()
        new = plain.generate(PROMPTS)
    assert not same(old, new), "the weights make no difference"
    with workshop.start_engine(connector=chain_config(*tiers), **ENGINE_OPTIONS) as server:
        assert same(server.generate(PROMPTS), old)
        found = ask(server)
        assert same(found, old)
        assert hits(found) == FULL_TOKENS, said(server)
        (namespace,) = shared.namespaces()
        server.worker("scale_weights", 0, 2.0)
        first = ask(server)
        assert same(first, new)
        assert hits(first) == 0
        assert same(ask(server), new)  # stored by now, unless the first had ended before the tiers were open
        again = ask(server)
        assert same(again, new)
        assert hits(again) == FULL_TOKENS, f"the new weights have a cache of their own{said(server)}"
        assert len(shared.namespaces()) == 2
        with workshop.start_engine(connector=shared.config(), **ENGINE_OPTIONS) as other:
            theirs = other.generate(PROMPTS)
            assert same(theirs, old)
            assert hits(theirs) == FULL_TOKENS, "the namespace of the start is as it was"
            # Another server that gets the same update shares what was computed with it.
            other.worker("scale_weights", 0, 2.0)
            assert same(ask(other), new)
            theirs = ask(other)
            assert same(theirs, new)
            assert hits(theirs) == FULL_TOKENS, said(other)
            other.stop()
        # The old weights again: what the slab holds of them is found, and only that.
        server.worker("scale_weights", 0, 0.5)
        assert same(ask(server), old)
        back = ask(server)
        assert same(back, old)
        assert hits(back) == FULL_TOKENS, said(server)
        # A reset of the connector without other weights: cleared, as ever, and in no other namespace.
        assert same(ask(server, connector=True), old)
        assert len(shared.namespaces()) == 2
        # Replaced without a reset of vLLM's own cache, which holds blocks of the old ones: nothing is stored.
        shards = shared.shards()
        server.worker("scale_weights", 0, 2.0)
        server.call("reset_connector_alone")
        server.generate(PROMPTS)
        assert server.settle()
        assert shared.shards() == shards
        assert "Nothing is stored or loaded until" in server.log.read_text(errors="replace")
        assert same(ask(server), new)
        server.stop()
    assert namespace in shared.namespaces()
