"""The yardstick: the same damage and outages for ours, vLLM's own tiers and LMCache, each under a real vLLM.

What ours does wrong is found; what peers do is counted, and told in the note: a verdict for each fault.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests.prove.cells import Cell, Outcome
from tests.prove.yardstick.sides import SIDES, make

LIMIT_S = 900.0


def cells(seed: int) -> Iterable[Cell]:
    """One for each side: engines are forked from a process that has imported vLLM, once for each cell."""
    for name in SIDES:
        yield Cell(name, partial(try_side, name, seed), limit_s=LIMIT_S)


def try_side(name: str, seed: int, faults: str = "") -> Outcome:
    """Try a side. ``faults``: only those with this in their names."""
    from examples.demo.engine import quick_environment
    from tests.prove.happenings import make_disk
    from tests.prove.yardstick.trial import EXACT, WRONG, YES, Answers, NoHitsError, Trial, Verdict
    from tests.s3.proxy import FaultProxy
    from tests.s3.servers import RcloneServer
    from tests.vllm.harness import ONE_CORE, Workshop
    from tests.vllm.zygote import Zygote

    if name.startswith("LMCache") and importlib.util.find_spec("lmcache") is None:
        return Outcome(note="lmcache is not installed here")
    verdicts: list[Verdict] = []
    outcome = Outcome()
    with ExitStack() as stack:
        scratch = Path.cwd()
        disk = None
        if name not in ("s3", "vLLM obj"):
            disk = make_disk(scratch, 320 << 20)
            if disk is None:
                return Outcome(note="no filesystem of its own can be made here")
            stack.callback(disk.destroy)
        zygote = Zygote(scratch / "zygote.log", {**quick_environment(scratch=scratch, in_process=True), **ONE_CORE})
        stack.callback(zygote.close)
        workshop = Workshop(zygote)
        stack.callback(workshop.close)
        server = stack.enter_context(RcloneServer())
        proxy = stack.enter_context(FaultProxy(server.port))
        directory = (scratch if disk is None else disk.path) / "kv"
        side = make(name, directory, server, proxy.endpoint)
        trial = Trial(workshop, side, server, proxy, disk, directory, Answers(workshop, seed), faults)
        stack.callback(trial.close)
        try:
            for verdict in trial.verdicts():
                print(verdict, verdict.why, flush=True)
                verdicts.append(verdict)
        except NoHitsError as error:
            for log in sorted(workshop.scratch.glob("engine-*.log")):
                print(log.name, log.read_text(errors="replace"), sep="\n")
            return Outcome(note=str(error), missed=[str(error)] if side.is_ours else [])
    outcome.counts = {"faults": len(verdicts), **Counter(verdict.what for verdict in verdicts)}
    outcome.counts |= Counter(verdict.recovered for verdict in verdicts if verdict.recovered != YES)
    outcome.note = "; ".join(map(str, verdicts))
    for verdict in verdicts if side.is_ours else ():
        where = {WRONG: outcome.wrong, EXACT: []}.get(verdict.what, outcome.dead)
        where.append(f"{verdict}: {verdict.why}; seed {seed}")
        if verdict.recovered != YES or not verdict.was_met:
            outcome.missed.append(f"{verdict}; seed {seed}")
    return outcome
