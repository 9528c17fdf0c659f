"""Engines on a played device: in this process, stepped by the caller, or in processes of their own.

Threading: one thread steps an engine; a process has one engine. Ownership: ``close`` ends an engine, and
``PlayedWorkshop.close`` all that it started and its zygote.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from examples.demo.engine import QUICK_OPTIONS, Engine, quick_environment, transfer_config
from examples.demo.engine_process import EngineHost, _answer, _sampling
from examples.demo.model import ModelShape, write_model
from tests.vllm.harness import ONE_CORE, Workshop, start_zygote
from tests.vllm.played.plugin import environment
from tests.vllm.zygote import MAIN_MODULE

SHAPE = ModelShape(layers=2, hidden=256, heads=4, kv_heads=2, intermediate=512, vocab=1024, max_tokens=1024)
BLOCK_TOKENS = 16
CHUNK_TOKENS = 64
STEP_TOKENS = 256
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
RUNNERS = {"v1": "0", "v2": "1"}


def options(*, kv_cache_blocks: int, shape: ModelShape = SHAPE) -> dict[str, Any]:
    """Return ``vllm.LLM``'s options for an engine as users run it, but small. One block of ``kv_cache_blocks`` is
    vLLM's null block.
    """
    return {
        **QUICK_OPTIONS,
        "dtype": "bfloat16",
        "max_model_len": shape.max_tokens,
        "max_num_batched_tokens": STEP_TOKENS,
        "max_num_seqs": 8,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": kv_cache_blocks,
        "kv_cache_memory_bytes": 64 << 20,
        "async_scheduling": True,
    }


class PlayedEngine(EngineHost):
    """An engine in this process, whose environment is ``plugin.environment``'s: vLLM was imported with it."""

    def __init__(
        self,
        config: Mapping[str, Any] | None,
        *,
        model: Path,
        runner: str = "v2",
        kv_cache_blocks: int = 256,
        **more: Any,
    ) -> None:
        """Start an engine. ``config`` is our connector's; None: no connector. ``more`` are ``vllm.LLM``'s options."""
        os.environ[RUNNER] = RUNNERS[runner]
        connector = {} if config is None else {"kv_transfer_config": transfer_config(config)}
        super().__init__({"model": str(model), **options(kv_cache_blocks=kv_cache_blocks), **connector, **more})
        self.engine: Any = self._llm.llm_engine
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler

    def add(self, name: str, prompt: list[int], *, max_tokens: int = 4) -> None:
        """Hand in a request. Names are used once."""
        self.engine.add_request(name, {"prompt_token_ids": prompt}, _sampling(max_tokens))

    def step(self) -> dict[str, dict[str, Any]]:
        """Take one step; return the answers of requests that ended in it, by name: tokens, logprobs, cached_tokens."""
        return {output.request_id: _answer(output, 0.0) for output in self.engine.step() if output.finished}

    def abort(self, *names: str) -> None:
        """Give up requests; those that have ended already are passed over."""
        self.engine.abort_request(list(names))

    @property
    def is_busy(self) -> bool:
        """Whether a request has not ended."""
        return bool(self.engine.has_unfinished_requests())


class PlayedWorkshop(Workshop):
    """Starts engines in processes of their own; they are forked from a process that plays the device."""

    def __init__(self) -> None:
        self.entry_point = Path(tempfile.mkdtemp(prefix="nixl-offload-played-"))
        self._played = start_zygote(self.entry_point, **environment(self.entry_point))
        super().__init__(self._played)

    def start_played(
        self, connector: Mapping[str, Any] | None = None, *, runner: str, kv_cache_blocks: int = 256, **more: Any
    ) -> Engine:
        """Start an engine. ``more`` are ``start_engine``'s."""
        surroundings = {**more.pop("environment", {}), **environment(self.entry_point), RUNNER: RUNNERS[runner]}
        made = options(kv_cache_blocks=kv_cache_blocks)
        return self.start_engine(
            SHAPE, connector, environment=surroundings, **{**made, "worker_extension_cls": "", **more}
        )

    def call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Call a function of a module in a forked process, with and for what JSON can say; there it may make a
        ``PlayedEngine``. Raises AssertionError with the end of the process's log if it raised.
        """
        log = self.scratch / f"{function.__name__}.log"
        request = {"module": function.__module__, "function": function.__name__, "arguments": arguments}
        surroundings = {
            **os.environ,
            **quick_environment(scratch=self.scratch, in_process=True),
            **ONE_CORE,
            **environment(self.entry_point),
            MAIN_MODULE: __name__,
        }
        with log.open("ab") as log_file:
            process = self._played.fork(log_file, surroundings, spawns=False)
        with process.stdin, process.stdout:
            process.stdin.write(json.dumps(request).encode())
            process.stdin.close()
            answer = process.stdout.read()
        code = process.wait()
        assert code == 0, f"exit code {code}\n{log.read_text(errors='replace')[-6000:]}"
        return json.loads(answer)

    def model(self, shape: ModelShape = SHAPE) -> Path:
        """Return the directory of the model that engines run."""
        return write_model(self.scratch / f"model-{abs(hash(shape)):x}", shape)

    def close(self) -> None:
        super().close()
        self._played.close()
        shutil.rmtree(self.entry_point, ignore_errors=True)


def main() -> int:
    """Run first in a process of ``PlayedWorkshop.call``: answer one request, on stdin, with JSON on stdout. A traceback
    goes to the log.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    function = getattr(importlib.import_module(request["module"]), request["function"])
    json.dump(function(**request["arguments"]), answers)
    answers.flush()
    return 0
