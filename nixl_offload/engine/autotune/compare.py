"""The comparison itself: images of chunks, written and read by every candidate in turn, through one scratch file.

Threading: one thread, that of the caller; movers keep their own. Ownership: movers are opened and closed here, memory
and file are given up in the end. What a transfer that does not end may still touch is kept for the life of the process.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

from nixl_offload.engine.autotune.candidates import MeasuredPath, Shape
from nixl_offload.engine.autotune.contender import TRANSFER_LIMIT_S, Contender, words
from nixl_offload.engine.autotune.scratch import NoRoomError, TrialMemory, scratch_file
from nixl_offload.engine.image import TransferPath
from nixl_offload.engine.pump import leak
from nixl_offload.engine.streams import Device
from nixl_offload.errors import MoverError
from nixl_offload.movers.base import FileId, Mover, Op
from nixl_offload.types import align_up

logger = logging.getLogger(__name__)

MAX_IMAGES: Final = 16
"""In flight at once, as in the engine when it is busy; the scratch file holds as many."""
MAX_SCRATCH_BYTES: Final = 256 << 20
FREE_SHARE: Final = 16
"""At most a sixteenth of what the filesystem has left is taken for the scratch file: ranks measure side by side."""
ROUNDS: Final = 3
MAX_LAPS: Final = 8
"""So often small images go through their slots per round: what takes a millisecond in all cannot be told apart."""

OpenMover = Callable[[str], Mover]
"""Opens a mover by name. May raise anything: then it cannot run here."""


def compare(
    candidates: Sequence[tuple[str, TransferPath]],
    directory: str,
    device: Device,
    shape: Shape,
    open_mover: OpenMover,
    *,
    direct_io: bool,
    budget_s: float,
    limit_s: float = TRANSFER_LIMIT_S,
    least: int = 2,
) -> tuple[MeasuredPath, ...]:
    """Open each mover of ``candidates``, and where at least ``least`` can run, measure. Returns them in their order.

    ``budget_s`` bounds the measuring, not the opening; only what is in flight then is still waited for, ``limit_s`` at
    most after the last that arrived. Nothing is raised for reasons of storage or memory: those are in the results.
    """
    comparison = _Comparison(budget_s, limit_s, direct_io=direct_io)
    try:
        for name in dict.fromkeys(name for name, _ in candidates):
            try:
                comparison.movers[name] = open_mover(name)
            except Exception as error:  # noqa: BLE001 - whatever a third party raises, the others may do
                comparison.refusals[name] = words(name, error)
        able = [(name, path) for name, path in candidates if name in comparison.movers]
        if len(able) >= least:
            try:
                host = any(path == "host" for _, path in able)
                comparison.memory = _take_memory(directory, device, shape, host=host)
                comparison.measure(able, directory, comparison.memory, least)
            except (NoRoomError, OSError) as error:
                comparison.trouble = str(error)
    finally:
        comparison.close()
    return tuple(comparison.result(name, path) for name, path in candidates)


def _take_memory(directory: str, device: Device, shape: Shape, *, host: bool) -> TrialMemory:
    """Take memory for as many images as the scratch file may hold. Raises NoRoomError, OSError."""
    image_bytes = align_up(min(shape.slot_bytes, MAX_SCRATCH_BYTES))
    space = os.statvfs(directory)
    free_bytes = space.f_bavail * space.f_frsize if space.f_blocks else MAX_SCRATCH_BYTES * FREE_SHARE
    images = min(MAX_IMAGES, min(MAX_SCRATCH_BYTES, free_bytes // FREE_SHARE) // image_bytes)
    if not images:
        raise NoRoomError(f"the disk has {free_bytes >> 20} MiB left, too little to measure with")
    return TrialMemory(device, shape, images, image_bytes, host=host)


class _Comparison:
    """``contenders`` are in the order in which they take turns."""

    def __init__(self, budget_s: float, limit_s: float, *, direct_io: bool) -> None:
        self.movers: dict[str, Mover] = {}
        self.refusals: dict[str, str] = {}
        """Why a mover cannot run here."""
        self.contenders: dict[tuple[str, TransferPath], Contender] = {}
        self.memory: TrialMemory | None = None
        self.trouble = ""
        """What stood against measuring at all."""
        self._budget_s = budget_s
        self._limit_s = limit_s
        self._direct_io = direct_io
        self._until_s = 0.0

    def measure(
        self, candidates: Sequence[tuple[str, TransferPath]], directory: str, memory: TrialMemory, least: int
    ) -> None:
        """Let all run in rounds; in each round every candidate has its turn. Raises OSError."""
        with scratch_file(directory) as (fd, scratch_path):
            files: dict[str, FileId] = {}
            for name, mover in self.movers.items():
                try:
                    size_bytes = memory.images * memory.image_bytes
                    files[name] = mover.open_file(scratch_path, size_bytes, direct_io=self._direct_io)
                except MoverError as error:
                    self.refusals[name] = words(name, error)
            os.unlink(scratch_path)  # whatever happens from here on, nothing stays behind
            # Where time is short it is movers that are compared: the second path of one waits for the first of all.
            first = dict(reversed(candidates))
            for name, path in sorted(candidates, key=lambda key: first[key[0]] != key[1]):
                if name in files:
                    mover = self.movers[name]
                    self.contenders[name, path] = Contender(name, mover, files[name], path, memory, self._limit_s)
            if len(self.contenders) >= least:
                self._until_s = time.monotonic() + self._budget_s
                self._take_turns(fd)

    def result(self, name: str, path: TransferPath) -> MeasuredPath:
        """Return what became of a candidate."""
        contender = self.contenders.get((name, path))
        refusal = self.refusals.get(name) or (contender.failure if contender else "")
        if refusal:
            return MeasuredPath(name, path, False, refusal)
        if contender is None or not all(contender.speeds.values()):
            otherwise = "nothing else can run" if contender is None else "no time was left"
            return MeasuredPath(name, path, True, f"not measured: {self.trouble or otherwise}")
        read_bytes_s, write_bytes_s = (statistics.median(contender.speeds[op]) for op in (Op.READ, Op.WRITE))
        return MeasuredPath(name, path, True, "", read_bytes_s, write_bytes_s)

    def close(self) -> None:
        """Close all movers but those that hang, whose memory is kept for ever, as that of quarantined transfers is."""
        contenders = self.contenders.values()
        hung = {contender.name for contender in contenders if contender.hung}
        keep = any(contender.hung or contender.tainted for contender in contenders)
        for contender in contenders:
            contender.synchronize()
        for name, mover in self.movers.items():
            if name in hung:
                logger.warning("%s does not answer: it is left alone, with its memory and its file", name)
                leak(mover)
                continue
            try:
                mover.close()
            except Exception as error:  # noqa: BLE001 - nobody needs it any more
                logger.warning("%s could not be closed: %s", name, words(name, error))
                leak(mover)
                keep = True
        if keep and self.memory is not None:
            leak(self.memory)

    def _take_turns(self, fd: int) -> None:
        contenders = self.contenders.values()
        turn_s = self._budget_s / (2 * (ROUNDS + 1) * len(contenders) + 2)
        images, image_s = self._fill(turn_s)
        if not images:
            failures = [contender.failure for contender in contenders]
            self.trouble = self.trouble or f"the scratch file could not be written: {failures[0]}"
            for contender in contenders:  # where none can write it is not the mover's fault
                contender.failure = "" if all(failures) and not contender.hung else contender.failure
            return
        for contender in contenders:
            if image_s < turn_s:  # buffers and threads that are made on first use
                self._turn(contender, Op.WRITE, images[:1], 1)
                self._turn(contender, Op.READ, images[:1], 1)
            for speeds in contender.speeds.values():
                speeds.clear()
        laps = max(1, min(MAX_LAPS, int(turn_s / (image_s * len(images)))))
        for _ in range(ROUNDS):
            for contender in contenders:
                self._turn(contender, Op.WRITE, images, laps)
                if not self._direct_io:  # the page cache would answer
                    os.fdatasync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                self._turn(contender, Op.READ, images, laps)

    def _fill(self, turn_s: float) -> tuple[list[int], float]:
        """Write the file for the first time, as far as a turn's time goes: later turns find real extents there.

        Returns the images that are there and the seconds that one took.
        """
        for contender in self.contenders.values():
            images: list[int] = []
            began_s, took_s = time.monotonic(), 0.0
            while len(images) < contender.memory.images and self._turn(contender, Op.WRITE, [len(images)], 1):
                images.append(len(images))
                took_s = time.monotonic() - began_s
                if took_s > turn_s:
                    break
            if images and not contender.failure:
                return images, took_s / len(images)
        return [], 0.0

    def _turn(self, contender: Contender, op: Op, images: Sequence[int], laps: int) -> bool:
        """Have ``contender`` move images and note its speed; False when it did not."""
        if contender.failure or self.trouble or time.monotonic() > self._until_s:
            return False
        try:
            contender.speeds[op].append(contender.run(op, images, laps, self._until_s))
        except MoverError:
            if contender.hung:
                self.trouble = contender.failure
            return False
        return True
