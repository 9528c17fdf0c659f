"""A two-layer vLLM answers, and answers again from what was offloaded: ``python -m benchmarks.gpu.smoke SIDE DIR``.

Each prompt is computed, then hit in vLLM's prefix cache, then loaded by the connector, twice. The last three compute
the same few tokens behind the same KV, so tokens and logprobs must be the same to the bit. The first is
computed in another shape, and only compared roughly. SIDE: of benchmarks/serving/sides.py. With ``--again`` another
process loads what this one stored.
Threading: one thread beside vLLM's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from benchmarks.gpu.race import LLAMA_SMALL, rung_options
from benchmarks.serving.model import VOCABULARY, write_config
from benchmarks.serving.sides import CHUNK_TOKENS, Room, engine_options

CHUNKS = (2, 3, 6)
"""Of each prompt. It ends 8 tokens behind them, so that both caches hit as many tokens."""
TAIL_TOKENS, ANSWER_TOKENS = 8, 8
QUIET_S, STORE_LIMIT_S = 1.0, 10.0
CLOSE = 0.05
"""Logprobs of bfloat16 that were computed in another order."""

Answer = tuple[list[int], list[float], int]


class Engine:
    """A vLLM in this process."""

    def __init__(self, side: str, directory: Path) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        model = write_config(directory / "model", head_dim=128, **LLAMA_SMALL)
        room = Room(gpu=64 << 20, memory=256 << 20, storage=512 << 20)
        made = rung_options(
            model=str(model),
            max_model_len=2048,
            max_num_batched_tokens=1024,
            kv_cache_memory_bytes=room.gpu,
            **engine_options(side, room, directory / "kv", None, f"{os.environ.get('GPU_CHECK_ID', '')}-{os.getpid()}"),
        )
        extra = made["kv_transfer_config"]["kv_connector_extra_config"]
        if "config" in extra:
            extra["config"]["slow_hits"] = "take"  # this model computes faster than anything loads
        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**made))
        self._core: Any = self._engine.engine_core.engine_core
        self._asked = 0
        self.runner: str = type(self._core.model_executor.driver_worker.worker.model_runner).__module__

    def ask(self, prompt: list[int]) -> Answer:
        """Return the tokens, their logprobs, and how many tokens of the prompt were not computed."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False, logprobs=0
        )
        self._asked += 1
        self._engine.add_request(str(self._asked), {"prompt_token_ids": prompt}, sampling)
        while True:
            for output in self._engine.step():
                if output.finished:
                    done = output.outputs[0]
                    tokens = list(done.token_ids)
                    logprobs = [step[token].logprob for step, token in zip(done.logprobs, tokens, strict=True)]
                    return tokens, logprobs, output.num_cached_tokens

    def forget(self) -> None:
        """Let what is opened and stored come to its end, then empty vLLM's own cache."""
        end_s, quiet_s = time.monotonic() + STORE_LIMIT_S, time.monotonic() + QUIET_S
        while time.monotonic() < min(end_s, quiet_s):
            if self._core.scheduler.has_requests():
                self._core.step_fn()
                quiet_s = time.monotonic() + QUIET_S
            time.sleep(0.002)
        assert self._engine.reset_prefix_cache(), "vLLM's cache is still in use"


def compare(engine: Engine, prompts: list[list[int]], saved: Path) -> list[str]:
    """Ask each prompt four times; return what is wrong, and save the answers for another engine."""
    cold = [engine.ask(prompt) for prompt in prompts]
    hits = [engine.ask(prompt) for prompt in prompts]
    saved.write_text(json.dumps(hits))
    rounds = []
    for _ in range(2):
        engine.forget()
        rounds.append([engine.ask(prompt) for prompt in prompts])
    wrong = []
    for chunks, first, hit, *loads in zip(CHUNKS, cold, hits, *rounds, strict=True):
        if first[2] or any(found[2] != CHUNK_TOKENS * chunks for found in (hit, *loads)):
            wrong.append(f"{chunks} chunks: cached {first[2]}, then {hit[2]}, then {[each[2] for each in loads]}")
        elif any(found != hit for found in loads):
            wrong.append(f"{chunks} chunks: loaded {loads}, but in vLLM's own cache {hit}")
        elif first[0] != hit[0] or max(abs(a - b) for a, b in zip(first[1], hit[1], strict=True)) > CLOSE:
            wrong.append(f"{chunks} chunks: computed {first}, but in vLLM's own cache {hit}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("side")
    parser.add_argument("directory", type=Path, help="of the model and of files of KV")
    parser.add_argument("--again", action="store_true", help="load what an earlier process stored there")
    chosen = parser.parse_args()
    import vllm.v1.engine.llm_engine  # noqa: F401 - what can be done before our turn comes

    sys.stdin.readline()
    begun_s = time.monotonic()
    engine = Engine(chosen.side, chosen.directory)
    start_s = time.monotonic() - begun_s
    source = random.Random(0)
    prompts = [source.choices(range(2, VOCABULARY), k=CHUNK_TOKENS * chunks + TAIL_TOKENS) for chunks in CHUNKS]
    engine.ask(prompts[0][-TAIL_TOKENS:])
    engine.forget()
    saved = chosen.directory / "answers.json"
    if chosen.again:
        wanted = [tuple(answer) for answer in json.loads(saved.read_text())]
        found = [engine.ask(prompt) for prompt in prompts]
        wrong = [f"stored {one}, but found {other}" for one, other in zip(wanted, found, strict=True) if one != other]
    else:
        wrong = compare(engine, prompts, saved)
    words = f"{os.environ.get('GPU_CHECK_ATTENTION')}, {engine.runner}, started in {start_s:.0f} s; "
    words += wrong[0] if wrong else f"{sum(CHUNKS)} chunks loaded, tokens and logprobs as in vLLM's own cache"
    print(json.dumps({"words": words, "wrong": wrong, "start_s": start_s}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
