"""Headers and checksums of single shards in host memory, as tests make and judge them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.chunk.header import Buffer, Expected, ExpectedRows, ShardHeader, encode_headers, verify_checksums


def make_header(
    expect: Expected, checksums: npt.NDArray[np.uint64], *, first_valid_block: int = 0, created_s: int = 0
) -> ShardHeader:
    """Return the header of a shard. ``checksums``: of the blocks from ``first_valid_block`` on."""
    return ShardHeader(
        expect.namespace,
        expect.key,
        expect.group,
        expect.blocks,
        first_valid_block,
        expect.block_bytes,
        created_s,
        (0,) * first_valid_block + tuple(checksums.tolist()),
    )


def encode_header(header: ShardHeader) -> npt.NDArray[np.uint8]:
    """Return the header page of a shard."""
    of_one = ExpectedRows(header.namespace, [header.key], header.group, header.blocks_per_chunk, header.block_bytes)
    checksums = np.array([header.checksums], dtype=np.uint64)
    return encode_headers(of_one, checksums, [header.first_valid_block], created_s=header.created_s)[0]


def verify_payload(header: ShardHeader, payload: Buffer, first_block: int, last_block: int) -> None:
    """Verify blocks ``first_block`` to ``last_block``, the latter excluded. Raises as ``verify_checksums``."""
    data: npt.NDArray[np.uint8] = np.frombuffer(payload, dtype=np.uint8)
    wanted = data[first_block * header.block_bytes : last_block * header.block_bytes]
    verify_checksums(header, block_checksums(wanted.reshape(-1, header.block_bytes)), first_block)
