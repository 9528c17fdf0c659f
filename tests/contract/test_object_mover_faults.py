"""What movers of objects do when the server fails, hangs or lies; what NIXL's plugin was found to do; who is chosen.

A real server behind the fault proxy; or an agent of the test's, as no server makes NIXL fail between two calls. What is
proved for NIXL's plugin here is what docs/decisions/0008-object-movers.md builds on, so a release that differs shows.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import MoverUnavailableError, StoreError
from nixl_offload.keep import keep_forever
from nixl_offload.movers import nixl_objects
from nixl_offload.movers.base import MemoryKind, Mover, Op, Transfer, TransferState
from nixl_offload.movers.nixl import AgentMover, NixlPlugin
from nixl_offload.movers.nixl_objects import ASKING_THREADS, NixlObjectMover
from nixl_offload.movers.select import ProbedMover, make_object_mover, open_object_mover
from nixl_offload.movers.threaded import StoreMover
from tests.s3.proxy import Answer, FaultProxy, Hold, Reset, Stall
from tests.s3.servers import RcloneServer
from tests.unit.engine_rig import until
from tests.unit.shared_rig import Gate, MemoryStore

from .object_rigs import ObjectRig, tier_of

SIZE = 200_000
DONE, FAILED, PENDING = TransferState.DONE, TransferState.FAILED, TransferState.PENDING


@pytest.fixture
def proxy(rclone: RcloneServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    for name, value in rclone.environment.items():
        monkeypatch.setenv(name, value)
    with FaultProxy(rclone.port) as proxy:
        yield proxy


class Rigs:
    """Makes rigs over the proxy, and closes them."""

    def __init__(self, server: RcloneServer, proxy: FaultProxy) -> None:
        self.server, self.proxy = server, proxy
        self.opened: list[ObjectRig] = []

    def tier(self, **fields: object) -> S3Config:
        return tier_of(self.server, endpoint=self.proxy.endpoint, **fields)

    def make(self, name: str, **fields: object) -> ObjectRig:
        return self.over(make_object_mover(name, self.tier(**fields)))

    def over(self, mover: Mover) -> ObjectRig:
        self.opened.append(ObjectRig(mover, self.server))
        return self.opened[-1]

    def select(self, memory_kind: MemoryKind = MemoryKind.DRAM, **fields: object) -> ProbedMover:
        return open_object_mover(self.tier(**fields), memory_kind)


@pytest.fixture
def rigs(rclone: RcloneServer, proxy: FaultProxy) -> Iterator[Rigs]:
    rigs = Rigs(rclone, proxy)
    yield rigs
    proxy.release_all()
    for rig in rigs.opened:
        rig.mover.close()


def works(rig: ObjectRig) -> bool:
    """Whether an object goes round."""
    target = rig.open(rig.name("works"), 5000)
    return all(rig.move(op, 0, target, 0, 5000).state is DONE for op in (Op.WRITE, Op.READ))


# NIXL's plugin


def test_obj_get_that_failed_writes_nothing_later(
    rigs: Rigs, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GETs held back by the server, before and amid the body, fail; when it goes on, no byte reaches their memory.

    While they are pending their memory cannot be let go. One attempt each, for the SDK's own times cannot be set: 3 s
    without an answer, 10 s after half a body.
    """
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    rig = rigs.make("obj")
    names = [rig.store(f"held-{number}", b"\x11" * SIZE) for number in range(2)]
    proxy.inject(Hold(), operation="GET", key="held-0")
    stall = proxy.inject(Stall(0.5), operation="GET", key="held-1")
    reads = [rig.submit(Op.READ, number * SIZE, rig.open(name, SIZE), 0, SIZE) for number, name in enumerate(names)]
    stall.wait()
    rig.wait(*reads, timeout_s=30)
    assert [(read.state, read.quarantine) for read in reads] == [(FAILED, False)] * 2
    rig.set_memory(0xA5)
    proxy.release_all()
    proxy.wait_idle()
    time.sleep(0.2)
    assert bool((rig.memory == 0xA5).all())
    assert works(rig)


@pytest.mark.parametrize("fault", [Answer(503, "SlowDown"), Reset("body")])
def test_obj_cannot_read_twice_by_itself(rigs: Rigs, proxy: FaultProxy, fault: Answer | Reset) -> None:
    """The SDK's second attempt finds no room behind what the first left in the buffer; ours starts afresh, twice."""
    rig = rigs.make("obj")
    name = rig.store("twice", b"\x22" * SIZE)
    with proxy.inject(fault, operation="GET", times=1):
        read = rig.move(Op.READ, 0, rig.open(name, SIZE), 0, SIZE)
    assert (read.state, read.error) == (DONE, None)
    assert rig.bytes_at(0, SIZE) == b"\x22" * SIZE
    assert proxy.counts["GET"] == 3
    assert proxy.counts["HEAD"] == 1
    with proxy.inject(fault, operation="GET"):
        read = rig.move(Op.READ, 0, rig.open(name, SIZE), 0, SIZE)
    assert (read.state, read.missing, read.quarantine) == (FAILED, False, False)
    assert 3 + 3 < proxy.counts["GET"] <= 3 + 3 * 3


def test_obj_reads_in_flight_at_the_end_are_quarantined(rigs: Rigs, proxy: FaultProxy) -> None:
    """Their bytes may still come. What was queued behind them never begins."""
    rig = rigs.make("obj", connections=2, request_timeout="1s")
    name = rig.store("held", b"\x33" * SIZE)
    rule = proxy.inject(Hold(), operation="GET")
    files = [rig.open(name, SIZE) for _ in range(5)]
    reads = [rig.submit(Op.READ, 0, file, 0, SIZE) for file in files]
    rule.wait(2)
    keep_forever(rig)  # its memory may still be written to once the server goes on
    rig.mover.close()
    assert {read.state for read in reads} == {FAILED}
    assert [read.quarantine for read in reads] == [True] * 3 + [False] * 2


@pytest.mark.parametrize("name", ["obj", "obstore"])
def test_dead_server(rigs: Rigs, proxy: FaultProxy, name: str) -> None:
    """A server that is gone fails transfers within seconds, in their own time; when it is back the mover works."""
    rig = rigs.make(name)
    target = rig.open(rig.store("dead", b"\x44" * 100), 100)
    proxy.go_down()
    started_s = time.monotonic()
    for op in Op:
        transfer = rig.move(op, 0, target, 0, 100)
        assert (transfer.state, transfer.missing) == (FAILED, False)
        rig.assert_memory_is_ours(transfer)
    assert time.monotonic() - started_s < 60
    proxy.come_back()
    assert works(rig)


# NIXL's mover when reads fail: never into memory that may still be written to, never for long, final when closed


class Agent(SimpleNamespace):
    """An agent of NIXL's whose attempts pass through ``states``, in turn, and then are DONE."""

    def __init__(self) -> None:
        super().__init__(states=[], begun=0, check_xfer_state=lambda _: "PROC")

    def transfer(self, handle: object) -> str:
        self.begun += 1
        state = self.states.pop(0) if self.states else "DONE"
        if state == "not whole":
            raise RuntimeError("NIXL_ERR_BACKEND")
        return str(state)

    def register_memory(self, *_: object) -> object:
        return object()

    deregister_memory = get_xfer_descs = initialize_xfer = release_xfer_handle = register_memory


class Reads:
    """A mover over it and a store, and reads with it."""

    def __init__(self, agent: Agent) -> None:
        self.agent, self.store, self.gate = agent, MemoryStore(), Gate()
        self.store.put("x")
        plugin = NixlPlugin("obj", "OBJ", {}, frozenset({MemoryKind.DRAM}))
        self.mover = NixlObjectMover(plugin, self.store, at_once=64, close_timeout_s=0.0)
        self.rig = ObjectRig(self.mover)

    def read(self, *states: str) -> Transfer:
        self.agent.states += states
        return self.rig.submit(Op.READ, 0, self.rig.open("x", 10), 0, 10)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    agent = Agent()
    monkeypatch.setattr(AgentMover, "_make", lambda _: agent)
    reads = Reads(agent)
    yield reads
    reads.gate.open()
    reads.mover.close()


def test_what_may_still_be_written_to_is_not_read_into_again(reads: Reads) -> None:
    transfer = reads.rig.wait(reads.read("not whole"))
    assert (transfer.state, transfer.quarantine, reads.agent.begun) == (FAILED, True, 1)


def test_a_machine_without_a_thread_to_spare_reads_again(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    """No HEAD is sent, and no poll raises."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert reads.rig.wait(reads.read("ERR")).state is DONE
    assert (reads.agent.begun, reads.store.calls) == (2, [])


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_server_that_answers_nobody_is_left_alone(
    reads: Reads, monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    """Even if it does not refuse either: then the read ends when the time for attempts is over."""

    def refuse(operation: str, name: str) -> None:
        raise StoreError("trouble", cause="timeout")

    reads.store.before = refuse if is_silent else reads.gate
    if not is_silent:
        monkeypatch.setattr(nixl_objects, "WITHIN_S", 0.5)
    transfer = reads.rig.wait(reads.read("ERR"))
    assert (transfer.state, transfer.missing, reads.agent.begun) == (FAILED, False, 1)


def test_many_failed_reads_are_asked_for_by_few_threads(reads: Reads) -> None:
    reads.store.before = reads.gate
    transfers = [reads.read("ERR") for _ in range(20)]
    until(lambda: len(reads.store.calls) == ASKING_THREADS)
    assert sum(thread.name == "nixl-offload-obj-ask" for thread in threading.enumerate()) == ASKING_THREADS
    reads.gate.open()
    reads.rig.wait(*transfers)
    assert {transfer.state for transfer in transfers} == {DONE}
    assert reads.store.calls == [("head", "x")] * 20


def test_closed_is_final(reads: Reads) -> None:
    """Even while a read pauses between two attempts: then nothing may still write to its memory."""
    reads.store.before = reads.gate
    transfer = reads.read("ERR")
    until(lambda: reads.mover.poll(transfer) is PENDING and reads.store.calls)
    reads.mover.close()
    assert (reads.mover.poll(transfer), transfer.quarantine) == (FAILED, False)
    assert reads.agent.begun == 1


# Our own threads


class HeldStore(MemoryStore):
    """Holds what it is asked until its gate is opened; closing opens it where ``polite``."""

    def __init__(self, *, polite: bool = True) -> None:
        super().__init__()
        self.gate, self._polite = Gate(), polite
        self.before = self._hold

    def _hold(self, operation: str, name: str) -> None:
        self.gate(operation, name)
        if name == "odd":
            raise RuntimeError("not a StoreError")

    def read_into(self, name: str, offset: int, memory: memoryview) -> None:
        with self._call("read", name):
            pass

    def close(self) -> None:
        if self._polite:
            self.gate.open()


@pytest.mark.parametrize("polite", [True, False])
def test_close_is_bounded(polite: bool) -> None:
    """A call that does not end holds ``close`` up for its time only; its memory is quarantined unless it did end."""
    store = HeldStore(polite=polite)
    rig = ObjectRig(StoreMover(store, threads=2, close_timeout_s=0.1))
    reads = [rig.submit(Op.READ, 0, rig.open("x", 10), 0, 10) for _ in range(3)]
    started_s = time.monotonic()
    rig.mover.close()
    assert time.monotonic() - started_s < 20
    assert [(read.state, read.quarantine) for read in reads] == [(FAILED, not polite)] * 3
    store.gate.open()
    for thread in threading.enumerate():
        if thread.name.startswith(f"nixl-offload-{rig.mover.name}"):
            thread.join(10)
    assert len(store.calls) == 2, "what was queued does not begin after close"


def test_a_read_does_not_wait_behind_writes_and_a_store_may_raise_anything() -> None:
    """A request waits for a read, and for no write. What is under way ends first; writes keep their order."""
    store = HeldStore()
    rig = ObjectRig(StoreMover(store, threads=1))
    transfers = []
    for number, op in enumerate((Op.WRITE, Op.WRITE, Op.WRITE, Op.READ)):
        name = "odd" if number == 1 else f"{number}"
        transfers.append(rig.submit(op, 10 * number, rig.open(name, 10), 0, 10))
        until(lambda: bool(store.calls))
    store.gate.open()
    rig.wait(*transfers)
    rig.mover.close()
    assert store.calls == [("write", "0"), ("read", "3"), ("write", "odd"), ("write", "2")]
    assert [number for number, each in enumerate(transfers) if each.state is FAILED] == [1]
    assert "not a StoreError" in str(transfers[1].error)


# Who is chosen


def test_a_server_that_is_down_at_start_is_used_later(
    rigs: Rigs, rclone: RcloneServer, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a restart; the log says by what, and no secret."""
    caplog.set_level(logging.DEBUG)
    proxy.go_down()
    rig = rigs.over(rigs.select().mover)
    proxy.come_back()
    assert works(rig)
    assert "are moved by obstore (not tried out)" in caplog.text
    assert rclone.secret_access_key not in caplog.text


def test_device_memory_is_tried_first(rigs: Rigs, caplog: pytest.LogCaptureFixture) -> None:
    """NIXL's plugin takes none here, and the log says so; where it does, nothing goes through host memory."""
    caplog.set_level(logging.INFO)
    opened = rigs.select(memory_kind=MemoryKind.VRAM)
    rig = rigs.over(opened.mover)
    assert [(probe.name, probe.ok) for probe in opened.report] == [("obj", False), ("obstore", True)]
    assert "obstore (not tried out; packs through host memory); passed over obj: takes no vram here" in caplog.text
    assert works(rig)


def test_nixl_is_not_installed(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Auto does without, and ``mover: obj`` says what would help."""
    monkeypatch.delitem(sys.modules, "nixl._api", raising=False)
    monkeypatch.setitem(sys.modules, "nixl", None)
    opened = rigs.select()
    rigs.over(opened.mover)
    assert opened.mover.name == "obstore"
    with pytest.raises(MoverUnavailableError, match="pip install nixl"):
        rigs.select(mover="obj")


def test_a_refusal_is_told_in_words_where_nixl_has_none(rigs: Rigs, proxy: FaultProxy) -> None:
    with (
        proxy.inject(Answer(403, "AccessDenied")),
        pytest.raises(MoverUnavailableError, match=r"mover 'obj' cannot .*403 \(AccessDenied"),
    ):
        rigs.select(mover="obj")


def test_credentials_that_may_only_read(rigs: Rigs, proxy: FaultProxy) -> None:
    """A server whose credentials may not write still reads what others wrote."""
    writer = rigs.over(rigs.select().mover)
    assert writer.move(Op.WRITE, 0, writer.open("n/shared", 100), 0, 100).state is DONE
    with proxy.inject(Answer(403, "AccessDenied"), operation="PUT"):
        reader = rigs.over(rigs.select().mover)
        assert reader.move(Op.READ, 0, reader.open("n/shared", 100), 0, 100).state is DONE
        assert reader.move(Op.WRITE, 0, reader.open("n/own", 100), 0, 100).state is FAILED
