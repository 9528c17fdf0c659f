"""How many leading links of a chain are there? Found by asking about few of them, many at a time.

Threading: none; one owner. No I/O, no clock.

Prefixes are stored front to back, so "the link is there" is nearly always true up to some point and false from there
on. A search of fan-out k therefore asks about k positions at once and cuts the range by k + 1 with each round: three
rounds of 16 settle any chain of up to 4,300 links. Where the chain has a hole, the search never claims a link beyond
one that it knows to be absent; what it did not ask about may be wrong, and then a load fails and is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

FAN_OUT = 16


class ChainSearch:
    """One search. Ask ``next_round``, tell each result by ``answer``, until ``done``; then ``boundary`` is the result.

    The first round asks about the first and the last link too: "nothing" and "everything" are the commonest answers.
    """

    __slots__ = ("_asked", "_high", "_infer", "_low", "_outstanding", "_present", "fan_out", "length", "rounds")

    def __init__(self, length: int, fan_out: int = FAN_OUT, *, infer: bool = True) -> None:
        """Search a chain of ``length`` links. ``infer=False``: claim only links that were asked about, each of them."""
        if length < 0 or fan_out < 2:
            raise ValueError(f"length {length}, fan_out {fan_out}; allowed: from 0, from 2")
        self.length = length
        self.fan_out = fan_out
        self.rounds = 0
        self._infer = infer
        self._low = 0
        """Links before it are taken for present."""
        self._high = length
        """The first link known to be absent."""
        self._present: set[int] = set()
        self._asked: set[int] = set()
        self._outstanding: set[int] = set()

    @property
    def boundary(self) -> int:
        """How many leading links are there, as far as is known. Never more than the first known absent one."""
        return self._low

    @property
    def known(self) -> int:
        """As ``boundary``, for whoever cannot wait until it is ``done``: up to the first question that is still out."""
        return min([self._low, *self._outstanding])

    @property
    def probes(self) -> int:
        """How many links were asked about."""
        return len(self._asked)

    @property
    def found(self) -> int:
        """How many were said to be present."""
        return len(self._present)

    @property
    def done(self) -> bool:
        """Whether ``boundary`` is final: no answer that is still out could change it."""
        return not self._open() and not self._waiting()

    def next_round(self) -> list[int]:
        """Return the positions to ask about now; empty while answers that matter are still out, and when done."""
        if self._waiting():
            return []
        positions = self._open()
        if positions:
            self.rounds += 1
            self._asked.update(positions)
            self._outstanding.update(positions)
        return positions

    def answer(self, position: int, present: bool) -> None:
        """Take an answer; one that nobody waits for is ignored. No answer to be had: say absent."""
        if position not in self._outstanding:
            return
        self._outstanding.discard(position)
        if present:
            self._present.add(position)
            if position < self._high:
                self._low = max(self._low, position + 1)
        elif position < self._high:
            self._high = position
            if self._low > position:  # a hole: what lies behind it is of no use
                self._low = max((known + 1 for known in self._present if known < position), default=0)

    def _waiting(self) -> bool:
        return any(position < self._high for position in self._outstanding)

    def _open(self) -> list[int]:
        """Positions worth asking about next."""
        low, unknown = self._low, self._high - self._low
        if unknown <= 0:
            if self._infer:
                return []
            return [position for position in range(self._low) if position not in self._asked]
        positions: Sequence[int]
        if unknown <= self.fan_out:
            positions = range(low, self._high)
        elif not self._asked:
            last = self.fan_out - 1
            positions = [low + step * (unknown - 1) // last for step in range(self.fan_out)]
        else:
            parts = self.fan_out + 1
            positions = [low + (step + 1) * (unknown + 1) // parts - 1 for step in range(self.fan_out)]
        return [position for position in positions if position not in self._outstanding]


class AskAll:
    """The same questions and answers as ``ChainSearch``, for a few links of which each is wanted: one round of all."""

    __slots__ = ("_outstanding", "boundary", "found", "length", "probes", "rounds")

    def __init__(self, length: int) -> None:
        self.length = length
        self.rounds = 0
        self.probes = 0
        self.found = 0
        """How many were said to be present."""
        self.boundary = length
        """The first that was not."""
        self._outstanding = set(range(length))

    @property
    def known(self) -> int:
        """As ``boundary``, up to the first question that is still out."""
        return min([self.boundary, *self._outstanding])

    @property
    def done(self) -> bool:
        """Whether every answer is in."""
        return not self._outstanding

    def next_round(self) -> list[int]:
        """Return all positions, once."""
        if self.rounds:
            return []
        self.rounds, self.probes = 1, self.length
        return list(range(self.length))

    def answer(self, position: int, present: bool) -> None:
        """Take an answer; one that nobody waits for is ignored."""
        if position not in self._outstanding:
            return
        self._outstanding.discard(position)
        if present:
            self.found += 1
        else:
            self.boundary = min(self.boundary, position)


Search = ChainSearch | AskAll
