"""A real vLLM on a slab that ``nixl-offload warm`` filled from another server's shared directory: every chunk is found,
the answers are the same. And ``model_shape`` against what that vLLM really stores, with one KV group and with two.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from nixl_offload.cli.main import main
from nixl_offload.cli.model_config import model_shape
from tests.vllm.harness import (
    CHUNK_TOKENS,
    TAIL_TOKENS,
    TINY,
    TINY_HYBRID,
    ModelShape,
    Workshop,
    file_tier,
    prompts,
    tier_config,
    tree_tier,
)

PROMPTS = prompts(2, seed=61)
FULL_TOKENS = len(PROMPTS[0]) - TAIL_TOKENS


@pytest.mark.parametrize("shape", [TINY, TINY_HYBRID], ids=["one-group", "two-groups"])
def test_an_engine_finds_what_was_warmed(
    shape: ModelShape, workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loaded from the slab, bit by bit what was computed by the engine that filled the shared directory."""
    shared, slab = tmp_path / "shared", file_tier(tmp_path / "kv")
    with workshop.start_engine(shape, tier_config(tree_tier(shared))) as engine:
        right = engine.generate(PROMPTS)
        assert engine.settle()
        engine.stop()
    config = tmp_path / "kv.yaml"
    config.write_text(yaml.safe_dump(slab))
    assert main(["warm", str(config), "--from", str(shared), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["copied"] == report["total"] > 0
    with workshop.start_engine(shape, slab) as engine:
        answers = engine.generate(PROMPTS)
        assert engine.settle()
        assert engine.stored_bytes() == 0
        engine.stop()
    for answer, expected in zip(answers, right, strict=True):
        assert answer.external_hit_tokens == FULL_TOKENS
        assert (answer.tokens, answer.logprobs) == (expected.tokens, expected.logprobs)
    _assert_shape(next(shared.glob("*/manifest.json")), workshop, shape)


def _assert_shape(manifest: Path, workshop: Workshop, shape: ModelShape) -> None:
    """Group by group: shards of as many bytes as the sum from the model's config.json says."""
    model = json.loads((workshop.scratch / f"model-{abs(hash(shape)):x}" / "config.json").read_text())
    predicted = model_shape(model, kv_dtype="float32")
    groups = json.loads(manifest.read_text())["fields"]["groups"]
    sizes = [group["slot_bytes"] for group in groups]
    assert sizes == [[4096 + CHUNK_TOKENS * group.bytes_per_token] for group in predicted.groups]
    assert sum(map(sum, sizes)) == predicted.chunk_bytes(CHUNK_TOKENS)
