"""What all transfer paths share: slots, headers, the link's begin and end, waiting, and the words of an outcome.

Threading: the pump's thread. Ownership: see ``batch``.

Each step works on a whole batch and ends the chunks that it finds at fault. A failure that cannot be pinned on a chunk
is raised, or reported by a transfer of several; then the chunks of the batch are tried again, each in a batch of
its own. Where each chunk has transfers of its own, those that failed or are late part from the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.chunk.header import ExpectedRows, HeaderRows, Pages, check_headers
from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine import image
from nixl_offload.engine.batch import Batch, Steps
from nixl_offload.engine.copies import Packer, Payload
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.image import GroupPlan, Spans, TransferPath, host_slot
from nixl_offload.engine.jobs import JobTable
from nixl_offload.engine.link_memory import LinkMemory
from nixl_offload.engine.pump import PumpPaths, Turn
from nixl_offload.engine.ratelog import RateLog
from nixl_offload.engine.records import Chunk
from nixl_offload.engine.states import ChunkState
from nixl_offload.engine.transfer_paths.checked import CheckedChunks
from nixl_offload.errors import LayoutError, MoverError, TierError
from nixl_offload.movers.base import Op, Transfer, TransferState
from nixl_offload.tiers.base import Link, Target
from nixl_offload.types import Outcome

PART_AFTER_S = 0.1
"""Chunks with transfers of their own wait for the last of their batch: this long, or as long as the first of them took
if that is longer. Then those that have arrived go on without the others."""
STEP_BYTES = 4 << 20
"""Summed or signed by one core, about a millisecond. Then the pump looks at its other batches."""
QUARANTINE_S = 30.0
"""A transfer that failed with late I/O still possible keeps what it writes to this long before others may have it: a
direct load its KV blocks, a store its location. Siblings of a failed transfer were seen to go on for two seconds;
staging slots can be retired for good, these cannot."""

T = TypeVar("T")

Phase = Callable[[Any, Batch, GroupPlan], Steps]
"""A piece of a path that can be begun again with each chunk of a batch alone."""
Settle = Callable[[Batch], Steps]
"""How to wait until nothing of a batch is under way."""
Use = Callable[[Batch, list[Chunk]], Steps]
"""What becomes of chunks that were read."""
SpansOf = Callable[[Chunk], Spans]
"""What of a chunk's slot to move."""


def out_of_use(link: Link) -> str:
    """Say why a chunk goes neither there nor back now."""
    return f"storage is out of use: {link.trouble}"


def _by_transfer(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Part chunks by their own transfers: those that have arrived, those that are under way, and each that failed."""
    by_state: dict[TransferState, list[Chunk]] = {state: [] for state in TransferState}
    for chunk in chunks:
        by_state[chunk.transfer_state].append(chunk)
    together = [by_state[TransferState.DONE], by_state[TransferState.PENDING]]
    return [group for group in together if group] + [[chunk] for chunk in by_state[TransferState.FAILED]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a tier's engine has for all batches, and what all paths do with it."""

    table: JobTable
    layout: KVLayout
    packer: Packer
    host: HostSlab | None
    """The slots that chunks name; None: there are none."""
    namespaces: Sequence[bytes]
    """By group, what headers carry."""
    verify_checksum: bool
    rate_log: RateLog
    link_memory: LinkMemory | None = None
    """None: of the memory tier, which makes nothing but copies."""
    keys: ChunkKeys | None = None
    """None: chunks are not authenticated."""
    turn: Turn = field(default_factory=Turn)

    @property
    def linked(self) -> LinkMemory:
        """The link of a tier that has one."""
        assert self.link_memory is not None
        return self.link_memory

    def clock(self) -> float:
        """Return the table's time."""
        return self.table.clock()

    # -- a batch as a whole -----------------------------------------------------------------------------------------

    def run(self, batch: Batch, plan: GroupPlan, phase: Phase, again: Phase | None = None) -> Steps:
        """Do one phase. What it raises becomes outcomes, when nothing of the batch is under way any more.

        ``again``: what to begin again with each chunk alone after a failure; None: the same phase.
        """
        yield from self._run(batch, plan, phase, again or phase)
        yield from self._clear_refused(batch)

    def _run(self, batch: Batch, plan: GroupPlan, phase: Phase, again: Phase) -> Steps:
        fault: str | None = None
        try:
            yield from phase(self, batch, plan)
            return
        except TierError as error:
            words, cause = f"storage: {error.cause}", error.cause
        except (MoverError, LayoutError) as error:
            words = str(error)
            fault = words if isinstance(error, MoverError) else None
            cause = "layout" if fault is None else "io"
            self.rate_log.error(type(error).__name__, "A chunk could not be moved: %s", error)
        except Exception as error:  # noqa: BLE001 - a bug, ours or a mover's, costs no more than its chunk
            words, cause, fault = f"unexpected {type(error).__name__}", "unexpected", "the chunk crashed"
            name = f"crash:{type(error).__name__}"
            self.rate_log.error(name, "A chunk failed unexpectedly: %r", error, exc_info=error)
        yield from self.settle(batch)
        if self.tries_singly(batch, plan, again):
            return
        self.abandon(batch, fault)
        if batch.touches_blocks or batch.chunks[0].kind.writes:
            yield from self.wait_out_quarantine(batch)
        for chunk in batch.alive:
            chunk.end(Outcome.FAILED, words, cause)

    def _clear_refused(self, batch: Batch) -> Steps:
        """Zero the KV blocks into which a mover may have put what was not verified. vLLM computes them anew a few
        tokens at a time, and attention may multiply what lies behind those by zero: a NaN there would spread.
        """
        if not batch.touches_blocks or batch.kind.writes:
            return
        refused = [chunk for chunk in batch.chunks if chunk.result is not None and chunk.result[0] is not Outcome.OK]
        refused = [chunk for chunk in refused if chunk.state is ChunkState.SCATTER]  # others' are vLLM's again
        if not refused:
            return
        batch.touches_blocks = False  # phases are nested: once is enough
        ids = np.concatenate([chunk.block_ids for chunk in refused])
        try:
            yield from batch.passes([self.packer.clear(refused[0].group, ids, refused[0].job.fence)])
        except Exception as error:  # noqa: BLE001 - a device that is out of order ends the model as well
            self.rate_log.error("clear", "A chunk failed unexpectedly: %r", error, exc_info=error)

    def tries_singly(self, batch: Batch, plan: GroupPlan, phase: Phase) -> bool:
        """After a failure: begin ``phase`` again with each chunk alone, if there are several and nothing stands
        against it. Late I/O does: it may touch any slot of the batch.
        """
        if len(batch.alive) < 2:
            return False
        if batch.is_quarantined:
            plan.goes_singly = True
            return False
        self.abandon(batch, None)
        chunks = batch.alive
        for chunk in chunks:
            chunk.transfers = ()
        batch.split([[chunk] for chunk in chunks], lambda part: self.begin(part, plan, phase))
        return True

    def begin(self, batch: Batch, plan: GroupPlan, phase: Phase, again: Phase | None = None) -> Steps:
        """Return the steps of ``batch`` from ``phase`` on. ``again`` as for ``run``."""
        batch.mover = None if self.link_memory is None else self.link_memory.link.mover
        return self.run(batch, plan, phase, again)

    def abandon(self, batch: Batch, error: str | None) -> None:
        """Have the link undo what was begun and not ended. ``error``: None says that storage is not to blame."""
        for chunk in batch.chunks:
            self.let_go(chunk, error)

    def let_go(self, chunk: Chunk, error: str | None) -> None:
        """As ``abandon``, of one chunk."""
        target, chunk.target = chunk.target, None
        if target is not None:
            link = self.linked.link
            (link.fail_write if chunk.kind.writes else link.fail_read)(target, error)

    def advance_or_end(self, batch: Batch, state: ChunkState) -> bool:
        """Move the chunks of a batch on; end those that were given up. Whether any is left."""
        chunks = batch.alive
        going = self.table.advance(chunks, state)
        for chunk, goes in zip(chunks, going, strict=True):
            if not goes:
                self.let_go(chunk, None)
                chunk.end(Outcome.FAILED, "its blocks were given away meanwhile", "needed_back")
        return any(going)

    def settle(self, batch: Batch) -> Steps:
        """Poll until nothing of the batch is under way."""
        while batch.poll():
            yield

    def wait_out_quarantine(self, batch: Batch) -> Iterator[None]:
        """Wait until no I/O of a quarantined transfer can touch memory or location any more."""
        if batch.is_quarantined:
            release_s = self.clock() + QUARANTINE_S
            while self.clock() < release_s:
                yield

    # -- headers and checksums --------------------------------------------------------------------------------------

    def encode(self, batch: Batch, plan: GroupPlan, sums: Sequence[npt.NDArray[np.uint64]] | None) -> Pages:
        """Return the header pages of chunks about to be stored. ``sums``: as for ``image.encode``."""
        chunks = batch.alive
        return image.encode(self.namespaces[chunks[0].group], plan, chunks, sums)

    def verify(
        self,
        batch: Batch,
        checked: CheckedChunks,
        chunks: Sequence[Chunk],
        first_blocks: Sequence[int],
        payloads: Sequence[Payload],
    ) -> Steps:
        """Compare the checksums of blocks in host memory, by the device where there is one; a chunk with a wrong one is
        CORRUPT. Others have their rows in ``brought``.
        """
        if not chunks:
            return
        summed = yield from self.packer.bring(chunks[0].group, payloads)
        yield from batch.passes([summed])
        checked.verify(chunks, first_blocks, summed.values())
        for chunk, first, rows in zip(chunks, first_blocks, summed.rows(), strict=True):
            if chunk.result is None:
                chunk.brought, chunk.brought_from = rows, first

    def check(
        self,
        chunks: Sequence[Chunk],
        plan: GroupPlan,
        pages: Sequence[npt.NDArray[np.uint8]],
        check: Callable[[Sequence[npt.NDArray[np.uint8]], ExpectedRows], HeaderRows] = check_headers,
    ) -> CheckedChunks:
        """Check identity and lengths, with any ``verify``. A chunk whose header is not right is CORRUPT.

        ``check``: another one for pages in the host slab, which other engines share.
        """
        for row, chunk in enumerate(chunks):
            chunk.row = row
        headers = check(pages, image.expected(self.namespaces[chunks[0].group], plan, chunks))
        checked = CheckedChunks(self.rate_log, chunks, headers)
        checked.end_corrupt()
        return checked

    # -- slots ------------------------------------------------------------------------------------------------------

    def take_slots(self, batch: Batch, path: TransferPath) -> None:
        """Take a slot for each chunk that has none: when a phase begins again with single chunks, they have theirs. A
        chunk for which none is left is FAILED.
        """
        pool = self.linked.pools.get(path)
        for chunk in [chunk for chunk in batch.alive if chunk.slot is None]:
            chunk.slot = pool.acquire() if pool is not None else None
            if chunk.slot is not None:
                chunk.pool = pool
                continue
            words = "No staging memory is left (all of it retired): nothing is stored or loaded"
            self.rate_log.error("staging", words)
            chunk.end(Outcome.FAILED, "storage: io", "io")

    # -- the link ---------------------------------------------------------------------------------------------------

    def may_go(self, batch: Batch) -> bool:
        """Whether the link takes something of this batch now; what it does not take is FAILED.

        Asked for each thing that is opened: the answer may be yes for a single trial.
        """
        link, goes = self.linked.link, False
        may_go = link.may_store if batch.chunks[0].kind.writes else link.may_load
        for number, chunk in enumerate(batch.alive):
            if number == 0 or not link.shares_file:
                goes = may_go()
            if not goes:
                chunk.end(Outcome.FAILED, out_of_use(link), "disabled")
        return bool(batch.alive)

    def open_targets(self, batch: Batch, plan: GroupPlan) -> Generator[None, None, list[Chunk]]:
        """Begin a read or write of each chunk; return those that can be moved. A chunk that cannot be is FAILED."""
        link, writes = self.linked.link, batch.kind.writes
        begin = link.begin_write if writes else link.begin_read

        def begun(chunk: Chunk, target: Target) -> None:
            chunk.target = target
            if not writes and chunk.state is ChunkState.DONE:
                self.let_go(chunk, None)  # nobody waits for it any more, and nothing has been read
                chunk.end(Outcome.FAILED, "given up")

        chunks = batch.alive
        calls = [begin(chunk.key, chunk.location, plan.slot_bytes, plan.shard) for chunk in chunks]
        yield from self._ask_link(chunks, calls, begun)
        return batch.alive

    def _ask_link(
        self,
        chunks: Sequence[Chunk],
        calls: Sequence[Generator[None, None, T]],
        answered: Callable[[Chunk, T], None],
    ) -> Steps:
        """Make a call of the link for each chunk, all side by side. A chunk of which the call raises is FAILED."""
        running = list(zip(chunks, calls, strict=True))
        while running:
            unanswered = []
            for chunk, call in running:
                self.turn.pause()
                try:
                    next(call)
                except StopIteration as stop:
                    answered(chunk, stop.value)
                except TierError as error:
                    is_blamed = error.cause != "files"
                    if not is_blamed:
                        self.rate_log.warning("files", "A chunk is not moved: %s", error)
                    outcome = Outcome.FAILED if is_blamed else Outcome.DROPPED
                    chunk.end(outcome, f"storage: {error.cause}", error.cause)
                except Exception as error:  # noqa: BLE001 - the others' calls are under way, and must be seen through
                    self.rate_log.error("link", "A chunk failed unexpectedly: %r", error, exc_info=error)
                    chunk.end(Outcome.FAILED, f"unexpected {type(error).__name__}", "unexpected")
                else:
                    unanswered.append((chunk, call))
            running = unanswered
            if running:
                yield

    def write(self, batch: Batch, plan: GroupPlan, phase: Phase, spans_of: SpansOf) -> Steps:
        """Write slots, and end their chunks. ``phase`` is the caller, for chunks that are to go singly."""
        yield from self._move(batch, plan, Op.WRITE, spans_of)
        yield from self.arrive(batch, plan, phase, lambda batch: self.finish_writes(batch, plan, phase))

    def read(self, batch: Batch, plan: GroupPlan, phase: Phase, spans_of: SpansOf, use: Use) -> Steps:
        """Read into slots; ``use`` is what becomes of the chunks that have arrived. ``phase`` as for ``write``."""

        def finish(batch: Batch) -> Steps:
            arrived = self.finish_reads(batch, plan, phase)
            if arrived:
                yield from use(batch, arrived)

        yield from self._move(batch, plan, Op.READ, spans_of)
        yield from self.arrive(batch, plan, phase, finish, self.settle_load)

    def _move(self, batch: Batch, plan: GroupPlan, op: Op, spans_of: SpansOf) -> Steps:
        yield from self.open_targets(batch, plan)
        self.turn.pause()
        self.start_transfers(batch, lambda chunks: self.linked.submit(op, chunks, spans_of))

    def start_transfers(self, batch: Batch, start: Callable[[Sequence[Chunk]], Iterator[Transfer]]) -> None:
        """Move all chunks at once where they lie in one file. Else each has transfers of its own; one that the mover
        refuses is FAILED.
        """
        if self.linked.link.shares_file:
            for transfer in start(batch.alive):
                batch.transfers.append(transfer)  # at once: the next one may raise
                self.turn.pause()
            return
        for chunk in batch.alive:
            try:
                for transfer in start([chunk]):
                    batch.transfers.append(transfer)
                    chunk.transfers += (transfer,)
            except MoverError as error:
                if chunk.transfers:
                    raise
                self.rate_log.error(type(error).__name__, "A chunk could not be moved: %s", error)
                self.let_go(chunk, str(error))
                chunk.end(Outcome.FAILED, str(error), "io")
            self.turn.pause()

    def arrive(
        self,
        batch: Batch,
        plan: GroupPlan,
        phase: Phase,
        finish: Callable[[Batch], Steps],
        settle: Settle | None = None,
    ) -> Steps:
        """Wait for the transfers, then ``finish``. Where each chunk has its own, those that failed go on without the
        others, and so do those that are late: ``finish`` comes for each such part. ``phase`` as for ``write``;
        ``settle``: how to wait, None for the method of that name.
        """

        def go_on(context: Context, part: Batch, plan: GroupPlan) -> Steps:
            return context.arrive(part, plan, phase, finish, settle)

        may_part = len(batch.chunks) > 1 and not self.linked.link.shares_file
        if may_part and 0 < len(batch.alive) < len(batch.chunks):
            # What was refused ends now, and gives its slots back.
            batch.split([batch.alive], lambda part: self.begin(part, plan, go_on, phase))
            return
        began_s = self.clock()
        batch.parts_s = 0.0 if may_part else math.inf
        waiting = (settle or self.settle)(batch)
        for _ in waiting:
            if may_part:
                now_s = self.clock()
                if not batch.parts_s and len(_by_transfer(batch.alive)) > 1:
                    batch.parts_s = now_s + max(PART_AFTER_S, now_s - began_s)
                elif batch.parts_s and now_s >= batch.parts_s:
                    break
            yield
        waiting.close()
        groups = _by_transfer(batch.alive) if may_part and batch.failure is not None else []
        if len(groups) < 2:
            yield from finish(batch)
            return
        batch.split(groups, lambda part: self.begin(part, plan, go_on, phase))

    def settle_load(self, batch: Batch) -> Steps:
        """As ``settle``; the link hears of each chunk that is given up meanwhile, once."""
        waited_for = [chunk for chunk in batch.alive if not chunk.is_overdue]
        while batch.poll():
            if waited_for and waited_for[0].state is ChunkState.DONE:
                for chunk in waited_for:
                    if chunk.state is ChunkState.DONE:
                        chunk.is_overdue = True
                        self.linked.link.overdue()
                waited_for = [chunk for chunk in waited_for if not chunk.is_overdue]
            yield

    def finish_writes(self, batch: Batch, plan: GroupPlan, phase: Phase) -> Steps:
        """All transfers are final: make the chunks visible, or end them as FAILED."""
        failure = batch.failure
        if failure is not None:
            if self.tries_singly(batch, plan, phase):
                return
            words = failure.error or "write failed"
            self.abandon(batch, words)
            # Late reads of the KV blocks spoil nothing but this location.
            self.table.advance(batch.alive, ChunkState.TRANSFER)
            yield from self.wait_out_quarantine(batch)
            for chunk in batch.alive:
                chunk.end(Outcome.FAILED, words, "io")
            return
        # All is read: what makes a chunk visible needs no KV blocks.
        self.advance_or_end(batch, ChunkState.TRANSFER)
        chunks, calls = batch.alive, []
        for chunk in chunks:
            target, chunk.target = chunk.target, None
            assert target is not None
            calls.append(self.linked.link.end_write(target))
        yield from self._ask_link(chunks, calls, lambda chunk, _: chunk.end(Outcome.OK))

    def finish_reads(self, batch: Batch, plan: GroupPlan, phase: Phase) -> list[Chunk]:
        """Tell the link how its part ended; return the chunks that have arrived."""
        failure = batch.failure
        if failure is not None and self.tries_singly(batch, plan, phase):
            return []
        if failure is None or failure.missing:
            for chunk in batch.chunks:
                target, chunk.target = chunk.target, None
                if target is not None:
                    self.linked.link.end_read(target)
        if failure is None:
            return batch.alive
        self.abandon(batch, failure.error or "read failed")
        self.rate_log.warning("read", "A chunk could not be read and will be recomputed: %s", failure.error)
        for chunk in batch.alive:
            chunk.end(Outcome.FAILED, failure.error, "missing" if failure.missing else "io")
        return []

    def authenticate(self, batch: Batch, checked: CheckedChunks, plan: GroupPlan) -> Steps:
        """Where chunks are authenticated: compare the MACs of images that were read whole, before anything else
        believes in them. A chunk without a right one is CORRUPT.
        """
        if self.keys is None:
            return
        read_bytes = 0
        for chunk in batch.alive:
            slot = host_slot(chunk)
            rows = image.valid_rows(slot, plan, checked.first_valid_block(chunk))
            checked.authenticate(chunk, self.keys, image.header_page(slot), rows)
            read_bytes += rows.nbytes
            if read_bytes >= STEP_BYTES:
                read_bytes = 0
                yield


class TierPaths(PumpPaths):
    """Makes batches of chunks whose numbers fit."""

    def __init__(self, context: Context, plans: Sequence[GroupPlan], keep_alive: Sequence[object]) -> None:
        """``plans`` is indexed by group; ``keep_alive``: what must live as long as I/O may touch its memory."""
        self._context = context
        self._plans = plans
        self._keep_alive = keep_alive
        self.turn = context.turn

    def begin(self, chunks: list[Chunk]) -> Batch:
        """Make a batch, whose first step checks its numbers and chooses its path."""
        batch = Batch(chunks, chunks[0].kind)
        batch.steps = self._steps(batch)
        return batch

    def _steps(self, batch: Batch) -> Steps:
        """End the chunks whose numbers do not fit, for memory is touched unchecked later; move the others."""
        first = batch.chunks[0]
        plan = self._plans[first.group]
        for chunk, fault in zip(batch.chunks, image.faults(plan, batch.chunks), strict=True):
            try:
                if fault is not None:
                    raise LayoutError(fault)
                self._find_slot(chunk, plan)
            except LayoutError as error:
                self._context.rate_log.error("LayoutError", "A chunk could not be moved: %s", error)
                chunk.end(Outcome.FAILED, str(error), "layout")
        if batch.alive:
            self.turn.pause()
            yield from self._context.begin(batch, plan, self._phase(first, plan))

    def _find_slot(self, chunk: Chunk, plan: GroupPlan) -> None:
        """Look up the host slot of a chunk that takes one. Raises LayoutError where there is none."""
        raise NotImplementedError

    def _phase(self, chunk: Chunk, plan: GroupPlan) -> Phase:
        """Return how chunks like this one travel."""
        raise NotImplementedError
