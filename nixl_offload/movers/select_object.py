"""Which mover reaches this bucket: the first that can really put a small object and get it back.

Threading: call it in the process and on the thread that will drive the mover.
Probe objects are called ``probe-<random hex>``, directly under the prefix, and deleted afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import secrets
from typing import Final

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import MoverError, MoverUnavailableError, NixlOffloadError, StoreError
from nixl_offload.keep import keep_forever
from nixl_offload.movers.base import MemoryKind, Mover, Op
from nixl_offload.movers.nixl import NixlMover
from nixl_offload.movers.nixl_plugins import object_plugin
from nixl_offload.movers.queued import NOT_ANSWERING, QueuedMover
from nixl_offload.movers.select import Probe, ProbedMover, move_page, page, scratch_memory
from nixl_offload.movers.store import StoreMover
from nixl_offload.stores.base import Store
from nixl_offload.stores.s3 import open_store
from nixl_offload.types import PAGE_BYTES

logger = logging.getLogger(__name__)

_PASSING: Final = NOT_ANSWERING | {"full"}
_HELP: Final = (
    "check endpoint, bucket, region, credentials and what they may do; obj needs the plugin of nixl[cu12]'s wheel"
)


def candidates(choice: str, memory_kind: MemoryKind) -> list[tuple[str, MemoryKind]]:
    """Movers to try, best first, and the memory that each is to take: device memory before host memory. Pure.

    For host memory obstore is first: it costs less processor time (docs/decisions/0011-s3-measurements.md).
    """
    names = ["obstore", "obj"] if choice == "auto" else [choice]
    on_device = ["obj"] if memory_kind is MemoryKind.VRAM and "obj" in names else []
    return [(name, memory_kind) for name in on_device] + [(name, MemoryKind.DRAM) for name in names]


def open_object_mover(tier: S3Config, memory_kind: MemoryKind) -> ProbedMover:
    """Open the best mover of ``tier.mover`` that can really move bytes between this memory and the bucket.

    A server that does not answer, is overloaded or full is no reason to fail, nor are credentials that may read but not
    write: then the first mover that can be made is returned, unproved. Logs the choice, and why others were passed
    over. Takes a few times ``tier.request_timeout_s`` at most.
    Raises MoverUnavailableError when no mover can run, or the server answers and refuses, with reasons and help;
    NotSupportedError when no client is installed.
    """
    report: list[Probe] = []
    with contextlib.closing(open_store(tier)) as store:
        trouble = _trouble(store)
        unproved = trouble is not None and trouble.cause in _PASSING
        for name, kind in [] if unproved else candidates(tier.mover, memory_kind):
            try:
                mover = _proved(name, tier, kind, store, trouble)
            except NixlOffloadError as error:
                report.append(_failed(name, error))
                continue
            reason = "round trip ok" + ("" if kind is memory_kind else "; packs through host memory")
            logger.info("objects in %s are moved by %s (%s)%s", store.where, name, reason, _passed(report))
            return ProbedMover(mover, (*report, Probe(name, True, "round trip ok")))
        if trouble is not None and (unproved or (trouble.cause == "denied" and _may_look(store))):
            report = []
            for name, _ in candidates(tier.mover, MemoryKind.DRAM):
                try:
                    mover = make_mover(name, tier)
                except NixlOffloadError as error:
                    report.append(_failed(name, error))
                    continue
                logger.warning(
                    "objects in %s will be moved by %s as far and as soon as the server lets it: %s%s%s",
                    store.where,
                    name,
                    "" if unproved else "it can be read at most: ",
                    trouble,
                    _passed(report),
                )
                reason = "not proved, for the server did not do what it was asked"
                return ProbedMover(mover, (*report, Probe(name, True, reason)))
        elif trouble is not None and all(probe.name != store.name for probe in report):
            report.append(_failed(store.name, trouble))  # NIXL's plugin cannot tell causes
    reasons = "; ".join(f"{probe.name}: {probe.reason}" for probe in report)
    text = f"mover {tier.mover!r} cannot move {memory_kind.value} to {store.where}: {reasons} ({_HELP})"
    raise MoverUnavailableError(text)


def make_mover(name: str, tier: S3Config) -> Mover:
    """A mover of ``candidates``, not tried out. Raises what says that it cannot be made here."""
    timeout_s = tier.request_timeout_s
    if name != "obj":
        return StoreMover(open_store(tier), threads=tier.connections, close_timeout_s=timeout_s)
    bare = NixlMover(object_plugin(tier), close_timeout_s=timeout_s)
    bare.connect()
    # Half as many again as there are threads in the plugin, so that none is idle until somebody polls; no more, because
    # what waits inside it cannot be called back.
    at_once = tier.connections + tier.connections // 2
    return QueuedMover(bare, open_store(tier), at_once=at_once, close_timeout_s=timeout_s)


def _proved(name: str, tier: S3Config, kind: MemoryKind, store: Store, trouble: StoreError | None) -> Mover:
    """Make ``name`` and send a page round, unless ``store``, which is the same client, has just done that."""
    if name == store.name and trouble is not None:
        raise trouble
    mover = make_mover(name, tier)
    probe = f"probe-{secrets.token_hex(8)}"
    try:
        if kind not in mover.memory_kinds:
            raise MoverError(f"takes no {kind.value} here")
        if name != store.name:
            probe_object(mover, kind, probe, 2 * tier.request_timeout_s)
    except MoverError:
        mover.close()
        raise
    finally:
        if name != store.name:
            with contextlib.suppress(StoreError):
                store.delete([probe])
    return mover


def probe_object(mover: Mover, kind: MemoryKind, name: str, timeout_s: float) -> None:
    """Put a page under ``name``, get it back into another page and compare them, for ``timeout_s`` each.

    Memory of a device is never looked at: there it is enough that the transfers succeed. The mover stays open.
    Raises MoverError.
    """
    region, keep = scratch_memory(kind)
    pattern = secrets.token_bytes(PAGE_BYTES)
    memory = mover.register_memory(region)
    target = mover.open_object(name, PAGE_BYTES)
    if kind is MemoryKind.DRAM:
        ctypes.memmove(region.address, pattern, PAGE_BYTES)
    try:
        move_page(mover, lambda: mover.submit(Op.WRITE, memory, page(0), target, page(0)), timeout_s)
        move_page(mover, lambda: mover.submit(Op.READ, memory, page(2), target, page(0)), timeout_s)
        if kind is MemoryKind.DRAM:
            between, arrived = (ctypes.string_at(region.address + n * PAGE_BYTES, PAGE_BYTES) for n in (1, 2))
            if arrived != pattern or any(between):
                raise MoverError("the round trip came back with other bytes")
    except MoverError:
        keep_forever(keep)  # late I/O must not find this memory in other hands
        raise
    mover.close_file(target)
    mover.unregister_memory(memory)
    del keep


def _trouble(store: Store) -> StoreError | None:
    """What stands against putting an object and getting it back."""
    name, content = f"probe-{secrets.token_hex(8)}", secrets.token_bytes(PAGE_BYTES)
    arrived = bytearray(PAGE_BYTES)
    try:
        store.write(name, memoryview(content))
        try:
            store.read_into(name, 0, memoryview(arrived))
        finally:
            with contextlib.suppress(StoreError):
                store.delete([name])
    except StoreError as error:
        return error
    return None if arrived == content else StoreError("the round trip came back with other bytes", cause="io")


def _may_look(store: Store) -> bool:
    """Whether the server says what is there: then credentials that may not write probably may read."""
    with contextlib.suppress(StoreError):
        store.head("probe")
        return True
    return False


def _failed(name: str, error: Exception) -> Probe:
    return Probe(name, False, str(error).removeprefix(f"{name}: "))


def _passed(report: list[Probe]) -> str:
    return "".join(f"; passed over {probe.name}: {probe.reason}" for probe in report)
