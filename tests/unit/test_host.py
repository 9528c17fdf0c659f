"""Proves: the host slab is aligned, present and disjoint; what the machine or a control group cannot give is refused
before anything is allocated, with a capacity that would do; memory goes back; an error leaves no helper at work.
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from nixl_offload.engine import host as host_module
from nixl_offload.engine.host import HUGE_PAGE_BYTES, HostSlab, populate
from nixl_offload.errors import LayoutError, TierError
from nixl_offload.hardware import machine
from nixl_offload.hardware.machine import Room
from nixl_offload.types import PAGE_BYTES
from nixl_offload.units import parse_size

MIB = 1 << 20
V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def flags_of(address: int) -> Iterator[tuple[int, int, set[str]]]:
    """Begin and end of each mapping from the one at ``address`` on, with the kernel's flags."""
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
        elif name == "VmFlags:" and end > address:
            yield begin, end, set(rest.split())


# -- the slab -------------------------------------------------------------------------------------------------------


def test_slots_lie_where_their_offsets_say_relay_slots_behind_the_tier() -> None:
    slab = HostSlab(memory_bytes=5 * PAGE_BYTES - 1, relay_slots=3, slot_bytes=5000)
    assert slab.memory_bytes == 5 * PAGE_BYTES
    assert slab.relay_offsets == (5 * PAGE_BYTES, 7 * PAGE_BYTES, 9 * PAGE_BYTES)
    assert slab.region.length_bytes == slab.length_bytes == 11 * PAGE_BYTES
    assert slab.region.address % HUGE_PAGE_BYTES == 0
    slots = [slab.slot(offset, 2 * PAGE_BYTES) for offset in (0, 2 * PAGE_BYTES, *slab.relay_offsets)]
    for number, slot in enumerate(slots):
        assert slot.memory.ctypes.data == slab.region.address + slot.offset_bytes
        slot.memory[:] = number
    assert [set(slot.memory.tolist()) for slot in slots] == [{0}, {1}, {2}, {3}, {4}]
    for offset, length in ((-4096, 4096), (100, 4096), (11 * PAGE_BYTES, 4096), (10 * PAGE_BYTES, 8192), (0, 0)):
        with pytest.raises(LayoutError):
            slab.slot(offset, length)
    slab.close()
    with pytest.raises(LayoutError):
        slab.slot(0, 4096)


def test_memory_is_present_at_once_and_gone_after_the_last_view(caplog: pytest.LogCaptureFixture) -> None:
    """Resident before anything is written; no child process and no core dump has it. ``close`` frees it unless a view
    is still held.
    """
    before = resident_bytes()
    with caplog.at_level(logging.INFO):
        slab = HostSlab(memory_bytes=96 * MIB, relay_slots=2, slot_bytes=2 * MIB)
    assert resident_bytes() - before > 90 * MIB
    assert {"dc", "dd"} <= next(flags_of(slab.region.address))[2]
    (line,) = [record.getMessage() for record in caplog.records if "Host memory" in record.getMessage()]
    assert "100MiB (memory tier 96MiB, 2 relay slots of 2MiB), pageable" in line
    view = slab.slot(4096, 4096).memory
    slab.close()
    slab.close()
    view[:] = 7
    assert (view == 7).all()
    del view
    assert resident_bytes() - before < 40 * MIB


def test_a_kernel_that_cannot_prefault_is_helped_by_touching(monkeypatch: pytest.MonkeyPatch) -> None:
    """An advice that no kernel knows gives the same EINVAL as MADV_POPULATE_WRITE before Linux 5.14."""
    monkeypatch.setattr(host_module, "_MADV_POPULATE_WRITE", 9999)
    before = resident_bytes()
    slab = HostSlab(memory_bytes=64 * MIB, relay_slots=0, slot_bytes=4096)
    assert resident_bytes() - before > 60 * MIB
    slab.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_page_locking_without_cuda_is_a_clear_error_and_gives_the_memory_back() -> None:
    before = resident_bytes()
    with pytest.raises(TierError, match=r"page-locked.*RLIMIT_MEMLOCK") as caught:
        HostSlab(memory_bytes=64 * MIB, relay_slots=0, slot_bytes=4096, pinned=True)
    assert caught.value.cause == "full"
    caught.value.__traceback__ = None
    del caught
    assert resident_bytes() - before < 40 * MIB


def test_memory_that_cuda_cannot_page_lock_stays_pageable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in confidential computing. It is logged once for all pieces, and nothing is unlocked."""
    refused, forgotten = list[int](), list[int]()

    def refuse(address: int, length_bytes: int, flags: int) -> int:
        refused.append(address)
        return 801

    monkeypatch.setattr(host_module, "_cudart", lambda: SimpleNamespace(cudaHostRegister=refuse))
    runtime = SimpleNamespace(cudaGetLastError=lambda: forgotten.append(801))
    monkeypatch.setattr(host_module, "cuda_runtime", lambda: runtime)
    monkeypatch.setattr(host_module, "PIN_PIECE_BYTES", 4 * MIB)
    with caplog.at_level(logging.INFO):
        slab = HostSlab(memory_bytes=16 * MIB, relay_slots=0, slot_bytes=4096, pinned=True)
    assert not slab.pinned
    slab.slot(0, 4096).memory[:] = 7
    slab.close()
    assert (len(refused), forgotten) == (1, [801]), "torch would raise what is not forgotten at its next kernel"
    assert caplog.text.count("Host memory stays pageable:") == 1
    assert "16MiB (memory tier 16MiB, 0 relay slots of 4KiB), pageable" in caplog.text


# -- bringing it in -------------------------------------------------------------------------------------------------


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "STEP_BYTES", HUGE_PAGE_BYTES)


def mapped(length_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory that is not yet present, aligned to a huge page."""
    area = mmap.mmap(-1, length_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    everything: npt.NDArray[np.uint8] = np.frombuffer(area, dtype=np.uint8)
    begin = -everything.ctypes.data % HUGE_PAGE_BYTES
    area.madvise(mmap.MADV_HUGEPAGE, begin, length_bytes)
    return everything[begin : begin + length_bytes]


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("where", ["helper", "room", "consumer"])
def test_an_error_comes_out_and_nobody_is_left_at_work(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, begun = host_module._bring_in, []

    def fails(memory: npt.NDArray[np.uint8]) -> None:
        begun.append(memory.ctypes.data)
        if where == "helper" and len(begun) == 2:
            raise TierError("host memory cannot be had", cause="full")
        real(memory)

    def room(wanted_bytes: int) -> None:
        if where == "room" and wanted_bytes <= 56 * MIB:
            raise TierError("others have it", cause="full")

    def consume() -> None:
        with closing(populate(mapped(64 * MIB), 2, room)) as ready:
            for ready_bytes in ready:
                if where == "consumer" and ready_bytes >= 4 * MIB:
                    raise TierError("cannot be locked", cause="full")

    monkeypatch.setattr(host_module, "_bring_in", fails)
    with pytest.raises(TierError):
        consume()
    assert len(begun) < 32
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nixl-offload-populate")]


@pytest.mark.usefixtures("steps")
def test_where_no_thread_can_be_started_the_caller_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> Future[None]:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(host_module.ThreadPoolExecutor, "submit", refuses)
    with closing(populate(mapped(4 * MIB), 2, lambda _: None)) as ready:
        assert list(ready) == [2 * MIB, 4 * MIB]


# -- what can be had ------------------------------------------------------------------------------------------------


def test_too_much_is_refused_before_it_is_touched_with_a_capacity_that_would_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The capacity in the message is accepted; a little more is not."""
    monkeypatch.setattr(machine, "room", lambda: Room(160 * MIB, "the machine (MemAvailable)"))
    before = resident_bytes()
    with pytest.raises(TierError) as caught:
        HostSlab(memory_bytes=200 * MIB, relay_slots=2, slot_bytes=MIB, sharers=2)
    words = str(caught.value)
    assert caught.value.cause == "full"
    assert "202MiB of host memory were asked for, 200MiB of it for the memory tier" in words
    assert "160MiB can be had, limited by the machine (MemAvailable)" in words
    assert "a capacity of 296MiB (for 2 ranks) would do" in words
    assert resident_bytes() - before < 32 * MIB
    HostSlab(memory_bytes=parse_size("296MiB") // 2, relay_slots=2, slot_bytes=MIB).close()
    with pytest.raises(TierError, match="would do"):
        HostSlab(memory_bytes=parse_size("298MiB") // 2, relay_slots=2, slot_bytes=MIB)
    with pytest.raises(TierError, match="no room for a memory tier"):
        HostSlab(memory_bytes=MIB, relay_slots=200, slot_bytes=MIB)


def test_memory_that_others_take_meanwhile_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one machine fill their slabs at the same time; each looked before any had begun."""
    monkeypatch.setattr(host_module, "STEP_BYTES", 8 * MIB)
    rooms = iter([1024 * MIB] * 3)
    monkeypatch.setattr(machine, "room", lambda: Room(next(rooms, MIB), "the machine (MemAvailable)"))
    before = resident_bytes()
    with pytest.raises(TierError, match="17MiB can be had") as caught:
        HostSlab(memory_bytes=64 * MIB, relay_slots=0, slot_bytes=4096)
    assert caught.value.cause == "full"
    caught.value.__traceback__ = None
    del caught
    assert resident_bytes() - before < 40 * MIB


@pytest.mark.parametrize(
    ("version", "where"), [(2, ""), (2, "pod/engine"), (1, ""), (1, "pod/engine")], ids=lambda part: str(part) or "top"
)
def test_limits_of_control_groups_hold_at_the_group_and_above_it(tmp_path: Path, version: int, where: str) -> None:
    """Page cache that the kernel would give up does not count. "max", or almost all there is, is no limit. A machine
    that says nothing limits nothing.
    """
    assert machine.room(str(tmp_path)).available_bytes >= 1 << 60
    assert 0 < machine.room().available_bytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {1024 << 10} kB\n")

    def group(folder: Path, limit_bytes: object, used_bytes: int, statistics: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in ((files[0], limit_bytes), (files[1], used_bytes), ("memory.stat", statistics)):
            (folder / name).write_text(f"{text}\n")

    if version == 2:
        groups, files = "0::/pod/engine", ("memory.max", "memory.current")
        top, none, caches = tmp_path / "sys/fs/cgroup", "max", f"anon 5\ninactive_file {60 * MIB}\n"
    else:  # In a container the group's own path is not mounted: its files lie at the mount itself.
        groups, files = "5:cpu:/x\n4:memory:/pod/engine", V1_FILES
        top, none = tmp_path / "sys/fs/cgroup/memory", str(2**63 - 4096)
        caches = f"total_inactive_file {50 * MIB}\ntotal_active_file {10 * MIB}\n"
    (tmp_path / "proc/self/cgroup").write_text(groups + "\n")
    group(top / "pod/engine", none, 0, "")
    assert machine.room(str(tmp_path)).available_bytes == 1024 * MIB
    group(top / where, 300 * MIB, 250 * MIB, caches)
    found = machine.room(str(tmp_path))
    assert found.available_bytes == 110 * MIB
    assert str((top / where / files[0]).relative_to(tmp_path)) in found.limited_by
