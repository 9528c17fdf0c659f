"""NIXL's OBJ mover when reads fail: never into memory that may still be written to, never for long, final when closed.

Over an agent that the test controls, because no server can make NIXL fail between two calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from nixl_offload.errors import StoreError
from nixl_offload.movers import nixl_objects
from nixl_offload.movers.base import MemoryKind, Op, Transfer, TransferState
from nixl_offload.movers.nixl import AgentMover, NixlPlugin
from nixl_offload.movers.nixl_objects import ASKING_THREADS, NixlObjectMover
from nixl_offload.stores.base import ObjectInfo
from nixl_offload.stores.directory import TreeStore
from tests.contract.object_rigs import ObjectRig
from tests.unit.engine_rig import until

DONE, FAILED, PENDING = TransferState.DONE, TransferState.FAILED, TransferState.PENDING


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


class Control(TreeStore):
    """Answers HEADs as the test says."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self.gate = threading.Event()
        self.gate.set()
        self.trouble: StoreError | None = None
        self.asked = 0

    def head(self, name: str) -> ObjectInfo | None:
        self.asked += 1
        self.gate.wait(30)
        if self.trouble is not None:
            raise self.trouble
        return ObjectInfo(name, 10, 0.0)


class Reads:
    """A mover over both, and reads with it."""

    def __init__(self, directory: Path, agent: Agent) -> None:
        self.control = Control(directory)
        plugin = NixlPlugin("obj", "OBJ", {}, frozenset({MemoryKind.DRAM}))
        self.mover = NixlObjectMover(plugin, self.control, at_once=64, close_timeout_s=0.0)
        self.agent = agent
        self.rig = ObjectRig(self.mover)

    def read(self, *states: str) -> Transfer:
        self.agent.states += states
        return self.rig.submit(Op.READ, 0, self.rig.open("x", 10), 0, 10)


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    agent = Agent()
    monkeypatch.setattr(AgentMover, "_make", lambda _: agent)
    reads = Reads(tmp_path, agent)
    yield reads
    reads.control.gate.set()
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
    assert (reads.agent.begun, reads.control.asked) == (2, 0)


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_server_that_answers_nobody_is_left_alone(
    reads: Reads, monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    """Even if it does not refuse either: then the read ends when the time for attempts is over."""
    if is_silent:
        reads.control.trouble = StoreError("trouble", cause="timeout")
    else:
        monkeypatch.setattr(nixl_objects, "WITHIN_S", 0.5)
        reads.control.gate.clear()
    transfer = reads.rig.wait(reads.read("ERR"))
    assert (transfer.state, transfer.missing, reads.agent.begun) == (FAILED, False, 1)


def test_many_failed_reads_are_asked_for_by_few_threads(reads: Reads) -> None:
    reads.control.gate.clear()
    transfers = [reads.read("ERR") for _ in range(20)]
    until(lambda: reads.control.asked == ASKING_THREADS)
    assert sum(thread.name == "nixl-offload-obj-ask" for thread in threading.enumerate()) == ASKING_THREADS
    reads.control.gate.set()
    reads.rig.wait(*transfers)
    assert {transfer.state for transfer in transfers} == {DONE}
    assert reads.control.asked == 20


def test_closed_is_final(reads: Reads) -> None:
    """Even while a read pauses between two attempts: then nothing may still write to its memory."""
    reads.control.gate.clear()
    transfer = reads.read("ERR")
    until(lambda: reads.mover.poll(transfer) is PENDING and reads.control.asked)
    reads.mover.close()
    assert (reads.mover.poll(transfer), transfer.quarantine) == (FAILED, False)
    assert reads.agent.begun == 1
