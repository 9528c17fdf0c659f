"""When a transfer that moves by itself is worth a poll: shortly before it may be expected to end, then more and more
seldom.

An object is a transfer of its own, and a poll of each of them in each pass costs as much processor time as its request.
Threading: none; belongs to the one thread that drives its mover. Keeps no clock: time is passed in.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import Final

from nixl_offload.movers.base import Op, Transfer

FIRST_LOOK: Final = 0.75
"""The first look comes after this share of the time that such transfers take."""
FIRST_LOOK_LIMIT_S: Final = 0.1
"""After this at the latest: a server that was slow for a while may be quick again."""
LOOK_SHARE: Final = 0.125
"""Between two polls a transfer grows older by this share, and all looks are so far apart, of the time that the quickest
transfers take: so an end is known at most so much too late."""
LOOK_MIN_S: Final = 0.0005
LOOK_LIMIT_S: Final = 0.05
GAP_LIMIT_S: Final = 0.01


class PollSchedule:
    """The transfers in flight, by when to poll them next; and how long such transfers took of late."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, float, Transfer]] = []
        """When to look, a number that breaks ties, when it began, what."""
        self._numbers = count()
        self._usual_s: dict[tuple[Op, int], float] = {}
        """By direction, and by size as a power of two."""
        self._gap_s = LOOK_MIN_S
        self._not_before_s = 0.0

    @property
    def next_s(self) -> float:
        """When the next look is due; never, if nothing is in flight."""
        return max(self._heap[0][0], self._not_before_s) if self._heap else float("inf")

    def began(self, transfer: Transfer, now_s: float) -> None:
        """Take in a transfer that was just started."""
        wait_s = min(FIRST_LOOK * self._usual_s.get(_kind(transfer), 0.0), FIRST_LOOK_LIMIT_S)
        self._add(transfer, now_s, now_s + max(wait_s, LOOK_MIN_S))

    def take(self, now_s: float) -> list[tuple[float, Transfer]]:
        """Return what is due, with the times they began. Each belongs to the caller, until ``pending`` or ``ended``."""
        due = []
        self._not_before_s = now_s + self._gap_s
        while self._heap and self._heap[0][0] <= now_s:
            _, _, began_s, transfer = heapq.heappop(self._heap)
            due.append((began_s, transfer))
        return due

    def pending(self, transfer: Transfer, began_s: float, now_s: float) -> None:
        """A poll found it pending."""
        wait_s = min(LOOK_SHARE * (now_s - began_s), LOOK_LIMIT_S)
        self._add(transfer, began_s, now_s + max(wait_s, LOOK_MIN_S))

    def ended(self, transfer: Transfer, began_s: float, now_s: float) -> None:
        """A poll found it final. What ends sooner than others counts for more: nobody shall wait for slow times."""
        kind, took_s = _kind(transfer), now_s - began_s
        usual_s = self._usual_s.get(kind, took_s)
        self._usual_s[kind] = usual_s + (took_s - usual_s) * (0.25 if took_s < usual_s else 0.125)
        self._gap_s = min(max(LOOK_SHARE * min(self._usual_s.values()), LOOK_MIN_S), GAP_LIMIT_S)

    def _add(self, transfer: Transfer, began_s: float, due_s: float) -> None:
        heapq.heappush(self._heap, (due_s, next(self._numbers), began_s, transfer))


def _kind(transfer: Transfer) -> tuple[Op, int]:
    return transfer.op, transfer.bytes_total.bit_length()
