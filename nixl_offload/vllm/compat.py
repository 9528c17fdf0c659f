"""Which versions of vLLM are accepted, and how they differ. What each needs is here and in ``vllm_internals``.

Threading: pure functions.

What differs, as far as it concerns us (``docs/decisions/0007-vllm-versions.md`` says how it was found out):

- 0.32: ``submit_load`` has no ``expedited``; no load finishes within the step; a reset that preempts running requests
  ends the engine where one of them is loaded again in the same step (``vllm_internals.without_preempted_loads``).
- 0.33: ``submit_load(..., expedited=)`` and loads that finish within the step, which we turn off; a request that
  restarts at token 0 offers all its chunks again; the handshake is repeated at ``wake_up``; ``supports_sleep_mode``;
  ``OffloadingManager.lock`` and ``on_reset_flushed``, of which the inherited ones do.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import vllm

from nixl_offload.errors import NotSupportedError
from nixl_offload.vllm.versions import SUPPORTED, minor_version, supported_range


def check_version(version: str | None = None) -> tuple[int, int]:
    """Return (major, minor) of the running vLLM.

    Raises NotSupportedError, naming the supported range, when it is not one that we know: its internals decide whether
    a failed load ends as a recompute or as a dead engine, so guessing is not an option.
    """
    text = vllm.__version__ if version is None else version
    found = minor_version(text)
    if found not in SUPPORTED:
        raise NotSupportedError(
            f"nixl-offload supports vLLM {supported_range()}, and this is vLLM {text}; "
            f"install one of those, or a nixl-offload that names {text} in its release notes"
        )
    return found


def settle_extra_config(extra_config: MutableMapping[str, Any]) -> str | None:
    """Turn off what this vLLM offers and failure handling cannot cover. Returns a sentence for the log, or None.

    Loads that finish within the step (``sync_load_budget_bytes``, 0.33): their blocks enter vLLM's prefix cache when
    they are allocated, and chunks computed from them are offered to the store in the same step. When such a load fails,
    vLLM recomputes the request and does neither take the blocks out of the prefix cache nor the store back. Both were
    seen to end in wrong answers: the first when the request is aborted before it is recomputed, the second always.
    """
    if not extra_config.get("sync_load_budget_bytes"):
        return None
    extra_config["sync_load_budget_bytes"] = 0
    return (
        "kv_connector_extra_config: sync_load_budget_bytes is ignored: when a load that finishes within the step fails,"
        " vLLM keeps and stores what was computed from it, so damaged storage could reach an answer"
    )
