"""Moves the chunks of a tier in batches, phase by phase. Steps that all tiers share are here, transfers in
``link_paths``, and the phases in ``packed`` and ``direct``.

A phase works on a whole batch and ends the faulty chunks. If a failure may be any chunk's (an exception, a failed
transfer of several), each chunk begins the phase again in a batch of its own.

Threading: the pump's thread; ``TierPaths.room`` also under the job table's lock. Ownership: a batch owns its chunks'
staging slots and KV blocks until none of its I/O is in flight.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.chunk.header import ExpectedRows, HeaderRows, Pages, check_headers, encode_headers, verify_rows
from nixl_offload.chunk.layout import KVLayout
from nixl_offload.chunk.shards import Shard
from nixl_offload.engine import image
from nixl_offload.engine.device_packer import make_packer
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.image import GroupPlan
from nixl_offload.engine.jobs import JobTable
from nixl_offload.engine.packer import pages_of, require_agreement
from nixl_offload.engine.records import Chunk, ChunkState, TierStatus, Waiting, WorkKind
from nixl_offload.engine.streams import Device, Fence
from nixl_offload.errors import FormatError, LayoutError, MoverError, TierError
from nixl_offload.movers.base import Mover, Transfer, TransferState
from nixl_offload.types import Outcome, Verify, key_group

logger = logging.getLogger(__name__)

HOLD_S = 100e-6
"""The pump releases the GIL after the first piece of work that ends later than this. A piece takes up to 100 µs."""
LOG_EVERY_S = 30.0
"""Least time between two log lines of one cause."""
QUARANTINE_S = 30.0
"""If a transfer fails and late I/O is possible, its target is kept this long: the KV blocks of a direct load, the
location of a store. Siblings of a failed transfer were seen to go on for two seconds. Staging slots are retired
instead."""
STEP_BYTES = 4 << 20
"""Bytes that one core sums or signs, in about a millisecond, before the pump looks at its other batches."""

Steps = Generator[None, None, None]
"""Yields whenever it waits for a transfer or a fence."""
Phase = Callable[[Any, "Batch"], Steps | None]
"""One phase of a batch. Takes the ``TierPaths`` and the batch. Returns None if it does not wait: it is over then."""


@dataclass(slots=True, eq=False)
class Batch:
    """Chunks of one job, group and kind that go through ``phases`` together."""

    chunks: list[Chunk]
    kind: WorkKind
    plan: GroupPlan
    mover: Mover | None = None
    """Makes every transfer."""
    phases: Sequence[Phase] = field(default_factory=lambda: (_admit,))
    """The first one adds the others."""
    phase: int = 0
    """Index of the current phase. After a failure each chunk begins it again."""
    steps: Steps = field(init=False)
    transfers: list[Transfer] = field(default_factory=list)
    fences: list[Fence] = field(default_factory=list)
    """Device work on slots or KV blocks of this batch that may still run."""
    touches_blocks: bool = False
    """A mover reads or writes the KV blocks directly, or has done so."""
    parts: list[Batch] = field(default_factory=list)
    """Batches that were split off since the pump's last step."""
    submitted_s: float | None = None
    """When this phase's transfers were started; None before."""

    @property
    def alive(self) -> list[Chunk]:
        """The chunks that have no outcome yet."""
        return [chunk for chunk in self.chunks if chunk.result is None]

    @property
    def is_pending(self) -> bool:
        """Whether any transfer was not final, or any fence not passed, at the last poll."""
        return bool(self.fences) or any(transfer.state is TransferState.PENDING for transfer in self.transfers)

    @property
    def waits_for_mover(self) -> bool:
        """Whether its next step waits for transfers alone."""
        return not self.fences and self.is_pending

    @property
    def is_quarantined(self) -> bool:
        """Whether late I/O of a failed transfer is possible."""
        return any(transfer.quarantine for transfer in self.transfers)

    def poll(self) -> bool:
        """Advance every transfer that is not final. Return ``is_pending``.

        Raises the exceptions of fences; then the state of the device is unknown.
        """
        if self.mover is not None:
            for transfer in self.transfers:
                if transfer.state is TransferState.PENDING:
                    self.mover.poll(transfer)
        if self.fences:
            self.fences = [fence for fence in self.fences if not fence.done()]
        return self.is_pending

    def ends(self) -> Steps:
        """Poll until nothing of the batch is under way."""
        while self.poll():
            yield

    def passes(self, fences: Iterable[Fence]) -> Iterator[None]:
        """Wait until the device is past ``fences``. The batch's slots stay taken until then."""
        self.fences.extend(fences)
        while self.poll() and self.fences:
            yield

    def split_off(self, chunks: list[Chunk], run: Callable[[Batch], Steps], *, again: bool = False) -> None:
        """Move live chunks into a batch of their own, which is in this phase too. ``run`` returns that batch's steps.

        They take their transfers along, which no other chunk may share. ``again``: they begin the phase again, without
        transfers; none may be in flight. Releases ``summed_rows``, so that no chunk holds that memory while it waits
        for more. The slots have the bytes.
        """
        for chunk in chunks:
            chunk.summed_rows = None
            chunk.transfers = () if again else chunk.transfers
        moved = dict.fromkeys(transfer for chunk in chunks for transfer in chunk.transfers)
        part = replace(self, chunks=chunks, transfers=list(moved), fences=[], parts=[])
        part.submitted_s = None if again else self.submitted_s
        part.steps = run(part)
        self.parts.append(part)
        self.chunks = [chunk for chunk in self.chunks if chunk not in chunks]
        self.transfers = [] if again else [transfer for transfer in self.transfers if transfer not in moved]


@dataclass(slots=True)
class InFlight:
    """What a pump has in flight."""

    batches: int = 0
    store_batches: int = 0
    chunks: int = 0
    stores: int = 0
    """Chunks of stores; background work is counted apart."""
    background: int = 0
    """Chunks of background work."""

    def add(self, kind: WorkKind, chunks: int, batches: int) -> None:
        """Count chunks and batches in, or, by negative numbers, out."""
        self.batches += batches
        self.chunks += chunks
        if kind.in_background:
            self.background += chunks
        elif kind.writes:
            self.store_batches += batches
            self.stores += chunks


class Stretch:
    """Releases the GIL between pieces of the pump's work.

    vLLM's scheduler needs the same GIL and must not wait for a whole batch. Python takes the GIL from a running thread
    only after the switch interval, 5 ms. So the pump calls ``pause`` between its small pieces of work.
    """

    def __init__(self) -> None:
        self._began_s = time.perf_counter()

    def begin(self) -> None:
        """Restart the clock: the thread has just waited."""
        self._began_s = time.perf_counter()

    def pause(self) -> None:
        """Release the GIL if ``HOLD_S`` has passed since the last wait or release."""
        if time.perf_counter() - self._began_s >= HOLD_S:
            self._let_go()
            self.begin()

    def _let_go(self) -> None:
        # Takes about 80 us in the kernel, enough for a waiting thread to wake up. ``sched_yield`` takes half a
        # microsecond: its caller would have the GIL back before any other thread.
        time.sleep(0)


class RateLog:
    """Logs one line per cause and ``LOG_EVERY_S``; the next line counts the suppressed ones."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._causes: dict[str, tuple[float, int]] = {}
        """When the next line may be logged, and how many were suppressed."""

    def error(self, cause: str, message: str, *args: object, exc_info: BaseException | None = None) -> None:
        """As ``warning``; with a traceback if ``exc_info`` is given."""
        self.warning(cause, message, *args, level=logging.ERROR, exc_info=exc_info)

    def crashed(self, error: Exception, cause: str = "") -> None:
        """Log a bug, ours or a mover's, that cost a chunk. An empty ``cause`` groups lines by the error's type."""
        cause = cause or f"crash:{type(error).__name__}"
        self.error(cause, "A chunk failed unexpectedly: %r", error, exc_info=error)

    def warning(
        self,
        cause: str,
        message: str,
        *args: object,
        level: int = logging.WARNING,
        exc_info: BaseException | None = None,
    ) -> None:
        """``cause``: a short word that groups lines."""
        now_s = self._clock()
        next_s, held_back = self._causes.get(cause, (now_s, 0))
        if now_s < next_s:
            self._causes[cause] = next_s, held_back + 1
            return
        if held_back:
            message += " (%d more like this since the last line)"
            args = (*args, held_back)
        self._causes[cause] = now_s + LOG_EVERY_S, 0
        logger.log(level, message, *args, exc_info=exc_info)


@dataclass(frozen=True)
class RankMemory:
    """The memory that a rank moves chunks to and from. It must outlive the engines of the rank's tiers."""

    tensors: Sequence[torch.Tensor]
    """In the order of ``layout.tensors``: int8 or uint8 of shape (num_blocks, page_bytes), all on ``device``."""
    layout: KVLayout
    device: Device
    host: HostSlab | None = None
    """The memory tier's slots, and those that ``Chunk.host_offset`` names."""
    shards: Sequence[int] = ()
    """By group of ``layout``: the number of its shard."""
    keys: ChunkKeys | None = None
    """Keys for tiers that other servers write to; None: chunks are not authenticated."""
    claimed_share: float = 0.0
    """The share of the device's memory that vLLM keeps for itself (``gpu_memory_utilization``)."""


@dataclass(frozen=True)
class TierSetup:
    """What the engines of all kinds of tiers are made from."""

    table: JobTable
    """The rank's."""
    memory: RankMemory
    shards: Sequence[Shard]
    """The shards of this rank, by group of the layout."""
    tier: int = 0
    """The tier's position in the config."""
    verify: Verify = "checksum"
    """Which loads compare payload checksums: see ``LinkPaths`` and ``MemoryPaths``."""
    keys: ChunkKeys | None = None
    """With keys, stored chunks get a MAC and loads require one, with any ``verify``. Chunks are then packed in host
    memory and read whole."""


class TierPaths:
    """State and steps that the batches of one tier share, and what its pump needs.

    A storage failure becomes the chunk's outcome; ``run`` does not raise it.
    """

    thread_name: str
    """The pump's."""
    poll_s: float
    """How long the pump sleeps between polls while something is in flight."""
    slow_after_s: float
    """When nothing has moved for this time, it sleeps ``pump.SLOW`` times as long: a hung disk must not cost a core."""
    store_limit_bytes: int
    """Limit of waiting stores; a store beyond it is DROPPED at once."""
    plans: Sequence[GroupPlan]
    """By group."""
    mover: Mover | None = None
    """Makes every transfer; None for memory."""
    moves_blocks = False
    """Whether the mover can touch KV blocks, also while all groups go through staging."""

    def __init__(self, setup: TierSetup, *, verify_checksum: bool) -> None:
        """``verify_checksum``: whether loads compare payload checksums. Raises LayoutError if tensors and layout
        disagree.
        """
        memory = setup.memory
        require_agreement(memory.tensors, memory.layout)
        self.table = setup.table
        self.tier = setup.tier
        self.layout = memory.layout
        self.packer = make_packer(memory.tensors, pages_of(memory.layout), memory.device)
        self.host = memory.host
        self.shards = setup.shards
        self.verify_checksum = verify_checksum
        self.keys = setup.keys
        self.stretch = Stretch()
        self.complaints = RateLog(setup.table.clock)
        self._memory = memory  # lives as long as I/O may touch it

    # -- what differs by tier ---------------------------------------------------------------------------------------

    def room(self, chunk: Chunk, in_flight: InFlight) -> int | str:
        """Return how many chunks like ``chunk`` may start now as one batch, or, as text, why it fails instead of
        waiting. Called under the table's lock: pure and quick. A chunk that will be rejected is always admitted.
        """
        raise NotImplementedError

    def route(self, chunk: Chunk) -> Sequence[Phase]:
        """Return the phases of chunks like this one. Set ``chunk.host_slot`` if they use one. Raises LayoutError if
        it does not exist.
        """
        raise NotImplementedError

    def status(self, waiting: Waiting) -> TierStatus:
        """Return the tier's status, possibly slightly stale. Safe on any thread."""
        raise NotImplementedError

    def let_go(self, chunk: Chunk, error: str | None) -> None:
        """Cancel a chunk's open read or write. ``error``: None if storage is not to blame."""

    def close(self) -> None:
        """Close what is open; nothing may be in flight."""

    # -- a batch as a whole -----------------------------------------------------------------------------------------

    def run(self, batch: Batch) -> Steps:
        """Run a batch's phases from ``batch.phase`` on. The first step starts the I/O. An exception becomes the chunks'
        outcome once none of the batch's work is under way.
        """
        while batch.alive and batch.phase < len(batch.phases):
            fault: str | None = None
            try:
                yield from batch.phases[batch.phase](self, batch) or ()
                batch.phase, batch.submitted_s = batch.phase + 1, None
                continue
            except TierError as error:
                words, cause = f"storage: {error.cause}", error.cause
            except (MoverError, LayoutError) as error:
                words = str(error)
                fault = words if isinstance(error, MoverError) else None
                cause = "layout" if fault is None else "io"
                self.complaints.error(type(error).__name__, "A chunk could not be moved: %s", error)
            except Exception as error:  # noqa: BLE001 - a bug, ours or a mover's, costs only its chunk
                words, cause, fault = f"unexpected {type(error).__name__}", "unexpected", "the chunk crashed"
                self.complaints.crashed(error)
            yield from batch.ends()
            if not self.tries_singly(batch):
                self.abandon(batch, fault)
                if batch.touches_blocks or batch.kind.writes:
                    yield from self.wait_out_quarantine(batch)
                for chunk in batch.alive:
                    chunk.end(Outcome.FAILED, words, cause)
        if batch.touches_blocks and not batch.kind.writes:
            yield from self._clear_refused(batch)

    def _clear_refused(self, batch: Batch) -> Steps:
        """Zero KV blocks that a mover may have filled with unverified bytes. vLLM recomputes a block a few tokens at a
        time, and attention may multiply the rest of the block by zero: a NaN there would spread.
        """
        refused = [chunk for chunk in batch.chunks if chunk.result is not None and chunk.result[0] is not Outcome.OK]
        refused = [chunk for chunk in refused if chunk.state is ChunkState.SCATTER]  # vLLM owns the others
        if not refused:
            return
        ids = np.concatenate([chunk.block_ids for chunk in refused])
        try:
            yield from batch.passes([self.packer.clear(refused[0].group, ids, refused[0].job.fence)])
        except Exception as error:  # noqa: BLE001 - a failed device ends the model as well
            self.complaints.crashed(error, "clear")

    def tries_singly(self, batch: Batch) -> bool:
        """After a failure, begin the phase again with each chunk alone. Returns False if there is only one, or if late
        I/O may still touch any slot of the batch.
        """
        chunks = batch.alive
        if len(chunks) < 2:
            return False
        if batch.is_quarantined:
            batch.plan.goes_singly = True
            return False
        self.abandon(batch, None)
        for chunk in chunks:
            batch.split_off([chunk], self.run, again=True)
        return True

    def abandon(self, batch: Batch, error: str | None) -> None:
        """Call ``let_go`` for all chunks of a batch."""
        for chunk in batch.chunks:
            self.let_go(chunk, error)

    def advance_or_end(self, batch: Batch, state: ChunkState) -> bool:
        """Move a batch's chunks to ``state``; end those that were given up. Returns whether any is left."""
        chunks = batch.alive
        going = self.table.advance(chunks, state)
        for chunk in chunks if len(going) < len(chunks) else ():
            if chunk not in going:
                self.let_go(chunk, None)
                chunk.end(Outcome.FAILED, "its blocks were given away meanwhile", "needed_back")
        return bool(going)

    def wait_out_quarantine(self, batch: Batch) -> Iterator[None]:
        """If late I/O of a failed transfer is possible, wait ``QUARANTINE_S``."""
        if batch.is_quarantined:
            release_s = self.table.clock() + QUARANTINE_S
            while self.table.clock() < release_s:
                yield

    # -- headers, checksums and MACs: a chunk that fails a check is CORRUPT ------------------------------------------

    def encode(self, batch: Batch, sums: Sequence[npt.NDArray[np.uint64]]) -> Pages:
        """Return the header pages of chunks about to be stored; their blocks reach to the chunks' ends. ``sums``: of
        all blocks, in any number of parts; empty: headers without checksums, for chunks that stay in memory.
        """
        chunks, table = batch.alive, None
        firsts = [chunk.first_block for chunk in chunks]
        if sums:
            table = np.zeros((len(chunks), batch.plan.blocks), dtype=np.uint64)
            table[np.arange(batch.plan.blocks) >= np.array(firsts)[:, None]] = np.concatenate(sums)
        return encode_headers(self._expected(batch.plan, chunks), table, firsts, created_s=int(time.time()))

    def _expected(self, plan: GroupPlan, chunks: Sequence[Chunk]) -> ExpectedRows:
        """Return the header fields of chunks, whose keys all name one group."""
        keys = [chunk.key for chunk in chunks]
        return ExpectedRows(
            self.shards[chunks[0].group].digest, keys, key_group(keys[0]), plan.blocks, plan.block_bytes
        )

    def check(
        self,
        batch: Batch,
        pages: Sequence[Pages] | Pages | None = None,
        check: Callable[[Any, ExpectedRows], HeaderRows] = check_headers,
    ) -> HeaderRows:
        """Check identity, lengths and that each wanted block was stored, with any ``verify``.

        ``pages``: the headers of the live chunks; None: those in their host slots. ``check``: the function for it;
        pages in the host slab, which several engines share, need their own.
        """
        chunks = batch.alive
        if pages is None:
            views = [stack.pages for stack in image.stacks(batch.plan, chunks)]
            pages = [page for view in views for page in view] if len(views) > 1 else views[0]
        headers = check(pages, self._expected(batch.plan, chunks))
        for row, (chunk, first) in enumerate(zip(chunks, headers.first_valid_block, strict=True)):
            chunk.row = row
            if first > chunk.first_block and len(chunk.block_ids) and row not in headers.errors:
                words = f"block {chunk.first_block} was asked for, the shard begins with {first}"
                headers.errors[row] = FormatError(words, reason="blocks")
        self._refuse(batch, headers)
        return headers

    def verify(self, batch: Batch, headers: HeaderRows, *, whole: bool = False) -> Steps:
        """Compare the checksums of live chunks in host memory. A device, if there is one, sums them and keeps the
        blocks for the scatter (``Chunk.summed_rows``). ``whole``: all stored blocks, not only the wanted ones.
        """
        chunks, plan = batch.alive, batch.plan
        if not chunks:
            return
        firsts = [headers.first_valid_block[chunk.row] if whole else chunk.first_block for chunk in chunks]
        payloads = [
            stack.rows(plan, headers.first_valid_block[stack.chunks[0].row] if whole else None)
            for stack in image.stacks(plan, chunks)
        ]
        summed = yield from self.packer.bring(chunks[0].group, payloads)
        yield from batch.passes([summed])
        sums = summed.values() if plan.blocks > 1 else np.concatenate(summed.values())[:, None]
        self.compare(batch, headers, firsts, sums)
        for chunk, first, rows in zip(chunks, firsts, summed.brought([len(each) for each in sums]), strict=False):
            if chunk.result is None:
                chunk.summed_rows, chunk.summed_from = rows, first

    def compare(
        self, batch: Batch, headers: HeaderRows, first_blocks: Sequence[int], sums: Iterable[npt.NDArray[np.uint64]]
    ) -> None:
        """Compare ``sums`` of the live chunks with their headers. ``first_blocks``: where each chunk's sums begin."""
        chunks = batch.alive
        if chunks:
            verify_rows(headers, [chunk.row for chunk in chunks], first_blocks, sums)
            self._refuse(batch, headers)

    def authenticate(self, batch: Batch, headers: HeaderRows) -> Steps:
        """If chunks are authenticated, verify the MACs of images that were read whole, before any use."""
        if self.keys is None:
            return
        read_bytes = 0
        for chunk in batch.alive:
            (stack,) = image.stacks(batch.plan, [chunk])
            rows = stack.rows(batch.plan, headers.first_valid_block[chunk.row])
            try:
                self.keys.verify(stack.pages[0], rows)
            except FormatError as error:
                headers.errors[chunk.row] = error
            read_bytes += rows.nbytes
            if read_bytes >= STEP_BYTES:
                read_bytes = 0
                yield
        self._refuse(batch, headers)

    def _refuse(self, batch: Batch, headers: HeaderRows) -> None:
        for chunk in batch.alive if headers.errors else ():
            error = headers.errors.get(chunk.row)
            if error is not None:
                words = f"corrupt: {error.reason}"
                self.complaints.warning(words, "A stored chunk was refused and will be recomputed: %s", error)
                chunk.end(Outcome.CORRUPT, words, error.reason)


def _admit(paths: TierPaths, batch: Batch) -> None:
    """End chunks whose block ids or offsets are out of range, for later phases touch memory unchecked. Choose those
    phases.
    """
    for chunk, fault in zip(batch.chunks, image.faults(batch.plan, batch.chunks), strict=True):
        try:
            if fault is not None:
                raise LayoutError(fault)
            batch.phases = _admit, *paths.route(chunk)
        except LayoutError as error:
            paths.complaints.error("LayoutError", "A chunk could not be moved: %s", error)
            chunk.end(Outcome.FAILED, str(error), "layout")
    paths.stretch.pause()
