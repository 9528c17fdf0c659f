"""A rank's half, driven as vLLM drives it but without a model.

Each test is a bug that other connectors shipped: work per block on the store path, a transfer launched twice, a request
that never resumes because its job was forgotten after one step, an exception where a miss would have done.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest

from nixl_offload.catalog.catalog import NOWHERE, MoveTicket
from nixl_offload.engine import TierEngine, pump
from nixl_offload.engine.host import HostSlab
from nixl_offload.errors import LayoutError
from nixl_offload.hardware.machine import machine_token
from nixl_offload.movers import select
from nixl_offload.movers.nixl import AgentMover
from nixl_offload.tiers.base import Place
from nixl_offload.tiers.ownership import DirectoryLock
from nixl_offload.tiers.shared.links import TreeLink
from nixl_offload.types import Key, Location, Outcome
from nixl_offload.vllm import background, rank_tiers, worker as worker_module
from nixl_offload.vllm.adapters import AdapterUse, adapter_of
from nixl_offload.vllm.messages import TicketSpec
from tests.unit.device_rig import ThreadedDevice
from tests.vllm.rank_rig import DEADLINE_S, Rig, gpu


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A rank, shut down afterwards."""
    made = Rig(tmp_path)
    yield made
    made.worker.shutdown()


def test_sleep_lets_go_of_everything_and_waking_up_takes_it_again(rig: Rig, tmp_path: Path) -> None:
    """Jobs under way end before KV memory goes away. New jobs fail until it is back. The slab is unchanged."""
    for block in range(8):
        rig.fill(block, 3)
    rig.store([0, 1, 2, 3], 0)
    before = [rig.block(block) for block in range(8)]
    rig.worker.submit_store(2, gpu([4, 5, 6, 7], 4), rig.to_store(1))
    rig.worker.sleep()
    (item,) = rig.worker.engine.finished()
    assert item.outcomes == (Outcome.OK,), "finished, and told afterwards"
    assert not open_files(tmp_path)
    rig.worker.sleep()
    for tensor in rig.tensors:
        tensor.zero_()
    rig.worker.submit_load(3, rig.to_load(0), gpu([0, 1, 2, 3], 0))
    rig.worker.submit_store(4, gpu([8, 9, 10, 11], 8), rig.to_store(2))
    assert {item.outcomes for item in rig.results(2)} == {(Outcome.FAILED,)}
    rig.worker.open({0: rig.place})
    assert not open_files(tmp_path), "whatever the scheduler's half says"
    rig.worker.wake_up()
    assert open_files(tmp_path)
    rig.worker.wake_up()
    assert rig.load(list(range(8)), 0, 1) == (Outcome.OK, Outcome.OK)
    assert [rig.block(block) for block in range(8)] == before


def test_waking_up_while_the_drive_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is created under the empty mount point, not even by a mover. Later the chunks are there again."""
    monkeypatch.setattr(background, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(background, "LONGEST_PAUSE_S", 0.05)
    drive = tmp_path / "kv"
    drive.mkdir()
    lock = DirectoryLock(drive / "lock")
    lock.acquire()
    rig = Rig(drive / "ns", is_open=False)
    try:
        rig.place = dataclasses.replace(rig.place, owner=lock.owner, machine=machine_token())
        assert rig.open(rig.place).open
        rig.store([0, 1, 2, 3], 0)
        rig.worker.sleep()
        drive.rename(tmp_path / "not mounted")
        drive.mkdir()
        rig.worker.wake_up()
        status = rig.status()
        assert (status.failed, status.tiers[0].trouble, *status.tiers[0][-2:]) == ({0}, "unavailable", True, True)
        assert not any(drive.iterdir())
        drive.rmdir()
        (tmp_path / "not mounted").rename(drive)
        while not rig.status().open:
            pass
        assert rig.load([0, 1, 2, 3], 0) == (Outcome.OK,)
    finally:
        rig.worker.shutdown()
        lock.release()


def test_keys_that_stand_for_another_adapter_are_refused(rig: Rig) -> None:
    """The scheduler's half has not heard yet that the adapter was replaced."""
    request = LoRARequest("mine", 1, "/adapters/mine")
    rig.worker.adapters.loaded(request, SimpleNamespace(id=1, loras={"layer": torch.ones(4)}))
    ((digest,),) = rig.worker.adapters.take().values()
    assert digest is not None
    right = AdapterUse(adapter_of(request), (digest,))
    for use, outcome in ((right, Outcome.OK), (right._replace(digests=("other",)), Outcome.DROPPED)):
        rig.worker.submit_store(1, gpu([0, 1, 2, 3], 0), dataclasses.replace(rig.to_store(0), adapter=use))
        assert {item.outcomes for item in rig.results()} == {(outcome,)}
        rig.worker.submit_load(2, dataclasses.replace(rig.to_load(0), adapter=use), gpu([4, 5, 6, 7], 0))
        assert {item.outcomes for item in rig.results()} == {(outcome,)}


def open_files(directory: Path) -> list[str]:
    """The files below ``directory`` that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of this listing
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in found if path.startswith(str(directory))]


def test_a_store_whose_numbers_do_not_fit_is_refused_not_raised(rig: Rig) -> None:
    """Every chunk FAILED, nothing written, no exception: too few blocks, or a chunk too many."""
    for blocks, slots in (([0, 1, 2], (0,)), ([0, 1, 2, 3], (0, 1))):
        assert rig.worker.submit_store(3, gpu(blocks, 0), rig.to_store(*slots))
        (item,) = rig.results()
        assert item.outcomes == (Outcome.FAILED,) * len(slots)


def test_a_chunk_that_is_nowhere_fails_and_its_siblings_load(rig: Rig) -> None:
    """The scheduler's half hands out ``NOWHERE`` for a chunk that is gone."""
    for block in range(4):
        rig.fill(block, 2)
    rig.store([0, 1, 2, 3], 0)
    ticket = rig.to_load(0, 1).ticket
    spec = TicketSpec(dataclasses.replace(ticket, locations=(ticket.locations[0], NOWHERE)))
    rig.worker.submit_load(4, spec, gpu([8, 9, 10, 11, 12, 13, 14, 15], 0))
    (item,) = rig.results()
    assert item.outcomes == (Outcome.OK, Outcome.FAILED)
    assert [rig.block(8 + number) for number in range(4)] == [rig.block(number) for number in range(4)]


class SlowStart:
    """Makes ``open_tier_engine`` wait like a slow driver, until the test lets it go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.opened: list[TierEngine] = []
        open_tier_engine = rank_tiers.open_tier_engine

        def opening(*arguments: Any) -> TierEngine:
            self.begun.set()
            assert self.go_on.wait(DEADLINE_S)
            self.opened.append(open_tier_engine(*arguments))
            return self.opened[-1]

        monkeypatch.setattr(rank_tiers, "open_tier_engine", opening)


def test_a_slow_opening_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job or a move that comes before its end fails at once. Later ones work."""
    slow = SlowStart(monkeypatch)
    rig = Rig(tmp_path, is_open=False)
    rig.worker.open({0: rig.place})
    rig.worker.open({0: rig.place})
    assert slow.begun.wait(DEADLINE_S)
    began_s = time.monotonic()
    rig.worker.submit_store(1, gpu([0, 1, 2, 3], 0), rig.to_store(0))
    location = Location(0, 0, rig.slot_bytes)
    rig.worker.submit_moves(MoveTicket(7, (Key(bytes(36)),), (location,), (location,)))
    rig.worker.wait({1})
    (item,) = rig.worker.engine.finished()
    assert item.outcomes == (Outcome.FAILED,)
    assert rig.worker.take_tickets() == {7: {0: Outcome.FAILED}}
    assert rig.worker.take_status() == {}
    assert time.monotonic() - began_s < DEADLINE_S / 2
    slow.go_on.set()
    assert rig.status().open
    rig.store([0, 1, 2, 3], 0)
    rig.worker.shutdown()
    assert len(slow.opened) == 1


@pytest.mark.parametrize("late", [False, True], ids=["before the deadline", "after it"])
def test_a_shutdown_during_the_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """It waits for a moment. A tier that opens meanwhile is closed, and the slab can be opened again."""
    slow = SlowStart(monkeypatch)
    monkeypatch.setattr(rank_tiers, "CLOSE_S", 0.1 if late else DEADLINE_S)
    kept: list[object] = []
    monkeypatch.setattr(pump, "LEAKED", kept)
    monkeypatch.setattr(worker_module, "LEAKED", kept)
    rig = Rig(tmp_path, is_open=False)
    rig.worker._host = host = HostSlab(memory_bytes=1 << 20, relay_slots=0, slot_bytes=4096)
    rig.worker.open({0: rig.place})
    assert slow.begun.wait(DEADLINE_S)
    opening = next(each for each in threading.enumerate() if each.name == "nixl-offload-open-rank-0")
    if not late:
        threading.Timer(0.1, slow.go_on.set).start()
    rig.worker.shutdown()
    assert (host in kept) == late, "memory that is being registered is not unlocked"
    with nullcontext() if late else pytest.raises(LayoutError):
        host.slot(0, 4096)
    slow.go_on.set()
    opening.join(DEADLINE_S)
    assert not slow.opened[0]._thread.is_alive()
    assert rig.load([0, 1, 2, 3], 0) == (Outcome.FAILED,)
    monkeypatch.undo()
    again = Rig(tmp_path)
    again.worker.shutdown()


def test_threads_of_the_tiers_do_not_share_the_core_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM's CPU backend binds the worker's main thread to one core: the pump may run beside it, and main stays."""
    wide = os.sched_getaffinity(os.getppid())
    if len(wide) < 2:
        pytest.skip("one core")
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "0")
    found: list[set[int]] = []

    def main() -> None:
        os.sched_setaffinity(0, {min(wide)})
        before = set(threading.enumerate())
        rig = Rig(tmp_path)
        rig.store([0, 1, 2, 3], 0)
        for thread in set(threading.enumerate()) - before:
            assert thread.native_id is not None
            found.append(os.sched_getaffinity(thread.native_id))
        found.append(os.sched_getaffinity(0))
        rig.worker.shutdown()

    worker = threading.Thread(target=main)
    worker.start()
    worker.join(DEADLINE_S)
    assert found[:-1], "no thread was started"
    assert all(cores == wide for cores in found[:-1])
    assert found[-1] == {min(wide)}


def test_host_memory_that_a_copy_may_still_be_at_stays_locked(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA waits for the device before it takes a page-lock off, and a device that hangs would hang the shutdown."""
    kept: list[object] = ["a batch that did not end"]
    monkeypatch.setattr(pump, "LEAKED", kept)
    monkeypatch.setattr(worker_module, "LEAKED", kept)
    rig.worker._host = host = HostSlab(memory_bytes=1 << 20, relay_slots=0, slot_bytes=4096)
    rig.worker.shutdown()
    assert host in kept
    host.slot(0, 4096)


@pytest.mark.parametrize("where", ["probe", "connect", "server"])
def test_storage_that_hangs_delays_no_other_tier_of_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The opening may wait for the probe's round trip, the link's directory, or an answer of the bucket."""
    hung, go_on = threading.Event(), threading.Event()

    def hanging(real: Callable[..., Any], about: Callable[..., bool]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if about(*arguments):
                hung.set()
                assert go_on.wait(DEADLINE_S)
            return real(*arguments)

        return call

    tree = str(tmp_path / "tree")
    farther = {"kind": "shared_dir", "path": tree, "capacity": "1GiB"}
    if where == "probe":
        probe = hanging(select.probe_round_trip, lambda mover, kind, directory, *_: directory == tree)
        monkeypatch.setattr(select, "probe_round_trip", probe)
    elif where == "connect":
        monkeypatch.setattr(TreeLink, "connect", hanging(TreeLink.connect, lambda _: True))
    else:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        farther = {"kind": "s3", "bucket": "bucket", "endpoint": "http://127.0.0.1:1", "region": "us-east-1"}
        farther |= {"ttl": "7d", "capacity": "1GiB", "request_timeout": "1s"}
        monkeypatch.setattr(select, "make_object_mover", hanging(select.make_object_mover, lambda *_: True))
    rig = Rig(tmp_path / "slab", farther, is_open=False)
    rig.worker.open({1: Place(b"r" * 32)})
    assert hung.wait(DEADLINE_S)
    rig.worker.open({0: rig.place})
    assert rig.status().open == {0}
    rig.store([0, 1, 2, 3], 0)
    go_on.set()
    rig.worker.shutdown()


def test_no_two_tiers_start_a_library_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor register memory with it."""
    inside, most, calls = 0, 0, 0

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal inside, most, calls
            if "FILE" in arguments:
                return real(*arguments)
            inside, calls = inside + 1, calls + 1
            most = max(most, inside)
            time.sleep(0.05)
            try:
                return real(*arguments)
            finally:
                inside -= 1

        return call

    monkeypatch.setattr(AgentMover, "_make", watched(AgentMover._make))
    monkeypatch.setattr(AgentMover, "_register_as", watched(AgentMover._register_as))
    tree = {"kind": "shared_dir", "path": str(tmp_path / "tree"), "capacity": "1GiB"}
    rig = Rig(tmp_path / "slab", tree, is_open=False)
    told = rig.open(rig.place, Place(b"r" * 32))
    while len(told.open) < 2:
        told = rig.status()
    if not calls:
        pytest.skip("NIXL is not installed")
    assert calls >= 4
    assert most == 1
    rig.worker.shutdown()


def test_a_directory_that_hangs_does_not_hold_up_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a device: it is measured neither then nor once it answers, and the other tier has its plan."""
    go_on, measured = threading.Event(), []
    make_directory = rank_tiers.make_private_directory

    def making(directory: Path) -> None:
        if directory.name == "slab":
            assert go_on.wait(DEADLINE_S)
        make_directory(directory)

    def planned(tier: Any, *_: Any, **__: Any) -> str:
        measured.append(tier.kind)
        return f"a plan for {tier.kind}"

    monkeypatch.setattr(rank_tiers, "TOUCH_LIMIT_S", 0.5)
    monkeypatch.setattr(rank_tiers, "make_private_directory", making)
    monkeypatch.setattr(rank_tiers, "plan_tier", planned)
    monkeypatch.setattr(rank_tiers, "DevicePacker", lambda *_: SimpleNamespace(sums_slowly=False))
    with ThreadedDevice() as device:
        monkeypatch.setattr(rank_tiers, "device_of", lambda _: device)
        began_s = time.monotonic()
        rig = Rig(
            tmp_path / "slab", {"kind": "shared_dir", "path": str(tmp_path / "tree"), "capacity": "1GiB"}, is_open=False
        )
        assert time.monotonic() - began_s < DEADLINE_S / 2
    (hung,) = [each for each in threading.enumerate() if each.name == "nixl-offload-touch"]
    assert rig.worker._tiers.planned == [None, "a plan for shared_dir"]
    assert caplog.text.count("transfer paths are not compared there") == 1
    go_on.set()
    hung.join(DEADLINE_S)
    assert measured == ["shared_dir"]
    assert not any((tmp_path / "tree").iterdir())
    rig.worker.shutdown()
