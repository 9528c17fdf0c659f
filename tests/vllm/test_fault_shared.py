"""Proves over a running vLLM that no failure of a shared tier shows: neither what the network and the server do, by way
of a proxy that breaks requests, nor damage to what rests in the bucket or the shared directory.

After every case: tokens and logprobs are those of an engine without a connector, no request was held back beyond its
deadlines, the engine lives, and once the trouble is over every full chunk is loaded again, without a restart.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest

from nixl_offload.chunk.header import HEADER_BYTES
from tests.s3.proxy import Answer as Reply
from tests.s3.proxy import Cut, Delay, Fault, FaultProxy, Flip, Hold, Reset, Stall
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
from tests.vllm.harness import BLOCK_TOKENS, CHUNK_TOKENS, Answer, Engine, Workshop
from tests.vllm.shared_rig import (
    LOOKING,
    MOVERS,
    RECOVERY_DEADLINE_S,
    REMEMBERING,
    SHARD_BYTES,
    Medium,
    bucket,
    hits,
    let_beliefs_lapse,
    said,
    side_by_side,
    tree,
    until_loaded,
)

PROMPT = chunk_prompts(1, seed=211)
"""What all engines here have stored; a list of one."""
FRESH = iter(chunk_prompts(100, seed=212))
"""Prompts that nobody has seen: each makes the engine store."""
LOOKUP_S = 1.0
LOAD_S = 2.0
SHORT_LOOKUP = {**LOOKING, "timeout": "1s"}
COMPUTE_S = 4.0
"""More than a prompt takes to compute, however busy the machine."""


def start(workshop: Workshop, medium: Medium, *, lookup: dict[str, str] = SHORT_LOOKUP, **fields: str) -> Engine:
    """Start an engine on a medium."""
    config = medium.config(lookup=lookup, **{"load_timeout": f"{LOAD_S}s", **fields})
    return workshop.start_engine(connector=config, environment=medium.environment, **ENGINE_OPTIONS)


def in_time(answers: list[Answer], *, deadlines_s: float) -> None:
    """Assert that no request waited longer than its deadlines allow."""
    assert [answer for answer in answers if answer.total_s > deadlines_s + COMPUTE_S] == []


class Table:
    """An engine that reaches its bucket through a proxy of its own, and has stored ``PROMPT``. It looks each time."""

    def __init__(self, workshop: Workshop, server: RcloneServer, mover: str, reference: Reference) -> None:
        self.mover = mover
        self.proxy = FaultProxy(server.port)
        self.reference = reference
        self._workshop = workshop
        self.medium = bucket(server, mover, prefix=f"table/{mover}", endpoint=self.proxy.endpoint, request_timeout="1s")
        self.engine = start(workshop, self.medium)
        until_loaded(reference, self.engine, PROMPT)
        self.shards = self.medium.shards()

    def restart(self) -> None:
        """A new engine on what the old one has stored."""
        self.engine.stop()
        self.engine = start(self._workshop, self.medium)
        until_loaded(self.reference, self.engine, PROMPT)

    def suffer(self, fault: Fault | None, operation: str, asked: list[Prompt], later: list[Prompt]) -> None:
        """Ask while the requests of an operation are broken, then mend it, and wait until all is loaded again.

        ``later``: is to be stored and loaded, too, once it works again.
        """
        broken = self.proxy.inject(fault, operation=operation) if fault is not None else None
        # NIXL's client waits half a minute for a silent server. Nobody waits for a store, and a load is given up.
        endless = self.mover == "obj" and isinstance(fault, Hold | Stall)
        with broken or down(self.proxy):
            # Where a busy machine has a lookup end too late, nothing is loaded, and the fault is not met: ask again.
            for _ in range(5):
                answers = self.reference.check(self.engine, asked)
                in_time(answers, deadlines_s=LOOKUP_S + LOAD_S)
                if broken is None or broken.hits or operation == "PUT":
                    break
                let_beliefs_lapse()
            # A store is under way only some steps after the answer, and an endless one is not waited for.
            if broken:
                broken.wait()
            assert endless or self.engine.settle(), said(self.engine)
        assert self.engine.settle(), said(self.engine)
        until_loaded(self.reference, self.engine, [*asked, *later])

    def close(self) -> None:
        """Stop both."""
        self.proxy.come_back()
        self.proxy.release_all()
        self.engine.stop()
        self.proxy.close()


@contextlib.contextmanager
def down(proxy: FaultProxy) -> Iterator[None]:
    """Connections are refused."""
    proxy.go_down()
    try:
        yield
    finally:
        proxy.come_back()


@pytest.fixture(scope="module")
def tables(workshop: Workshop, server: RcloneServer, reference: Reference) -> Iterator[dict[str, Table]]:
    """One for each mover."""
    made = {mover: Table(workshop, server, mover, reference) for mover in MOVERS}
    yield made
    side_by_side(*(table.close for table in made.values()))


LATE = Delay(2 * LOAD_S)
FAULTS: dict[str, tuple[str, Fault]] = {
    "HEAD late": ("HEAD", Delay(2 * LOOKUP_S)),
    "HEAD silent": ("HEAD", Hold()),
    "HEAD 500": ("HEAD", Reply(500, "InternalError")),
    "HEAD 404": ("HEAD", Reply(404, "NoSuchKey")),
    "GET late": ("GET", LATE),
    "GET stalled": ("GET", Stall(0.5)),
    "GET reset in the body": ("GET", Reset("body")),
    "GET 503": ("GET", Reply(503, "SlowDown")),
    "GET 404": ("GET", Reply(404, "NoSuchKey")),
    "GET cut": ("GET", Cut(0.5)),
    "GET cut in the header": ("GET", Cut(100, lying=True)),
    "GET cut unnoticed": ("GET", Cut(0.5, lying=True)),
    "GET less a byte": ("GET", Cut(SHARD_BYTES - 1, lying=True)),
    "GET wrong header": ("GET", Flip(20)),
    "GET wrong byte": ("GET", Flip(0.5)),
    "GET wrong last byte": ("GET", Flip(-1)),
    "PUT late": ("PUT", LATE),
    "PUT silent": ("PUT", Hold()),
    "PUT done, answer lost": ("PUT", Reset("answer")),
    "PUT 503": ("PUT", Reply(503, "SlowDown")),
    "PUT wrong byte": ("PUT", Flip(0.5, side="request")),
}
FAULTS_OF_ALL = (
    "GET stalled",
    "GET reset in the body",
    "GET 404",
    "GET cut unnoticed",
    "GET wrong byte",
    "PUT silent",
    "PUT 503",
    "PUT refused",
)
"""For the other movers, which share the prober and the checks with the first."""
NOT_MET_BEFORE = ("HEAD 500",)
"""By a new engine: one that has met trouble of this kind thrice leaves it alone for longer each time, up to 30 s."""


@pytest.mark.parametrize("name", [*FAULTS, "HEAD refused", "PUT refused"])
def test_a_broken_request(name: str, tables: dict[str, Table], reference: Reference) -> None:
    """Every kind of fault, at the lookup, at the load, and at the store, for as long as the engine asks.

    Faults that clients report alike are told apart in ``contract/test_store_faults``.
    """
    operation, fault = FAULTS.get(name, (name[:4].strip(), None))
    asked, later = ([next(FRESH)], [next(FRESH)]) if operation == "PUT" else (PROMPT, [])
    reference.answers([*asked, *later])
    movers = MOVERS if name in FAULTS_OF_ALL else MOVERS[:1]
    if name in NOT_MET_BEFORE:
        for mover in movers:
            tables[mover].restart()
    let_beliefs_lapse()
    side_by_side(*(functools.partial(tables[mover].suffer, fault, operation, asked, later) for mover in movers))


def test_a_server_that_is_down(workshop: Workshop, server: RcloneServer, reference: Reference) -> None:
    """Down from the start, then up, then down while the engine believes that all is there, then up again.

    A few requests wait, none longer than the deadline of its lookup or of its load; then none does until the server is
    back. Down: connections are refused, or nothing answers.
    """
    deadline_s = 2.0
    reference.answers(PROMPT)

    def suffer(engine: Engine, waiting: int) -> None:
        for _ in range(waiting):
            in_time(reference.check(engine, PROMPT), deadlines_s=deadline_s)
        for _ in range(2):
            [answer] = reference.check(engine, PROMPT)
            assert answer.total_s < deadline_s, f"held back{said(engine)}"

    def go_through_it(way: str) -> None:
        with FaultProxy(server.port) as proxy:
            medium = bucket(server, "obj", prefix=f"down/{way}", endpoint=proxy.endpoint, request_timeout="1s")
            with down(proxy) if way == "refused" else proxy.inject(Hold()):
                lookup = {**REMEMBERING, "timeout": f"{deadline_s}s"}
                engine = start(workshop, medium, lookup=lookup, load_timeout=f"{deadline_s}s")
                suffer(engine, waiting=1)
            until_loaded(reference, engine, PROMPT)
            with down(proxy) if way == "refused" else proxy.inject(Hold()):
                suffer(engine, waiting=3)
            until_loaded(reference, engine, PROMPT)
            engine.stop()

    side_by_side(*(functools.partial(go_through_it, way) for way in ("refused", "silent")))


def test_held_bodies_write_into_nothing(workshop: Workshop, server: RcloneServer, reference: Reference) -> None:
    """Loads are given up while their bodies are held; other requests run and load, on less staging than all need.

    Then the bodies come: nothing that is answered, loaded or stored meanwhile changes. Held once more, they do not keep
    the engine from stopping.
    """
    other, *new = (next(FRESH) for _ in range(3))
    reference.answers([*PROMPT, other, *new])
    staging = (PROMPT_CHUNKS + 2) * (SHARD_BYTES + 4096)

    def go_through_it(mover: str) -> None:
        # Of mover obj the time of a request only says how long closing waits; obstore would give up by it.
        timeout = "2s" if mover == "obj" else "60s"
        with FaultProxy(server.port) as proxy:
            medium = bucket(server, mover, prefix=f"held/{mover}", endpoint=proxy.endpoint, request_timeout=timeout)
            engine = start(workshop, medium, lookup=REMEMBERING, staging=f"{staging}B")
            until_loaded(reference, engine, PROMPT)
            held = "|".join(medium.shards())
            until_loaded(reference, engine, [other])

            rule = proxy.inject(Stall(0.25), operation="GET", key=held)
            [answer] = reference.check(engine, PROMPT)
            assert rule.hits
            assert answer.total_s >= LOAD_S, "it did not wait for its load"
            in_time([answer], deadlines_s=LOAD_S)
            until_loaded(reference, engine, [other])
            until_loaded(reference, engine, new)
            rule.release()
            for _ in range(2):
                reference.check(engine, [other, *new])
            proxy.wait_idle()
            assert engine.settle()
            until_loaded(reference, engine, [*PROMPT, other, *new])

            if mover == "obj":
                rule = proxy.inject(Stall(0.25), operation="GET", key=held)
                reference.check(engine, PROMPT)
                assert rule.hits
            engine.stop(timeout_s=30.0)

    side_by_side(*(functools.partial(go_through_it, mover) for mover in ("obj", "obstore")))


# Damage to what rests in the bucket or the directory.


@dataclass(frozen=True)
class Pair:
    """Two engines on one medium."""

    medium: Medium
    shards: list[str]
    """Those of ``PROMPT``, which is stored."""
    looking: Engine
    """Looks before each load, so that it sees what can be seen without loading."""
    remembering: Engine | None
    """Believes for an hour what it has seen, so that damage shows when it loads."""


@pytest.fixture(scope="module")
def pairs(workshop: Workshop, tables: dict[str, Table], reference: Reference) -> Iterator[dict[str, Pair]]:
    """A pair for mover obj and one for the tree; of the other movers just the one that looks."""
    made = {}
    started = []
    for name in (*MOVERS, "tree"):
        if name == "tree":
            medium = tree(workshop.scratch / "tree")
            started.append(start(workshop, medium))
            until_loaded(reference, started[-1], PROMPT)
            looking, shards = started[-1], medium.shards()
        else:
            medium, looking, shards = tables[name].medium, tables[name].engine, tables[name].shards
        assert len(shards) == PROMPT_CHUNKS
        remembering = None
        if name in ("obj", "tree"):
            remembering = start(workshop, medium, lookup=REMEMBERING, load_timeout="10s")
            started.append(remembering)
            until_loaded(reference, remembering, PROMPT)
        made[name] = Pair(medium, shards, looking, remembering)
    yield made
    side_by_side(*(engine.stop for engine in started))


BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
BLOCK_BYTES = CHUNK_BYTES // BLOCKS
FLIPS = {
    "magic": 0,
    "namespace": 20,
    "key": 90,
    "checksum of a block": 192,
    "end of a block": HEADER_BYTES + BLOCK_BYTES - 1,
    "last byte": SHARD_BYTES - 1,
}
"""Some places; tests/vllm/test_fault_table.py has every field."""


def _cut(to_bytes: int) -> Callable[[Medium, str, str], None]:
    return lambda medium, one, other: medium.write(one, medium.read(one)[:to_bytes])


def _grown(medium: Medium, one: str, other: str) -> None:
    medium.write(one, medium.read(one) + random.Random(1).randbytes(5000))


def _deleted(medium: Medium, one: str, other: str) -> None:
    medium.delete(one)


def _swapped(medium: Medium, one: str, other: str) -> None:
    first, second = medium.read(one), medium.read(other)
    medium.write(one, second)
    medium.write(other, first)


def _noise(medium: Medium, one: str, other: str) -> None:
    medium.write(one, random.Random(2).randbytes(SHARD_BYTES))


def _foreign(medium: Medium, one: str, other: str) -> None:
    medium.write(one, b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code></Error>".ljust(SHARD_BYTES))


DAMAGES: dict[str, Callable[[Medium, str, str], None]] = {
    "emptied": _cut(0),
    "cut to a header": _cut(HEADER_BYTES),
    "cut within": _cut(HEADER_BYTES + CHUNK_BYTES // 2 + 11),
    "cut by a byte": _cut(SHARD_BYTES - 1),
    "grown": _grown,
    "deleted": _deleted,
    "swapped": _swapped,
    "noise": _noise,
    "foreign": _foreign,
}
SEEN_BY_LOOKING = ("emptied", "cut by a byte", "grown", "deleted")
"""Where the size tells, so that nobody needs to load."""
AT_REST = [
    # The one byte that is missing may be in the slot since an earlier load: then the chunk is whole, and is served.
    *(("remembering", what) for what in (*DAMAGES, *FLIPS) if what not in ("grown", "cut by a byte")),
    *(("looking", what) for what in (*SEEN_BY_LOOKING, "swapped")),
]
AT_REST_OF_ALL = [("looking", "deleted"), ("looking", "swapped")]


@pytest.mark.parametrize(("who", "what"), AT_REST)
def test_damage_at_rest(who: str, what: str, pairs: dict[str, Pair], reference: Reference) -> None:
    """The damaged chunk is refused and stored anew by who meets it first; then the other engine loads it too."""
    names = [*MOVERS, "tree"] if (who, what) in AT_REST_OF_ALL else ["obj", "tree"]
    side_by_side(*(functools.partial(_damaged_and_healed, who, what, pairs[name], reference) for name in names))


def _damaged_and_healed(who: str, what: str, pair: Pair, reference: Reference) -> None:
    medium, shards = pair.medium, pair.shards
    first, second = pair.looking, pair.remembering
    if who == "remembering":
        assert second
        first, second = second, first
    good = _payloads(pair)
    place = [*DAMAGES, *FLIPS].index(what)
    one, other = shards[place % len(shards)], shards[(place + 2) % len(shards)]
    refused, stored_bytes = loads_refused(first), first.stored_bytes()
    if what in DAMAGES:
        DAMAGES[what](medium, one, other)
    else:
        medium.flip(one, FLIPS[what], 0x80)
    if what == "grown" and second and medium.name != "tree":
        reference.check(second, PROMPT)  # it asks for as many bytes as there should be
    let_beliefs_lapse()
    found = hits(reference.check(first, PROMPT))
    assert first.settle()
    until_loaded(reference, first, PROMPT)
    stored_bytes = first.stored_bytes() - stored_bytes
    if first is pair.remembering:
        assert loads_refused(first) > refused
        assert stored_bytes == CHUNK_BYTES * (2 if what == "swapped" else 1)
    else:
        if what in SEEN_BY_LOOKING:
            assert found < FULL_TOKENS
        else:
            assert loads_refused(first) > refused
        assert stored_bytes >= CHUNK_BYTES
    assert _payloads(pair) == good
    if second:
        until_loaded(reference, second, PROMPT)


def _payloads(pair: Pair) -> dict[str, bytes]:
    """What the shards hold, less the headers, which tell when they were written."""
    return {name: pair.medium.read(name)[HEADER_BYTES:] for name in pair.shards}


def test_verify_header(workshop: Workshop, server: RcloneServer, reference: Reference) -> None:
    """Without checksums too a shard that ends early is refused, at rest and on the way.

    Mover obj does not report short reads, so checksums are compared there all the same.
    """
    reference.answers(PROMPT)
    lengths = (0, HEADER_BYTES, HEADER_BYTES + BLOCK_BYTES + 1, HEADER_BYTES + CHUNK_BYTES // 2)

    def go_through_it(medium: Medium, proxy: FaultProxy) -> None:
        engine = start(workshop, medium, lookup=REMEMBERING, verify="header", load_timeout="10s")
        until_loaded(reference, engine, PROMPT)
        for number, length_bytes in enumerate(lengths):
            shard = medium.shards()[number % PROMPT_CHUNKS]
            medium.write(shard, medium.read(shard)[:length_bytes])
            _refused(engine, reference, contextlib.nullcontext)
            assert len(medium.read(shard)) == SHARD_BYTES
        for at in (HEADER_BYTES, 0.5) if medium.name == "obj" else ():
            _refused(
                engine,
                reference,
                functools.partial(proxy.inject, Cut(at, lying=True), operation="GET", times=1),
            )
        engine.stop()

    with FaultProxy(server.port) as proxy:
        media = [bucket(server, "obj", prefix="header", endpoint=proxy.endpoint), tree(workshop.scratch / "header")]
        side_by_side(*(functools.partial(go_through_it, medium, proxy) for medium in media))


def _refused(engine: Engine, reference: Reference, fault: Callable[[], AbstractContextManager[object]]) -> None:
    """Assert that a load is refused, that each answer is right all the same, and that what was lost is stored anew.

    Asks again where a busy machine computed a prompt instead of loading it: then the load did not meet the fault.
    """
    refused = loads_refused(engine)
    deadline = time.monotonic() + RECOVERY_DEADLINE_S
    while loads_refused(engine) == refused:
        assert time.monotonic() < deadline, f"no load was refused{said(engine)}"
        with fault():
            reference.check(engine, PROMPT)
        assert engine.settle()
    until_loaded(reference, engine, PROMPT)
