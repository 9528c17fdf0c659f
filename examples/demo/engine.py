"""The near end of ``engine_process``: starts a vLLM engine in its own process group and talks to it with deadlines.

Threading: one owner thread per ``Engine``. Ownership: ``Engine`` owns the whole process group; ``close`` (or leaving
the ``with`` block) ends every process in it, in any case.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

ROOT = Path(__file__).resolve().parents[2]

QUICK_OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "seed": 0,
}
"""Options every engine here gets: no tokenizer, no compilation, and metrics."""


class EngineError(Exception):
    """The engine said no, died, or did not answer in time. The message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the chosen tokens, as exact floats: compared bit by bit."""
    cached_tokens: int
    """Prompt tokens whose KV was not computed: from the GPU's prefix cache and from the connector together."""
    ttft_s: float
    """Time to first token, as vLLM measured it."""
    total_s: float
    finish_reason: str
    counters: dict[str, float] = field(default_factory=dict)
    """How far vLLM's counters moved; empty for a batch."""
    transfer_params: dict[str, Any] | None = None
    """What a connector tells the engine that goes on with this prompt."""

    @property
    def external_hit_tokens(self) -> int:
        """Prompt tokens that came from the connector."""
        return int(self.counters.get("vllm:external_prefix_cache_hits", 0))

    @property
    def loaded_bytes(self) -> int:
        """Bytes that the connector loaded for this prompt."""
        return int(self.counters.get("vllm:kv_offload_load_bytes", 0))

    def same_as(self, other: Answer) -> bool:
        """Whether tokens and logprobs are the same, to the last bit."""
        return self.tokens == other.tokens and self.logprobs == other.logprobs


def quick_environment(*, scratch: Path, in_process: bool = False) -> dict[str, str]:
    """Environment for an engine that starts fast, asks nobody, and leaves its caches and sockets in ``scratch``.

    ``scratch`` needs a short path (sockets: 107 characters in all), as ``tempfile.mkdtemp`` gives.
    ``in_process`` keeps scheduler and worker in the engine's one process: half the start-up time (one import of torch
    instead of three), and a kill takes all of it at once.
    """
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_CACHE_ROOT": str(scratch / "vllm-cache"),
        "VLLM_CONFIG_ROOT": str(scratch / "vllm-config"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor-cache"),
        "VLLM_RPC_BASE_PATH": str(scratch),
        "TMPDIR": str(scratch),
        "XDG_CACHE_HOME": str(scratch / "cache"),
        "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled: the first request would wait 2 to 18 s for a C++ compiler
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
    }


def transfer_config(config: Mapping[str, Any] | str) -> dict[str, Any]:
    """What ``--kv-transfer-config`` takes, for a config file's path or an inline config."""
    return {
        "kv_connector": "NixlOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": config if isinstance(config, str) else dict(config)},
    }


class Engine:
    """A running engine. Every call raises EngineError when the engine fails, dies or misses the deadline."""

    answer_tokens = 16
    """Length of answers, unless a call says otherwise."""
    module = "examples.demo.engine_process"
    """What runs in the engine's process."""

    def __init__(
        self,
        model: Path | str,
        *,
        connector: Mapping[str, Any] | str | None,
        log: Path,
        environment: Mapping[str, str],
        start_timeout_s: float = 300.0,
        **options: Any,
    ) -> None:
        """Start an engine on ``model`` and wait for it. ``options`` are ``vllm.LLM``'s; it appends to ``log``."""
        self.log = log
        self._pending = b""
        search_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with log.open("ab") as log_file:
            self._process = self._spawn(log_file, {**os.environ, **environment, "PYTHONPATH": search_path})
        options = {"model": str(model), **QUICK_OPTIONS, **options}
        if connector is not None:
            options["kv_transfer_config"] = transfer_config(connector)
        try:
            self.about = self.call("start", options=options, timeout_s=start_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the process that the engine's other processes descend from; also their process group."""
        return self._process.pid

    def generate(
        self,
        prompts: list[list[int]],
        *,
        max_tokens: int | None = None,
        together: bool = False,
        timeout_s: float = 120.0,
        transfer_params: Mapping[str, Any] | None = None,
        adapter: Mapping[str, Any] | None = None,
        salt: str | None = None,
    ) -> list[Answer]:
        """Answer prompts greedily, one after the other or as one batch. ``transfer_params``: hints of each request.
        ``adapter``: the fields of the ``LoRARequest`` of each. ``salt``: the ``cache_salt`` of each.

        ``max_tokens`` defaults to ``answer_tokens``.
        """
        reply = self.call(
            "generate",
            prompts=prompts,
            max_tokens=self.answer_tokens if max_tokens is None else max_tokens,
            together=together,
            timeout_s=timeout_s,
            transfer_params=transfer_params,
            adapter=adapter,
            salt=salt,
        )
        return [_answer(answer) for answer in reply["answers"]]

    def generate_through_resets(
        self, prompts: list[list[int]], *, max_tokens: int, every: int, most: int = 1000, timeout_s: float = 120.0
    ) -> tuple[list[Answer], int]:
        """Answer prompts as one batch that every so many steps, ``most`` times, is preempted whole, vLLM's prefix cache
        emptied.

        In-process engines only. Also returns how often that was.
        """
        asked = {"prompts": prompts, "max_tokens": max_tokens, "every": every, "most": most}
        reply = self.call("generate_through_resets", timeout_s=timeout_s, **asked)
        return [_answer(answer) for answer in reply["answers"]], reply["resets"]

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by name, summed over labels."""
        values: dict[str, float] = self.call("metrics")["metrics"]
        return values

    def labelled(self, name: str, label: str, **having: str) -> dict[str, float]:
        """Counters or gauges of one name that have some labels, summed by the value of one label."""
        values: dict[str, float] = {}
        for labels, value in self.call("labelled", name=name)["values"]:
            if having.items() <= labels.items():
                values[labels[label]] = values.get(labels[label], 0) + value
        return values

    def stored_bytes(self) -> int:
        """Return the bytes that the connector has stored, by vLLM's metrics."""
        return int(self.metrics().get("vllm:kv_offload_store_bytes", 0))

    def reset_prefix_cache(self, *, connector: bool = False) -> bool:
        """Empty vLLM's prefix cache (with ``connector`` the connector's, too); False if blocks were still in use."""
        return bool(self.call("reset_prefix_cache", connector=connector)["done"])

    def settle(self, *, deadline_s: float = 60.0) -> bool:
        """Wait until the engine has nothing left to do, background stores included; False at the deadline."""
        return bool(self.call("settle", deadline_s=deadline_s, timeout_s=deadline_s + 30)["idle"])

    def abandon(self, prompts: list[list[int]], *, steps: int) -> None:
        """Begin to answer prompts as one batch and abort them after ``steps`` steps (in-process engines only)."""
        self.call("abandon", prompts=prompts, steps=steps)

    def worker(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every rank's worker."""
        results: list[Any] = self.call("worker", method=method, args=list(args))["results"]
        return results

    def call(self, operation: str, *, timeout_s: float = 60.0, **arguments: Any) -> dict[str, Any]:
        """Send one request and return its reply."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": operation, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EngineError(f"{operation}: the engine is gone ({error}){self._log_tail()}") from error
        reply: dict[str, Any] = json.loads(self._read_line(operation, timeout_s))
        if not reply.pop("ok"):
            raise EngineError(f"{operation}: {reply['error']}{self._log_tail()}")
        return reply

    def stop(self, *, timeout_s: float = 90.0) -> None:
        """Shut down cleanly. Raises EngineError when that takes too long, fails or leaves a process behind.

        In any case no process is left afterwards.
        """
        try:
            self.call("shutdown", timeout_s=timeout_s)
            code = self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise EngineError(f"the engine did not end within {timeout_s:.0f} s{self._log_tail()}") from error
        finally:
            left = self._group_alive(grace_s=5.0)
            self.close()
        if code != 0:
            raise EngineError(f"the engine ended with exit code {code}{self._log_tail()}")
        if left:
            raise EngineError(f"the engine left processes behind{self._log_tail()}")

    def kill(self) -> None:
        """``kill -9`` on every process of the engine, now."""
        self.close()

    def close(self) -> None:
        """End every process of the engine at once. Never raises; idempotent."""
        if self._process.returncode is None or self._group_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _spawn(self, log_file: BinaryIO, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start ``module`` as the leader of a process group of its own, its stderr in ``log_file``."""
        return subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_file,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )

    def _group_alive(self, *, grace_s: float = 0.0) -> bool:
        """Whether a process of the group is left after ``grace_s``. The leader must have been waited for."""
        deadline = time.monotonic() + grace_s
        while True:
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return False
            if time.monotonic() >= deadline:
                return True
            time.sleep(0.05)

    def _read_line(self, operation: str, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise EngineError(f"{operation}: no answer within {timeout_s:.0f} s{self._log_tail()}")
            piece = os.read(descriptor, 1 << 20)
            if not piece:
                raise EngineError(f"{operation}: the engine died{self._log_tail()}")
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _log_tail(self, lines: int = 40) -> str:
        text = self.log.read_text(errors="replace").splitlines()[-lines:] if self.log.exists() else []
        return "\n--- end of the engine's log ---\n" + "\n".join(text)


def _answer(reply: dict[str, Any]) -> Answer:
    return Answer(**{**reply, "tokens": tuple(reply["tokens"]), "logprobs": tuple(reply["logprobs"])})
