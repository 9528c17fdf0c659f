"""What happens at each point while a fault is there: ``POINTS`` by name; a start and a shutdown are of ``cell.py``.

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
from typing import TYPE_CHECKING, Final

import yaml

from nixl_offload.cli.main import main
from nixl_offload.errors import NixlOffloadError
from nixl_offload.tiers.slot_tier import MemoryTier
from tests.prove.clock import CLOCK
from tests.prove.faults.media import PRESENT_S
from tests.prove.server import JUMP_S

if TYPE_CHECKING:
    from tests.prove.faults.cell import FaultCell

GRACE_S: Final = 3600.0
"""Commands spare what is younger: it may be unfinished."""


def lookup(cell: FaultCell, fault: str) -> None:
    """The fault is there while a prompt is looked up; what was found is loaded once it is gone.

    Damage comes before the lookup, which believes no earlier answer, or between it and the load.
    """
    asked = [*cell.some(), *cell.new()]
    is_early = cell.rng.random() < 0.5
    if is_early:
        CLOCK.ahead_s += PRESENT_S + 1.0
        cell.spoil(fault, asked)
    cell.arm(fault, transfers=False)
    cell.server.look_up(asked)
    cell.lift()
    if not is_early:
        cell.spoil(fault, asked)
    cell.server.serve(asked)


def store(cell: FaultCell, fault: str) -> None:
    """The fault is there while chunks are stored, and written through."""
    fresh = cell.new(cell.rng.randint(1, 4))
    cell.arm(fault)
    cell.server.store(fresh)
    cell.spoil(fault, cell.known)
    _outlast(cell, fault, 2.0)
    cell.keep(fresh)


def load(cell: FaultCell, fault: str) -> None:
    """The fault is there while chunks are loaded, which lookups have found whole."""
    _load(cell, fault, list)


def promotion(cell: FaultCell, fault: str) -> None:
    """The same; most are not in memory any more, and are kept there."""
    _load(cell, fault, partial(_out_of_memory, cell))


def _load(cell: FaultCell, fault: str, prepare: Callable[[list[int]], list[int]]) -> None:
    found = _found(cell, fault, prepare)
    cell.arm(fault)
    if found:
        cell.server.load(found)
    _outlast(cell, fault, 0.05)


def _outlast(cell: FaultCell, fault: str, limit_s: float) -> None:
    """Step while something is under way; of what hangs time-outs come, or other chunks are stored meanwhile."""
    cell.while_it_lasts(0.05 if fault in {"hang", "late write"} else limit_s)
    if fault == "hang":
        CLOCK.ahead_s += cell.rng.choice((0.0, 2.0, JUMP_S))
        cell.steps_for(0.01)
    if fault == "late write":
        _wait_in_vain(cell)


def _found(cell: FaultCell, fault: str, prepare: Callable[[list[int]], list[int]]) -> list[int]:
    """Return what lookups find of chunks that the fault may have damaged; of others where nothing is left of these."""
    asked = prepare(cell.some())
    cell.spoil(fault, asked)
    found = cell.server.look_up(asked)[: cell.server.room]
    if not found:
        cell.fill()
        found = cell.server.look_up(prepare(cell.known[-4:]))[: cell.server.room]
    return found


def _out_of_memory(cell: FaultCell, numbers: list[int]) -> list[int]:
    """Have memory let go of most of these chunks; return them."""
    memory = cell.server.opened[0]
    for number in numbers if isinstance(memory, MemoryTier) else ():
        if cell.rng.random() < 0.8 and memory.state(cell.server.key(number)) is not None:
            with contextlib.suppress(NixlOffloadError):
                memory.drop(cell.server.key(number))
    return numbers


def _wait_in_vain(cell: FaultCell) -> None:
    """Time-outs are over, others are stored, perhaps where these were; then what was late arrives: with ``lift``."""
    CLOCK.ahead_s += JUMP_S
    cell.steps_for(0.03)
    cell.faults.lift_calls()
    fresh = cell.new(min(2, cell.server.room))
    cell.server.store(fresh)
    cell.steps_for(0.02)
    cell.keep(fresh)


def eviction(cell: FaultCell, fault: str) -> None:
    """The fault is there while more is stored than there is room for."""
    cell.arm(fault)
    for _ in range(cell.rng.randint(2, 5)):
        fresh = cell.new(min(4, cell.server.room))
        cell.server.store(fresh)
        cell.while_it_lasts(0.02)
        cell.keep(fresh)
        if cell.tier == "shared_dir":
            CLOCK.ahead_s += 61.0 * cell.rng.randint(0, 1)
            cell.steps_for(0.03)
    cell.spoil(fault, cell.known)


def sleep(cell: FaultCell, fault: str) -> None:
    """KV memory goes away while something is under way, and comes back."""
    server, rng = cell.server, cell.rng
    fresh = cell.new(rng.randint(1, 3))
    found = server.look_up(_out_of_memory(cell, cell.some()))[: max(0, server.room - len(fresh))]
    is_early = rng.random() < 0.5
    if is_early:
        cell.arm(fault)
    server.store(fresh)
    if found:
        server.load(found)
    if rng.random() < 0.5:
        server.step()
    if not is_early:
        cell.arm(fault)
    asleep = []
    for rank in server.ranks:
        with contextlib.suppress(NixlOffloadError):  # it cannot, and says so: its memory stays
            rank.tiers.sleep(rng.choice((0.0, 0.05, 0.2)))
            asleep.append(rank)
    server.step()
    server.check_guards()
    for rank in asleep:
        for rows in rank.kv:
            rows[:] = 0  # the memory goes away
    cell.slept += len(asleep)
    cell.spoil(fault, cell.known)
    if rng.random() < 0.5:
        cell.lift()
        cell.steps_for(0.01)
    for rank in asleep:
        if any(rows.any() for rows in rank.kv):
            cell.outcome.wrong.append(f"{cell.where}: KV memory of rank {rank.number} was written to in its sleep")
    for rank in server.ranks:
        rank.tiers.wake_up()
    cell.while_it_lasts(0.05)
    cell.keep(fresh)


def gc(cell: FaultCell, fault: str) -> None:
    """Garbage is collected beside a server."""
    arguments = ["--delete", "--older-than", cell.rng.choice(("0s", "30d"))]
    arguments += ["--max-size", cell.rng.choice(("1B", "64KiB", "256KiB"))]
    CLOCK.wall_ahead_s += cell.rng.choice((0.0, 700.0, 24 * GRACE_S))
    _command(cell, fault, "gc", *arguments)


def verify(cell: FaultCell, fault: str) -> None:
    """What is stored is verified beside a server."""
    _command(cell, fault, "verify", *cell.rng.choice(([], ["--json"])))


def _command(cell: FaultCell, fault: str, name: str, *arguments: str) -> None:
    """Run a command while the fault is there; one that holds it up is over after a while."""
    cell.spoil(fault, cell.known)
    cell.arm(fault, transfers=False)
    lifting = threading.Timer(0.15, cell.lift)
    lifting.daemon = True
    if fault in {"hang", "slow"}:
        lifting.start()
    code, words = _run(cell, name, *arguments)
    if fault in {"hang", "slow"}:
        lifting.join()
    cell.lift()
    if code not in (0, 1):
        cell.found_dead(f"{name} {' '.join(arguments)} ended with {code}: {words[-1200:]}")
    cell.server.step()


def _run(cell: FaultCell, name: str, *arguments: str) -> tuple[int, str]:
    """Return a command's exit code, -1 when it raises, and what it said."""
    config = Path.cwd() / "kv.yaml"
    config.write_text(yaml.safe_dump({"tiers": [cell.medium.tier()]}))
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main([name, str(config), *arguments])
    except BaseException as error:  # noqa: BLE001 - a command that raises is what is looked for
        return -1, f"raised {error!r}: {traceback.format_exc(limit=-6)}"
    return code, said.getvalue()


POINTS: Final[dict[str, Callable[[FaultCell, str], None]]] = {
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
