"""A slot of a slab that was written over when the power went: every mixture of what was there, by sectors of 512 bytes,
and every chunk that an index might say is there.

Of a header page few sectors differ, so the mixtures of two images are few enough to try all of them; of three those in
which the header page is one's, or zeros, and the payload is mixed by pairs of sectors.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.engine import Chunk
from nixl_offload.types import Location
from nixl_offload.types import Outcome as Fate
from tests.prove.cells import Cell, Outcome
from tests.prove.power.disk import SECTOR
from tests.prove.server import EMPTY, REGIONS, Server, config_of, key_of, slab
from tests.unit.engine_rig import CHUNK_BLOCKS

SIZE = 8192
"""Of the smaller group: a header page and a page of payload."""
GROUP, FIRST, SECOND = 1, 1, 3
"""Chunks of that group."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Which images a slot may hold parts of: what was never written is zeros."""

    images: tuple[int | None, ...]
    verify: str = "checksum"
    most: int | None = None
    """How many are tried; None: all."""


MIXTURES = {
    "new over nothing": Mixture((None, FIRST)),
    "new over old": Mixture((FIRST, SECOND)),
    "new over old over nothing": Mixture((None, FIRST, SECOND)),
}


def page_cells() -> Iterator[Cell]:
    """Return the cells."""
    for name, mixture in MIXTURES.items():
        yield Cell(f"sectors/{name}", partial(run, mixture), limit_s=300.0)


def run(mixture: Mixture) -> Outcome:
    """Load both chunks from each mixture."""
    config = config_of(slab(Path("slab").absolute())).model_copy(update={"verify": mixture.verify})
    server = Server(config)
    try:
        return _tried(server, mixture)
    finally:
        server.close()


def _tried(server: Server, mixture: Mixture) -> Outcome:
    place = server.serving[0].place
    path = Path(place.directory) / "rank-00000.slab"  # type: ignore[union-attr]
    images = [bytes(SIZE) if number is None else _image(server, path, number) for number in mixture.images]
    outcome, tried, whole = Outcome(), 0, 0
    slots = range(REGIONS // 2)
    file = os.open(path, os.O_RDWR)
    states = itertools.islice(_mixed(images), mixture.most)
    while some := list(itertools.islice(states, len(slots))):
        for slot, state in zip(slots, some, strict=False):
            os.pwrite(file, state, slot * SIZE)
        found = _load(server, len(some))
        for slot, state in enumerate(some):
            for number, (fate, rows) in zip((FIRST, SECOND), found[slot], strict=True):
                tried += 1
                whole += fate is Fate.OK
                if fate is Fate.OK and not np.array_equal(rows, server.payload(number, 0)):
                    outcome.wrong.append(
                        f"chunk {number} was loaded, not as stored, of a slot that holds {_told(state, images)}"
                    )
                if fate is not Fate.OK and (rows != EMPTY).any():
                    outcome.wrong.append(f"blocks were written to by a load that {fate.value}")
    os.close(file)
    outcome.counts = {"loads": tried, "whole": whole}
    return outcome


def _mixed(images: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the mixtures."""
    if len(images) < 3:
        yield from _products(images, 0, SECTOR)
        return
    for header in images:
        yield from (header[:HEADER_BYTES] + payload for payload in _products(images, HEADER_BYTES, 2 * SECTOR))


def _products(images: Sequence[bytes], begin: int, unit: int) -> Iterator[bytes]:
    pieces = [dict.fromkeys(image[at : at + unit] for image in images) for at in range(begin, SIZE, unit)]
    return (b"".join(chosen) for chosen in itertools.product(*pieces))


def _image(server: Server, path: Path, number: int) -> bytes:
    """Return what the engine writes of a chunk."""
    (rank,) = server.ranks
    rank.fill(_blocks(0), GROUP, server.payload(number, 0))
    rank.chain.submit_store(number, [_chunk(number, 0, 0)])
    (fate,) = _end(server).pop(number)
    assert fate is Fate.OK
    with path.open("rb") as file:
        return file.read(SIZE)


def _load(server: Server, slots: int) -> list[list[tuple[Fate, np.ndarray]]]:
    """Load both chunks from each slot, whatever is there."""
    (rank,) = server.ranks
    asked = [(slot, number) for slot in range(slots) for number in (FIRST, SECOND)]
    for lane in range(len(asked)):
        rank.fill(_blocks(lane), GROUP, EMPTY)
    rank.chain.submit_load(0, [_chunk(number, slot, lane) for lane, (slot, number) in enumerate(asked)])
    fates = _end(server)[0]
    rows = [(fate, rank.read(_blocks(lane), GROUP)) for lane, fate in enumerate(fates)]
    return [rows[at : at + 2] for at in range(0, len(rows), 2)]


def _chunk(number: int, slot: int, lane: int) -> Chunk:
    blocks = np.array(_blocks(lane), dtype=np.int32)
    return Chunk(key_of(number), Location(0, slot * SIZE, SIZE), GROUP, blocks, 0)


def _blocks(lane: int) -> range:
    return range(lane * CHUNK_BLOCKS, (lane + 1) * CHUNK_BLOCKS)


def _end(server: Server) -> dict[int, tuple[Fate, ...]]:
    (rank,) = server.ranks
    while not (done := rank.chain.finished()):
        time.sleep(0.0002)
    return {one.job_id: one.outcomes for one in done}


def _told(state: bytes, images: Sequence[bytes]) -> str:
    """Return which image each sector is of, by numbers."""
    sectors = range(0, SIZE, SECTOR)
    return "".join(
        str(next(n for n, it in enumerate(images) if it[at : at + SECTOR] == state[at : at + SECTOR])) for at in sectors
    )
