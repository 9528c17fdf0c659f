"""Makes our names known to vLLM's factories, and our log lines to its handlers; looks at vLLM's configuration for what
would keep our connector from being built.

Threading: called at start, by whichever thread vLLM loads plugins or builds connectors on. Imports nothing heavy.
"""

from __future__ import annotations

import functools
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from nixl_offload.config import CONNECTOR_NAME
from nixl_offload.errors import NotSupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

SPEC_NAME: Final = "NixlOffloadSpec"


def register() -> None:
    """Register the connector and its offloading spec with vLLM. Safe to call again."""
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    with suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "nixl_offload.vllm.plugin", CONNECTOR_NAME)
    with suppress(ValueError):
        OffloadingSpecFactory.register_spec(SPEC_NAME, "nixl_offload.vllm.spec", SPEC_NAME)
    _log_as_vllm_does()
    if not hasattr(VllmConfig.__post_init__, "__wrapped__"):
        VllmConfig.__post_init__ = _look_at_connectors(VllmConfig.__post_init__)  # type: ignore[method-assign]


def _look_at_connectors(post_init: Any) -> Any:
    """Return ``post_init`` of vLLM's configuration with a look at what it makes of our connector, which
    ``--kv-offloading-size`` replaces there: no other code of ours runs then.

    Raises NotSupportedError for two of ours.
    """

    @functools.wraps(post_init)
    def look(self: VllmConfig, *args: Any) -> None:
        transfer, names = self.kv_transfer_config, []
        if transfer is not None:
            children = transfer.kv_connector_extra_config.get("connectors", ())
            names = [transfer.kv_connector]
            names += [child.get("kv_connector") for child in children if names == ["MultiConnector"]]
        if names.count(CONNECTOR_NAME) > 1:
            raise NotSupportedError(
                f"two {CONNECTOR_NAME} in a MultiConnector would count under the same metrics; put the tiers of both "
                "into one config"
            )
        post_init(self, *args)
        if CONNECTOR_NAME in names and transfer is not None and transfer.kv_connector != names[0]:
            logger.warning(
                "--kv-offloading-size replaces %s by vLLM's %s: no tier of its config is used; leave that option out",
                CONNECTOR_NAME,
                transfer.kv_connector,
            )

    return look


def _log_as_vllm_does() -> None:
    """Send this package's lines where vLLM's go, at its level, unless the operator has set up logging for us."""
    ours, theirs = logging.getLogger("nixl_offload"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = False
