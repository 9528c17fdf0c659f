"""Proves: host memory is brought in step by step; an error of a helper is the caller's, and none is left at work; huge
pages are given up where they crawl for want of free memory in one piece, and only there.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nixl_offload.engine import host_pages
from nixl_offload.engine.host_pages import CRAWL_BYTES_PER_S, HugePages, populate
from nixl_offload.errors import TierError

MIB = 1 << 20
HUGE = 2 * MIB


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "STEP_BYTES", HUGE)


def mapped(length_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory that is not there yet, from the begin of a huge page on."""
    area = mmap.mmap(-1, length_bytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    everything: npt.NDArray[np.uint8] = np.frombuffer(area, dtype=np.uint8)
    begin = -everything.ctypes.data % HUGE
    area.madvise(mmap.MADV_HUGEPAGE, begin, length_bytes)
    return everything[begin : begin + length_bytes]


def nothing(_: int) -> None:
    return


def small_page_bytes(memory: npt.NDArray[np.uint8]) -> int:
    """How much of ``memory`` asks for small pages."""
    address, found, size = memory.ctypes.data, 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name = line.split(maxsplit=1)[0]
        if not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            size = max(0, min(end, address + len(memory)) - max(begin, address))
        elif name == "VmFlags:" and "nh" in line.split():
            found += size
    return found


def watched(monkeypatch: pytest.MonkeyPatch, bring_in: Callable[[npt.NDArray[np.uint8]], float]) -> None:
    monkeypatch.setattr(host_pages, "_bring_in", bring_in)


@pytest.mark.parametrize("where", ["helper", "room", "consumer"])
def test_an_error_comes_out_and_nobody_is_left_at_work(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, begun = host_pages._bring_in, []

    def fails(memory: npt.NDArray[np.uint8]) -> float:
        begun.append(memory.ctypes.data)
        if where == "helper" and len(begun) == 2:
            raise TierError("host memory cannot be had", cause="full")
        return real(memory)

    def room(wanted_bytes: int) -> None:
        if where == "room" and wanted_bytes <= 56 * MIB:
            raise TierError("others have it", cause="full")

    def consume() -> None:
        with closing(populate(mapped(64 * MIB), 2, room)) as steps:
            for ready_bytes in steps:
                if where == "consumer" and ready_bytes >= 4 * MIB:
                    raise TierError("cannot be locked", cause="full")

    watched(monkeypatch, fails)
    with pytest.raises(TierError):
        consume()
    assert len(begun) < 32
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nixl-offload-populate")]


def test_where_no_thread_can_be_started_the_caller_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> Future[float]:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(host_pages.ThreadPoolExecutor, "submit", refuses)
    with closing(populate(mapped(4 * MIB), 2, nothing)) as steps:
        assert list(steps) == [2 * MIB, 4 * MIB]


def test_what_the_kernel_refuses_is_a_tier_error() -> None:
    gone = np.frombuffer((host_pages.ctypes.c_uint8 * 4096).from_address(4096), dtype=np.uint8)
    with pytest.raises(TierError, match="host memory cannot be had") as caught:
        host_pages._bring_in(gone)
    assert caught.value.cause == "full"


# -- huge pages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "stalls", "is_given_up"), [(0.5, 1, True), (2.0, 1, False), (0.5, 0, False)])
def test_huge_pages_are_given_up_where_they_crawl_because_the_kernel_compacts_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rate: float, stalls: int, is_given_up: bool
) -> None:
    """With a word, once. Where the machine is merely slow they are kept."""
    counts = count(5, stalls)
    monkeypatch.setattr(host_pages, "compaction_stalls", lambda: next(counts))
    pages = HugePages()
    found = []
    for _ in range(10):
        found.append(pages.crawl(0))
        pages.rates.append(rate * CRAWL_BYTES_PER_S)
    assert found.count(True) == is_given_up
    assert caplog.text.count("huge pages come at 0.12 GiB/s a thread") == is_given_up


def test_the_rest_is_asked_for_in_small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    real = host_pages._bring_in

    def crawls(memory: npt.NDArray[np.uint8]) -> float:
        is_small = small_page_bytes(memory) == len(memory)
        real(memory)
        return 0.001 if is_small else 1.0

    watched(monkeypatch, crawls)
    monkeypatch.setattr(host_pages, "compaction_stalls", lambda: None)
    memory = mapped(64 * MIB)
    with closing(populate(memory, 2, nothing)) as steps:
        assert list(steps)[-1] == 64 * MIB
    assert small_page_bytes(memory) > 32 * MIB
    assert small_page_bytes(memory[: 2 * MIB]) == 0
    assert not memory.any()
