"""The entry point vLLM calls in every process (group ``vllm.general_plugins``): makes our names known to its factories.

Threading: called once per process at start. Imports nothing heavy; an unknown vLLM is refused here, in a sentence.
"""

from __future__ import annotations

import logging

from nixl_offload.config import CONNECTOR_NAME

SPEC_NAME = "NixlOffloadSpec"


def register() -> None:
    """Register the connector and its offloading spec with vLLM. Safe to call again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, __name__, CONNECTOR_NAME)
    if SPEC_NAME not in OffloadingSpecFactory._registry:
        OffloadingSpecFactory.register_spec(SPEC_NAME, "nixl_offload.vllm.spec", SPEC_NAME)
    _log_as_vllm_does()


def __getattr__(name: str) -> object:
    """Give vLLM's factory the connector, after a look at the version: importing it needs names private to vLLM."""
    if name != CONNECTOR_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nixl_offload.vllm.compat import check_version

    check_version()
    from nixl_offload.vllm.connector import NixlOffloadConnector

    return NixlOffloadConnector


def _log_as_vllm_does() -> None:
    """Send this package's lines where vLLM's go, at its level, unless the operator has set up logging for us."""
    ours, theirs = logging.getLogger("nixl_offload"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = False
