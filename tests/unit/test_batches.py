"""Proves of batches: chunks of a job and group travel in one transfer and come back bit for bit by every path; an error
is a chunk's own; files and objects of their own keep a transfer each, and none waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.engine import paths
from nixl_offload.engine.paths import Batch, Steps
from nixl_offload.engine.records import ChunkState
from nixl_offload.movers.base import Mover, Op, Transfer, TransferState
from nixl_offload.movers.threaded import CopyMover
from nixl_offload.types import Location, Outcome
from tests.contract.suites.faulty_mover import Fault, FaultKind, FaultyMover
from tests.unit.engine_rig import SHAPES, Rig, kv_cache, opened, until
from tests.unit.link_rig import object_files, objects, tree

OK, FAILED, CORRUPT, DROPPED = Outcome.OK, Outcome.FAILED, Outcome.CORRUPT, Outcome.DROPPED
Make = Callable[..., Rig]
CHUNKS = 10


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with opened(partial(Rig, tmp_path, staging_slots=64)) as build:
        yield build


def blocks_of(number: int) -> list[int]:
    return list(range(4 * number, 4 * number + 4))


def sizes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of chunks of each batch that the pump begins from now on."""
    found: list[int] = []
    run = rig.engine.paths.run

    def counted(batch: Batch) -> Steps:
        if not batch.phase:
            found.append(len(batch.chunks))
        return run(batch)

    monkeypatch.setattr(rig.engine.paths, "run", counted)
    return found


@pytest.mark.parametrize("shape", ["mla", "two_groups", "direct_per_layer"])
def test_a_batch_comes_back_as_it_was(make: Make, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of order, with a tail among them; few transfers for all of them."""
    mover = FaultyMover(CopyMover())
    rig = make(shape, mover)
    batches = sizes(rig, monkeypatch)
    group = len(rig.shape.groups) - 1
    numbers = np.random.default_rng(7).permutation(CHUNKS).tolist()
    wanted = {number: rig.bytes_of(blocks_of(number), group) for number in numbers}
    assert rig.store(1, [rig.chunk(n, blocks_of(n), group=group) for n in numbers]) == (OK,) * CHUNKS
    rig.wipe(0xEE)
    loads = [rig.chunk(n, blocks_of(numbers[n]), group=group) for n in numbers]
    loads[3] = rig.chunk(numbers[3], blocks_of(numbers[numbers[3]])[2:], group=group, first=2)
    assert rig.load(2, loads) == (OK,) * CHUNKS
    for at, (chunk, number) in enumerate(zip(loads, numbers, strict=True)):
        part = wanted[number][len(wanted[number]) // 2 if at == 3 else 0 :]
        assert rig.bytes_of(chunk.block_ids.tolist(), group) == part
    assert max(batches) >= 8
    pieces = 1 + len(rig.tensors) if rig.shape.direct else 1
    assert len(mover.submitted) <= pieces * len(batches)


def test_groups_and_jobs_do_not_share_a_batch(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the groups of a job alternate, each is one batch, and outcomes keep the job's order."""
    rig = make("two_groups")
    batches = sizes(rig, monkeypatch)
    chunks = [rig.chunk(n, blocks_of(n), group=n % 2) for n in range(8)]
    chunks[3] = replace(chunks[3], location=Location(0, chunks[3].location.offset, 4096))
    assert rig.store(1, chunks) == tuple(FAILED if n == 3 else OK for n in range(8))
    assert batches == [4, 4]
    rig.engine.submit_load(2, [rig.chunk(0, blocks_of(0))])
    rig.engine.submit_load(3, [rig.chunk(2, blocks_of(2))])
    assert rig.collect(2).outcomes == rig.collect(3).outcomes == (OK,)
    assert batches == [4, 4, 1, 1]


@pytest.mark.parametrize(("shape", "count"), [("per_layer", 4), ("per_layer", 1), ("direct_blocks", 4)])
def test_a_damaged_chunk_of_a_batch_is_the_only_one_that_is_corrupt(make: Make, shape: str, count: int) -> None:
    """In its header, its payload, or as another chunk's bytes: nothing is read again, and the others are served."""
    mover, (tensors, kv, layout) = FaultyMover(CopyMover()), kv_cache(SHAPES[shape], 1)
    rig = make(shape, mover, cache=(tensors, kv, replace(layout, blocks_per_chunk=count)))
    of = [blocks_of(number)[:count] for number in range(8)]
    wanted = [rig.bytes_of(blocks) for blocks in of]
    assert rig.store(1, [rig.chunk(n, of[n]) for n in range(8)]) == (OK,) * 8
    image = np.memmap(rig.slab.path, dtype=np.uint8, mode="r+")
    size = rig.location(0).slot_bytes
    image[2 * size + 40] ^= 1
    image[5 * size + HEADER_BYTES + 77] ^= 1
    image[6 * size : 7 * size] = image[7 * size : 8 * size]
    image.flush()
    rig.wipe(0xEE)
    reads = mover.submitted.count(Op.READ)
    expected = tuple(CORRUPT if n in {2, 5, 6} else OK for n in range(8))
    assert rig.load(2, [rig.chunk(n, of[n]) for n in range(8)]) == expected
    assert mover.submitted.count(Op.READ) <= reads + 2
    assert len(rig.collect(2).errors) == 3
    for blocks, outcome, right in zip(of, expected, wanted, strict=True):
        if outcome is OK or not rig.shape.direct:
            assert rig.bytes_of(blocks) == (right if outcome is OK else b"\xee" * len(right))


@pytest.mark.parametrize("shape", ["per_layer", "direct_blocks"])
@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.REFUSE])
def test_a_batch_that_fails_is_tried_singly(make: Make, shape: str, op: Op, kind: FaultKind) -> None:
    """If a transfer of many chunks fails, each is tried alone. Only a chunk that fails alone too is FAILED."""
    mover = FaultyMover(CopyMover())
    rig = make(shape, mover)
    chunks = [rig.chunk(n, blocks_of(n)) for n in range(8)]
    wanted = rig.bytes_of(range(32))
    if op is Op.READ:
        assert rig.store(1, chunks) == (OK,) * 8
        rig.wipe()
    mover.script = [Fault(mover.submitted.count(op), kind, op=op)]
    submit = rig.load if op is Op.READ else rig.store
    assert submit(2, chunks) == (OK,) * 8
    before = mover.submitted.count(op)
    # A direct batch ends at its first failure, and so does a single chunk whose header page fails.
    per_batch = 1 if kind is FaultKind.REFUSE or not rig.shape.direct else 2
    mover.script = [Fault(before, kind, op=op), Fault(before + per_batch, kind, op=op)]
    outcomes = submit(3, chunks)
    assert outcomes.count(FAILED) == 1
    assert outcomes.count(OK) == 7
    if op is Op.WRITE:
        mover.script = []
        rig.wipe()
        found = rig.load(4, chunks)
        assert all(outcome is OK for outcome, stored in zip(found, outcomes, strict=True) if stored is OK)
    assert rig.bytes_of([0, 1, 2, 3] if outcomes[0] is OK else [4, 5, 6, 7]) in wanted


@pytest.mark.parametrize("kind", ["tree", "objects"])
def test_files_and_objects_keep_a_transfer_each(make: Make, tmp_path: Path, kind: str) -> None:
    """One that hangs holds up no other chunk of its batch, in either direction."""
    inner = object_files(tmp_path / "o") if kind == "objects" else CopyMover()
    mover = FaultyMover(inner)
    rig = make("per_layer", mover, link=objects() if kind == "objects" else tree(tmp_path / "t"), load_timeout_s=3600.0)
    chunks = [rig.chunk(n, blocks_of(n)) for n in range(6)]
    wanted = rig.bytes_of(range(24))
    mover.script = [Fault(2, FaultKind.STUCK, op=Op.WRITE), Fault(3, FaultKind.STUCK, op=Op.READ)]
    rig.engine.submit_store(1, chunks)
    until(lambda: mover.submitted.count(Op.WRITE) == 6 and rig.engine.in_flight.chunks == 1)
    rig.engine.wait([1])
    rig.wipe(0xEE)
    assert rig.engine.finished() == []
    [job] = rig.engine._live
    [hung] = [chunk.key for chunk in job.chunks if chunk.state is not ChunkState.DONE]  # files are opened in any order
    rig.engine.submit_load(2, [chunk for chunk in chunks if chunk.key != hung])
    until(lambda: mover.submitted.count(Op.READ) == 5 and rig.engine.in_flight.chunks == 2)
    served = [n for n in range(6) if rig.bytes_of(blocks_of(n)) == wanted[n * len(wanted) // 6 :][: len(wanted) // 6]]
    assert len(served) == 4
    assert rig.engine.finished() == []
    mover.release()
    assert rig.collect(1).outcomes == (OK,) * 6
    assert rig.collect(2).outcomes == (OK,) * 5
    assert rig.load(3, chunks) == (OK,) * 6
    assert rig.bytes_of(range(24)) == wanted


@pytest.mark.parametrize("quarantine", [False, True])
def test_an_object_that_fails_is_the_only_one_of_its_batch(
    make: Make, tmp_path: Path, quarantine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They travel in one batch. The others are neither moved again nor held back, and only the failed one's slot, where
    late I/O may still touch it, is lost.
    """
    monkeypatch.setattr(paths, "QUARANTINE_S", 0.05)
    mover = FaultyMover(object_files(tmp_path / "o"))
    rig = make("per_layer", mover, link=objects())
    batches, staging = sizes(rig, monkeypatch), rig.engine.paths.link_memory.pools["host"]
    chunks = [rig.chunk(n, blocks_of(n)) for n in range(6)]
    wanted = rig.bytes_of(range(24))
    mover.script = [Fault(2, FaultKind.FAIL, op=op, quarantine=quarantine) for op in Op]
    stored = rig.store(1, chunks)
    assert sorted(stored, key=str) == sorted((FAILED, *[OK] * 5), key=str)
    lost = chunks[stored.index(FAILED)]
    mover.script = [Fault(7, FaultKind.FAIL, op=Op.READ, quarantine=quarantine)]
    assert rig.store(2, [lost]) == (OK,)
    rig.wipe(0xEE)
    assert rig.load(3, chunks) == (OK,) * 6
    assert rig.bytes_of(range(24)) == wanted
    rig.wipe(0xEE)
    loaded = rig.load(4, chunks)
    assert sorted(loaded, key=str) == sorted((FAILED, *[OK] * 5), key=str)
    arrived = b"".join(rig.bytes_of(blocks_of(n)) for n in range(6) if loaded[n] is OK)
    size = len(wanted) // 6
    assert arrived == b"".join(wanted[n * size :][:size] for n in range(6) if loaded[n] is OK)
    assert batches == [6, 1, 6, 6]
    assert (mover.submitted.count(Op.WRITE), mover.submitted.count(Op.READ)) == (7, 12)
    assert staging.usable == staging.slots_total - 2 * quarantine
    until(lambda: staging.free == staging.usable)


@pytest.mark.parametrize("name", ["begin_write", "end_write", "begin_read"])
def test_a_call_of_the_link_that_crashes_leaves_the_others_alone(
    make: Make, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are under way then: each is seen through, and none is made again."""
    rig = make("per_layer", link=tree(tmp_path / "t"))
    chunks = [rig.chunk(n, blocks_of(n)) for n in range(6)]
    if name == "begin_read":
        assert rig.store(1, chunks) == (OK,) * 6
    call, made = getattr(rig.link, name), []

    def crashing(*arguments: Any) -> Any:
        made.append(len(made))
        if made[-1] == 2:
            yield
            raise RuntimeError("a bug of the link's")
        return (yield from call(*arguments))

    monkeypatch.setattr(rig.link, name, crashing)
    submit = rig.load if name == "begin_read" else rig.store
    assert submit(2, chunks) == tuple(FAILED if n == 2 else OK for n in range(6))
    assert len(made) == 6


@pytest.mark.parametrize("shape", ["per_layer", "direct_blocks"])
@pytest.mark.parametrize(("op", "outcome"), [(Op.READ, FAILED), (Op.WRITE, DROPPED)])
def test_a_chunk_that_is_given_up_before_its_transfer_is_not_moved(
    make: Make, shape: str, op: Op, outcome: Outcome, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its blocks are needed while the link looks up where it goes. A chunk in staging needs them no more."""
    mover = FaultyMover(CopyMover())
    rig = make(shape, mover)
    chunks = [rig.chunk(n, blocks_of(n)) for n in range(2)]
    assert rig.store(1, chunks) == (OK,) * 2
    moved, name = mover.submitted.count(op), "begin_write" if op is Op.WRITE else "begin_read"
    begin = getattr(rig.link, name)

    def slow(*arguments: Any) -> Any:
        rig.engine.wait([2], 0.0)
        return (yield from begin(*arguments))

    monkeypatch.setattr(rig.link, name, slow)
    if op is Op.WRITE and not rig.shape.direct:
        outcome = OK
    assert (rig.store if op is Op.WRITE else rig.load)(2, chunks) == (outcome,) * 2
    assert (mover.submitted.count(op) == moved) == (outcome is not OK)
    assert "unexpected" not in caplog.text


class LookingMover(FaultyMover):
    """Reports which transfers have ended."""

    def __init__(self, inner: Mover) -> None:
        super().__init__(inner)
        self.pending: list[Transfer] = []

    def submit(self, *request: Any) -> Transfer:
        transfer = super().submit(*request)
        self.pending.append(transfer)
        return transfer

    def poll_all(self) -> float:
        before = len(self.pending)
        self.pending = [transfer for transfer in self.pending if self.poll(transfer) is TransferState.PENDING]
        return 0.0 if len(self.pending) < before else 0.005


def test_a_late_chunk_holds_its_batch_for_a_tenth_of_a_second(make: Make, tmp_path: Path) -> None:
    """Also if the mover reports which transfers have ended, and the pump leaves batches alone until then."""
    now_s, mover = [1000.0], LookingMover(CopyMover())
    rig = make("per_layer", mover, link=tree(tmp_path / "t"), clock=lambda: now_s[0])
    chunks = [rig.chunk(n, blocks_of(n)) for n in range(6)]
    assert rig.store(1, chunks) == (OK,) * 6
    mover.script = [Fault(0, FaultKind.LATE, op=Op.READ, amount=10**9, every=True)]
    now_s[0] += 1.0
    try:
        rig.engine.submit_load(2, chunks)
        until(lambda: mover.submitted.count(Op.READ) == 6)
        [batch] = rig.engine._batches
        late, *others = list(mover.pending)
        for transfer in others:
            transfer.polls_left = 0
        until(lambda: sum(transfer.state is TransferState.DONE for transfer in batch.transfers) == 5)
        assert rig.engine.in_flight.chunks == 6
        now_s[0] += 0.11
        until(lambda: rig.engine.in_flight.chunks == 1)
    finally:
        late.polls_left = 0
    assert rig.collect(2).outcomes == (OK,) * 6


def test_a_refused_chunk_gives_its_slot_back_at_once(make: Make, tmp_path: Path) -> None:
    """One whose file is gone, and one that the mover refuses, while the others of their batch hang."""
    mover = FaultyMover(CopyMover())
    rig = make("per_layer", mover, link=tree(tmp_path / "t"))
    staging = rig.engine.paths.link_memory.pools["host"]
    chunks = [rig.chunk(n, blocks_of(n)) for n in range(6)]
    assert rig.store(1, chunks[:5]) == (OK,) * 5
    until(lambda: staging.free == staging.slots_total)
    mover.script = [Fault(0, FaultKind.REFUSE, op=Op.READ), Fault(1, FaultKind.STUCK, op=Op.READ, every=True)]
    rig.engine.submit_load(2, chunks)
    until(lambda: mover.submitted.count(Op.READ) == 5 and staging.free == staging.slots_total - 4)
    mover.release()
    outcomes = rig.collect(2).outcomes
    assert (outcomes[5], outcomes.count(FAILED)) == (FAILED, 2)


def test_direct_loads_go_through_staging_once_one_was_late(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where those that end earlier part from it, which does not make it any younger."""
    now_s, mover = [1000.0], FaultyMover(CopyMover())
    rig = make("direct_blocks", mover, link=tree(tmp_path / "t"), clock=lambda: now_s[0], load_timeout_s=1e9)
    plan, in_flight = rig.engine.paths.link_memory.plans[0], rig.engine.in_flight
    chunks, wanted = [rig.chunk(n, blocks_of(n)) for n in range(3)], rig.bytes_of(range(12))
    assert rig.store(1, chunks) == (OK,) * 3
    rig.wipe()
    mover.script = [Fault(number, FaultKind.LATE, op=Op.READ, amount=10**9) for number in range(6)]
    rig.engine.submit_load(2, chunks)
    until(lambda: mover.submitted.count(Op.READ) == 6)
    transfers = rig.engine._batches[0].transfers

    def part(number: int, arrives_s: float) -> None:
        """A chunk arrives, and goes on without the others."""
        arrived = transfers[2 * number : 2 * number + 2]
        for transfer in arrived:
            transfer.polls_left = 0
        until(lambda: all(transfer.state is TransferState.DONE for transfer in arrived))
        now_s[0] = 1000.0 + arrives_s
        until(lambda: in_flight.chunks == 2 - number)

    try:
        part(0, 10.0)
        assert plan.path == "direct"
        now_s[0] = 1000.0 + 30.0
        until(lambda: plan.path == plan.packed)
        part(1, 40.0)
        assert plan.path == plan.packed
        assert rig.load(3, chunks[:1]) == (OK,)
    finally:
        for transfer in transfers:
            transfer.polls_left = 0
    assert rig.collect(2).outcomes == (OK,) * 3
    assert rig.bytes_of(range(12)) == wanted
    assert plan.path == plan.packed
    assert ["A load into KV blocks" in record.message for record in caplog.records] == [True], "once, parted or not"


def test_nothing_is_gathered_again_once_the_blocks_are_released(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write fails, and so does undoing it. The store must not restart: its blocks may have a new owner."""
    rig = make()
    wanted = rig.bytes_of(range(16))
    submit, fail_write, faults = rig.mover.submit, rig.link.fail_write, [0]

    def failing_submit(op: Op, *arguments: Any) -> Any:
        if op is Op.WRITE and not faults[0]:
            faults[0] = 1
            raise RuntimeError("the mover crashed")
        return submit(op, *arguments)

    def failing_undo(target: Any, error: str | None) -> None:
        if faults[0]:
            rig.wipe(0x77)
            raise OSError("cannot be undone")
        fail_write(target, error)

    monkeypatch.setattr(rig.mover, "submit", failing_submit)
    monkeypatch.setattr(rig.link, "fail_write", failing_undo)
    chunks = [rig.chunk(n, range(4 * n, 4 * n + 4)) for n in range(4)]
    assert rig.store(1, chunks) == (OK,) * 4
    assert rig.load(2, chunks) == (OK,) * 4
    assert rig.bytes_of(range(16)) == wanted
