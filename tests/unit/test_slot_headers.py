"""Proves: a page that gets its checksums while others read it is never taken for damage, damage is still found, and a
page that is complete is not written again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from nixl_offload.chunk.header import (
    CHECKSUMS_AT,
    MAX_BLOCKS_PER_CHUNK,
    ExpectedRows,
    check_headers,
    encode_headers,
    lacks_checksums,
)
from nixl_offload.engine.slot_headers import SlotHeaders

BLOCKS = MAX_BLOCKS_PER_CHUNK
ROWS = np.random.default_rng(5).integers(0, 256, (BLOCKS, 1000), dtype=np.uint8)


def lacking(count: int) -> tuple[npt.NDArray[np.uint8], ExpectedRows]:
    expect = ExpectedRows(bytes(range(32)), [n.to_bytes(36, "big") for n in range(count)], 3, BLOCKS, 1000)
    return encode_headers(expect, None, [0] * count).copy(), expect


def together(*works: Callable[[], None]) -> None:
    """Run each on a thread; raise the error of any of them."""
    with ThreadPoolExecutor(len(works)) as threads:
        for done in [threads.submit(work) for work in works]:
            done.result(60)


class HalfWritten(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """A page whose writer stops half way until a reader has seen it so."""

    half: threading.Event
    seen: threading.Event

    def __setitem__(self, where: object, value: object) -> None:
        whole, mine = np.asarray(value, dtype=np.uint8), self.view(np.ndarray)
        mine[: CHECKSUMS_AT + 100] = whole[: CHECKSUMS_AT + 100]
        self.half.set()
        assert self.seen.wait(30)
        mine[:] = whole


@pytest.mark.parametrize("damaged", [False, True])
def test_a_half_written_page_is_looked_at_again(damaged: bool) -> None:
    """While it is being written it looks damaged; afterwards only if it is."""
    pages, expect = lacking(1)
    headers, page = SlotHeaders(), pages[0].view(HalfWritten)
    page.half, page.seen = threading.Event(), threading.Event()
    found: list[bool] = []
    if damaged:
        pages[0, 100] ^= 1

    def write() -> None:
        headers.complete(page, ROWS)  # type: ignore[arg-type]

    def read() -> None:
        assert page.half.wait(30)
        assert set(check_headers(pages, expect, may_lack_checksums=True).errors) == {0}
        threading.Timer(0.05, page.seen.set).start()
        found.append(bool(headers.check(list(pages), expect).errors))

    together(write, read)
    assert found == [damaged]
    assert not lacks_checksums(pages[0])
