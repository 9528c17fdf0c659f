"""What happens at each point while a fault is there: ``POINTS`` by name; a start and a shutdown are of ``rounds.py``.

Threading: one thread, beside the product's own.
"""

from __future__ import annotations

import contextlib
import io
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import yaml

from nixl_offload.cli.main import main
from nixl_offload.errors import NixlOffloadError
from nixl_offload.tiers.slot_tier import MemoryTier
from tests.prove.faults.clock import CLOCK
from tests.prove.faults.context import Context
from tests.prove.faults.media import PRESENT_S
from tests.prove.faults.server import JUMP_S

GRACE_S: Final = 3600.0
"""Commands spare what is younger: it may be unfinished."""


def lookup(context: Context, fault: str) -> None:
    """The fault is there while a prompt is looked up; what was found is loaded once it is gone.

    Damage comes before the lookup, which believes nothing that it was told before, or between it and the load.
    """
    asked = [*context.some(), *context.new()]
    is_early = context.rng.random() < 0.5
    if is_early:
        CLOCK.ahead_s += PRESENT_S + 1.0
        context.spoil(fault, asked)
    context.arm(fault, transfers=False)
    context.server.look_up(asked)
    context.lift()
    if not is_early:
        context.spoil(fault, asked)
    context.server.serve(asked)


def store(context: Context, fault: str) -> None:
    """The fault is there while chunks are stored, and written through."""
    fresh = context.new(context.rng.randint(1, 4))
    context.arm(fault)
    context.server.store(fresh)
    context.spoil(fault, context.known)
    _outlast(context, fault, 2.0)
    context.keep(fresh)


def load(context: Context, fault: str) -> None:
    """The fault is there while chunks are loaded, which lookups have found whole."""
    _load(context, fault, list)


def promotion(context: Context, fault: str) -> None:
    """The same; most are not in memory any more, and are kept there."""
    _load(context, fault, partial(_out_of_memory, context))


def _load(context: Context, fault: str, prepare: Callable[[list[int]], list[int]]) -> None:
    found = _found(context, fault, prepare)
    context.arm(fault)
    if found:
        context.server.load(found)
    _outlast(context, fault, 0.05)


def _outlast(context: Context, fault: str, limit_s: float) -> None:
    """Step while something is under way; of what hangs time-outs come, or other chunks are stored meanwhile."""
    context.while_it_lasts(0.05 if fault in {"hang", "late write"} else limit_s)
    if fault == "hang":
        CLOCK.ahead_s += context.rng.choice((0.0, 2.0, JUMP_S))
        context.steps_for(0.01)
    if fault == "late write":
        _wait_in_vain(context)


def _found(context: Context, fault: str, prepare: Callable[[list[int]], list[int]]) -> list[int]:
    """Return what lookups find of chunks that the fault may have damaged; of others where nothing is left of these."""
    asked = prepare(context.some())
    context.spoil(fault, asked)
    found = context.server.look_up(asked)[: context.server.room]
    if not found:
        context.fill()
        found = context.server.look_up(prepare(context.known[-4:]))[: context.server.room]
    return found


def _out_of_memory(context: Context, numbers: list[int]) -> list[int]:
    """Have memory let go of most of these chunks; return them."""
    memory = context.server.opened[0]
    for number in numbers if isinstance(memory, MemoryTier) else ():
        if context.rng.random() < 0.8 and memory.state(context.server.key(number)) is not None:
            with contextlib.suppress(NixlOffloadError):
                memory.drop(context.server.key(number))
    return numbers


def _wait_in_vain(context: Context) -> None:
    """Time-outs are over, others are stored, perhaps where these were; then what was late arrives: with ``lift``."""
    CLOCK.ahead_s += JUMP_S
    context.steps_for(0.03)
    context.faults.lift_calls()
    fresh = context.new(min(2, context.server.room))
    context.server.store(fresh)
    context.steps_for(0.02)
    context.keep(fresh)


def eviction(context: Context, fault: str) -> None:
    """The fault is there while more is stored than there is room for."""
    context.arm(fault)
    for _ in range(context.rng.randint(2, 5)):
        fresh = context.new(min(4, context.server.room))
        context.server.store(fresh)
        context.while_it_lasts(0.02)
        context.keep(fresh)
        if context.tier == "shared_dir":
            CLOCK.ahead_s += 61.0 * context.rng.randint(0, 1)
            context.steps_for(0.03)
    context.spoil(fault, context.known)


def sleep(context: Context, fault: str) -> None:
    """KV memory goes away while something is under way, and comes back."""
    server, rng = context.server, context.rng
    fresh = context.new(rng.randint(1, 3))
    found = server.look_up(_out_of_memory(context, context.some()))[: max(0, server.room - len(fresh))]
    is_early = rng.random() < 0.5
    if is_early:
        context.arm(fault)
    server.store(fresh)
    if found:
        server.load(found)
    if rng.random() < 0.5:
        server.step()
    if not is_early:
        context.arm(fault)
    asleep = []
    for rank, tiers in zip(server.ranks, server.rank_tiers, strict=True):
        with contextlib.suppress(NixlOffloadError):  # it cannot, and says so: its memory stays
            tiers.sleep(rng.choice((0.0, 0.05, 0.2)))
            asleep.append(rank)
    server.step()
    server.check_guards()
    for rank in asleep:
        for rows in rank.kv:
            rows[:] = 0  # the memory goes away
    context.slept += len(asleep)
    context.spoil(fault, context.known)
    if rng.random() < 0.5:
        context.lift()
        context.steps_for(0.01)
    for rank in asleep:
        if any(rows.any() for rows in rank.kv):
            context.outcome.wrong.append(
                f"{context.where}: KV memory of rank {rank.number} was written to in its sleep"
            )
    for tiers in server.rank_tiers:
        tiers.wake_up()
    context.while_it_lasts(0.05)
    context.keep(fresh)


def gc(context: Context, fault: str) -> None:
    """Garbage is collected beside a server."""
    arguments = ["--delete", "--older-than", context.rng.choice(("0s", "30d"))]
    arguments += ["--max-size", context.rng.choice(("1B", "64KiB", "256KiB"))]
    CLOCK.wall_ahead_s += context.rng.choice((0.0, 700.0, 24 * GRACE_S))
    _command(context, fault, "gc", *arguments)


def verify(context: Context, fault: str) -> None:
    """What is stored is verified beside a server."""
    _command(context, fault, "verify", *context.rng.choice(([], ["--json"])))


def _command(context: Context, fault: str, name: str, *arguments: str) -> None:
    """Run a command while the fault is there; one that holds it up is over after a while."""
    context.spoil(fault, context.known)
    context.arm(fault, transfers=False)
    lifting = threading.Timer(0.15, context.lift)
    lifting.daemon = True
    if fault in {"hang", "slow"}:
        lifting.start()
    code, words = _run(context, name, *arguments)
    if fault in {"hang", "slow"}:
        lifting.join()
    context.lift()
    if code not in (0, 1):
        context.outcome.dead.append(f"{context.where}: {name} {' '.join(arguments)} ended with {code}: {words[-1200:]}")
    context.server.step()


def _run(context: Context, name: str, *arguments: str) -> tuple[int, str]:
    """Return a command's exit code, -1 when it raises, and what it said."""
    config = Path.cwd() / "kv.yaml"
    config.write_text(yaml.safe_dump({"tiers": [context.medium.tier()]}))
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main([name, str(config), *arguments])
    except BaseException as error:  # noqa: BLE001 - a command that raises is what is looked for
        return -1, f"raised {error!r}: {traceback.format_exc(limit=-6)}"
    return code, said.getvalue()


POINTS: Final[dict[str, Callable[[Context, str], None]]] = {
    "lookup": lookup,
    "store": store,
    "load": load,
    "write-through": store,
    "promotion": promotion,
    "eviction": eviction,
    "gc": gc,
    "verify": verify,
    "sleep": sleep,
}
