"""The nodes of an index, and queues of them threaded through two shared columns.

Threading: none; owned by one index and called by its thread. No Python object per node.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Nodes = npt.NDArray[np.uint32]
Numbers = npt.NDArray[np.int64]


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
        """Hand out a node that nobody uses, unlinked. Its mark is what its last user left there."""
        if self._free:
            return self._free.pop()
        node = len(self.after)
        self.before.append(node)
        self.after.append(node)
        self.mark.append(0)
        return node

    def new_nodes(self, count: int) -> int:
        """Hand out ``count`` nodes as ``node`` does, with numbers in a row and mark 0. Returns the first."""
        first = len(self.after)
        self._extend(count)
        return first

    def free(self, node: int) -> None:
        """Take back a node. It must be in no queue."""
        self._free.append(node)

    @property
    def in_use(self) -> int:
        """Count of nodes handed out and not taken back, the roots of queues among them."""
        return len(self.after) - 1 - len(self._free)

    def linked(self, node: int) -> bool:
        """Whether ``node`` is in a queue."""
        return self.after[node] != node

    def _extend(self, count: int) -> None:
        first = len(self.after)
        numbers = np.arange(first, first + count, dtype=np.uint32).tobytes()
        self.before.frombytes(numbers)
        self.after.frombytes(numbers)
        self.mark.extend(bytes(count))


class Queue:
    """A queue of nodes, oldest first. A node is in at most one queue at a time."""

    __slots__ = ("_after", "_before", "_length", "_root")

    def __init__(self, links: Links) -> None:
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

    def push_many(self, nodes: Nodes) -> None:
        """``push`` each, in this order."""
        if not len(nodes):
            return
        before = np.frombuffer(self._before, dtype=np.uint32)
        after = np.frombuffer(self._after, dtype=np.uint32)
        last = before[self._root]
        before[nodes[0]] = last
        before[nodes[1:]] = nodes[:-1]
        after[nodes[:-1]] = nodes[1:]
        after[nodes[-1]] = self._root
        after[last] = nodes[0]
        before[self._root] = nodes[-1]
        self._length += len(nodes)

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
