"""Proves: the host slab is aligned, present and disjoint; what the machine or a control group cannot give is refused
before anything is allocated, with a capacity that would do; memory goes back; progress is told.
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nixl_offload.engine import host as host_module
from nixl_offload.engine import host_pages
from nixl_offload.engine.host import HUGE_PAGE_BYTES, HostSlab
from nixl_offload.errors import LayoutError, TierError
from nixl_offload.hardware import memory_limits
from nixl_offload.types import PAGE_BYTES
from nixl_offload.units import parse_size

MIB = 1 << 20
V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def machine(root: Path, *, available_mib: int = 1024, cgroup: str = "0::/") -> Path:
    """A ``/proc`` and ``/sys`` of which only the memory matters."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available_mib << 10} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup + "\n")
    return root


def group(folder: Path, limit: str, usage: str, limit_bytes: object, used_bytes: int, statistics: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit).write_text(f"{limit_bytes}\n")
    (folder / usage).write_text(f"{used_bytes}\n")
    (folder / "memory.stat").write_text(statistics)


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
    slab.close()


@pytest.mark.parametrize(("offset", "length"), [(-4096, 4096), (100, 4096), (8192, 4096), (4096, 8192), (0, 0)])
def test_slots_outside_or_off_a_page_are_refused(offset: int, length: int) -> None:
    slab = HostSlab(memory_bytes=8192, relay_slots=0, slot_bytes=4096)
    with pytest.raises(LayoutError):
        slab.slot(offset, length)
    slab.close()
    with pytest.raises(LayoutError):
        slab.slot(0, 4096)


def test_memory_is_present_at_once_and_gone_after_the_last_view(caplog: pytest.LogCaptureFixture) -> None:
    """Prefaulted: resident before anything is written. ``close`` frees it unless a view is still held."""
    gc.collect()
    before = resident_bytes()
    with caplog.at_level(logging.INFO):
        slab = HostSlab(memory_bytes=96 * MIB, relay_slots=2, slot_bytes=2 * MIB)
    assert resident_bytes() - before > 90 * MIB
    (line,) = [record.getMessage() for record in caplog.records if "Host memory" in record.getMessage()]
    assert "100MiB (memory tier 96MiB, 2 relay slots of 2MiB), pageable" in line
    view = slab.slot(4096, 4096).memory
    slab.close()
    slab.close()
    view[:] = 7
    assert (view == 7).all()
    del view
    gc.collect()
    assert resident_bytes() - before < 40 * MIB


def test_a_kernel_that_cannot_prefault_is_helped_by_touching(monkeypatch: pytest.MonkeyPatch) -> None:
    """An advice that no kernel knows gives the same EINVAL as MADV_POPULATE_WRITE before Linux 5.14."""
    monkeypatch.setattr(host_pages, "_MADV_POPULATE_WRITE", 9999)
    before = resident_bytes()
    slab = HostSlab(memory_bytes=64 * MIB, relay_slots=0, slot_bytes=4096)
    assert resident_bytes() - before > 60 * MIB
    slab.close()


def test_a_child_process_does_not_inherit_the_memory() -> None:
    """Nor would a core dump have it: the kernel marks the mapping ``dc`` and ``dd``."""
    slab = HostSlab(memory_bytes=4 * MIB, relay_slots=0, slot_bytes=4096)
    flags, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (head := line.split()[0]):
            begin, end = (int(part, 16) for part in head.split("-"))
            inside = begin <= slab.region.address < end
        elif inside and head == "VmFlags:":
            flags = line.split()[1:]
    assert {"dc", "dd"} <= set(flags)
    slab.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_page_locking_without_cuda_is_a_clear_error_and_gives_the_memory_back() -> None:
    before = resident_bytes()
    with pytest.raises(TierError, match=r"page-locked.*RLIMIT_MEMLOCK") as caught:
        HostSlab(memory_bytes=64 * MIB, relay_slots=0, slot_bytes=4096, pinned=True)
    assert caught.value.cause == "full"
    caught.value.__traceback__ = None
    del caught
    gc.collect()
    assert resident_bytes() - before < 40 * MIB


def test_memory_that_cuda_cannot_page_lock_stays_pageable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in confidential computing. It is said once, however many pieces there are, and nothing is unlocked."""
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
    assert [record.getMessage()[:27] for record in caplog.records if record.levelno == logging.WARNING] == [
        "Host memory stays pageable:"
    ]
    assert "16MiB (memory tier 16MiB, 0 relay slots of 4KiB), pageable" in caplog.text


# -- what can be had ------------------------------------------------------------------------------------------------


def test_too_much_is_refused_before_it_is_touched_with_a_capacity_that_would_do(tmp_path: Path) -> None:
    """The capacity that the message names is accepted; a little more than the reserve allows is not."""
    root = machine(tmp_path, available_mib=160)
    before = resident_bytes()
    with pytest.raises(TierError) as caught:
        HostSlab(memory_bytes=200 * MIB, relay_slots=2, slot_bytes=MIB, sharers=2, root=root)
    words = str(caught.value)
    assert caught.value.cause == "full"
    assert "202MiB of host memory were asked for, 200MiB of it for the memory tier" in words
    assert "160MiB can be had, limited by the machine (MemAvailable)" in words
    assert "a capacity of 296MiB (for 2 ranks) would do" in words
    assert resident_bytes() - before < 32 * MIB
    HostSlab(memory_bytes=parse_size("296MiB") // 2, relay_slots=2, slot_bytes=MIB, root=root).close()
    with pytest.raises(TierError, match="would do"):
        HostSlab(memory_bytes=parse_size("298MiB") // 2, relay_slots=2, slot_bytes=MIB, root=root)
    with pytest.raises(TierError, match="no room for a memory tier"):
        HostSlab(memory_bytes=MIB, relay_slots=200, slot_bytes=MIB, root=root)


def test_memory_that_others_take_meanwhile_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one machine fill their slabs at the same time; each looked before any had begun.

    How much of 8 MiB is there by then depends on where the memory lies.
    """
    monkeypatch.setattr(host_pages, "STEP_BYTES", 8 * MIB)
    root = machine(tmp_path, available_mib=1024)

    def others_take_it(done_bytes: int, total_bytes: int) -> None:
        (root / "proc/meminfo").write_text("MemAvailable: 1024 kB\n")

    before = resident_bytes()
    with pytest.raises(TierError, match=r"[1-9]MiB can be had") as caught:
        HostSlab(memory_bytes=64 * MIB, relay_slots=0, slot_bytes=4096, root=root, progress=others_take_it)
    assert caught.value.cause == "full"
    assert "64MiB of host memory were asked for" in str(caught.value)
    assert resident_bytes() - before < 40 * MIB


@pytest.mark.parametrize(
    ("version", "where"), [(2, ""), (2, "pod/engine"), (1, ""), (1, "pod/engine")], ids=lambda part: str(part) or "top"
)
def test_limits_of_control_groups_hold_at_the_group_and_above_it(tmp_path: Path, version: int, where: str) -> None:
    """Page cache that the kernel would give up does not count. "max", or almost all there is, is no limit."""
    if version == 2:
        root, files = machine(tmp_path, cgroup="0::/pod/engine"), ("memory.max", "memory.current")
        top, none, caches = root / "sys/fs/cgroup", "max", f"anon 5\ninactive_file {60 * MIB}\n"
    else:  # In a container the group's own path is not mounted: its files lie at the mount itself.
        root, files = machine(tmp_path, cgroup="5:cpu:/x\n4:memory:/pod/engine"), V1_FILES
        top, none = root / "sys/fs/cgroup/memory", str(2**63 - 4096)
        caches = f"total_inactive_file {50 * MIB}\ntotal_active_file {10 * MIB}\n"
    group(top / "pod/engine", *files, none, 0, "")
    assert memory_limits.room(root).available_bytes == 1024 * MIB
    group(top / where, *files, 300 * MIB, 250 * MIB, caches)
    found = memory_limits.room(root)
    assert found.available_bytes == 110 * MIB
    assert str(top / where / files[0]) in found.limited_by


def test_a_machine_that_says_nothing_limits_nothing(tmp_path: Path) -> None:
    assert memory_limits.room(tmp_path).available_bytes >= 1 << 60
    real = memory_limits.room()
    assert 0 < real.available_bytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
