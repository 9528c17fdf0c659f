"""Families on a shared tier that fails: a bucket behind a proxy that breaks requests, a directory on a small disk.

The state of a boundary and the attention before it are chunks of their own, so either may fail without the other.
``python -m tests.families --only trouble``.

Threading: one thread. Ownership: places belong to who made them; an engine ends with ``try_faults``.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from examples.demo.engine import Engine, EngineError
from tests.families.media import Medium, make_medium
from tests.families.trial import TAIL, Cell, Prompts, Reference, Trial, refusals
from tests.faults.conftest import SmallFilesystem
from tests.prove.happenings import DAMAGES, Outage, Piece, disk_outages, lasting, make_disk
from tests.s3.proxy import Answer as Reply
from tests.s3.proxy import Cut, Fault, FaultProxy, Flip, Hold, Rule, Stall
from tests.s3.servers import RcloneServer

PLACES: Final = ("obstore", "obj", "shared_dir")
"""A bucket by its two movers, and a directory."""
LOOKUP_S: Final = 0.2
"""How long an engine believes what it has seen: it looks for each prompt anew."""
AGAIN_S: Final = 60.0
"""Within so long all is found again; pauses of a breaker are 30 s at most."""
_LIMITS: Final = {"timeout": "1s", "present_for": f"{int(LOOKUP_S * 1000)}ms", "absent_for": "300ms"}
_LOAD_TIMEOUT: Final = "2s"

BUCKET_FAULTS: Final[Mapping[str, tuple[str, str, Fault | None]]] = {
    "refused": ("", "", None),
    "HEAD hangs": ("HEAD", "", Hold()),
    "HEAD 503": ("HEAD", "", Reply(503, "SlowDown")),
    "GET hangs": ("GET", "", Stall(0.5)),
    "GET 503": ("GET", "", Reply(503, "SlowDown")),
    "GET cut, unnoticed": ("GET", "", Cut(0.5, lying=True)),
    "GET flipped": ("GET", "", Flip(0.5)),
    "GET of state hangs": ("GET", "state", Stall(0.5)),
    "GET of state 404": ("GET", "state", Reply(404, "NoSuchKey")),
    "GET of state flipped": ("GET", "state", Flip(0.5)),
    "GET of attention 404": ("GET", "attention", Reply(404, "NoSuchKey")),
    "GET of attention flipped": ("GET", "attention", Flip(0.5)),
    "PUT hangs": ("PUT", "", Hold()),
    "PUT 503": ("PUT", "", Reply(503, "SlowDown")),
    "PUT flipped": ("PUT", "", Flip(0.5, side="request")),
    "PUT of state 503": ("PUT", "state", Reply(503, "SlowDown")),
}
"""Name -> operation, chunks of which kind, and what happens to its requests; None: connections are refused."""


@dataclass(frozen=True)
class Place:
    """A shared tier, and what may befall it."""

    medium: Medium
    faults: Mapping[str, Outage]
    waits_for_ever: bool = False
    """A mover's client waits for a silent server for half a minute."""


def bucket(server: RcloneServer, proxy: FaultProxy, reference: Reference, name: str, mover: str) -> Place:
    """Return a bucket behind a proxy, which whoever calls keeps. ``name``: a prefix that nobody else has."""
    medium = make_medium("s3", server.directory, name, server)
    tier = {**medium.tier, "mover": mover, "endpoint": proxy.endpoint, "request_timeout": "1s", "lookup": _LIMITS}

    def begin(operation: str, kind: str, fault: Fault | None) -> AbstractContextManager[Rule | None]:
        if fault is None:
            return lasting(proxy.go_down, proxy.come_back)
        return proxy.inject(fault, operation=operation, key=_names_of(reference.groups, kind))

    faults = {name: partial(begin, *what) for name, what in BUCKET_FAULTS.items()}
    return Place(replace(medium, tier=tier), faults, waits_for_ever=mover == "obj")


def directory(filesystem: SmallFilesystem, reference: Reference, name: str) -> Place:
    """Return a shared directory on a filesystem that whoever calls keeps."""
    medium = make_medium("shared_dir", filesystem.path, name)
    made = replace(medium, tier={**medium.tier, "lookup": _LIMITS})
    root = made.directory
    assert root is not None

    def damage(kind: str, how: str) -> None:
        pieces = [Piece(each.path) for each in made.shards() if each.header.group in groups_of(reference.groups, kind)]
        for piece in pieces:
            DAMAGES[how](piece, piece, 0.5)

    faults: dict[str, Outage] = {
        **disk_outages(filesystem),
        "deleted": partial(lasting, partial(shutil.rmtree, root), partial(root.mkdir, exist_ok=True)),
        "unmounted": partial(lasting, partial(filesystem.take_away, lazily=True), filesystem.bring_back),
    }
    for kind in ("state", "attention"):
        for how in ("deleted", "truncated"):
            faults[f"{kind} {how}"] = partial(lasting, partial(damage, kind, how), lambda: None)
    return Place(made, faults)


def try_place(trial: Trial, where: str, server: RcloneServer, scratch: Path) -> Iterator[Cell]:
    """Yield a cell for each fault of one of ``PLACES``. Raises as ``try_faults``."""
    reference, name = trial.reference(), f"{trial.name}-{where}"
    if where == "shared_dir":
        filesystem = make_disk(scratch, 192 << 20)
        if filesystem is None:
            raise EngineError("no filesystem can be made here")
        try:
            yield from try_faults(trial, directory(filesystem, reference, name))
        finally:
            filesystem.destroy()
    else:
        with FaultProxy(server.port) as proxy:
            yield from try_faults(trial, bucket(server, proxy, reference, name, where))


def try_faults(trial: Trial, place: Place) -> Iterator[Cell]:
    """Yield a cell for each fault. Wants a fresh prompt of the trial for each.

    While a fault lasts, what is stored is asked for, and what is not: answers are compared. Then both are asked for
    until all of them comes from the tier, and compared each time. Raises EngineError when the engine dies, or does not
    come to rest.
    """
    reference = trial.reference()
    fresh = iter(reference.fresh)
    with trial.start(place.medium, load_timeout=_LOAD_TIMEOUT) as engine:
        if _until_found(trial, engine, "", reference.prompts).note:
            raise EngineError("nothing is stored while all is well")
        for name in place.faults:
            new = [next(fresh)]
            yield _suffer(trial, place, engine, name, new)
        engine.stop()


def _suffer(trial: Trial, place: Place, engine: Engine, name: str, new: Prompts) -> Cell:
    reference, medium = trial.reference(), place.medium
    asked = [*reference.prompts, *new]
    time.sleep(LOOKUP_S + 0.05)
    assert engine.reset_prefix_cache()
    refused, shards = refusals(engine), len(medium.shards())
    with place.faults[name]() as rule:
        answers = engine.generate(asked)
        endless = place.waits_for_ever and rule is not None and isinstance(rule.fault, Hold | Stall)
        until_s = time.monotonic() + AGAIN_S
        while rule is not None and not _strikes(rule) and time.monotonic() < until_s:
            assert engine.reset_prefix_cache()
            answers = engine.generate(asked)  # a busy machine may shed a store, or look for too long
        if not endless:
            _settle(engine, name)
        found = sum(answer.external_hit_tokens for answer in answers)
        stored = len(medium.shards()) > shards
        shows = found < _whole(trial, len(reference.prompts)) or refusals(engine) > refused or not stored
    during = reference.compare(name, answers, asked)
    _settle(engine, name)
    after = _until_found(trial, engine, name, asked)
    worse = max(during, after, key=lambda cell: (cell.verdict == "WRONG", cell.delta))
    met = shows if rule is None else rule.hits > 0
    return replace(worse, hit_tokens=after.hit_tokens, note=after.note if met else "NOT MET")


def _strikes(rule: Rule) -> bool:
    """Say whether a request was broken. A store is under way only some steps after the answer."""
    try:
        rule.wait(timeout_s=2.0)
    except TimeoutError:
        return False
    return True


def _settle(engine: Engine, name: str) -> None:
    if not engine.settle():
        raise EngineError(f"{name}: something is still waiting")


def _until_found(trial: Trial, engine: Engine, name: str, asked: Prompts) -> Cell:
    """Ask until all comes from the tier, and nothing is refused. Returns the last verdict, or the first bad one."""
    reference, until_s = trial.reference(), time.monotonic() + AGAIN_S
    while True:
        before = refusals(engine)
        cell = reference.compare(name, trial.ask(engine, asked), asked)
        if cell.verdict == "WRONG" or (cell.hit_tokens == _whole(trial, len(asked)) and refusals(engine) == before):
            return cell
        if time.monotonic() > until_s:
            return replace(cell, note="NOT FOUND AGAIN")
        time.sleep(0.05)


def _whole(trial: Trial, prompts: int) -> int:
    """Tokens of the whole chunks of so many prompts."""
    return prompts * (len(trial.reference().prompts[0]) - TAIL)


def groups_of(groups: Sequence[str], kind: str) -> list[int]:
    """Return the KV cache groups that keep a ``state``, or those that do not: of ``attention``."""
    return [at for at, name in enumerate(groups) if (name == "MambaSpec") == (kind == "state")]


def _names_of(groups: Sequence[str], kind: str) -> str:
    """Return a regular expression for the objects of these chunks; they are named after their keys, which end with the
    KV cache group.
    """
    return "|".join(rf"{group:08x}\.[0-9a-f]{{4}}$" for group in groups_of(groups, kind)) if kind else ""
