"""Runs a side in processes of its own (``drive``), and cleans up behind it.

Threading: one thread. Ownership: a side's processes, scratch files and shared memory are gone when its run returns.
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.serving.model import BLOCK_TOKENS, RATE, WHOLE, write_model, write_plugin
from benchmarks.serving.report import Run
from benchmarks.serving.rows import Plan
from benchmarks.serving.sides import BASE, engine_options
from examples.demo.engine import Engine, quick_environment
from examples.s3_server import RcloneServer

RUN_LIMIT_S = 900.0
PLUGIN = "[vllm.general_plugins]\nnixl_offload_serving = benchmarks.serving.played:register\n"


class _Engine(Engine):
    module = "benchmarks.serving.drive"


@dataclass(frozen=True)
class Storage:
    """What outlasts an engine: KV, and the model, by whose path vLLM's tiers name files."""

    directory: Path
    bucket: Mapping[str, Any] | None
    environment: Mapping[str, str]

    def leave_memory(self) -> None:
        """Drop what the kernel holds of the files, so that the next engine reads storage."""
        for path in self.directory.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def storage_of(side: str, parent: Path | None) -> Iterator[Storage]:
    """Give a new directory, or a new bucket on a local server, as long as it is used."""
    if side.endswith("s3") or "obj" in side:
        with RcloneServer(parent=parent) as server:
            # vLLM's obj tier asks for telemetry, and its engine ends without it.
            telemetry = {"NIXL_TELEMETRY_ENABLE": "y"} if "obj" in side else {}
            yield Storage(server.directory, server.tier(prefix="kv"), server.environment | telemetry)
    else:
        with tempfile.TemporaryDirectory(prefix="serving-kv-", dir=parent, ignore_cleanup_errors=True) as name:
            yield Storage(Path(name), None, {})


def measure(plan: Plan, side: str, gb_s: float, parent: Path | None) -> Run:
    """Run a side once. ``gb_s``: see ``options_of``. Raises EngineError."""
    with storage_of(side, parent) as storage:
        if plan.is_filled and side != BASE:
            at_once = replace(plan.workload, think_s=0.0)
            _run(replace(plan, workload=at_once, at_a_time=8), side, storage, gb_s)
            storage.leave_memory()
        run = _run(plan, side, storage, gb_s)
    asked_before = [replace(record, repeated_tokens=record.prompt_tokens) for record in run.records]
    return replace(run, records=tuple(asked_before)) if plan.is_filled else run


def _run(plan: Plan, side: str, storage: Storage, gb_s: float) -> Run:
    """Start an engine, ask it, and end it."""
    asked = {"workload": asdict(plan.workload), "at_a_time": plan.at_a_time}
    with (
        options_of(plan, side, storage, gb_s) as (options, scratch, environment),
        _Engine(connector=None, log=scratch / "log", environment=environment, **options) as engine,
    ):
        return replace(Run.of(engine.call("measure", timeout_s=RUN_LIMIT_S, **asked)), side=side)


@contextlib.contextmanager
def options_of(
    plan: Plan, side: str, storage: Storage, gb_s: float = 0.0
) -> Iterator[tuple[dict[str, Any], Path, dict[str, str]]]:
    """Give vLLM's options, a directory for the engine, and its environment, as long as it runs.

    ``gb_s``: copies take the time in which a bus of this speed moves an 8B model's KV; 0: they are made.
    """
    engine_id = f"serving-{uuid.uuid4().hex[:12]}"
    with tempfile.TemporaryDirectory(prefix="serving-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        gb_s = math.inf if side == "free" else gb_s
        environment = {
            **quick_environment(scratch=scratch),
            **storage.environment,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or the threads of a side would share the first core
            "OMP_WAIT_POLICY": "passive",  # spinning threads are a CPU backend's, not a GPU's
            "VLLM_LOGGING_LEVEL": "WARNING",
            RATE: f"{gb_s * 1e9 * plan.shape.token_bytes / WHOLE.token_bytes or ''}",
        }
        options = {
            "plugin": str(write_plugin(scratch / "plugin", "nixl_offload_serving", PLUGIN)),
            "model": str(write_model(storage.directory / "model", plan.shape, plan.pace, plan.longest_tokens)),
            "load_format": "dummy",
            "dtype": "bfloat16",
            "block_size": BLOCK_TOKENS,
            "max_model_len": plan.longest_tokens,
            "max_num_batched_tokens": plan.batched_tokens,
            "max_num_seqs": 64,
            # As on one GPU: scheduler and rank in one process. By its name, for the CPU platform refuses "uni".
            "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
            "kv_cache_memory_bytes": plan.room().gpu,
            **engine_options(side, plan.room(), storage.directory / "kv", storage.bucket, engine_id),
        }
        try:
            yield options, scratch, environment
        finally:
            remove_shared_memory(engine_id)


def remove_shared_memory(engine_id: str) -> None:
    """Remove what vLLM's tiers leave behind: files of gigabytes in memory, under the engine's name."""
    for path in glob.glob(f"/dev/shm/*{engine_id}*"):
        Path(path).unlink(missing_ok=True)
