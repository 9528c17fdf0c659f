"""The durable index on a medium that refuses writes, from one moment to the next: rows wait, the process lives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nixl_offload.index.database import IndexReader
from nixl_offload.index.durable import DurableIndex
from nixl_offload.types import Key, Location

if TYPE_CHECKING:
    from conftest import SmallFilesystem

GEOMETRY = {"extent_bytes": "4096"}
WAIT_S = 20.0


def opened(path: Path) -> tuple[DurableIndex, list[int]]:
    """Return an index, and the offsets that it held."""
    index, rows = DurableIndex.open(str(path), GEOMETRY, batch_delay_s=0.0, retry_interval_s=0.01)
    return index, [offset for piece in rows for _, offset, _, _ in piece]


def put(index: DurableIndex, number: int, timeout_s: float = WAIT_S) -> bool:
    """Put a row; return whether it is on the medium."""
    index.put(Key(number.to_bytes(32, "big") + bytes(4)), Location(0, number * 4096, 4096))
    return index.flush(timeout_s)


@pytest.mark.parametrize("writable_again", [True, False])
def test_a_medium_that_refuses_writes_costs_rows_and_not_the_process(
    small_filesystem: SmallFilesystem, writable_again: bool
) -> None:
    """After what was written has reached the medium, so that its pages are clean: a mapped one could not be changed,
    and SIGBUS would end this process.
    """
    path = small_filesystem.path / "index.sqlite"
    index, _ = opened(path)
    assert put(index, 1)
    os.sync()
    small_filesystem.make_read_only()
    assert not put(index, 2, timeout_s=0.5)
    assert [row.offset for row in IndexReader(path).rows()] == [4096]
    if writable_again:
        small_filesystem.make_writable()
        assert put(index, 3)
    assert index.close(WAIT_S) == writable_again
    small_filesystem.make_writable()
    index, offsets = opened(path)
    assert offsets == ([4096, 2 * 4096, 3 * 4096] if writable_again else [4096])
    assert index.close(WAIT_S)


@pytest.mark.parametrize("small_filesystem", [8 << 20], indirect=True)
def test_a_full_medium_costs_rows_and_not_the_process(small_filesystem: SmallFilesystem) -> None:
    """No room for a transaction's journal: it waits until there is."""
    path = small_filesystem.path / "index.sqlite"
    index, _ = opened(path)
    assert put(index, 1)
    small_filesystem.fill()
    number = 1
    while put(index, number := number + 1, timeout_s=0.5):
        assert number < 10_000, "it never was full"
    small_filesystem.drain()
    assert put(index, number + 1)
    assert index.close(WAIT_S)
    assert len(list(IndexReader(path).rows())) == number + 1
