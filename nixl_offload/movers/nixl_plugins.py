"""What differs between NIXL's file plugins, as data: parameters, memory kinds, limits, trust.

Threading: constants. Where the numbers come from: docs/decisions/0004-movers.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nixl_offload.movers.base import MemoryKind, MoverLimits
from nixl_offload.types import PAGE_BYTES

_MAX_IO_BYTES = (2 << 30) - 4096
"""The kernel moves no more in one read or write; a larger descriptor fails, and so does a merged one."""


@dataclass(frozen=True)
class NixlPlugin:
    """All that differs between one NIXL file plugin and another."""

    name: str
    """The mover's name."""
    plugin: str
    """NIXL's name of it."""
    params: Mapping[str, str]
    memory_kinds: frozenset[MemoryKind]
    limits: MoverLimits
    settles_before_error: bool
    """An error is told only when nothing of the handle is in flight. Where False, a failed transfer is quarantined."""
    reports_failures: bool
    """Where False, an I/O that failed or came short may be told as DONE: only a checksum of what was read can tell."""


_POSIX_LIMITS = MoverLimits(
    alignment_bytes=PAGE_BYTES,
    max_extent_bytes=_MAX_IO_BYTES,
    max_extents_per_transfer=65_536,
    max_extents_in_flight=65_536,
)

PLUGINS: Mapping[str, NixlPlugin] = MappingProxyType(
    {
        "posix_uring": NixlPlugin(
            "posix_uring",
            "POSIX",
            {"use_uring": "true"},
            frozenset({MemoryKind.DRAM}),
            _POSIX_LIMITS,
            settles_before_error=True,
            reports_failures=True,
        ),
        "posix_aio": NixlPlugin(
            "posix_aio",
            "POSIX",
            {"use_aio": "true"},
            frozenset({MemoryKind.DRAM}),
            _POSIX_LIMITS,
            settles_before_error=True,
            reports_failures=True,
        ),
        "gds_mt": NixlPlugin(
            "gds_mt",
            "GDS_MT",
            {"thread_count": "8"},
            frozenset({MemoryKind.VRAM, MemoryKind.DRAM}),
            _POSIX_LIMITS,
            settles_before_error=True,
            reports_failures=True,
        ),
        # A handle of several batches loses count of them, so a transfer is one batch, and the pool bounds how many.
        "gds": NixlPlugin(
            "gds",
            "GDS",
            {"batch_pool_size": "16", "batch_limit": "128", "max_request_size": str(16 << 20)},
            frozenset({MemoryKind.VRAM, MemoryKind.DRAM}),
            MoverLimits(
                alignment_bytes=PAGE_BYTES,
                max_extent_bytes=16 << 20,
                max_extents_per_transfer=128,
                max_extents_in_flight=16 * 128,
                max_transfers_in_flight=16,
                tells_short_reads=False,
            ),
            settles_before_error=False,
            reports_failures=False,
        ),
    }
)
