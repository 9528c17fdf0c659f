"""What happens at each point while a fault is there: ``POINTS`` by name; a start and a shutdown are of ``rounds.py``.

Threading: one thread, beside the product's own.
"""

from __future__ import annotations

import contextlib
import io
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

import yaml

from nixl_offload.cli.main import main
from nixl_offload.errors import NixlOffloadError
from nixl_offload.tiers.memory.tier import MemoryTier
from nixl_offload.tiers.slab.tier import SlabTier
from tests.prove.faults.clock import CLOCK
from tests.prove.faults.play import Play
from tests.prove.faults.server import JUMP_S

GRACE_S: Final = 3600.0
"""Commands spare what is younger: it may be unfinished."""


def lookup(play: Play, fault: str) -> None:
    """The fault is there while a prompt is looked up; what was found is loaded once it is gone."""
    asked = [*play.some(), *play.new()]
    play.arm(fault, transfers=False)
    play.server.look_up(asked)
    play.lift()
    play.spoil(fault, asked)
    play.server.serve(asked)


def store(play: Play, fault: str) -> None:
    """The fault is there while chunks are stored, and written through."""
    fresh = play.new(play.rng.randint(1, 4))
    play.arm(fault)
    play.server.store(fresh)
    play.spoil(fault, play.known)
    play.while_it_lasts(0.05 if fault in {"hang", "late write"} else 2.0)
    if fault == "hang":
        CLOCK.ahead_s += play.rng.choice((0.0, 2.0, JUMP_S))
        play.steps_for(0.01)
    if fault == "late write":
        _wait_in_vain(play)
    play.keep(fresh)


def load(play: Play, fault: str) -> None:
    """The fault is there while chunks are loaded, which lookups have found whole."""
    asked = play.some()
    play.spoil(fault, asked)
    found = play.server.look_up(asked)[: play.server.room]
    if not found:
        return
    play.arm(fault)
    play.server.load(found)
    play.while_it_lasts(0.05)
    if fault == "hang":
        CLOCK.ahead_s += play.rng.choice((0.0, 2.0, JUMP_S))
        play.steps_for(0.01)
    if fault == "late write":
        _wait_in_vain(play)


def promotion(play: Play, fault: str) -> None:
    """Likewise; most are not in memory any more, and shall be kept there."""
    asked = _out_of_memory(play)
    play.spoil(fault, asked)
    found = play.server.look_up(asked)[: play.server.room]
    play.arm(fault)
    if found:
        play.server.load(found)
    play.while_it_lasts(0.05)
    if fault == "late write":
        _wait_in_vain(play)


def _out_of_memory(play: Play) -> list[int]:
    """Return some chunks, most of which memory has let go of."""
    memory, some = play.server.opened[0], play.some()
    for number in some if isinstance(memory, MemoryTier) else ():
        if play.rng.random() < 0.8 and memory.state(play.server.key(number)) is not None:
            with contextlib.suppress(NixlOffloadError):
                memory.drop(play.server.key(number))
    return some


def _wait_in_vain(play: Play) -> None:
    """Time-outs are over, others are stored, perhaps where these were; then what was late arrives: with ``lift``."""
    CLOCK.ahead_s += play.faults.patience_s
    play.steps_for(0.03)
    play.faults.lift_calls()
    fresh = play.new(min(2, play.server.room))
    play.server.store(fresh)
    play.steps_for(0.02)
    play.keep(fresh)


def eviction(play: Play, fault: str) -> None:
    """The fault is there while more is stored than there is room for."""
    play.arm(fault)
    for _ in range(play.rng.randint(2, 5)):
        fresh = play.new(min(4, play.server.room))
        play.server.store(fresh)
        play.while_it_lasts(0.02)
        play.keep(fresh)
        if play.tier == "shared_dir":
            CLOCK.ahead_s += 61.0 * play.rng.randint(0, 1)
            play.steps_for(0.03)
    play.spoil(fault, play.known)


def sleep(play: Play, fault: str) -> None:
    """KV memory goes away while something is under way, and comes back."""
    server, rng = play.server, play.rng
    fresh = play.new(rng.randint(1, 3))
    found = server.look_up(_out_of_memory(play))[: max(0, server.room - len(fresh))]
    is_early = rng.random() < 0.5
    if is_early:
        play.arm(fault)
    server.store(fresh)
    if found:
        server.load(found)
    if rng.random() < 0.5:
        server.step()
    if not is_early:
        play.arm(fault)
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
    play.slept += len(asleep)
    play.spoil(fault, play.known)
    if rng.random() < 0.5:
        play.lift()
        play.steps_for(0.01)
    for rank in asleep:
        if any(rows.any() for rows in rank.kv):
            play.outcome.wrong.append(f"{play.where}: KV memory of rank {rank.number} was written to in its sleep")
    for tiers in server.rank_tiers:
        tiers.wake_up()
    play.while_it_lasts(0.05)
    play.keep(fresh)


def gc(play: Play, fault: str) -> None:
    """Garbage is collected beside a server."""
    arguments = ["--delete", "--older-than", play.rng.choice(("0s", "30d"))]
    arguments += ["--max-size", play.rng.choice(("1B", "64KiB", "256KiB"))] if play.medium.is_shared else []
    CLOCK.wall_ahead_s += play.rng.choice((0.0, 700.0, 24 * GRACE_S))
    _command(play, fault, "gc", *arguments)
    if play.medium.is_shared and play.rng.random() < 0.5:
        # With nothing in its way any more, it leaves no more than it shall.
        CLOCK.wall_ahead_s += 24 * GRACE_S
        code, words = _run(play, "gc", "--delete", "--max-size", "1B")
        left = play.server.pieces(play.known)
        if code or left:
            play.outcome.missed.append(
                f"{play.where}: gc ended with {code} and left {len(left)} shards: {words[-300:]}"
            )


def verify(play: Play, fault: str) -> None:
    """What is stored is verified beside a server."""
    _command(play, fault, "verify", *play.rng.choice(([], ["--delete-bad"], ["--json"])))
    if play.rng.random() < 0.5:
        _check_verify(play)


def _check_verify(play: Play) -> None:
    """With nothing in its way any more, verify finds what is bad, deletes it if it may, and finds nothing bad then."""
    pieces = play.server.pieces(play.known)
    if pieces:
        tier = play.server.opened[0]
        if isinstance(tier, SlabTier):
            tier._durable.flush(20.0)  # what the index on disk does not name is not looked at
        piece = play.rng.choice([*pieces])
        piece.write(b"?")
        play.medium.changed()
        play.spoilt.add(pieces[piece][0])
        code, words = _run(play, "verify")
        if code != 1:
            play.outcome.missed.append(
                f"{play.where}: verify ends with {code} over a header without its magic: {words}"
            )
    if not play.medium.is_shared:
        return  # an engine has the directory: bad chunks are told of, and left
    for _ in range(2):
        _run(play, "verify", "--delete-bad")
        CLOCK.wall_ahead_s += GRACE_S  # for what may be unfinished is left for a while
    code, words = _run(play, "verify")
    if code != 0:
        play.outcome.missed.append(f"{play.where}: verify finds bad chunks that it should have deleted: {words}")


def _command(play: Play, fault: str, name: str, *arguments: str) -> None:
    """Run a command while the fault is there; one that holds it up is over after a while."""
    play.spoil(fault, play.known)
    play.arm(fault, transfers=False)
    lifting = threading.Timer(0.15, play.lift)
    lifting.daemon = True
    if fault in {"hang", "slow"}:
        lifting.start()
    code, words = _run(play, name, *arguments)
    if fault in {"hang", "slow"}:
        lifting.join()
    play.lift()
    if code not in (0, 1):
        play.outcome.dead.append(f"{play.where}: {name} {' '.join(arguments)} ended with {code}: {words[-1200:]}")
    play.server.step()


def _run(play: Play, name: str, *arguments: str) -> tuple[int, str]:
    """Return a command's exit code, -1 when it raises, and what it said."""
    config = Path.cwd() / "kv.yaml"
    config.write_text(yaml.safe_dump({"tiers": [play.medium.tier()]}))
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main([name, str(config), *arguments])
    except BaseException as error:  # noqa: BLE001 - a command that raises is what is looked for
        return -1, f"raised {error!r}: {traceback.format_exc(limit=-6)}"
    return code, said.getvalue()


POINTS: Final[dict[str, Callable[[Play, str], None]]] = {
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
