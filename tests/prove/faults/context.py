"""What a round has at hand: a server, the chunks that were stored, chance, and the faults.

Threading: one thread, beside the product's own. Ownership: ``lift`` ends what was armed, and the children that forked.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nixl_offload.index import State
from tests.prove.cells import Outcome
from tests.prove.faults.clock import CLOCK, real_s
from tests.prove.faults.injection import ERRNOS, FOREVER, Armed, Faults, flip_memory
from tests.prove.faults.media import Bucket, Medium, damage
from tests.prove.faults.server import Server
from tests.prove.faults.table import ANSWERS, RESTING
from tests.s3.proxy import Rule

LEAVES_S: Final = 5.0
"""How long a forked child may take to exit."""
KNOWN: Final = 24
"""So many chunks are asked for again and again."""


class Context:
    """One cell's. ``server`` is the one at work, ``where`` says which round it is, in findings."""

    server: Server

    def __init__(self, tier: str, point: str, rng: random.Random, root: Path, outcome: Outcome) -> None:
        self.tier = tier
        self.point = point
        self.rng = rng
        self.root = root
        self.outcome = outcome
        self.where = ""
        self.known: list[int] = []
        self.spoilt: set[int] = set()
        """Chunks that were damaged and not asked for since."""
        self.slept = 0
        self.is_sure = False
        """Whether a fault strikes wherever it can, not by chance."""
        self.faults = Faults(root)
        self.counts: Counter[str] = Counter()
        """How often each fault struck, beside those that ``faults`` counts."""
        self.medium: Medium
        if tier.startswith("s3"):
            self.medium = Bucket(tier, root)
        else:
            self.medium = Medium("slab" if tier == "memory" else tier, root, is_small=point == "eviction")
        self._last = 0
        self._children: list[int] = []
        self._leaving: list[int] = []
        """Those that exit by themselves."""
        self._rule: Rule | None = None
        self._rule_fault = ""

    # Chunks

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

    def forget(self) -> None:
        """Another model: nothing is found again."""
        self.known.clear()
        self.spoilt.clear()

    # Time

    def while_it_lasts(self, limit_s: float) -> None:
        """Step until nothing is under way."""
        until_s = real_s() + limit_s
        while real_s() < until_s and not self.server.is_at_rest:
            self.server.step()
            time.sleep(0.0005)

    def steps_for(self, seconds: float) -> None:
        """Step."""
        until_s = real_s() + seconds
        while real_s() < until_s:
            self.server.step()
            time.sleep(0.001)

    # Faults

    def arm(self, fault: str, *, transfers: bool = True) -> None:
        """Have a fault in force: in time, in requests, in calls, or (``transfers``) in transfers; or none, where it is
        one that befalls chunks at rest.
        """
        rng = self.rng
        if fault == "clock jump":
            CLOCK.wall_ahead_s += rng.choice((-86_400.0, -3600.0, -5.0, 5.0, 3600.0, 86_400.0))
            CLOCK.ahead_s += rng.choice((0.0, 2.0, 40.0))
            self.counts[fault] += 1
            return
        if fault == "fork":
            self._fork()
            return
        if isinstance(self.medium, Bucket) and (
            fault in ANSWERS or not transfers or not rng.randrange(2 if fault in RESTING else 3)
        ):
            self._rule, self._rule_fault = self.medium.inject(fault, rng), fault
        at_rest = fault in RESTING and fault != "flipped" and not (fault == "stale" and self.tier == "shared_dir")
        if at_rest or self._rule is not None or fault in ANSWERS:
            return
        calls = not isinstance(self.medium, Bucket) and self.tier != "memory"
        calls = calls and (fault in ERRNOS or fault in {"slow", "hang", "late write"})
        calls = calls and (rng.random() < 0.6 or not transfers or self.is_sure)
        share, most = rng.choice((0.05, 0.3, 1.0)), rng.choice((1, 3, FOREVER))
        if fault in {"hang", "late write"} and calls:
            most = min(most, 3)
            # A slab's calls are those of a local disk, which the pump makes itself.
            calls = self.tier == "shared_dir" or self.point in {"start", "gc", "verify"}
        is_memory = fault == "OOM of staging"
        transfers = transfers and (not calls or rng.random() < 0.5 or self.is_sure)
        armed = Armed(fault, rng.randrange(1 << 30), share=1.0 if self.is_sure else share, most=most,
                      calls=calls or is_memory, transfers=transfers or is_memory)  # fmt: skip
        self.faults.arm(armed)

    def lift(self) -> None:
        """End what is in force."""
        self.faults.lift()
        rule, self._rule = self._rule, None
        if rule is not None:
            self.counts[self._rule_fault] += rule.hits
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
            pieces = self.server.pieces(numbers)
            if fault == "vanished" and self.rng.random() < 0.05:
                self.medium.wipe()
                self.counts[fault] += 1
            elif pieces:
                spoilt = damage(fault, self.medium, list(pieces), self.rng)
                self.counts[fault] += len(spoilt)
                self.spoilt |= {pieces[piece][0] for piece in spoilt}

    def _spoil_memory(self, fault: str) -> None:
        """Bits flip in a slot of memory that nobody writes to, or two slots change places."""
        memory = self.server.opened.get(0)
        ready = [] if memory is None else [key for key in memory._index if memory._index.state(key) is State.READY]
        if not ready:
            return
        host = self.rng.choice(self.server.ranks).host
        assert host is not None
        place, other = (memory._index.location(self.rng.choice(ready)) for _ in range(2))
        slot = host.slot(place.offset, place.slot_bytes).memory
        if fault == "flipped":
            flip_memory(slot.ctypes.data, place.slot_bytes, self.rng)
        else:
            if other.slot_bytes != place.slot_bytes or other == place:
                return
            second = host.slot(other.offset, other.slot_bytes).memory
            before = slot.copy()
            slot[:] = second
            if fault == "swapped":
                second[:] = before
        self.counts[fault] += 1

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
        self.counts["fork"] += 1
