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
CRAWL_BYTES_PER_S = 256 << 20
"""Huge pages that come slower than that, for one thread, while the kernel compacts memory for them are given up."""
CRAWL_STEPS = 3
"""Judged by the median of so many."""

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
    total_bytes, pages = len(memory), HugePages()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="nixl-offload-populate")
    steps: deque[tuple[int, Future[float]]] = deque()
    try:
        for begin in range(0, total_bytes, STEP_BYTES):
            before(total_bytes - begin)
            end = min(total_bytes, begin + STEP_BYTES)
            if pages.crawl(total_bytes - begin):
                _avoid_huge(memory[begin:])
            try:
                step = pool.submit(_bring_in, memory[begin:end])
            except RuntimeError:  # no thread can be started: this one does it
                step = Future()
                step.set_result(_bring_in(memory[begin:end]))
            steps.append((end, step))
            while len(steps) > threads or (steps and (end == total_bytes or steps[0][1].done())):
                ready_bytes, step = steps.popleft()
                pages.rates.append(STEP_BYTES / max(step.result(), 1e-9))
                yield ready_bytes
    finally:
        pool.shutdown(cancel_futures=True)


class HugePages:
    """Notices when huge pages crawl: where free memory is in small pieces, the kernel moves what others use about to
    make them, which may take many times as long as small pages do. It counts how often somebody waited for that.
    """

    def __init__(self) -> None:
        self.rates: deque[float] = deque(maxlen=CRAWL_STEPS)
        """Bytes per second of the last steps."""
        self._stalls = compaction_stalls()
        self._are_given_up = False

    def crawl(self, left_bytes: int) -> bool:
        """Whether they do, from now on; true once. ``left_bytes``: for the words."""
        if self._are_given_up or len(self.rates) < CRAWL_STEPS or statistics.median(self.rates) >= CRAWL_BYTES_PER_S:
            return False
        before, self._stalls = self._stalls, compaction_stalls()
        if before is not None and self._stalls is not None and self._stalls <= before:
            return False
        self._are_given_up = True
        logger.warning(
            "Host memory: huge pages come at %.2f GiB/s a thread, as free memory is in pieces. What is left, %.1f GiB, "
            "is taken in small pages: copies to and from it may be slower. Start before other programs fill the page "
            "cache, or write 1 to /proc/sys/vm/compact_memory first.",
            statistics.median(self.rates) / 2**30,
            left_bytes / 2**30,
        )
        return True


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
