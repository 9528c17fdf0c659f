"""An engine process whose Llama loads the weights of another model after its own, as Ultravox does: those of
``text_model_id`` in its configuration.

Threading: as ``examples.demo.engine_process``.
"""

from __future__ import annotations

import functools
from typing import Any

from tests.vllm import hub_stand_in


def main() -> int:
    """Serve requests from stdin."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.models.llama import LlamaForCausalLM

    make: Any = LlamaForCausalLM.__init__

    @functools.wraps(make)  # vLLM looks at its parameters
    def made(self: Any, *, vllm_config: Any, **more: Any) -> None:
        make(self, vllm_config=vllm_config, **more)
        name = vllm_config.model_config.hf_config.text_model_id
        self.secondary_weights = [DefaultModelLoader.Source(model_or_path=name, revision=None)]

    LlamaForCausalLM.__init__ = made
    return hub_stand_in.main()
