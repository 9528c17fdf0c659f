"""A bucket in memory that counts requests and answers as late and as seldom as S3 does, and S3's prices.

Threading: ``list``, ``delete`` and ``head`` may be called from several threads (``gc`` does). The fleet has one.
Time is the caller's: a request takes none here, and ``last_s`` says what it would take.
"""

from __future__ import annotations

import bisect
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from nixl_offload.errors import StoreError
from nixl_offload.stores.base import ObjectInfo, Store
from nixl_offload.stores.obstore import LIST_PAGE
from nixl_offload.stores.s3 import ATTEMPTS

READS_PER_S: Final = 5500
WRITES_PER_S: Final = 3500
"""Of one partition, says S3's user guide ("Best practices design patterns"); beyond that it answers 503."""
LATENCY_S: Final = {"head": 0.02, "get": 0.05, "put": 0.08, "list": 0.15, "delete": 0.5}
"""Assumed medians: small requests 10 to 100 ms, a page of 1,000 names 150 ms, 1,000 deletions in a request 500 ms."""
WRITES: Final = frozenset({"put", "delete"})


Names = list[str]


@dataclass(frozen=True)
class Prices:
    """US dollars per 1,000 requests and per GB. DELETE costs nothing."""

    name: str
    put: float
    get: float
    list: float
    stored_gb_month: float
    upload_gb: float = 0.0
    retrieval_gb: float = 0.0

    def of(self, requests: dict[str, float], size_bytes: int = 0) -> float:
        """The price of so many requests by kind; ``size_bytes``: of what each PUT and GET moves."""
        each = {"put": self.put, "head": self.get, "get": self.get, "list": self.list}
        moved_gb = size_bytes / 1e9
        moved = requests.get("put", 0) * self.upload_gb + requests.get("get", 0) * self.retrieval_gb
        return sum(requests.get(kind, 0) * price / 1000 for kind, price in each.items()) + moved * moved_gb


STANDARD: Final = Prices("S3 Standard", 0.005, 0.0004, 0.005, 0.023)
EXPRESS: Final = Prices("S3 Express One Zone", 0.00113, 0.00003, 0.00113, 0.11, 0.0032, 0.0006)
"""List prices, us-east-1. Express: one zone; its buckets list in no order, so gc does not work there."""


class Bucket(Store):
    """Names, sizes and ages. ``partitions``: how S3 has split the key space so far; 0: it never throttles."""

    name = "simulated"
    where = "s3://simulated"

    def __init__(
        self, clock: Callable[[], float], *, partitions: int = 256, limit_part: float = 1.0, seed: int = 0
    ) -> None:
        """``limit_part``: of S3's limits, for a fleet that is simulated by a part of its servers."""
        self.objects: dict[str, tuple[int, float]] = {}
        self.requests: Counter[str] = Counter()
        self.throttled: Counter[str] = Counter()
        """Requests that got a 503, attempts counted each."""
        self.by_second: defaultdict[tuple[int, int, bool], int] = defaultdict(int)
        """(Second, partition, is a write) -> requests served."""
        self.last_s = 0.0
        """How long the last request took."""
        self._clock = clock
        self._partitions = partitions
        self._limits = (READS_PER_S * limit_part, WRITES_PER_S * limit_part)
        self._random = random.Random(f"bucket {seed}")
        self._lock = threading.Lock()
        self._names: Names = []

    def request(self, kind: str, name: str) -> None:
        """Count one request, tried as often as a client library does. Raises StoreError."""
        with self._lock:
            self.requests[kind] += 1
            now_s = self._clock()
            took_s = 0.0
            for attempt in range(ATTEMPTS):
                took_s += LATENCY_S[kind] * self._random.lognormvariate(0, 0.4)
                if self._serves(kind, name, now_s + took_s):
                    self.last_s = took_s
                    return
                self.throttled[kind] += 1
                took_s += self._random.uniform(0.0, 0.2 * 2**attempt)
            self.last_s = took_s
        raise StoreError(f"{kind} {name}: HTTP 503; the server asks to slow down", cause="throttled")

    def _serves(self, kind: str, name: str, at_s: float) -> bool:
        if not self._partitions:
            return True
        digits = name.partition("/")[2][:2]
        first = int(digits, 16) if digits not in ("", "ma") else 255  # the manifest sorts behind all shards
        partition = first * self._partitions // 256
        is_write = kind in WRITES
        place = (int(at_s), partition, is_write)
        if self.by_second[place] >= self._limits[is_write]:
            return False
        self.by_second[place] += 1
        return True

    def busiest(self, *, writes: bool) -> int:
        """The most requests that one partition has served in one second."""
        return max((count for (_, _, kind), count in self.by_second.items() if kind is writes), default=0)

    def put(self, name: str, size_bytes: int) -> bool:
        """Write an object; False: it was there already. Raises StoreError."""
        self.request("put", name)
        is_new = name not in self.objects
        self.objects[name] = (size_bytes, self._clock())
        return is_new

    def head(self, name: str) -> ObjectInfo | None:
        if name.endswith("manifest.json"):
            return ObjectInfo(name, 1000, 0.0)
        self.request("head", name)
        found = self.objects.get(name)
        return None if found is None else ObjectInfo(name, *found)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        names = self._sorted()
        position = bisect.bisect_right(names, max(start_after, prefix))
        while True:
            page = names[position : position + LIST_PAGE]
            self.request("list", page[0] if page else prefix)
            for name in page:
                if not name.startswith(prefix):
                    return
                found = self.objects.get(name)
                if found is not None:
                    yield ObjectInfo(name, *found)
            if len(page) < LIST_PAGE:
                return
            position += LIST_PAGE

    def _sorted(self) -> Names:
        with self._lock:
            if len(self._names) != len(self.objects):
                self._names = sorted(self.objects)
            return self._names

    def delete(self, names: Sequence[str]) -> None:
        self.request("delete", names[0])
        for name in names:
            del self.objects[name]

    def read_into(self, name: str, offset: int, memory: memoryview) -> None:
        raise StoreError(name, cause="missing")

    def write(self, name: str, memory: memoryview) -> None:
        self.put(name, memory.nbytes)

    def refresh(self, name: str, size_bytes: int) -> bool:
        self.request("put", name)
        return name in self.objects

    def close(self) -> None:
        pass
