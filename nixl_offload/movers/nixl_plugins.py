"""What differs between NIXL's plugins, as data: parameters, memory kinds, limits.

Threading: constants and a pure function. Where the numbers come from: docs/decisions/0004-movers.md for files,
docs/decisions/0008-object-movers.md for objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

from nixl_offload.config.schema import S3Config
from nixl_offload.movers.base import MemoryKind, MoverLimits
from nixl_offload.stores.s3 import ATTEMPTS, S3Address, ca_bundle_of
from nixl_offload.types import PAGE_BYTES

_MAX_IO_BYTES = (2 << 30) - 4096
"""The kernel moves no more in one read or write; a larger descriptor fails, and so does a merged one."""


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
    limits: MoverLimits
    target: Literal["FILE", "OBJ"] = "FILE"
    """NIXL's word for what is at the other end."""
    key_prefix: str = ""
    """Comes before every object name."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set while the plugin starts, unless the process has other values: what it can be told in no other way."""


_HOST = frozenset({MemoryKind.DRAM})
_HOST_AND_DEVICE = frozenset({MemoryKind.DRAM, MemoryKind.VRAM})
_FILE_LIMITS = MoverLimits(
    alignment_bytes=PAGE_BYTES,
    max_extent_bytes=_MAX_IO_BYTES,
    max_extents_per_transfer=65_536,
    max_extents_in_flight=65_536,
)

PLUGINS: Mapping[str, NixlPlugin] = MappingProxyType(
    {
        "posix_uring": NixlPlugin("posix_uring", "POSIX", {"use_uring": "true"}, _HOST, _FILE_LIMITS),
        "posix_aio": NixlPlugin("posix_aio", "POSIX", {"use_aio": "true"}, _HOST, _FILE_LIMITS),
        "gds_mt": NixlPlugin("gds_mt", "GDS_MT", {"thread_count": "8"}, _HOST_AND_DEVICE, _FILE_LIMITS),
    }
)

_MAX_OBJECT_BYTES: Final = 5 << 30
"""S3 takes no more in one PUT."""


def object_plugin(tier: S3Config) -> NixlPlugin:
    """NIXL's OBJ plugin for a bucket. Credentials are no parameter: its SDK goes through the AWS chain.

    One object per transfer, because the siblings of a failed one would go on writing. Half as many again in flight as
    there are threads in the plugin, so that none of these is idle until somebody polls; no more, because what waits
    inside it cannot be called back.
    """
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
        MoverLimits(
            alignment_bytes=1,
            max_extent_bytes=_MAX_OBJECT_BYTES,
            max_extents_per_transfer=1,
            max_extents_in_flight=tier.connections + tier.connections // 2,
            whole_writes=True,
            tells_short_reads=False,
            moves_unpolled=True,
        ),
        target="OBJ",
        key_prefix=address.prefix,
        # The SDK's own default is ten retries, half a minute against a server that is down.
        environment={"AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": str(ATTEMPTS)},
    )
