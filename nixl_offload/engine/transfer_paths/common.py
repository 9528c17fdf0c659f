"""What all transfer paths share: slots, headers, the link's begin and end, waiting, and the words of an outcome.

Threading: the pump's thread; ``room`` also under the job table's lock. Ownership: see ``batch``.

A batch goes through its phases one by one. Each phase works on the whole batch and ends the chunks that it finds at
fault. A failure that cannot be pinned on a chunk is raised, or reported by a transfer of several; then the chunks begin
the phase again, each in a batch of its own. Where each chunk has transfers of its own, those that failed or are late
part from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.chunk.header import ExpectedRows, HeaderRows, Pages, check_headers
from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine import image
from nixl_offload.engine.batch import Batch, InFlight, Phase, Steps, Turn
from nixl_offload.engine.copies import Packer, Payload
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.image import GroupPlan, Spans, TransferPath, host_slot
from nixl_offload.engine.jobs import JobTable
from nixl_offload.engine.link_memory import LinkMemory
from nixl_offload.engine.ratelog import RateLog
from nixl_offload.engine.records import Chunk
from nixl_offload.engine.states import ChunkState
from nixl_offload.engine.transfer_paths.checked import CheckedChunks
from nixl_offload.engine.transfer_statistics import TierStatus, Waiting
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


@dataclass(eq=False, kw_only=True)
class TierPaths:
    """How the chunks of one tier travel: what its batches share, and what all paths do with it.

    A chunk's failure is its own outcome; nothing raises for reasons of storage.
    """

    table: JobTable
    layout: KVLayout
    plans: Sequence[GroupPlan]
    """By group."""
    packer: Packer
    host: HostSlab | None
    """The slots that chunks name; None: there are none."""
    namespaces: Sequence[bytes]
    """By group, what headers carry."""
    verify_checksum: bool
    rate_log: RateLog
    keep_alive: Sequence[object]
    """What must live as long as I/O may touch its memory."""
    link_memory: LinkMemory | None = None
    """None: of the memory tier, which makes nothing but copies."""
    keys: ChunkKeys | None = None
    """None: chunks are not authenticated."""
    turn: Turn = field(default_factory=Turn)
    """The pump's stretches without a wait."""

    # -- what differs by tier ---------------------------------------------------------------------------------------

    def room(self, chunk: Chunk, in_flight: InFlight) -> int | str:
        """Return how many chunks like ``chunk`` may start now, as one batch; or in words why it shall not wait for
        room. Pure and quick: called under the table's lock. A chunk that will be rejected is always admitted.
        """
        raise NotImplementedError

    def find_slot(self, chunk: Chunk) -> None:
        """Look up the host slot of a chunk that takes one. Raises LayoutError where there is none."""
        raise NotImplementedError

    def phases(self, chunk: Chunk) -> Sequence[Phase]:
        """Return how chunks like this one travel."""
        raise NotImplementedError

    def status(self, waiting: Waiting) -> TierStatus:
        """Return how the tier stands. Safe on any thread; it may be a moment old."""
        raise NotImplementedError

    def look(self) -> float | None:
        """As ``movers.base.Mover.look``, of the tier's mover. None where there is none."""
        return None

    def close(self) -> None:
        """Nothing is in flight: close what is open."""

    # -- a batch as a whole -----------------------------------------------------------------------------------------

    @property
    def linked(self) -> LinkMemory:
        """``link_memory``, of a tier that has a link."""
        assert self.link_memory is not None
        return self.link_memory

    def begin(self, chunks: list[Chunk]) -> Batch:
        """Start chunks of one job, group and kind. Does no I/O before the first step; no step raises for a chunk that
        cannot be moved.
        """
        first = chunks[0]
        mover = None if self.link_memory is None else self.link_memory.link.mover
        batch = Batch(chunks, first.kind, self.plans[first.group], (_admit, *self.phases(first)), mover)
        batch.steps = self.run(batch)
        return batch

    def run(self, batch: Batch) -> Steps:
        """Do the phases of a batch from ``batch.phase`` on. What one raises becomes outcomes, when nothing of the batch
        is under way any more.
        """
        while batch.alive and batch.phase < len(batch.phases):
            fault: str | None = None
            try:
                yield from batch.phases[batch.phase](self, batch)
                batch.phase, batch.submitted_s = batch.phase + 1, None
                continue
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
            yield from self.await_all(batch)
            if not self.tries_singly(batch):
                self.abandon(batch, fault)
                if batch.touches_blocks or batch.kind.writes:
                    yield from self.wait_out_quarantine(batch)
                for chunk in batch.alive:
                    chunk.end(Outcome.FAILED, words, cause)
        yield from self._clear_refused(batch)

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
        ids = np.concatenate([chunk.block_ids for chunk in refused])
        try:
            yield from batch.passes([self.packer.clear(refused[0].group, ids, refused[0].job.fence)])
        except Exception as error:  # noqa: BLE001 - a device that is out of order ends the model as well
            self.rate_log.error("clear", "A chunk failed unexpectedly: %r", error, exc_info=error)

    def tries_singly(self, batch: Batch) -> bool:
        """After a failure: begin the phase again with each chunk alone, if there are several and nothing stands
        against it. Late I/O does: it may touch any slot of the batch.
        """
        chunks = batch.alive
        if len(chunks) < 2:
            return False
        if batch.is_quarantined:
            batch.plan.goes_singly = True
            return False
        self.abandon(batch, None)
        batch.split([[chunk] for chunk in chunks], self.run, again=True)
        return True

    def abandon(self, batch: Batch, error: str | None) -> None:
        """Have the link undo what was begun and not ended. ``error``: None says that storage is not to blame."""
        for chunk in batch.chunks:
            self.let_go(chunk, error)

    def let_go(self, chunk: Chunk, error: str | None) -> None:
        """As ``abandon``, of one chunk."""
        target, chunk.target = chunk.target, None
        if target is not None:
            link = self.linked.link
            try:
                (link.fail_write if chunk.kind.writes else link.fail_read)(target, error)
            except Exception as bug:  # noqa: BLE001 - the link has let go of it all the same
                self.rate_log.error("undo", "A chunk failed unexpectedly: %r", bug, exc_info=bug)

    def advance_or_end(self, batch: Batch, state: ChunkState) -> bool:
        """Move the chunks of a batch on; end those that were given up. Whether any is left."""
        chunks = batch.alive
        going = self.table.advance(chunks, state)
        for chunk, goes in zip(chunks, going, strict=True):
            if not goes:
                self.let_go(chunk, None)
                chunk.end(Outcome.FAILED, "its blocks were given away meanwhile", "needed_back")
        return any(going)

    def await_all(self, batch: Batch) -> Steps:
        """Poll until nothing of the batch is under way."""
        while batch.poll():
            yield

    def wait_out_quarantine(self, batch: Batch) -> Iterator[None]:
        """Wait until no I/O of a quarantined transfer can touch memory or location any more."""
        if batch.is_quarantined:
            release_s = self.table.clock() + QUARANTINE_S
            while self.table.clock() < release_s:
                yield

    # -- headers and checksums --------------------------------------------------------------------------------------

    def encode(self, batch: Batch, sums: Sequence[npt.NDArray[np.uint64]] | None) -> Pages:
        """Return the header pages of chunks about to be stored. ``sums``: as for ``image.encode``."""
        chunks = batch.alive
        return image.encode(self.namespaces[chunks[0].group], batch.plan, chunks, sums)

    def check(
        self,
        batch: Batch,
        pages: Sequence[npt.NDArray[np.uint8]] | None = None,
        check: Callable[[Sequence[npt.NDArray[np.uint8]], ExpectedRows], HeaderRows] = check_headers,
    ) -> CheckedChunks:
        """Check identity and lengths, with any ``verify``. A chunk whose header is not right is CORRUPT.

        ``pages``: the headers of the live chunks; None: they are in host memory, in front of the chunks. ``check``:
        another one for pages in the host slab, which other engines share.
        """
        chunks = batch.alive
        for row, chunk in enumerate(chunks):
            chunk.row = row
        if pages is None:
            pages = [image.header_page(host_slot(chunk)) for chunk in chunks]
        headers = check(pages, image.expected(self.namespaces[chunks[0].group], batch.plan, chunks))
        checked = CheckedChunks(self.rate_log, chunks, headers)
        checked.end_corrupt()
        return checked

    def verify(
        self, batch: Batch, checked: CheckedChunks, first_blocks: Sequence[int], payloads: Sequence[Payload]
    ) -> Steps:
        """Compare the checksums of the live chunks' blocks in host memory, by the device where there is one; a chunk
        with a wrong one is CORRUPT. Others have their rows in ``brought``.
        """
        chunks = batch.alive
        if not chunks:
            return
        summed = yield from self.packer.bring(chunks[0].group, payloads)
        yield from batch.passes([summed])
        checked.verify(chunks, first_blocks, summed.values())
        for chunk, first, rows in zip(chunks, first_blocks, summed.rows(), strict=True):
            if chunk.result is None:
                chunk.brought, chunk.brought_from = rows, first

    def authenticate(self, batch: Batch, checked: CheckedChunks) -> Steps:
        """Where chunks are authenticated: compare the MACs of images that were read whole, before anything else
        believes in them. A chunk without a right one is CORRUPT.
        """
        if self.keys is None:
            return
        read_bytes = 0
        for chunk in batch.alive:
            slot = host_slot(chunk)
            rows = image.valid_rows(slot, batch.plan, checked.first_valid_block(chunk))
            checked.authenticate(chunk, self.keys, image.header_page(slot), rows)
            read_bytes += rows.nbytes
            if read_bytes >= STEP_BYTES:
                read_bytes = 0
                yield

    # -- the link ---------------------------------------------------------------------------------------------------

    def take_slots(self, batch: Batch, path: TransferPath) -> bool:
        """Take a slot for each chunk that has none, if ``may_go``. When a phase begins again with single chunks, they
        have theirs. A chunk for which none is left is FAILED. Whether any chunk is left.
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
        return self.may_go(batch)

    def may_go(self, batch: Batch) -> bool:
        """Whether the link takes something of this batch now; what it does not take is FAILED.

        Asked for each thing that is opened: the answer may be yes for a single trial.
        """
        link, goes = self.linked.link, False
        may_go = link.may_store if batch.kind.writes else link.may_load
        for number, chunk in enumerate(batch.alive):
            if number == 0 or not link.shares_file:
                goes = may_go()
            if not goes:
                chunk.end(Outcome.FAILED, out_of_use(link), "disabled")
        return bool(batch.alive)

    def open_targets(self, batch: Batch) -> Steps:
        """Begin a read or write of each chunk. A chunk that cannot be moved is FAILED."""
        link, writes, plan = self.linked.link, batch.kind.writes, batch.plan
        begin = link.begin_write if writes else link.begin_read

        def begun(chunk: Chunk, target: Target) -> None:
            chunk.target = target
            if not writes and chunk.state is ChunkState.DONE:
                self.let_go(chunk, None)  # nobody waits for it any more, and nothing has been read
                chunk.end(Outcome.FAILED, "given up")

        chunks = batch.alive
        calls = [begin(chunk.key, chunk.location, plan.slot_bytes, plan.shard) for chunk in chunks]
        yield from self._call_link(chunks, calls, begun)
        self.turn.pause()

    def _call_link(
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

    # -- transfers: a phase that moves a batch. A part of one has begun it already, and goes on with the waiting ----

    def write(self, batch: Batch, spans_of: Callable[[Chunk], Spans]) -> Steps:
        """Write slots, and end their chunks."""
        if batch.submitted_s is None:
            yield from self.open_targets(batch)
            self.start_transfers(batch, lambda chunks: self.linked.submit(Op.WRITE, chunks, spans_of))
        yield from self.finish_writes(batch)

    def read(self, batch: Batch, spans_of: Callable[[Chunk], Spans]) -> Steps:
        """Read into slots. The chunks that have not arrived are ended, or have parted."""
        if batch.submitted_s is None:
            yield from self.open_targets(batch)
            self.start_transfers(batch, lambda chunks: self.linked.submit(Op.READ, chunks, spans_of))
        yield from self.arrive(batch, self.await_load(batch))
        self.finish_reads(batch)

    def start_transfers(self, batch: Batch, start: Callable[[Sequence[Chunk]], Iterator[Transfer]]) -> None:
        """Move all chunks at once where they lie in one file. Else each has transfers of its own; one that the mover
        refuses is FAILED.
        """
        batch.submitted_s = self.table.clock()
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

    def arrive(self, batch: Batch, waiting: Steps) -> Steps:
        """Wait for the transfers of a batch by ``waiting``. Where each chunk has its own, those that failed go on
        without the others, and so do those that are late: then no chunk of this batch is alive, and its parts wait.
        """
        chunks = batch.alive
        batch.may_part = len(batch.chunks) > 1 and not self.linked.link.shares_file
        if batch.may_part and 0 < len(chunks) < len(batch.chunks):
            waiting.close()
            batch.split([chunks], self.run)  # what was refused ends now, and gives its slots back
            return
        began_s = self.table.clock()
        for _ in waiting:
            if batch.may_part:
                now_s = self.table.clock()
                if batch.parts_s is None and len(_by_transfer(chunks)) > 1:
                    batch.parts_s = now_s + max(PART_AFTER_S, now_s - began_s)
                elif batch.parts_s is not None and now_s >= batch.parts_s:
                    break
            yield
        waiting.close()
        groups = _by_transfer(chunks) if batch.may_part and batch.failure is not None else []
        if len(groups) > 1:
            batch.split(groups, self.run)

    def await_load(self, batch: Batch) -> Steps:
        """As ``await_all``; the link hears of each chunk that is given up meanwhile, once."""
        waited_for = [chunk for chunk in batch.alive if not chunk.is_overdue]
        while batch.poll():
            if waited_for and waited_for[0].state is ChunkState.DONE:
                for chunk in waited_for:
                    if chunk.state is ChunkState.DONE:
                        chunk.is_overdue = True
                        self.linked.link.overdue()
                waited_for = [chunk for chunk in waited_for if not chunk.is_overdue]
            yield

    def finish_writes(self, batch: Batch) -> Steps:
        """Wait for the transfers, then make the chunks visible, or end them as FAILED."""
        yield from self.arrive(batch, self.await_all(batch))
        failure = batch.failure
        if failure is not None:
            if self.tries_singly(batch):
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
        yield from self._call_link(chunks, calls, lambda chunk, _: chunk.end(Outcome.OK))

    def finish_reads(self, batch: Batch) -> None:
        """All transfers are final: tell the link how its part ended. What has not arrived is FAILED."""
        failure = batch.failure
        if failure is not None and self.tries_singly(batch):
            return
        if failure is None or failure.missing:
            for chunk in batch.chunks:
                target, chunk.target = chunk.target, None
                if target is not None:
                    self.linked.link.end_read(target)
        if failure is not None:
            self.abandon(batch, failure.error or "read failed")
            self.rate_log.warning("read", "A chunk could not be read and will be recomputed: %s", failure.error)
            for chunk in batch.alive:
                chunk.end(Outcome.FAILED, failure.error, "missing" if failure.missing else "io")


def _admit(paths: TierPaths, batch: Batch) -> Steps:
    """End the chunks whose numbers do not fit, for memory is touched unchecked later."""
    for chunk, fault in zip(batch.chunks, image.faults(batch.plan, batch.chunks), strict=True):
        try:
            if fault is not None:
                raise LayoutError(fault)
            paths.find_slot(chunk)
        except LayoutError as error:
            paths.rate_log.error("LayoutError", "A chunk could not be moved: %s", error)
            chunk.end(Outcome.FAILED, str(error), "layout")
    paths.turn.pause()
    yield from ()
