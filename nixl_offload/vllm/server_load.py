"""Counts the requests that wait for the GPU and those that run on it, for the choice between loading and computing.

Threading: the scheduler's thread.
"""

from __future__ import annotations

from typing import NamedTuple


class ServerLoad(NamedTuple):
    """How many requests a prefill would delay."""

    waiting: int = 0
    """For the GPU; not those that wait for a load."""
    running: int = 0


class ServerLoadCounter:
    """Follows requests from their arrival to their first allocation, and counts those of the last step."""

    def __init__(self) -> None:
        self._waiting: set[str] = set()
        self.running = 0
        """How many requests the last step runs."""

    def arrived(self, request_id: str) -> None:
        """Record a request that the scheduler has queued."""
        self._waiting.add(request_id)

    def allocated(self, request_id: str) -> None:
        """Record a request that runs from now on, or waits for its load; or one that has finished."""
        self._waiting.discard(request_id)

    def beside(self, request_id: str) -> ServerLoad:
        """Return the load of all requests but one."""
        return ServerLoad(len(self._waiting) - (request_id in self._waiting), self.running)
