"""The sides: what each is, and the engine options that make it.

Threading: plain functions. Ownership: directories and buckets are the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK_TOKENS = 256
"""Of ours and of vLLM's specs alike."""

NOTES = {
    "prefix": "vLLM's prefix cache alone",
    "memory": "ours: memory",
    "slab": "ours: slab",
    "memory+slab": "ours: memory, then slab",
    "tree": "ours: shared_dir",
    "memory+tree": "ours: memory, then shared_dir",
    "s3": "ours: s3, on a local server",
    "memory+s3": "ours: memory, then s3",
    "vllm-cpu": "vLLM's CPUOffloadingSpec",
    "vllm-fs": "vLLM's TieringOffloadingSpec: memory, then fs",
}
"""By name, in the order in which they are shown."""
DEFAULT = ("prefix", "memory", "memory+slab", "vllm-cpu", "vllm-fs")
BASE = "prefix"
"""What all others are compared with."""


@dataclass(frozen=True)
class Room:
    """How many bytes each medium has."""

    gpu: int
    memory: int
    storage: int


def engine_options(
    name: str, room: Room, directory: Path, bucket: Mapping[str, Any] | None, engine_id: str
) -> dict[str, Any]:
    """Return the options of vLLM's engine that make a side. ``bucket``: the config of an s3 tier."""
    if name == BASE:
        return {"enable_prefix_caching": True}
    transfer: dict[str, Any] = {"kv_role": "kv_both", "engine_id": engine_id, "kv_load_failure_policy": "recompute"}
    if NOTES[name].startswith("ours"):
        kinds: dict[str, dict[str, Any]] = {
            "memory": {"kind": "memory", "capacity": room.memory},
            "slab": {"kind": "slab", "path": str(directory), "capacity": room.storage},
            "tree": {"kind": "shared_dir", "path": str(directory), "capacity": room.storage},
            "s3": dict(bucket or {}),
        }
        config = {"chunk_tokens": CHUNK_TOKENS, "tiers": [kinds[kind] for kind in name.split("+")]}
        transfer |= {"kv_connector": "NixlOffloadConnector", "kv_connector_extra_config": {"config": config}}
    else:
        extra: dict[str, Any] = {
            "spec_name": "PlayedCPUOffloadingSpec" if name == "vllm-cpu" else "PlayedTieringOffloadingSpec",
            "spec_module_path": "benchmarks.serving.peers",
            "block_size": CHUNK_TOKENS,
            "cpu_bytes_to_use": room.memory,
        }
        if name == "vllm-fs":
            extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(directory)}]
        transfer |= {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    return {"enable_prefix_caching": True, "kv_transfer_config": transfer}
