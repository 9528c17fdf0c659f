"""Headers and checksums of single shards in host memory, as tests make and judge them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.chunk.header import (
    Buffer,
    ExpectedRows,
    HeaderRows,
    ShardHeader,
    check_headers,
    decode_header,
    encode_headers,
    verify_rows,
)

Page = npt.NDArray[np.uint8]


class Expected(NamedTuple):
    """What a reader knows of one shard before it has seen any of its bytes."""

    namespace: bytes
    key: bytes
    group: int
    blocks: int
    block_bytes: int

    @property
    def rows(self) -> ExpectedRows:
        return ExpectedRows(self.namespace, [self.key], self.group, self.blocks, self.block_bytes)


def make_page(
    expect: Expected, checksums: npt.NDArray[np.uint64], *, first_valid_block: int = 0, created_s: int = 0
) -> Page:
    """Return the header page of a shard. ``checksums``: of the blocks from ``first_valid_block`` on."""
    of_all = np.concatenate([np.zeros(first_valid_block, dtype=np.uint64), checksums])
    return encode_headers(expect.rows, of_all[None], [first_valid_block], created_s=created_s)[0]


def check_header(page: Buffer, expect: Expected, *, may_lack_checksums: bool = False) -> ShardHeader:
    """Return the header in a page that engines take. Raises what they note of any other."""
    _checked(page, expect, may_lack_checksums=may_lack_checksums)
    return decode_header(page, may_lack_checksums=may_lack_checksums)


def check_blocks(page: Buffer, expect: Expected, payload: Buffer, first_block: int, last_block: int) -> None:
    """Verify blocks ``first_block`` to ``last_block``, the latter excluded. Raises what engines note of damage."""
    headers = _checked(page, expect)
    data: npt.NDArray[np.uint8] = np.frombuffer(payload, dtype=np.uint8)
    wanted = data[first_block * expect.block_bytes : last_block * expect.block_bytes]
    verify_rows(headers, [0], [first_block], [block_checksums(wanted.reshape(-1, expect.block_bytes))])
    for error in headers.errors.values():
        raise error


def _checked(page: Buffer, expect: Expected, *, may_lack_checksums: bool = False) -> HeaderRows:
    as_array: Page = np.frombuffer(page, dtype=np.uint8)
    headers = check_headers([as_array], expect.rows, may_lack_checksums=may_lack_checksums)
    for error in headers.errors.values():
        raise error
    return headers
