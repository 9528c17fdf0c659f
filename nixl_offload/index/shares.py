"""Whose chunks go first when a tier is full: those of the salt that holds most beyond its share.

Threading: none; owned by one index and called by its thread. No I/O, no clock.
Memory: 11 bytes per node, and for each of at most ``MAX_SALTS`` salts that hold something some hundred bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Final

from nixl_offload.index.links import Links, Nodes, SecondLinks
from nixl_offload.index.policy import Policy, Victims
from nixl_offload.types import NO_SALT, Salt

MAX_SALTS: Final = 65_535
"""Salts told apart at a time: those that hold something. What more there are count as ``NO_SALT``."""


class Shares:
    """What each salt holds of a tier, by a *number* that a salt has for as long as it holds something."""

    __slots__ = ("_beyond", "_bytes", "_number_of_node", "_numbers", "_salts", "_unused", "links", "share_bytes")

    def __init__(self, links: Links, share_bytes: int) -> None:
        """``links``: those of the index. ``share_bytes``: what one salt may hold once there is no room."""
        self.share_bytes = share_bytes
        self.links = SecondLinks(links)
        """For queues of one salt's nodes."""
        self._number_of_node = array("H", [0])
        self._numbers: dict[Salt, int] = {NO_SALT: 0}
        self._salts = [NO_SALT]
        """By number; of an unused one, that of the last."""
        self._bytes = [0]
        """By number."""
        self._unused: list[int] = []
        self._beyond: set[int] = set()
        """The numbers of the salts that hold more than their share; less than 1 / share of them."""

    def grow(self, nodes: int) -> None:
        """Make room for node numbers below this, which is more than ever before."""
        self._number_of_node.frombytes(bytes(2 * (nodes - len(self._number_of_node))))
        self.links.grow(nodes - 1)

    def number(self, node: int) -> int:
        """Return the number of the salt of a node in use."""
        return self._number_of_node[node]

    def salt(self, node: int) -> Salt:
        """Return the salt of a node in use."""
        return self._salts[self._number_of_node[node]]

    def held_bytes(self) -> dict[Salt, int]:
        """Return what each salt holds that holds something. For checks."""
        return {salt: self._bytes[number] for salt, number in self._numbers.items() if self._bytes[number]}

    def enter(self, node: int, salt: Salt, slot_bytes: int) -> None:
        """Count a new node's slot for a salt."""
        number = self._numbers.get(salt)
        if number is None:
            number = self._new_number(salt)
        self._number_of_node[node] = number
        self._add(number, slot_bytes)

    def enter_many(self, size_bytes: int) -> None:
        """Count the slots of nodes that were never handed out before: nobody knows whose they are."""
        self._add(0, size_bytes)

    def leave(self, node: int, slot_bytes: int) -> None:
        """Count a node's slot no longer."""
        number = self._number_of_node[node]
        self._add(number, -slot_bytes)
        if number and not self._bytes[number]:
            del self._numbers[self._salts[number]]
            self._unused.append(number)

    def beyond(self, salt: Salt, slot_bytes: int) -> list[int]:
        """Return the numbers of the salts beyond their share, were a slot given to ``salt`` now; the farthest first."""
        held = {number: self._bytes[number] for number in self._beyond}
        number = self._numbers.get(salt)
        if number is not None and self._bytes[number] + slot_bytes > self.share_bytes:
            held[number] = self._bytes[number] + slot_bytes
        return sorted(held, key=held.__getitem__, reverse=True)

    def _new_number(self, salt: Salt) -> int:
        if self._unused:
            number = self._unused.pop()
            self._salts[number] = salt
        elif len(self._salts) > MAX_SALTS:
            return 0
        else:
            number = len(self._salts)
            self._salts.append(salt)
            self._bytes.append(0)
        self._numbers[salt] = number
        return number

    def _add(self, number: int, size_bytes: int) -> None:
        self._bytes[number] += size_bytes
        if self._bytes[number] > self.share_bytes:
            self._beyond.add(number)
        else:
            self._beyond.discard(number)

    # For tests

    def check(self, held_bytes: dict[int, int]) -> None:
        """Assert every invariant. ``held_bytes``: by number, what its nodes take."""
        assert {number: size for number, size in enumerate(self._bytes) if size} == held_bytes, "bytes are wrong"
        assert self._beyond == {number for number, size in held_bytes.items() if size > self.share_bytes}
        assert set(self._numbers.values()) == {0, *held_bytes}, "a number was not taken back"
        assert len(self._numbers) + len(self._unused) == len(self._salts), "a number is used twice"
        assert all(self._salts[number] == salt for salt, number in self._numbers.items())


class SharePolicy(Policy):
    """One policy over all nodes, and beside it one over those of each salt, which choose for themselves."""

    __slots__ = ("_all", "_make_policy", "_of_salt", "_shares", "_slot_bytes", "_victims")

    def __init__(
        self, make_policy: Callable[[Links, Victims | None], Policy], links: Links, shares: Shares, slot_bytes: int
    ) -> None:
        """``make_policy`` makes one over links; the second argument is what it shares with others, if with any."""
        self._make_policy = make_policy
        self._all = make_policy(links, None)
        self._shares = shares
        self._slot_bytes = slot_bytes
        self._of_salt: dict[int, Policy] = {}
        """By number. They stay, empty, when a number is unused: there are ever so few."""
        self._victims = Victims()
        """Of all salts, in one table: each on its own would keep that of its largest time for ever."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[int]:
        return iter(self._all)

    def add(self, node: int) -> None:
        """In both."""
        self._all.add(node)
        self._own(node).add(node)

    def add_many(self, nodes: Nodes) -> None:
        """In both. They are nodes of ``NO_SALT``."""
        self._all.add_many(nodes)
        self._of_number(0).add_many(nodes)

    def touch(self, node: int) -> None:
        """In both."""
        self._all.touch(node)
        self._own(node).touch(node)

    def park(self, node: int) -> None:
        """In both."""
        self._all.park(node)
        self._own(node).park(node)

    def unpark(self, node: int) -> None:
        """In both."""
        self._all.unpark(node)
        self._own(node).unpark(node)

    def remove(self, node: int) -> None:
        """In both."""
        self._all.remove(node)
        self._own(node).remove(node)

    def victim(self) -> int | None:
        """Choose among all, whoever holds how much."""
        node = self._all.victim()
        if node is not None:
            self._own(node).remove(node)
        return node

    def victim_beyond_share(self, salt: Salt) -> int | None:
        """Candidate -> unknown: one of the salt that will be farthest beyond its share when ``salt`` has another slot.

        None: no salt beyond its share has a candidate.
        """
        for number in self._shares.beyond(salt, self._slot_bytes):
            node = self._of_number(number).victim()
            if node is not None:
                self._all.remove(node)
                return node
        return None

    def claim(self, node: int, salt: Salt) -> None:
        """A candidate or parked node turns out to be this salt's."""
        if self._shares.salt(node) == salt:
            return
        is_candidate = self._shares.links.linked(node)
        if is_candidate:
            self._own(node).remove(node)
        self._shares.leave(node, self._slot_bytes)
        self._shares.enter(node, salt, self._slot_bytes)
        if is_candidate:
            self._own(node).add(node)

    def _own(self, node: int) -> Policy:
        return self._of_number(self._shares.number(node))

    def _of_number(self, number: int) -> Policy:
        policy = self._of_salt.get(number)
        if policy is None:
            policy = self._of_salt[number] = self._make_policy(self._shares.links, self._victims)
        return policy

    # For tests

    def check(self) -> None:
        """Assert that both agree."""
        of_salts = {node: number for number, policy in self._of_salt.items() for node in policy}
        assert sorted(of_salts) == sorted(self._all), "the policies of salts hold other nodes than that over all"
        assert sum(map(len, self._of_salt.values())) == len(self._all), "a node is two salts'"
        assert all(self._shares.number(node) == number for node, number in of_salts.items()), "a node is another's"
