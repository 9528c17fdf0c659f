"""The far end of the soak: an engine in one process that takes laps of requests, and says what it holds.

Threading: one thread, beside those of the connector. Imported in the engine's process only.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
from typing import Any

from examples.demo.engine_process import EngineHost, Reply
from examples.demo.engine_process import main as serve
from nixl_offload.tiers.slot_tier import SlotTier


class SoakHost(EngineHost):
    """What the engine of the soak is asked, beside what every engine is."""

    _lap = 0

    def lap(self, requests: list[dict[str, Any]], at_a_time: int, salt: str, resets: list[int]) -> Reply:
        """Answer requests, so many at a time, in their order; one with ``after`` waits for the request of that number.

        ``salt`` is each request's cache salt, if it has none of its own: so the same prompts are others to every cache.
        A request with ``abort`` is given up so many steps after it was added. Once a request in ``resets`` was added,
        all that run are preempted and the prefix cache is emptied, as soon as vLLM can: it raises while a request waits
        for its load. Returns of each request its ``outputs`` (none if given up), and ``steps``.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        self._lap += 1
        waiting, running, outputs = list(range(len(requests))), dict[int, int](), dict[int, list[Any]]()
        steps = due = 0
        while waiting or running:
            if due:
                with contextlib.suppress(RuntimeError):
                    due -= self._llm.reset_prefix_cache(reset_running_requests=True)
            ready = [number for number in waiting if requests[number].get("after", -1) not in {*waiting, *running}]
            for number in ready[: at_a_time - len(running)]:
                asked = requests[number]
                sampling = SamplingParams(
                    n=asked["n"],
                    temperature=0.0 if asked["n"] == 1 else 1.0,
                    top_k=0 if asked["n"] == 1 else 1,
                    max_tokens=asked["max_tokens"],
                    logprobs=2,
                    detokenize=False,
                    ignore_eos=True,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                prompt = {"prompt_token_ids": asked["prompt"]}
                if salt:
                    prompt["cache_salt"] = asked.get("salt", salt)
                due += number in resets
                engine.add_request(f"{self._lap}-{number}", prompt, sampling)
                waiting.remove(number)
                running[number] = steps
            for output in engine.step():
                number = int(output.request_id.partition("-")[2])
                if output.finished and number in running:
                    del running[number]
                    outputs[number] = [_told(completion) for completion in output.outputs]
            steps += 1
            for number in [n for n, since in running.items() if steps - since == requests[n].get("abort", -1)]:
                engine.abort_request([f"{self._lap}-{number}"])
                del running[number]
        return {"outputs": [outputs.get(number, []) for number in range(len(requests))], "steps": steps}

    def held(self) -> Reply:
        """Return what is held: with nothing under way, all of it is to be 0. And what libraries have from malloc."""
        half = self._llm.llm_engine.engine_core.engine_core.scheduler.connector.connector_scheduler
        catalog = half.offload_manager.catalog
        pinned = sum(tier._index.held for tier in catalog.tiers if isinstance(tier, SlotTier))
        gc.collect()
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = _Heap
        heap = mallinfo2()
        held = {"tickets": catalog.open_tickets, "slots pinned or being written": pinned}
        return {"held": held, "malloc_bytes": heap.uordblks + heap.hblkhd}


class _Heap(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


def _told(completion: Any) -> dict[str, Any]:
    """Tokens, their logprobs, and by how much each was ahead of the next one."""
    tokens, logprobs, leads = list(completion.token_ids), [], []
    for token, by_token in zip(tokens, completion.logprobs, strict=True):
        values = sorted((entry.logprob for entry in by_token.values()), reverse=True)
        logprobs.append(by_token[token].logprob)
        leads.append(values[0] - values[1])
    return {"tokens": tokens, "logprobs": logprobs, "leads": leads}


def main() -> int:
    """Serve requests from stdin; see ``engine_process``. What kills the process leaves its stacks in the log."""
    from vllm import _custom_ops

    from nixl_offload.tiers.shared import tier

    faulthandler.enable()
    # vLLM's oneDNN keeps 0.3 MiB for each number of tokens that a step had, for long: that would hide leaks of ours.
    _custom_ops._supports_onednn = False
    # All clocks are this machine's. With the five minutes of a fleet, directory and bucket would be asked in vain until
    # the end of a short soak, and no fault would meet a load from them.
    tier.RESET_MARGIN_S = 2.0
    return serve(SoakHost)
