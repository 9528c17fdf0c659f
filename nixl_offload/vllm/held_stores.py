"""Requests that offer nothing to the store, because another connector may have filled their blocks wrongly.

Beside other connectors (MultiConnector) one of these may load within a step. Whether that went well is known when the
step is over, and what was computed from it meanwhile is worth as much: decision 0023.

Threading: the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState


class HeldStores:
    """Says which requests wait for the outcome of some step."""

    def __init__(self) -> None:
        self.is_alone = False
        """No other connector loads beside ours."""
        self.requests: dict[str, int] = {}
        """Those that wait -> the last step in which another connector loads, and may have filled their blocks."""
        self._allocated: dict[str, tuple[RequestOffloadState, bool]] = {}
        """Requests that were given blocks in this step, and whether we load some of these: if not, another may."""
        self._doubtful_step = 0
        """The last step in which another connector loads."""

    def allocated(self, status: RequestOffloadState, *, we_load: bool) -> None:
        """A request that was looked up in this step is given blocks."""
        if not self.is_alone:
            self._allocated[status.req.request_id] = status, we_load

    def rename(self, request_id: str, name: str) -> None:
        """A request that has ended has another name from now on."""
        if request_id in self.requests:
            self.requests[name] = self.requests.pop(request_id)

    def scheduled(self, step: int, heard_steps: int, computing: Collection[str]) -> None:
        """A step is scheduled, in which the requests ``computing`` compute; of ``heard_steps`` the outcome is known.

        Hold those back that were given blocks in a step whose outcome is not known and in which another connector
        loads, or later.
        """
        if not self._allocated and not self.requests:
            return
        for request_id, (status, we_load) in self._allocated.items():
            known_tokens = status.num_locally_computed_tokens
            if not we_load and request_id in computing and status.req.num_computed_tokens > known_tokens:
                self._doubtful_step = step
        self.requests = {request: until for request, until in self.requests.items() if until > heard_steps}
        if self._doubtful_step > heard_steps:
            self.requests.update(dict.fromkeys(self._allocated, self._doubtful_step))
        self._allocated.clear()
