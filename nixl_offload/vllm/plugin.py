"""The entry point that vLLM calls in every process (group ``vllm.general_plugins``). Registers our names, sends our log
lines to vLLM's handlers, and refuses a vLLM that is not supported. vLLM's factory finds our connector here.

Threading: called at start, by the thread on which vLLM loads plugins or builds connectors. Imports nothing heavy and no
vLLM, so that commands can ask for versions.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from typing import Final

from nixl_offload.config import CONNECTOR_NAME
from nixl_offload.errors import NotSupportedError

logger = logging.getLogger(__name__)

SPEC_NAME: Final = "NixlOffloadSpec"
SUPPORTED: Final = "0.33"
"""The only minor version of vLLM that is accepted, because we depend on vLLM's internals.
``docs/decisions/0007-vllm-versions.md`` says how to move to the next."""
PIP_REQUIREMENT: Final = "vllm>=0.33,<0.34"
"""The same for pip."""


def register() -> None:
    """Register the connector and its offloading spec with vLLM. Safe to call again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    with suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(CONNECTOR_NAME, __name__, CONNECTOR_NAME)
    with suppress(ValueError):
        OffloadingSpecFactory.register_spec(SPEC_NAME, "nixl_offload.vllm.connector", SPEC_NAME)
    _log_as_vllm_does()


def _log_as_vllm_does() -> None:
    """Send this package's lines where vLLM's go, at its level, unless the operator has set up logging for us."""
    ours, theirs = logging.getLogger("nixl_offload"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = False


def is_supported(version: str) -> bool:
    """Return whether a version of vLLM, as it names itself, is the supported one."""
    return re.match(rf"{re.escape(SUPPORTED)}(?!\d)", version) is not None


def check_version(version: str | None = None) -> None:
    """Raise NotSupportedError if ``version`` (default: the running vLLM's) is not the supported one.

    vLLM's internals decide whether a failed load is recomputed or ends the engine, so no other version is tried.
    """
    if version is None:
        import vllm

        version = vllm.__version__
    if not is_supported(version):
        raise NotSupportedError(
            f"nixl-offload supports vLLM {SUPPORTED}, and this is vLLM {version}; "
            f'run pip install "{PIP_REQUIREMENT}", or install a nixl-offload that names {version} in its release notes'
        )


def __getattr__(name: str) -> object:
    """Return the connector to vLLM's factory. Checks the version first, as the import needs vLLM's private names."""
    if name != CONNECTOR_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_version()
    from nixl_offload.vllm.connector import NixlOffloadConnector

    return NixlOffloadConnector
