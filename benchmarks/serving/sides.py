"""The sides: what each is, and the engine options that make it. Each has its own defaults.

Threading: plain functions. Ownership: directories and buckets are the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK_TOKENS = 256
"""Of ours, and of vLLM's specs with equal chunks."""
EQUAL = f"-{CHUNK_TOKENS}"
PLAYED = "benchmarks.serving.peers"

NOTES = {
    "prefix": "vLLM's prefix cache alone",
    "free": "ours: memory, with copies that cost nothing: the floor",
    "memory": "ours: memory",
    "slab": "ours: slab",
    "memory+slab": "ours: memory, then slab",
    "memory+tree": "ours: memory, then shared_dir",
    "s3": "ours: s3, on a local server",
    "memory+s3": "ours: memory, then s3",
    "vllm-cpu": "vLLM's CPUOffloadingSpec: a chunk is a block",
    "vllm-cpu-256": "the same in chunks of 256 tokens",
    "vllm-fs": "vLLM's TieringOffloadingSpec: memory, then fs",
    "vllm-fs-256": "the same in chunks of 256 tokens",
    "vllm-obj": "vLLM's TieringOffloadingSpec: memory, then obj",
    "vllm-obj-256": "the same in chunks of 256 tokens",
    "simple": "vLLM's SimpleCPUOffloadConnector",
    "simple-lazy": "the same with lazy_offload",
}
"""By name, in the order in which they are shown."""
BASE = "prefix"
"""What all others are compared with."""
PEERS = ("vllm", "simple")
"""How their names begin."""


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
        return {}
    transfer: dict[str, Any] = {"kv_role": "kv_both", "engine_id": engine_id, "kv_load_failure_policy": "recompute"}
    extra: dict[str, Any] = {"cpu_bytes_to_use": room.memory}
    if not name.startswith(PEERS):
        kinds: dict[str, dict[str, Any]] = {
            "memory": {"kind": "memory", "capacity": room.memory},
            "slab": {"kind": "slab", "path": str(directory), "capacity": room.storage},
            "tree": {"kind": "shared_dir", "path": str(directory), "capacity": room.storage},
            "s3": dict(bucket or {}),
        }
        transfer["kv_connector"] = "NixlOffloadConnector"
        extra = {"config": {"tiers": [kinds[kind] for kind in name.replace("free", "memory").split("+")]}}
    elif name.startswith("simple"):
        transfer |= {"kv_connector": "SimpleCPUOffloadConnector", "kv_connector_module_path": PLAYED}
        extra["lazy_offload"] = name.endswith("lazy")
    else:
        transfer["kv_connector"] = "OffloadingConnector"
        extra |= {"spec_name": "PlayedTieringOffloadingSpec", "spec_module_path": PLAYED}
        if name.endswith(EQUAL):
            extra["block_size"] = CHUNK_TOKENS
        kind = name.removesuffix(EQUAL).removeprefix("vllm-")
        if kind == "cpu":
            extra["spec_name"] = "PlayedCPUOffloadingSpec"
        elif kind == "fs":
            extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(directory)}]
        elif bucket:
            store = {"endpoint_override": bucket["endpoint"], **{name: bucket[name] for name in ("bucket", "region")}}
            extra["secondary_tiers"] = [{"type": "obj", "prefix": "vllm", "store_config": store}]
    return {"kv_transfer_config": transfer | {"kv_connector_extra_config": extra}}
