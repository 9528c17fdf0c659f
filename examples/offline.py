"""The connector in a plain ``vllm.LLM``: the second answer is served from what the tiers hold.

    .venv/bin/python -m examples.offline MODEL nixl_offload/configs/local-nvme.yaml

MODEL is any model that vLLM can serve. Run it twice: the second process finds what the first one stored.
"""

from __future__ import annotations

import argparse
import os
import time

from nixl_offload.config import kv_transfer_config, load_config


def main() -> None:
    parser = argparse.ArgumentParser(description="The connector in a plain vllm.LLM.")
    parser.add_argument("model", help="name or directory of a model")
    parser.add_argument("config", help="YAML config of nixl-offload")
    arguments = parser.parse_args()
    transfer = kv_transfer_config(load_config(arguments.config), os.path.abspath(arguments.config))

    from vllm import LLM, SamplingParams

    llm = LLM(model=arguments.model, kv_transfer_config=transfer)
    time.sleep(3)  # tiers open in the background: prompts that are computed before that are not stored
    document = "The quick brown fox jumps over the lazy dog. " * 100
    for title in ("computed, or loaded if an earlier run stored it", "loaded"):
        started_s = time.perf_counter()
        answer = llm.generate(document + "What jumps?", SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)[0]
        print(f"{title}: {time.perf_counter() - started_s:.2f} s, {answer.num_cached_tokens} cached tokens")
        print(repr(answer.outputs[0].text))
        # Forget the blocks on the GPU, so that only the tiers can have them.
        llm.reset_prefix_cache()


if __name__ == "__main__":
    main()
