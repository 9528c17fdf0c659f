"""Runs the soak: memory, slab, shared directory and bucket; a first window, faults, recovery, a last window.

Threading: the cell's main thread asks the engine; ``Troubles`` and ``Samples`` have a thread each, the proxy its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

from examples.demo.engine import Engine, EngineError, quick_environment
from examples.demo.model import TINY
from nixl_offload.cli.main import main as nixl_offload
from nixl_offload.tiers.shared.sweep import make_plan
from tests.prove.cells import Outcome
from tests.prove.happenings import files, make_disk
from tests.prove.soak import laps
from tests.prove.soak.samples import MIB, Samples, grown
from tests.prove.soak.troubles import Troubles
from tests.s3.proxy import FaultProxy
from tests.s3.servers import RcloneServer
from tests.vllm.harness import CHUNK_TOKENS, ONE_CORE, Workshop
from tests.vllm.zygote import MAIN_MODULE, Zygote

MEMORY, SLAB, TREE, BUCKET = 16 * MIB, 48 * MIB, 64 * MIB, 192 * MIB
"""A lap stores some 20 MiB."""
STAGING: Final = 16 * MIB
"""Little, so that all of its pages are in use soon."""
BURST: Final = 48 * MIB
"""The directory's servers keep it to its capacity to within what they write in a few seconds, which is two laps."""
WARM_UP, WINDOW, TROUBLED, CALM = 0.25, 0.1, 0.5, 0.05
"""Shares of the whole. Libraries' pools and allocators take some minutes until they have what they want."""
BACK_S: Final = 90.0
"""How long tiers may take to be in use again after the last fault."""
SLOWER: Final = 0.2
"""A core of a virtual machine may be half of a real one, and the slower the more the other half has to do."""
GC_LAPS: Final = 8
RESET_LAPS: Final = 12
"""More than the longest of ``laps.BACK``: after a reset of the connector nothing older counts in directory and bucket.
"""
LAP_S: Final = 120.0
"""A lap that takes longer hangs."""
HEAP_MIB: Final = 2.0
"""By how much what libraries have from malloc may grow."""
TROUBLE: Final = ("breaker_state", "disabled_ranks")
"""Metrics that are 0 for every tier in use."""


@dataclass
class _Run:
    """The engine, and what was asked of it so far."""

    engine: Engine
    variants: list[laps.Variant]
    outcome: Outcome
    tidy: Callable[[], None]
    salts: list[str] = field(default_factory=list)
    lap_s: list[float] = field(default_factory=list)

    def lap(self, what: str = "") -> None:
        """Ask a lap, and judge it."""
        number = len(self.salts)
        self.salts.append(f"{number}")
        lap = laps.lap(self.variants, number, self.salts)
        began_s = time.monotonic()
        reply = self.engine.call(
            "lap", requests=lap.requests, at_a_time=laps.AT_A_TIME, salt=lap.salt, resets=lap.resets, timeout_s=LAP_S
        )
        self.lap_s.append(time.monotonic() - began_s)
        self.outcome.wrong += [f"{sentence}{what and f' ({what})'}" for sentence in lap.judge(reply["outputs"])]
        aborts = sum("abort" in asked for asked in lap.requests)
        counts = Counter(laps=1, answers=lap.compared, aborts=aborts, resets=len(lap.resets))
        self.outcome.counts = dict(Counter(self.outcome.counts) + counts)
        if number % GC_LAPS == GC_LAPS - 1:
            self.tidy()

    def laps_until(self, until_s: float) -> tuple[float, float]:
        """Ask laps, each variant as often as the others. Returns begin and end."""
        begin_s = time.monotonic()
        while time.monotonic() < until_s or len(self.salts) % laps.VARIANTS:
            self.lap()
        return begin_s, time.monotonic()

    def held(self) -> dict[str, Any]:
        """Return what the engine holds with nothing under way."""
        if not self.engine.settle():
            self.outcome.leaks.append("the engine does not come to rest")
        return self.engine.call("held")


def soak(seed: int, seconds: float) -> Outcome:
    """Run a soak of ``seconds``. The seed does not decide which lap meets which fault."""
    outcome = Outcome()
    with contextlib.ExitStack() as stack:
        scratch = Path.cwd()
        environment = {**quick_environment(scratch=scratch, in_process=True), **ONE_CORE, "MALLOC_ARENA_MAX": "2"}
        zygote = Zygote(scratch / "zygote.log", environment)
        stack.callback(zygote.close)
        workshop = Workshop(zygote)
        stack.callback(workshop.close)
        server = stack.enter_context(RcloneServer())
        stack.enter_context(mock.patch.dict(os.environ, server.environment))
        proxy = stack.enter_context(FaultProxy(server.port))
        disk = make_disk(scratch, 192 * MIB)
        if disk is None:
            outcome.missed.append("no filesystem can be made here: none was full or read-only")
        else:
            stack.callback(disk.destroy)
        base = scratch / "kv" if disk is None else disk.path
        config = _config(base, server.tier("soak", endpoint=proxy.endpoint, request_timeout="1s"))
        with _engine(workshop, None) as reference:
            variants = laps.make(seed, TINY.vocab, reference)
            reference.stop()
        troubles = Troubles(seed, server, proxy, disk, base / "tree", base / "slab")
        engine = stack.enter_context(_engine(workshop, config, server.environment))
        samples = Samples(engine.pid, {"slab": base / "slab", "tree": base / "tree", "bucket": server.directory})
        stack.callback(samples.stop)
        run = _Run(engine, variants, outcome, _collector(scratch, server, proxy))
        try:
            _go(run, seconds, troubles, samples)
        except EngineError as error:
            print(error)
            fault = troubles.now or "no fault"
            outcome.dead.append(f"seed {seed}, lap {len(run.salts)}, {fault}: {str(error).splitlines()[0]}")
        else:
            most = samples.window(how=max)
            for name, limit in (("slab", SLAB), ("tree", TREE + BURST)):
                if most.get(f"{name} on disk, MiB", 0.0) * MIB > limit + MIB:
                    outcome.leaks.append(f"{name}: {most[f'{name} on disk, MiB']:.0f} MiB on disk of {limit / MIB:.0f}")
            run.tidy()
            if (left := sum(status.st_size for _, status in files(server.directory))) > BUCKET + MIB:
                outcome.leaks.append(f"{left / MIB:.0f} MiB in the bucket of {BUCKET / MIB:.0f} after gc")
    return outcome


def _go(run: _Run, seconds: float, troubles: Troubles, samples: Samples) -> None:
    engine, outcome = run.engine, run.outcome
    run.laps_until(time.monotonic() + WARM_UP * seconds)
    while len(run.salts) <= max(laps.BACK):
        run.lap()
    first_lap = len(run.salts)
    first = run.laps_until(time.monotonic() + WINDOW * seconds)
    first_s = run.lap_s[first_lap:]
    before = run.held()

    until_s = time.monotonic() + TROUBLED * seconds
    troubles.start()
    try:
        while time.monotonic() < until_s:
            run.lap(troubles.now)
            if len(run.salts) % RESET_LAPS == 0:
                engine.reset_prefix_cache(connector=True)
    finally:
        troubles.stop()
    outcome.counts["faults"] = sum(troubles.struck.values())
    outcome.missed += troubles.idle
    calm_lap = len(run.salts) + max(laps.BACK)
    took_s = _until_back(run)
    run.laps_until(time.monotonic() + CALM * seconds)
    while len(run.salts) <= calm_lap or len(run.salts) % laps.VARIANTS != first_lap % laps.VARIANTS:
        run.lap()
    last_lap = len(run.salts)
    last = run.laps_until(time.monotonic() + WINDOW * seconds)

    after = run.held()
    outcome.missed += _unused(engine)
    medians = samples.window(*first), samples.window(*last)
    outcome.leaks += grown(*medians)
    heaps = [told["malloc_bytes"] / MIB for told in (before, after)]
    if heaps[1] > heaps[0] + HEAP_MIB:
        outcome.leaks.append(f"malloc has {heaps[0]:.1f} MiB in use at first, {heaps[1]:.1f} at the end")
    outcome.leaks += [f"{count} {what} with nothing under way" for what, count in after["held"].items() if count]
    pace = statistics.median(first_s) / statistics.median(run.lap_s[last_lap:])
    if pace < 1 - SLOWER:
        outcome.missed.append(f"the last laps had {pace:.0%} of the first ones' throughput")
    outcome.note = (
        f"throughput {pace:.0%} of the first laps; all tiers back after {took_s:.0f} s; malloc {heaps[0]:.1f} MiB at "
        f"first, {heaps[1]:.1f} at the end; first and last: "
        + ", ".join(f"{name} {medians[0][name]:.0f} {medians[1][name]:.0f}" for name in medians[0])
        + json.dumps(engine.labelled("vllm:nixl_offload_chunks", "outcome"))
    )
    engine.stop()


def _unused(engine: Engine) -> list[str]:
    """Return the tiers from which nothing was loaded: of these the answers say nothing."""
    values = engine.call("labelled", name="vllm:nixl_offload_chunks")["values"]
    loaded = {
        told["tier"] for told, count in values if count and (told["operation"], told["outcome"]) == ("load", "ok")
    }
    unused = {"memory", "slab", "shared_dir", "s3"} - loaded
    return [f"nothing was loaded from {kind}" for kind in sorted(unused)]


def _until_back(run: _Run) -> float:
    """Ask laps until every tier is in use again; return how long that took."""
    began_s = time.monotonic()
    while True:
        run.lap()
        run.engine.settle()
        states = {name: run.engine.labelled(f"vllm:nixl_offload_{name}", "tier") for name in TROUBLE}
        assert all(states.values()), f"a metric is not told: {states}"
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
    return {
        "chunk_tokens": CHUNK_TOKENS,
        "slow_hits": "take",
        "load_timeout": "2s",
        "staging": STAGING,
        "tiers": tiers,
    }


def _engine(workshop: Workshop, config: dict[str, Any] | None, environment: dict[str, str] | None = None) -> Engine:
    return workshop.start_engine(
        connector=config,
        environment={**(environment or {}), MAIN_MODULE: "tests.prove.soak.host"},
        kv_cache_memory_bytes=24 * MIB,
        max_num_seqs=2 * laps.AT_A_TIME,
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
