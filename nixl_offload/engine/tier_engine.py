"""One tier on a rank: its queue in the rank's table, and the pump that works it off. Everything slow happens there.

Threading: the rank's caller thread (vLLM's worker) plus the pump.
Ownership: tensors belong to the caller, who keeps them alive, and the blocks of a job untouched until it is told of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from nixl_offload.engine.jobs import TierQueue
from nixl_offload.engine.pump import Pauses, Pump, PumpPaths
from nixl_offload.engine.streams import Fence
from nixl_offload.engine.transfer_statistics import TierStatus


class TierEngine(ABC):
    """Works off its queue. Whatever fails, each chunk gets an outcome, and so does the host slot that it fills.

    Loads overtake stores. A store is FAILED when nothing can write to its location any more, or when a transfer has not
    ended within its quarantine, or with the pump: then only header and checksums tell late bytes from the next chunk's
    own. A load that storage does not answer in time is FAILED unless something may still write to its blocks.
    """

    def __init__(self, queue: TierQueue, compute_fence: Callable[[], Fence]) -> None:
        self.queue = queue
        self.compute_fence = compute_fence
        """Marks this point of the compute stream, the caller's own."""
        self._closed = False

    def _start(self, driven: PumpPaths, *, name: str, pauses: Pauses) -> None:
        """Start the pump. The last step of construction."""
        self._pump = Pump(self.queue, driven, name=name, pauses=pauses)
        self._pump.start()

    @abstractmethod
    def status(self) -> TierStatus:
        """Return what waits here and how the tier stands, for metrics. Quick; it may be a moment old."""

    def close(self, deadline_s: float = 5.0) -> None:
        """Finish what ``deadline_s`` allows; queued stores and moves become DROPPED then, all else FAILED. Idempotent.

        Afterwards the pump is gone, and new chunks fail at once. Memory that a hung transfer may still touch is kept
        for the life of the process; host slots that one may still touch are TAINTED.
        """
        if not self._closed:
            self._closed = True
            self._pump.stop(deadline_s)
