"""The threads behind a tier: the journal's writer, metadata calls, the copy mover, and the mover over a store.

Small enough that all schedules are tried which deviate from the default once, and many that do twice.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nixl_offload.errors import MoverError
from nixl_offload.index.durable import DurableIndex
from nixl_offload.movers.base import MemoryRegion, Op, TransferState
from nixl_offload.movers.copy import CopyMover
from nixl_offload.movers.handles import open_file
from nixl_offload.movers.launcher import Launcher
from nixl_offload.movers.queued import QueuedMover
from nixl_offload.movers.store import StoreMover
from nixl_offload.movers.tracked import ExtentTransfer
from nixl_offload.tiers.shared_dir.calls import Call, CallThreads
from nixl_offload.types import Key, Location
from tests.model.chain_world import Bucket, ObjectStore
from tests.prove.races import primitives
from tests.prove.races.exploring import Run, Scenario

PAGE = 4096
GEOMETRY = {"extent_bytes": "1", "world_size": "1"}


def _key(number: int) -> Key:
    return Key(bytes([number]) * 36)


def _rows(path: str) -> dict[Key, int]:
    journal, rows = DurableIndex.open(path, GEOMETRY, batch_delay_s=0.0)
    found = {key: location.offset for key, location in _pairs(rows)}
    assert journal.close(10.0)
    return found


def _pairs(rows: object) -> list[tuple[Key, Location]]:
    return [
        (Key(key), Location(0, int(offset), int(size)))
        for batch in rows  # type: ignore[attr-defined]
        for key, offset, size in zip(batch.keys, batch.offsets, batch.slot_bytes, strict=True)
    ]


def journal(run: Run) -> None:
    """Puts, deletions, a flush and a clearing, while the writer writes; closed at any moment, with time."""
    path = str(run.path / "index")
    written, rows = DurableIndex.open(path, GEOMETRY, batch_delay_s=0.001)
    assert not list(rows)
    expected: dict[Key, int] = {}
    for number in range(4):
        written.put(_key(number), Location(0, number * PAGE, PAGE))
        expected[_key(number)] = number * PAGE
        if number == 1:
            written.delete(_key(0))
            del expected[_key(0)]
    if run.seed % 2:
        assert written.flush(10.0), "it was not written in time, and nothing hangs"
        assert not written._queue, "flushed, and something waits"
    if run.seed // 2 % 2:
        written.clear()
        expected = {_key(9): 9 * PAGE}
        written.put(_key(9), Location(0, 9 * PAGE, PAGE))
    assert written.close(10.0), "it was not written in time, and nothing hangs"
    assert _rows(path) == expected, "the journal has something else than it was told"


def journal_lost(run: Run) -> None:
    """Somebody else owns the file from some moment on: what was written before stays, and nothing is added."""
    import threading

    path = str(run.path / "index")
    written, _ = DurableIndex.open(path, GEOMETRY, batch_delay_s=0.001)
    written.put(_key(1), Location(0, PAGE, PAGE))
    assert written.flush(10.0)
    healer = threading.Thread(target=written.abandon)
    healer.start()
    written.put(_key(2), Location(0, 2 * PAGE, PAGE))
    healer.join()
    written.put(_key(3), Location(0, 3 * PAGE, PAGE))
    written.flush(0.01)  # whatever it says, it returns
    written.close(10.0)
    found = _rows(path)
    assert _key(1) in found
    assert _key(3) not in found, "written after it was abandoned"


def calls(run: Run) -> None:
    """Each result is used or discarded, once, whenever a call is given up; threads may be hard to get."""
    chance = run.random
    threads = CallThreads("calls", threads=2)
    primitives.no_threads[0] = chance.choice((0, 0, 1))
    made: list[int] = []
    ended: list[int] = []

    def work(number: int) -> int:
        time.sleep(0.001 * (number % 3))
        made.append(number)
        return number

    begun: list[tuple[int, Call[int]]] = []
    for number in range(4):
        try:
            begun.append((number, threads.start(lambda number=number: work(number), discard=ended.append)))
        except RuntimeError:
            assert primitives.no_threads[0] == 0, "refused without a reason"
    for number, call in begun:
        if number % 2:
            call.abandon()
        else:
            assert call.wait(5.0), "a call does not end although nothing hangs"
            ended.append(call.result())
    threads.close(10.0)
    assert sorted(ended) == sorted(made) == [number for number, _ in begun], f"{made} were made, {ended} ended"
    assert not threads.pending


class _Area:
    """Memory and a file of some pages."""

    def __init__(self, mover: CopyMover | StoreMover, path: Path, pages: int) -> None:
        self.memory = np.frombuffer(mmap.mmap(-1, pages * PAGE), dtype=np.uint8).reshape(pages, PAGE)
        self.mover = mover
        self.handle = mover.register_memory(MemoryRegion(self.memory.ctypes.data, pages * PAGE))

    def submit(self, op: Op, page: int, file: int, offset: int) -> object:
        mem = np.array([[page * PAGE, PAGE]], dtype=np.int64)
        fil = np.array([[offset, PAGE]], dtype=np.int64)
        return self.mover.submit(op, self.handle, mem, file, fil)


def copying(run: Run) -> None:
    """The copy mover: reads and writes, closed at any moment; what has ended touches no memory any more."""
    chance = run.random
    mover = CopyMover(2)
    area = _Area(mover, run.path, 6)
    path = run.path / "file"
    content = np.arange(6 * PAGE, dtype=np.uint32).astype(np.uint8)
    path.write_bytes(content.tobytes())
    file = open_file(mover, str(path), 6 * PAGE, direct_io=False)
    primitives.no_threads[0] = chance.choice((0, 0, 1, 2))
    transfers = []
    for page in range(4):
        area.memory[page] = 0xAA
        transfers.append(area.submit(Op.READ, page, file, page * PAGE))
    for _ in range(chance.choice((0, 3, 1000))):
        if all(mover.poll(each) is not TransferState.PENDING for each in transfers):
            break
        time.sleep(0.0005)
    ended = [page for page, each in enumerate(transfers) if mover.poll(each) is not TransferState.PENDING]
    for page in ended:
        if transfers[page].state is TransferState.DONE:
            same = np.array_equal(area.memory[page], content[page * PAGE : (page + 1) * PAGE])
            assert same, "DONE, and something else was read"
        area.memory[page] = 0x55
    mover.close()
    assert all(each.state is not TransferState.PENDING for each in transfers), "closed, and a transfer has not ended"
    for page in ended:
        assert (area.memory[page] == 0x55).all(), "a transfer that had ended wrote to its memory"


def over_store(run: Run) -> None:
    """The mover over a store: puts and gets, some of what is absent, closed at any moment."""
    chance = run.random
    bucket = Bucket()
    mover = StoreMover(ObjectStore(bucket, write_s=0.001), threads=2, close_timeout_s=5.0)
    area = _Area(mover, run.path, 6)
    primitives.no_threads[0] = chance.choice((0, 0, 1))
    written, read = [], []
    for page in range(2):
        area.memory[page] = page + 1
        file = mover.open_object(f"new{page}", PAGE)
        written.append(area.submit(Op.WRITE, page, file, 0))
    bucket.objects["old"] = bytes([9]) * PAGE, 0.0
    for page, name in ((3, "old"), (4, "absent")):
        area.memory[page] = 0xAA
        read.append(area.submit(Op.READ, page, mover.open_object(name, PAGE), 0))
    transfers = [*written, *read]
    for _ in range(chance.choice((0, 2, 1000))):
        if all(mover.poll(each) is not TransferState.PENDING for each in transfers):
            break
        time.sleep(0.0005)
    mover.close()
    assert all(each.state is not TransferState.PENDING for each in transfers), "closed, and a transfer has not ended"
    for page, each in enumerate(written):
        if each.state is TransferState.DONE:
            assert bucket.objects[f"new{page}"][0] == bytes([page + 1]) * PAGE, "DONE, and something else was written"
    if read[0].state is TransferState.DONE:
        assert (area.memory[3] == 9).all(), "DONE, and something else was read"
    assert read[1].state is TransferState.FAILED, "what is absent was read"


def retried(run: Run) -> None:
    """A get that fails is asked about on a thread of its own, and tried again; closed at any moment."""
    bucket = Bucket()
    store = ObjectStore(bucket)
    inner = StoreMover(store, threads=1, close_timeout_s=5.0)
    mover = QueuedMover(inner, ObjectStore(bucket), at_once=2, pause_s=0.002, within_s=1.0)
    area = _Area(mover, run.path, 2)  # type: ignore[arg-type]
    bucket.objects["late"] = bytes([9]) * (PAGE - 1), 0.0
    there = area.submit(Op.READ, 0, mover.open_object("late", PAGE), 0)
    absent = area.submit(Op.READ, 1, mover.open_object("absent", PAGE), 0)
    rounds = run.random.choice((0, 3, 1000))
    for round_ in range(rounds):
        states = [mover.poll(each) for each in (there, absent)]  # type: ignore[arg-type]
        if TransferState.PENDING not in states:
            break
        if round_ == 2:
            bucket.objects["late"] = bytes([9]) * PAGE, 0.0
        time.sleep(0.0005)
    else:
        assert rounds < 1000, "it never ends"
    mover.close()
    for each in (there, absent):
        assert mover.poll(each) is not TransferState.PENDING, "closed, and a transfer has not ended"
    assert absent.state is TransferState.FAILED


def launching(run: Run) -> None:
    """Calls on a launcher end in their order, and all of them before its end."""
    launcher, done = Launcher("launcher"), []
    futures = [launcher.submit(done.append, number) for number in range(3)]
    failed = launcher.submit(_refuse)
    launcher.end(wait=run.seed % 2 == 0)
    for future in futures:
        future.result(5.0)
    assert done == [0, 1, 2]
    assert isinstance(failed.exception(5.0), MoverError)


def _refuse() -> None:
    raise MoverError("no")


def _scenario(play: Callable[[Run], None], seeds: int = 100, early_s: float = 0.002) -> Scenario:
    return Scenario(play, early_s=early_s, seeds=seeds, watched=WATCHED, allowed=ALLOWED)


WATCHED = (Call, CallThreads, CopyMover, DurableIndex, ExtentTransfer, Launcher, QueuedMover, StoreMover)
ALLOWED = {
    "Call._error": "read once it has ended",
    "Call._value": "read once it has ended",
    "CallThreads.ended_s": "set by whichever thread has ended a call: of two that end at once either will do",
    "_StoreTransfer.absent": "read once it has ended",
    "_StoreTransfer.failure": "read once it has ended",
    "DurableIndex._abandoned": "looked at between two batches: one that is being written cannot be stopped",
    "DurableIndex._stopping": "a call that comes while it is closed or abandoned may be written or not",
}
SCENARIOS = {
    "journal": _scenario(journal, 4),
    "journal lost": _scenario(journal_lost, 1),
    "calls": _scenario(calls),
    "copying": _scenario(copying),
    "over a store": _scenario(over_store),
    "retried": _scenario(retried),
    "launching": _scenario(launching, 2),
}
