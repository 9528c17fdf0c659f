"""The checksum of stored blocks, on the CPU: one XXH3-64 (seed 0) per block, over its bytes in payload order.

On a GPU ``engine.kernels`` computes the same value. docs/decisions/0002-checksum.md gives the reasons.
Threading: pure functions, safe anywhere. The library holds the GIL for blocks under 64 KiB. The caller keeps the buffer
alive and unchanged until the call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

ALGORITHM_XXH3_64 = 1
"""A header's ``algorithm`` field if its checksums are those of this module."""
ALGORITHM_NONE = 0
"""The field in an image in memory whose blocks have no checksums yet. Readers of storage refuse such an image."""


def block_checksum(data: memoryview | npt.NDArray[np.uint8]) -> int:
    """Return the checksum of one block, ``0 <= value < 2**64``.

    ``data``: C-contiguous bytes, in host memory. Raises BufferError or ValueError when they are not contiguous.
    """
    return xxhash.xxh3_64_intdigest(data.data if isinstance(data, np.ndarray) else data)


def block_checksums(payload: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return the checksum of each row of ``payload``. Shapes: ``(blocks, block_bytes)`` to ``(blocks,)``.

    Each row must be contiguous, else ValueError; rows may be any distance apart.
    """
    return np.array([xxhash.xxh3_64_intdigest(row) for row in payload], dtype=np.uint64)


def payload_checksums(
    payloads: Sequence[npt.NDArray[np.uint8]], between: Callable[[], object] | None = None
) -> list[npt.NDArray[np.uint64]]:
    """Return ``block_checksums`` of each payload. ``between`` follows each: small rows hold the GIL 100 µs per MiB."""
    sums = []
    for payload in payloads:
        sums.append(block_checksums(payload))
        if between is not None:
            between()
    return sums
