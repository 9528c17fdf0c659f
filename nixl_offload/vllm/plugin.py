"""The entry point vLLM calls in every process (group ``vllm.general_plugins``), and where its factory finds us.

Threading: called once per process at start. Imports nothing heavy; an unknown vLLM is refused here, in a sentence.
"""

from __future__ import annotations

from nixl_offload.config import CONNECTOR_NAME
from nixl_offload.vllm.registration import register

__all__ = ["register"]


def __getattr__(name: str) -> object:
    """Give vLLM's factory the connector, after a look at the version: importing it needs names private to vLLM."""
    if name != CONNECTOR_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nixl_offload.vllm.compat import check_version

    check_version()
    from nixl_offload.vllm.connector import NixlOffloadConnector

    return NixlOffloadConnector
