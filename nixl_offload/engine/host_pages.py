"""Brings the pages of host memory in, step by step and by several threads; huge ones for as long as they come quickly.

Threading: ``populate`` on one thread, which alone sees results and errors; its helpers are gone when it ends. They are
inside the kernel for nearly all of a step, without the interpreter.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nixl_offload.errors import TierError
from nixl_offload.types import PAGE_BYTES

logger = logging.getLogger(__name__)

STEP_BYTES = 64 << 20
"""Brought in at once by one thread; before each step it is looked whether the memory is still there to be had."""
MAX_THREADS = 8
"""Of one rank: some 20 GB/s and more of clearing, which ranks of one machine divide."""
CRAWL_BYTES_PER_S = 1 << 30
"""Huge pages that come slower than that, for one thread, are compared with small ones."""
TRIAL_STEPS = 3
"""So many of each kind are compared, by their medians."""
CRAWL_FACTOR = 2.0
"""Huge pages are given up where small ones come so many times as fast."""

_MADV_POPULATE_WRITE = 23
_MADV_NOHUGEPAGE = 15
_VMSTAT = Path("/proc/vmstat")
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def threads_for(sharers: int) -> int:
    """Return by how many threads a rank of ``sharers`` brings memory in: its share of the cores, at least two."""
    return min(MAX_THREADS, max(2, len(os.sched_getaffinity(0)) // max(1, sharers)))


def populate(memory: npt.NDArray[np.uint8], threads: int, before: Callable[[int], None]) -> Generator[int, None, None]:
    """Make ``memory`` present; yields, step after step, how many bytes from its begin are.

    ``before``: called ahead of each step with the bytes that no step was begun for; what it raises comes out. Raises
    TierError with cause ``full`` when the kernel refuses. Close the iterator: it returns when no helper is at work.
    """
    total_bytes, pages, avoided_till = len(memory), PageSize(), 0
    pool = ThreadPoolExecutor(threads, thread_name_prefix="nixl-offload-populate")
    steps: deque[tuple[int, bool, Future[float]]] = deque()
    try:
        for begin in range(0, total_bytes, STEP_BYTES):
            before(total_bytes - begin)
            end = min(total_bytes, begin + STEP_BYTES)
            huge = pages.are_huge
            if not huge and avoided_till < end:
                # For good: one call for all that is left, as each waits for the helpers' steps.
                avoided_till = total_bytes if pages.is_decided else end
                _avoid_huge(memory[begin:avoided_till])
            steps.append((end, huge, _start(pool, memory[begin:end])))
            pages.began()
            while len(steps) > threads or (steps and steps[0][2].done()):
                yield _settle(steps, pages, total_bytes)
        while steps:
            yield _settle(steps, pages, total_bytes)
    finally:
        pool.shutdown(cancel_futures=True)


def _start(pool: ThreadPoolExecutor, memory: npt.NDArray[np.uint8]) -> Future[float]:
    try:
        return pool.submit(_bring_in, memory)
    except RuntimeError:  # no thread can be started: this one does it
        done: Future[float] = Future()
        done.set_result(_bring_in(memory))
        return done


def _settle(steps: deque[tuple[int, bool, Future[float]]], pages: PageSize, total_bytes: int) -> int:
    end, huge, step = steps.popleft()
    seconds = step.result()
    if end % STEP_BYTES == 0:
        pages.told(STEP_BYTES / max(seconds, 1e-9), huge=huge, left_bytes=total_bytes - end)
    return end


class PageSize:
    """Decides between huge pages and small ones.

    Where free memory is in small pieces, the kernel moves what others use about to make huge pages, which may take many
    times as long. It tells when it does. So three huge steps that were slow meanwhile have three small ones tried, and
    if those are much faster, huge pages are given up. Else they go on, and are doubted again only when they come at
    half that speed.
    """

    def __init__(self, stalls: Callable[[], int | None] | None = None) -> None:
        """``stalls``: how often the kernel has made somebody wait for compaction so far; None: it does not tell."""
        self.is_decided = False
        """Small pages for good."""
        self._stalls = stalls or compaction_stalls
        self._stalls_before = self._stalls()
        self._slow_bytes_per_s = float(CRAWL_BYTES_PER_S)
        self._huge: deque[float] = deque(maxlen=TRIAL_STEPS)
        self._small: list[float] = []
        self._to_try = 0

    @property
    def are_huge(self) -> bool:
        """Whether the next step is to have huge pages."""
        return not self.is_decided and not self._to_try

    def began(self) -> None:
        """A step was begun as ``are_huge`` said."""
        self._to_try = max(0, self._to_try - 1)

    def told(self, bytes_per_s: float, *, huge: bool, left_bytes: int) -> None:
        """A step has ended. ``left_bytes``: behind it, for the words."""
        if self.is_decided:
            return
        if huge:
            self._huge.append(bytes_per_s)
            if self._are_crawling():
                self._to_try, self._small = TRIAL_STEPS, []
                self._slow_bytes_per_s = statistics.median(self._huge) / 2
            return
        self._small.append(bytes_per_s)
        if len(self._small) < TRIAL_STEPS:
            return
        slow, quick = statistics.median(self._huge), statistics.median(self._small)
        if quick > CRAWL_FACTOR * slow:
            self.is_decided = True
            logger.warning(
                "Host memory: huge pages come at %.2f GiB/s a thread and small ones at %.2f, for free memory is in "
                "pieces: what is left, %.1f GiB, is taken in small pages. Copies to and from it may be slower. "
                "Start before other programs fill the page cache, or write 1 to /proc/sys/vm/compact_memory first.",
                slow / 2**30,
                quick / 2**30,
                left_bytes / 2**30,
            )

    def _are_crawling(self) -> bool:
        if len(self._huge) < TRIAL_STEPS or statistics.median(self._huge) >= self._slow_bytes_per_s:
            return False
        before, self._stalls_before = self._stalls_before, self._stalls()
        return before is None or self._stalls_before is None or self._stalls_before > before


def compaction_stalls() -> int | None:
    """Return how often anybody on this machine has waited for compaction since it started; None: it does not say."""
    with suppress(OSError, ValueError, IndexError):
        for line in _VMSTAT.read_text().splitlines():
            if line.startswith("compact_stall "):
                return int(line.split()[1])
    return None


def _bring_in(memory: npt.NDArray[np.uint8]) -> float:
    """Make memory present; return the seconds that took. Raises TierError."""
    began_s = time.monotonic()
    while _LIBC.madvise(memory.ctypes.data, len(memory), _MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        if code == errno.EINVAL:  # Linux before 5.14
            memory[::PAGE_BYTES] = 0
            break
        if code not in {errno.EINTR, errno.EAGAIN}:
            raise TierError(f"host memory cannot be had: {os.strerror(code)}", cause="full")
    return time.monotonic() - began_s


def _avoid_huge(memory: npt.NDArray[np.uint8]) -> None:
    """Ask for small pages, in whole pages; a kernel that has no huge ones refuses, and that is well."""
    length = -(-len(memory) // mmap.PAGESIZE) * mmap.PAGESIZE
    _LIBC.madvise(memory.ctypes.data, length, _MADV_NOHUGEPAGE)
