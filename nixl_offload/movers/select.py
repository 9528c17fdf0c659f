"""Which mover this machine can really run: each candidate must make a round trip first, through a file or a bucket.

Threading: call it in the process and on the thread that will drive the mover. The scratch file is private and removed.
Probe objects are called ``probe-<random hex>``, directly under the prefix, and deleted afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final, Literal, NamedTuple

import numpy as np

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import MoverError, MoverUnavailableError, NixlOffloadError, StoreError
from nixl_offload.hardware.gds import gds_report
from nixl_offload.keep import keep_forever
from nixl_offload.movers.base import Extents, MemoryKind, MemoryRegion, Mover, Op, move, open_file
from nixl_offload.movers.kvikio import KvikioMover
from nixl_offload.movers.nixl import PLUGINS, NixlMover, object_plugin
from nixl_offload.movers.nixl_objects import NixlObjectMover
from nixl_offload.movers.threaded import CopyMover, StoreMover
from nixl_offload.stores.s3 import S3Address, open_store
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
_OBJECT_HELP: Final = (
    "check endpoint, bucket, region, credentials and what they may do; obj needs the plugin of nixl[cu12]'s wheel"
)
_OK: Final = "round trip ok"
_PACKS: Final = "; packs through host memory"
_OTHER_BYTES: Final = "the round trip came back with other bytes"


class Probe(NamedTuple):
    """What became of one candidate."""

    name: str
    ok: bool
    reason: str


class ProbedMover(NamedTuple):
    """The mover to use, and how it was chosen, best candidate first."""

    mover: Mover
    report: tuple[Probe, ...]


# Files


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
    """Return a bare mover of files: ``copy``, ``kvikio`` or one of ``PLUGINS``. Starts nothing yet.

    ``threads`` is for gds_mt and kvikio.
    """
    if name == "copy":
        return CopyMover()
    if name == "kvikio":
        return KvikioMover(threads)
    if name == "gds_mt":
        return NixlMover(replace(PLUGINS[name], params={"thread_count": str(threads)}))
    return NixlMover(PLUGINS[name])


def open_mover(
    kind: MoverChoice, memory_kind: MemoryKind, directory: str, *, threads: int = 8, scratch: MemoryRegion | None = None
) -> ProbedMover:
    """Open the best mover of ``kind`` that can really move bytes between this memory and a file in ``directory``.

    ``threads`` is as in ``make_mover``. ``scratch`` is at least ``SCRATCH_BYTES`` of the memory to probe VRAM with,
    page-aligned; None takes it from torch's current CUDA device. Says at INFO what was chosen, passed over, and why.
    Raises MoverUnavailableError when nothing of ``kind`` can run, with the reasons and what would help.
    """

    def try_out(name: str) -> tuple[Mover, str]:
        mover = make_mover(name, threads=threads)
        # Movers that cannot touch VRAM are used through host memory, so that is what they are tried with.
        probed_kind = memory_kind if memory_kind in mover.memory_kinds else MemoryKind.DRAM
        with _closed_on_error(mover):
            note = probe_round_trip(mover, probed_kind, directory, scratch if probed_kind is memory_kind else None)
            if name == "gds_mt" and probed_kind is MemoryKind.VRAM:
                probe_round_trip(mover, MemoryKind.DRAM, directory)  # a mover of its own for host memory
        return mover, note + ("" if probed_kind is memory_kind else _PACKS)

    refusal = f"mover {kind!r} cannot move {memory_kind.value} to files in {directory}"
    return _first_that_works(candidates(kind, memory_kind), try_out, f"files in {directory}", refusal)


def probe_round_trip(mover: Mover, kind: MemoryKind, directory: str, scratch: MemoryRegion | None = None) -> str:
    """Move a page from a scratch file to memory and on to another place of the file, and compare. Returns a remark.

    The memory itself is never looked at, so it may be on a device. The mover stays open. Raises MoverError.
    """
    try:
        with tempfile.TemporaryFile(buffering=0, dir=directory) as scratch_file:  # a kill leaves nothing
            fd = scratch_file.fileno()
            pattern = os.urandom(PAGE_BYTES)
            os.pwrite(fd, pattern + bytes(3 * PAGE_BYTES), 0)
            os.fsync(fd)
            region, memory = (scratch, None) if scratch is not None else _scratch_memory(kind)
            with _kept_on_error(memory):
                registered = mover.register_memory(region)
                file = open_file(mover, f"/proc/self/fd/{fd}", SCRATCH_BYTES, direct_io=True)
                move(mover, lambda: mover.submit(Op.READ, registered, _page(1), file, _page(0)), _PROBE_TIMEOUT_S)
                move(mover, lambda: mover.submit(Op.WRITE, registered, _page(1), file, _page(2)), _PROBE_TIMEOUT_S)
                bounces = isinstance(mover, KvikioMover) and mover.path_of(file) == "compat"
                mover.close_file(file)
                mover.unregister_memory(registered)
            arrived = os.pread(fd, PAGE_BYTES, 2 * PAGE_BYTES)
            around = os.pread(fd, PAGE_BYTES, PAGE_BYTES) + os.pread(fd, PAGE_BYTES, 3 * PAGE_BYTES)
    except OSError as error:
        raise MoverError(f"scratch file in {directory}: {error.strerror}") from error
    if arrived != pattern or any(around):
        raise MoverError(_OTHER_BYTES)
    if bounces and kind is MemoryKind.VRAM:
        return f"{_OK}; KvikIO's compatibility mode: it bounces through page-locked host memory"
    if mover.name == "gds_mt" or kind is MemoryKind.VRAM:
        return f"{_OK}; {gds_report(directory).verdict}"
    return _OK


# Objects


def make_object_mover(name: str, tier: S3Config) -> StoreMover | NixlObjectMover:
    """A mover of objects: ``obstore`` or ``obj``, not tried out. Raises what says that it cannot be made here."""
    timeout_s = tier.request_timeout_s
    if name != "obj":
        return StoreMover(open_store(tier), threads=tier.connections, close_timeout_s=timeout_s)
    # Half as many again as there are threads in the plugin, so that none is idle until somebody polls; no more, because
    # what waits inside it cannot be called back.
    at_once = tier.connections + tier.connections // 2
    mover = NixlObjectMover(object_plugin(tier), open_store(tier), at_once=at_once, close_timeout_s=timeout_s)
    with _closed_on_error(mover):
        mover.connect()
    return mover


def open_object_mover(tier: S3Config, memory_kind: MemoryKind) -> ProbedMover:
    """Open the best mover of ``tier.mover`` for this memory and the bucket.

    ``auto`` is obj for device memory, if that can really move bytes; else obstore, which costs less processor time
    (docs/decisions/0011-s3-measurements.md). obstore is not tried out: a server that refuses today may take transfers
    later. Logs the choice, and why others were passed over. Takes a few times ``tier.request_timeout_s`` at most.
    Raises MoverUnavailableError when no mover can run, with reasons and help; NotSupportedError without a client.
    """
    needs_device = memory_kind is MemoryKind.VRAM and tier.mover == "auto"
    names = ["obj", "obstore"] if needs_device else ["obstore" if tier.mover == "auto" else tier.mover]
    where = S3Address.of(tier).where

    def try_out(name: str) -> tuple[Mover, str]:
        mover, note = make_object_mover(name, tier), "not tried out"
        with _closed_on_error(mover):
            probed_kind = memory_kind if memory_kind in mover.memory_kinds else MemoryKind.DRAM
            if name == "obj" and needs_device and probed_kind is not memory_kind:
                raise MoverError(f"takes no {memory_kind.value} here")
            if isinstance(mover, NixlObjectMover):
                _probe_object(mover, probed_kind, 2 * tier.request_timeout_s)
                note = _OK
        return mover, note + ("" if probed_kind is memory_kind else _PACKS)

    refusal = f"mover {tier.mover!r} cannot move {memory_kind.value} to {where} ({_OBJECT_HELP})"
    return _first_that_works(names, try_out, f"objects in {where}", refusal)


def _probe_object(mover: NixlObjectMover, kind: MemoryKind, timeout_s: float) -> None:
    """Get a page that the store has put, put it under another name, and compare, for ``timeout_s`` each.

    The memory itself is never looked at, so it may be on a device. Raises MoverError, StoreError.
    """
    names, (region, memory) = [f"probe-{secrets.token_hex(8)}" for _ in range(2)], _scratch_memory(kind)
    pattern, arrived = secrets.token_bytes(PAGE_BYTES), bytearray(PAGE_BYTES)
    try:
        with _kept_on_error(memory):
            mover.store.write(names[0], memoryview(pattern))  # if the server refuses, it says why; NIXL would not
            registered = mover.register_memory(region)
            source, target = (mover.open_object(name, PAGE_BYTES) for name in names)
            move(mover, lambda: mover.submit(Op.READ, registered, _page(0), source, _page(0)), timeout_s)
            move(mover, lambda: mover.submit(Op.WRITE, registered, _page(0), target, _page(0)), timeout_s)
            mover.close_file(source)
            mover.close_file(target)
            mover.unregister_memory(registered)
            mover.store.read_into(names[1], 0, memoryview(arrived))
    finally:
        with contextlib.suppress(StoreError):
            mover.store.delete(names)
    if arrived != pattern:
        raise MoverError(_OTHER_BYTES)


# Both


def _first_that_works(
    names: Iterable[str], try_out: Callable[[str], tuple[Mover, str]], what: str, refusal: str
) -> ProbedMover:
    """Return the first mover that ``try_out`` makes, and log why. Raises MoverUnavailableError, with all reasons."""
    report: list[Probe] = []
    for name in names:
        try:
            mover, note = try_out(name)
        except NixlOffloadError as error:
            help_text = _HELP.get(name)
            advice = "" if help_text is None or isinstance(error.__cause__, ImportError) else f" ({help_text})"
            report.append(Probe(name, False, str(error).removeprefix(f"{name}: ") + advice))
            continue
        passed = "".join(f"; passed over {probe.name}: {probe.reason}" for probe in report)
        logger.info("%s are moved by %s (%s)%s", what, name, note, passed)
        report.append(Probe(name, True, note))
        return ProbedMover(mover, tuple(report))
    reasons = "; ".join(f"{probe.name}: {probe.reason}" for probe in report)
    raise MoverUnavailableError(f"{refusal}: {reasons}")


@contextlib.contextmanager
def _closed_on_error(mover: Mover) -> Iterator[None]:
    try:
        yield
    except BaseException:
        mover.close()
        raise


@contextlib.contextmanager
def _kept_on_error(memory: object) -> Iterator[None]:
    """Late I/O must not find memory of a failed probe in other hands."""
    try:
        yield
    except MoverError:
        keep_forever(memory)
        raise


def _page(number: int) -> Extents:
    return np.array([[number * PAGE_BYTES, PAGE_BYTES]], dtype=np.int64)


def _scratch_memory(kind: MemoryKind) -> tuple[MemoryRegion, object]:
    """Memory to probe with, page-aligned, and what keeps it alive. Raises MoverError."""
    if kind is MemoryKind.DRAM:
        pages = mmap.mmap(-1, SCRATCH_BYTES)
        return MemoryRegion(ctypes.addressof(ctypes.c_char.from_buffer(pages)), SCRATCH_BYTES), pages
    try:
        import torch
    except ImportError as error:
        raise MoverError("no torch to take device memory from") from error
    if not torch.cuda.is_available():
        raise MoverError("no CUDA device")
    tensor = torch.empty(SCRATCH_BYTES + PAGE_BYTES, dtype=torch.uint8, device="cuda")
    address = -(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    return MemoryRegion(address, SCRATCH_BYTES, kind, tensor.device.index), tensor
