"""Runs each side in processes of its own (``drive``), round after round, and cleans up behind it.

Threading: one thread. Ownership: a side's processes, scratch files and shared memory are gone when its run returns.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.serving.model import BLOCK_TOKENS, SHAPES, Pace, Shape, write_model, write_plugin
from benchmarks.serving.report import Run
from benchmarks.serving.sides import CHUNK_TOKENS, Room, engine_options
from benchmarks.serving.workloads import Spec, longest_tokens, make, unique_tokens
from examples.demo.engine import quick_environment
from examples.s3_server import RcloneServer

ROOT = Path(__file__).resolve().parents[2]
RUN_LIMIT_S = 900.0
SLEEPING_PLUGIN = "[vllm.general_plugins]\nnixl_offload_serving = benchmarks.serving.sleeping:register\n"
_ERROR = re.compile(r"^(\([^)]*\) )?([A-Z]+ .*\] )?[\w.]*(Error|Exception)\b")
Progress = Callable[[str], None]


class SideError(Exception):
    """A side did not start, or did not answer. The message has the errors of its log."""


@dataclass(frozen=True)
class Plan:
    """All that a run depends on, but the side."""

    workload: Spec
    shape: Shape = SHAPES["8b"]
    model: str = ""
    """A real one, of that shape, by its directory or name; empty: one that only takes time."""
    pace: Pace = field(default_factory=Pace)
    at_a_time: int = 4
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
        """Return how many bytes there are. The GPU's cache holds the longest request at least."""
        working_set, token_bytes = self.working_set_bytes, self.shape.token_bytes
        least = (self.longest_tokens + 2 * BLOCK_TOKENS) * token_bytes
        return Room(
            gpu=max(least, round(working_set * self.gpu_share)),
            memory=max(256 << 20, round(working_set * self.memory_share)),
            storage=2 * working_set + (256 << 20),
        )

    def about(self) -> list[str]:
        """Return what the figures depend on, in sentences."""
        spec, shape, room = self.workload, self.shape, self.room()
        pace = f"a step takes {self.pace.step_s * 1e3:g} ms and {self.pace.token_s * 1e3:g} ms a token"
        return [
            f"{shape.note}: {shape.token_bytes >> 10} KiB of KV a token; {'computed' if self.model else pace}, in "
            f"steps of at most {self.batched_tokens} tokens",
            f"{spec.kind}: {spec.sessions} × {spec.turns} turns of {spec.tokens} + {spec.answer_tokens} tokens, "
            f"{self.at_a_time} at a time",
            f"working set {self.working_set_bytes / 1e9:.1f} GB; GPU cache {room.gpu / 1e9:.1f} GB, memory "
            f"{room.memory / 1e9:.1f} GB, storage {room.storage / 1e9:.1f} GB; chunks of {CHUNK_TOKENS} tokens",
        ]


def measure(plan: Plan, sides: Sequence[str], rounds: int, directory: Path | None, progress: Progress) -> Iterator[Run]:
    """Yield a run for each round and side, sides in an order that rotates. A side that fails is left out after that."""
    failed: set[str] = set()
    for number in range(rounds):
        at = number % len(sides)
        for side in (*sides[at:], *sides[:at]):
            if side in failed:
                continue
            try:
                yield run_side(plan, side, number, directory)
            except SideError as error:
                failed.add(side)
                progress(f"round {number + 1} of {rounds}, {side}: FAILED, left out from here on: {error}")


def run_side(plan: Plan, side: str, number: int, directory: Path | None) -> Run:
    """Run a side once. Raises SideError."""
    with job_of(plan, side, number, directory) as (job, scratch, environment):
        job_file, run_file, log = (scratch / name for name in ("job", "run", "log"))
        job_file.write_text(json.dumps(job) + "\n")
        with job_file.open() as stdin, run_file.open("w") as stdout, log.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.serving.drive"],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=ROOT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):  # the log says how far it came
                    process.wait(RUN_LIMIT_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        run = run_file.read_text()
        if not run:
            lines = log.read_text(errors="replace").splitlines()
            errors = [line for line in lines if _ERROR.search(line)]
            raise SideError("\n".join(dict.fromkeys(errors) if errors else lines[-20:]))
        return Run.of(json.loads(run))


@contextlib.contextmanager
def job_of(
    plan: Plan, side: str, number: int, directory: Path | None
) -> Iterator[tuple[dict[str, Any], Path, dict[str, str]]]:
    """Give the job of an engine's process, a directory for it, and its environment, as long as it runs."""
    engine_id = f"serving-{uuid.uuid4().hex[:12]}"
    with contextlib.ExitStack() as stack:
        scratch = Path(tempfile.mkdtemp(prefix="serving-"))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        kv = Path(tempfile.mkdtemp(prefix="serving-kv-", dir=directory))
        stack.callback(shutil.rmtree, kv, ignore_errors=True)
        stack.callback(remove_shared_memory, engine_id)
        bucket: dict[str, Any] | None = None
        environment = {
            **quick_environment(scratch=scratch),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or the threads of a side would share the first core
            "OMP_WAIT_POLICY": "passive",  # spinning threads are a CPU backend's, not a GPU's
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        if side.endswith("s3"):
            server = stack.enter_context(RcloneServer(parent=directory))
            bucket = server.tier(prefix="kv")
            environment |= server.environment
        options = {
            "model": plan.model or str(write_model(scratch / "model", plan.shape, plan.pace, plan.longest_tokens)),
            "load_format": "auto" if plan.model else "dummy",
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
            "plugin": str(write_plugin(scratch / "plugin", "nixl_offload_serving", SLEEPING_PLUGIN)),
            "side": side,
            "round": number,
            "options": options,
            "workload": asdict(plan.workload),
            "at_a_time": plan.at_a_time,
        }
        yield job, scratch, environment


def remove_shared_memory(engine_id: str) -> None:
    """Remove what vLLM's tiers leave behind: files of gigabytes in memory, under the engine's name."""
    for path in glob.glob(f"/dev/shm/*{engine_id}*"):
        with contextlib.suppress(OSError):
            os.unlink(path)
