"""The near end of ``drive``: starts each side in processes of its own, round after round, and cleans up behind it.

Threading: one thread. Ownership: a side's processes, scratch files and shared memory are gone when its run returns.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.serving.model import BLOCK_TOKENS, SHAPES, Pace, Shape, write_model, write_plugin
from benchmarks.serving.records import Run
from benchmarks.serving.sides import Room, engine_options, needs_bucket
from benchmarks.serving.workloads import Spec, longest_tokens, make, unique_tokens
from examples.demo.engine import quick_environment
from examples.s3_server import RcloneServer

ROOT = Path(__file__).resolve().parents[2]
RUN_LIMIT_S = 900.0
STOP_LIMIT_S = 30.0
_ERROR = re.compile(r"^(\([^)]*\) )?([A-Z]+ .*\] )?[\w.]*(Error|Exception)\b")
Progress = Callable[[str], None]


class SideError(Exception):
    """A side did not start, or did not answer. The message ends with its log."""


@dataclass(frozen=True)
class Plan:
    """All that a run depends on, but the side."""

    workload: Spec
    shape: Shape = SHAPES["8b"]
    model: str = ""
    """A real one, of that shape, by its directory or name; empty: one that only takes time."""
    dummy_weights: bool = False
    """Whether a real one has random weights: its directory then needs ``config.json`` alone."""
    pace: Pace = field(default_factory=Pace)
    at_a_time: int = 4
    rate_per_s: float = 0.0
    """Sessions per second that arrive, or 0: ``at_a_time`` requests instead."""
    gpu_share: float = 0.5
    """Of the working set, what the GPU's cache holds."""
    memory_share: float = 0.4
    """Of the working set, what host memory holds."""
    batched_tokens: int = 2048
    """The most in a step."""

    @property
    def working_set_bytes(self) -> int:
        return unique_tokens(make(self.workload)) * self.shape.token_bytes

    @property
    def longest_tokens(self) -> int:
        """Room for one request, in whole blocks."""
        return -(-(longest_tokens(make(self.workload)) + 1) // BLOCK_TOKENS) * BLOCK_TOKENS

    def room(self) -> Room:
        """How many bytes there are. The GPU's cache holds the longest request, whatever its share."""
        working_set, token_bytes = self.working_set_bytes, self.shape.token_bytes
        least = (self.longest_tokens + 2 * BLOCK_TOKENS) * token_bytes
        return Room(
            gpu=max(least, round(working_set * self.gpu_share)),
            memory=max(256 << 20, round(working_set * self.memory_share)),
            storage=2 * working_set + (256 << 20),
        )


def measure(plan: Plan, sides: Sequence[str], rounds: int, directory: Path | None, progress: Progress) -> Iterator[Run]:
    """Yield a run for each round and side, sides in an order that rotates. Sides that fail are told and left out."""
    failed: set[str] = set()
    for number in range(rounds):
        at = number % len(sides)
        for side in (*sides[at:], *sides[:at]):
            if side in failed:
                continue
            say = functools.partial(_say, progress, f"round {number + 1} of {rounds}, {side}")
            try:
                yield run_side(plan, side, number, directory, say)
            except SideError as error:
                failed.add(side)
                say(f"FAILED, left out from here on: {error}")


def run_side(plan: Plan, side: str, number: int, directory: Path | None, say: Progress) -> Run:
    """Run a side once. Raises SideError."""
    with job_of(plan, side, number, directory) as (job, scratch, environment):
        return _run_process(job, scratch, environment, say)


@contextlib.contextmanager
def job_of(
    plan: Plan, side: str, number: int, directory: Path | None
) -> Iterator[tuple[dict[str, Any], Path, dict[str, str]]]:
    """Give what an engine's process is to be told, a directory for it, and its environment, as long as it runs."""
    engine_id = f"serving-{uuid.uuid4().hex[:12]}"
    with contextlib.ExitStack() as stack:
        scratch = Path(tempfile.mkdtemp(prefix="serving-"))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        kv = Path(tempfile.mkdtemp(prefix="serving-kv-", dir=directory))
        stack.callback(shutil.rmtree, kv, ignore_errors=True)
        stack.callback(remove_shared_memory, engine_id)
        bucket: dict[str, Any] | None = None
        environment = engine_environment(scratch)
        if needs_bucket(side):
            server = stack.enter_context(RcloneServer(parent=directory))
            keys = {"access_key": server.access_key_id, "secret_key": server.secret_access_key}
            bucket = {**server.tier(prefix="kv"), **keys}
            environment |= server.environment
        if side == "vllm-obj":
            environment["NIXL_TELEMETRY_ENABLE"] = "y"  # vLLM 0.32 asks for it, and its engine ends without it
        options = {
            "model": plan.model or str(write_model(scratch / "model", plan.shape, plan.pace, plan.longest_tokens)),
            "load_format": "auto" if plan.model and not plan.dummy_weights else "dummy",
            "dtype": "bfloat16",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "disable_log_stats": False,
            "seed": 0,
            "block_size": BLOCK_TOKENS,
            "max_model_len": plan.longest_tokens,
            "max_num_batched_tokens": plan.batched_tokens,
            "max_num_seqs": 64,
            # As on one GPU: scheduler and rank in one process. By its name, for the CPU platform refuses "uni".
            "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
            "kv_cache_memory_bytes": plan.room().gpu,
            **engine_options(side, plan.room(), kv / "kv", bucket, engine_id),
        }
        job = {
            "plugin": str(write_plugin(scratch / "plugin")),
            "side": side,
            "round": number,
            "options": options,
            "workload": asdict(plan.workload),
            "rate_per_s": plan.rate_per_s,
            "at_a_time": plan.at_a_time,
        }
        yield job, scratch, environment


def engine_environment(scratch: Path) -> dict[str, str]:
    """What an engine starts with, beside what this process has."""
    return {
        **quick_environment(scratch=scratch),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or the threads of a side would share the first core
        "OMP_WAIT_POLICY": "passive",  # spinning threads are a CPU backend's, not a GPU's
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def _say(progress: Progress, where: str, line: str) -> None:
    progress(f"{where}: {line}")


def remove_shared_memory(engine_id: str) -> None:
    """Remove what vLLM's tiers leave behind: files of gigabytes in memory, under the engine's name."""
    for path in glob.glob(f"/dev/shm/*{engine_id}*"):
        with contextlib.suppress(OSError):
            os.unlink(path)


def _run_process(job: Mapping[str, Any], scratch: Path, environment: Mapping[str, str], say: Progress) -> Run:
    log = scratch / "log"
    with log.open("ab") as log_file:
        process = start_process(log_file, {**os.environ, **environment})
    assert process.stdin is not None
    assert process.stdout is not None
    limit = threading.Timer(RUN_LIMIT_S, end_process, (process.pid,))
    limit.daemon = True
    limit.start()
    run: Run | None = None
    try:
        with contextlib.suppress(BrokenPipeError):  # it is gone already: its log says why
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        for line in process.stdout:
            told = json.loads(line)
            if "said" in told:
                say(told["said"])
            else:
                run = Run.from_json(told["run"])
                break
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S if run is not None else 1)
    finally:
        limit.cancel()
        end_process(process.pid)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
    if run is None:
        raise SideError(causes(log.read_text(errors="replace")))
    return run


def start_process(log_file: BinaryIO, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start ``drive`` as the leader of a process group of its own, its stderr in ``log_file``."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.serving.drive"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log_file,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    )


def end_process(group: int) -> None:
    """End every process of a side."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def causes(log: str) -> str:
    """The errors that a log tells, each once, or its end."""
    lines = log.splitlines()
    errors = [line for line in lines if _ERROR.search(line)]
    return "\n".join(dict.fromkeys(errors) if errors else lines[-20:])
