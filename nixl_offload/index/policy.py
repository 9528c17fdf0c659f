"""Which chunk to give up when a tier is full: LRU and S3-FIFO over small integer nodes.

Threading: none; owned by one index and called by its thread. No I/O, no clock, no Python object per node: several
policies (one per size class) thread their queues through the two columns of one shared ``Links``.
A pinned node is *parked*: out of its queue, so that ``victim`` never meets it, and back at the young end when unparked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator

POLICY_NAMES = ("lru", "s3fifo")


class Links:
    """The node space: hands out node numbers and holds the columns through which queues are threaded.

    Costs 9 bytes per node. A node that is in no queue is linked to itself. Node 0 is never handed out, so that other
    columns can use 0 for "none".
    """

    __slots__ = ("_free", "after", "before", "mark")

    def __init__(self) -> None:
        self.before = array("I", [0])
        self.after = array("I", [0])
        self.mark = bytearray(1)
        """One byte per node for the policy that holds it."""
        self._free = array("I")

    def __len__(self) -> int:
        """Count of nodes ever handed out, plus one: every node number is below it."""
        return len(self.after)

    def node(self) -> int:
        """Hand out a node that nobody uses, unlinked and with mark 0."""
        if self._free:
            return self._free.pop()
        node = len(self.after)
        self.before.append(node)
        self.after.append(node)
        self.mark.append(0)
        return node

    def free(self, node: int) -> None:
        """Take back a node. It must be in no queue."""
        self.mark[node] = 0
        self._free.append(node)

    @property
    def in_use(self) -> int:
        """Count of nodes handed out and not taken back, the roots of queues among them."""
        return len(self.after) - 1 - len(self._free)

    def linked(self, node: int) -> bool:
        """Whether ``node`` is in a queue."""
        return self.after[node] != node


class Queue:
    """A queue of nodes, oldest first. A node is in at most one queue at a time."""

    __slots__ = ("_after", "_before", "_length", "_links", "_root")

    def __init__(self, links: Links) -> None:
        self._links = links
        self._before = links.before
        self._after = links.after
        self._root = links.node()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Oldest first. The queue must not change meanwhile."""
        node = self._after[self._root]
        while node != self._root:
            yield node
            node = self._after[node]

    def push(self, node: int) -> None:
        """Put an unlinked node at the young end."""
        root, before, after = self._root, self._before, self._after
        last = before[root]
        before[node] = last
        after[node] = root
        after[last] = node
        before[root] = node
        self._length += 1

    def remove(self, node: int) -> None:
        """Take out a node that is in this queue."""
        before, after = self._before, self._after
        left, right = before[node], after[node]
        after[left] = right
        before[right] = left
        before[node] = after[node] = node
        self._length -= 1

    def pop(self) -> int | None:
        """Take out the oldest, or None."""
        node = self._after[self._root]
        if node == self._root:
            return None
        self.remove(node)
        return node

    def renew(self, node: int) -> None:
        """Move a node of this queue to the young end."""
        root, before, after = self._root, self._before, self._after
        right = after[node]
        if right == root:
            return
        left = before[node]
        after[left] = right
        before[right] = left
        last = before[root]
        before[node] = last
        after[node] = root
        after[last] = node
        before[root] = node


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
                    self._remember(node)
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

    def _queue_of(self, node: int) -> Queue:
        return self._main if self._mark[node] & self._IN_MAIN else self._small

    def _remember(self, node: int) -> None:
        # The table is made when the first victim shows how many candidates fit; a cache that doubled starts a new one.
        candidates = max(len(self), 1)
        if self._ghosts is None or candidates > 2 * self._ghosts.capacity:
            self._ghosts = Ghosts(candidates)
        self._ghosts.remember(self._fingerprint_of(node))


def make_policy(name: str, links: Links, fingerprint_of: Callable[[int], int]) -> Policy:
    """Make a policy by its config name. Raises ValueError naming the known ones."""
    if name == "lru":
        return LruPolicy(links)
    if name == "s3fifo":
        return S3FifoPolicy(links, fingerprint_of)
    raise ValueError(f"unknown eviction policy {name!r}; known: {', '.join(POLICY_NAMES)}")
