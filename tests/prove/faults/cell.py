"""A cell of the fault matrix: a server at work, a fault at one point of it, and after each round all that must hold.

Imported in the cell's process, once its clock is installed. Threading: one thread, beside the product's own. Ownership:
``lift`` ends what was armed, and the children that forked.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from nixl_offload.cli import verify
from nixl_offload.engine import LinkPaths
from nixl_offload.index import State
from nixl_offload.tiers.shared import eviction
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.tiers.shared.tier import SharedTier
from nixl_offload.tiers.slab.directory import least_bytes
from nixl_offload.tiers.slab.file import rank_file_name
from nixl_offload.tiers.slab.tier import SlabTier
from nixl_offload.tiers.slot_tier import SlotTier
from nixl_offload.vllm import background, rank_tiers
from tests.contexts import context_of
from tests.prove.cells import Outcome
from tests.prove.clock import CLOCK, real_s
from tests.prove.faults import ANSWERS, RESTING, faults_at
from tests.prove.faults.injection import ERRNOS, FOREVER, Armed, Faults
from tests.prove.faults.leaks import Leaks
from tests.prove.faults.media import MEMORY_BYTES, Medium
from tests.prove.faults.points import POINTS
from tests.prove.happenings import Piece
from tests.prove.server import DeadError, Server, config_of
from tests.s3.proxy import Rule
from tests.unit.engine_rig import SHAPES, kv_cache
from tests.unit.stored_rig import namespace_of

ROUNDS_PER_SERVER: Final = 8
AGAIN: Final = 3
"""Chance decides whom a fault strikes: so often those that have struck nobody are tried again, and strike all there."""
MOST_FINDINGS: Final = 6
RECOVERS_S: Final = 10.0
"""Real time within which a chunk is stored and served again; the clock is set ahead meanwhile."""
LEAVES_S: Final = 5.0
"""How long a forked child may take to exit."""
CLOSES_S: Final = 20.0
DIRECT_BYTES: Final = 4096
"""Runs of so many bytes go direct."""
KNOWN: Final = 24
"""So many chunks are asked for again and again."""
_SHAPES: Final = ("two_groups", "per_layer", "direct_per_layer", "direct_blocks")
_WITH_MEMORY: Final = frozenset({"write-through", "promotion"})
_OR_WITHOUT: Final = frozenset({"start", "shutdown", "sleep"})
_SERVER_EACH: Final = frozenset({"start", "shutdown"})
"""Points that take a server of their own."""


class FaultCell:
    """One tier at one point. ``run`` tries every fault that makes sense there, ``rounds`` times each."""

    server: Server
    """The one at work."""

    def __init__(self, tier: str, point: str, seed: int, rounds: int) -> None:
        self.tier = tier
        self.point = point
        self.rng = random.Random(f"{seed} {tier} {point}")
        self.outcome = Outcome()
        self.where = ""
        """Which round it is, in findings."""
        self.known: list[int] = []
        self.spoilt: set[int] = set()
        """Chunks that were damaged and not asked for since."""
        self.slept = 0
        self.is_sure = False
        """Whether a fault strikes wherever it can, not by chance."""
        root = Path.cwd() / "storage" / "kv"
        root.parent.mkdir()
        self.faults = Faults(root)
        self.medium = Medium("slab" if tier == "memory" else tier, root, is_small=point == "eviction")
        self._counts: Counter[str] = Counter()
        """How often each fault struck, beside those that ``faults`` counts."""
        self._rounds = rounds
        self._tried: Counter[str] = Counter({"rounds": 0, "rounds struck": 0})
        """A fault that is there once is a round, however often it strikes."""
        self._struck_before: Counter[str] = Counter()
        self._last = 0
        self._children: list[int] = []
        self._leaving: list[int] = []
        """Those that exit by themselves."""
        self._rule: Rule | None = None
        self._rule_fault = ""
        self._shape, self._ranks, self._epoch_number = "two_groups", 1, 0
        self._leaks = Leaks(root, self.faults, lambda sentence: self.outcome.leaks.append(f"{self.where}: {sentence}"))

    def run(self) -> Outcome:
        """Return what came out."""
        background.FIRST_PAUSE_S = background.LONGEST_PAUSE_S = 0.02
        eviction.LOOK_S = 0.02
        rank_tiers.WAKE_UP_S = 0.2
        LinkPaths.__init__.__kwdefaults__["direct_min_extent_bytes"] = DIRECT_BYTES  # type: ignore[index]
        verify._PAUSES_BESIDE_AN_ENGINE_S = (0.1, 0.2)
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which is the point of it
        logging.getLogger("nixl_offload").addHandler(_Unexpected(self.found_dead))
        logging.getLogger("nixl_offload").addHandler(logging.StreamHandler())  # what is kept if something is found
        faults = faults_at(self.tier, self.point)
        try:
            self._try(faults)
            for _ in range(AGAIN if self._rounds > 1 else 0):
                self.is_sure = True
                self._try([fault for fault in faults if not self._struck[fault]])
        finally:
            self.medium.close()
        struck = self._struck
        self.outcome.counts = {**self._tried, "faults": struck.total(), **dict(sorted(struck.items()))}
        if self._rounds > 1 and not self._is_over:
            self.outcome.missed += [f"{fault} never struck" for fault in faults if not struck[fault]]
            if self.point == "sleep" and not self.slept:
                self.outcome.missed.append("no rank ever slept")
        return self.outcome

    @property
    def _struck(self) -> Counter[str]:
        return self._counts + self.faults.counts

    @property
    def _is_over(self) -> bool:
        outcome = self.outcome
        return len(outcome.wrong) + len(outcome.dead) + len(outcome.leaks) + len(outcome.missed) >= MOST_FINDINGS

    def found_dead(self, words: str) -> None:
        """Note that something ended, or did not end."""
        self.outcome.dead.append(f"{self.where}: {words}")

    # What points do with the server.

    def new(self, count: int = 1) -> list[int]:
        """Return chunks that nobody has seen."""
        self._last += count
        return [*range(self._last - count + 1, self._last + 1)]

    def keep(self, numbers: Sequence[int]) -> None:
        """Ask for these from now on."""
        self.known = [*self.known, *numbers][-KNOWN:]

    def some(self) -> list[int]:
        """Return some that are known."""
        return self.rng.sample(self.known, min(len(self.known), self.rng.randint(1, 6)))

    def fill(self) -> None:
        """Have some stored."""
        fresh = self.new(8 if self.point in {"gc", "verify"} else 6)
        for begin in range(0, len(fresh), 4):
            self.server.store(fresh[begin : begin + 4])
            self.server.until(lambda: self.server.is_at_rest, "filling the tier")
        self.keep(fresh)

    def while_it_lasts(self, limit_s: float) -> None:
        """Step until nothing is under way."""
        self.steps_for(limit_s, lambda: self.server.is_at_rest)

    def steps_for(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Step."""
        until_s = real_s() + seconds
        while real_s() < until_s and not is_over():
            self.server.step()
            time.sleep(0.0005)

    # Faults

    def arm(self, fault: str, *, transfers: bool = True) -> None:
        """Have a fault in force: in time, in requests, in calls, or (``transfers``) in transfers; or none, where it is
        one that befalls chunks at rest.
        """
        rng = self.rng
        if fault == "clock jump":
            CLOCK.wall_ahead_s += rng.choice((-86_400.0, -3600.0, -5.0, 5.0, 3600.0, 86_400.0))
            CLOCK.ahead_s += rng.choice((0.0, 2.0, 40.0))
            self._counts[fault] += 1
            return
        if fault == "fork":
            self._fork()
            return
        if self.medium.is_bucket and (
            fault in ANSWERS or not transfers or not rng.randrange(2 if fault in RESTING else 3)
        ):
            self._rule, self._rule_fault = self.medium.inject(fault, rng), fault
        at_rest = fault in RESTING and fault != "flipped" and not (fault == "stale" and self.tier == "shared_dir")
        if at_rest or self._rule is not None or fault in ANSWERS:
            return
        calls = not self.medium.is_bucket and self.tier != "memory"
        calls = calls and (fault in ERRNOS or fault in {"slow", "hang", "late write"})
        calls = calls and (rng.random() < 0.6 or not transfers or self.is_sure)
        share, most = rng.choice((0.05, 0.3, 1.0)), rng.choice((1, 3, FOREVER))
        if fault in {"hang", "late write"} and calls:
            most = min(most, 3)
            # A slab's calls are those of a local disk, which the pump makes itself.
            calls = self.tier == "shared_dir" or self.point in {"start", "gc", "verify"}
        is_memory = fault == "OOM of staging"
        transfers = transfers and (not calls or rng.random() < 0.5 or self.is_sure)
        self.faults.armed = Armed(
            fault,
            rng.randrange(1 << 30),
            share=1.0 if self.is_sure else share,
            most=most,
            calls=calls or is_memory,
            transfers=transfers or is_memory,
        )

    def lift(self) -> None:
        """End what is in force."""
        self.faults.lift()
        rule, self._rule = self._rule, None
        if rule is not None:
            self._counts[self._rule_fault] += rule.hits
            rule.release()
        until_s = real_s() + LEAVES_S
        for child in self._leaving:
            while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and real_s() < until_s:
                time.sleep(0.005)
        for child in [*self._children, *self._leaving]:
            os.kill(child, signal.SIGKILL)  # nobody has waited for it, so the number is still its own
            os.waitpid(child, 0)
        self._children.clear()
        self._leaving.clear()

    def spoil(self, fault: str, numbers: Sequence[int]) -> None:
        """Damage some of these chunks where they rest, if ``fault`` is of that kind."""
        if fault not in RESTING:
            return
        if self.tier == "memory":
            self._spoil_memory(fault)
            return
        with self.faults.spared():
            pieces = self._pieces(numbers)
            if fault == "vanished" and self.rng.random() < 0.05:
                self.medium.wipe()
                self._counts[fault] += 1
            elif pieces:
                spoilt = self.medium.damage(fault, list(pieces), self.rng)
                self._counts[fault] += len(spoilt)
                self.spoilt |= {pieces[piece] for piece in spoilt}

    def _pieces(self, numbers: Iterable[int]) -> dict[Piece, int]:
        """Return where shards lie in the tier under test, as far as it has them, and of which chunk each is."""
        server, found = self.server, dict[Piece, int]()
        tier = server.opened.get(len(server.serving) - 1)
        for number in numbers:
            key = server.key(number)
            for rank in server.ranks:
                if isinstance(tier, SlabTier) and tier.state(key) is State.READY:
                    place = tier._index.location(key)
                    path = Path(tier.place.directory, rank_file_name(rank.number))
                    piece = Piece(path, place.offset, place.slot_bytes)
                elif isinstance(tier, SharedTier):
                    piece = Piece(self.medium.root / shard_name(server.namespace.name, key, rank.number))
                else:
                    continue
                if piece.path.exists():
                    found[piece] = number
        return found

    def _spoil_memory(self, fault: str) -> None:
        """Bits flip in a slot of memory that nobody writes to, or two slots change places."""
        tier = self.server.opened.get(0)
        ready = [] if tier is None else [key for key in tier._index if tier._index.state(key) is State.READY]
        if not ready:
            return
        host = self.rng.choice(self.server.ranks).host
        assert host is not None
        place, other = (tier._index.location(self.rng.choice(ready)) for _ in range(2))
        slot = host.slot(place.offset, place.slot_bytes).memory
        if fault == "flipped":
            slot[self.rng.randrange(place.slot_bytes)] ^= 1 << self.rng.randrange(8)
        elif other.slot_bytes != place.slot_bytes or other == place:
            return
        else:
            second = host.slot(other.offset, other.slot_bytes).memory
            before = slot.copy()
            slot[:] = second
            if fault == "swapped":
                second[:] = before
        self._counts[fault] += 1

    def _fork(self) -> None:
        """A child that holds what it has inherited until the fault is lifted; or frees it, and exits as others do."""
        leaves = self.rng.random() < 0.5
        child = os.fork()
        if not child:
            try:
                if leaves:
                    if "server" in vars(self):
                        vars(self.server).clear()
                    gc.collect()
                    ctypes.pythonapi.Py_Exit(0)  # what an uncaught SystemExit ends in
                signal.pause()
            finally:
                os._exit(1)
        (self._leaving if leaves else self._children).append(child)
        self._counts["fork"] += 1

    # Rounds

    def _try(self, faults: Sequence[str]) -> None:
        rounds = [fault for fault in faults for _ in range(self._rounds)]
        self.rng.shuffle(rounds)
        per_server = 1 if self.point in _SERVER_EACH else ROUNDS_PER_SERVER
        for begin in range(0, len(rounds), per_server):
            if self._is_over:
                return
            self.where = f"epoch {self._epoch_number}"
            try:
                self._epoch(rounds[begin : begin + per_server])
            except DeadError as error:
                self.found_dead(str(error))
                return
            finally:
                self._epoch_number += 1
            self._leaks.check_after()

    def _epoch(self, faults: Sequence[str]) -> None:
        rng = self.rng
        if not self._epoch_number or rng.random() >= 0.8:  # another model: with it nothing is found again
            self.known.clear()
            self.spoilt.clear()
            self._shape = rng.choice(_SHAPES)
        if not self._epoch_number:
            self._ranks = rng.choice((1, 1, 2))
        options: dict[str, Any] = {
            "verify": "always" if self.tier == "memory" else rng.choice(("checksum", "always")),
            "staging_slots": rng.choice((2, 3, 8)),
        }
        if self.point == "start":
            self._start(faults[0], options)
            return
        server = self._serve(options)
        try:
            server.until(lambda: server.is_open, "opening the tiers")
            self.fill()
            if self.point == "shutdown":
                self._shutdown(server, faults[0], options)
                return
            for number, fault in enumerate(faults):
                self.where = f"epoch {self._epoch_number}, round {number}, {fault}"
                if self.point == "sleep" or number == 0 or rng.random() < 0.2:
                    self.fill()
                POINTS[self.point](self, fault)
                self._lift(fault)
                self._settle(server)
                if self._is_over:
                    return
            if rng.random() < 0.3:
                server.catalog.clear()
                self.known.clear()
        finally:
            self.lift()
            self._end(server)

    def _serve(self, options: dict[str, Any]) -> Server:
        layout = kv_cache(SHAPES[self._shape], 0)[2]
        classes = [layout.slot_bytes(group) for group in range(len(layout.groups))]
        staging_bytes = options["staging_slots"] * max(classes)
        # The least, most of which is promised to the index: room for some ten chunks.
        self.medium.slab_bytes = least_bytes(context_of(namespace_of(), classes, world_size=self._ranks))
        is_memory = self.tier == "memory"
        # What goes through memory goes neither direct nor through staging, so some points are tried without, too.
        with_memory = self.point in _WITH_MEMORY or (self.point in _OR_WITHOUT and self.rng.random() < 0.5)
        tiers: list[dict[str, Any]] = []
        if is_memory or with_memory:
            tiers.append({"kind": "memory", "capacity": MEMORY_BYTES})
        if not is_memory or self.point not in {"lookup", "store", "load", "eviction"}:
            tiers.append(self.medium.tier())
        config = config_of(*tiers, staging_bytes=staging_bytes, verify=options["verify"])
        self.server = Server(config, shape=self._shape, ranks=self._ranks, is_hasty=True)
        return self.server

    def _start(self, fault: str, options: dict[str, Any]) -> None:
        """A server starts over what others have left, while the fault is there."""
        self.where += f", {fault}"
        if self.tier != "memory":
            if not self.known or self.rng.random() < 0.5:
                before = self._serve(options)
                before.until(lambda: before.is_open, "opening the tiers")
                self.fill()
                self._end(before)
            self.spoil(fault, self.known)
        self.arm(fault)
        server = self._serve(options)
        try:
            self.steps_for(1.0 if self.is_sure else self.rng.choice((0.02, 0.1)))
            if (self.is_sure or self.rng.random() < 0.5) and server.room >= 2:
                server.store(self.new())
                server.look_up(self.some(), patience_s=0.1)
            if fault in {"hang", "slow"}:
                self.steps_for(0.1)
            self._lift(fault)
            self._settle(server)
        finally:
            self.lift()
            self._end(server)

    def _shutdown(self, server: Server, fault: str, options: dict[str, Any]) -> None:
        self.where += f", {fault}"
        fresh = self.new(4)
        self.arm(fault)
        server.store(fresh)
        if self.rng.random() < 0.5:
            server.step()
        if server.room and self.known:
            found = server.look_up(self.some(), patience_s=0.1)[: server.room]
            if found:
                server.load(found)
        self.spoil(fault, self.known)
        self._end(server)
        self.keep(fresh)
        self._lift(fault)
        # The next server finds what is whole, and nothing else.
        after = self._serve(options)
        try:
            self._settle(after)
        finally:
            self._end(after)

    def _lift(self, fault: str) -> None:
        """A round's fault is over."""
        self.lift()
        struck = self._struck
        self._tried["rounds"] += 1
        self._tried["rounds struck"] += struck[fault] > self._struck_before[fault]
        self._struck_before = struck

    def _end(self, server: Server) -> None:
        began_s = real_s()
        if not server.close(0.5):
            self.found_dead("what was being opened did not end")
        if real_s() > began_s + CLOSES_S:
            self.found_dead(f"closing took {real_s() - began_s:.1f} s")
        server.check_guards()
        self._take_wrong(server)
        if any(job.ranks_left for job in server.jobs.values()) or server.open_tickets:
            self.found_dead(f"not reported at the end: {server.state()}")

    # What must hold

    def _settle(self, server: Server) -> None:
        """With the fault gone, everything ends, nothing is held, and the tier serves again."""
        server.until(lambda: server.is_at_rest and server.is_open, "all that was under way")
        self._check_held(server)
        server.serve(self.some())
        for number in self.rng.sample(sorted(self.spoilt), min(4, len(self.spoilt))):
            server.serve([number])
        self.spoilt.clear()
        self._recover(server)
        server.until(lambda: server.is_at_rest, "what the checks had begun")
        self._check_held(server)
        self._take_wrong(server)

    def _check_held(self, server: Server) -> None:
        def after_a_while() -> None:
            self.steps_for(0.01)
            CLOCK.ahead_s += 1.0

        self._leaks.check_held(server, after_a_while)
        server.check_guards()

    def _take_wrong(self, server: Server) -> None:
        self.outcome.wrong += [f"{self.where}: {sentence}" for sentence in server.wrong]
        server.wrong.clear()

    def _recover(self, server: Server) -> None:
        """A new chunk is stored, in the farthest tier, too, and served."""
        tier, until_s, came = server.serving[-1], real_s() + RECOVERS_S, Counter[str]()
        while real_s() < until_s:
            server.check_guards()  # blocks of a load that failed are kept until then; with none left nothing is stored
            [number] = self.new()
            server.store([number])
            server.until(lambda: server.is_at_rest, "a store")
            state, served = tier.state(server.key(number)), server.serve([number])
            if served and state is State.READY:
                self.keep([number])
                return
            came[f"{state}, {'served' if served else 'not served'}"] += 1
            CLOCK.ahead_s += 61.0
            self.steps_for(0.01)
        troubles = [[status.trouble for status in rank.chain.statuses()] for rank in server.ranks]
        storing_bytes = server.catalog.storing_bytes
        said = f"{dict(came)}; room for {server.room}; {storing_bytes} bytes being stored; {troubles}"
        slots = f"; {tier.statistics()}, {len(tier._index._held)} held" if isinstance(tier, SlotTier) else ""
        self.found_dead(f"no chunk is stored and served again, but {said}{slots}")


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
