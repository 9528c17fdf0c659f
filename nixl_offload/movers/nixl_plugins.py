"""What differs between NIXL's plugins, as data: parameters and memory kinds.

Threading: constants and a pure function. Where the numbers come from: docs/decisions/0004-movers.md for files,
docs/decisions/0008-object-movers.md for objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from nixl_offload.config.schema import S3Config
from nixl_offload.movers.base import MemoryKind
from nixl_offload.stores.s3 import ATTEMPTS, S3Address, ca_bundle_of


@dataclass(frozen=True)
class NixlPlugin:
    """All that differs between one NIXL plugin and another."""

    name: str
    """The mover's name."""
    plugin: str
    """NIXL's name of it."""
    params: Mapping[str, str]
    memory_kinds: frozenset[MemoryKind]
    """What we would use it for; what it really takes is asked when it starts."""
    key_prefix: str = ""
    """Of an object plugin: comes before every object name."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set while the plugin starts, unless the process has other values: what it can be told in no other way."""


_HOST = frozenset({MemoryKind.DRAM})
_HOST_AND_DEVICE = frozenset({MemoryKind.DRAM, MemoryKind.VRAM})

PLUGINS: Mapping[str, NixlPlugin] = MappingProxyType(
    {
        "posix_uring": NixlPlugin("posix_uring", "POSIX", {"use_uring": "true"}, _HOST),
        "posix_aio": NixlPlugin("posix_aio", "POSIX", {"use_aio": "true"}, _HOST),
        "gds_mt": NixlPlugin("gds_mt", "GDS_MT", {"thread_count": "8"}, _HOST_AND_DEVICE),
    }
)


def object_plugin(tier: S3Config) -> NixlPlugin:
    """NIXL's OBJ plugin for a bucket. Credentials are no parameter: its SDK goes through the AWS chain."""
    address = S3Address.of(tier)
    params = {
        "bucket": address.bucket,
        "scheme": "http" if address.plain_http else "https",
        "use_virtual_addressing": str(not address.path_style).lower(),
        "num_threads": str(tier.connections),
        "req_checksum": "required",  # with "supported" the SDK sends trailers that some servers store as data
        "resp_checksum": "required",
        "endpoint_override": address.endpoint,
        "region": address.region,
        "ca_bundle": ca_bundle_of(tier),
    }
    return NixlPlugin(
        "obj",
        "OBJ",
        {name: value for name, value in params.items() if value is not None},
        _HOST_AND_DEVICE,
        key_prefix=address.prefix,
        # The SDK's own default is ten retries, half a minute against a server that is down.
        environment={"AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": str(ATTEMPTS)},
    )
