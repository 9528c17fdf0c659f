"""The platform plugin, and how vLLM in another process finds it.

Threading: vLLM calls ``register`` when it first asks for its platform, in any thread, once. It patches torch and Triton
for the rest of the process.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.serving.model import write_plugin

ROOT = Path(__file__).resolve().parents[3]
PLAYED = "NIXL_OFFLOAD_PLAYED"
"""Environment: 1 where a process is to play the device."""

_ENTRY_POINTS = """\
[vllm.platform_plugins]
played = tests.vllm.played.plugin:register

[vllm.general_plugins]
nixl_offload = nixl_offload.vllm.plugin:register
"""


def register() -> str | None:
    """Return the platform's class if this process is to play the device."""
    if not os.environ.get(PLAYED):
        return None
    from tests.vllm.played import device

    device.install()
    device.install_triton()
    return "tests.vllm.played.platform.PlayedPlatform"


def environment(directory: Path) -> dict[str, str]:
    """Return the environment of a process that plays the device; writes the plugin's entry point to ``directory``."""
    write_plugin(directory, "nixl_offload_played", _ENTRY_POINTS)
    path = [str(directory), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        PLAYED: "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
