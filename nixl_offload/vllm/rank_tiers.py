"""The tiers that a rank has open or is opening: from the message that says where they are, over sleep, to the end.

Threading: the worker's main thread. Each tier opens, and closes, on a thread of its own.
Ownership: what is open belongs to the ``ChainEngine``; what is being opened, to nobody until that has it.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain

from nixl_offload.engine import ChainEngine, TierEngine
from nixl_offload.errors import TierError
from nixl_offload.tiers.kinds import AnyPlace
from nixl_offload.vllm.background import CLOSE_S, BackgroundOpening, in_background, join_all

WAKE_UP_S = 10.0
"""How long waking up waits for tiers to be open again."""


class RankTiers:
    """Opens tiers, by position in the config, and gives them to the engine."""

    def __init__(
        self,
        engine: ChainEngine,
        *,
        open_tier: Callable[[int, AnyPlace], TierEngine],
        joined: Callable[[int, AnyPlace, TierEngine], None],
        name_of: Callable[[int], str],
    ) -> None:
        """``open_tier`` opens one, on any thread, and raises what keeps it from that. ``joined`` is called with each
        that the engine has. ``name_of``: what messages call one.
        """
        self._engine = engine
        self._open_tier = open_tier
        self._joined = joined
        self._name_of = name_of
        self.number = 0
        """As ``ServingTiers.number``."""
        self._places: dict[int, AnyPlace] = {}
        """The tiers that are open, or being opened, or were before the rank slept."""
        self._openings: dict[int, BackgroundOpening[TierEngine]] = {}
        """Until the engine has them."""
        self._ending: defaultdict[int, list[threading.Thread]] = defaultdict(list)
        """These open or close what was given up, and may still touch KV memory."""
        self._sleeps = False
        """KV memory has gone away, and nothing is open."""

    @property
    def is_opening(self) -> bool:
        """Whether something is not open yet that was asked for."""
        return bool(self._openings)

    @property
    def failed(self) -> frozenset[int]:
        """Those that could not be opened so far."""
        return frozenset(position for position, opening in self._openings.items() if opening.error is not None)

    def open(self, places: Mapping[int, AnyPlace], number: int) -> None:
        """Begin to open tiers. One that was asked for already is left as it is, unless ``number`` is a later one: then
        all that is open is closed first, and nothing may be under way there.
        """
        if number != self.number:
            self._give_up()
            for position, engine in self._engine.part().items():
                self._ending[position] += in_background(partial(engine.close, 0.0))
            self._places, self.number = {}, number
        for position, place in places.items():
            if position not in self._places:
                self._places[position] = place
                if not self._sleeps:
                    self._begin(position)

    def take_opened(self) -> None:
        """Give the engine what was opened since the last call. Costs nothing where nothing is being opened."""
        for position, opening in list(self._openings.items()) if self._openings else ():
            engine = opening.take()
            if engine is not None:
                self._engine.join(position, engine)
                del self._openings[position]
                self._joined(position, self._places[position], engine)

    def sleep(self, drain_timeout_s: float) -> None:
        """Finish what ``drain_timeout_s`` allows, and let go of every registration. Idempotent.

        Raises TierError where a transfer, or an opening, that does not end may still touch KV memory; then what was
        closed is opened again.
        """
        if self._sleeps:
            return
        if not self.close() or not self._engine.release(drain_timeout_s):
            self._reopen()
            raise TierError(
                "the engine cannot sleep: a transfer, or the opening of a tier, has not ended, and may still touch the "
                "KV cache. Wake it up; after a restart with storage that answers it can sleep again",
                cause="timeout",
            )
        self._sleeps = True

    def wake_up(self) -> None:
        """Open again what ``sleep`` has closed, at the same places. Waits ``WAKE_UP_S`` at most."""
        if not self._sleeps:
            return
        self._sleeps = False
        self._reopen()
        until_s = time.monotonic() + WAKE_UP_S
        for opening in self._openings.values():
            opening.wait(max(0.0, until_s - time.monotonic()))
        self.take_opened()

    def close(self) -> bool:
        """Open nothing more. False: something that is being opened or closed did not end within ``CLOSE_S``."""
        self._give_up()
        return not join_all(list(chain.from_iterable(self._ending.values())), CLOSE_S)

    def _give_up(self) -> None:
        for position, opening in self._openings.items():
            self._ending[position] += opening.close()
        self._openings = {}

    def _reopen(self) -> None:
        for position in self._places.keys() - self._engine.open_tiers:
            self._begin(position)

    def _begin(self, position: int) -> None:
        self._ending[position] = [thread for thread in self._ending[position] if thread.is_alive()]
        self._openings[position] = BackgroundOpening(
            partial(self._open_tier, position, self._places[position]),
            lambda engine: engine.close(0.0),
            what=self._name_of(position),
            thread_name=f"nixl-offload-open-rank-{position}",
            after=self._ending[position].copy(),
        )
