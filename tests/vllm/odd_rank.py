"""Has one rank of a vLLM fail to understand its KV caches, as no configuration can.

Threading: imported in each worker's process, by the name of the extension, before KV caches are registered.
"""

from __future__ import annotations

from typing import Any

from nixl_offload.vllm import rank_shards
from tests.vllm.poison import PoisonExtension


class OddRankExtension(PoisonExtension):
    """For ``worker_extension_cls``, by its name: to import this module changes the product."""


_understood_pages = rank_shards.understood_pages


def _fails_on_rank_1(vllm_config: Any, *others: Any) -> str | None:
    if vllm_config.parallel_config.rank == 1:
        raise RuntimeError("an odd rank")
    return _understood_pages(vllm_config, *others)


rank_shards.understood_pages = _fails_on_rank_1
