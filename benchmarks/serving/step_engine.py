"""The far end of ``steps``: one side's engine and what asks it, in one process and one thread, with a meter at the
calls of the connector. A job comes as a JSON line on stdin, what was measured goes as one to stdout.

Threading: one thread, beside those of the connector.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.serving import workloads
from benchmarks.serving.workloads import Session, Spec, Turn

SCHEDULER = {
    "looking requests up": ("get_num_new_matched_tokens",),
    "requests that are given blocks": ("update_state_after_alloc", "get_external_cache_hit_sources"),
    "requests that come and go": ("on_new_request", "request_finished", "request_finished_all_groups"),
    "building the step's message": ("build_connector_meta",),
    "what has ended": ("update_connector_output",),
    "metrics and events": ("get_kv_connector_stats", "take_events"),
}
RANK = {
    "on the rank: what begins": ("handle_preemptions", "bind_connector_metadata", "start_load_kv", "wait_for_save"),
    "on the rank: what has ended": (
        "get_transfer_results",
        "get_block_ids_with_load_errors",
        "get_kv_connector_stats",
        "get_kv_connector_kv_cache_events",
        "build_connector_worker_meta",
        "clear_connector_metadata",
    ),
}
ALL = "all of these"
WHOLE = "the whole step, vLLM's own part included"
WARM_UP_TOKENS = 600
WARM_UP_STEPS_S = 1.0


class Meter:
    """Adds up the processor time of methods, without that of those they call among them."""

    def __init__(self) -> None:
        self.spent_ns: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._is_inside = False

    def watch(self, connector: Any, groups: Mapping[str, Sequence[str]]) -> None:
        """Measure these methods of an object, by group."""
        for group, names in groups.items():
            for name in names:
                setattr(connector, name, self._timed(group, getattr(connector, name), is_lazy=name == "take_events"))

    def _timed(self, group: str, method: Callable[..., Any], *, is_lazy: bool) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._is_inside:
                return method(*arguments, **named)
            self._is_inside = True
            begun_ns = time.thread_time_ns()
            try:
                result = method(*arguments, **named)
                return list(result) if is_lazy else result
            finally:
                self.spent_ns[group] += time.thread_time_ns() - begun_ns
                self.calls[group] += 1
                self._is_inside = False

        return timed


def closed_loop(engine: Any, workload: Sequence[Session], at_a_time: int) -> None:
    """Ask all of a workload, so many requests at a time. A session's next turn queues up behind all that wait."""
    from vllm import SamplingParams

    waiting = [(number, 0) for number in range(len(workload))]
    running: dict[str, tuple[int, int]] = {}
    answers: list[list[list[int]]] = [[] for _ in workload]
    while waiting or running:
        while waiting and len(running) < at_a_time:
            number, turn = waiting.pop(0)
            session = workload[number]
            prompt = session.prompt(turn, answers[number] if session.keeps_history else ())
            tokens = session.turns[turn].answer_tokens
            sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            running[f"{number}-{turn}"] = number, turn
            engine.add_request(f"{number}-{turn}", {"prompt_token_ids": prompt}, sampling)
        for output in engine.step():
            if output.finished:
                number, turn = running.pop(output.request_id)
                answers[number].append(list(output.outputs[0].token_ids))
                if turn + 1 < len(workload[number].turns):
                    waiting.append((number, turn + 1))


def run_engine(job: Mapping[str, Any]) -> dict[str, Any]:
    """Start an engine in this process, ask it everything, and return microseconds per step by group."""
    from vllm import EngineArgs
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(**job["options"]))
    core: Any = engine.engine_core.engine_core  # type: ignore[attr-defined]
    try:
        source = random.Random("warm up")
        warm_up = [Session(workloads.text(source, WARM_UP_TOKENS), (Turn((5,), 2),))] * 2
        for session in warm_up:  # stored, then loaded
            closed_loop(engine, [session], 1)
            _idle(core)
            engine.reset_prefix_cache()
        meter, steps = Meter(), [0]
        schedule = core.scheduler.schedule

        def counted(*arguments: Any, **named: Any) -> Any:
            output = schedule(*arguments, **named)
            steps[0] += output.total_num_scheduled_tokens > 0
            return output

        core.scheduler.schedule = counted
        if core.scheduler.connector is not None:
            meter.watch(core.scheduler.connector, SCHEDULER)
        if has_kv_transfer_group():
            meter.watch(get_kv_transfer_group(), RANK)
        workload = workloads.make(Spec(**job["workload"]))
        begun_s, used_ns = time.perf_counter(), time.thread_time_ns()
        closed_loop(engine, workload, job["at_a_time"])
        used_ns, took_s = time.thread_time_ns() - used_ns, time.perf_counter() - begun_s
        spent = {group: spent_ns / 1e3 / steps[0] for group, spent_ns in meter.spent_ns.items()}
        return {
            "steps": steps[0],
            "step_s": took_s / steps[0],
            "us": {**spent, ALL: sum(spent.values()), WHOLE: used_ns / 1e3 / steps[0]},
            "calls": {group: calls / steps[0] for group, calls in meter.calls.items()},
        }
    finally:
        core.shutdown()


def _idle(core: Any) -> None:
    """Step an idle engine for a moment: what was stored is told, tiers are opened."""
    until_s = time.monotonic() + WARM_UP_STEPS_S
    while time.monotonic() < until_s:
        if core.scheduler.has_requests():
            core.step_fn()
        time.sleep(0.001)


def main() -> int:
    """Do the job that stdin tells in a line."""
    job = json.loads(sys.stdin.readline())
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what vLLM prints goes to the log
    sys.path.insert(0, job["plugin"])
    out.write(json.dumps(run_engine(job)) + "\n")
    out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
