"""A vLLM engine as a process of its own, driven over pipes: one JSON object per line in, one per line out.

The other end is ``examples.demo.engine.Engine``. A process of its own makes "stop the engine, start a new one" mean
what it says, and lets a test kill it at any moment. End of input is a clean shutdown: no engine outlives its owner.

Threading: one thread reads a request, does it, answers. What vLLM prints goes to stderr: stdout is the protocol.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

Reply = dict[str, Any]

QUIET_S = 0.5
"""An engine in processes of its own is called idle when its byte counters have not moved for this long."""

OPENING_S = 15.0
"""An engine in processes of its own is asked no later than this, whether or not its tiers are open."""


class EngineHost:
    """Owns one ``vllm.LLM``. Every public method is an operation of the protocol: keyword arguments in, JSON out."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm: Any = LLM(**options)
        self._in_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") == "0"
        self._abandoned = 0
        if "kv_transfer_config" in options:
            # A server has opened its tiers before it gets its first request; this engine only steps now.
            if not self._in_process:
                self._wait_for_a_tier()
            self.settle()

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 16,
        together: bool = False,
        timeout_s: float | None = None,
        transfer_params: dict[str, Any] | None = None,
        adapter: dict[str, Any] | None = None,
        salt: str | None = None,
    ) -> Reply:
        """Answer token-id prompts greedily, one after the other or, with ``together``, as one batch.

        ``transfer_params`` are each request's ``kv_transfer_params``, ``adapter`` the fields of its ``LoRARequest``,
        ``salt`` its ``cache_salt``.

        Each answer: ``tokens``, ``logprobs`` of the chosen tokens, ``cached_tokens`` (prompt tokens that were not
        computed), ``ttft_s``, ``total_s``, and, unless ``together``, how far vLLM's counters moved (``counters``).
        """
        if together:
            return {"answers": self._generate(prompts, max_tokens, transfer_params, adapter, salt)}
        answers = []
        for prompt in prompts:
            before = self._counters()
            [answer] = self._generate([prompt], max_tokens, transfer_params, adapter, salt)
            after = self._counters()
            answer["counters"] = {name: value - before.get(name, 0) for name, value in after.items()}
            answers.append(answer)
        return {"answers": answers}

    def metrics(self) -> Reply:
        """All of vLLM's counters and gauges, by name, summed over their labels."""
        return {"metrics": self._counters(gauges=True)}

    def labelled(self, name: str) -> Reply:
        """The counters or gauges of one name: ``values`` are pairs of labels and value."""
        found = [metric for metric in self._llm.get_metrics() if metric.name == name]
        return {"values": [[dict(metric.labels), metric.value] for metric in found]}

    def reset_prefix_cache(self, connector: bool = False) -> Reply:
        """Make vLLM forget its prefix cache (with ``connector`` the connector's, too). ``done``: whether it did."""
        return {"done": self._llm.reset_prefix_cache(reset_connector=connector)}

    def reset_connector_alone(self) -> Reply:
        """Have the connector forget everything, and vLLM nothing (in-process only)."""
        return {"done": self._llm.llm_engine.engine_core.engine_core.scheduler.reset_connector_cache()}

    def settle(self, deadline_s: float = 60.0) -> Reply:
        """Step the engine until nothing is left to do, background stores included. ``idle``: False at the deadline."""
        deadline = time.monotonic() + deadline_s
        if self._in_process:
            engine = self._llm.llm_engine
            scheduler = engine.engine_core.engine_core.scheduler
            while True:
                while scheduler.has_requests():
                    if time.monotonic() > deadline:
                        return {"idle": False}
                    engine.step()
                    time.sleep(0.001)
                half = getattr(scheduler.connector, "connector_scheduler", None)
                if half is None or not half.manager.has_pending_work():
                    return {"idle": True}
                time.sleep(0.02)
                self._generate([[2, 3, 4]], 1)  # storage is slow, and an idle engine waits for it only so long
        quiet_since, last = time.monotonic(), self._transferred()
        while time.monotonic() - quiet_since < QUIET_S:
            if time.monotonic() > deadline:
                return {"idle": False}
            self._generate([[2, 3, 4]], 1)  # the frontend learns the counters only with the answer to a request
            now = self._transferred()
            if now != last:
                quiet_since, last = time.monotonic(), now
            time.sleep(0.05)
        return {"idle": True}

    def _wait_for_a_tier(self) -> None:
        """Step until the ranks have reported how they reach a tier, for up to ``OPENING_S``."""
        deadline = time.monotonic() + OPENING_S
        while time.monotonic() < deadline:
            self._generate([[2, 3, 4]], 1)
            if self._counters(gauges=True).get("vllm:nixl_offload_tier_info", 0):
                return
            time.sleep(0.05)

    def abandon(self, prompts: list[list[int]], steps: int) -> Reply:
        """Begin to answer prompts, all at once, take ``steps`` steps of the engine and abort them (in-process only)."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        self._abandoned += 1
        names = [f"abandoned-{self._abandoned}-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(max_tokens=64, detokenize=False))
        for _ in range(steps):
            engine.step()
        engine.abort_request(names)
        return {}

    def generate_through_resets(self, prompts: list[list[int]], max_tokens: int, every: int, most: int) -> Reply:
        """Answer prompts as one batch, and interrupt it over and over (in-process only). Says how often: ``resets``.

        Whenever all of them run, ``every`` steps after the last time, they are preempted and vLLM's prefix cache is
        emptied, ``most`` times, as ``/reset_prefix_cache?reset_running_requests=true`` does.
        """
        engine = self._llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        for number, prompt in enumerate(prompts):
            engine.add_request(f"interrupted-{number}", {"prompt_token_ids": prompt}, _sampling(max_tokens))
        start, resets, steps, finished = time.perf_counter(), 0, 0, {}
        while engine.has_unfinished_requests():
            if steps >= every and resets < most and len(scheduler.running) == len(prompts) - len(finished):
                resets, steps = resets + self._llm.reset_prefix_cache(reset_running_requests=True), 0
            finished.update((output.request_id, output) for output in engine.step() if output.finished)
            steps += 1
        total_s = time.perf_counter() - start
        answers = [_answer(finished[f"interrupted-{number}"], total_s) for number in range(len(prompts))]
        return {"answers": answers, "resets": resets}

    def worker(self, method: str, args: list[Any] | None = None) -> Reply:
        """Call a method of the worker (or of its ``worker_extension_cls``) on every rank."""
        return {"results": self._llm.collective_rpc(method, args=tuple(args or ()))}

    def about(self) -> Reply:
        """What is running: device, and the size of the KV cache."""
        from vllm import __version__
        from vllm.platforms import current_platform

        cache = self._llm.llm_engine.vllm_config.cache_config
        return {
            "vllm": __version__,
            "device": current_platform.get_device_name(),
            "block_size": cache.block_size,
            "gpu_blocks": cache.num_gpu_blocks,
        }

    def shutdown(self, timeout_s: float = 60.0) -> Reply:
        """Stop the engine and its processes cleanly; the connector drains what it will."""
        self._llm.llm_engine.engine_core.shutdown(timeout=timeout_s)
        return {}

    def add_adapter(self, adapter: dict[str, Any]) -> Reply:
        """Load a LoRA adapter, as ``/v1/load_lora_adapter`` does: the fields of a ``LoRARequest``."""
        return {"done": self._llm.llm_engine.add_lora(_adapter(adapter))}

    def _generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        transfer_params: dict[str, Any] | None = None,
        adapter: dict[str, Any] | None = None,
        salt: str | None = None,
    ) -> list[Reply]:
        sampling = _sampling(max_tokens, transfer_params)
        salted = {} if salt is None else {"cache_salt": salt}
        asked, lora = [{"prompt_token_ids": prompt, **salted} for prompt in prompts], _adapter(adapter)
        start = time.perf_counter()
        outputs = self._llm.generate(asked, sampling, use_tqdm=False, lora_request=lora)
        total_s = time.perf_counter() - start
        return [_answer(output, total_s) for output in outputs]

    def _counters(self, *, gauges: bool = False) -> dict[str, float]:
        totals: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if type(metric).__name__ in ("Counter", "Gauge") if gauges else type(metric).__name__ == "Counter":
                totals[metric.name] = totals.get(metric.name, 0) + metric.value
                if source := metric.labels.get("source"):  # where cached tokens came from
                    name = f"{metric.name}:{source}"
                    totals[name] = totals.get(name, 0) + metric.value
        return totals

    def _transferred(self) -> tuple[float, ...]:
        counters = self._counters()
        return tuple(counters.get(f"vllm:kv_offload_{way}_bytes", 0) for way in ("store", "load"))


def _sampling(max_tokens: int, transfer_params: dict[str, Any] | None = None) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        logprobs=1,
        detokenize=False,
        ignore_eos=True,
        extra_args={"kv_transfer_params": transfer_params} if transfer_params else None,
    )


def _adapter(adapter: dict[str, Any] | None) -> Any:
    if adapter is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(**adapter)


def _answer(output: Any, total_s: float) -> Reply:
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    chosen = zip(completion.logprobs or [], tokens, strict=True)
    return {
        "tokens": tokens,
        "logprobs": [by_token[token].logprob for by_token, token in chosen],
        "finish_reason": completion.finish_reason,
        "cached_tokens": output.num_cached_tokens or 0,
        "ttft_s": output.metrics.first_token_latency if output.metrics else None,
        "total_s": total_s,
        "transfer_params": output.kv_transfer_params,
    }


def main(make: Callable[..., EngineHost] = EngineHost) -> int:
    """Serve requests from stdin until ``shutdown`` or end of input. Exit code 0 after a clean shutdown.

    ``make`` makes the host from what ``start`` is called with.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    host: EngineHost | None = None
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("op")
        reply: Reply
        try:
            if operation == "start":
                host = make(**request)
                reply = {"ok": True, **host.about()}
            elif host is None or operation.startswith("_"):
                raise ValueError(f"cannot do {operation!r} now")
            else:
                reply = {"ok": True, **getattr(host, operation)(**request)}
        except Exception as error:  # noqa: BLE001 - the reply says what went wrong
            traceback.print_exc()
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if operation == "shutdown":
            return 0
    if host is not None:
        host.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
