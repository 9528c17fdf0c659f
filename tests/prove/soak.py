"""The soak: one engine for half an hour over memory, slab, shared directory and bucket; what it takes stays flat. A
first window, then faults that come and go by a seeded timetable, recovery, a last window.

The load is laps that are alike but for their salts. A lap has sessions of several turns with shared system prompts,
sessions of earlier laps that come back, requests that are given up, and a reset while requests run. As each lap has a
salt of its own, its prompts are new to every cache, while what is right was computed once.

Threading: the cell's main thread asks the engine; ``Troubles`` has a thread, and the proxy its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

from examples.demo.engine import Answer, Engine, EngineError
from examples.demo.model import TINY
from nixl_offload.cli.main import main as nixl_offload
from nixl_offload.tiers.shared.sweep import make_plan
from tests.prove.cells import Cell, Outcome
from tests.prove.happenings import DAMAGES, Outage, Piece, bucket_outages, disk_outages, files, make_disk
from tests.s3.proxy import FaultProxy, Rule
from tests.s3.servers import RcloneServer
from tests.vllm.damage import Prompt
from tests.vllm.harness import CHUNK_TOKENS, Workshop, close, forked_workshop
from tests.vllm.zygote import MAIN_MODULE

MINUTES = float(os.environ.get("NIXL_OFFLOAD_SOAK_MINUTES", "30"))
"""How long; two are enough to develop it, five to see most faults. Beginning and end take two minutes more."""
MIB: Final = 1 << 20
LIMITS: Final = {"anonymous memory, MiB": 32.0, "shared memory, MiB": 1.0, "threads": 16.0, "descriptors": 16.0}
"""By how much the median of the last laps may exceed that of the first: pools of threads and connections, and what they
have freed and keep, grow when they are first needed whole, which may be in a fault. There are over a hundred of these
in half an hour."""
MEMORY, SLAB, TREE, BUCKET = 16 * MIB, 48 * MIB, 64 * MIB, 192 * MIB
"""A lap stores some 20 MiB."""
STAGING: Final = 16 * MIB
"""Little, so that all of its pages are in use soon."""
BURST: Final = 64 * MIB
"""The directory's servers keep it to its capacity to within what they write in a few seconds, which is three laps."""
WARM_UP, WINDOW, TROUBLED, CALM = 0.25, 0.1, 0.5, 0.05
"""Shares of the whole. Libraries' pools and allocators take some minutes until they have what they want."""
BACK_S: Final = 90.0
"""How long tiers may take to be in use again after the last fault."""
SLOWER: Final = 0.2
"""A core of a virtual machine may be half of a real one, and the slower the more the other half has to do."""
GC_LAPS: Final = 8
RESET_LAPS: Final = 12
"""More than the longest of ``BACK``: after a reset of the connector nothing older counts in directory and bucket.
"""
REQUEST_S: Final = 60.0
"""Requests that take longer hang."""
VARIANTS, SESSIONS, TURNS = 3, 5, 3
ANSWER_TOKENS: Final = 6
SYSTEM_TOKENS: Final = 512
TURN_TOKENS: Final = (150, 350)
BACK: Final = (1, 2, 5)
"""Sessions come back so many laps later: out of the slab, the directory, the bucket."""
HEAP_MIB: Final = 2.0
"""By how much what libraries have from malloc may grow."""
TROUBLE: Final = ("breaker_state", "disabled_ranks")
"""Metrics that are 0 for every tier in use."""
LASTS_S: Final = (1.0, 4.0)
PAUSE_S: Final = (0.5, 2.0)
UNTIL_ASKED_S: Final = 20.0
"""So much longer lasts what no request has met: after another fault, the bucket may not be asked for a while."""
DAMAGED_BY: Final = ("flipped", "truncated", "emptied", "swapped", "deleted")
"""Of a slab's places only the first."""
DAMAGED: Final = 6
"""So many files, objects or places of the slab at a time."""
SLOT_BYTES: Final = 1 << 16
"""Smaller files are no shards; of a slab such pieces are damaged."""
OFTEN: Final = 5
"""Of fewer times, a tier that is still out of use after the fault before explains that nothing asked it."""


def cells(seed: int) -> Iterator[Cell]:
    """One."""
    yield Cell(f"{MINUTES:g} minutes", partial(soak, seed, MINUTES * 60), limit_s=MINUTES * 60 + 600)


@dataclass
class Session:
    """Prompts of its turns, each with the answer before it, and the answers of a vLLM without a connector."""

    prompts: list[Prompt]
    right: list[Answer] = field(default_factory=list)


def sessions_of(seed: int, vocabulary: int, reference: Engine) -> list[list[Session]]:
    """Draw the sessions of each variant of a lap, and have ``reference`` answer every turn."""
    source = random.Random(seed)

    def text(length: int) -> Prompt:
        return [source.randrange(2, vocabulary) for _ in range(length)]

    made = []
    for _ in range(VARIANTS):
        systems = [text(SYSTEM_TOKENS) for _ in range(2)]
        sessions = [Session([systems[at % 2] + text(source.randint(*TURN_TOKENS))]) for at in range(SESSIONS)]
        for session in sessions * TURNS:
            [answer] = reference.generate(session.prompts[-1:], max_tokens=ANSWER_TOKENS)
            session.right.append(answer)
            session.prompts.append([*session.prompts[-1], *answer.tokens, *text(source.randint(*TURN_TOKENS))])
        made.append(sessions)
    return made


@dataclass
class _Run:
    """The engine, and what was asked of it so far."""

    engine: Engine
    variants: list[list[Session]]
    outcome: Outcome
    directories: dict[str, Path]
    """Whose files' space on disk is added up, by name."""
    tidy: Callable[[], None]
    chance: random.Random
    lap_s: list[float] = field(default_factory=list)
    taken: list[dict[str, float]] = field(default_factory=list)
    """After each lap: what the engine takes of the machine."""
    now: str = ""
    """The fault that there is."""

    @property
    def laps(self) -> int:
        """How many there were."""
        return len(self.lap_s)

    def lap(self) -> None:
        """Ask a lap, and judge it."""
        engine, number, began_s = self.engine, self.laps, time.monotonic()
        sessions = self.variants[number % VARIANTS]
        for turn in range(TURNS):
            self._ask(sessions, turn, f"{number}")
            if (before := number - BACK[turn]) >= 0:
                others = self.variants[before % VARIANTS]
                self._ask(others[:2], TURNS - 1, f"{before}")
                engine.abandon([others[2].prompts[turn]], steps=self.chance.randint(1, 6))
                self._count(aborts=1)
        answers, resets = engine.generate_through_resets(
            [session.prompts[-2] for session in sessions],
            max_tokens=ANSWER_TOKENS,
            every=2,
            most=1,
            timeout_s=REQUEST_S,
        )
        self._judge(answers, [session.right[-1] for session in sessions], "through resets")
        self._count(laps=1, resets=resets)
        self.lap_s.append(time.monotonic() - began_s)
        self.taken.append(_taken(engine.pid, self.directories))
        print(f"lap {number}, {self.lap_s[-1]:.1f} s", {name: round(value) for name, value in self.taken[-1].items()})
        if number % GC_LAPS == GC_LAPS - 1:
            self.tidy()

    def _ask(self, sessions: Sequence[Session], turn: int, salt: str) -> None:
        asked = [session.prompts[turn] for session in sessions]
        answers = self.engine.generate(asked, max_tokens=ANSWER_TOKENS, together=True, salt=salt, timeout_s=REQUEST_S)
        self._judge(answers, [session.right[turn] for session in sessions], f"turn {turn} of lap {salt}")

    def _judge(self, answers: Sequence[Answer], right: Sequence[Answer], what: str) -> None:
        self._count(answers=len(answers))
        self.outcome.wrong += [
            f"lap {self.laps}, {what}, with {self.now or 'no fault'}: {answer.tokens}, not {other.tokens}, "
            f"logprobs {answer.logprobs}, not {other.logprobs}"
            for answer, other in zip(answers, right, strict=True)
            if not close(answer, other)
        ]

    def _count(self, **counts: int) -> None:
        self.outcome.counts = dict(Counter(self.outcome.counts) + Counter(counts))

    def laps_for(self, seconds: float) -> slice:
        """Ask laps, each variant as often as the others. Returns which."""
        first, until_s = self.laps, time.monotonic() + seconds
        while time.monotonic() < until_s or self.laps % VARIANTS:
            self.lap()
        return slice(first, self.laps)

    def held(self) -> dict[str, Any]:
        """Return what the engine holds with nothing under way."""
        if not self.engine.settle():
            self.outcome.leaks.append("the engine does not come to rest")
        return self.engine.call("held")


def _taken(pid: int, directories: dict[str, Path]) -> dict[str, float]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "anonymous memory, MiB": int(status["RssAnon"].split()[0]) / 1024,
        "shared memory, MiB": int(status["RssShmem"].split()[0]) / 1024,
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        **{
            f"{name} on disk, MiB": sum(status.st_blocks * 512 for _, status in files(path)) / MIB
            for name, path in directories.items()
        },
    }


def grown(first: Mapping[str, float], last: Mapping[str, float]) -> list[str]:
    """Return a sentence for each thing of which there is more at the end than ``LIMITS`` allow."""
    return [
        f"{name}: {first[name]:.1f} before, {last[name]:.1f} at the end, which is more than {limit:g} above"
        for name, limit in LIMITS.items()
        if last[name] > first[name] + limit
    ]


def soak(seed: int, seconds: float) -> Outcome:
    """Run a soak of ``seconds``. The seed does not decide which lap meets which fault."""
    outcome = Outcome()
    with contextlib.ExitStack() as stack:
        scratch = Path.cwd()
        workshop = stack.enter_context(forked_workshop(scratch, MALLOC_ARENA_MAX="2"))
        server = stack.enter_context(RcloneServer())
        stack.enter_context(mock.patch.dict(os.environ, server.environment))
        proxy = stack.enter_context(FaultProxy(server.port))
        disk, outages = make_disk(scratch, 192 * MIB), bucket_outages(server, proxy)
        if disk is None:
            outcome.missed.append("no filesystem can be made here: none was full or read-only")
        else:
            stack.callback(disk.destroy)
            outages |= disk_outages(disk)
        base = scratch / "kv" if disk is None else disk.path
        config = _config(base, server.tier("soak", endpoint=proxy.endpoint, request_timeout="1s"))
        with _engine(workshop, None) as reference:
            variants = sessions_of(seed, TINY.vocab, reference)
            reference.stop()
        directories = {"slab": base / "slab", "tree": base / "tree", "bucket": server.directory}
        troubles = Troubles(seed, server, outages, directories)
        engine = stack.enter_context(_engine(workshop, config, server.environment))
        collect = _collector(scratch, server, proxy)
        run = _Run(engine, variants, outcome, directories, collect, random.Random(seed))
        try:
            _go(run, seconds, troubles)
        except EngineError as error:
            print(error)
            fault = troubles.now or "no fault"
            outcome.dead.append(f"seed {seed}, lap {run.laps}, {fault}: {str(error).splitlines()[0]}")
        else:
            for name, limit in (("slab", SLAB), ("tree", TREE + BURST)):
                most = max(taken[f"{name} on disk, MiB"] for taken in run.taken)
                if most * MIB > limit + MIB:
                    outcome.leaks.append(f"{name}: {most:.0f} MiB on disk of {limit / MIB:.0f}")
            run.tidy()
            if (left := sum(status.st_size for _, status in files(server.directory))) > BUCKET + MIB:
                outcome.leaks.append(f"{left / MIB:.0f} MiB in the bucket of {BUCKET / MIB:.0f} after gc")
    return outcome


def _go(run: _Run, seconds: float, troubles: Troubles) -> None:
    engine, outcome = run.engine, run.outcome
    run.laps_for(WARM_UP * seconds)
    while run.laps <= max(BACK):
        run.lap()
    first = run.laps_for(WINDOW * seconds)
    before = run.held()

    until_s = time.monotonic() + TROUBLED * seconds
    with troubles:
        while time.monotonic() < until_s:
            run.now = troubles.now
            run.lap()
            if run.laps % RESET_LAPS == 0:
                engine.reset_prefix_cache(connector=True)
    run.now = ""
    outcome.counts["faults"] = sum(troubles.struck.values())
    outcome.missed += troubles.idle
    calm_lap = run.laps + max(BACK)
    took_s = _until_back(run)
    run.laps_for(CALM * seconds)
    while run.laps <= calm_lap or run.laps % VARIANTS != first.start % VARIANTS:
        run.lap()
    last = run.laps_for(WINDOW * seconds)

    after = run.held()
    outcome.missed += _unused(engine)
    medians = [
        {name: statistics.median(taken[name] for taken in run.taken[window]) for name in run.taken[0]}
        for window in (first, last)
    ]
    outcome.leaks += grown(*medians)
    heaps = [held["malloc_bytes"] / MIB for held in (before, after)]
    if heaps[1] > heaps[0] + HEAP_MIB:
        outcome.leaks.append(f"malloc has {heaps[0]:.1f} MiB in use at first, {heaps[1]:.1f} at the end")
    outcome.leaks += [f"{count} {what} with nothing under way" for what, count in after["held"].items() if count]
    pace = statistics.median(run.lap_s[first]) / statistics.median(run.lap_s[last])
    if pace < 1 - SLOWER:
        outcome.missed.append(f"the last laps had {pace:.0%} of the first ones' throughput")
    outcome.note = (
        f"throughput {pace:.0%} of the first laps; all tiers back after {took_s:.0f} s; malloc {heaps[0]:.1f} MiB at "
        f"first, {heaps[1]:.1f} at the end; first and last: "
        + ", ".join(f"{name} {medians[0][name]:.0f} {medians[1][name]:.0f}" for name in medians[0])
        + json.dumps(engine.labelled("vllm:nixl_offload_chunks", "outcome"))
    )
    engine.stop()


class Troubles:
    """Begins with the next fault when the last one is over and some time has passed."""

    def __init__(
        self, seed: int, server: RcloneServer, outages: Mapping[str, Outage], directories: Mapping[str, Path]
    ) -> None:
        """``directories``: of the tiers, whose files are damaged, too."""
        self._source = random.Random(f"troubles {seed}")
        self._server = server
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="troubles")
        self._failed: Exception | None = None
        self._begun: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        """How often each found something to break."""
        self.now = ""
        """Which one there is; none: a pause."""
        self._kinds = dict(outages)
        for place, directory in directories.items():
            for damage in DAMAGED_BY if place != "slab" else DAMAGED_BY[:1]:
                name = f"{place} {damage}"
                self._kinds[name] = partial(self._damaged, name, directory, damage)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """End what lasts. Raises what went wrong in the thread: then less was tried than it seems."""
        self._stopping.set()
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    @property
    def idle(self) -> list[str]:
        """A sentence for each kind that broke nothing, though it came often."""
        idle = [name for name in self._kinds if not self.struck[name] and self._begun[name] >= OFTEN]
        return [f"{name} broke nothing, {self._begun[name]} times" for name in idle]

    def _run(self) -> None:
        try:
            while True:
                for name in self._source.sample(sorted(self._kinds), len(self._kinds)):
                    if self._stopping.wait(self._source.uniform(*PAUSE_S)):
                        return
                    with self._kinds[name]() as rule:
                        self.now = name
                        self._begun[name] += 1
                        over = self._stopping.wait(self._source.uniform(*LASTS_S))
                        until_s = time.monotonic() + UNTIL_ASKED_S
                        while isinstance(rule, Rule) and not rule.hits and not over and time.monotonic() < until_s:
                            over = self._stopping.wait(PAUSE_S[0])
                    self.now = ""
                    self.struck[name] += (
                        rule.hits > 0 if isinstance(rule, Rule) else name.startswith(("S3", "disk", "read"))
                    )
                    if over:
                        return
        except Exception as error:  # noqa: BLE001 - raised at the end
            self._failed = error

    @contextlib.contextmanager
    def _damaged(self, name: str, directory: Path, damage: str) -> Iterator[None]:
        pieces = [
            Piece(path, at, SLOT_BYTES) if path.suffix == ".slab" else Piece(path)
            for path, status in sorted(files(directory), key=lambda found: found[0])
            if status.st_size > SLOT_BYTES and not path.name.startswith(".")
            for at in range(0, status.st_size if path.suffix == ".slab" else 1, SLOT_BYTES)
        ]
        chosen = self._source.sample(pieces, min(DAMAGED, len(pieces)))
        for mine, other in zip(chosen, chosen[1:] + chosen[:1], strict=True):
            with contextlib.suppress(FileNotFoundError):
                DAMAGES[damage](mine, other, 0.5)
                self.struck[name] += 1
        self._server.forget()
        yield


def _unused(engine: Engine) -> list[str]:
    """Return the tiers from which nothing was loaded: of these the answers say nothing."""
    values = engine.call("labelled", name="vllm:nixl_offload_chunks")["values"]
    loaded = {of["tier"] for of, count in values if count and (of["operation"], of["outcome"]) == ("load", "ok")}
    unused = {"memory", "slab", "shared_dir", "s3"} - loaded
    return [f"nothing was loaded from {kind}" for kind in sorted(unused)]


def _until_back(run: _Run) -> float:
    """Ask laps until every tier is in use again; return how long that took."""
    began_s = time.monotonic()
    while True:
        run.lap()
        run.engine.settle()
        states = {name: run.engine.labelled(f"vllm:nixl_offload_{name}", "tier") for name in TROUBLE}
        assert all(states.values()), f"a metric is missing: {states}"
        out = [f"{name}: {by_tier}" for name, by_tier in states.items() if any(by_tier.values())]
        took_s = time.monotonic() - began_s
        if not out or took_s > BACK_S:
            run.outcome.missed += [f"{BACK_S:.0f} s after the last fault: {sentence}" for sentence in out]
            return took_s


def _config(base: Path, bucket: dict[str, Any]) -> dict[str, Any]:
    lookup = {"timeout": "500ms", "present_for": "5s", "absent_for": "1s"}
    tiers = [
        {"kind": "memory", "capacity": MEMORY},
        {"kind": "slab", "path": str(base / "slab"), "capacity": SLAB},
        {"kind": "shared_dir", "path": str(base / "tree"), "capacity": TREE, "evict": True, "lookup": lookup},
        {**bucket, "capacity": BUCKET, "lookup": lookup},
    ]
    return {"chunk_tokens": CHUNK_TOKENS, "slow_hits": "take", "load_timeout": "2s", "staging": STAGING, "tiers": tiers}


def _engine(workshop: Workshop, config: dict[str, Any] | None, environment: dict[str, str] | None = None) -> Engine:
    return workshop.start_engine(
        connector=config,
        environment={**(environment or {}), MAIN_MODULE: "tests.prove.soak_host"},
        kv_cache_memory_bytes=24 * MIB,
        max_num_seqs=8,
    )


def _collector(scratch: Path, server: RcloneServer, proxy: FaultProxy) -> Callable[[], None]:
    """Return what an operator's timer does: shrink the bucket. What it cannot do now it does the next time.

    gc spares what was written within ten minutes, which would be all there is: here it does not. Objects are not made
    to look older instead: after a reset the connector goes by their age.
    """
    file = scratch / "gc.yaml"
    file.write_text(json.dumps({"tiers": [server.tier("soak", endpoint=server.endpoint, capacity=BUCKET)]}))

    def collect() -> None:
        defaults = make_plan.__kwdefaults__
        assert "grace_s" in defaults
        with mock.patch.dict(defaults, grace_s=0.0), contextlib.suppress(Exception):
            nixl_offload(["gc", str(file), "--delete"])

    return collect
