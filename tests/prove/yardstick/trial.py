"""Tries one side: every damage and outage, one after the other, each on prompts of its own, and says what came of it.

Threading: the cell's main thread; a request that something shall befall while it runs has a thread of its own.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

from examples.demo.engine import Answer, Engine, EngineError
from tests.faults.conftest import SmallFilesystem
from tests.prove.happenings import (
    DAMAGES,
    Outage,
    Piece,
    bucket_outages,
    directory_gone,
    disk_outages,
    lasting,
    unreadable,
)
from tests.prove.yardstick.sides import Side
from tests.s3.proxy import Delay, FaultProxy, Rule, Stall
from tests.s3.servers import RcloneServer
from tests.vllm.damage import ENGINE_OPTIONS, FULL_TOKENS, PROMPT_CHUNKS, Prompt, chunk_prompts, loads_refused
from tests.vllm.harness import Workshop, close

EXACT, WRONG, DIED, HUNG, REFUSED = "exact", "WRONG ANSWER", "engine died", "hung", "refused to start"
YES, RESTARTED, NO = "recovered", "recovered by a restart", "not recovered"
NOT_MET = "not met"
HUNG_S: Final = 10.0
"""A request that takes longer hangs; alone it takes half a second."""
LATE_S: Final = 20.0
"""How long after the fault a request that hung may still be answered; then the engine is started anew."""
AGAIN_S: Final = 35.0
"""How long after the fault a side may take to serve right answers from its storage."""
IN_FLIGHT_S: Final = 5.0
"""How long after a request its load may take to begin."""
START_S: Final = 60.0
STORED_S: Final = 8.0
STORE_ATTEMPTS: Final = 5
GONE_IN_FLIGHT, GONE_AT_START, KILLED = "server gone in flight", "server gone at start", "kill -9 mid-write"
FOUND_BY_LOADS: Final = ("flipped", "swapped", "another's")
"""Damage that a lookup does not see: a load must have refused it."""
_WORST: Final = (EXACT, REFUSED, HUNG, DIED, WRONG)


@dataclass(frozen=True)
class Verdict:
    """What came of a fault."""

    fault: str
    what: str
    """One of the five above."""
    recovered: str
    """Whether right answers came from storage afterwards: ``YES``, ``RESTARTED`` or ``NO``."""
    why: str = ""
    was_met: bool = True
    """Of damage to one of ours: whether the engine has said that a chunk is not usable. Of what a server's answers
    suffer: whether a request has. Of the rest nobody can tell.
    """

    def __str__(self) -> str:
        told = [self.what, *([] if self.recovered == YES else [self.recovered]), *([] if self.was_met else [NOT_MET])]
        return f"{self.fault}: {', '.join(told)}"


class NoHitsError(Exception):
    """A side that serves nothing from its storage with nothing wrong: it cannot be tried."""


class Trial:
    """Tries a side. ``close`` ends its engine."""

    def __init__(
        self,
        workshop: Workshop,
        side: Side,
        server: RcloneServer,
        proxy: FaultProxy,
        disk: SmallFilesystem | None,
        directory: Path,
        answers: Answers,
        faults: str = "",
    ) -> None:
        """``disk``: None where a side is a bucket. ``faults``: only those with this in their names."""
        self._workshop, self._side, self._proxy, self._answers = workshop, side, proxy, answers
        self._wanted = faults
        if disk is None:
            wanted = ("S3 500", "S3 503", "S3 403", "S3 hangs", "S3 resets", "S3 refused")
            self._outages = {name: bucket_outages(server, proxy)[name] for name in wanted}
        else:
            self._outages = {**disk_outages(disk), "directory gone": partial(directory_gone, directory)}
            if side.name != "slab":  # one file that is open all the time
                self._outages["unreadable"] = partial(unreadable, directory)
        self._engine: Engine | None = None
        self._prompts = iter(answers.prompts)
        self._restarts = 0
        """Because it died or hung."""
        self._waits_for: Prompt | None = None
        """What the engine was asked and has not answered."""

    def verdicts(self) -> Iterator[Verdict]:
        """Try everything. Raises NoHitsError."""
        self._started()
        mine, _ = self._stored()
        came, wrong = self._comes_back(mine)
        if came == NO or wrong:
            raise NoHitsError(f"with nothing wrong: {wrong or 'nothing comes from storage'}")
        tries: dict[str, Callable[[], Verdict]] = {
            **{name: partial(self._damaged, name) for name in DAMAGES if name != "long"},
            **{name: partial(self._outage, name, outage) for name, outage in self._outages.items()},
        }
        if self._side.is_bucket:
            tries |= {GONE_IN_FLIGHT: self._gone_in_flight, GONE_AT_START: self._gone_at_start}
        for name, attempt in {**tries, KILLED: self._killed}.items():
            if self._wanted in name:
                yield attempt()

    def close(self) -> None:
        """End the engine."""
        self._waits_for = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._side.clean()

    # The cells

    def _damaged(self, name: str) -> Verdict:
        mine, pieces = self._stored()
        _, others = self._stored()
        DAMAGES[name](pieces[1], others[1], 0.5)
        self._side.forget()
        before = self._refused()
        came = self._ask([mine])
        was_met = not self._side.is_ours or name not in FOUND_BY_LOADS or self._refused() > before
        return replace(self._verdict(name, came, mine), was_met=was_met)

    def _outage(self, name: str, outage: Outage) -> Verdict:
        mine, _ = self._stored()
        fresh = next(self._prompts)
        with outage() as rule:
            came = self._ask([mine, fresh, mine])
        was_met = not isinstance(rule, Rule) or rule.hits > 0
        return replace(self._verdict(name, came, mine), was_met=was_met)

    def _gone_in_flight(self) -> Verdict:
        mine, _ = self._stored()
        rule = self._proxy.inject(Stall(0.5), operation="GET")
        told: list[tuple[str, str]] = []
        asking = threading.Thread(target=lambda: told.append(self._ask([mine])))
        asking.start()
        with contextlib.suppress(TimeoutError):
            rule.wait(timeout_s=IN_FLIGHT_S)
        with lasting(self._proxy.go_down, self._proxy.come_back):
            rule.release()
            asking.join()
        [came] = told
        return replace(self._verdict(GONE_IN_FLIGHT, came, mine), was_met=rule.hits > 0)

    def _gone_at_start(self) -> Verdict:
        mine, _ = self._stored()
        self.close()
        with lasting(self._proxy.go_down, self._proxy.come_back):
            came = self._ask([mine])
        return self._verdict(GONE_AT_START, came, mine)

    def _killed(self) -> Verdict:
        """While the last prompt of several is being stored: by ``kill -9``, of all processes."""
        self._started()
        asked = [next(self._prompts) for _ in range(3)]
        slow = self._proxy.inject(Delay(0.3), operation="PUT") if self._side.is_bucket else contextlib.nullcontext()
        with slow:
            before = self._ask(asked, settle=False)
            self.close()
        return self._verdict(KILLED, _worst(before, self._ask([*asked, *asked])), asked[0])

    def _verdict(self, fault: str, came: tuple[str, str], prompt: Prompt) -> Verdict:
        """``came``: what came of a fault and why. What comes now that it is over may be worse."""
        recovered, wrong = self._comes_back(prompt)
        what, why = _worst(came, (WRONG, f"after the fault: {wrong}")) if wrong else came
        return Verdict(fault, what, recovered, why)

    def _refused(self) -> int:
        """How often the engine has said that it could not use a chunk."""
        return 0 if self._engine is None else loads_refused(self._engine)

    # Its parts

    def _started(self) -> Engine:
        if self._engine is None:
            self._engine = self._workshop.start_engine(
                environment=self._side.environment, start_timeout_s=START_S, **self._side.options, **ENGINE_OPTIONS
            )
        return self._engine

    def _ask(self, prompts: list[Prompt], *, settle: bool = True) -> tuple[str, str]:
        """Ask one prompt after the other, without what the GPU remembers. Returns the worst that came of it, and why.

        An engine that has died is gone afterwards; one that hangs is not asked anything more.
        """
        began_s = time.monotonic()
        try:
            engine = self._started()
        except EngineError as error:
            self.close()
            return HUNG if time.monotonic() - began_s >= START_S else REFUSED, _last(error)
        for prompt in prompts:
            began_s = time.monotonic()
            try:
                engine.reset_prefix_cache()
                [answer] = engine.generate([prompt], timeout_s=HUNG_S)
                if not close(answer, self._answers.right(prompt)):
                    return WRONG, f"{answer.tokens}, not {self._answers.right(prompt).tokens}"
                if settle:
                    self._settle(engine)
            except EngineError as error:
                if "no answer within" in str(error):
                    self._waits_for = prompt
                    return HUNG, f"{time.monotonic() - began_s:.0f} s"
                self._restart()
                return DIED, _last(error)
        return EXACT, ""

    def _settle(self, engine: Engine) -> None:
        """Let it store what it has, for a moment: what never ends is not waited for."""
        engine.call("settle", deadline_s=3.0, timeout_s=HUNG_S)

    def _stored(self) -> tuple[Prompt, list[Piece]]:
        """Have a new prompt stored, and pushed out of memory before the storage. Returns it, and its chunks where they
        rest. Raises NoHitsError when that does not succeed with nothing wrong.
        """
        found = ""
        for _ in range(STORE_ATTEMPTS):
            before = self._at_rest(0)
            mine = next(self._prompts)
            self._ask([mine])
            pieces = self._at_rest(len(before) + PROMPT_CHUNKS)
            if self._side.has_memory:
                self._ask([next(self._prompts) for _ in range(2)])
            new = [piece for key, piece in pieces.items() if key not in before]
            if len(new) == PROMPT_CHUNKS:
                return mine, new
            found = f"of the last, {len(new)} new chunks were found beside {len(before)}"
        raise NoHitsError(f"{STORE_ATTEMPTS} prompts were not stored, with nothing wrong; {found}")

    def _at_rest(self, least: int) -> dict[tuple[str, int], Piece]:
        """Return all chunks once there are so many and no more come; or what there is after ``STORED_S``."""
        until_s = time.monotonic() + STORED_S
        last: dict[tuple[str, int], Piece] = {}
        while True:
            now = {(str(piece.path), piece.offset): piece for piece in self._pieces()}
            if (len(now) >= least and now == last) or time.monotonic() > until_s:
                return now
            last = now
            time.sleep(0.3)

    def _pieces(self) -> list[Piece]:
        with contextlib.suppress(AssertionError, OSError):
            return self._side.pieces()
        return []

    def _comes_back(self, prompt: Prompt) -> tuple[str, str]:
        """Whether within ``AGAIN_S`` the prompt's answer is right and comes from storage: ``YES``, ``RESTARTED`` or
        ``NO``; and an answer that was wrong meanwhile, in words.
        """
        wrong = self._answers_late()
        until_s = time.monotonic() + AGAIN_S
        came, failures = False, 0
        while not came and time.monotonic() < until_s and failures < 3:
            try:
                engine = self._started()
                engine.reset_prefix_cache()
                [answer] = engine.generate([prompt], timeout_s=HUNG_S)
                right = close(answer, self._answers.right(prompt))
                if not right:
                    failures += 1
                    wrong = f"{answer.tokens}, not {self._answers.right(prompt).tokens}"
                came = right and answer.external_hit_tokens >= FULL_TOKENS - FULL_TOKENS // PROMPT_CHUNKS
                self._settle(engine)
                if not came and self._side.has_memory:
                    engine.generate([next(self._prompts) for _ in range(2)], timeout_s=2 * HUNG_S)
                    self._settle(engine)
            except EngineError:
                self._restart()
                failures += 1
            time.sleep(0 if came else 0.3)
        restarts, self._restarts = self._restarts, 0
        return (RESTARTED if restarts else YES) if came else NO, wrong

    def _answers_late(self) -> str:
        """Wait for what hung, now that the fault is over; an engine that stays silent is ended. Returns the answer if
        it was wrong, in words.
        """
        prompt, self._waits_for = self._waits_for, None
        if prompt is None:
            return ""
        try:
            reply = json.loads(self._started()._read_line("generate", LATE_S))
        except EngineError:
            self._restart()
            return ""
        if not reply["ok"]:
            self._restart()
            return ""
        tokens = tuple(reply["answers"][0]["tokens"]) if "answers" in reply else None
        right = self._answers.right(prompt).tokens
        return "" if tokens in (None, right) else f"{tokens}, not {right}"

    def _restart(self) -> None:
        """End an engine that cannot be used any more; the next request starts one."""
        self._restarts += 1
        self.close()


class Answers:
    """Prompts, and what a vLLM without a connector answers to them: computed when first asked for."""

    def __init__(self, workshop: Workshop, seed: int) -> None:
        self._engine = workshop.start_engine(**ENGINE_OPTIONS)
        self._known: dict[tuple[int, ...], Answer] = {}
        self.prompts: Iterator[Prompt] = (prompt for n in count(seed << 16) for prompt in chunk_prompts(1, seed=n))

    def right(self, prompt: Prompt) -> Answer:
        """Return the answer."""
        if tuple(prompt) not in self._known:
            [self._known[tuple(prompt)]] = self._engine.generate([prompt])
        return self._known[tuple(prompt)]


def _worst(*came: tuple[str, str]) -> tuple[str, str]:
    return max(came, key=lambda pair: _WORST.index(pair[0]))


def _last(error: EngineError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "Error" in line and not line.startswith(("File", "raise", "---"))]
    return (causes[-1] if causes else lines[0] if lines else "")[:300]
