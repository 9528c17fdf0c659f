"""Device to page-locked memory and back: the packer, which gathers, sums and scatters by kernels, against a plain copy.

Threading: one thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from benchmarks.gpu.rounds import Row, Run, WrongBytesError, contest, unit
from benchmarks.gpu.scene import PIECES_BYTES, Cache, Scene
from nixl_offload.engine.bus_packer import BusPacker
from nixl_offload.engine.packer import Packer, pages_of
from nixl_offload.engine.streams import Fence

PLAIN = "plain copy"


def measure(scene: Scene) -> Iterator[Row]:
    """Rows of part ``bus``: each byte counted once, so a gather reads and writes device memory beside the bus."""
    for number, piece_bytes in enumerate(PIECES_BYTES):
        cache = Cache(scene, piece_bytes)
        ways = _ways(scene, cache)
        for step, (direction, candidates) in enumerate(ways.items()):
            deadline_s = scene.share(2 * number + step, 2 * len(PIECES_BYTES))
            found = contest(candidates, cache.total_bytes, scene.scale.rounds, deadline_s)
            for name in candidates:
                yield found.row("bus", direction, name, unit(piece_bytes), PLAIN)


def _ways(scene: Scene, cache: Cache) -> dict[str, dict[str, Run]]:
    packer: Packer = BusPacker(cache.tensors, pages_of(cache.layout), scene.device)
    slots = [scene.locked(cache.total_bytes) for _ in range(2)]
    flat = [scene.noise(cache.total_bytes) for _ in range(2)]

    def parts(number: int) -> list[tuple[object, object]]:
        rows = slots[number % 2].numpy().reshape(cache.chunks, -1, cache.block_bytes)
        return list(zip(cache.ids(number), rows, strict=True))

    def gather(number: int) -> float:
        begin = time.perf_counter()
        _settle(packer.gather_many(0, parts(number), packer.fence()))  # type: ignore[arg-type]
        seconds = time.perf_counter() - begin
        if not number:
            arrived = slots[0].view(-1, cache.block_bytes)
            if not torch.equal(arrived, cache.blocks(cache.ids(0)).cpu()):
                raise WrongBytesError("other bytes were gathered than lie in the blocks")
        return seconds

    def scatter(number: int) -> float:
        begin = time.perf_counter()
        _settle(packer.scatter_many(0, parts(number), packer.fence()))  # type: ignore[arg-type]
        seconds = time.perf_counter() - begin
        if not number and not torch.equal(slots[0].view(-1, cache.block_bytes), cache.blocks(cache.ids(0)).cpu()):
            raise WrongBytesError("other bytes lie in the blocks than were scattered")
        return seconds

    def plain(number: int, *, out: bool) -> float:
        begin = time.perf_counter()
        device, host = flat[number % 2], slots[number % 2]
        if out:
            host.copy_(device, non_blocking=True)
        else:
            device.copy_(host, non_blocking=True)
        scene.sync()
        return time.perf_counter() - begin

    return {
        "gather": {
            PLAIN: lambda number: plain(number, out=True),
            "packer": gather,
        },
        "scatter": {
            PLAIN: lambda number: plain(number, out=False),
            "packer": scatter,
        },
    }


def _settle(fence: Fence) -> None:
    while not fence.done():
        pass
