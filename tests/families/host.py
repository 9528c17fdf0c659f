"""An engine process that answers requests of every sort, not only prompts of token ids: salts, embeddings, grammars.

Threading: as ``examples.demo.engine_process``, whose main loop it is.
"""

from __future__ import annotations

import time
from typing import Any

from examples.demo import engine_process
from examples.demo.engine_process import EngineHost, Reply, _answer, _sampling
from tests.vllm.zygote import MAIN_MODULE

ENVIRONMENT = {MAIN_MODULE: __name__}


class FeatureHost(EngineHost):
    """Adds an operation to the protocol."""

    def ask(self, requests: list[dict[str, Any]], max_tokens: int, timeout_s: float | None = None) -> Reply:
        """Answer requests, all at once. Each has ``tokens`` or ``embeds`` (a seed and a count), and may have ``salt``,
        ``priority`` and ``regex``.
        """
        from vllm.sampling_params import StructuredOutputsParams

        prompts, samplings = [], []
        for request in requests:
            if "embeds" in request:
                prompt: dict[str, Any] = {"prompt_embeds": self._embeds(*request["embeds"])}
            else:
                prompt = {"prompt_token_ids": request["tokens"]}
            if "salt" in request:
                prompt["cache_salt"] = request["salt"]
            sampling = _sampling(max_tokens)
            if "regex" in request:
                sampling.structured_outputs = StructuredOutputsParams(regex=request["regex"])
            prompts.append(prompt)
            samplings.append(sampling)
        start = time.perf_counter()
        priority = [request.get("priority", 0) for request in requests]
        outputs = self._llm.generate(prompts, samplings, use_tqdm=False, priority=priority if any(priority) else None)
        return {"answers": [_answer(output, time.perf_counter() - start) for output in outputs]}

    def _embeds(self, seed: int, count: int) -> Any:
        import torch

        width = self._llm.llm_engine.vllm_config.model_config.get_hidden_size()
        return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def main() -> int:
    """Serve requests from stdin."""
    engine_process.EngineHost = FeatureHost  # type: ignore[misc]
    return engine_process.main()
