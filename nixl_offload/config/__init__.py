"""YAML to typed config: strict, every error in a sentence. The only reader of YAML in the package."""

from __future__ import annotations

from nixl_offload.config.load import (
    CONNECTOR_NAME,
    beside,
    blocks_per_chunk,
    from_extra_config,
    kv_transfer_config,
    load_config,
    merge_extra_config,
    parse_config,
)
from nixl_offload.config.schema import (
    Config,
    DirectoryConfig,
    MemoryConfig,
    S3Config,
    ShardCut,
    SharedConfig,
    SharedDirConfig,
    SlabConfig,
    StoredConfig,
    TierConfig,
)

__all__ = [
    "CONNECTOR_NAME",
    "Config",
    "DirectoryConfig",
    "MemoryConfig",
    "S3Config",
    "ShardCut",
    "SharedConfig",
    "SharedDirConfig",
    "SlabConfig",
    "StoredConfig",
    "TierConfig",
    "beside",
    "blocks_per_chunk",
    "from_extra_config",
    "kv_transfer_config",
    "load_config",
    "merge_extra_config",
    "parse_config",
]
