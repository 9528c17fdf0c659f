"""The sides of the yardstick: ours by kind of tier, vLLM's own tiers, LMCache; and where each keeps its chunks.

Peers are set up as their documentation says, with ``kv_load_failure_policy: recompute``, which is not vLLM's default
and in their favour. vLLM's tiers need memory before them: it holds less than two prompts, so that what is asked for
comes from storage. LMCache's keeps nothing that is stored (``skip_l1``). Of LMCache there are two: plain, and with the
only check of bytes that it offers, encryption.

Threading: plain functions and records. Ownership: directories and buckets are the caller's.
"""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from examples.s3_server import REGION, free_port
from tests.prove.happenings import Piece, files
from tests.s3.servers import RcloneServer
from tests.vllm.damage import CHUNK_BYTES, PROMPT_CHUNKS
from tests.vllm.harness import CHUNK_TOKENS, chain_config
from tests.vllm.media import slab
from tests.vllm.zygote import MAIN_MODULE

OURS: Final = ("slab", "shared_dir", "s3")
PEERS: Final = ("vLLM fs", "vLLM obj", "LMCache fs", "LMCache fs aesgcm")
SIDES: Final = (*OURS, *PEERS)
MEMORY_CHUNKS: Final = PROMPT_CHUNKS + 2
"""Of the memory before a peer's tier."""
_CAPACITY: Final = "192MiB"
"""Room for all prompts of a trial, some twenty of 4 MiB, for where one is evicted a trial cannot tell the next from it.
A slab's index may take 33 MiB.
"""
_LOOKUP: Final = {"timeout": "2s", "present_for": "200ms", "absent_for": "300ms"}


@dataclass(frozen=True)
class Side:
    """What a side is, and where its chunks are."""

    name: str
    options: dict[str, Any]
    """Of vLLM's engine."""
    pieces: Callable[[], list[Piece]]
    """All chunks that are stored now."""
    environment: dict[str, str] = field(default_factory=dict)
    is_ours: bool = False
    has_memory: bool = False
    """Before its storage: a prompt must be pushed out of it to come from storage."""
    is_bucket: bool = False
    forget: Callable[[], None] = lambda: None
    """Makes the server look at the files again."""
    clean: Callable[[], None] = lambda: None
    """Removes what a killed engine leaves outside its directories."""


def make(name: str, directory: Path, server: RcloneServer, endpoint: str) -> Side:
    """Return a side over a ``directory`` or, if it has one, the bucket of ``server``, reached by ``endpoint``."""
    if name.startswith("LMCache"):
        return _lmcache(name, directory)
    return (_ours if name in OURS else _vllm)(name, directory, server, endpoint)


def _ours(name: str, directory: Path, server: RcloneServer, endpoint: str) -> Side:
    if name == "s3":
        tier = server.tier("ours", endpoint=endpoint, request_timeout="1s", lookup=_LOOKUP)
        base, environment, forget = server.directory / "ours", server.environment, server.forget
    else:
        tier = {"kind": name, "path": str(directory), "capacity": _CAPACITY}
        if name == "shared_dir":
            tier["lookup"] = _LOOKUP
        base, environment, forget = directory, {}, lambda: None
    config = chain_config(tier, load_timeout="2s")
    options = _transfer("NixlOffloadConnector", {"config": config})
    pieces = (lambda: _slots(base)) if name == "slab" else (lambda: _files(base))
    return Side(name, options, pieces, environment, is_ours=True, is_bucket=name == "s3", forget=forget)


def _vllm(name: str, directory: Path, server: RcloneServer, endpoint: str) -> Side:
    region = f"yardstick-{secrets.token_hex(6)}"
    tier: dict[str, Any]
    if name == "vLLM obj":
        base, forget = server.directory / "vllm", server.forget
        environment = {**server.environment, "NIXL_TELEMETRY_ENABLE": "y"}  # without it vLLM dies of NIXL 1.5's
        tier = {
            "type": "obj",
            "prefix": "vllm",
            "store_config": {
                "bucket": server.bucket,
                "endpoint_override": endpoint,
                "scheme": "http",
                "region": REGION,
                "access_key": server.access_key_id,
                "secret_key": server.secret_access_key,
            },
        }
    else:
        base, environment, forget = directory, {}, lambda: None
        tier = {"type": "fs", "root_dir": str(directory)}
    options = _transfer(
        "OffloadingConnector",
        {
            "spec_name": "PlayedTieringOffloadingSpec",
            "spec_module_path": "benchmarks.serving.peers",
            "block_size": CHUNK_TOKENS,
            "cpu_bytes_to_use": MEMORY_CHUNKS * CHUNK_BYTES,
            "secondary_tiers": [tier],
        },
        engine_id=region,
    )

    def clean() -> None:
        for left in Path("/dev/shm").glob(f"*{region}*"):
            left.unlink(missing_ok=True)

    return Side(
        name,
        options,
        lambda: _files(base),
        environment,
        has_memory=True,
        is_bucket=name == "vLLM obj",
        forget=forget,
        clean=clean,
    )


def _lmcache(name: str, directory: Path) -> Side:
    adapter: dict[str, Any] = {"type": "fs", "base_path": str(directory)}
    if name.endswith("aesgcm"):
        key = directory.parent / "lmcache.key"
        key.write_bytes(secrets.token_bytes(32))
        adapter["serde"] = {"type": "aesgcm", "master_key_path": str(key)}
    arguments = [
        f"--l1-size-gb 0.0625 --l2-store-policy skip_l1 --chunk-size {CHUNK_TOKENS} --eviction-policy LRU",
        "--supported-transfer-mode engine_driven",
        f"--l2-adapter {shlex.quote(json.dumps(adapter))}",
        f"--http-port {free_port()}",
    ]
    options = _transfer(
        "LMCacheMPConnector",
        {
            "lmcache.mp.port": free_port(),
            "lmcache.mp.autostart": True,
            "lmcache.mp.autostart.server_args": " ".join(arguments),
        },
        kv_connector_module_path="lmcache.integration.vllm.lmcache_mp_connector",
    )
    environment = {MAIN_MODULE: "tests.prove.yardstick.beside_llvmlite", "LMCACHE_TRACK_USAGE": "false"}
    return Side(name, options, lambda: _files(directory), environment)


def _transfer(connector: str, extra: dict[str, Any], **fields: Any) -> dict[str, Any]:
    transfer = {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
        **fields,
    }
    return {"kv_transfer_config": transfer}


def _files(base: Path) -> list[Piece]:
    """Files that are large enough to be chunks, and finished; the oldest first, so a prompt's are in its order."""
    return [
        Piece(path)
        for _, path in sorted((told.st_mtime_ns, path) for path, told in files(base) if told.st_size >= CHUNK_BYTES)
        if not path.name.startswith(".") and not path.name.endswith(".tmp") and ".rclone_temp_put_" not in path.name
    ]


def _slots(base: Path) -> list[Piece]:
    return list(slab(base).stored())
