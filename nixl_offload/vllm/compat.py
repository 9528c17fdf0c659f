"""The one place that knows how vLLM versions differ. Everything else in this package is written for the newest one.

Threading: pure functions.

What differs, as far as it concerns us:

- 0.32: ``submit_load`` has no ``expedited``; loads are never waited for within the step; no ``sync_load_budget_bytes``.
- 0.33: ``submit_load(..., expedited=)`` and loads that finish within the step; ``OffloadingManager.on_reset_flushed``.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any

import vllm
from nixl_offload.errors import NotSupportedError

SUPPORTED = ((0, 32), (0, 33))
"""Minor versions that the tests have run against."""


def check_version(version: str | None = None) -> tuple[int, int]:
    """Return (major, minor) of the running vLLM.

    Raises NotSupportedError, naming the supported range, when it is not one that we know: its internals decide whether a
    failed load ends as a recompute or as a dead engine, so guessing is not an option.
    """
    text = vllm.__version__ if version is None else version
    match = re.match(r"(\d+)\.(\d+)", text)
    found = (int(match[1]), int(match[2])) if match else None
    if found not in SUPPORTED:
        low, high = (".".join(map(str, item)) for item in (SUPPORTED[0], SUPPORTED[-1]))
        raise NotSupportedError(
            f"nixl-offload supports vLLM {low} to {high}, and this is vLLM {text}; "
            f"install one of those, or a nixl-offload that names {text} in its release notes"
        )
    return found


def settle_extra_config(extra_config: MutableMapping[str, Any], num_groups: int) -> str | None:
    """Turn off what this vLLM offers and failure handling cannot cover. Returns a sentence for the log, or None.

    A load that finishes within the step (``sync_load_budget_bytes``, 0.33) can report a failure by block ids only, and
    vLLM accepts block ids for models with a single KV group alone.
    """
    if num_groups > 1 and extra_config.get("sync_load_budget_bytes"):
        extra_config["sync_load_budget_bytes"] = 0
        return (
            f"vllm.sync_load_budget_bytes is ignored: the model has {num_groups} KV cache groups, "
            "for which vLLM cannot recompute a load that failed within the step"
        )
    return None
