"""The engine's paths between device memory and a slab: direct, packed on the device, packed on the host.

``unfit_movers`` tries each mover alone first, in a process that may crash or hang. Where direct becomes as fast as
packed on the device is the threshold, for each mover of its own.

Threading: the caller's thread submits and asks; each engine has its pump.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks.contest import Contest, Row, Run, WrongBytesError, contest, reason
from benchmarks.engine import DrivenEngine, chunk_in_slot, over_slab
from benchmarks.gpu.bench import PIECES_BYTES, Cache, Scene
from nixl_offload.errors import MoverError
from nixl_offload.movers.base import MemoryRegion, Op
from nixl_offload.movers.select import MoverChoice, open_mover

NEVER = 1 << 40
"""As smallest extent to go direct: none is."""


@dataclass(frozen=True)
class Kind:
    """How an engine is made to go one way."""

    mover: MoverChoice
    staging: Literal["host", "device"]
    direct_min_extent_bytes: int


HOST = "packed on the host, posix"
KINDS: dict[str, Kind] = {
    HOST: Kind("posix", "host", NEVER),
    "packed on the device, gds_mt": Kind("gds_mt", "device", NEVER),
    "direct, gds_mt": Kind("gds_mt", "device", 0),
    "packed on the device, kvikio": Kind("kvikio", "device", NEVER),
    "direct, kvikio": Kind("kvikio", "device", 0),
}
PROBED: dict[str, Kind] = {kind.mover: kind for kind in KINDS.values()}
"""The last of each mover: direct, where there is one."""


def measure(scene: Scene) -> Iterator[Row]:
    """Yield rows of part ``engine``."""
    for number, piece_bytes in enumerate(PIECES_BYTES):
        for op, found in _contests(scene, Cache(scene, piece_bytes), number):
            yield from found.rows(HOST, "engine", op.value, f"{piece_bytes >> 10} KiB")


def probe(scene: Scene, name: str) -> None:
    """Store and load some chunks by one mover, which may crash or hang. Raises what it raises."""
    cache = Cache(scene, PIECES_BYTES[0])
    with driven(scene, cache, PROBED[name], f"probe-{name}") as way:
        way.store(0)
        way.load(0)


def unfit_movers(
    directory: str, limit_s: float, *, emulate: bool, names: tuple[str, ...] = (*PROBED,)
) -> dict[str, str]:
    """Probe movers, all at once, each in a process. Returns what stands against each that does not run here."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--dir", directory, *(["--emulate"] if emulate else [])]
    end_s = time.monotonic() + limit_s
    probes = {
        name: subprocess.Popen([*command, "--probe", name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name in names
    }
    unfit = {}
    for name, process in probes.items():
        try:
            output, _ = process.communicate(timeout=max(0.1, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            unfit[name] = "it hung and was killed"
            continue
        if process.returncode:
            print(output)
            last = (output.strip().splitlines() or ["no output"])[-1]
            unfit[name] = last if process.returncode == 1 else f"it ended with {process.returncode}: {last}"
    return unfit


class Driven:
    """One engine over its own slab. What round 0 stores is what all loads bring back, to other blocks each time."""

    def __init__(self, scene: Scene, cache: Cache, engine: DrivenEngine) -> None:
        self._scene, self._cache, self._engine = scene, cache, engine
        self._stored_by = 0

    def store(self, number: int) -> Run:
        """Store a round's chunks."""
        self._stored_by = number
        return self._move(Op.WRITE, number)

    def load(self, number: int) -> Run:
        """Load what was stored last to other blocks. The stored blocks stay, to be compared with."""
        target = self._stored_by + 1 + number % (self._cache.SETS - 1)
        run = self._move(Op.READ, target)
        if not number and not torch.equal(self._cache.blocks(target), self._cache.blocks(self._stored_by)):
            raise WrongBytesError("other bytes were loaded than had been stored")
        return run

    def _move(self, op: Op, number: int) -> Run:
        slot_bytes = self._cache.layout.slot_bytes(0)
        chunks = [chunk_in_slot(slot, slot_bytes, ids) for slot, ids in enumerate(self._cache.ids(number))]
        self._scene.sync()
        return Run(self._engine.move(op, chunks, job_chunks=len(chunks), at_a_time=1))


@contextlib.contextmanager
def driven(scene: Scene, cache: Cache, kind: Kind, name: str) -> Iterator[Driven]:
    """Open an engine and its slab, and remove both in the end. Raises NixlOffloadError if it cannot run here."""
    if kind.mover in scene.unfit:
        raise MoverError(scene.unfit[kind.mover])
    scratch = None
    if scene.emulated:
        memory = scene.noise(64 << 10)
        scratch = MemoryRegion(memory.data_ptr(), memory.numel(), scene.device.kind, scene.device.number)
    path = scene.directory / f"{name}.slab"
    engine = over_slab(
        path,
        cache.chunks,
        open_mover(kind.mover, scene.device.kind, str(scene.directory), scratch=scratch).mover,
        cache.tensors,
        cache.layout,
        staging_bytes=max(2 * cache.layout.slot_bytes(0), scene.scale.total_bytes),
        direct_min_extent_bytes=kind.direct_min_extent_bytes,
        device=scene.device,
        staging=kind.staging,
    )
    try:
        yield Driven(scene, cache, engine)
    finally:
        engine.close()
        path.unlink(missing_ok=True)


def _contests(scene: Scene, cache: Cache, number: int) -> Iterator[tuple[Op, Contest]]:
    """Stores, then loads of what was stored; everything is closed after the second."""
    with contextlib.ExitStack() as stack:
        ways: dict[str, Driven] = {}
        trouble: dict[str, str] = {}
        for name, kind in KINDS.items():
            try:
                ways[name] = stack.enter_context(driven(scene, cache, kind, f"way-{len(ways)}"))
            except Exception as error:  # noqa: BLE001 - the others are still to be measured
                trouble[name] = reason(error)
        for step, op in enumerate((Op.WRITE, Op.READ)):
            turns = {name: way.store if op is Op.WRITE else way.load for name, way in ways.items()}
            deadline_s = scene.share(2 * number + step, 2 * len(PIECES_BYTES))
            found = contest(turns, cache.total_bytes, scene.scale.rounds, deadline_s)
            trouble = found.trouble = {**trouble, **found.trouble}
            ways = {name: way for name, way in ways.items() if name not in trouble}
            yield op, found
