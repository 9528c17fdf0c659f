"""One candidate at work: how an image travels by its way, and how many do so at once.

Threading: one thread. Ownership: transfers that are in flight when a run fails are waited for; those that do not end
leave it ``hung``, and nothing that it used may be freed or closed.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from nixl_offload.engine.choice.memory import TrialMemory, queue_copy
from nixl_offload.engine.image import Way
from nixl_offload.engine.pump import POLL_S
from nixl_offload.engine.streams import Stream
from nixl_offload.errors import MoverError, NixlOffloadError
from nixl_offload.movers.base import Extents, FileId, MemoryId, Mover, Op, Transfer, TransferState
from nixl_offload.types import PAGE_BYTES

TRANSFER_LIMIT_S: Final = 30.0
"""Storage that has not answered by then is taken to hang."""

Steps = Generator[None, None, None]


class Opened:
    """A mover that has the trial's file, and memory as its ways need it. Closing the mover closes all."""

    def __init__(self, name: str, mover: Mover, memory: TrialMemory) -> None:
        self.name = name
        self.mover = mover
        self.memory = memory
        self._file: FileId | None = None
        self._regions: dict[str, MemoryId] = {}

    def open(self, path: str, *, direct_io: bool) -> MoverError | None:
        """Open the file; return what stands against it."""
        length_bytes = self.memory.images * self.memory.image_bytes
        try:
            self._file = self.mover.open_file(path, length_bytes, direct_io=direct_io)
        except MoverError as error:
            return error
        return None

    @contextmanager
    def registered(self, way: Way) -> Iterator[None]:
        """Have the memory that ``way`` needs registered, for a turn: what two movers at once make of the same memory in
        the same library, nobody promises, and in the engine there is but one of them. Raises MoverError.
        """
        memory = self.memory
        wanted = {"host": memory.host_region} if way == "host" else {"device": memory.device_region}
        if way == "direct":
            wanted["headers"] = memory.header_region
        try:
            for name, region in wanted.items():
                self._regions[name] = self.mover.register_memory(region)
            yield
        finally:
            for name in list(self._regions):
                with suppress(MoverError):  # transfers of it are in flight still: the end of the mover is its end
                    self.mover.unregister_memory(self._regions.pop(name))

    def submit(
        self, op: Op, region: Literal["host", "device", "headers"], in_memory: Extents, in_file: Extents
    ) -> Transfer:
        """Start a transfer. Raises MoverError."""
        assert self._file is not None
        return self.mover.submit(op, self._regions[region], in_memory, self._file, in_file)


@dataclass(slots=True, eq=False)
class Runner:
    """A mover and a way."""

    opened: Opened
    way: Way
    limit_s: float = TRANSFER_LIMIT_S
    failure: str = ""
    """Why it is out of the running."""
    hung: bool = False
    """Transfers are still in flight."""
    tainted: bool = False
    """A failed transfer may still touch memory."""
    speeds: dict[Op, list[float]] = field(default_factory=lambda: {op: [] for op in Op})
    _in_flight: list[Transfer] = field(init=False, default_factory=list)
    _streams: dict[Op, Stream] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.way == "host":  # as the packer: out and in at once
            self._streams = {op: self.opened.memory.device.streams.new() for op in Op}

    def run(self, op: Op, images: Sequence[int], laps: int, until_s: float) -> tuple[int, float]:
        """Move each of ``images`` ``laps`` times, all of them at once. Returns bytes moved and the seconds it took.

        After ``until_s`` (of ``time.monotonic``) nothing is begun any more, but one image at least is moved. Raises
        MoverError when a transfer fails or does not end; then ``failure`` is set, and perhaps ``hung`` or ``tainted``.
        """
        try:
            with self.opened.registered(self.way):
                return self._run(op, images, laps, until_s)
        except Exception as error:
            self.failure = words(self.opened.name, error)
            raise MoverError(self.failure) from error

    def _run(self, op: Op, images: Sequence[int], laps: int, until_s: float) -> tuple[int, float]:
        began_s = moved_s = time.monotonic()
        free, left, done, active = list(images), laps * len(images), 0, list[tuple[int, Steps]]()
        try:
            while left or active:
                while left and free:
                    if done + len(active) and time.monotonic() > until_s:
                        left = 0
                        break
                    number = free.pop(0)
                    active.append((number, self._image(op, number)))
                    left -= 1
                still = []
                for number, steps in active:
                    if _advance(steps):
                        still.append((number, steps))
                        continue
                    free.append(number)
                    done, moved_s = done + 1, time.monotonic()
                active = still
                if active:
                    if time.monotonic() - moved_s > self.limit_s:
                        self.hung = True
                        raise MoverError(f"storage did not answer for {self.limit_s:.0f} s")
                    time.sleep(POLL_S)
        except Exception:
            self._settle()
            raise
        return done * self.opened.memory.image_bytes, moved_s - began_s

    def _image(self, op: Op, number: int) -> Steps:
        """Move one image; yields while it waits. Raises MoverError."""
        memory = self.opened.memory
        size_bytes, begin = memory.image_bytes, number * memory.image_bytes
        if self.way == "direct":
            pieces, places = memory.pieces_of(number)
            page = _one(number * PAGE_BYTES, PAGE_BYTES)
            header = self._started(self.opened.submit(op, "headers", page, _one(begin, PAGE_BYTES)))
            yield from self._arrive(header, self._started(self.opened.submit(op, "device", pieces, places)))
            return
        if self.way == "host" and op is Op.WRITE:
            yield from self._copy(op, number)
        image = _one(begin, size_bytes)
        yield from self._arrive(self._started(self.opened.submit(op, self.way, image, image)))
        if self.way == "host" and op is Op.READ:
            yield from self._copy(op, number)

    def _started(self, transfer: Transfer) -> Transfer:
        self._in_flight.append(transfer)
        return transfer

    def _arrive(self, *transfers: Transfer) -> Steps:
        for transfer in transfers:
            while self.opened.mover.poll(transfer) is TransferState.PENDING:
                yield
            self._in_flight.remove(transfer)
            if transfer.state is TransferState.FAILED:
                self.tainted |= transfer.quarantine
                raise MoverError(transfer.error or "failed")

    def _copy(self, op: Op, number: int) -> Steps:
        """Over the bus: out of the device before a write, into it after a read."""
        memory, stream = self.opened.memory, self._streams[op]
        ends = memory.image_of(memory.on_host, number), memory.image_of(memory.on_device, number)
        queue_copy(stream, *(ends if op is Op.WRITE else ends[::-1]))
        fence = stream.record()
        while not fence.done():
            yield

    def synchronize(self) -> None:
        """Wait for its copies. What these raise was told before, or does not matter any more."""
        for stream in self._streams.values():
            with suppress(Exception):
                stream.synchronize()

    def _settle(self) -> None:
        """After a failure: wait for what is in flight, unless it is known to hang."""
        self.synchronize()
        deadline_s = time.monotonic() + self.limit_s
        while self._in_flight and not self.hung:
            for transfer in list(self._in_flight):
                if self.opened.mover.poll(transfer) is not TransferState.PENDING:
                    self._in_flight.remove(transfer)
                    self.tainted |= transfer.quarantine
            self.hung = bool(self._in_flight) and time.monotonic() > deadline_s
            time.sleep(POLL_S)


def _advance(steps: Steps) -> bool:
    """Go on with an image; False when it is done."""
    try:
        next(steps)
    except StopIteration:
        return False
    return True


def words(name: str, error: Exception) -> str:
    """What ``error`` says, without the name of the mover; whose it is where it is none of ours."""
    text = str(error) if isinstance(error, NixlOffloadError) else repr(error)
    return text.removeprefix(f"{name}: ")


def _one(offset: int, length_bytes: int) -> Extents:
    return np.array([[offset, length_bytes]], dtype=np.int64)
