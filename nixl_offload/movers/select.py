"""Which mover this machine can really run: each candidate must make a round trip through a scratch file first.

Threading: call it in the process and on the thread that will drive the mover. The scratch file is private and removed.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from nixl_offload.errors import MoverError, MoverUnavailableError
from nixl_offload.hardware.gds import gds_report
from nixl_offload.keep import keep_forever
from nixl_offload.movers.base import Extents, MemoryKind, MemoryRegion, Mover, Op, Transfer, TransferState, open_file
from nixl_offload.movers.copy import CopyMover
from nixl_offload.movers.kvikio import KvikioMover
from nixl_offload.movers.nixl import NixlMover
from nixl_offload.movers.nixl_plugins import PLUGINS
from nixl_offload.types import PAGE_BYTES

logger = logging.getLogger(__name__)

MoverChoice = Literal["auto", "gds_mt", "kvikio", "posix", "copy"]

SCRATCH_BYTES = 4 * PAGE_BYTES
_PROBE_TIMEOUT_S = 20.0
"""Long, because a busy disk may keep a write for many seconds. But five movers may be tried, and closing one that hangs
takes half a minute more: vLLM gives its engine ten minutes to start (VLLM_ENGINE_READY_TIMEOUT_S)."""

_HELP = {
    "gds_mt": "it needs an NVIDIA GPU, libcufile and libcudart on the library path, and a filesystem that cuFile takes",
    "kvikio": "it needs an NVIDIA driver and the kvikio package that fits torch's CUDA",
    "posix_uring": "io_uring may be disabled (kernel.io_uring_disabled, or a container's seccomp profile)",
    "posix_aio": "the machine may be out of aio contexts (fs.aio-max-nr)",
    "copy": "check that the directory exists and can be written",
}


class Probe(NamedTuple):
    """What became of one candidate."""

    name: str
    ok: bool
    reason: str


class ProbedMover(NamedTuple):
    """The mover to use, and how it was chosen, best candidate first."""

    mover: Mover
    report: tuple[Probe, ...]


def candidates(kind: MoverChoice, memory_kind: MemoryKind) -> list[str]:
    """Names of movers to try, best first. Pure.

    For VRAM, POSIX and copy stand at the end: they cannot touch it, so choosing them means packing through host memory.
    """
    posix = ["posix_uring", "posix_aio"]
    if kind == "posix":
        return posix
    if kind != "auto":
        return [kind]
    device = ["gds_mt", "kvikio"] if memory_kind is MemoryKind.VRAM else []
    return [*device, *posix, "copy"]


def make_mover(name: str, *, threads: int = 8) -> Mover:
    """A bare mover by name: ``copy``, ``kvikio`` or one of ``nixl.PLUGINS``. Starts nothing yet.

    ``threads`` is for gds_mt and kvikio.
    """
    if name == "copy":
        return CopyMover()
    if name == "kvikio":
        return KvikioMover(threads)
    return NixlMover(PLUGINS[name], params={"thread_count": str(threads)} if name == "gds_mt" else None)


def open_mover(
    kind: MoverChoice,
    memory_kind: MemoryKind,
    directory: str,
    *,
    threads: int = 8,
    scratch: MemoryRegion | None = None,
) -> ProbedMover:
    """Open the best mover of ``kind`` that can really move bytes between this memory and a file in ``directory``.

    ``threads`` is as in ``make_mover``. ``scratch`` is at least ``SCRATCH_BYTES`` of the memory
    to probe VRAM with, page-aligned; None takes it from torch's current CUDA device. Says at INFO what was chosen and
    what was passed over, and why.
    Raises MoverUnavailableError when nothing of ``kind`` can run, with the reasons and what would help.
    """
    report: list[Probe] = []
    advice: dict[str, str] = {}
    names = candidates(kind, memory_kind)
    for name in names:
        mover = make_mover(name, threads=threads)
        # Movers that cannot touch VRAM are used through host memory, so that is what they are tried with.
        probed_kind = memory_kind if memory_kind in mover.memory_kinds else MemoryKind.DRAM
        try:
            note = probe_round_trip(mover, probed_kind, directory, scratch if probed_kind is memory_kind else None)
        except MoverError as error:
            mover.close()
            report.append(Probe(name, False, str(error).removeprefix(f"{name}: ")))
            advice[name] = "" if isinstance(error.__cause__, ImportError) else f" ({_HELP[name]})"
            continue
        if probed_kind is not memory_kind:
            note += "; packs through host memory"
        report.append(Probe(name, True, note))
        passed = "".join(f"; passed over {probe.name}: {probe.reason}" for probe in report[:-1])
        logger.info("files in %s are moved by %s (%s)%s", directory, name, note, passed)
        return ProbedMover(mover, tuple(report))
    reasons = "; ".join(f"{probe.name}: {probe.reason}{advice[probe.name]}" for probe in report)
    raise MoverUnavailableError(f"mover {kind!r} cannot move {memory_kind.value} to files in {directory}: {reasons}")


def probe_round_trip(mover: Mover, kind: MemoryKind, directory: str, scratch: MemoryRegion | None = None) -> str:
    """Move a page from a scratch file to memory and on to another place of the file, and compare. Returns a remark.

    The memory itself is never looked at, so it may be on a device. The mover stays open. Raises MoverError.
    """
    try:
        with tempfile.TemporaryFile(buffering=0, dir=directory) as file:  # without a name: a kill leaves nothing
            fd = file.fileno()
            pattern = os.urandom(PAGE_BYTES)
            os.pwrite(fd, pattern + bytes(3 * PAGE_BYTES), 0)
            os.fsync(fd)
            region, keep = (scratch, None) if scratch is not None else scratch_memory(kind)
            try:
                bounces = _round_trip(mover, region, f"/proc/self/fd/{fd}")
            except MoverError:
                # Late I/O must not find this memory in other hands.
                keep_forever(keep)
                raise
            arrived = os.pread(fd, PAGE_BYTES, 2 * PAGE_BYTES)
            around = os.pread(fd, PAGE_BYTES, PAGE_BYTES) + os.pread(fd, PAGE_BYTES, 3 * PAGE_BYTES)
            del keep
    except OSError as error:
        raise MoverError(f"scratch file in {directory}: {error.strerror}") from error
    if arrived != pattern or any(around):
        raise MoverError("the round trip came back with other bytes")
    if bounces:
        return f"round trip ok; {bounces}"
    if mover.name == "gds_mt" or kind is MemoryKind.VRAM:
        return f"round trip ok; {gds_report(directory).verdict}"
    return "round trip ok"


def _round_trip(mover: Mover, region: MemoryRegion, path: str) -> str:
    """Return how the mover bounces, where it does so by itself.

    After an error memory and file stay with the mover, which may still be at them; closing it lets them go.
    """
    memory = mover.register_memory(region)
    file = open_file(mover, path, SCRATCH_BYTES, direct_io=True)
    bounces = ""
    if isinstance(mover, KvikioMover) and region.kind is MemoryKind.VRAM and mover.path_of(file) == "compat":
        bounces = "KvikIO's compatibility mode: it bounces through page-locked host memory"
    move_page(mover, lambda: mover.submit(Op.READ, memory, page(1), file, page(0)), _PROBE_TIMEOUT_S)
    move_page(mover, lambda: mover.submit(Op.WRITE, memory, page(1), file, page(2)), _PROBE_TIMEOUT_S)
    mover.close_file(file)
    mover.unregister_memory(memory)
    return bounces


def page(number: int) -> Extents:
    """The extent of page ``number``."""
    return np.array([[number * PAGE_BYTES, PAGE_BYTES]], dtype=np.int64)


def move_page(mover: Mover, submit: Callable[[], Transfer], timeout_s: float) -> None:
    """Poll what ``submit`` starts until it is done. Raises MoverError; then I/O may be in flight still."""
    transfer = submit()
    deadline = time.monotonic() + timeout_s
    while mover.poll(transfer) is TransferState.PENDING:
        if time.monotonic() > deadline:
            raise MoverError(f"a page did not move within {timeout_s:.0f} s")
        time.sleep(0.0002)
    if transfer.state is TransferState.FAILED:
        raise MoverError(transfer.error or "failed")


def scratch_memory(kind: MemoryKind, length_bytes: int = SCRATCH_BYTES) -> tuple[MemoryRegion, object]:
    """Memory to probe with, page-aligned, and what keeps it alive. Raises MoverError."""
    if kind is MemoryKind.DRAM:
        pages = mmap.mmap(-1, length_bytes)
        return MemoryRegion(ctypes.addressof(ctypes.c_char.from_buffer(pages)), length_bytes), pages
    try:
        import torch
    except ImportError as error:
        raise MoverError("no torch to take device memory from") from error
    if not torch.cuda.is_available():
        raise MoverError("no CUDA device")
    tensor = torch.empty(length_bytes + PAGE_BYTES, dtype=torch.uint8, device="cuda")
    address = -(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    return MemoryRegion(address, length_bytes, kind, tensor.device.index), tensor
