"""A machine that cannot start threads for a moment: work waits, fails, or is done by the caller."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nixl_offload.identity.weights import digest_files
from nixl_offload.movers.base import MemoryRegion, Op, TransferState, open_file
from nixl_offload.movers.threaded import CopyMover
from nixl_offload.tiers.shared.prober import Prober
from nixl_offload.tiers.shared.search import Search, SearchKind
from nixl_offload.vllm.rank_tiers import RankTiers
from tests.unit.chain_rig import FILE, MEMORY, ChainRig
from tests.unit.engine_rig import until
from tests.unit.shared_rig import SLOT, MemoryStore, keys_of

PAGE = 4096

Shortage = Callable[..., None]


@pytest.fixture
def shortage(monkeypatch: pytest.MonkeyPatch) -> Shortage:
    """Return a function that sets how many thread starts still succeed, and how many fail after that."""
    start, left = threading.Thread.start, [0, 0]

    def start_or_refuse(thread: threading.Thread) -> None:
        if left[0]:
            left[0] -= 1
        elif left[1]:
            left[1] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)

    def begin(*, after: int = 0, refused: int = 1000) -> None:
        left[:] = after, refused

    return begin


def _threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


@pytest.mark.parametrize("after", [0, 1])
def test_a_copy_that_found_no_thread_never_touches_its_memory(tmp_path: Path, shortage: Shortage, after: int) -> None:
    """Not even later, when the pool has a thread for what was left in its queue."""
    path = tmp_path / "file"
    path.write_bytes(b"\1" * PAGE * 4)
    memory = np.frombuffer(mmap.mmap(-1, 4 * PAGE), dtype=np.uint8)
    with contextlib.closing(CopyMover(2)) as mover:
        handle = mover.register_memory(MemoryRegion(memory.ctypes.data, memory.nbytes))
        file = open_file(mover, str(path), 4 * PAGE, direct_io=False)

        def read(page: int) -> object:
            extent = np.array([[page * PAGE, PAGE]], dtype=np.int64)
            return mover.submit(Op.READ, handle, extent, file, extent)

        shortage(after=after)
        transfers = [read(page) for page in range(3)]
        until(lambda: all(mover.poll(each) is not TransferState.PENDING for each in transfers))
        refused = [page for page, each in enumerate(transfers) if each.state is TransferState.FAILED]
        assert refused or after
        for page in refused:
            assert "no thread can be started" in str(transfers[page].error)
        shortage(refused=0)
        last = read(3)
        until(lambda: mover.poll(last) is not TransferState.PENDING)
        assert last.state is TransferState.DONE
    for page, each in enumerate(transfers):
        assert set(memory[page * PAGE : (page + 1) * PAGE]) == {each.state is TransferState.DONE}


def test_a_shared_tier_looks_when_there_are_threads_again(shortage: Shortage) -> None:
    """No new lookup is needed: queued questions, and the trial that ends an outage, wait for a thread."""
    (key,), store = keys_of(1), MemoryStore()
    store.put(key.hex())
    ended: list[object] = []
    prober = Prober(store, witness_of=lambda key: (key.hex(), SLOT), on_answer=ended.append, on_end=ended.append)
    with contextlib.closing(prober):
        shortage()
        prober.search(Search(SearchKind.CHAIN, [key]))
        prober.do(lambda store: store.head("a"), lambda error: ended.append("a"))
        prober.take_in()
        assert not ended
        shortage(refused=0)
        until(lambda: prober.take_in() or len(ended) == 3)


def test_a_chain_closes_without_more_threads(tmp_path: Path, shortage: Shortage) -> None:
    rig = ChainRig(tmp_path)
    rig.put(FILE, 1)
    assert rig.load(1, [rig.chunk(1, FILE, range(4))])
    shortage()
    rig.close()
    until(lambda: not _threads("nixl-offload-pump") and not _threads("nixl-offload-memory"))


def test_tiers_that_are_parted_with_are_closed_without_more_threads(tmp_path: Path, shortage: Shortage) -> None:
    rig = ChainRig(tmp_path)
    named: Any = SimpleNamespace(tiers=[SimpleNamespace(kind="memory", where="")])
    tiers = RankTiers(rig.chain, named, SimpleNamespace(), 0, [None])  # type: ignore[arg-type]
    shortage()
    tiers.open({MEMORY: object()}, number=1)  # type: ignore[dict-item]
    assert tiers.failed == {MEMORY}
    assert not rig.chain.open_tiers
    until(lambda: not _threads("nixl-offload-pump") and not _threads("nixl-offload-memory"))
    rig.close()


def test_weights_are_read_by_as_many_threads_as_there_are(tmp_path: Path, shortage: Shortage) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights" * 1000)
    whole = digest_files(str(tmp_path), threads=4)
    shortage(after=2)
    assert digest_files(str(tmp_path), threads=4) == whole
    until(lambda: not _threads("weights-"))
