"""Warns at start when vLLM will stop the ranks too soon.

Threading: a pure function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nixl_offload.config import Config
from nixl_offload.units import format_duration

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def sentence_about_stopping(vllm_config: VllmConfig, config: Config) -> str | None:
    """Return a warning for the operator if vLLM will kill the ranks before ``drain_timeout`` is over, else None.

    It will by default. It does not matter where memory is the only tier.
    """
    patience_s, drain_s = vllm_config.shutdown_timeout, config.drain_timeout_s
    if patience_s > drain_s or not config.stored:
        return None
    when = f"{patience_s} s after" if patience_s else "as soon as"
    return (
        f"vLLM will kill this engine {when} it is told to stop, so what is still on its way to storage then has to be "
        "computed again: run vllm serve with --shutdown-timeout, some seconds above drain_timeout "
        f"({format_duration(drain_s)})"
    )
