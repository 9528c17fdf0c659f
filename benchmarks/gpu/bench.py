"""What the parts of the GPU benchmark share: the device, KV caches in shape, candidates that take turns, one table.

Threading: one thread. A candidate that fails becomes a row that says why; the others go on.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import tables
from benchmarks.engine import layout_of
from nixl_offload.engine.streams import CudaDevice, Device
from nixl_offload.movers.base import MemoryKind

KIB, MIB = 1 << 10, 1 << 20
PIECES_BYTES = (64 * KIB, 512 * KIB, 2 * MIB)
"""What of a KV block lies together."""
DEVICE_PAGE_BYTES = 64 * KIB
MIN_ROUNDS = 3
Run = Callable[[int], float]
"""Does the work of one round, whose number it is given, and returns the seconds that it took, all copies ended."""


class WrongBytesError(Exception):
    """What arrived is not what was sent: worse than anything that a row could measure."""


@dataclass(frozen=True)
class Scale:
    """How much is moved in a round."""

    total_bytes: int
    chunk_bytes: int
    blocks_per_chunk: int
    rounds: int


FULL = Scale(256 * MIB, 32 * MIB, 16, 7)
SMALL = Scale(8 * MIB, 4 * MIB, 2, 1)
"""For host memory that plays the device: shows that it works, and measures nothing."""


@dataclass
class Scene:
    """Where it is measured, and how much."""

    device: Device
    directory: Path
    """On the filesystem to be measured."""
    scale: Scale
    deadline_s: float
    """By ``time.monotonic``."""
    unfit: dict[str, str] = field(default_factory=dict)
    """Movers that crash, hang or refuse here, each with the reason: not to be tried again."""

    @staticmethod
    def make(directory: str, seconds: float, *, emulate: bool) -> Scene:
        """Return CUDA's first device, or host memory that plays one."""
        if emulate:
            torch.set_num_threads(1)  # on busy cores its threads wait for each other: a hundred times slower
            device = Device(torch.device("cpu"), MemoryKind.VRAM)
        else:
            first = torch.device("cuda", torch.cuda.current_device())
            device = CudaDevice(first)
        return Scene(device, Path(directory), SMALL if emulate else FULL, time.monotonic() + seconds)

    @property
    def emulated(self) -> bool:
        return self.device.torch_device.type == "cpu"

    def sync(self) -> None:
        """Wait for the device."""
        if not self.emulated:
            torch.cuda.synchronize(self.device.torch_device)

    def share(self, done: int, parts: int) -> float:
        """Return the deadline of the next of ``parts`` equal parts, ``done`` of which are over."""
        now_s = time.monotonic()
        return now_s + max(0.0, self.deadline_s - now_s) / (parts - done)

    def noise(self, size_bytes: int) -> torch.Tensor:
        """Return memory of the device that is full of noise, aligned as cuFile likes it."""
        whole = torch.empty(size_bytes + DEVICE_PAGE_BYTES, dtype=torch.uint8, device=self.device.torch_device)
        begin = -whole.data_ptr() % DEVICE_PAGE_BYTES
        whole[begin : begin + size_bytes].view(torch.int64).random_()
        return whole[begin : begin + size_bytes]


class Cache:
    """A KV cache of pieces of one size, four times what a round moves: rounds do not meet each other in a cache."""

    SETS = 4

    def __init__(self, scene: Scene, piece_bytes: int) -> None:
        scale = scene.scale
        layers = max(1, scale.chunk_bytes // (piece_bytes * scale.blocks_per_chunk))
        self.block_bytes = layers * piece_bytes
        self.chunks = max(1, scale.total_bytes // (self.block_bytes * scale.blocks_per_chunk))
        self.total_bytes = self.chunks * self.block_bytes * scale.blocks_per_chunk
        blocks = self.chunks * scale.blocks_per_chunk * self.SETS
        self.tensors = [scene.noise(blocks * piece_bytes).view(blocks, piece_bytes) for _ in range(layers)]
        self.layout = layout_of(self.tensors, scale.blocks_per_chunk)
        order = np.random.default_rng(1).permutation(blocks).astype(np.int32)
        self._sets = order.reshape(self.SETS, self.chunks, scale.blocks_per_chunk)
        scene.sync()

    def ids(self, number: int) -> npt.NDArray[np.int32]:
        """Return the scattered block ids of a round, shape (chunks, blocks_per_chunk)."""
        ids: npt.NDArray[np.int32] = self._sets[number % self.SETS]
        return ids

    def blocks(self, ids: npt.NDArray[np.int32]) -> torch.Tensor:
        """Return what lies in these blocks, shape (blocks, block_bytes)."""
        index = torch.from_numpy(ids.reshape(-1).astype(np.int64)).to(self.tensors[0].device)
        return torch.cat([kv.index_select(0, index) for kv in self.tensors], dim=1)


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    part: str
    case: str
    way: str
    size: str
    gb_s: float | None = None
    """Median over rounds, each byte counted once."""
    against: str = ""
    ratio: float | None = None
    """Of speeds, to ``against``: the median of each round's own."""
    note: str = ""
    """Why it was not measured."""
    failed: bool = False
    """Something is broken, not merely absent: the whole run has failed."""


@dataclass
class Contest:
    """What came of the rounds: seconds by candidate, and why one gave up."""

    size_bytes: int
    seconds: dict[str, list[float]]
    trouble: dict[str, str] = field(default_factory=dict)

    def ratio(self, name: str, base: str) -> float | None:
        """Return how much faster ``name`` is than ``base``."""
        pairs = list(zip(self.seconds.get(name, []), self.seconds.get(base, []), strict=False))
        return statistics.median(theirs / own for own, theirs in pairs) if pairs else None

    def rows(self, part: str, case: str, size_bytes: int, base: str) -> Iterator[Row]:
        """Yield a row for each candidate, with its ratio to ``base``."""
        size = f"{size_bytes >> 10} KiB"
        for name in dict.fromkeys((*self.seconds, *self.trouble)):
            if name in self.trouble:
                note = self.trouble[name]
                yield Row(part, case, name, size, note=note, failed=note.startswith(WrongBytesError.__name__))
            else:
                gb_s = self.size_bytes / statistics.median(self.seconds[name]) / 1e9
                ratio = None if name == base else self.ratio(name, base)
                yield Row(part, case, name, size, gb_s, base if ratio else "", ratio)


def contest(candidates: Mapping[str, Run], size_bytes: int, rounds: int, deadline_s: float) -> Contest:
    """Let the candidates take turns, in an order drawn for each round, after one round that warms up.

    Ends after ``rounds``, or when the next would not be over by ``deadline_s`` (``time.monotonic``), but not before
    ``MIN_ROUNDS``; once that time is over, after the first.
    """
    found = Contest(size_bytes, {name: [] for name in candidates})
    lots, longest_s = random.Random(1), 0.0
    for number in range(rounds + 1):
        begun_s = time.monotonic()
        if number > 1 and (begun_s > deadline_s or (number > MIN_ROUNDS and begun_s + longest_s > deadline_s)):
            break
        alive = [name for name in candidates if name not in found.trouble]
        for name in lots.sample(alive, len(alive)):
            try:
                seconds = candidates[name](number)
            except Exception as error:  # noqa: BLE001 - whatever it is, the others are still to be measured
                found.trouble[name] = reason(error)
                continue
            if number:
                found.seconds[name].append(seconds)
        longest_s = max(longest_s, time.monotonic() - begun_s) if number else 0.0
    return found


def reason(error: BaseException) -> str:
    """Return what a row says of an error: one line, not too long."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def table(rows: Iterable[Row]) -> str:
    """Return a line for each part, case and way, and a column for each size of pieces."""
    lines: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault((row.part, row.case, row.way), {})[row.size] = row
    sizes = sorted({size for found in lines.values() for size in found if size}, key=lambda size: int(size.split()[0]))
    shown = [
        [", ".join(names), *(_cell(found.get(size)) for size in sizes), max(row.against for row in found.values())]
        for names, found in lines.items()
    ]
    notes = {f"{row.way}: {row.note}": None for found in lines.values() for row in found.values() if row.note}
    return "\n".join([tables.table(["GB/s (ratio)", *sizes, "to"], shown), "", *notes])


def summary(rows: Sequence[Row]) -> str:
    """Return the ratio of each way with the largest pieces, in one line."""
    last = {(row.case, row.way): row.ratio for row in rows if row.ratio is not None}
    return "; ".join(f"{case} by {way} {ratio:.2f}" for (case, way), ratio in last.items()) or f"{len(rows)} rows"


def _cell(row: Row | None) -> str:
    if row is None or row.gb_s is None:
        return "–"
    return f"{row.gb_s:.1f}" if row.ratio is None else f"{row.gb_s:.1f} ({row.ratio:.2f})"
