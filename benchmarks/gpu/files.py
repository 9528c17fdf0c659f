"""Device to file and back, by O_DIRECT and as many threads, on the same file: GDS_MT, our KvikIO mover and KvikIO alone
against POSIX, which goes through page-locked memory and runs everywhere.

Threading: one thread drives the movers, each of which has its own inside.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.gpu.rounds import Row, Run, WrongBytesError, contest, reason, unit
from benchmarks.gpu.scene import MIB, PIECES_BYTES, Scene
from nixl_offload.errors import MoverError
from nixl_offload.movers.base import Extents, MemoryRegion, Mover, Op, Transfer, TransferState
from nixl_offload.movers.handles import open_file
from nixl_offload.movers.select import MoverChoice

THREADS = 8
"""What our movers use by default."""
BATCH_BYTES = 8 * MIB
POLL_S = 0.0002
BASE = "posix, page-locked"
Order = npt.NDArray[np.int64]
"""Piece i of the memory meets piece ``order[i]`` of the file."""


def measure(scene: Scene) -> Iterator[Row]:
    """Rows of part ``file``."""
    total = scene.scale.total_bytes
    path = scene.directory / "pieces"
    path.write_bytes(os.urandom(total))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    memory = [scene.noise(total) for _ in range(2)]
    scene.sync()
    ways: dict[str, Way] = {}
    trouble: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for name, open_way in WAYS.items():
            try:
                way = open_way(scene, path, memory)
            except Exception as error:  # noqa: BLE001 - the others are still to be measured
                trouble[name] = reason(error)
                continue
            stack.callback(way.close)
            ways[name] = way
        for number, piece_bytes in enumerate(PIECES_BYTES):
            for step, op in enumerate((Op.WRITE, Op.READ)):
                deadline_s = scene.share(2 * number + step, 2 * len(PIECES_BYTES))
                runs = {name: _run(scene, way, op, piece_bytes, path, memory) for name, way in ways.items()}
                found = contest(runs, total, scene.scale.rounds, deadline_s)
                found.trouble.update(trouble)
                for name in WAYS:
                    yield found.row("file", op.value, name, unit(piece_bytes), BASE)
    path.unlink()


class Way:
    """One way between two buffers on the device and a file."""

    def move(self, op: Op, buffer: int, order: Order, piece_bytes: int) -> None:
        """Move every piece; all of them are there when this returns."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the file."""


def _run(scene: Scene, way: Way, op: Op, piece_bytes: int, path: Path, memory: list[torch.Tensor]) -> Run:
    pieces = scene.scale.total_bytes // piece_bytes

    def run(number: int) -> float:
        order = np.random.default_rng(number).permutation(pieces)
        buffer = memory[number % 2]
        if not number and op is Op.READ:
            buffer.zero_()
        scene.sync()
        begin = time.perf_counter()
        way.move(op, number % 2, order, piece_bytes)
        scene.sync()
        seconds = time.perf_counter() - begin
        if not number:
            _compare(path, buffer, order, piece_bytes)
        return seconds

    return run


def _compare(path: Path, buffer: torch.Tensor, order: Order, piece_bytes: int) -> None:
    """Raise WrongBytesError unless file and memory agree, piece by piece."""
    stored = np.fromfile(path, dtype=np.uint8).reshape(-1, piece_bytes)
    if not np.array_equal(stored[order], buffer.cpu().numpy().reshape(-1, piece_bytes)):
        raise WrongBytesError("file and memory differ after the round")


class Direct(Way):
    """A mover that takes device memory."""

    def __init__(self, scene: Scene, mover: Mover, path: Path, memory: list[torch.Tensor]) -> None:
        self.mover = mover
        self._buffers = [mover.register_memory(scene.region(buffer)) for buffer in memory]
        self._file = open_file(mover, str(path), path.stat().st_size, direct_io=True)

    def move(self, op: Op, buffer: int, order: Order, piece_bytes: int) -> None:
        """See Way."""
        transfers = [
            self.mover.submit(op, self._buffers[buffer], of_memory, self._file, of_file)
            for of_memory, of_file in batches(order, piece_bytes)
        ]
        settle(self.mover, transfers, lambda number: None)

    def close(self) -> None:
        """See Way."""
        self.mover.close()


class Bounced(Way):
    """A mover of host memory, and copies between that and the device beside it."""

    def __init__(self, scene: Scene, mover: Mover, path: Path, memory: list[torch.Tensor]) -> None:
        self.mover, self._memory, self._streams = mover, memory, scene.device.streams
        self._host = scene.locked(memory[0].numel())
        self._staging = mover.register_memory(MemoryRegion(self._host.data_ptr(), self._host.numel()))
        self._file = open_file(mover, str(path), path.stat().st_size, direct_io=True)

    def move(self, op: Op, buffer: int, order: Order, piece_bytes: int) -> None:
        """See Way. Reads are copied up as they arrive, writes go out as they have been copied down."""
        stream, device, host = self._streams.new(), self._memory[buffer], self._host
        parts = list(batches(order, piece_bytes))
        spans = [slice(int(at[0, 0]), int(at[-1].sum())) for at, _ in parts]

        def copy(target: torch.Tensor, source: torch.Tensor) -> None:
            def work() -> None:
                target.copy_(source, non_blocking=True)

            stream.run(work)

        def submit(number: int) -> Transfer:
            of_memory, of_file = parts[number]
            return self.mover.submit(op, self._staging, of_memory, self._file, of_file)

        if op is Op.READ:
            transfers = [submit(number) for number in range(len(parts))]
            settle(self.mover, transfers, lambda number: copy(device[spans[number]], host[spans[number]]))
        else:
            fences = []
            for span in spans:
                copy(host[span], device[span])
                fences.append(stream.record())
            transfers = []
            for number, fence in enumerate(fences):
                while not fence.done():
                    settle_some(self.mover, transfers)
                transfers.append(submit(number))
            settle(self.mover, transfers, lambda number: None)
        stream.synchronize()

    def close(self) -> None:
        """See Way."""
        self.mover.close()


class Plain(Way):
    """Kvikio, used as its documentation does."""

    def __init__(self, scene: Scene, path: Path, memory: list[torch.Tensor]) -> None:
        kvikio: Any = importlib.import_module("kvikio")
        defaults: Any = importlib.import_module("kvikio.defaults")
        defaults.set({"num_threads": THREADS, "auto_direct_io_read": True, "auto_direct_io_write": True})
        self._file = kvikio.CuFile(str(path), "r+")
        self._memory = [buffer.numpy() if scene.emulated else buffer for buffer in memory]
        self._pieces: dict[int, list[list[Any]]] = {}

    def move(self, op: Op, buffer: int, order: Order, piece_bytes: int) -> None:
        """See Way."""
        start = self._file.pread if op is Op.READ else self._file.pwrite
        if piece_bytes not in self._pieces:  # cut in the round that warms up
            self._pieces[piece_bytes] = [
                [whole[at : at + piece_bytes] for at in range(0, len(whole), piece_bytes)] for whole in self._memory
            ]
        futures = [
            start(piece, size=piece_bytes, file_offset=number * piece_bytes)
            for piece, number in zip(self._pieces[piece_bytes][buffer], order.tolist(), strict=True)
        ]
        if any(future.get() != piece_bytes for future in futures):
            raise MoverError("kvikio moved less than it was asked to")

    def close(self) -> None:
        """See Way."""
        self._file.close()


WAYS: dict[str, Callable[[Scene, Path, list[torch.Tensor]], Way]] = {
    "kvikio alone": Plain,
    "gds_mt": lambda scene, path, memory: Direct(scene, scene.mover("gds_mt"), path, memory),
    "kvikio": lambda scene, path, memory: Direct(scene, scene.mover("kvikio"), path, memory),
    BASE: lambda scene, path, memory: Bounced(scene, scene.mover("posix"), path, memory),
}


def try_mover(scene: Scene, name: MoverChoice) -> None:
    """Move some pieces each way by a mover that may crash or hang. Raises what it raises."""
    path = scene.directory / f"try-{name}"
    pieces = 2 * BATCH_BYTES // PIECES_BYTES[0]
    path.write_bytes(os.urandom(2 * BATCH_BYTES))
    memory = [scene.noise(2 * BATCH_BYTES)]
    kind = Bounced if name == "posix" else Direct
    way = kind(scene, scene.mover(name), path, memory)
    try:
        order = np.random.default_rng(1).permutation(pieces)
        for op in (Op.WRITE, Op.READ):
            scene.sync()
            way.move(op, 0, order, PIECES_BYTES[0])
            scene.sync()
            _compare(path, memory[0], order, PIECES_BYTES[0])
    finally:
        way.close()
        path.unlink()


def batches(order: Order, piece_bytes: int) -> Iterator[tuple[Extents, Extents]]:
    """Extents of memory and file, a transfer's worth at a time."""
    step = max(1, BATCH_BYTES // piece_bytes)
    for begin in range(0, len(order), step):
        pieces = order[begin : begin + step]
        lengths = np.full(len(pieces), piece_bytes)
        yield (
            np.stack([np.arange(begin, begin + len(pieces)) * piece_bytes, lengths], axis=1),
            np.stack([pieces * piece_bytes, lengths], axis=1),
        )


def settle(mover: Mover, transfers: list[Transfer], done: Callable[[int], None]) -> None:
    """Poll until all are final, calling ``done`` with the number of each as it is. Raises MoverError if one failed."""
    flying = deque(enumerate(transfers))
    while flying:
        moved_on = False
        for _ in range(len(flying)):
            number, transfer = flying.popleft()
            state = mover.poll(transfer)
            if state is TransferState.FAILED:
                raise MoverError(transfer.error or "failed")
            if state is TransferState.DONE:
                done(number)
                moved_on = True
            else:
                flying.append((number, transfer))
        if flying and not moved_on:
            time.sleep(POLL_S)


def settle_some(mover: Mover, transfers: list[Transfer]) -> None:
    """Push on what is in flight."""
    for transfer in transfers:
        mover.poll(transfer)
