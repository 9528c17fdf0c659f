"""The sides: what each is, and the engine options that make it.

Threading: plain functions. Ownership: directories and buckets are the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.s3_server import free_port

CHUNK_TOKENS = 256
"""Of ours and of vLLM's specs alike."""

NOTES = {
    "none": "no prefix cache at all",
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
    "vllm-obj": "vLLM's TieringOffloadingSpec: memory, then obj",
    "lmcache": "LMCache's server, started by its connector: memory; runs where lmcache can be imported; tells no bytes",
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


def needs_bucket(name: str) -> bool:
    """Whether a side talks to an S3 server."""
    return name.endswith(("s3", "obj"))


def tiers(name: str, room: Room, directory: Path, bucket: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The tiers of one of ours, as its config says them. ``bucket``: the config of an s3 tier."""
    kinds: dict[str, dict[str, Any]] = {
        "memory": {"kind": "memory", "capacity": room.memory},
        "slab": {"kind": "slab", "path": str(directory), "capacity": room.storage},
        "tree": {"kind": "shared_dir", "path": str(directory), "capacity": room.storage},
        "s3": dict(bucket or {}),
    }
    return [kinds[kind] for kind in name.split("+")]


def engine_options(
    name: str, room: Room, directory: Path, bucket: Mapping[str, Any] | None, engine_id: str
) -> dict[str, Any]:
    """The options of vLLM's engine that make a side.

    ``bucket``: the config of an s3 tier, and in it the ``access_key`` and ``secret_key`` that vLLM's obj tier wants.
    """
    if name == "none":
        return {"enable_prefix_caching": False}
    options: dict[str, Any] = {"enable_prefix_caching": True}
    if name == BASE:
        return options
    transfer: dict[str, Any] = {"kv_role": "kv_both", "engine_id": engine_id, "kv_load_failure_policy": "recompute"}
    if name == "lmcache":
        return {**options, "kv_transfer_config": transfer | _lmcache(room)}
    ours = {key: value for key, value in (bucket or {}).items() if not key.endswith("_key")}
    if NOTES[name].startswith("ours"):
        config = {"chunk_tokens": CHUNK_TOKENS, "tiers": tiers(name, room, directory, ours)}
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
        elif name == "vllm-obj":
            assert bucket is not None
            extra["secondary_tiers"] = [{"type": "obj", "prefix": "vllm", "store_config": store_config(bucket)}]
        transfer |= {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    return {**options, "kv_transfer_config": transfer}


def _lmcache(room: Room) -> dict[str, Any]:
    """LMCache's connector of several processes. It copies on the CPU, where there is no CUDA, in vLLM's own thread."""
    size = f"--l1-size-gb {room.memory / (1 << 30):.2f} --chunk-size {CHUNK_TOKENS} --eviction-policy LRU"
    server = f"{size} --supported-transfer-mode engine_driven"
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_connector_extra_config": {
            "lmcache.mp.port": free_port(),
            "lmcache.mp.autostart": True,
            "lmcache.mp.autostart.server_args": f"{server} --http-port {free_port()}",
        },
    }


def store_config(bucket: Mapping[str, Any]) -> dict[str, str]:
    scheme, _, host = bucket["endpoint"].partition("://")
    return {
        "bucket": bucket["bucket"],
        "endpoint_override": f"{scheme}://{host}",
        "scheme": scheme,
        "region": bucket["region"],
        "access_key": bucket["access_key"],
        "secret_key": bucket["secret_key"],
    }
