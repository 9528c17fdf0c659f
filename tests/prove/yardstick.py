"""The yardstick: the same damage and outages for ours and vLLM's own tiers, each under a real vLLM, one after the
other, each on prompts of its own. What ours does wrong is found; what peers do is counted, and stands in the note.

Peers are set up as their documentation says, with ``kv_load_failure_policy: recompute``, which is not vLLM's default
and in their favour. vLLM's tiers need memory before them: it holds less than two prompts, so that what is asked for
comes from storage.

Threading: the cell's main thread.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from benchmarks.serving.sides import Room, engine_options
from benchmarks.serving.turns import remove_shared_memory
from examples.demo.engine import Answer, Engine, EngineError
from tests.prove.cells import Cell, Outcome
from tests.prove.happenings import (
    DAMAGES,
    Outage,
    Piece,
    bucket_outages,
    directory_gone,
    disk_outages,
    files,
    make_disk,
)
from tests.s3.proxy import FaultProxy, Rule
from tests.s3.servers import RcloneServer
from tests.vllm.damage import (
    CHUNK_BYTES,
    ENGINE_OPTIONS,
    FULL_TOKENS,
    PROMPT_CHUNKS,
    Prompt,
    Reference,
    chunk_prompts,
    loads_refused,
)
from tests.vllm.harness import CHUNK_TOKENS, Workshop, chain_config, close, forked_workshop
from tests.vllm.media import slab

SIDES: Final = ("slab", "shared_dir", "s3", "vLLM fs", "vLLM obj")
EXACT, WRONG, DIED, HUNG, REFUSED = "exact", "WRONG ANSWER", "engine died", "hung", "refused to start"
YES, RESTARTED, NO = "recovered", "recovered by a restart", "not recovered"
HUNG_S: Final = 10.0
"""A request that takes longer hangs; alone it takes half a second."""
AGAIN_S: Final = 35.0
"""How long after the fault a side may take to serve right answers from its storage."""
START_S: Final = 60.0
STORED_S: Final = 8.0
STORE_ATTEMPTS: Final = 5
FOUND_BY_LOADS: Final = ("flipped", "swapped", "another's")
"""Damage that a lookup does not see: a load must have refused it."""
BUCKET_OUTAGES: Final = ("S3 500", "S3 503", "S3 403", "S3 hangs", "S3 resets", "S3 refused")
MEMORY_CHUNKS: Final = PROMPT_CHUNKS + 2
"""Of the memory before a peer's tier."""
_CAPACITY: Final = "192MiB"
"""Room for all prompts of a trial, some twenty of 4 MiB, for where one is evicted a trial takes the next for it.
A slab's index may take 33 MiB.
"""
_LOOKUP: Final = {"timeout": "2s", "present_for": "200ms", "absent_for": "300ms"}


def cells(seed: int) -> Iterable[Cell]:
    """One for each side: engines are forked from a process that has imported vLLM, once for each cell."""
    for name in SIDES:
        yield Cell(name, partial(try_side, name, seed), limit_s=900.0)


def try_side(name: str, seed: int, faults: str = "") -> Outcome:
    """Try a side, in the current directory. ``faults``: only those with this in their names."""
    verdicts: list[Verdict] = []
    with contextlib.ExitStack() as stack:
        scratch, disk = Path.cwd(), None
        if name not in ("s3", "vLLM obj"):
            disk = make_disk(scratch, 320 << 20)
            if disk is None:
                return Outcome(note="no filesystem of its own can be made here")
            stack.callback(disk.destroy)
        workshop = stack.enter_context(forked_workshop(scratch))
        server = stack.enter_context(RcloneServer())
        proxy = stack.enter_context(FaultProxy(server.port))
        directory = (scratch if disk is None else disk.path) / "kv"
        side = (_vllms if name.startswith("vLLM") else _ours)(name, directory, server, proxy.endpoint)
        outages = bucket_outages(server, proxy)
        if disk is None:
            outages = {outage: outages[outage] for outage in BUCKET_OUTAGES}
        else:
            outages = {**disk_outages(disk), "directory gone": partial(directory_gone, directory)}
        trial = Trial(workshop, side, server, outages, seed)
        stack.callback(trial.close)
        try:
            for verdict in trial.verdicts(faults):
                print(verdict, verdict.why, flush=True)
                verdicts.append(verdict)
        except NoHitsError as error:
            for log in sorted(workshop.scratch.glob("engine-*.log")):
                print(log.name, log.read_text(errors="replace"), sep="\n")
            return Outcome(note=str(error), missed=[str(error)] if side.is_ours else [])
    counts = Counter(verdict.what for verdict in verdicts)
    counts += Counter(verdict.recovered for verdict in verdicts if verdict.recovered != YES)
    outcome = Outcome({"faults": len(verdicts), **counts}, note="; ".join(map(str, verdicts)))
    for verdict in verdicts if side.is_ours else ():
        where = {WRONG: outcome.wrong, EXACT: []}.get(verdict.what, outcome.dead)
        where.append(f"{verdict}: {verdict.why}; seed {seed}")
        if verdict.recovered != YES or not verdict.was_met:
            outcome.missed.append(f"{verdict}; seed {seed}")
    return outcome


# The sides.


@dataclass(frozen=True)
class Side:
    """What a side is, and where its chunks are."""

    name: str
    transfer: Mapping[str, Any]
    """The engine's ``kv_transfer_config``, beyond what all have."""
    pieces: Callable[[], list[Piece]]
    """All chunks that are stored now."""
    environment: Mapping[str, str] = field(default_factory=dict)
    is_ours: bool = False
    """A peer's has memory before its storage: a prompt must be pushed out of it to come from storage."""
    clean: Callable[[], None] = lambda: None
    """Removes what a killed engine leaves outside its directories."""


def _ours(name: str, directory: Path, server: RcloneServer, endpoint: str) -> Side:
    environment: Mapping[str, str] = {}
    pieces = partial(_files, directory)
    if name == "s3":
        tier = server.tier("ours", endpoint=endpoint, request_timeout="1s", lookup=_LOOKUP)
        pieces, environment = partial(_files, server.directory / "ours"), server.environment
    elif name == "slab":
        tier, pieces = dict(slab(directory, _CAPACITY).tier), lambda: list(slab(directory).stored())
    else:
        tier = {"kind": name, "path": str(directory), "capacity": _CAPACITY, "lookup": _LOOKUP}
    extra = {"config": chain_config(tier, load_timeout="2s")}
    transfer = {"kv_connector": "NixlOffloadConnector", "kv_connector_extra_config": extra}
    return Side(name, transfer, pieces, environment, is_ours=True)


def _vllms(name: str, directory: Path, server: RcloneServer, endpoint: str) -> Side:
    region = f"yardstick-{secrets.token_hex(6)}"
    room = Room(gpu=0, memory=MEMORY_CHUNKS * CHUNK_BYTES, storage=0)
    kind = f"vllm-{name.removeprefix('vLLM ')}-256"
    transfer = engine_options(kind, room, directory, server.tier(endpoint=endpoint), region)["kv_transfer_config"]
    environment: Mapping[str, str] = {}
    if name == "vLLM obj":
        directory = server.directory / "vllm"
        environment = {**server.environment, "NIXL_TELEMETRY_ENABLE": "y"}  # without it vLLM dies of NIXL 1.5's
    return Side(name, transfer, partial(_files, directory), environment, clean=partial(remove_shared_memory, region))


def _files(base: Path) -> list[Piece]:
    """Files that are large enough to be chunks, and finished; the oldest first, so a prompt's are in its order."""
    return [
        Piece(path)
        for _, path in sorted(
            (status.st_mtime_ns, path) for path, status in files(base) if status.st_size >= CHUNK_BYTES
        )
        if not path.name.startswith(".") and not path.name.endswith(".tmp") and ".rclone_temp_put_" not in path.name
    ]


# A trial.


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
        more = ("" if self.recovered == YES else f", {self.recovered}") + ("" if self.was_met else ", not met")
        return f"{self.fault}: {self.what}{more}"


class NoHitsError(Exception):
    """A side that serves nothing from its storage with nothing wrong: it cannot be tried."""


class Trial:
    """Tries a side. ``close`` ends its engine."""

    def __init__(
        self, workshop: Workshop, side: Side, server: RcloneServer, outages: Mapping[str, Outage], seed: int
    ) -> None:
        self._workshop, self._side, self._server, self._outages = workshop, side, server, outages
        self._prompts = (prompt for number in count(seed << 16) for prompt in chunk_prompts(1, seed=number))
        self._reference = Reference(workshop.start_engine(**ENGINE_OPTIONS))
        self._engine: Engine | None = None
        self._restarts = 0
        """Because it died or hung."""

    def verdicts(self, wanted: str) -> Iterator[Verdict]:
        """Try everything with ``wanted`` in its name. Raises NoHitsError."""
        self._started()
        mine, _ = self._stored()
        came, wrong = self._comes_back(mine)
        if came == NO or wrong:
            raise NoHitsError(f"with nothing wrong: {wrong or 'nothing comes from storage'}")
        tries: dict[str, Callable[[str], Verdict]] = {
            **{name: self._damaged for name in DAMAGES if name != "long"},
            **{name: partial(self._outage, outage) for name, outage in self._outages.items()},
        }
        for name, attempt in tries.items():
            if wanted in name:
                yield attempt(name)

    def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._side.clean()

    # The faults

    def _damaged(self, name: str) -> Verdict:
        mine, pieces = self._stored()
        _, others = self._stored()
        DAMAGES[name](pieces[1], others[1], 0.5)
        self._server.forget()
        before = self._refused
        came = self._ask([mine])
        was_met = not self._side.is_ours or name not in FOUND_BY_LOADS or self._refused > before
        return replace(self._verdict(name, came, mine), was_met=was_met)

    def _outage(self, outage: Outage, name: str) -> Verdict:
        mine, _ = self._stored()
        fresh = next(self._prompts)
        with outage() as rule:
            came = self._ask([mine, fresh, mine])
        was_met = not isinstance(rule, Rule) or rule.hits > 0
        return replace(self._verdict(name, came, mine), was_met=was_met)

    def _verdict(self, fault: str, came: tuple[str, str], prompt: Prompt) -> Verdict:
        """``came``: what came of a fault and why. What comes now that it is over may be worse."""
        recovered, wrong = self._comes_back(prompt)
        what, why = (WRONG, f"after the fault: {wrong}") if wrong and came[0] != WRONG else came
        return Verdict(fault, what, recovered, why)

    # The engine

    @property
    def _refused(self) -> int:
        return 0 if self._engine is None else loads_refused(self._engine)

    def _started(self) -> Engine:
        if self._engine is None:
            common = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
            self._engine = self._workshop.start_engine(
                environment=self._side.environment,
                start_timeout_s=START_S,
                kv_transfer_config={**common, **self._side.transfer},
                **ENGINE_OPTIONS,
            )
        return self._engine

    def _restart(self) -> None:
        """End an engine that cannot be used any more; the next request starts one."""
        self._restarts += 1
        self.close()

    def _wrong(self, prompt: Prompt, answer: Answer) -> str:
        """Say what is wrong with an answer, "" if it is that of a vLLM without a connector."""
        [right] = self._reference.answers([prompt])
        return "" if close(answer, right) else f"{answer.tokens}, not {right.tokens}"

    def _ask(self, prompts: list[Prompt]) -> tuple[str, str]:
        """Ask one prompt after the other, without what the GPU remembers. Returns the worst that came of it, and why.

        An engine that has died or hangs is gone afterwards.
        """
        began_s = time.monotonic()
        try:
            engine = self._started()
        except EngineError as error:
            self.close()
            return HUNG if time.monotonic() - began_s >= START_S else REFUSED, _last(error)
        for prompt in prompts:
            try:
                engine.reset_prefix_cache()
                [answer] = engine.generate([prompt], timeout_s=HUNG_S)
                if wrong := self._wrong(prompt, answer):
                    return WRONG, wrong
                self._settle(engine)
            except EngineError as error:
                self._restart()
                return HUNG if "no answer within" in str(error) else DIED, _last(error)
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
            if not self._side.is_ours:
                self._ask([next(self._prompts) for _ in range(2)])
            new = [piece for piece in pieces if piece not in before]
            if len(new) == PROMPT_CHUNKS:
                return mine, new
            found = f"of the last, {len(new)} new chunks were found beside {len(before)}"
        raise NoHitsError(f"{STORE_ATTEMPTS} prompts were not stored, with nothing wrong; {found}")

    def _at_rest(self, least: int) -> list[Piece]:
        """Return all chunks once there are so many and no more come; or what there is after ``STORED_S``."""
        until_s, last = time.monotonic() + STORED_S, list[Piece]()
        while True:
            now: list[Piece] = []
            with contextlib.suppress(AssertionError, OSError):
                now = [Piece(piece.path, piece.offset, piece.size) for piece in self._side.pieces()]
            if (len(now) >= least and now == last) or time.monotonic() > until_s:
                return now
            last = now
            time.sleep(0.3)

    def _comes_back(self, prompt: Prompt) -> tuple[str, str]:
        """Whether within ``AGAIN_S`` the prompt's answer is right and comes from storage: ``YES``, ``RESTARTED`` or
        ``NO``; and an answer that was wrong meanwhile, in words.
        """
        wrong, until_s = "", time.monotonic() + AGAIN_S
        has_come, failures = False, 0
        while not has_come and time.monotonic() < until_s and failures < 3:
            try:
                engine = self._started()
                engine.reset_prefix_cache()
                [answer] = engine.generate([prompt], timeout_s=HUNG_S)
                if now_wrong := self._wrong(prompt, answer):
                    failures += 1
                    wrong = now_wrong
                elif answer.external_hit_tokens >= FULL_TOKENS - CHUNK_TOKENS:
                    has_come = True
                self._settle(engine)
                if not has_come and not self._side.is_ours:
                    engine.generate([next(self._prompts) for _ in range(2)], timeout_s=2 * HUNG_S)
                    self._settle(engine)
            except EngineError:
                self._restart()
                failures += 1
            time.sleep(0 if has_come else 0.3)
        restarts, self._restarts = self._restarts, 0
        return (RESTARTED if restarts else YES) if has_come else NO, wrong


def _last(error: EngineError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "Error" in line and not line.startswith(("File", "raise", "---"))]
    return (causes[-1] if causes else lines[0] if lines else "")[:300]
