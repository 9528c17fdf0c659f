"""Which mover reaches this bucket: each candidate must really put a small object and get it back first.

Threading: call it in the process and on the thread that will drive the mover.
The probe object is called ``probe-<random hex>``, directly under the prefix, and deleted afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import secrets
import time
from collections.abc import Callable
from typing import Final

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import MoverError, MoverUnavailableError, NixlOffloadError, StoreError
from nixl_offload.keep import keep_forever
from nixl_offload.movers.base import MemoryKind, Mover, Op
from nixl_offload.movers.limits import LimitedMover
from nixl_offload.movers.nixl import NixlMover
from nixl_offload.movers.nixl_plugins import object_plugin
from nixl_offload.movers.retry import NOT_ANSWERING, RetryingMover
from nixl_offload.movers.select import Probe, ProbedMover, move_page, page, scratch_memory
from nixl_offload.movers.store import StoreMover
from nixl_offload.stores.base import Store
from nixl_offload.stores.select import Client
from nixl_offload.types import PAGE_BYTES

logger = logging.getLogger(__name__)

OpenClient = Callable[[Client], Store]

PATIENCE: Final = 3
"""Times ``request_timeout``: with so much spent on candidates, no further one is tried."""
_PASSING: Final = NOT_ANSWERING | {"full"}
_HELP: Final = (
    "check endpoint, bucket, region, credentials and what they may do; obj needs the plugin of nixl[cu12]'s wheel, "
    "obstore needs `pip install obstore`"
)


def candidates(choice: str, memory_kind: MemoryKind) -> list[tuple[str, MemoryKind]]:
    """Movers to try, best first, and the memory that each is to take: device memory before host memory. Pure.

    For host memory obstore is first: it costs less processor time, and is what finds objects, too
    (docs/decisions/0011-s3-measurements.md).
    """
    names = ["obstore", "obj"] if choice == "auto" else [choice]
    on_device = ["obj"] if memory_kind is MemoryKind.VRAM and "obj" in names else []
    return [(name, memory_kind) for name in on_device] + [(name, MemoryKind.DRAM) for name in names]


def open_object_mover(tier: S3Config, memory_kind: MemoryKind, open_client: OpenClient) -> ProbedMover:
    """Open the best mover of ``tier.mover`` that can really move bytes between this memory and the bucket.

    A server that does not answer, is overloaded or full is no reason to fail, nor is one that lets these credentials
    read but not write: then the first mover that can be made is returned, which does what the server lets it. Says at
    INFO what was chosen and what was passed over, and why. Takes a few times ``tier.request_timeout_s`` at most.
    Raises MoverUnavailableError when nothing of ``tier.mover`` can run, or the server answers but refuses, with the
    reasons and what would help.
    """
    began_s = time.monotonic()
    control = _control(open_client)
    with contextlib.closing(control) if control is not None else contextlib.nullcontext():
        where = control.where if control is not None else f"s3://{tier.bucket}/{tier.prefix}"
        silence = _silence(control)
        report: list[Probe] = []
        if silence is None:
            for name, kind in candidates(tier.mover, memory_kind):
                if time.monotonic() - began_s > PATIENCE * tier.request_timeout_s:
                    silence = f"nothing was moved in {time.monotonic() - began_s:.0f} s"
                    break
                opened = _try(name, tier, kind, open_client, control, report)
                if opened is not None:
                    packs = "" if kind is memory_kind else "; packs through host memory"
                    reason = report[-1].reason + packs
                    logger.info("objects in %s are moved by %s (%s)%s", where, name, reason, _passed(report))
                    return ProbedMover(opened, tuple(report))
            trouble = _trouble(control) if silence is None else None
            if trouble is not None and trouble.cause in _PASSING:
                silence = str(trouble)
            elif trouble is not None and trouble.cause == "denied" and _may_look(control):
                silence = f"it can be read at most: {trouble}"
            elif trouble is not None and control is not None and all(probe.name != control.name for probe in report):
                report.append(Probe(control.name, False, str(trouble)))
    if silence is not None:
        report = []
        for name, _ in candidates(tier.mover, MemoryKind.DRAM):
            try:
                made = _make(name, tier, open_client)
            except NixlOffloadError as error:
                report.append(Probe(name, False, _without(name, error)))
                continue
            report.append(Probe(name, True, "not proved, for the server did not do what it was asked"))
            logger.warning(
                "objects in %s will be moved by %s as far and as soon as the server lets it: %s%s",
                where,
                name,
                silence,
                _passed(report),
            )
            return ProbedMover(_limited(made, tier), tuple(report))
    reasons = "; ".join(f"{probe.name}: {probe.reason}" for probe in report)
    raise MoverUnavailableError(f"mover {tier.mover!r} cannot move {memory_kind.value} to {where}: {reasons} ({_HELP})")


def make_mover(name: str, tier: S3Config, open_client: OpenClient) -> Mover:
    """A mover of ``candidates`` without limits, not tried out. Raises what says that it cannot be made here."""
    return _limited(_make(name, tier, open_client), tier)


def _make(name: str, tier: S3Config, open_client: OpenClient) -> Mover:
    if name != "obj":
        return StoreMover(open_client("obstore"), threads=tier.connections, close_timeout_s=tier.request_timeout_s)
    bare = NixlMover(object_plugin(tier), close_timeout_s=tier.request_timeout_s)
    bare.connect()
    return RetryingMover(bare, _control(open_client))


def _limited(mover: Mover, tier: S3Config) -> Mover:
    return LimitedMover(mover, close_timeout_s=tier.request_timeout_s)


def _try(
    name: str,
    tier: S3Config,
    memory_kind: MemoryKind,
    open_client: OpenClient,
    control: Store | None,
    report: list[Probe],
) -> Mover | None:
    """Make ``name`` and send it round; the report gets a line either way."""
    try:
        bare = _make(name, tier, open_client)
    except NixlOffloadError as error:
        report.append(Probe(name, False, _without(name, error)))
        return None
    mover = _limited(bare, tier)
    if memory_kind not in mover.memory_kinds:
        report.append(Probe(name, False, f"takes no {memory_kind.value} here"))
        mover.close()
        return None
    probe = f"probe-{secrets.token_hex(8)}"
    try:
        probe_object(mover, memory_kind, probe, 2 * tier.request_timeout_s)
    except MoverError as error:
        report.append(Probe(name, False, _without(name, error)))
        mover.close()
        return None
    finally:
        if control is not None:
            try:
                control.delete([probe])
            except StoreError as error:
                logger.debug("%s: %s stays behind: %s", control.where, probe, error)
    report.append(Probe(name, True, "round trip ok"))
    return mover


def probe_object(mover: Mover, kind: MemoryKind, name: str, timeout_s: float) -> None:
    """Put a page under ``name``, get it back into another page and compare them, for ``timeout_s`` each.

    Memory of a device is never looked at, so there it is enough that the transfers succeed. The mover stays open.
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
        # Whatever went wrong, late I/O must not find this memory in other hands.
        keep_forever(keep)
        raise
    mover.close_file(target)
    mover.unregister_memory(memory)
    del keep


def _control(open_client: OpenClient) -> Store | None:
    """Return what looks at the bucket beside the mover; None where no client is installed."""
    with contextlib.suppress(NixlOffloadError):
        return open_client("auto")
    return None


def _silence(control: Store | None) -> str | None:
    """What there is instead of an answer of the server; None when it answers, be it with a refusal."""
    if control is None:
        return None
    try:
        control.head("probe")
    except StoreError as error:
        return str(error) if error.cause in NOT_ANSWERING else None
    return None


def _may_look(control: Store | None) -> bool:
    """Whether the server says what is there: so credentials that may not write may read, as like as not."""
    if control is None:
        return False
    try:
        control.head("probe")
    except StoreError:
        return False
    return True


def _trouble(control: Store | None) -> StoreError | None:
    """What stands against putting an object and getting it back, where no mover could: they cannot all tell the cause.

    A HEAD may be answered by a server that takes no PUT for the moment.
    """
    if control is None:
        return None
    name, content = f"probe-{secrets.token_hex(8)}", memoryview(bytearray(PAGE_BYTES))
    try:
        control.write(name, content)
        try:
            control.read_into(name, 0, content)
        finally:
            with contextlib.suppress(StoreError):
                control.delete([name])
    except StoreError as error:
        return error
    return None


def _passed(report: list[Probe]) -> str:
    return "".join(f"; passed over {probe.name}: {probe.reason}" for probe in report if not probe.ok)


def _without(name: str, error: Exception) -> str:
    return str(error).removeprefix(f"{name}: ")
