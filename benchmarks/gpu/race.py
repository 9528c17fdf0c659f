"""One side of the race: a vLLM of an 8B model's shape is asked about long documents, of which its GPU cache holds half.

``python -m benchmarks.gpu.race SIDE [--graphs] [--keep-layout]``. SIDE: of benchmarks/serving/sides.py. The workload
runs twice on one engine, with other documents: request after request, which gives times to first token, then two at a
time, which gives the time between tokens under load. It is ``benchmarks.serving.drive`` with random weights.
Threading: one asyncio loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.serving import drive
from benchmarks.serving.model import VOCABULARY, Shape, write_config
from benchmarks.serving.report import figures
from benchmarks.serving.rows import Plan
from benchmarks.serving.turns import options_of, storage_of
from benchmarks.serving.workloads import Spec

BLOCK_TOKENS = 16
MEMORY_BYTES = 16 << 30
BUSY = 2
"""Requests at a time in the second pass: the GPU's cache holds three documents, and none must be preempted."""
LLAMA_8B = {"layers": 32, "heads": 32, "kv_heads": 8, "hidden": 4096, "wide": 14336, "vocab_size": 128256}
LLAMA_SMALL = {"layers": 2, "heads": 2, "kv_heads": 1, "hidden": 256, "wide": 512, "vocab_size": VOCABULARY}
PLAYED = "NIXL_OFFLOAD_PLAYED" in os.environ
"""Host memory plays the device: models are small."""
DOCUMENTS = Spec(6, 2, 50, document_tokens=16384, answer_tokens=32, think_s=0.0)
DOCUMENTS_SMALL = Spec(2, 2, 50, document_tokens=640, answer_tokens=4, think_s=0.0)


def rung_options(**own: Any) -> dict[str, Any]:
    """Return vLLM's options for a model of random weights, on the kernels that ``GPU_CHECK_ATTENTION`` names."""
    made: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "seed": 0,
        "attention_backend": os.environ.get("GPU_CHECK_ATTENTION", "FLASH_ATTN"),
        "distributed_executor_backend": "uni",
    }
    return made | own


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("side")
    parser.add_argument("--dir", type=Path, help="where files of KV lie")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs of decoding steps")
    parser.add_argument("--keep-layout", action="store_true", help="ours with block_outermost: false")
    chosen = parser.parse_args()
    if chosen.graphs and PLAYED:
        print(json.dumps({"words": "CUDA graphs need a card", "skipped": True}), flush=True)
        return
    sizes, spec = (LLAMA_SMALL, DOCUMENTS_SMALL) if PLAYED else (LLAMA_8B, DOCUMENTS)
    shape = Shape(sizes["layers"], sizes["kv_heads"], 128)
    plan = Plan(spec, gpu_share=0.5, memory=0.8, shape=shape, batched_tokens=8192 if not PLAYED else 1024)
    if not PLAYED:
        plan = replace(plan, memory=MEMORY_BYTES / plan.room().gpu)
    with (
        storage_of(chosen.side, chosen.dir) as storage,
        options_of(plan, chosen.side, storage) as (options, scratch, environment),
    ):
        caches = {name: os.environ[name] for name in ("VLLM_CACHE_ROOT", "PYTHONPATH") if name in os.environ}
        os.environ.update({**environment, **caches, "VLLM_LOGGING_LEVEL": "INFO"})
        options.update(rung_options(block_size=BLOCK_TOKENS))
        del options["plugin"]
        options["model"] = str(write_config(scratch / "model", head_dim=128, **sizes))
        if chosen.graphs:
            options["enforce_eager"] = False
            options.setdefault("compilation_config", {}).update(mode=0, cudagraph_mode="FULL_DECODE_ONLY")
        if transfer := options.get("kv_transfer_config"):
            transfer["engine_id"] = f"{os.environ.get('GPU_CHECK_ID', 'race')}-{os.getpid()}"
            if chosen.keep_layout:
                transfer["kv_connector_extra_config"]["config"]["block_outermost"] = False
        import vllm.v1.engine.async_llm  # noqa: F401 - what can be done before our turn comes

        sys.stdin.readline()
        found = asyncio.run(race(spec, options))
    print(json.dumps(found), flush=True)
    os._exit(0)


async def race(spec: Spec, options: dict[str, Any]) -> dict[str, Any]:
    """Run the workload twice; return figures of both, and a sentence."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    begun_s = time.monotonic()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
    start_s = time.monotonic() - begun_s
    await drive.warm_up(engine)
    alone, busy = [await drive.measure(engine, replace(spec, seed=n), n) for n in (1, BUSY)]
    cold_s = statistics.median(record.ttft_s for record in alone.records if not record.repeated_tokens)
    found, under_load = figures(alone), figures(busy)
    short = f"TTFT {1e3 * cold_s:.0f}, again {found['later p50']:.0f} ms"
    words = (
        f"{short}, {found['hits %']:.0f} % hits; between tokens "
        f"{found['ITL p50']:.1f} ms, under load p50 {under_load['ITL p50']:.1f}, p99 {under_load['ITL p99']:.0f} ms; "
        f"started in {start_s:.0f} s"
    )
    measured = {"start_s": start_s, "cold_ttft_s": cold_s, "alone": found, "busy": under_load}
    return {"words": words, "short": short, **measured}


if __name__ == "__main__":
    main()
