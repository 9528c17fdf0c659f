"""Which chunk to give up when a tier is full: LRU and S3-FIFO over small integer nodes.

Threading: none; owned by one index and called by its thread. No I/O, no clock, no Python object per node: several
policies (one per size class) thread their queues through the two columns of one shared ``Links`` (``links.py``).
A pinned node is *parked*: out of its queue, so that ``victim`` never meets it, and back at the young end when unparked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator

from nixl_offload.index.links import Links, Nodes, Queue

POLICY_NAMES = ("lru", "s3fifo")


class Policy(ABC):
    """Orders candidates for eviction. Every method is O(1), ``victim`` amortised.

    A node is unknown, a candidate, or parked. Calling a method in another state than its docstring names is a bug of
    the caller and is not detected here; the index's table of transitions prevents it.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Count of candidates."""

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """All candidates, in no promised order. For checks."""

    @abstractmethod
    def add(self, node: int) -> None:
        """Unknown -> candidate."""

    @abstractmethod
    def add_many(self, nodes: Nodes) -> None:
        """``add`` each, in this order. Their mark is 0."""

    @abstractmethod
    def touch(self, node: int) -> None:
        """A candidate or parked node was used."""

    @abstractmethod
    def park(self, node: int) -> None:
        """Candidate -> parked."""

    @abstractmethod
    def unpark(self, node: int) -> None:
        """Parked -> candidate."""

    @abstractmethod
    def remove(self, node: int) -> None:
        """Candidate or parked -> unknown, not by eviction: the policy learns nothing from it."""

    @abstractmethod
    def victim(self) -> int | None:
        """Candidate -> unknown: choose one to give up. None if there is no candidate."""


class LruPolicy(Policy):
    """Least recently used. Costs nothing beyond ``Links``. One scan longer than the cache empties it."""

    __slots__ = ("_links", "_queue")

    def __init__(self, links: Links) -> None:
        self._links = links
        self._queue = Queue(links)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[int]:
        return iter(self._queue)

    def add(self, node: int) -> None:
        """Enter as the youngest."""
        self._queue.push(node)

    def add_many(self, nodes: Nodes) -> None:
        """Enter as the youngest."""
        self._queue.push_many(nodes)

    def touch(self, node: int) -> None:
        """Become the youngest; a parked node does when it is unparked."""
        if self._links.linked(node):
            self._queue.renew(node)

    def park(self, node: int) -> None:
        """Leave the queue."""
        self._queue.remove(node)

    def unpark(self, node: int) -> None:
        """Return as the youngest."""
        self._queue.push(node)

    def remove(self, node: int) -> None:
        """Leave the queue, if in it."""
        if self._links.linked(node):
            self._queue.remove(node)

    def victim(self) -> int | None:
        """Give up the oldest."""
        return self._queue.pop()


class Ghosts:
    """Fingerprints of the last ``capacity`` victims, in a direct-mapped table of 8 bytes per entry.

    Approximate, and harmlessly so: of two fingerprints that meet in one entry the older is forgotten.
    """

    __slots__ = ("_births", "_capacity", "_clock", "_fingerprints", "_mask")

    def __init__(self, capacity: int) -> None:
        entries = 1 << max(2 * capacity - 1, 1023).bit_length()
        self._capacity = capacity
        self._mask = entries - 1
        self._fingerprints = array("I", bytes(4 * entries))
        self._births = array("I", bytes(4 * entries))
        self._clock = capacity + 1
        """Counts victims. An entry born ``capacity`` victims ago or earlier is void, as are a new table's zeros."""

    @property
    def capacity(self) -> int:
        """How many victims back it remembers."""
        return self._capacity

    def remember(self, fingerprint: int) -> None:
        """Note a victim."""
        self._clock = (self._clock + 1) & 0xFFFFFFFF
        entry = fingerprint & self._mask
        self._fingerprints[entry] = fingerprint
        self._births[entry] = self._clock

    def recall(self, fingerprint: int) -> bool:
        """Whether ``fingerprint`` was remembered recently; forgets it."""
        entry = fingerprint & self._mask
        age = (self._clock - self._births[entry]) & 0xFFFFFFFF
        if age >= self._capacity or self._fingerprints[entry] != fingerprint:
            return False
        self._births[entry] = (self._clock - self._capacity) & 0xFFFFFFFF
        return True


class S3FifoPolicy(Policy):
    """S3-FIFO (Yang et al., SOSP 2023): what is used only once passes through a small queue and leaves by it.

    New nodes enter ``small``, which is held near a tenth of all candidates; used twice there, they move to ``main``,
    where each use buys another round, three at most. A victim of ``small`` that returns soon enters ``main`` at once.
    So a scan, however long, costs the hot set little. Costs 16 to 32 bytes per node, taken at the first eviction.

    ``fingerprint_of(node)`` gives 32 bits that identify the content of a node across evictions.
    """

    __slots__ = ("_fingerprint_of", "_ghosts", "_links", "_main", "_mark", "_small")

    _USES = 0b011
    """Mark: uses since it entered its queue, 0 to 3."""
    _IN_MAIN = 0b100
    """Mark: belongs to ``main``, also while parked."""
    _USES_TO_MOVE = 2

    def __init__(self, links: Links, fingerprint_of: Callable[[int], int]) -> None:
        self._links = links
        self._mark = links.mark
        self._small = Queue(links)
        self._main = Queue(links)
        self._ghosts: Ghosts | None = None
        self._fingerprint_of = fingerprint_of

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __iter__(self) -> Iterator[int]:
        yield from self._small
        yield from self._main

    def add(self, node: int) -> None:
        """Enter ``small``, or ``main`` if given up lately."""
        if self._ghosts is not None and self._ghosts.recall(self._fingerprint_of(node)):
            self._mark[node] = self._IN_MAIN
            self._main.push(node)
        else:
            self._mark[node] = 0
            self._small.push(node)

    def add_many(self, nodes: Nodes) -> None:
        """Enter ``small``, or, each for itself, ``main``."""
        if self._ghosts is None:
            self._small.push_many(nodes)
        else:
            for node in nodes.tolist():
                self.add(node)

    def touch(self, node: int) -> None:
        """Count a use, three at most."""
        if self._mark[node] & self._USES != self._USES:
            self._mark[node] += 1

    def park(self, node: int) -> None:
        """Leave the queue, keeping uses and rank."""
        self._queue_of(node).remove(node)

    def unpark(self, node: int) -> None:
        """Return to the queue it came from, as its youngest."""
        self._queue_of(node).push(node)

    def remove(self, node: int) -> None:
        """Leave the queue, if in it."""
        if self._links.linked(node):
            self._queue_of(node).remove(node)

    def victim(self) -> int | None:
        """Give up the first of ``small`` or of ``main`` that its uses do not save."""
        while True:
            if not self._main or 10 * len(self._small) >= len(self):
                node = self._small.pop()
                if node is None:
                    return None
                if self._mark[node] & self._USES < self._USES_TO_MOVE:
                    self._remember(self._fingerprint_of(node))
                    return node
                self._mark[node] = self._IN_MAIN
                self._main.push(node)
            else:
                node = self._main.pop()
                assert node is not None, "main is not empty"
                if not self._mark[node] & self._USES:
                    return node
                self._mark[node] -= 1
                self._main.push(node)

    def _remember(self, fingerprint: int) -> None:
        # The table is made when the first victim shows how many candidates fit; a cache that doubled starts a new one.
        candidates = max(len(self), 1)
        if self._ghosts is None or candidates > 2 * self._ghosts.capacity:
            self._ghosts = Ghosts(candidates)
        self._ghosts.remember(fingerprint)

    def _queue_of(self, node: int) -> Queue:
        return self._main if self._mark[node] & self._IN_MAIN else self._small


def make_policy(name: str, links: Links, fingerprint_of: Callable[[int], int]) -> Policy:
    """Make a policy by its config name. Raises ValueError naming the known ones."""
    if name == "lru":
        return LruPolicy(links)
    if name == "s3fifo":
        return S3FifoPolicy(links, fingerprint_of)
    raise ValueError(f"unknown eviction policy {name!r}; known: {', '.join(POLICY_NAMES)}")
