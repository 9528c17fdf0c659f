"""Engines for ``Fuzz``: families of models, tiers, and both of vLLM's model runners.

Threading: plain functions. vLLM is imported when an engine starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.demo.model import ModelShape, write_model
from tests.families.checkpoints import write_eagle
from tests.vllm.harness import slab_tier, tree_tier

if TYPE_CHECKING:
    from tests.vllm.fuzz_rig import FuzzedEngine

RUNNERS = {"first runner": False, "second runner": True}
MEDIA = ("memory", "lazy", "blocks", "slab", "tree", "chain")
BLOCKS = 60


@dataclass(frozen=True)
class Family:
    """A kind of model and what surrounds it."""

    kinds: str
    """A letter for each layer."""
    retention_tokens: int | None = 0
    """vLLM's ``prefix_cache_retention_interval``."""
    adapters: bool = False
    drafts: bool = False
    beside: bool = False
    """Another connector loads, too."""
    hash_tokens: int | None = None
    """Less than a block: vLLM finds what ends within one."""


FAMILIES = {
    "full": Family("FF"),
    "windows": Family("SS"),
    "windows, all kept": Family("SS", None),
    "mixed": Family("FFSS"),
    "mixed, all kept": Family("FFSS", None),
    "chunked": Family("FFCC"),
    "large blocks, all kept": Family("LLWW", None),
    "state": Family("FFMM"),
    "state, all kept": Family("FFMM", None),
    "state, tails": Family("FFMM", hash_tokens=16),
    "drafts": Family("FFE", drafts=True),
    "drafts and windows": Family("FSE", None, drafts=True),
    "drafts with windows": Family("FFD", drafts=True),
    "adapters": Family("FF", adapters=True),
    "adapters and windows": Family("FFSS", None, adapters=True),
    "beside": Family("FF", beside=True),
    "beside, windows": Family("FFSS", None, beside=True),
}


def write_base(directory: Path) -> Path:
    """Write a checkpoint for vLLM's configuration to name, and a draft's beside it; nobody runs them."""
    write_eagle(directory / "draft")
    shape = ModelShape(layers=4, hidden=64, heads=2, kv_heads=1, intermediate=64, vocab=512, max_tokens=2048)
    return write_model(directory / "base", shape)


def start_family(
    family: Family, medium: str, model: Path, path: Path, *, second_runner: bool = False, blocks: int = BLOCKS
) -> FuzzedEngine:
    """Start an engine. ``model``: from ``write_base``. ``path``: for its files."""
    from vllm.config import KVTransferConfig

    from tests.vllm.fuzz_rig import MAX_TOKENS, FuzzedEngine
    from tests.vllm.pipeline_rig import BLOCK_TOKENS, vllm_config_of

    memory = {"kind": "memory", "capacity": "16MiB", "lazy": False}
    slab = slab_tier(path / "slab", "64MiB")
    tiers = {
        "memory": [memory],
        "lazy": [{**memory, "lazy": True, "capacity": "648KiB"}],
        "blocks": [{**memory, "lazy": True, "capacity": "720KiB"}],
        "slab": [slab],
        "tree": [tree_tier(path / "tree")],
        "chain": [
            {**memory, "lazy": True, "capacity": "512KiB"},
            slab_tier(path / "slab", "1MiB"),
            tree_tier(path / "tree"),
        ],
    }[medium]
    options: dict[str, Any] = {"prefix_match_unit": family.hash_tokens} if family.hash_tokens else {}
    if family.adapters:
        options |= {"enable_lora": True, "max_loras": 2}
    if family.drafts:
        options["speculative_config"] = {
            "method": "eagle",
            "model": str(model.parent / "draft"),
            "num_speculative_tokens": 1,
        }
    config = vllm_config_of(
        model,
        (family.kinds,),
        {"staging": "8MiB", "tiers": tiers, "vllm": {"offload_prompt_only": False}}
        | ({"chunk_tokens": BLOCK_TOKENS} if medium == "blocks" else {}),
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=128,
        prefix_cache_retention_interval=family.retention_tokens,
        **options,
    )
    if "M" in family.kinds:
        config.cache_config.mamba_cache_mode = "align"
        config.cache_config.mamba_block_size = BLOCK_TOKENS
    if family.beside:
        ours = config.kv_transfer_config
        assert ours is not None
        fields = {"kv_connector": ours.kv_connector, "kv_role": ours.kv_role}
        slow = {"kv_connector": "SlowConnector", "kv_connector_module_path": "tests.vllm.fuzz_rig"}
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "connectors": [
                    {**slow, "kv_role": "kv_both"},
                    {**fields, "kv_connector_extra_config": ours.kv_connector_extra_config},
                ]
            },
        )
    # As vLLM by default, where it can: the next step is scheduled before the tokens of this one are known.
    config.scheduler_config.async_scheduling = second_runner and not family.drafts
    return FuzzedEngine(config, family.kinds, blocks=blocks, second_runner=second_runner)
