"""Which store reaches a tier: a shared directory, or a bucket over the fastest client that is installed.

Threading: pure but for imports and a log line. The client libraries are imported here alone, when they are wanted.
"""

from __future__ import annotations

import logging
from typing import Literal

from nixl_offload.config.schema import S3Config, SharedConfig
from nixl_offload.errors import NotSupportedError
from nixl_offload.stores.base import Store
from nixl_offload.stores.directory import TreeStore

logger = logging.getLogger(__name__)

Client = Literal["auto", "obstore", "boto3"]
_INSTALL = "pip install obstore boto3"


def open_store(tier: SharedConfig, client: Client = "auto") -> Store:
    """Return the store of a tier. The caller owns it and closes it. Reaches no server yet.

    ``client`` counts for S3: auto is obstore, where it is installed, else boto3 (decision 0009). Raises
    NotSupportedError when no client is installed, StoreError when a directory cannot be made.
    """
    if tier.kind == "shared_dir":
        return TreeStore(tier.path)
    if client == "boto3":
        return _boto3(tier)
    try:
        from nixl_offload.stores.obstore import ObstoreStore
    except ImportError as error:
        if client == "obstore":
            raise NotSupportedError(f"client obstore cannot be imported ({error}); {_INSTALL}") from error
        store = _boto3(tier)
        logger.info(
            "%s: over boto3, as obstore is not installed; lookups are many times slower: %s", store.where, _INSTALL
        )
        return store
    return ObstoreStore(tier)


def _boto3(tier: S3Config) -> Store:
    try:
        from nixl_offload.stores.boto3 import Boto3Store
    except ImportError as error:
        raise NotSupportedError(f"S3 needs obstore or boto3 ({error}); {_INSTALL}") from error
    return Boto3Store(tier)
