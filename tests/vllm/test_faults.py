"""Proves over a running vLLM that no failure of storage shows: damage to what rests in a slab, a shared directory or a
bucket; files that vanish; a disk that is full or read-only; a server that answers requests wrongly, late or never.

After every case: tokens and logprobs are as from an engine without a connector, no request waited beyond its deadlines,
the engine lives, and once the trouble is over every full chunk is loaded again.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from nixl_offload.units import parse_size
from tests.faults.conftest import SmallFilesystem
from tests.prove.happenings import DAMAGES, disk_outages, lasting
from tests.s3.proxy import Answer as Reply, Cut, Fault, FaultProxy, Flip, Hold, Reset, Stall
from tests.s3.servers import RcloneServer
from tests.vllm.damage import (
    CHUNK_BYTES,
    ENGINE_OPTIONS,
    FULL_TOKENS,
    PROMPT_CHUNKS,
    SHARD_BYTES,
    Prompt,
    Reference,
    chunk_prompts,
    hits,
    let_beliefs_lapse,
    loads_refused,
    said,
    side_by_side,
    until,
)
from tests.vllm.harness import Answer, Engine, Workshop, assert_same, chain_config
from tests.vllm.media import LOOKING, MOVERS, REMEMBERING, Medium, bucket, slab, tree
from tests.vllm.test_chain import CHUNKS

PROMPTS = chunk_prompts(2, seed=101)
STORED = len(PROMPTS) * PROMPT_CHUNKS
FRESH = iter(chunk_prompts(400, seed=102))
"""Prompts that nobody has seen: each makes an engine store."""
CAPACITY = "96MiB"
LOOKUP_S, LOAD_S = 1.0, 2.0
COMPUTE_S = 4.0
"""More than a prompt takes to compute, however busy the machine."""


@dataclass
class Served:
    """An engine on a medium. ``start`` makes one that has stored ``PROMPTS``."""

    workshop: Workshop
    reference: Reference
    medium: Medium
    fields: Mapping[str, Any]
    """Of our config, beyond the tier."""
    proxy: FaultProxy | None = None
    engine: Engine = field(init=False)

    def start(self, *, is_to_store: bool = True) -> Served:
        self.engine = self.workshop.start_engine(
            connector=self.medium.config(**self.fields), environment=self.medium.environment, **ENGINE_OPTIONS
        )
        if is_to_store:
            self.heals(PROMPTS)
        return self

    def check(self, prompts: list[Prompt], *, waits_s: float = LOOKUP_S + LOAD_S) -> list[Answer]:
        """Ask, and assert that answers are right, and that no request waited longer than its deadlines allow."""
        answers = self.reference.check(self.engine, prompts)
        assert [answer.total_s for answer in answers if answer.total_s > waits_s + COMPUTE_S] == []
        return answers

    def heals(self, prompts: list[Prompt]) -> None:
        self.reference.until_loaded(self.engine, prompts)

    def stores(self) -> bool:
        """Whether a prompt that nobody has seen is stored. Its answer is right."""
        before = self.engine.stored_bytes()
        self.check([next(FRESH)])
        assert self.engine.settle()
        return self.engine.stored_bytes() > before

    def warnings(self, words: str) -> list[str]:
        """The lines of the engine's log with these words."""
        return [line for line in self.engine.log.read_text(errors="replace").splitlines() if words in line]


LOOKS = {"lookup": {**LOOKING, "timeout": f"{LOOKUP_S:.0f}s"}, "load_timeout": f"{LOAD_S:.0f}s"}
REMEMBERS = {"lookup": REMEMBERING, "load_timeout": "10s"}
"""Engines that look before each load see what can be seen without loading. For others damage shows when they load."""


@pytest.fixture(scope="module")
def served(workshop: Workshop, server: RcloneServer, reference: Reference) -> Iterator[Callable[[str, bool], Served]]:
    """Gives an engine on a medium of this name, which looks each time or not; started when first asked for."""
    made: list[Served] = []

    @functools.cache
    def get(name: str, is_looking: bool) -> Served:
        medium, proxy = slab(workshop.scratch / "slab", CAPACITY), None
        if name == "tree":
            medium = tree(workshop.scratch / f"tree-{is_looking}")
        elif name != "slab":
            proxy = FaultProxy(server.port)
            prefix = f"faults/{name}-{is_looking}"
            medium = bucket(server, name, prefix=prefix, endpoint=proxy.endpoint, request_timeout="1s")
        fields = {} if name == "slab" else LOOKS if is_looking else REMEMBERS
        made.append(Served(workshop, reference, medium, fields, proxy))
        return made[-1].start()

    def close(each: Served) -> None:
        if each.proxy:
            each.proxy.come_back()
            each.proxy.release_all()
        each.engine.stop()
        if each.proxy:
            each.proxy.close()

    yield get
    side_by_side(*(partial(close, each) for each in made))


# Damage to what rests.

AT_REST: Final = {
    "header": ("flipped", 0.0),
    "first block": ("flipped", 4200 / SHARD_BYTES),
    "middle": ("flipped", 0.5),
    "last byte": ("flipped", 1.0),
    "cut": ("truncated", 0.5),
    "emptied": ("emptied", 0.0),
    "deleted": ("deleted", 0.0),
    "another's": ("another's", 0.0),
    "swapped": ("swapped", 0.0),
}
SEEN_BY_LOOKING = ("emptied", "deleted", "longer")
"""Where the size tells, so that nobody needs to load."""


@pytest.mark.parametrize(
    ("name", "is_looking", "what"),
    [
        *((name, False, what) for name in ("slab", "tree", "obj") for what in AT_REST),
        *((name, True, what) for name in ("tree", *MOVERS) for what in (*SEEN_BY_LOOKING, "swapped")),
    ],
)
def test_damage_at_rest(served: Callable[[str, bool], Served], name: str, is_looking: bool, what: str) -> None:
    """The chunk is refused, or not found, and stored anew, and nothing else is."""
    case = served(name, is_looking)
    engine, stored = case.engine, case.medium.stored()
    good = {shard.header.key: shard.payload for shard in stored}
    assert len(good) == STORED
    place = [*AT_REST, "longer"].index(what)
    damage, share = AT_REST.get(what, ("long", 0.5))
    refused, stored_bytes = loads_refused(engine), engine.stored_bytes()
    DAMAGES[damage](stored[place % STORED], stored[(place + 2) % STORED], share)
    case.medium.forget()
    if is_looking:
        let_beliefs_lapse()
    found = hits(case.check(PROMPTS, waits_s=10.0))
    assert engine.settle()
    if is_looking and what in SEEN_BY_LOOKING:
        assert found < FULL_TOKENS * len(PROMPTS)
    else:
        assert loads_refused(engine) > refused
    case.heals(PROMPTS)
    chunks = (engine.stored_bytes() - stored_bytes) / CHUNK_BYTES
    assert chunks >= 1 if is_looking else chunks == (2 if what == "swapped" else 1)
    assert {shard.header.key: shard.payload for shard in case.medium.stored()} == good


# Files that vanish, or are others than at the last stop.


@pytest.mark.parametrize(
    ("name", "what"), [("slab", "cut"), ("slab", "index"), ("slab", "directory"), ("tree", "namespace")]
)
def test_files_that_vanish_under_a_running_engine(served: Callable[[str, bool], Served], name: str, what: str) -> None:
    """Answers stay right. An index is made anew at once, and so is what was cut off; the rest at the next start."""
    case = served(name, False)
    medium, namespace = case.medium, case.medium.namespace()
    file, index = namespace / "rank-00000.slab", namespace / "index.table"
    {
        "cut": lambda: os.truncate(file, medium.stored()[3].offset + 6000),
        "index": index.unlink,
        "namespace": lambda: shutil.rmtree(namespace),
        "directory": lambda: shutil.rmtree(medium.directory),
    }[what]()
    for _ in range(2):
        case.check([*PROMPTS, next(FRESH)])
        assert case.engine.settle()
    if name == "tree" or what in ("cut", "index"):
        until(lambda: case.stores() and (name == "tree" or index.exists()), "storing again", case.engine)
    case.engine.stop()
    case.start()
    assert medium.real_bytes() <= parse_size(medium.tier["capacity"])


def test_an_index_of_yesterday(served: Callable[[str, bool], Served]) -> None:
    """What an old index names is refused where the slab holds something else by now, and stored anew."""
    case = served("slab", False)
    case.engine.stop()
    index = case.medium.namespace() / "index.table"
    old = index.read_bytes()
    case.start(is_to_store=False)
    assert case.engine.reset_prefix_cache(connector=True)
    case.heals([next(FRESH), next(FRESH)])
    case.engine.stop()
    index.write_bytes(old)
    case.start(is_to_store=False)
    case.check(PROMPTS)
    assert loads_refused(case.engine) > 0, "the old index found nothing to be wrong about"
    case.heals(PROMPTS)
    assert case.medium.real_bytes() <= parse_size(CAPACITY)


# A disk that takes nothing.


@pytest.mark.parametrize("small_filesystem", [192 << 20], indirect=True)
@pytest.mark.parametrize("what", ["disk full", "read-only"])
def test_a_disk_that_takes_nothing(
    workshop: Workshop, reference: Reference, small_filesystem: SmallFilesystem, what: str
) -> None:
    """One warning; what is stored is still served; storing goes on when it can; a restart finds all."""
    case = Served(workshop, reference, slab(small_filesystem.path / "kv", "128MiB"), {}).start()
    refuses = "nothing is stored until this is over"
    with disk_outages(small_filesystem)[what]():
        until(lambda: not case.stores(), "nothing can be stored")
        for _ in range(3):
            case.heals(PROMPTS)
            assert not case.stores()
        assert len(case.warnings(refuses)) == 1 or what == "disk full"
        assert case.warnings(f"{refuses} ({'full' if what == 'disk full' else ''}")
    until(case.stores, "storing again", case.engine)
    case.heals(PROMPTS)
    assert case.warnings("in use again")
    case.engine.stop()
    case.start().engine.stop()
    assert case.medium.real_bytes() <= parse_size("128MiB")


# A server that answers wrongly, late or never.

REQUESTS: Final[dict[str, tuple[str, Fault | None]]] = {
    "HEAD late": ("HEAD", Hold(seconds=2 * LOOKUP_S)),
    "HEAD silent": ("HEAD", Hold()),
    "HEAD 404": ("HEAD", Reply(404, "NoSuchKey")),
    "GET late": ("GET", Hold(seconds=2 * LOAD_S)),
    "GET stalled": ("GET", Stall(0.5)),
    "GET reset in the body": ("GET", Reset("body")),
    "GET 404": ("GET", Reply(404, "NoSuchKey")),
    "GET cut": ("GET", Cut(0.5)),
    "GET cut unnoticed": ("GET", Cut(0.5, lying=True)),
    "GET less a byte": ("GET", Cut(SHARD_BYTES - 1, lying=True)),
    "GET wrong header": ("GET", Flip(20)),
    "GET wrong byte": ("GET", Flip(0.5)),
    "PUT silent": ("PUT", Hold()),
    "PUT 503": ("PUT", Reply(503, "SlowDown")),
    "PUT done, answer lost": ("PUT", Reset("answer")),
    "PUT wrong byte": ("PUT", Flip(0.5, side="request")),
    "HEAD refused": ("HEAD", None),
    "PUT refused": ("PUT", None),
    "HEAD 500": ("HEAD", Reply(500, "InternalError")),
}
"""None: connections are refused. The last one wants engines that have met little trouble: after trouble of its kind
they leave the server alone for up to 30 s.
"""


@pytest.mark.parametrize("name", REQUESTS)
def test_a_broken_request(name: str, served: Callable[[str, bool], Served], reference: Reference) -> None:
    """At the lookup, at the load, and at the store, as long as the engine asks; by both movers.

    Faults that clients report alike are distinguished in ``contract/test_store_faults``.
    """
    operation, fault = REQUESTS[name]
    asked, later = ([next(FRESH)], [next(FRESH)]) if operation == "PUT" else (PROMPTS[:1], [])
    reference.answers([*asked, *later])
    cases = [served(mover, True) for mover in MOVERS]
    if name == "HEAD 500":
        for case in cases:
            case.engine.stop()
            case.start()
    let_beliefs_lapse()
    side_by_side(*(partial(_suffer, case, fault, operation, asked, later) for case in cases))


def _suffer(case: Served, fault: Fault | None, operation: str, asked: list[Prompt], later: list[Prompt]) -> None:
    """Ask while the requests of an operation are broken, then mend it, and wait until all is loaded again.

    ``later``: is to be stored and loaded, too, once it works again.
    """
    assert case.proxy is not None
    broken = case.proxy.inject(fault, operation=operation) if fault is not None else None
    # NIXL's client waits half a minute for a silent server. Nobody waits for a store, and a load is given up.
    is_endless = case.medium.name == "obj" and isinstance(fault, Hold | Stall)
    with broken or lasting(case.proxy.go_down, case.proxy.come_back):
        # Where a busy machine has a lookup end too late, nothing is loaded, and the fault is not met: ask again.
        for _ in range(5):
            case.check(asked)
            if broken is None or broken.hits or operation == "PUT":
                break
            let_beliefs_lapse()
        if broken:
            broken.wait()  # a store is under way only some steps after the answer
        assert is_endless or case.engine.settle(), said(case.engine)
    assert case.engine.settle(), said(case.engine)
    case.heals([*asked, *later])


def test_a_server_that_is_down(workshop: Workshop, server: RcloneServer, reference: Reference) -> None:
    """Down from the start, then up, then down while the engine believes that all is there, then up again.

    A few requests wait, none longer than the deadline of its lookup or of its load; then none does until the server is
    back. Down: connections are refused, or nothing answers.
    """
    asked, deadline_s = PROMPTS[:1], 2.0
    reference.answers(asked)
    fields = {"lookup": {**REMEMBERING, "timeout": f"{deadline_s}s"}, "load_timeout": f"{deadline_s}s"}

    def suffer(case: Served, waiting: int) -> None:
        for _ in range(waiting):
            case.check(asked, waits_s=deadline_s)
        for _ in range(2):
            [answer] = case.check(asked)
            assert answer.total_s < deadline_s, f"held back{said(case.engine)}"

    def go_through_it(way: str) -> None:
        with FaultProxy(server.port) as proxy:
            medium = bucket(server, "obj", prefix=f"down/{way}", endpoint=proxy.endpoint, request_timeout="1s")
            case = Served(workshop, reference, medium, fields)
            for waiting in (1, 3):
                with lasting(proxy.go_down, proxy.come_back) if way == "refused" else proxy.inject(Hold()):
                    if waiting == 1:
                        case.start(is_to_store=False)
                    suffer(case, waiting)
                case.heals(asked)
            case.engine.stop()

    side_by_side(*(partial(go_through_it, way) for way in ("refused", "silent")))


# One tier of a chain.


def test_memory_and_files_in_front_of_a_bucket_that_stalls(
    workshop: Workshop, server: RcloneServer, reference: Reference
) -> None:
    """Hits are not delayed, memory does not grow, and the bucket is in use again later.

    In each round four prompts are stored that nobody has seen, 16 MiB: twice the bound on memory's growth in all.
    """
    known, held_s = chunk_prompts(4, seed=811), 8.0
    memory = {"kind": "memory", "capacity": "16MiB"}
    files = slab(workshop.scratch / "stall", "1GiB").tier
    with FaultProxy(server.port) as proxy:
        far = server.tier("stall", endpoint=proxy.endpoint, lookup={"timeout": f"{held_s:.0f}s"})
        config = chain_config(memory, files, far)
        with workshop.start_engine(connector=config, environment=server.environment, **ENGINE_OPTIONS) as engine:
            reference.check(engine, known)
            engine.generate([next(FRESH) for _ in range(8)])  # memory is full, and has been through evictions
            assert engine.settle()
            held = proxy.inject(Hold())
            engine.generate([next(FRESH)])  # asks the bucket; from here on the tier is known to be in trouble
            before_bytes, before = _resident_bytes(engine), engine.metrics()["vllm:external_prefix_cache_hits"]
            for _ in range(6):
                for prompt in known:
                    [answer] = reference.check(engine, [prompt])
                    assert answer.external_hit_tokens == FULL_TOKENS
                    assert answer.total_s < held_s / 2
                engine.generate([next(FRESH) for _ in range(4)])
            assert engine.metrics()["vllm:external_prefix_cache_hits"] - before == 6 * len(known) * FULL_TOKENS
            assert _resident_bytes(engine) - before_bytes < 48 << 20
            held.release()

            def arrived() -> float:
                return engine.labelled(CHUNKS, "tier", operation="write_through", outcome="ok")["s3"]

            def goes_on() -> bool:
                there = arrived()
                engine.generate([next(FRESH)])
                return engine.settle() and arrived() > there

            assert engine.settle()
            until(goes_on, "the bucket is in use again", engine)
            engine.stop()


def _resident_bytes(engine: Engine) -> int:
    """What the engine's process holds of the machine's memory."""
    status = Path(f"/proc/{engine.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10


def test_a_hit_slower_than_computing_is_not_taken(workshop: Workshop, server: RcloneServer) -> None:
    """Once a few loads have shown that the bucket is slow, prompts are computed although it has them."""
    asked = chunk_prompts(8, seed=813)
    with FaultProxy(server.port) as proxy:
        # A lookup that is given up halfway would find a part of the prefix, and other steps give other last bits.
        far = server.tier("slow", endpoint=proxy.endpoint, lookup={"timeout": "8s"})
        options = {"environment": server.environment, **ENGINE_OPTIONS}
        with workshop.start_engine(connector=chain_config(far), **options) as engine:
            right = engine.generate(asked)
            assert engine.settle()
            engine.stop()
        slow = proxy.inject(Hold("answer", 0.8), operation="GET")
        with workshop.start_engine(connector=chain_config(far, slow_hits="skip"), **options) as engine:
            engine.generate(chunk_prompts(4, seed=814))  # so that it is known how fast computing is
            answers = engine.generate(asked)
            assert_same(answers, right)
            taken = engine.labelled("vllm:nixl_offload_hit_decisions", "decision").get("taken", 0)
            assert sum(hits([answer]) > 0 for answer in answers) <= taken <= 3, "of eight"
            slow.release()
            engine.stop()
