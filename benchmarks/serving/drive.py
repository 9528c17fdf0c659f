"""One side's vLLM and the clients that ask it, in a process of its own; ``turns`` starts it.

The engine is what ``vllm serve`` runs, ``AsyncLLM`` with the engine core in another process; only HTTP is left out.
Requests come as JSON lines on stdin, replies go as lines to stdout.

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
from dataclasses import asdict
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks.serving import workloads
from benchmarks.serving.report import Record, Run
from benchmarks.serving.workloads import Session, Spec

WARM_UP_TOKENS = 600
QUIET_S = 0.5
AFTER_S = 1.0
"""How long after the last answer processor time is still counted: for what is written behind it."""


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
    times, answer, cached = list[float](), list[int](), 0
    async for output in engine.generate({"prompt_token_ids": prompt}, sampling, name):
        now = time.perf_counter()
        tokens = output.outputs[0].token_ids
        times += [now] * len(tokens)
        answer += tokens
        cached = max(cached, output.num_cached_tokens or 0)
    return times, answer, cached


def processor_s() -> float:
    """Return the processor time of this process and all below it, so far."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


async def quiet(limit_s: float = 60.0) -> None:
    """Wait until the engine uses no processor: it has opened, filled and written what it wants."""
    deadline = time.monotonic() + limit_s
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
    await engine.reset_prefix_cache()


async def measure(engine: Any, spec: Spec, at_a_time: int) -> Run:
    """Ask a warm engine all of a workload. A turn queues up behind all that wait to be among ``at_a_time``."""
    free, records = asyncio.Semaphore(at_a_time), list[Record]()
    load_before, used_s, begin_s = os.getloadavg()[0], processor_s(), time.perf_counter()

    async def talk(number: int, session: Session) -> None:
        answers: list[list[int]] = []
        for turn, asked in enumerate(session.turns):
            prompt = session.prompt(turn, answers)
            await asyncio.sleep(asked.think_s)
            async with free:
                sent_s = time.perf_counter()
                times, answer, cached = await ask(engine, f"{number}-{turn}", prompt, asked.answer_tokens)
            answers.append(answer)
            records.append(
                Record(
                    prompt_tokens=len(prompt),
                    repeated_tokens=session.repeated_tokens(turn),
                    cached_tokens=cached,
                    sent_s=sent_s - begin_s,
                    ttft_s=times[0] - sent_s,
                    gaps_s=tuple(after - before for before, after in itertools.pairwise(times)),
                )
            )

    await asyncio.gather(*(talk(*each) for each in enumerate(workloads.make(spec))))
    await asyncio.sleep(AFTER_S)
    used_s = processor_s() - used_s
    await quiet()
    return Run("", spec.seed, tuple(records), used_s, load_before)


async def main() -> None:
    """Do what the lines of stdin ask: ``start``, then ``measure`` as often as wanted."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what vLLM prints goes to the log
    engine: Any = None
    while line := await asyncio.to_thread(sys.stdin.readline):
        request, reply = json.loads(line), dict[str, Any]()
        if request["op"] == "start":
            options = request["options"]
            sys.path.insert(0, options.pop("plugin"))  # processes that this one spawns get its path
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
            await warm_up(engine)
        else:
            reply = asdict(await measure(engine, Spec(**request["workload"]), request["at_a_time"]))
        out.write(json.dumps({"ok": True, **reply}) + "\n")
        out.flush()


if __name__ == "__main__":
    asyncio.run(main())
