"""The engine's ways between device memory and a slab: direct, packed on the device, packed on the host; store and load.

Where direct becomes better than packed on the device is the threshold, for each mover of its own.
Threading: the caller's thread submits and asks; each engine has its pump.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks.gpu.rounds import Contest, Row, Run, WrongBytesError, contest, reason, unit
from benchmarks.gpu.scene import PIECES_BYTES, Cache, Scene
from nixl_offload.engine import ChainEngine, Chunk, Engine
from nixl_offload.movers.select import MoverChoice
from nixl_offload.tiers.slab.file import SlabFile
from nixl_offload.tiers.slab.link import SlabLink
from nixl_offload.types import Key, Location, Outcome, align_up

NEVER = 1 << 40
"""As smallest extent to go direct: none is."""
AS_FAST = 0.97
"""What is no slower than this is taken for as fast: rounds differ by more."""
JOB_TIMEOUT_S = 60.0
HOST = "packed on the host, posix"


@dataclass(frozen=True)
class Kind:
    """How an engine is made to go one way."""

    mover: MoverChoice
    staging: Literal["host", "device"]
    direct_min_extent_bytes: int


DIRECT = {mover: f"direct, {mover}" for mover in ("gds_mt", "kvikio")}
PACKED = {mover: f"packed on the device, {mover}" for mover in ("gds_mt", "kvikio")}
KINDS: dict[str, Kind] = {
    HOST: Kind("posix", "host", NEVER),
    PACKED["gds_mt"]: Kind("gds_mt", "device", NEVER),
    DIRECT["gds_mt"]: Kind("gds_mt", "device", 0),
    PACKED["kvikio"]: Kind("kvikio", "device", NEVER),
    DIRECT["kvikio"]: Kind("kvikio", "device", 0),
}


def measure(scene: Scene) -> Iterator[Row]:
    """Rows of part ``engine``, and of part ``threshold``."""
    ratios: dict[str, dict[int, list[float]]] = {mover: {} for mover in DIRECT}
    for number, piece_bytes in enumerate(PIECES_BYTES):
        cache = Cache(scene, piece_bytes)
        for op, found in _contests(scene, cache, number):
            size = unit(piece_bytes)
            for name in KINDS:
                yield found.row("engine", op, name, size, HOST)
            for mover, direct in DIRECT.items():
                ratio = found.ratio(direct, PACKED[mover])
                if ratio is not None:
                    ratios[mover].setdefault(piece_bytes, []).append(ratio)
                    yield Row("threshold", op, direct, size, found.gb_s(direct), PACKED[mover], ratio)
    for mover in DIRECT:
        yield _threshold(mover, ratios[mover])


def _threshold(mover: str, ratios: dict[int, list[float]]) -> Row:
    """The smallest piece from which on direct is no slower than packed, stores and loads alike."""
    if len(ratios) < len(PIECES_BYTES):
        return Row("threshold", "direct or packed", mover, note="not measured: see the rows of part engine")
    least = {piece: min(both) for piece, both in ratios.items()}
    direct = [
        piece for piece in PIECES_BYTES if all(least[larger] >= AS_FAST for larger in PIECES_BYTES if larger >= piece)
    ]
    words = f"direct from {unit(direct[0])} on" if direct else f"packed up to {unit(PIECES_BYTES[-1])} at least"
    return Row("threshold", "direct or packed", mover, note=words)


def _contests(scene: Scene, cache: Cache, number: int) -> Iterator[tuple[str, Contest]]:
    """Stores, then loads of what was stored; everything is closed after the second."""
    with contextlib.ExitStack() as stack:
        ways: dict[str, Driven] = {}
        trouble: dict[str, str] = {}
        for name, kind in KINDS.items():
            try:
                ways[name] = stack.enter_context(driven(scene, cache, kind, f"way-{len(ways)}"))
            except Exception as error:  # noqa: BLE001 - the others are still to be measured
                trouble[name] = reason(error)
        for step, op in enumerate(("store", "load")):
            runs: dict[str, Run] = {name: getattr(way, op) for name, way in ways.items()}
            deadline_s = scene.share(2 * number + step, 2 * len(PIECES_BYTES))
            found = contest(runs, cache.total_bytes, scene.scale.rounds, deadline_s)
            found.trouble.update(trouble)
            for name in found.trouble:
                ways.pop(name, None)
            trouble = dict(found.trouble)
            yield op, found


class Driven:
    """One engine over its own slab. What round 0 stores is what all loads bring back, to other blocks each time."""

    def __init__(self, scene: Scene, cache: Cache, engine: ChainEngine, slot_bytes: int) -> None:
        self._scene, self._cache, self._engine, self._slot_bytes = scene, cache, engine, slot_bytes
        self._jobs = 0
        self._stored_by = 0

    def store(self, number: int) -> float:
        """See rounds.Run."""
        self._stored_by = number
        return self._job(self._chunks(number), is_store=True)

    def load(self, number: int) -> float:
        """See rounds.Run. The blocks of the last store are never loaded to: they are what is compared with."""
        target = self._stored_by + 1 + number % (self._cache.SETS - 1)
        seconds = self._job(self._chunks(target), is_store=False)
        if not number:
            wanted = self._cache.blocks(self._cache.ids(self._stored_by))
            if not torch.equal(self._cache.blocks(self._cache.ids(target)), wanted):
                raise WrongBytesError("other bytes were loaded than had been stored")
        return seconds

    def _chunks(self, number: int) -> list[Chunk]:
        return [
            Chunk(
                Key(n.to_bytes(32, "little") + bytes(4)),
                Location(0, n * self._slot_bytes, self._slot_bytes),
                0,
                ids,
                0,
            )
            for n, ids in enumerate(self._cache.ids(number))
        ]

    def _job(self, chunks: Sequence[Chunk], *, is_store: bool) -> float:
        self._jobs += 1
        self._scene.sync()
        begin = time.perf_counter()
        (self._engine.submit_store if is_store else self._engine.submit_load)(self._jobs, chunks)
        while not (results := self._engine.finished()):
            if time.perf_counter() - begin > JOB_TIMEOUT_S:
                raise RuntimeError(f"a job has not ended within {JOB_TIMEOUT_S:.0f} s")
            time.sleep(0.0002)
        seconds = time.perf_counter() - begin
        if set(results[0].outcomes) != {Outcome.OK}:
            raise RuntimeError(f"not every chunk is OK: {'; '.join(results[0].errors) or results[0].outcomes}")
        return seconds


@contextlib.contextmanager
def driven(scene: Scene, cache: Cache, kind: Kind, name: str) -> Iterator[Driven]:
    """An engine that is closed in the end, with its slab. Raises NixlOffloadError where this way cannot be gone."""
    slot_bytes = cache.layout.slot_bytes(0)
    path = scene.directory / f"{name}.slab"
    with contextlib.ExitStack() as stack:
        mover = scene.mover(kind.mover)
        stack.callback(mover.close)
        extent_bytes = align_up(slot_bytes, 64 << 10)
        slab = SlabFile(path, -(-cache.chunks * slot_bytes // extent_bytes) * extent_bytes, extent_bytes)
        slab.open()
        stack.callback(path.unlink, missing_ok=True)
        stack.callback(slab.close)
        rank = ChainEngine(1)
        engine = Engine(
            table=rank.table,
            tensors=cache.tensors,
            layout=cache.layout,
            link=SlabLink(slab, mover, time.monotonic),
            rank_namespace=bytes(32),
            staging_bytes=max(2 * slot_bytes, scene.scale.total_bytes),
            direct_min_extent_bytes=kind.direct_min_extent_bytes,
            device=scene.device,
            staging=kind.staging,
        )
        rank.join(0, engine)
        stack.callback(rank.close)
        yield Driven(scene, cache, rank, slot_bytes)
