"""Device to page-locked memory and back: the packer, which gathers, sums and scatters by kernels, against a plain copy.

Each byte is counted once, so a gather reads and writes device memory beside the bus. Threading: one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.bench import PIECES_BYTES, Cache, Row, Run, Scene, WrongBytesError, contest
from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.packer import pages_of

PLAIN = "plain copy"


def measure(scene: Scene) -> Iterator[Row]:
    """Yield rows of part ``bus``."""
    for number, piece_bytes in enumerate(PIECES_BYTES):
        cache = Cache(scene, piece_bytes)
        for step, (direction, candidates) in enumerate(_directions(scene, cache).items()):
            deadline_s = scene.share(2 * number + step, 2 * len(PIECES_BYTES))
            found = contest(candidates, cache.total_bytes, scene.scale.rounds, deadline_s)
            yield from found.rows("bus", direction, piece_bytes, PLAIN)


def _directions(scene: Scene, cache: Cache) -> dict[str, dict[str, Run]]:
    packer = DevicePacker(cache.tensors, pages_of(cache.layout), scene.device)
    host = [torch.zeros(cache.total_bytes, dtype=torch.uint8, pin_memory=scene.device.page_locks) for _ in range(2)]
    flat = [scene.noise(cache.total_bytes) for _ in range(2)]

    def packed(move: Callable[..., Any]) -> Run:
        def run(number: int) -> float:
            rows = host[number % 2].numpy().reshape(cache.chunks, -1, cache.block_bytes)
            begin_s = time.perf_counter()
            fence = move(0, list(zip(cache.ids(number), rows, strict=True)), packer.fence())
            while not fence.done():
                pass
            seconds = time.perf_counter() - begin_s
            blocks = cache.blocks(cache.ids(number)).cpu() if not number else None
            if blocks is not None and not torch.equal(host[0].view(-1, cache.block_bytes), blocks):
                raise WrongBytesError("host memory and blocks differ after the round")
            return seconds

        return run

    def plain(number: int, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> float:
        begin_s = time.perf_counter()
        targets[number % 2].copy_(sources[number % 2], non_blocking=True)
        scene.sync()
        return time.perf_counter() - begin_s

    return {
        "gather": {PLAIN: lambda number: plain(number, host, flat), "packer": packed(packer.gather_many)},
        "scatter": {PLAIN: lambda number: plain(number, flat, host), "packer": packed(packer.scatter_many)},
    }
