"""How many leading links of a chain are there? Found by asking about few of them, many at a time.

Threading: none; one owner. No I/O, no clock.

Prefixes are stored front to back, so "the link is there" is nearly always true up to some point and false from there
on. A search asks about 16 positions at once and cuts the range by 17 with each round: three rounds settle any chain of
up to 4,300 links. Where the chain has a hole, the search never claims a link beyond one that it knows to be absent;
what it did not ask about may be wrong, and then a load fails and is computed.
"""

from __future__ import annotations

from typing import Final

FAN_OUT: Final = 16


class ChainSearch:
    """One search. Ask ``next_round``, pass each result to ``answer``, until ``done``; then ``boundary`` is the result.

    The first round asks about the first and the last link too: "nothing" and "everything" are the commonest answers.
    """

    __slots__ = ("_answers", "_certain", "_high", "_low", "length")

    def __init__(self, length: int, certain: int = 0) -> None:
        """Search a chain of ``length`` links. ``certain``: of the last links before the boundary so many are asked
        about one by one; others may be taken for present because a later one is.
        """
        self.length = length
        self._certain = certain
        self._low = 0
        """Links before it are taken for present."""
        self._high = length
        """The first link known to be absent."""
        self._answers: dict[int, bool | None] = {}
        """Of each position that was asked about; None while the answer is out."""

    @property
    def boundary(self) -> int:
        """How many leading links are there, as far as is known. Never more than the first known absent one."""
        return self._low

    @property
    def known(self) -> int:
        """The same for those who cannot wait until it is ``done``: up to the first question that is still out."""
        return min([self._low, *(position for position, answer in self._answers.items() if answer is None)])

    @property
    def done(self) -> bool:
        """Whether ``boundary`` is final: no answer that is still out could change it."""
        return not self._open() and not self._is_waiting()

    def next_round(self) -> list[int]:
        """Return the positions to ask about now; empty while answers that matter are still out, and when done."""
        positions = [] if self._is_waiting() else self._open()
        self._answers.update(dict.fromkeys(positions))
        return positions

    def answer(self, position: int, present: bool) -> None:
        """Take the answer to a question that is out. If there was none to be had, say absent."""
        assert self._answers[position] is None, "nobody has asked, or it is answered"
        self._answers[position] = present
        if position >= self._high:
            return
        if present:
            self._low = max(self._low, position + 1)
            return
        self._high = position
        if self._low > position:  # a hole: what lies behind it is of no use
            before = (each for each, answer in self._answers.items() if answer and each < position)
            self._low = max(before, default=-1) + 1

    def _is_waiting(self) -> bool:
        return any(answer is None and position < self._high for position, answer in self._answers.items())

    def _open(self) -> list[int]:
        """Return the positions worth asking about next."""
        low, unknown = self._low, self._high - self._low
        if not unknown:
            return [each for each in range(max(0, low - self._certain), low) if each not in self._answers]
        if unknown <= FAN_OUT:
            return list(range(low, self._high))
        if not self._answers:
            return [step * (unknown - 1) // (FAN_OUT - 1) for step in range(FAN_OUT)]
        return [low + (step + 1) * (unknown + 1) // (FAN_OUT + 1) - 1 for step in range(FAN_OUT)]


class AskAll:
    """The same questions and answers for a few links of which each is wanted: one round of all."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._answers: dict[int, bool] = {}
        self._is_asked = False

    @property
    def boundary(self) -> int:
        """The first link that is not there."""
        return next((each for each in range(self.length) if not self._answers.get(each, False)), self.length)

    @property
    def known(self) -> int:
        """The same, with answers still out."""
        return self.boundary

    @property
    def found(self) -> int:
        """How many links are there."""
        return sum(self._answers.values())

    @property
    def done(self) -> bool:
        """Whether every answer is in."""
        return len(self._answers) == self.length

    def next_round(self) -> list[int]:
        """Return all positions, once."""
        was_asked, self._is_asked = self._is_asked, True
        return [] if was_asked else list(range(self.length))

    def answer(self, position: int, present: bool) -> None:
        """Take an answer."""
        self._answers[position] = present
