"""Makes our names known to vLLM's factories, and our log lines to its handlers.

Threading: called at start, by whichever thread vLLM loads plugins or builds connectors on. Imports nothing heavy.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final

from nixl_offload.config import CONNECTOR_NAME

SPEC_NAME: Final = "NixlOffloadSpec"


def register() -> None:
    """Register the connector and its offloading spec with vLLM. Safe to call again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    with suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "nixl_offload.vllm.plugin", CONNECTOR_NAME)
    with suppress(ValueError):
        OffloadingSpecFactory.register_spec(SPEC_NAME, "nixl_offload.vllm.spec", SPEC_NAME)
    _log_as_vllm_does()


def _log_as_vllm_does() -> None:
    """Send this package's lines where vLLM's go, at its level, unless the operator has set up logging for us."""
    ours, theirs = logging.getLogger("nixl_offload"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = False
