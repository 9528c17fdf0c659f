"""A rank's tiers as one engine: the ``jobs.JobTable``, whose ``submit``, ``wait`` and ``finished`` it inherits, and the
tiers' engines, whose pumps take chunks from it.

Threading: one caller thread (vLLM's worker). A tier that hangs delays no other. No method but ``wait``, ``close`` and
``release`` waits, and those have limits.
Ownership: closes the engines. The host slab is the caller's, who closes it afterwards.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from nixl_offload.engine.jobs import JobTable
from nixl_offload.engine.pump import LEAKED, TierEngine
from nixl_offload.engine.streams import Fence
from nixl_offload.engine.transfer_statistics import TierStatus

logger = logging.getLogger(__name__)

CLOSE_PATIENCE_S = 2.0
"""How long engines may take to say that the deadline is over."""
_STEP_S = 0.001


class RankEngine(JobTable):
    """All tiers of one rank. Each submitted job and each ticket yields exactly one ``Completion``.

    After any failure still holds: tiers that work go on, and chunks of a tier that is not there are FAILED.
    """

    def __init__(self, tiers: int, **options: Any) -> None:
        """No tier is open yet. ``tiers``: how many positions there are for ``Location.tier``. ``options``: as for
        ``JobTable``.
        """
        super().__init__(**options)
        self._tiers = tiers
        self._engines: dict[int, TierEngine] = {}
        self._closed = False

    @property
    def open_tiers(self) -> frozenset[int]:
        """The tiers that this rank can use."""
        return frozenset(self._engines)

    def join(self, tier: int, engine: TierEngine) -> None:
        """From now on use ``engine`` for ``tier``, which had none; it is closed with the others."""
        assert tier not in self._engines, "a tier is open once"
        self._engines[tier] = engine
        self.use(each.queue for each in self._engines.values())

    def part(self) -> dict[int, TierEngine]:
        """Detach and return all engines, by tier; the caller closes them. Nothing may be under way."""
        parted, self._engines = self._engines, {}
        self.use(())
        return parted

    def compute_fence(self) -> Fence | None:
        """Mark this point of the compute stream for jobs that are submitted later; None: there is no tier yet."""
        for engine in self._engines.values():
            return engine.compute_fence()
        return None

    def statuses(self) -> tuple[TierStatus, ...]:
        """Return how each tier stands on this rank, by position."""
        missing = TierStatus(trouble="unavailable")
        engines = [self._engines.get(tier) for tier in range(self._tiers)]
        return tuple(missing if engine is None else engine.status() for engine in engines)

    def close(self, deadline_s: float = 5.0) -> None:
        """Finish what ``deadline_s`` allows, stores and moves included, in all tiers at the same time. Idempotent.

        Afterwards every job and ticket has ended, and ``finished`` and ``settled`` still give the last results. Returns
        within ``CLOSE_PATIENCE_S`` of the deadline.
        """
        if not self._closed:
            self._closed = True
            self._end(deadline_s)

    def release(self, deadline_s: float = 5.0) -> bool:
        """As ``close``, and have no tier afterwards: any of them may ``join`` again.

        Returns whether KV memory may go away: False where a transfer that did not end, now or earlier, may still touch
        it. Only those of the direct path do.
        """
        is_direct = any(status.access is not None and "direct" in status.access.paths for status in self.statuses())
        ended = self._end(deadline_s) and not LEAKED
        self.part()
        return ended or not is_direct

    def _end(self, deadline_s: float) -> bool:
        end_s = self.clock() + deadline_s
        while self.is_relaying and self.clock() < end_s:
            self.expire()
            time.sleep(_STEP_S)
        self.drop_waiting_relays()
        closers = []
        for engine in self._engines.values():
            closer = threading.Thread(target=_close_one, args=(engine, end_s), name="nixl-offload-close", daemon=True)
            try:
                closer.start()
                closers.append(closer)
            except RuntimeError:  # no thread to be had now: one after the other
                _close_one(engine, end_s)
        for closer in closers:
            closer.join(max(0.0, end_s + CLOSE_PATIENCE_S - self.clock()))
        for engine in self._engines.values():
            engine.queue.give_up("the engine was closed while storage hung")
        return not any(closer.is_alive() for closer in closers)


def _close_one(engine: TierEngine, end_s: float) -> None:
    try:
        engine.close(max(0.0, end_s - engine.queue.table.clock()))
    except Exception:
        logger.exception("The engine of tier %d did not close well", engine.queue.tier)
