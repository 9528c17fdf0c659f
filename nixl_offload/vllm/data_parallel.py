"""Which data-parallel engines divide a capacity: those on this machine, as far as vLLM tells.

Threading: pure functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import vllm.envs

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def sharing_engines(parallel: ParallelConfig) -> range:
    """Return the engines, by index, that divide this machine's memory and drives: this one is among them.

    Where vLLM does not tell which of them are here these are all of them: then each takes less than it might, and
    together they never take more than a capacity.
    """
    engines = range(parallel.data_parallel_size)
    if parallel.enable_elastic_ep:
        return engines  # they come and go
    if len(engines) == 1:
        # vLLM tells the engines of a dense model that each is alone. This field it leaves as it was for all of them. It
        # is for something else: where it is gone or unset they are taken for alone, as vLLM says.
        return range(getattr(parallel, "elastic_ep_max_dp_size", None) or 1)
    if parallel.data_parallel_backend != "mp" or parallel.data_parallel_external_lb or vllm.envs.VLLM_DP_SIZE > 1:
        return engines  # each was started by itself, and takes itself for the only one here
    first = parallel.data_parallel_index - (parallel.data_parallel_rank_local or 0)
    return range(first, first + parallel.data_parallel_size_local)
