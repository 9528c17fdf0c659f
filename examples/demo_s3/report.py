"""How the result is shown: a table for people, a dictionary for ``--json``.

Threading: pure functions.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from examples.demo.handover import CHUNK_TOKENS, PROMPT_TOKENS
from examples.demo.report import add_row, empty_table, handover_json, megabytes
from examples.demo_s3.run import DemoS3Result, problems
from examples.s3_traffic import Traffic


def as_table(result: DemoS3Result) -> Table:
    """One row for each way that the prompts were served; what the S3 server saw below it."""
    bucket, tree = result.bucket, result.tree
    table = empty_table(
        len(bucket.first.cold),
        result.parameters,
        result.vllm,
        result.device,
        caption=f"stored {bucket.stored_tokens} tokens in {bucket.chunks} chunks of {CHUNK_TOKENS}; the bucket holds "
        f"{megabytes(result.bucket_bytes)}\n"
        f"seen by the S3 server: of engine 1, {_words(result.first_traffic)}\n"
        f"of engine 2, {_words(result.second_traffic)}",
    )
    add_row(table, "cold (computed)", bucket.first.cold, bucket.first.cold)
    add_row(table, "from S3, another engine", bucket.taken, bucket.first.cold)
    add_row(table, "from GPU prefix cache", bucket.first.gpu_prefix_cache, bucket.first.cold)
    add_row(table, "from a shared directory", tree.taken, tree.first.cold)
    return table


def as_json(result: DemoS3Result) -> dict[str, Any]:
    """Everything in the table, times per prompt too, and what is wrong. Seconds and bytes."""
    found = problems(result)
    return {
        "ok": not found,
        "problems": found,
        "vllm": result.vllm,
        "device": result.device,
        "model_parameters": result.parameters,
        "prompt_tokens": PROMPT_TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
        "s3": {
            **handover_json(result.bucket, "s3"),
            "bucket_bytes": result.bucket_bytes,
            "traffic": {"engine_1": asdict(result.first_traffic), "engine_2": asdict(result.second_traffic)},
        },
        "tree": handover_json(result.tree, "tree"),
    }


def _words(traffic: Traffic) -> str:
    return (
        f"{traffic.heads} HEADs, {traffic.gets} GETs, {traffic.puts} PUTs; "
        f"{megabytes(traffic.bytes_to_server)} in, {megabytes(traffic.bytes_from_server)} out"
    )
