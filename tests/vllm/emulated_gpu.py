"""A worker extension that makes a vLLM on the CPU offload like one on a GPU: its KV cache plays device memory, with
streams of its own, and NIXL's real GDS plugins find an emulated cuFile.

The model computes on the host and is done when its call returns. Everything after that runs as on a GPU node, but
without CUDA: packing and summing on the device, registration as VRAM, cuFile's calls.
Threading: patches are made, and libraries loaded, when vLLM imports this module in its worker, before NIXL starts. A
plugin that asks for one of these libraries gets the loaded one.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

from nixl_offload.engine import link_paths
from nixl_offload.vllm import rank_tiers, worker
from tests.unit.device_rig import ThreadedDevice
from tests.vllm.blocks_outermost import BlocksOutermostExtension

LIBRARIES = "NIXL_OFFLOAD_TEST_LIBRARIES"
"""Environment: the directory with the emulation."""

WAY = "NIXL_OFFLOAD_TEST_WAY"
"""Environment: the transfer path that chunks take, instead of the one measured as fastest."""

for _library in ("libcudart.so.12", "libcufile.so.0"):
    ctypes.CDLL(str(Path(os.environ[LIBRARIES]) / _library), mode=ctypes.RTLD_GLOBAL)

_device = ThreadedDevice()
for _module in (worker, rank_tiers):
    _module.device_of = lambda tensor: _device  # type: ignore[attr-defined]
if WAY in os.environ:
    _way = os.environ[WAY]

    def _planned(*_: Any, through_host: bool = False) -> str:
        return "posix" if through_host else "gds_mt"

    rank_tiers.plan_tier = _planned
    _least_bytes = 4096 if _way == "direct" else 1 << 62
    rank_tiers.LinkPaths = functools.partial(link_paths.LinkPaths, direct_min_extent_bytes=_least_bytes)  # type: ignore[misc]


class EmulatedGpuExtension(BlocksOutermostExtension):
    """Blocks lie in one piece if ``VLLM_KV_CACHE_LAYOUT`` says so."""
