"""Proves, over real files, what a shared directory is like; that objects are written whole; that a read cut short
unnoticed is found out; and that a link out of use costs nothing and comes back.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.errors import TierError
from nixl_offload.movers.base import Op
from nixl_offload.movers.threaded import CopyMover
from nixl_offload.tiers.shared import links as object_links
from nixl_offload.tiers.shared.links import TreeLink
from nixl_offload.types import Outcome
from tests.contract.suites.faulty_mover import Fault, FaultKind, FaultyMover
from tests.hostile import HostileFilesystem
from tests.unit.engine_rig import CHUNK_BLOCKS, Clock, Rig, rigs, until
from tests.unit.link_rig import drafts, object_files, objects, shards, tree

OK, FAILED, CORRUPT, DROPPED = Outcome.OK, Outcome.FAILED, Outcome.CORRUPT, Outcome.DROPPED
Make = Callable[..., Rig]
make = pytest.fixture(rigs)


# -- a shared directory ---------------------------------------------------------------------------------------------


def test_a_file_in_use_stays_young(make: Make, tmp_path: Path) -> None:
    """A load makes an old file young again, and leaves a young one alone: oldest first is least recently used."""
    rig = make("per_layer", link=tree(tmp_path / "shared"))
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)
    (path,) = shards(tmp_path / "shared")
    for job, (age_s, touched) in enumerate(((7200, True), (600, False)), start=1):
        before_s = int(time.time()) - age_s
        os.utime(path, (before_s, before_s))
        assert rig.load(job, [rig.chunk(0, [5, 6, 7, 8])]) == (OK,)
        assert (path.stat().st_mtime > before_s + 1) is touched


@pytest.mark.parametrize("refused", ["direct", "read"])
def test_a_filesystem_without_direct_io_is_used_buffered(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    """It refuses O_DIRECT when a file is opened, or, as some do, at each read. One warning, and everything works."""
    filesystem = HostileFilesystem()
    filesystem.refuse(errno.EINVAL, refused)
    rig = make("mla", link=tree(tmp_path / "shared", filesystem=filesystem))
    wanted = rig.bytes_of([1, 2, 3, 4])
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4])]) == rig.store(1, [rig.chunk(1, [5, 6, 7, 8])]) == (OK,)
    assert rig.load(2, [rig.chunk(0, [9, 10, 11, 12])]) == (OK,)
    assert rig.bytes_of([9, 10, 11, 12]) == wanted
    assert sum("cannot do direct I/O" in record.getMessage() for record in caplog.records) == 1


def test_readers_never_see_half_a_file(make: Make, tmp_path: Path) -> None:
    """Two engines write one key over and over while a third reads it: each read is whole, none is CORRUPT."""
    root = tmp_path / "shared"
    writers = [make("packed_blocks", link=tree(root), seed=4) for _ in range(2)]
    reader = make("packed_blocks", link=tree(root), seed=5)
    wanted = writers[0].bytes_of([1, 2, 3, 4])
    seen = []
    for job in range(40):
        for writer in writers:
            writer.engine.submit_store(job, [writer.chunk(0, [1, 2, 3, 4])])
        seen += reader.load(job, [reader.chunk(0, [5, 6, 7, 8])])
        if seen[-1] is OK:
            assert reader.bytes_of([5, 6, 7, 8]) == wanted
        for writer in writers:
            assert writer.collect(job).outcomes == (OK,)
    assert set(seen[1:]) == {OK}
    assert len(shards(root)) == 1
    assert not drafts(root)


# -- objects --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["checksum", "header"])
@pytest.mark.parametrize(("shape", "first"), [("padded", 0), ("padded", 1), ("packed_blocks", 0), ("packed_blocks", 3)])
def test_a_read_cut_short_unnoticed_is_found_out(
    make: Make, tmp_path: Path, verify: str, shape: str, first: int
) -> None:
    """A mover reports DONE, but the end is missing, from any point: never a wrong token.

    The slot holds the wanted chunk itself, with the beginning of another one over it: so its last block is right, and
    where the cut comes after the header its header is.
    """
    mover = FaultyMover(object_files(tmp_path / "objects"))
    rig = make(shape, mover, link=objects(), staging_slots=2, verify=verify)
    source, block_bytes = [1, 2, 3, 4], rig.layout.groups[0].block_bytes
    wanted = rig.bytes_of(source[first:])
    assert rig.store(0, [rig.chunk(0, source), rig.chunk(1, [5, 6, 7, 8])]) == (OK, OK)
    total = HEADER_BYTES + (CHUNK_BLOCKS - first) * block_bytes
    found = []
    for job, cut in enumerate(range(0, total, total // 29), start=1):
        mover.script = []
        assert rig.load(10 * job, [rig.chunk(0, [20, 21, 22, 23])]) == (OK,)
        assert rig.load(10 * job + 1, [rig.chunk(1, [24, 25])]) == (OK,)
        mover.script = [Fault(mover.submitted.count(Op.READ), FaultKind.SHORT, op=Op.READ, amount=cut)]
        blocks = list(range(30, 34 - first))
        rig.wipe(0xEE)
        (outcome,) = rig.load(10 * job + 2, [rig.chunk(0, blocks, first=first)])
        if outcome is OK:
            assert rig.bytes_of(blocks) == wanted
        else:
            assert set(rig.bytes_of(blocks)) == {0xEE}
        found.append(outcome)
    assert CORRUPT in found
    assert set(found) <= {OK, CORRUPT}


@pytest.mark.parametrize("failing", ["loads", "stores"])
def test_a_bucket_that_fails_is_left_alone_and_tried_again(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    """After eight failures in a row no more of the kind go; the other kind goes on; one trial brings it back."""
    clock, mover = Clock(), FaultyMover(object_files(tmp_path / "objects"))
    rig = make("per_layer", mover, link=objects(), clock=clock)
    assert rig.store(0, [rig.chunk(n, [1, 2, 3, 4]) for n in range(2)]) == (OK, OK)
    bad, good = (rig.load, rig.store) if failing == "loads" else (rig.store, rig.load)
    everything = [Fault(len(mover.submitted), FaultKind.FAIL, every=True)]
    mover.script = everything
    for job in range(1, 1 + object_links.FAILURES):
        assert bad(job, [rig.chunk(0, [5, 6, 7, 8])]) == (FAILED,)
    submitted = len(mover.submitted)
    for job in range(20, 30):
        assert bad(job, [rig.chunk(0, [5, 6, 7, 8])] * 3) == (FAILED,) * 3
    assert rig.collect(29).errors == ("storage is out of use: io",)
    (status,) = rig.engine.statuses()
    assert (status.trouble, status.loads_fail, status.stores_fail) == ("io", failing == "loads", failing == "stores")
    assert len(mover.submitted) == submitted
    mover.script = []
    assert good(40, [rig.chunk(1, [1, 2, 3, 4])]) == (OK,)
    mover.script, submitted = everything, len(mover.submitted)
    clock.ahead_s += 1.5
    assert bad(50, [rig.chunk(0, [5, 6, 7, 8])] * 3) == (FAILED,) * 3
    assert len(mover.submitted) == submitted + 1, "one trial, no more"
    mover.script = []
    clock.ahead_s += 2.5
    assert bad(51, [rig.chunk(0, [5, 6, 7, 8])]) == (OK,)
    assert sum("disabled (" in record.getMessage() for record in caplog.records) == 1


def test_that_an_object_is_gone_is_an_answer(make: Make, tmp_path: Path) -> None:
    """A bucket that comes back empty is in use again after the first load that finds nothing."""
    clock, mover = Clock(), FaultyMover(object_files(tmp_path / "objects"))
    rig = make("per_layer", mover, link=objects(), clock=clock)
    mover.script = [Fault(number, FaultKind.FAIL) for number in range(object_links.FAILURES)]
    assert rig.load(0, [rig.chunk(0, [5, 6, 7, 8])] * object_links.FAILURES) == (FAILED,) * object_links.FAILURES
    assert rig.link.trouble == "io"
    clock.ahead_s += 1.5
    assert rig.load(1, [rig.chunk(0, [5, 6, 7, 8])]) == (FAILED,)
    assert rig.link.trouble == "none"
    assert rig.store(2, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)


def test_no_load_waits_for_room_that_a_hanging_bucket_takes_up(make: Make, tmp_path: Path) -> None:
    """When GETs without answers hold all staging slots, loads fail at once, even if a trial is due."""
    clock, mover = Clock(), FaultyMover(object_files(tmp_path / "objects"))
    rig = make("per_layer", mover, link=objects(), clock=clock, staging_slots=8)
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)
    mover.script = [Fault(0, FaultKind.STUCK, op=Op.READ, every=True)]
    rig.engine.submit_load(1, [rig.chunk(0, [5, 6, 7, 8])] * 20)
    until(lambda: mover.submitted.count(Op.READ) == 8)
    clock.ahead_s += 31
    assert rig.collect(1).outcomes == (FAILED,) * 20
    until(lambda: rig.link.trouble == "timeout")
    for job in (2, 3):
        rig.engine.submit_load(job, [rig.chunk(0, [5, 6, 7, 8])] * 4)
        assert rig.collect(job).outcomes == (FAILED,) * 4
        assert rig.collect(job).errors == ("storage is out of use: timeout",)
        clock.ahead_s += 2
    assert mover.submitted.count(Op.READ) == 8
    mover.release()
    until(lambda: rig.load(int(clock.ahead_s * 1e9) + len(rig.results), [rig.chunk(0, [5, 6, 7, 8])]) == (OK,))


# -- threads --------------------------------------------------------------------------------------------------------


def test_a_hung_filesystem_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    """The interpreter exits at once, although a call on a thread of the link never returns."""
    program = (
        "import threading\n"
        "from nixl_offload.calls import CallThreads\n"
        "threads = CallThreads('hung')\n"
        "threads.start(threading.Event().wait)\n"
        "threads.close(0.05)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_calls_that_wait_for_a_thread_are_not_overdue_while_others_end(tmp_path: Path) -> None:
    """A slow directory answers eight calls every four seconds. Only one that was taken up and does not end is given up,
    however many others end meanwhile.
    """
    now_s, gates, begun = [0.0], [threading.Event() for _ in range(26)], list[int]()
    link = tree(tmp_path / "shared")(CopyMover(), lambda: now_s[0])
    assert isinstance(link, TreeLink)
    answers: dict[int, str] = {}

    def wait_for(number: int) -> Generator[None, None, None]:
        """Wait as a load does for its file."""
        call = link._calls.start(lambda: begun.append(number) or gates[number].wait(60))
        try:
            yield from link._answer(link._calls, call, object_links.BEGIN_LIMIT_S)
        except TierError as error:
            answers[number] = error.cause
        else:
            answers[number] = "ok"

    def push() -> None:
        for each in waiting:
            next(each, None)

    waiting = [wait_for(number) for number in range(25)]
    try:
        push()
        for taken_up in (8, 16, 24):
            until(lambda: len(begun) == taken_up)  # noqa: B023
            now_s[0] += 4.0
            push()
            assert len(answers) == taken_up - 8
            for number in begun:
                gates[number].set()
        until(lambda: link._calls.pending == 1)
        push()
        assert answers == dict.fromkeys(range(24), "ok")
        now_s[0] += 4.0
        waiting.append(wait_for(25))
        gates[25].set()
        push()
        until(lambda: len(begun) == 26 and link._calls.pending == 1)
        now_s[0] += 1.5
        push()
        assert (answers[25], answers[24]) == ("ok", "io")
    finally:
        for gate in gates:
            gate.set()
        link.close()
