"""One side's vLLM and the clients that ask it, in a process of its own; ``turns`` starts it.

The engine is what ``vllm serve`` runs, ``AsyncLLM`` with the engine core in another process; only HTTP is left out.
A job comes as a JSON line on stdin, the run goes as one to stdout.

Threading: one asyncio loop.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks.serving import workloads
from benchmarks.serving.report import Record, Run
from benchmarks.serving.workloads import Session, Spec

WARM_UP_TOKENS = 600
QUIET_S = 0.5
START_LIMIT_S = 60.0
AFTER_S = 1.0
"""How long after the last answer processor time is still counted: for what is written behind it."""


class Driver:
    """Asks one engine all of a workload, once."""

    def __init__(self, engine: Any, workload: Sequence[Session]) -> None:
        self._engine, self._workload = engine, workload
        self._answers: list[list[list[int]]] = [[] for _ in workload]
        self._begin_s = time.perf_counter()
        self.records: list[Record] = []

    async def run(self, at_a_time: int) -> None:
        """Keep so many requests under way. A session's next turn queues up behind all that wait."""
        ready = [(number, 0) for number in range(len(self._workload))]
        running: set[asyncio.Task[tuple[int, int]]] = set()
        while ready or running:
            while ready and len(running) < at_a_time:
                running.add(asyncio.create_task(self._ask(*ready.pop(0))))
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for number, turn in sorted(task.result() for task in done):
                if turn + 1 < len(self._workload[number].turns):
                    ready.append((number, turn + 1))

    async def _ask(self, number: int, turn: int) -> tuple[int, int]:
        session = self._workload[number]
        prompt = session.prompt(turn, self._answers[number] if session.keeps_history else ())
        sent_s = time.perf_counter()
        times, answer, cached = await ask(self._engine, f"{number}-{turn}", prompt, session.turns[turn].answer_tokens)
        self._answers[number].append(answer)
        self.records.append(
            Record(
                session=number,
                turn=turn,
                prompt_tokens=len(prompt),
                repeated_tokens=session.repeated_tokens(turn),
                cached_tokens=cached,
                sent_s=sent_s - self._begin_s,
                ttft_s=times[0] - sent_s,
                gaps_s=tuple(after - before for before, after in itertools.pairwise(times)),
            )
        )
        return number, turn


async def ask(engine: Any, name: str, prompt: list[int], answer_tokens: int) -> tuple[list[float], list[int], int]:
    """Ask one request. Returns when each token came, the tokens, and how many prompt tokens were cached."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=answer_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    times: list[float] = []
    answer: list[int] = []
    cached = 0
    async for output in engine.generate({"prompt_token_ids": prompt}, sampling, name):
        now = time.perf_counter()
        tokens = output.outputs[0].token_ids
        times += [now] * len(tokens)
        answer += tokens
        cached = max(cached, output.num_cached_tokens or 0)
    return times, answer, cached


def counters() -> dict[str, float]:
    """Return the counters of vLLM in this process, summed over labels."""
    from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

    totals: dict[str, float] = {}
    for metric in get_metrics_snapshot():
        if isinstance(metric, Counter):
            totals[metric.name] = totals.get(metric.name, 0) + metric.value
    return totals


def processor_s() -> float:
    """Return the processor time of this process and all below it, so far."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


async def quiet() -> None:
    """Wait until the engine uses no processor: it has opened, filled and written what it wants."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        before = processor_s()
        await asyncio.sleep(QUIET_S)
        if processor_s() - before < 0.1 * QUIET_S:
            return


async def warm_up(engine: Any) -> None:
    """Let the side open all it has, store something, and load it again."""
    prompt = list(workloads.text(random.Random("warm up"), WARM_UP_TOKENS))
    await ask(engine, "warm-up-0", prompt, 2)
    await quiet()
    await engine.reset_prefix_cache()
    await ask(engine, "warm-up-1", prompt, 2)
    await quiet()
    await ask(engine, "warm-up-2", [2, 3, 4], 1)  # the frontend learns the counters with an answer
    await engine.reset_prefix_cache()


async def drive(job: dict[str, Any]) -> Run:
    """Do a job."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**job["options"]))
    try:
        await warm_up(engine)
        return await measure(engine, job)
    finally:
        engine.shutdown()


async def measure(engine: Any, job: dict[str, Any]) -> Run:
    """Ask a warm engine all of the job's workload."""
    workload = workloads.make(Spec(**job["workload"]))
    load_before, before, used_s = os.getloadavg()[0], counters(), processor_s()
    driver = Driver(engine, workload)
    await driver.run(job["at_a_time"])
    await asyncio.sleep(AFTER_S)
    used_s = processor_s() - used_s
    await ask(engine, "after", [2, 3, 4], 1)
    after = counters()

    def moved(name: str) -> int:
        return round(after.get(name, 0) - before.get(name, 0))

    return Run(
        side=job["side"],
        round=job["round"],
        records=tuple(driver.records),
        processor_s=used_s,
        loaded_bytes=moved("vllm:kv_offload_load_bytes"),
        stored_bytes=moved("vllm:kv_offload_store_bytes"),
        external_tokens=moved("vllm:external_prefix_cache_hits"),
        load_before=load_before,
    )


def main() -> int:
    """Do the job that stdin tells in a line."""
    job = json.loads(sys.stdin.readline())
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what vLLM prints goes to the log
    sys.path.insert(0, job["plugin"])  # processes that this one spawns get its path
    out.write(json.dumps(asdict(asyncio.run(drive(job)))) + "\n")
    out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
