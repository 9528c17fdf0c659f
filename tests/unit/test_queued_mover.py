"""What waits for its turn, and reads that are tried again: never beside their own late bytes, never for long, and final
when the mover is closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nixl_offload.errors import MoverError, StoreError
from nixl_offload.movers.base import MemoryKind, Op, Transfer, TransferState
from nixl_offload.movers.queued import QueuedMover
from nixl_offload.movers.store import StoreMover
from nixl_offload.stores.base import ObjectInfo
from nixl_offload.stores.directory import TreeStore
from tests.contract.object_rigs import RawDirectory
from tests.contract.suites.faulty_mover import Fault, FaultKind, FaultyMover
from tests.contract.suites.mover_suite import MIB, extents
from tests.contract.suites.object_mover_rig import ObjectRig
from tests.unit.engine_rig import until

PENDING, DONE, FAILED = TransferState.PENDING, TransferState.DONE, TransferState.FAILED
DATA = bytes(range(250)) * 20


class Control(TreeStore):
    """Answers HEADs as it is told to."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self.trouble: StoreError | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.asked = 0

    def head(self, name: str) -> ObjectInfo | None:
        """See Store."""
        self.asked += 1
        self.gate.wait(30)
        if self.trouble is not None:
            raise self.trouble
        return super().head(name)


class Setup:
    """A rig over a queued mover, the scripted mover under it, and the store that it asks."""

    def __init__(self, directory: Path, within_s: float = 60.0) -> None:
        self.faulty = FaultyMover(StoreMover(TreeStore(str(directory)), threads=2))
        self.control = Control(directory)
        self.mover = QueuedMover(
            self.faulty, self.control, at_once=2, pause_s=0.05, within_s=within_s, close_timeout_s=0.2
        )
        self.rig = ObjectRig(self.mover, RawDirectory(directory), MemoryKind.DRAM, MIB)
        self.name = self.rig.store("object", DATA)

    def read(self, *faults: Fault) -> Transfer:
        """Start a read to which ``faults`` happen."""
        self.faulty.script = list(faults)
        file = self.rig.open(self.name, len(DATA))
        return self.rig.submit(Op.READ, extents([0], len(DATA)), file, extents([0], len(DATA)))

    @property
    def reads(self) -> int:
        """Attempts so far."""
        return self.faulty.submitted.count(Op.READ)


@pytest.fixture
def setup(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Setup]:
    """``request.param``: seconds within which reads are tried again."""
    setup = Setup(tmp_path / "objects", getattr(request, "param", 60.0))
    yield setup
    setup.control.gate.set()
    setup.faulty.release()
    setup.mover.close()


def test_the_third_attempt_counts(setup: Setup) -> None:
    assert setup.rig.wait(setup.read(*(Fault(n, FaultKind.FAIL) for n in range(2)))).state is DONE
    assert setup.rig.bytes_at(0, len(DATA)) == DATA
    assert setup.reads == 3
    assert setup.rig.wait(setup.read(Fault(0, FaultKind.FAIL, every=True))).state is FAILED
    assert setup.reads == 6


def test_what_may_still_be_written_to_is_not_read_into_again(setup: Setup) -> None:
    transfer = setup.rig.wait(setup.read(Fault(0, FaultKind.FAIL, quarantine=True)))
    assert (transfer.state, transfer.quarantine) == (FAILED, True)
    assert setup.reads == 1


def test_a_machine_without_a_thread_to_spare_reads_again(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks whether the object is there, and no poll raises."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.endswith("-ask"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert setup.rig.wait(setup.read(Fault(0, FaultKind.FAIL))).state is DONE
    assert (setup.reads, setup.control.asked) == (2, 0)


def test_what_is_gone_is_not_read_again(setup: Setup) -> None:
    setup.control.delete([setup.name])
    transfer = setup.rig.wait(setup.read(Fault(0, FaultKind.FAIL, every=True)))
    assert (transfer.state, transfer.missing, setup.reads) == (FAILED, True, 1)


@pytest.mark.parametrize(("setup", "cause"), [(60.0, "timeout"), (0.5, "hangs")], indirect=["setup"])
def test_a_server_that_answers_nobody_is_left_alone(setup: Setup, cause: str) -> None:
    """Also when it does not even refuse: then the read ends when the time for attempts is over."""
    if cause == "hangs":
        setup.control.gate.clear()
    else:
        setup.control.trouble = StoreError("trouble", cause=cause)
    transfer = setup.rig.wait(setup.read(Fault(0, FaultKind.FAIL, every=True)))
    assert (transfer.state, transfer.missing, setup.reads) == (FAILED, False, 1)


@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.STUCK])
def test_closed_is_final(setup: Setup, kind: FaultKind) -> None:
    """Whether it waits for its next attempt, or fails while the mover is closed."""
    setup.control.gate.clear()
    transfer = setup.read(Fault(0, kind, every=True))
    until(lambda: setup.mover.poll(transfer) is PENDING and (kind is FaultKind.STUCK or setup.control.asked))
    setup.mover.close()
    assert setup.mover.poll(transfer) is FAILED
    assert setup.reads == 1


# The queue


def test_no_more_run_than_may_and_in_their_order(setup: Setup) -> None:
    """Nobody polls any of them: a look makes them final and starts what waits."""
    transfers = [setup.read() for _ in range(7)]
    assert setup.reads == 2
    seen, news = [setup.reads], 0
    give_up_s = time.monotonic() + 30
    while any(transfer.state is PENDING for transfer in transfers):
        assert time.monotonic() < give_up_s
        assert [t.state for t in transfers] == sorted((t.state for t in transfers), key=lambda s: s is PENDING)
        quiet_s = setup.mover.look()
        assert quiet_s is not None
        news += quiet_s == 0
        seen.append(setup.reads)
        assert setup.reads - sum(t.state is DONE for t in transfers) <= 2
        time.sleep(min(quiet_s, 0.01))
    assert news <= len(transfers)
    assert {transfer.state for transfer in transfers} == {DONE}


def test_an_object_is_kept_while_its_transfer_waits(setup: Setup) -> None:
    """In the queue, and between two attempts; afterwards nothing is remembered of it."""
    setup.control.gate.clear()
    running = [setup.read(Fault(n, FaultKind.FAIL)) for n in range(2)]
    waiting = setup.read(Fault(2, FaultKind.FAIL))
    until(lambda: setup.mover.poll(waiting) is PENDING and setup.control.asked == 1)
    files = list(setup.mover._names)
    for file in files:
        with pytest.raises(MoverError, match="in the queue"):
            setup.mover.close_file(file)
    setup.control.gate.set()
    setup.rig.wait(*running, waiting)
    assert {transfer.state for transfer in (*running, waiting)} == {DONE}
    for file in files:
        setup.mover.close_file(file)
    assert not setup.mover._names
    assert not setup.mover._busy


def test_a_refusal_raises_at_once_and_is_a_failure_of_what_had_to_wait(setup: Setup) -> None:
    with pytest.raises(MoverError, match="scripted"):
        setup.read(Fault(0, FaultKind.REFUSE))
    before = setup.reads
    transfers = [setup.read() for _ in range(2)]
    setup.faulty.script = [Fault(before + 2, FaultKind.REFUSE, op=Op.READ)]
    whole = extents([0], len(DATA))
    transfers.append(setup.rig.submit(Op.READ, whole, setup.rig.open(setup.name, len(DATA)), whole))
    setup.rig.wait(*transfers)
    assert [transfer.state for transfer in transfers] == [DONE, DONE, FAILED]
    assert not transfers[2].quarantine


@pytest.mark.parametrize("call", ["submit", "poll"])
def test_a_bug_of_the_client_costs_its_own_transfer_alone(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Nobody knows what was started, so its memory is quarantined."""
    real = getattr(setup.faulty, call)

    def raise_once(*arguments: object) -> object:
        monkeypatch.setattr(setup.faulty, call, real)
        raise RuntimeError("a bug")

    monkeypatch.setattr(setup.faulty, call, raise_once)
    transfers = [setup.read() for _ in range(3)]
    setup.rig.wait(*transfers)
    lost, *others = sorted(transfers, key=lambda transfer: transfer.state is DONE)
    assert (lost.state, lost.quarantine) == (FAILED, True)
    assert "a bug" in (lost.error or "")
    assert {transfer.state for transfer in others} == {DONE}


def test_what_waits_when_the_mover_is_closed_fails(setup: Setup) -> None:
    running = [setup.read(Fault(0, FaultKind.STUCK, every=True)) for _ in range(2)]
    waiting = setup.read(Fault(0, FaultKind.STUCK, every=True))
    setup.mover.close()
    assert {transfer.state for transfer in (*running, waiting)} == {FAILED}
    assert not waiting.quarantine
