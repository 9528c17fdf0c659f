"""The rounds of a cell: a server at work, a fault at one point of it, and after each round all that must hold.

Imported in the cell's process, once its clock is installed. Threading: one thread, beside the product's own.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import random
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from nixl_offload.cli.main import main
from nixl_offload.engine import pump
from nixl_offload.errors import NixlOffloadError
from nixl_offload.tiers.shared import eviction
from nixl_offload.vllm import background, rank_tiers
from tests.prove.cells import Outcome
from tests.prove.faults.clock import CLOCK, real_s
from tests.prove.faults.injection import ERRNOS, FOREVER, Armed, Faults, flip_memory
from tests.prove.faults.media import Bucket, Medium, Piece, damage
from tests.prove.faults.server import DeadError, Server, least_slab_bytes, memory_tier
from tests.prove.faults.table import faults_at

ROUNDS_PER_SERVER: Final = 8
ROUNDS_TO_STRIKE: Final = 8
"""Chance decides whom a fault strikes; in so many rounds it must."""
MOST_FINDINGS: Final = 6
_SHARD: Final = re.compile(r"/\.?[0-9a-f]{40}\.[0-9a-f]{4}")
KNOWN: Final = 24
"""So many chunks are asked for again and again."""
_DAMAGE: Final = frozenset({"long", "flipped", "truncated", "swapped", "stale", "vanished", "wrong length"})
_SHAPES: Final = ("two_groups", "per_layer", "direct_per_layer", "direct_blocks")


class Cell:
    """One tier at one point. ``run`` tries every fault that makes sense there, ``rounds`` times each."""

    def __init__(self, tier: str, point: str, seed: int, rounds: int) -> None:
        self._tier = tier
        self._point = point
        self._seed = seed
        self._rounds = rounds
        self._outcome = Outcome()
        self._where = ""
        self._known: list[int] = []
        self._next = 0
        self._old: dict[Piece, bytes] = {}
        self._counts: Counter[str] = Counter()
        self._children: list[int] = []
        self._excused: set[threading.Thread] = set()
        """Told of, or left behind with storage that hung."""
        self._rng = random.Random(f"{seed} {tier} {point}")
        self._root = Path.cwd() / "storage" / "kv"
        self._root.parent.mkdir()
        self._medium = self._make_medium()
        self._faults = Faults(self._root)
        self._logs = _Unexpected(self._found_dead)
        self._steps: dict[str, Callable[[str], None]] = {
            "lookup": self._lookup,
            "store": self._store,
            "load": self._load,
            "write-through": self._store,
            "promotion": self._promotion,
            "eviction": self._eviction,
            "gc": self._command,
            "verify": self._command,
            "sleep": self._sleep,
        }

    def run(self) -> Outcome:
        """Return what came out."""
        background.FIRST_PAUSE_S = background.LONGEST_PAUSE_S = 0.02
        eviction.LOOK_S = 0.02
        rank_tiers.WAKE_UP_S = 0.2
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which is the point of it
        logging.getLogger("nixl_offload").addHandler(self._logs)
        logging.getLogger("nixl_offload").addHandler(logging.StreamHandler())  # what is kept if something is found
        faults = [fault for fault in faults_at(self._tier, self._point) for _ in range(self._rounds)]
        self._rng.shuffle(faults)
        try:
            self._servers(faults)
        finally:
            self._medium.close()
        self._counts += self._faults.counts
        self._outcome.counts = {"faults": sum(self._counts.values()), **dict(sorted(self._counts.items()))}
        for fault in faults_at(self._tier, self._point):
            if not self._counts[fault] and self._rounds >= ROUNDS_TO_STRIKE and not self._is_over:
                self._outcome.missed.append(f"{fault} never struck in {self._rounds} rounds")
        return self._outcome

    # Servers

    def _servers(self, faults: list[str]) -> None:
        descriptors: list[int] = []
        rounds = 1 if self._point in {"start", "shutdown"} else ROUNDS_PER_SERVER
        for epoch, begin in enumerate(range(0, len(faults), rounds)):
            if self._is_over:
                return
            part = faults[begin : begin + rounds]
            self._where = f"epoch {epoch}"
            try:
                self._epoch(epoch, part)
            except DeadError as error:
                self._outcome.dead.append(f"{self._where}: {error}")
                return
            self._check_threads()
            if pump.LEAKED:  # what hung when a server ended is kept until the process ends: see engine.pump
                pump.LEAKED.clear()
                descriptors.clear()
            descriptors.append(self._descriptors())
            # The first servers start what stays: libraries, pools of clients, a forked helper.
            if len(descriptors) > 6 and min(descriptors[-3:]) > max(descriptors[2:5]):
                self._outcome.leaks.append(f"{self._where}: file descriptors by server: {descriptors}")
                return

    def _epoch(self, epoch: int, faults: Sequence[str]) -> None:
        rng = self._rng
        options: dict[str, Any] = {
            "shape": rng.choice(_SHAPES) if self._epoch_may_change_shape(epoch) else self._shape,
            "ranks": self._ranks if epoch else rng.choice((1, 1, 2)),
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
            self._fill(server)
            if self._point == "shutdown":
                self._shutdown(server, faults[0], options)
                return
            for number, fault in enumerate(faults):
                self._where = f"epoch {epoch}, round {number}, {fault}"
                if self._point == "sleep" or number == 0 or rng.random() < 0.2:
                    self._fill(server)
                self._server = server
                self._steps[self._point](fault)
                self._lift()
                self._settle(server)
                if self._is_over:
                    return
            if rng.random() < 0.3:
                server.catalog.clear()
                self._known.clear()
        finally:
            self._lift()
            self._end(server)

    def _epoch_may_change_shape(self, epoch: int) -> bool:
        """A new shape is another model: with it nothing is found again."""
        if epoch and self._rng.random() < 0.8:
            return False
        self._known.clear()
        self._old.clear()
        return True

    def _make_server(self, options: dict[str, Any]) -> Server:
        seed = self._rng.randrange(1 << 30)
        medium = self._medium
        medium.slab_bytes = least_slab_bytes(options["shape"], options["ranks"])
        with_memory = self._tier == "memory" or self._point in {
            "write-through", "promotion", "start", "shutdown", "sleep"
        }  # fmt: skip
        alone = self._tier == "memory" and self._point in {"lookup", "store", "load", "eviction"}
        tiers = [memory_tier()] if with_memory else []
        if not alone:
            tiers.append(medium.tier())
        if self._tier == "memory" and self._point == "promotion" and self._rng.random() < 0.3:
            tiers[0]["unsaved"] = "drop"
        return Server(
            tiers, None if alone else medium, seed=seed,
            wrong=lambda words: self._outcome.wrong.append(f"{self._where}: {words}"), **options,
        )  # fmt: skip

    def _end(self, server: Server) -> None:
        began_s = real_s()
        if not server.close(0.5):
            self._outcome.dead.append(f"{self._where}: what was being opened did not end")
        if real_s() > began_s + 20.0:
            self._outcome.dead.append(f"{self._where}: closing took {real_s() - began_s:.1f} s")
        server.check_guards()
        left = [number for number, job in server.jobs.items() if job.ranks_left]
        if left or server.open_tickets:
            self._outcome.dead.append(f"{self._where}: not told after the end: {server.state()}")

    # Points

    def _lookup(self, fault: str) -> None:
        server, asked = self._server, [*self._some(), self._new()]
        self._arm(fault, transfers=False)
        server.look_up(asked)
        self._lift()
        self._spoil(fault, asked)
        server.serve(asked)

    def _store(self, fault: str) -> None:
        server = self._server
        fresh = [self._new() for _ in range(self._rng.randint(1, 4))]
        self._arm(fault)
        server.store(fresh)
        self._spoil(fault, self._known)
        self._while_it_lasts(fault, 0.05 if fault in {"hang", "late write"} else 2.0)
        if fault == "hang":
            CLOCK.ahead_s += self._rng.choice((0.0, 2.0, 31.0))
            self._steps_for(0.01)
        if fault == "late write":
            # Time-outs are over, others are stored, perhaps where these were; then what was late arrives.
            CLOCK.ahead_s += 31.0
            self._steps_for(0.02)
            more = [self._new() for _ in range(2)]
            self._faults.lift_calls()
            if server.room >= len(more):
                server.store(more)
            self._steps_for(0.02)
            self._keep(more)
        self._keep(fresh)

    def _load(self, fault: str) -> None:
        server, asked = self._server, self._some()
        self._spoil(fault, asked)
        found = server.look_up(asked)[: server.room]
        if not found:
            return
        self._arm(fault)
        server.load(found)
        self._while_it_lasts(fault, 0.05)
        if fault == "hang":
            CLOCK.ahead_s += self._rng.choice((0.0, 2.0, 31.0))
            self._steps_for(0.01)
        if fault == "late write":
            CLOCK.ahead_s += 31.0
            self._steps_for(0.03)  # the load is given up, and its blocks are computed anew: see Guard

    def _promotion(self, fault: str) -> None:
        server, asked = self._server, self._some()
        memory = server.opened[0]
        for number in asked:
            if self._rng.random() < 0.8 and memory.state(server.key(number)) is not None:
                with contextlib.suppress(NixlOffloadError):
                    memory.drop(server.key(number))
        self._load_armed(fault, asked)

    def _load_armed(self, fault: str, asked: Sequence[int]) -> None:
        server = self._server
        self._spoil(fault, asked)
        found = server.look_up(asked)[: server.room]
        self._arm(fault)
        if found:
            server.load(found)
        self._while_it_lasts(fault, 0.05)
        if fault == "late write":
            CLOCK.ahead_s += 31.0
            self._steps_for(0.03)
            fresh = [self._new() for _ in range(min(2, server.room))]
            server.store(fresh)  # in slots of memory that the late read was for, if they were given away
            self._keep(fresh)

    def _eviction(self, fault: str) -> None:
        server = self._server
        self._arm(fault)
        for _ in range(self._rng.randint(2, 5)):
            fresh = [self._new() for _ in range(min(4, server.room))]
            server.store(fresh)
            self._while_it_lasts(fault, 0.02)
            self._keep(fresh)
            if self._tier == "shared_dir":
                CLOCK.ahead_s += 61.0 * self._rng.randint(0, 1)
                self._steps_for(0.03)
        self._spoil(fault, self._known)

    def _start(self, fault: str, options: dict[str, Any]) -> None:
        """A server starts over what others have left, while the fault is there."""
        self._where += f", {fault}"
        self._server_before(options)
        self._spoil(fault, self._known)
        self._arm(fault)
        server = self._server = self._make_server(options)
        try:
            self._steps_for(self._rng.choice((0.02, 0.1)))
            if self._rng.random() < 0.5 and server.room >= 2:
                server.store([self._new()])
                server.look_up(self._some(), limit_s=0.1)
            if fault in {"hang", "slow"}:
                self._steps_for(0.1)
            self._lift()
            self._settle(server)
        finally:
            self._lift()
            self._end(server)

    def _server_before(self, options: dict[str, Any]) -> None:
        """Something is there to be found."""
        if self._tier == "memory" or (self._known and self._rng.random() < 0.5):
            return
        server = self._server = self._make_server(options)
        server.until(lambda: server.is_open, "opening the tiers")
        self._fill(server)
        self._end(server)

    def _shutdown(self, server: Server, fault: str, options: dict[str, Any]) -> None:
        self._where += f", {fault}"
        self._server = server
        fresh = [self._new() for _ in range(4)]
        self._arm(fault)
        server.store(fresh)
        if self._rng.random() < 0.5:
            server.step()
        if server.room and self._known:
            found = server.look_up(self._some(), limit_s=0.1)[: server.room]
            if found:
                server.load(found)
        self._spoil(fault, self._known)
        self._end(server)
        self._keep(fresh)
        self._lift()
        # The next server finds what is whole, and nothing else.
        after = self._server = self._make_server(options)
        try:
            self._settle(after)
        finally:
            self._end(after)

    def _command(self, fault: str) -> None:
        server = self._server
        config = Path.cwd() / "kv.yaml"
        config.write_text(yaml.safe_dump({"tiers": [self._medium.tier()]}))
        self._spoil(fault, self._known)
        if self._point == "gc":
            size = self._rng.choice(("1B", "64KiB", "256KiB"))
            arguments = ["gc", str(config), "--delete", "--older-than", self._rng.choice(("0s", "30d"))]
            arguments += ["--max-size", size] if self._medium.is_shared else []
            CLOCK.wall_ahead_s += self._rng.choice((0.0, 700.0, 3600.0 * 24))
        else:
            arguments = ["verify", str(config), *self._rng.choice(([], ["--delete-bad"], ["--json"]))]
        self._arm(fault, transfers=False)
        lifting = threading.Timer(0.15, self._lift)
        lifting.daemon = True
        if fault in {"hang", "slow"}:
            lifting.start()
        code, words = self._run_command(arguments)
        if fault in {"hang", "slow"}:
            lifting.join()
        self._lift()
        if code not in (0, 1):
            self._outcome.dead.append(f"{self._where}: {' '.join(arguments)} ended with {code}: {words[-1200:]}")
        if self._point == "verify" and self._rng.random() < 0.5:
            self._check_verify(config)
        server.step()

    def _check_verify(self, config: Path) -> None:
        """With nothing in its way any more, verify deletes what is bad, and finds nothing bad then."""
        if not self._medium.is_shared:
            return  # an engine has the directory: bad chunks are told of, and left
        self._run_command(["verify", str(config), "--delete-bad"])
        CLOCK.wall_ahead_s += 3600.0  # for what may be unfinished is left for a while
        self._run_command(["verify", str(config), "--delete-bad"])
        code, words = self._run_command(["verify", str(config)])
        if code != 0:
            self._outcome.missed.append(f"{self._where}: verify finds bad chunks that it should have deleted: {words}")

    def _sleep(self, fault: str) -> None:
        server = self._server
        fresh = [self._new() for _ in range(self._rng.randint(1, 3))]
        early = self._rng.random() < 0.5
        if early:
            self._arm(fault)
        server.store(fresh)
        if self._rng.random() < 0.5:
            server.step()
        if not early:
            self._arm(fault)
        asleep = []
        for rank in server.ranks:
            try:
                rank.tiers.sleep(self._rng.choice((0.0, 0.05, 0.2)))
                asleep.append(rank)
            except NixlOffloadError:
                pass  # it cannot, and says so: its memory stays
        server.step()
        server.check_guards()
        for rank in asleep:
            for rows in rank.kv:
                rows[:] = 0  # the memory goes away
        self._spoil(fault, self._known)
        if self._rng.random() < 0.5:
            self._lift()
        for rank in server.ranks:
            rank.tiers.wake_up()
        self._while_it_lasts(fault, 0.05)
        self._keep(fresh)

    # What happens around them

    def _arm(self, fault: str, *, transfers: bool = True) -> None:
        rng = self._rng
        if fault == "clock jump":
            CLOCK.wall_ahead_s += rng.choice((-86_400.0, -3600.0, -5.0, 5.0, 3600.0, 86_400.0))
            CLOCK.ahead_s += rng.choice((0.0, 2.0, 40.0))
            self._counts[fault] += 1
        elif fault == "fork":
            self._fork()
        elif isinstance(self._medium, Bucket) and (
            fault in {"403", "500", "503", "reset"} or not transfers or not rng.randrange(3)
        ):
            self._rule = self._medium.inject(fault, self._point, rng)
            self._rule_fault = fault
        if fault in _DAMAGE and fault != "flipped" and not (fault == "stale" and self._tier == "shared_dir"):
            return
        if self._rule is None and fault not in {"clock jump", "fork", "403", "500", "503", "reset"}:
            calls = not isinstance(self._medium, Bucket) and self._tier != "memory"
            calls = (
                calls
                and (fault in ERRNOS or fault in {"slow", "hang", "late write"})
                and (rng.random() < 0.6 or not transfers)
            )
            calls = calls or fault == "OOM of staging"
            share = rng.choice((0.05, 0.3, 1.0))
            most = rng.choice((1, 3, FOREVER))
            if fault in {"hang", "late write"} and calls:
                most = min(most, 3)
                # A slab's calls are those of a local disk, which the pump makes itself.
                calls = self._tier == "shared_dir" or self._point in {"start", "gc", "verify"}
            transfers = transfers and (not calls or rng.random() < 0.5)
            armed = Armed(fault, rng.randrange(1 << 30), share=share, most=most, calls=calls,
                          transfers=transfers or fault == "OOM of staging")  # fmt: skip
            self._faults.arm(armed)

    def _lift(self) -> None:
        self._faults.lift()
        rule, self._rule = self._rule, None
        if rule is not None:
            self._counts[self._rule_fault] += rule.hits
            rule.release()
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self._children.clear()

    def _fork(self) -> None:
        """A child that holds what it has inherited until the fault is lifted."""
        child = os.fork()
        if not child:
            try:
                signal.pause()
            finally:
                os._exit(0)
        self._children.append(child)
        self._counts["fork"] += 1

    def _spoil(self, fault: str, numbers: Sequence[int]) -> None:
        if fault not in _DAMAGE:
            return
        server = self._server if hasattr(self, "_server") else None
        if server is None:
            return
        if self._tier == "memory":
            self._spoil_memory(fault, server)
            return
        with self._faults.spared():
            pieces = server.pieces(numbers)
            if fault == "stale" and self._medium.is_shared:
                old = {piece: server.foreign_image(*of) for piece, of in pieces.items()}
            else:
                old = self._old
            if fault == "vanished" and self._rng.random() < 0.05:
                self._medium.wipe()
                self._counts[fault] += 1
                return
            if pieces:
                self._counts[fault] += damage(fault, self._medium, list(pieces), self._rng, old)
            if not self._medium.is_shared:
                for piece in pieces:
                    if piece.path.exists() and self._rng.random() < 0.5:
                        self._old[piece] = piece.read()

    def _spoil_memory(self, fault: str, server: Server) -> None:
        """Bits flip in a slot of memory that nobody writes to, or two slots change places."""
        memory = server.opened.get(0)
        if memory is None:
            return
        places = [memory._index.location(key) for key in memory._index
                  if memory._index.state(key).value == "ready"]  # fmt: skip
        if not places:
            return
        host = server.ranks[self._rng.randrange(len(server.ranks))].host
        assert host is not None
        place, other = self._rng.choice(places), self._rng.choice(places)
        slot = host.slot(place.offset, place.slot_bytes).memory
        if fault == "flipped":
            flip_memory(slot.ctypes.data, place.slot_bytes, self._rng)
        else:
            if other.slot_bytes != place.slot_bytes or other == place:
                return
            second = host.slot(other.offset, other.slot_bytes).memory
            before = slot.copy()
            slot[:] = second
            if fault == "swapped":
                second[:] = before
        self._counts[fault] += 1

    def _while_it_lasts(self, fault: str, limit_s: float) -> None:
        until_s = real_s() + limit_s
        while real_s() < until_s and not self._server.is_at_rest:
            self._server.step()
            time.sleep(0.0005)

    def _steps_for(self, seconds: float) -> None:
        until_s = real_s() + seconds
        while real_s() < until_s:
            self._server.step()
            time.sleep(0.001)

    def _settle(self, server: Server) -> None:
        """With the fault gone, everything ends, nothing is held, and the tier serves again."""
        server.until(lambda: server.is_at_rest and server.is_open, "all that was under way")
        self._check_held(server)
        server.check_guards()
        self._keep([])
        server.serve(self._some())
        self._recover(server)
        server.until(lambda: server.is_at_rest, "what the checks had begun")
        server.check_guards()
        self._check_held(server)

    def _check_held(self, server: Server) -> None:
        """What was given up is given back soon after its transfer has ended, too."""
        until_s = real_s() + 3.0
        while ((held := server.held()) or (left := self._open_shards(server))) and real_s() < until_s:
            self._steps_for(0.01)
            CLOCK.ahead_s += 1.0
        self._outcome.leaks += [f"{self._where}: {sentence}" for sentence in held]
        if not held and left:
            self._outcome.leaks.append(f"{self._where}: {len(left)} files of shards are open, such as {left[0]}")

    def _open_shards(self, server: Server) -> list[str]:
        """Return the files of a shared directory that stay open; a slab's one is open for good."""
        found = []
        if self._tier == "shared_dir":
            for rank in server.ranks:
                engine = rank.engines[max(rank.chain.open_tiers)]
                engine._link_memory.link._reap()  # what could not be closed at once is when the next is asked for
        with self._faults.spared():
            for descriptor in os.listdir("/proc/self/fd") if self._tier == "shared_dir" else ():
                with contextlib.suppress(OSError):
                    found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return [path for path in found if path.startswith(str(self._root)) and _SHARD.search(path)]

    def _recover(self, server: Server) -> None:
        number = 0
        for _ in range(8):
            number = self._new()
            if server.store([number]):
                server.until(lambda: server.is_at_rest, "a store")
                if server.serve([number]) == [number] and self._is_stored(server, number):
                    self._keep([number])
                    return
            CLOCK.ahead_s += 61.0
            self._steps_for(0.005)
        troubles = [[status.trouble for status in rank.chain.statuses()] for rank in server.ranks]
        self._outcome.dead.append(f"{self._where}: no chunk is stored and served again; trouble: {troubles}")

    def _is_stored(self, server: Server, number: int) -> bool:
        """Whether the farthest tier has it, too."""
        tier = server.serving[-1]
        state = tier.state(server.key(number))
        return state is not None and state.value == "ready"

    def _fill(self, server: Server) -> None:
        wanted = 8 if self._point in {"gc", "verify"} else 6
        fresh = [self._new() for _ in range(wanted)]
        self._server = server
        for begin in range(0, wanted, 4):
            server.store(fresh[begin : begin + 4])
            server.until(lambda: server.is_at_rest, "filling the tier")
        self._keep(fresh)

    def _new(self) -> int:
        self._next += 1
        return self._next

    def _keep(self, numbers: Sequence[int]) -> None:
        self._known = [*self._known, *numbers][-KNOWN:]

    def _some(self) -> list[int]:
        return self._rng.sample(self._known, min(len(self._known), self._rng.randint(1, 6)))

    def _run_command(self, arguments: list[str]) -> tuple[int, str]:
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(arguments)
        except BaseException as error:  # noqa: BLE001 - a command that raises is what is looked for
            return -1, f"raised {error!r}: {traceback.format_exc(limit=-6)}"
        return code, out.getvalue() + err.getvalue()

    # What came out

    @property
    def _is_over(self) -> bool:
        outcome = self._outcome
        return len(outcome.wrong) + len(outcome.dead) + len(outcome.leaks) + len(outcome.missed) >= MOST_FINDINGS

    def _found_dead(self, words: str) -> None:
        self._outcome.dead.append(f"{self._where}: {words}")

    def _check_threads(self) -> None:
        until_s = real_s() + 3.0
        while (left := self._threads()) and real_s() < until_s and not pump.LEAKED:
            time.sleep(0.002)
        if left and not pump.LEAKED:
            frames = sys._current_frames()
            at = {
                thread.name: "".join(traceback.format_stack(frames.get(thread.ident or 0), limit=6)) for thread in left
            }
            told = "\n".join(f"{name}\n{stack}" for name, stack in at.items())
            self._outcome.leaks.append(f"{self._where}: threads that go on after the end: {told}")
        self._excused.update(left)

    def _threads(self) -> list[threading.Thread]:
        ours = [thread for thread in threading.enumerate() if thread.name.startswith("nixl-offload")]
        return [thread for thread in ours if thread not in self._excused]

    def _descriptors(self) -> int:
        gc.collect()
        with self._faults.spared():
            return len(os.listdir("/proc/self/fd"))

    def _make_medium(self) -> Medium:
        self._rule = None
        self._rule_fault = ""
        self._shape, self._ranks = "two_groups", 1
        if self._tier.startswith("s3"):
            return Bucket(self._tier, self._root)
        kind = "slab" if self._tier == "memory" else self._tier
        return Medium(kind, self._root, is_small=self._point == "eviction")


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
