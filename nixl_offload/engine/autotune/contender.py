"""One mover on one transfer path at work: how an image travels, and how many do so at once.

Threading: one thread. Ownership: transfers that are in flight when a turn fails are waited for; those that do not end
leave it ``hung``, and nothing that it used may be freed or closed.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from nixl_offload.engine.autotune.scratch import TrialMemory
from nixl_offload.engine.image import TransferPath
from nixl_offload.engine.pump import POLL_S
from nixl_offload.engine.streams import Stream
from nixl_offload.errors import MoverError, NixlOffloadError
from nixl_offload.movers.base import Extents, FileId, MemoryId, Mover, Op, Transfer, TransferState
from nixl_offload.types import PAGE_BYTES

TRANSFER_LIMIT_S: Final = 30.0
"""Storage that has not answered by then is taken to hang."""

Steps = Generator[None, None, None]
_ENDED: Final = object()


@dataclass(slots=True, eq=False)
class Contender:
    """``mover`` has ``file`` open. It registers memory for one turn only: no library promises that two movers may
    register the same memory at once, and the engine has only one.
    """

    name: str
    mover: Mover
    file: FileId
    path: TransferPath
    memory: TrialMemory
    limit_s: float = TRANSFER_LIMIT_S
    failure: str = ""
    """Why it is out of the running."""
    hung: bool = False
    """Transfers are still in flight."""
    tainted: bool = False
    """A failed transfer may still touch memory."""
    speeds: dict[Op, list[float]] = field(default_factory=lambda: {op: [] for op in Op})
    _registered: dict[str, MemoryId] = field(init=False, default_factory=dict)
    _in_flight: list[Transfer] = field(init=False, default_factory=list)
    _streams: dict[Op, Stream] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.path == "host":  # as the packer: out and in at once
            self._streams = {op: self.memory.device.streams.new() for op in Op}

    def run(self, op: Op, images: Sequence[int], laps: int, until_s: float) -> float:
        """Move each of ``images`` ``laps`` times, all of them at once. Returns bytes per second.

        After ``until_s`` (of ``time.monotonic``) nothing is begun any more, but one image at least is moved. Raises
        MoverError when a transfer fails or does not end; then ``failure`` is set, and perhaps ``hung`` or ``tainted``.
        """
        memory = self.memory
        regions = {"host": memory.host_region} if self.path == "host" else {"device": memory.device_region}
        if self.path == "direct":
            regions["headers"] = memory.header_region
        try:
            for name, region in regions.items():
                self._registered[name] = self.mover.register_memory(region)
            return self._run(op, list(images), laps * len(images), until_s)
        except Exception as error:
            self._settle()
            self.failure = words(self.name, error)
            raise MoverError(self.failure) from error
        finally:
            for registered in self._registered.values():
                with suppress(MoverError):  # transfers of it are in flight still: the end of the mover is its end
                    self.mover.unregister_memory(registered)
            self._registered.clear()

    def _run(self, op: Op, free: list[int], left: int, until_s: float) -> float:
        began_s = moved_s = time.monotonic()
        done, active = 0, dict[int, Steps]()
        while left or active:
            while left and free:
                if done + len(active) and time.monotonic() > until_s:
                    left = 0
                    break
                number = free.pop(0)
                active[number] = self._image(op, number)
                left -= 1
            for number, steps in list(active.items()):
                if next(steps, _ENDED) is _ENDED:
                    del active[number]
                    free.append(number)
                    done, moved_s = done + 1, time.monotonic()
            if active:
                if time.monotonic() - moved_s > self.limit_s:
                    self.hung = True
                    raise MoverError(f"storage did not answer for {self.limit_s:.0f} s")
                time.sleep(POLL_S)
        return done * self.memory.image_bytes / (moved_s - began_s)

    def _image(self, op: Op, number: int) -> Steps:
        """Move one image; yields while it waits. Raises MoverError."""
        size_bytes, begin = self.memory.image_bytes, number * self.memory.image_bytes
        if self.path == "direct":
            pieces, places = self.memory.pieces_of(number)
            header = self._submit(op, "headers", _one(number * PAGE_BYTES, PAGE_BYTES), _one(begin, PAGE_BYTES))
            yield from self._arrive(header, self._submit(op, "device", pieces, places))
            return
        if self.path == "host" and op is Op.WRITE:
            yield from self._copy(op, number)
        image = _one(begin, size_bytes)
        yield from self._arrive(self._submit(op, self.path, image, image))
        if self.path == "host" and op is Op.READ:
            yield from self._copy(op, number)

    def _submit(self, op: Op, region: str, in_memory: Extents, in_file: Extents) -> Transfer:
        transfer = self.mover.submit(op, self._registered[region], in_memory, self.file, in_file)
        self._in_flight.append(transfer)
        return transfer

    def _arrive(self, *transfers: Transfer) -> Steps:
        for transfer in transfers:
            while self.mover.poll(transfer) is TransferState.PENDING:
                yield
            self._in_flight.remove(transfer)
            if transfer.state is TransferState.FAILED:
                self.tainted |= transfer.quarantine
                raise MoverError(transfer.error or "failed")

    def _copy(self, op: Op, number: int) -> Steps:
        """Over the bus: out of the device before a write, into it after a read."""
        stream = self._streams[op]
        self.memory.copy(stream, number, to_host=op is Op.WRITE)
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
                if self.mover.poll(transfer) is not TransferState.PENDING:
                    self._in_flight.remove(transfer)
                    self.tainted |= transfer.quarantine
            self.hung = bool(self._in_flight) and time.monotonic() > deadline_s
            time.sleep(POLL_S)


def words(name: str, error: Exception) -> str:
    """Return the message of ``error`` without the mover's name; for foreign errors with their type."""
    text = str(error) if isinstance(error, NixlOffloadError) else repr(error)
    return text.removeprefix(f"{name}: ")


def _one(offset: int, length_bytes: int) -> Extents:
    return np.array([[offset, length_bytes]], dtype=np.int64)
