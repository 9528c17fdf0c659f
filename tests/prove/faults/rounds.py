"""The rounds of a cell: a server at work, a fault at one point of it, and after each round all that must hold.

Imported in the cell's process, once its clock is installed. Threading: one thread, beside the product's own.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from nixl_offload.cli import verify
from nixl_offload.index import State
from nixl_offload.tiers.shared import eviction
from nixl_offload.tiers.slot_tier import SlotTier
from nixl_offload.vllm import background, rank_tiers
from tests.prove.cells import Outcome
from tests.prove.faults.clock import CLOCK, real_s
from tests.prove.faults.context import Context
from tests.prove.faults.leaks import Leaks
from tests.prove.faults.media import MEMORY_BYTES
from tests.prove.faults.points import POINTS
from tests.prove.faults.server import Server, least_slab_bytes
from tests.prove.faults.table import faults_at
from tests.prove.server import DeadError, memory

ROUNDS_PER_SERVER: Final = 8
AGAIN: Final = 3
"""Chance decides whom a fault strikes: so often those that have struck nobody are tried again, and strike all there."""
MOST_FINDINGS: Final = 6
RECOVERS_S: Final = 10.0
"""Real time within which a chunk is stored and served again; the clock is set ahead meanwhile."""
_SHAPES: Final = ("two_groups", "per_layer", "direct_per_layer", "direct_blocks")
_WITH_MEMORY: Final = frozenset({"write-through", "promotion"})
_OR_WITHOUT: Final = frozenset({"start", "shutdown", "sleep"})
_SERVER_EACH: Final = frozenset({"start", "shutdown"})
"""Points that take a server of their own."""


class Cell:
    """One tier at one point. ``run`` tries every fault that makes sense there, ``rounds`` times each."""

    def __init__(self, tier: str, point: str, seed: int, rounds: int) -> None:
        self._tier = tier
        self._point = point
        self._rounds = rounds
        self._outcome = Outcome()
        self._rng = random.Random(f"{seed} {tier} {point}")
        root = Path.cwd() / "storage" / "kv"
        root.parent.mkdir()
        self._context = Context(tier, point, self._rng, root, self._outcome)
        self._shape, self._ranks = "two_groups", 1
        self._epoch_number = 0
        self._tried = {"rounds": 0, "rounds struck": 0}
        """A fault that is there once is a round, however often it strikes."""
        self._struck_before = Counter[str]()
        self._leaks = Leaks(self._context)

    def run(self) -> Outcome:
        """Return what came out."""
        background.FIRST_PAUSE_S = background.LONGEST_PAUSE_S = 0.02
        eviction.LOOK_S = 0.02
        rank_tiers.WAKE_UP_S = 0.2
        verify._PAUSES_BESIDE_AN_ENGINE_S = (0.1, 0.2)
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which is the point of it
        logging.getLogger("nixl_offload").addHandler(_Unexpected(self._found_dead))
        logging.getLogger("nixl_offload").addHandler(logging.StreamHandler())  # what is kept if something is found
        faults = faults_at(self._tier, self._point)
        try:
            self._try(faults)
            for _ in range(AGAIN if self._rounds > 1 else 0):
                self._context.is_sure = True
                self._try([fault for fault in faults if not self._struck[fault]])
        finally:
            self._context.medium.close()
        struck = self._struck
        self._outcome.counts = {
            **self._tried,
            "faults": struck.total(),
            **dict(sorted(struck.items())),
        }
        if self._rounds > 1 and not self._is_over:
            self._outcome.missed += [f"{fault} never struck" for fault in faults if not struck[fault]]
            if self._point == "sleep" and not self._context.slept:
                self._outcome.missed.append("no rank ever slept")
        return self._outcome

    @property
    def _struck(self) -> Counter[str]:
        return self._context.counts + self._context.faults.counts

    # Servers

    def _try(self, faults: Sequence[str]) -> None:
        rounds = [fault for fault in faults for _ in range(self._rounds)]
        self._rng.shuffle(rounds)
        per_server = 1 if self._point in _SERVER_EACH else ROUNDS_PER_SERVER
        for begin in range(0, len(rounds), per_server):
            if self._is_over:
                return
            self._context.where = f"epoch {self._epoch_number}"
            try:
                self._epoch(rounds[begin : begin + per_server])
            except DeadError as error:
                self._found_dead(str(error))
                return
            finally:
                self._epoch_number += 1
            self._leaks.check_after()

    def _epoch(self, faults: Sequence[str]) -> None:
        rng, context = self._rng, self._context
        options: dict[str, Any] = {
            "shape": self._next_shape(),
            "ranks": self._ranks if self._epoch_number else rng.choice((1, 1, 2)),
            "verify": "always" if self._tier == "memory" else rng.choice(("checksum", "always")),
            "staging_slots": rng.choice((2, 3, 8)),
        }
        self._shape, self._ranks = options["shape"], options["ranks"]
        if self._point == "start":
            self._start(faults[0], options)
            return
        server = self._make_server(options)
        try:
            server.until(lambda: server.is_open, "opening the tiers")
            context.fill()
            if self._point == "shutdown":
                self._shutdown(server, faults[0], options)
                return
            for number, fault in enumerate(faults):
                self._context.where = f"epoch {self._epoch_number}, round {number}, {fault}"
                if self._point == "sleep" or number == 0 or rng.random() < 0.2:
                    context.fill()
                POINTS[self._point](context, fault)
                self._lift(fault)
                self._settle(server)
                if self._is_over:
                    return
            if rng.random() < 0.3:
                server.catalog.clear()
                context.known.clear()
        finally:
            context.lift()
            self._end(server)

    def _next_shape(self) -> str:
        """A new shape is another model: with it nothing is found again."""
        if self._epoch_number and self._rng.random() < 0.8:
            return self._shape
        self._context.forget()
        return self._rng.choice(_SHAPES)

    def _make_server(self, options: dict[str, Any]) -> Server:
        medium = self._context.medium
        medium.slab_bytes = least_slab_bytes(options["shape"], options["ranks"])
        is_memory = self._tier == "memory"
        # What goes through memory goes neither direct nor through staging, so some points are tried without, too.
        with_memory = self._point in _WITH_MEMORY or (self._point in _OR_WITHOUT and self._rng.random() < 0.5)
        tiers = [memory(MEMORY_BYTES)] if is_memory or with_memory else []
        is_alone = is_memory and self._point in {"lookup", "store", "load", "eviction"}
        if not is_alone:
            tiers.append(medium.tier())
        if is_memory and self._point == "promotion" and self._rng.random() < 0.3:
            tiers[0]["unsaved_limit"] = "0B"
        self._context.server = Server(tiers, None if is_alone else medium, **options)
        return self._context.server

    def _start(self, fault: str, options: dict[str, Any]) -> None:
        """A server starts over what others have left, while the fault is there."""
        self._context.where += f", {fault}"
        context = self._context
        if self._server_before(options):
            context.spoil(fault, context.known)
        context.arm(fault)
        server = self._make_server(options)
        try:
            context.steps_for(1.0 if context.is_sure else self._rng.choice((0.02, 0.1)))
            if (context.is_sure or self._rng.random() < 0.5) and server.room >= 2:
                server.store(context.new())
                server.look_up(context.some(), limit_s=0.1)
            if fault in {"hang", "slow"}:
                context.steps_for(0.1)
            self._lift(fault)
            self._settle(server)
        finally:
            context.lift()
            self._end(server)

    def _server_before(self, options: dict[str, Any]) -> bool:
        """Whether something is there to be found."""
        if self._tier == "memory":
            return False
        if not self._context.known or self._rng.random() < 0.5:
            server = self._make_server(options)
            server.until(lambda: server.is_open, "opening the tiers")
            self._context.fill()
            self._end(server)
        return True

    def _shutdown(self, server: Server, fault: str, options: dict[str, Any]) -> None:
        self._context.where += f", {fault}"
        context, fresh = self._context, self._context.new(4)
        context.arm(fault)
        server.store(fresh)
        if self._rng.random() < 0.5:
            server.step()
        if server.room and context.known:
            found = server.look_up(context.some(), limit_s=0.1)[: server.room]
            if found:
                server.load(found)
        context.spoil(fault, context.known)
        self._end(server)
        context.keep(fresh)
        self._lift(fault)
        # The next server finds what is whole, and nothing else.
        after = self._make_server(options)
        try:
            self._settle(after)
        finally:
            self._end(after)

    def _lift(self, fault: str) -> None:
        """A round's fault is over."""
        self._context.lift()
        struck = self._struck
        self._tried["rounds"] += 1
        self._tried["rounds struck"] += struck[fault] > self._struck_before[fault]
        self._struck_before = struck

    def _end(self, server: Server) -> None:
        began_s = real_s()
        if not server.end(0.5):
            self._found_dead("what was being opened did not end")
        if real_s() > began_s + 20.0:
            self._found_dead(f"closing took {real_s() - began_s:.1f} s")
        server.check_guards()
        self._take_wrong(server)
        left = [number for number, job in server.jobs.items() if job.ranks_left]
        if left or server.open_tickets:
            self._found_dead(f"not told after the end: {server.state()}")

    # What must hold

    def _settle(self, server: Server) -> None:
        """With the fault gone, everything ends, nothing is held, and the tier serves again."""
        server.until(lambda: server.is_at_rest and server.is_open, "all that was under way")
        self._leaks.check_held(server)
        server.check_guards()
        server.serve(self._context.some())
        for number in self._rng.sample(sorted(self._context.spoilt), min(4, len(self._context.spoilt))):
            server.serve([number])
        self._context.spoilt.clear()
        self._recover(server)
        server.until(lambda: server.is_at_rest, "what the checks had begun")
        server.check_guards()
        self._leaks.check_held(server)
        self._take_wrong(server)

    def _take_wrong(self, server: Server) -> None:
        self._outcome.wrong += [f"{self._context.where}: {sentence}" for sentence in server.wrong]
        server.wrong.clear()

    def _recover(self, server: Server) -> None:
        """A new chunk is stored, in the farthest tier, too, and served."""
        tier, until_s, came = server.serving[-1], real_s() + RECOVERS_S, Counter[str]()
        while real_s() < until_s:
            server.check_guards()  # blocks of a load that failed are kept until then; with none left nothing is stored
            [number] = self._context.new()
            if not server.store([number]):
                came["refused"] += 1
            else:
                server.until(lambda: server.is_at_rest, "a store")
                state, served = tier.state(server.key(number)), server.serve([number])
                if served and state is State.READY:
                    self._context.keep([number])
                    return
                came[f"{state}, {'served' if served else 'not served'}"] += 1
            CLOCK.ahead_s += 61.0
            self._context.steps_for(0.01)
        troubles = [[status.trouble for status in rank.chain.statuses()] for rank in server.ranks]
        storing_bytes = server.catalog.counts().storing_bytes
        told = f"{dict(came)}; room for {server.room}; {storing_bytes} bytes being stored; {troubles}"
        slots = f"; {tier.statistics()}, {tier._index.held} held" if isinstance(tier, SlotTier) else ""
        self._found_dead(f"no chunk is stored and served again, but {told}{slots}")

    @property
    def _is_over(self) -> bool:
        outcome = self._outcome
        return len(outcome.wrong) + len(outcome.dead) + len(outcome.leaks) + len(outcome.missed) >= MOST_FINDINGS

    def _found_dead(self, words: str) -> None:
        self._outcome.dead.append(f"{self._context.where}: {words}")


class _Unexpected(logging.Handler):
    """Takes what the product logs of errors that it did not expect: with a trace, or as critical."""

    def __init__(self, found: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        if record.exc_info or record.levelno >= logging.CRITICAL:
            kind = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else ""
            trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
            self._found(f"an error that was not expected, {kind}: {record.getMessage()}\n{trace[-1500:]}")
