"""Requests and bytes in a bucket for each chunk: ours, and vLLM's obj tier with and without its canonical layout.

``python -m benchmarks.shard_requests [--prompts N] [--json]``. Real vLLMs on the CPU, of one and of two ranks, store
prompts in a local bucket through a proxy that counts; then a new server of each size asks for them. An answer is right
when its tokens are those of the server that computed them, and its logprobs but for rounding. Nothing is timed.
vLLM's copies are made by ``benchmarks.serving.peers`` where there is no CUDA; what they copy, and all of its tiers, is
vLLM's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.serving.sides import store_config
from examples.demo.engine import quick_environment
from examples.demo.model import write_model
from examples.s3_server import REGION
from tests.s3.proxy import FaultProxy
from tests.s3.servers import RcloneServer
from tests.vllm.damage import ENGINE_OPTIONS, FULL_TOKENS, PROMPT_CHUNKS, chunk_prompts
from tests.vllm.harness import CHUNK_TOKENS, ONE_CORE, TINY, Answer, Workshop, chain_config, close
from tests.vllm.shared_rig import LOOKING
from tests.vllm.test_shards import ENVIRONMENT, SIZES
from tests.vllm.zygote import Zygote

SHAPE = dataclasses.replace(TINY, heads=8, kv_heads=4)
SIDES = ("ours, per_rank", "ours, shards: 2", "ours, shards: 4", "vLLM obj", "vLLM obj, canonical_layout")
_MEMORY_BYTES = 64 << 20
_FOR_VLLM = {"PYTHONHASHSEED": "0", "NIXL_TELEMETRY_ENABLE": "y"}
"""Without the first no server finds another's chunks; without the second vLLM 0.32's obj tier ends its engine."""
_WAIT_S = 60.0
_CONFIG_BYTES = 16 << 10
"""What is no larger is a manifest, ours or vLLM's."""


def main(arguments: list[str] | None = None) -> int:
    """Run all sides; print a table, or JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shard_requests", description=__doc__)
    parser.add_argument("--prompts", type=int, default=4, help=f"each of {PROMPT_CHUNKS} chunks")
    parser.add_argument("--sides", default=";".join(SIDES), help="by semicolons")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    rows = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="nixl-offload-requests-")))
        model = write_model(scratch / "model", SHAPE)  # one, for vLLM's tier names objects by the model's path
        zygote = Zygote(scratch / "log", {**quick_environment(scratch=scratch), **ONE_CORE})
        stack.callback(zygote.close)
        server = stack.enter_context(RcloneServer())
        proxy = FaultProxy(server.port)
        stack.callback(proxy.close)
        for number, side in enumerate(chosen.sides.split(";")):
            for ranks in SIZES:
                row = _measure(zygote, model, server, proxy, side, ranks, f"side-{number}-of-{ranks}", chosen.prompts)
                print(f"{side}, stored by {ranks}: {row}", file=sys.stderr, flush=True)
                rows.append({"side": side, "stored by": ranks, **row})
    if chosen.json:
        print(json.dumps(rows, indent=1))
    else:
        print(f"| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
        for row in rows:
            print(f"| {' | '.join(str(value) for value in row.values())} |")
    return 0


def _measure(
    zygote: Zygote, model: Path, server: RcloneServer, proxy: FaultProxy, side: str, ranks: int, prefix: str, count: int
) -> dict[str, str | float]:
    """Store with a server of ``ranks``, ask with new ones; return figures for each chunk."""
    prompts, chunks = chunk_prompts(count, seed=401), count * PROMPT_CHUNKS
    row: dict[str, str | float] = {}
    computed: list[Answer] = []
    for asking in (None, *SIZES):
        workshop = Workshop(zygote)
        try:
            engine = workshop.start_engine(
                SHAPE,
                model=model,
                environment={**server.environment, **ENVIRONMENT, **_FOR_VLLM},
                **{**ENGINE_OPTIONS, **SIZES[asking or ranks], "in_process": False},
                kv_transfer_config=_transfer(side, server, proxy, prefix),
            )
            proxy.forget()
            answers = engine.generate(prompts)
            if asking is None:
                computed = answers
                objects = _quiet(server, prefix)
                kept = [name for name in objects if server.path(name).stat().st_size > _CONFIG_BYTES]
                row["objects"] = len(kept) / chunks
                row["KiB"] = round(sum(server.path(name).stat().st_size for name in kept) / chunks / 1024, 1)
                row["PUT, HEAD to store"] = _each(proxy.counts(), ("PUT", "HEAD"), chunks)
            else:
                found = sum(answer.external_hit_tokens for answer in answers)
                right = sum(close(answer, other) for answer, other in zip(answers, computed, strict=True))
                row[f"found by {asking}"] = f"{found / (count * FULL_TOKENS):.0%}, {right} of {count} answers right"
                row[f"HEAD, GET of {asking}"] = _each(proxy.counts(), ("HEAD", "GET"), chunks)
            engine.stop()
        finally:
            workshop.close()
    return row


def _each(counts: Counter[str], operations: tuple[str, ...], chunks: int) -> str:
    return ", ".join(f"{counts[operation] / chunks:.2f}" for operation in operations)


def _quiet(server: RcloneServer, prefix: str) -> list[str]:
    """Wait until the bucket stays as it is for two seconds; return its objects."""
    deadline, before, since = time.monotonic() + _WAIT_S, list[str](), time.monotonic()
    while time.monotonic() < min(deadline, since + 2.0) or not before:
        time.sleep(0.2)
        if (now := server.objects(prefix)) != before:
            before, since = now, time.monotonic()
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing under {prefix}")
    return before


def _transfer(side: str, server: RcloneServer, proxy: FaultProxy, prefix: str) -> dict[str, Any]:
    transfer: dict[str, Any] = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", "engine_id": prefix}
    if side.startswith("ours"):
        shards = side.rpartition(" ")[2]
        tier = server.tier(prefix, endpoint=proxy.endpoint, mover="obstore", lookup=LOOKING)
        config = chain_config(tier, shards=shards if shards == "per_rank" else int(shards))
        return {**transfer, "kv_connector": "NixlOffloadConnector", "kv_connector_extra_config": {"config": config}}
    bucket = {
        "bucket": server.bucket,
        "endpoint": proxy.endpoint,
        "region": REGION,
        "access_key": server.access_key_id,
        "secret_key": server.secret_access_key,
    }
    extra: Mapping[str, Any] = {
        "spec_name": "PlayedTieringOffloadingSpec",
        "spec_module_path": "benchmarks.serving.peers",
        "block_size": CHUNK_TOKENS,
        "cpu_bytes_to_use": _MEMORY_BYTES,
        "canonical_layout": "canonical" in side,
        "secondary_tiers": [{"type": "obj", "prefix": prefix, "store_config": store_config(bucket)}],
    }
    return {**transfer, "kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}


if __name__ == "__main__":
    sys.exit(main())
