"""An engine process that answers requests of every sort, not only prompts of token ids: salts and embeddings.

Threading: as ``examples.demo.engine_process``, whose main loop it is.
"""

from __future__ import annotations

import time
from typing import Any

from examples.demo.engine_process import EngineHost, Reply, _answer, _sampling
from examples.demo.engine_process import main as serve
from tests.vllm.zygote import MAIN_MODULE

ENVIRONMENT = {MAIN_MODULE: __name__}


class FeatureHost(EngineHost):
    """Adds an operation to the protocol."""

    def ask(self, requests: list[dict[str, Any]], max_tokens: int, timeout_s: float | None = None) -> Reply:
        """Answer requests, all at once: ``tokens`` or ``embeds`` (a seed and a count), and perhaps ``salt``."""
        prompts = []
        for request in requests:
            if "embeds" in request:
                prompt: dict[str, Any] = {"prompt_embeds": self._embeds(*request["embeds"])}
            else:
                prompt = {"prompt_token_ids": request["tokens"]}
            if "salt" in request:
                prompt["cache_salt"] = request["salt"]
            prompts.append(prompt)
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, _sampling(max_tokens), use_tqdm=False)
        return {"answers": [_answer(output, time.perf_counter() - start) for output in outputs]}

    def _embeds(self, seed: int, count: int) -> Any:
        import torch

        width = self._llm.llm_engine.vllm_config.model_config.get_hidden_size()
        return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def main() -> int:
    """Serve requests from stdin."""
    return serve(FeatureHost)
