"""The comparison itself: images of chunks, written and read by every candidate in turn, through one scratch file.

Threading: one thread, that of the caller; movers keep their own. Ownership: movers are opened and closed here, memory
and file are given up in the end. What a transfer that does not end may still touch is kept for the life of the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from nixl_offload.engine.choice import cache
from nixl_offload.engine.choice.base import Candidate, Shape
from nixl_offload.engine.choice.memory import NoRoomError, TrialMemory
from nixl_offload.engine.choice.runner import TRANSFER_LIMIT_S, Opened, Runner, words
from nixl_offload.engine.image import Way
from nixl_offload.engine.pump import LEAKED
from nixl_offload.engine.streams import Device
from nixl_offload.errors import MoverError
from nixl_offload.movers.base import Mover, Op
from nixl_offload.types import align_up

logger = logging.getLogger(__name__)

MAX_IMAGES: Final = 16
"""In flight at once, as in the engine when it is busy; the scratch file holds as many."""
MAX_SCRATCH_BYTES: Final = 256 << 20
FREE_SHARE: Final = 4
"""At most a quarter of what the filesystem has left is taken for the scratch file."""
ROUNDS: Final = 3
MAX_LAPS: Final = 8
"""So often small images go through their slots per round: what takes a millisecond in all cannot be told apart."""

OpenMover = Callable[[str], Mover]
"""Opens a mover by name. May raise anything: then it cannot run here."""


class Verdict(NamedTuple):
    """What came of a trial."""

    candidates: tuple[Candidate, ...]
    """In the order in which they were asked for."""
    finished: bool
    """Whatever can run has figures, or is the only one: another trial would come to the same."""
    trouble: str
    """What stood against measuring all; empty when nothing did."""


def hold_trial(
    ways: Sequence[tuple[str, Way]],
    directory: str,
    device: Device,
    shape: Shape,
    open_mover: OpenMover,
    *,
    direct_io: bool,
    budget_s: float,
    limit_s: float = TRANSFER_LIMIT_S,
) -> Verdict:
    """Open each mover of ``ways``, and where more than one way can run, measure.

    ``budget_s`` bounds the measuring, not the opening; only what is in flight then is still waited for, ``limit_s`` at
    most after the last that arrived. Nothing is raised for reasons of storage or memory: they are the ``trouble``.
    """
    trial = _Trial(budget_s, limit_s)
    reasons: dict[str, str] = {}
    try:
        for name in dict.fromkeys(name for name, _ in ways):
            opened = _try(open_mover, name)
            if isinstance(opened, str):
                reasons[name] = opened
            else:
                trial.movers[name] = opened
        able = [(name, way) for name, way in ways if name in trial.movers]
        if len(able) > 1:
            try:
                memory = _take_memory(directory, device, shape, host=any(way == "host" for _, way in able))
                trial.measure(able, directory, memory, direct_io=direct_io)
            except (NoRoomError, OSError) as error:
                trial.trouble = str(error)
    finally:
        trial.close()
    found = tuple(trial.judge(name, way, reasons.get(name)) for name, way in ways)
    running = [candidate for candidate in found if candidate.ok]
    compared = all(candidate.measured for candidate in running) and not any(r.failure for r in trial.runners.values())
    return Verdict(found, not trial.trouble and (compared or len(able) == 1), trial.trouble)


def _try(open_mover: OpenMover, name: str) -> Mover | str:
    try:
        return open_mover(name)
    except Exception as error:  # noqa: BLE001 - whatever a third party raises, the others may do
        return words(name, error)


def _take_memory(directory: str, device: Device, shape: Shape, *, host: bool) -> TrialMemory:
    """Take memory for as many images as the scratch file may hold. Raises NoRoomError, OSError."""
    image_bytes = align_up(min(shape.slot_bytes, MAX_SCRATCH_BYTES))
    space = os.statvfs(directory)
    free_bytes = space.f_bavail * space.f_frsize if space.f_blocks else MAX_SCRATCH_BYTES * FREE_SHARE
    images = min(MAX_IMAGES, min(MAX_SCRATCH_BYTES, free_bytes // FREE_SHARE) // image_bytes)
    if not images:
        raise NoRoomError(f"the disk has {free_bytes >> 20} MiB left, too little to measure with")
    return TrialMemory(device, shape, images, image_bytes, host=host)


class _Trial:
    """Its runners are in the order in which they take turns."""

    def __init__(self, budget_s: float, limit_s: float) -> None:
        self.movers: dict[str, Mover] = {}
        self.runners: dict[tuple[str, Way], Runner] = {}
        self.refused: dict[tuple[str, Way], str] = {}
        self.trouble = ""
        self._memory: TrialMemory | None = None
        self._budget_s = budget_s
        self._limit_s = limit_s
        self._until_s = 0.0

    def measure(self, ways: Sequence[tuple[str, Way]], directory: str, memory: TrialMemory, *, direct_io: bool) -> None:
        """Let all candidates run in rounds; in each round every candidate has its turn. Raises OSError."""
        self._memory = memory
        with _scratch_file(directory) as (fd, path):
            for name, mover in self.movers.items():
                opened = Opened(name, mover, memory)
                refusal = opened.open(path, direct_io=direct_io)
                for way in (way for of, way in ways if of == name):
                    if refusal is None:
                        self.runners[name, way] = Runner(opened, way, self._limit_s)
                    else:
                        self.refused[name, way] = words(name, refusal)
            os.unlink(path)  # whatever happens from here on, nothing stays behind
            if len(self.runners) < 2:
                return
            # Where time is short it is movers that are compared: the second way of one waits for the first of all.
            first = dict(reversed(self.runners))
            order = sorted(self.runners, key=lambda key: first[key[0]] != key[1])
            self.runners = {key: self.runners[key] for key in order}
            self._until_s = time.monotonic() + self._budget_s
            self._take_turns(fd, direct_io=direct_io)

    def judge(self, name: str, way: Way, why_not: str | None) -> Candidate:
        """Return what became of a candidate; ``why_not``: its mover could not even be opened."""
        runner = self.runners.get((name, way))
        why_not = why_not or self.refused.get((name, way)) or (runner.failure if runner else "")
        if why_not:
            return Candidate(name, way, False, why_not)
        if runner is None or not all(runner.speeds.values()):
            otherwise = "nothing else can run" if runner is None else "no time was left"
            return Candidate(name, way, True, f"not measured: {self.trouble or otherwise}")
        return Candidate(name, way, True, "", *(statistics.median(runner.speeds[op]) for op in (Op.READ, Op.WRITE)))

    def close(self) -> None:
        """Close all movers but those that hang, whose memory is kept for ever, as that of quarantined transfers is."""
        hung = {name for (name, _), runner in self.runners.items() if runner.hung}
        keep = any(runner.hung or runner.tainted for runner in self.runners.values())
        for runner in self.runners.values():
            runner.synchronize()
        for name, mover in self.movers.items():
            if name in hung:
                logger.warning("%s does not answer: it is left alone, with its memory and its file", name)
                LEAKED.append(mover)
                continue
            try:
                mover.close()
            except Exception as error:  # noqa: BLE001 - nobody needs it any more
                logger.warning("%s could not be closed: %s", name, words(name, error))
                LEAKED.append(mover)
                keep = True
        if keep and self._memory is not None:
            LEAKED.append(self._memory)

    def _take_turns(self, fd: int, *, direct_io: bool) -> None:
        turn_s = self._budget_s / (2 * (ROUNDS + 1) * len(self.runners) + 2)
        images, image_s = self._fill(turn_s)
        if not images:
            failures = [runner.failure for runner in self.runners.values()]
            self.trouble = self.trouble or f"the scratch file could not be written: {failures[0]}"
            for runner in self.runners.values():  # where none can write it is not the mover's fault
                runner.failure = "" if all(failures) and not runner.hung else runner.failure
            return
        for runner in self.runners.values():
            if image_s < turn_s:  # buffers and threads that are made on first use
                self._turn(runner, Op.WRITE, images[:1], 1)
                self._turn(runner, Op.READ, images[:1], 1)
            for speeds in runner.speeds.values():
                speeds.clear()
        laps = max(1, min(MAX_LAPS, int(turn_s / (image_s * len(images)))))
        for _ in range(ROUNDS):
            for runner in self.runners.values():
                self._turn(runner, Op.WRITE, images, laps)
                if not direct_io:  # the page cache would answer
                    os.fdatasync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                self._turn(runner, Op.READ, images, laps)

    def _fill(self, turn_s: float) -> tuple[list[int], float]:
        """Write the file for the first time, as far as a turn's time goes: later turns find real extents there.

        Returns the images that are there and the seconds that one took.
        """
        for runner in self.runners.values():
            images: list[int] = []
            began_s, took_s = time.monotonic(), 0.0
            while len(images) < runner.opened.memory.images and self._turn(runner, Op.WRITE, [len(images)], 1):
                images.append(len(images))
                took_s = time.monotonic() - began_s
                if took_s > turn_s:
                    break
            if images and not runner.failure:
                return images, took_s / len(images)
        return [], 0.0

    def _turn(self, runner: Runner, op: Op, images: Sequence[int], laps: int) -> bool:
        """Have ``runner`` move images and note its speed; False when it did not."""
        if runner.failure or self.trouble or time.monotonic() > self._until_s:
            return False
        try:
            moved_bytes, took_s = runner.run(op, images, laps, self._until_s)
        except MoverError:
            if runner.hung:
                self.trouble = runner.failure
            return False
        runner.speeds[op].append(moved_bytes / took_s)
        return True


@contextmanager
def _scratch_file(directory: str) -> Iterator[tuple[int, str]]:
    """A private, empty file: its descriptor, which is not for direct I/O, and its name. Raises OSError."""
    path = cache.new_scratch_path(directory)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield fd, path
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(path)
