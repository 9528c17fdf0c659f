"""What all ways of a chunk share: slots, the link's begin and end, waiting, and the words of an outcome.

Threading: the pump's thread. Ownership: slots belong to the flight; the pump gives them back when the generator has
ended and nothing of the flight is under way any more.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from nixl_offload.chunk.header import ShardHeader, check_header
from nixl_offload.chunk.layout import KVLayout
from nixl_offload.engine import image
from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.image import GroupPlan
from nixl_offload.engine.jobs import JobTable
from nixl_offload.engine.packer import Packer
from nixl_offload.engine.pools import Memory
from nixl_offload.engine.pump import Flight
from nixl_offload.engine.ratelog import RateLog
from nixl_offload.engine.records import ChunkIO, Stage, Task
from nixl_offload.engine.staging import S, SlotPool
from nixl_offload.errors import FormatError, TierError
from nixl_offload.movers.base import Transfer, TransferState
from nixl_offload.tiers.link import Link, Target
from nixl_offload.types import Outcome

QUARANTINE_S = 30.0
"""A transfer that failed with late I/O still possible keeps what it writes to this long before others may have it: a
direct load its KV blocks, a store its location. Siblings of a failed transfer were seen to go on for two seconds;
staging slots can be retired for good, these cannot."""


@dataclass(frozen=True, slots=True)
class Context:
    """One engine's, for all flights. What is raised in here ends as the outcome of a chunk (``paths.ChunkPaths``)."""

    table: JobTable
    layout: KVLayout
    packer: Packer
    device_packer: DevicePacker | None
    """None: nothing is packed on the device."""
    memory: Memory
    namespace: bytes
    """Of the rank."""
    verify_checksum: bool
    clock: Callable[[], float]
    complaints: RateLog

    def acquire(self, flight: Flight, pool: SlotPool[S] | None) -> S:
        """Take a slot for the flight. Raises TierError when none is left."""
        slot = pool.acquire() if pool is not None else None
        if pool is None or slot is None:
            self.complaints.error(
                "staging", "No staging memory is left (all of it retired): nothing is stored or loaded"
            )
            raise TierError("no staging memory is left", cause="io")
        flight.slots.append((pool, slot))
        return slot

    def may_store(self, task: Task, link: Link) -> bool:
        """Whether the link takes a store now; if not, the chunk is FAILED."""
        if link.may_store():
            return True
        self.table.finish(task, Outcome.FAILED, f"storage is out of use: {link.trouble}", "out_of_use")
        return False

    def may_load(self, task: Task, link: Link) -> bool:
        """Likewise for a load."""
        if link.may_load():
            return True
        self.table.finish(task, Outcome.FAILED, f"storage is out of use: {link.trouble}", "out_of_use")
        return False

    def begin_write(self, flight: Flight, link: Link, plan: GroupPlan) -> Generator[None, None, Target]:
        """Open the place of a store. Raises TierError."""
        io = flight.task.io
        target = yield from link.begin_write(io.key, io.location, plan.slot_bytes)
        flight.undo = partial(link.fail_write, target)
        return target

    def begin_read(self, flight: Flight, link: Link, plan: GroupPlan) -> Generator[None, None, Target]:
        """Open what is to be loaded. Raises TierError."""
        io = flight.task.io
        target = yield from link.begin_read(io.key, io.location, plan.slot_bytes)
        flight.undo = partial(link.fail_read, target)
        return target

    def settle(self, flight: Flight, link: Link | None = None) -> Iterator[None]:
        """Poll until nothing of the flight is under way. ``link`` is told when nobody waits for it any more."""
        while flight.poll():
            if link is not None and flight.task.stage is Stage.DONE:
                link.overdue()
                link = None
            yield

    def outlast(self, flight: Flight) -> Iterator[None]:
        """Wait until late I/O of a quarantined transfer must be over."""
        if quarantined(flight):
            release_s = self.clock() + QUARANTINE_S
            while self.clock() < release_s:
                yield

    def finish_store(self, flight: Flight, link: Link, target: Target) -> Iterator[None]:
        """All transfers are final: make the chunk visible, or tell why it is FAILED. Raises TierError."""
        failure = _failure(flight.transfers)
        if failure is None and not flight.task.disowned:
            flight.undo = None
            if flight.direct:
                self.table.advance(flight.task, Stage.IO)  # all is read: what makes it visible needs no KV blocks
            yield from link.end_write(target)
            self.table.finish(flight.task, Outcome.OK)
            return
        words = failure.error or "write failed" if failure is not None else None
        flight.abandon(words)
        if flight.direct:
            self.table.advance(flight.task, Stage.IO)  # late reads of the KV blocks spoil nothing but this location
        yield from self.outlast(flight)
        cause = "needed_back" if words is None else "io"
        words = words or "its blocks were given away while they were written"
        self.table.finish(flight.task, Outcome.FAILED, words, cause)

    def finish_read(self, flight: Flight, link: Link, target: Target) -> bool:
        """Tell the link how its part ended; False, and the chunk is FAILED, when it did not end well."""
        failure = _failure(flight.transfers)
        if failure is None or failure.missing:
            flight.undo = None
            link.end_read(target)
        if failure is None:
            return True
        flight.abandon(failure.error or "read failed")
        self.complaints.warning("read", "A chunk could not be read and will be recomputed: %s", failure.error)
        self.table.finish(flight.task, Outcome.FAILED, failure.error, "missing" if failure.missing else "io")
        return False

    def checked_header(self, page: npt.NDArray[np.uint8], plan: GroupPlan, io: ChunkIO) -> ShardHeader:
        """Identity, lengths and presence of the wanted blocks, whatever ``verify`` says. Raises FormatError."""
        header = check_header(page, image.expected(self.namespace, plan, io))
        require_blocks(header, io)
        return header


def require_blocks(header: ShardHeader, io: ChunkIO) -> None:
    """Raise FormatError when a wanted block was never stored."""
    if header.first_valid_block > io.first_block:
        raise FormatError(
            f"block {io.first_block} was asked for, the shard begins with {header.first_valid_block}",
            reason="blocks",
        )


def quarantined(flight: Flight) -> bool:
    """Whether late I/O of the flight is possible."""
    return any(transfer.quarantine for transfer in flight.transfers)


def _failure(transfers: Sequence[Transfer]) -> Transfer | None:
    return next((transfer for transfer in transfers if transfer.state is not TransferState.DONE), None)
